"""Seconds and peak memory of the stages of a run.

A stage's seconds are its own: those of a stage inside it count there only, so the stages of a run add up. The device is
waited for where a stage begins and ends and nowhere else; steps are marked with CUDA events, read once at the end.
"""

import contextlib
import itertools
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from launchers.notes import note_stage
from vgen.metrics.memory import peak_device_gib, peak_host_gib, reset_peak_device


class Timer(Protocol):
    def __call__(self, stage: str) -> AbstractContextManager[None]:
        """`with timer("denoise"):` counts the body as that stage."""

    def step(self) -> None:
        """Mark the end of a step of the stage that is running."""


class NullTimer:
    """Measures nothing and waits for nothing."""

    def __call__(self, stage: str) -> AbstractContextManager[None]:  # noqa: ARG002
        return contextlib.nullcontext()

    def step(self) -> None:
        return


null_timer = NullTimer()


class StageTimer:
    """Times one request, or the parts of a job around its requests, from construction on.

    Stages may nest, repeat, and stay open in a generator; each sums up. Memory is that of tensors on a CUDA device; a
    stage's peak includes the stages inside it.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._open: list[str] = []
        self._seconds: dict[str, float] = {}
        self._peaks: dict[str, float] = {}
        self._peak = 0.0
        self._marks: dict[str, list[list[Any]]] = {}
        self._wait()
        reset_peak_device(self._device)
        self._started = self._last = time.perf_counter()

    @contextlib.contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        self._wait()
        self._settle()
        self._open.append(stage)
        note_stage(stage)
        self._marks.setdefault(stage, []).append([self._mark()])
        try:
            yield
        except BaseException as error:
            if not isinstance(error, GeneratorExit) and not hasattr(error, "vgen_stage"):
                with contextlib.suppress(AttributeError):  # a class with slots; then the stage is not known
                    error.vgen_stage = stage  # type: ignore[attr-defined]
            with contextlib.suppress(Exception):  # a broken device would hide the error that broke it
                self._close(stage)
            raise
        else:
            self._close(stage)

    def _close(self, stage: str) -> None:
        try:
            self._wait()
        finally:
            self._settle()
            # A stage held open by a generator may end after one that began later.
            del self._open[len(self._open) - 1 - self._open[::-1].index(stage)]
            note_stage(self.current)

    def step(self) -> None:
        if self._open:
            self._marks[self._open[-1]][-1].append(self._mark())

    @property
    def current(self) -> str | None:
        """The innermost stage that is running."""
        return self._open[-1] if self._open else None

    def timings(self) -> dict[str, Any]:
        """Seconds by stage, `total` since construction, and `<stage>_steps` (a list) for stages with steps."""
        self._wait()
        steps = {f"{stage}_steps": self._step_seconds(runs) for stage, runs in self._marks.items()}
        with_steps = {name: seconds for name, seconds in steps.items() if seconds}
        return {**self._seconds, "total": time.perf_counter() - self._started, **with_steps}

    def memory_gib(self) -> dict[str, float]:
        """Peak by stage; empty on a device whose memory is not counted."""
        return dict(self._peaks)

    def peak_gib(self) -> float:
        """Peak since construction: of the CUDA device, else of this process's resident memory since its start."""
        device = peak_device_gib(self._device)
        return peak_host_gib() if device is None else max(self._peak, device)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _settle(self) -> None:
        """Give the time since the last border to the innermost stage and the peak since then to all open ones."""
        now = time.perf_counter()
        if self._open:
            stage = self._open[-1]
            self._seconds[stage] = self._seconds.get(stage, 0.0) + now - self._last
        self._last = now
        peak = peak_device_gib(self._device)
        if peak is None:
            return
        self._peak = max(self._peak, peak)
        for stage in self._open:
            self._peaks[stage] = max(self._peaks.get(stage, 0.0), peak)
        reset_peak_device(self._device)

    def _step_seconds(self, runs: list[list[Any]]) -> list[float]:
        pairs = itertools.chain.from_iterable(itertools.pairwise(marks) for marks in runs)
        if self._device.type == "cuda":
            return [begin.elapsed_time(end) / 1000 for begin, end in pairs]
        return [end - begin for begin, end in pairs]


def stage_of(error: BaseException) -> str | None:
    """The innermost stage in which `error`, or what caused it, was raised; None if it was in none."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        if (stage := getattr(current, "vgen_stage", None)) is not None:
            return str(stage)
        current = current.__cause__ or current.__context__
    return None


# ---------------------------------------------------------------- putting timings together


def summary(requests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """`cold`: the timings of the first request. `warm`: the median of the later ones; None where there are none."""
    cold = dict(requests[0]) if requests else None
    return {"cold": cold, "warm": _combine(requests[1:], statistics.median)}


def reduce_max(ranks: Sequence[Any]) -> Any:
    """The largest of each number over ranks, in dicts and lists alike; None counts as not measured."""
    return _combine(ranks, max)


def timings_record(job: Mapping[str, Any], requests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The record's `timings_s` of one rank.

    Stages hold the sum over requests and the steps of all of them, as a job's total does; `cold` and `warm` hold one
    request's. Where `job` measures the same stage (`total`), it is the one that counts.
    """
    stages: dict[str, Any] = {}
    for request in requests:
        for name, value in request.items():
            stages[name] = stages[name] + value if name in stages else value
    return {**stages, **job, **summary(requests)}


def _combine(values: Sequence[Any], pick: Any) -> Any:
    known = [value for value in values if value is not None]
    if not known:
        return None
    if isinstance(known[0], Mapping):
        names = dict.fromkeys(name for value in known for name in value)
        return {name: _combine([value.get(name) for value in known], pick) for name in names}
    if isinstance(known[0], list):
        return [_combine(items, pick) for items in itertools.zip_longest(*known)]
    return pick(known)
