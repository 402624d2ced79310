"""Recording and replaying on a CUDA device, behind the few calls that ``CudaGraphs`` makes.

Errors of a capture are looked for in the capturing thread only (``capture_error_mode="thread_local"``). The default
also fails for what other threads do meanwhile: NCCL's watchdog asks for its events, a writer of videos copies frames,
a pinned allocation is made for the next prompt. None of these is part of the recording.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class Recording(Protocol):
    def replay(self) -> None: ...

    def reset(self) -> None: ...


@dataclass(frozen=True, eq=False)
class Captured:
    """``outputs``: tensors that a replay writes to. ``num_bytes``: by which the pool grew."""

    recording: Recording
    outputs: Any
    num_bytes: int


class Backend(Protocol):
    def is_capturing(self) -> bool:
        """Whether somebody is recording right now; a graph cannot be replayed into another one."""

    def new_pool(self) -> Hashable:
        """A handle of a pool that no graph uses yet."""

    def capture(self, run: Callable[[], Any], warmup: int, pool: Hashable) -> Captured:
        """Run ``run`` ``warmup`` times and record it once; the recording has not run yet."""

    def wait(self) -> None:
        """Until nothing replays any more."""

    def trim(self) -> None:
        """Give back memory that nothing uses."""

    def pool_bytes(self, pool: Hashable) -> int:
        """Bytes that the pool holds of the device's memory."""


class CudaBackend:
    """One stream of ``device`` for all warm-ups and captures: graphs share a pool's memory only on one stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = torch.empty(0, device=device).device
        self._stream = torch.cuda.Stream(self._device)

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def new_pool(self) -> Hashable:
        handle: Hashable = torch.cuda.graph_pool_handle()
        return handle

    def capture(self, run: Callable[[], Any], warmup: int, pool: Hashable) -> Captured:
        with torch.cuda.device(self._device):
            self._warm_up(run, warmup)
            before = torch.cuda.memory_reserved(self._device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(
                graph,
                pool=pool,  # type: ignore[arg-type]
                stream=self._stream,
                capture_error_mode="thread_local",
            ):
                outputs = run()
            return Captured(graph, outputs, torch.cuda.memory_reserved(self._device) - before)

    def _warm_up(self, run: Callable[[], Any], times: int) -> None:
        """Compiles, chooses kernels and makes communicators, none of which a recording may do."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _ in range(times):
                run()
        self.wait()
        # Before memory is counted; the capture empties the cache once more.
        torch.cuda.empty_cache()

    def wait(self) -> None:
        torch.cuda.synchronize(self._device)

    def trim(self) -> None:
        torch.cuda.empty_cache()

    def pool_bytes(self, pool: Hashable) -> int:
        segments = torch.cuda.memory_snapshot()
        return sum(one["total_size"] for one in segments if tuple(one["segment_pool_id"]) == pool)
