"""A callable whose calls are recorded as CUDA graphs, one for each key, and replayed.

What a recording cannot follow is in its key (``key.py``), in its input buffers (``inputs.py``) or checked at each call
(``weights.py``). Besides, the callable may not wait for the device nor copy from the host, and what it keeps from call
to call, such as tables, has to stay alive as long as the graph: pass it as an argument.
"""

import inspect
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from vgen.graph.agreement import Agreement
from vgen.graph.backend import Captured
from vgen.graph.compile import compile_report
from vgen.graph.errors import GraphError
from vgen.graph.inputs import InputBuffer, InputBuffers, fill
from vgen.graph.key import GraphKey, digest, key_and_tensors
from vgen.graph.pool import GraphPool
from vgen.graph.tree import map_tensors
from vgen.graph.weights import WeightAddresses

log = logging.getLogger(__name__)

OnMiss = Literal["capture", "eager"]


@dataclass(frozen=True)
class GraphStats:
    """What a ``CudaGraphs`` did and holds. The first three count calls: each was a replay, a capture or eager.

    ``stale``: captures dropped since weights had moved. ``capture_s``: seconds of all captures, with their warm-up and
    without what was compiled in it. ``graph_bytes``: by which each live graph enlarged the pool, the oldest first.
    ``pool_bytes``: all of the pool, of others that share it too. ``input_bytes``: of the input buffers.
    """

    replays: int
    captures: int
    eager_calls: int
    evictions: int
    stale: int
    capture_s: float
    graph_bytes: tuple[int, ...]
    pool_bytes: int
    input_bytes: int


@dataclass(frozen=True, eq=False)
class _Graph:
    captured: Captured
    inputs: list[InputBuffer]
    weights: WeightAddresses | None


class CudaGraphs:
    """Call it as ``function``: the first call of a key is captured, later ones are replayed, with the same bits.

    For inference: no gradient passes through. The result is a copy, which the caller may keep; with
    ``clone_outputs=False`` it is the memory that the next replay of the same key overwrites, which two passes of one
    step share. Inside another capture ``function`` is simply called.

    ``weights``: module whose weights ``function`` reads; a graph whose weights have moved is captured anew, or refused
    as any other new key. ``state``: asked at every call for what else belongs to the key. ``constants``: names of
    arguments or fields whose tensors nothing writes to. ``warmup``: eager calls before a capture, at least one.
    ``max_graphs``: the one used longest ago goes first. ``agreement``: with the ranks that ``function`` has collectives
    with; a call that these ranks do not make alike raises.

    Until ``seal`` every new key is captured. Afterwards it is an error with ``strict``; else there is a warning, and it
    is captured or run eagerly as ``on_miss`` says.

    Raises:
        ValueError: ``warmup`` or ``max_graphs`` is below 1.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        pool: GraphPool,
        *,
        signature: inspect.Signature | None = None,
        weights: nn.Module | None = None,
        state: Callable[[], Any] = tuple,
        constants: Collection[str] = (),
        warmup: int = 2,
        max_graphs: int = 8,
        strict: bool = False,
        on_miss: OnMiss = "capture",
        clone_outputs: bool = True,
        agreement: Agreement | None = None,
    ) -> None:
        for name, value in (("warmup", warmup), ("max_graphs", max_graphs)):
            if value < 1:
                raise ValueError(f"graph.{name}={value} is below 1; use graph.{name}=1 or more")
        self._function = function
        self._pool = pool
        self._signature = inspect.signature(function) if signature is None else signature
        self._module = weights
        self._state = state
        self._warmup = warmup
        self._max_graphs = max_graphs
        self._strict = strict
        self._on_miss = on_miss
        self._clone_outputs = clone_outputs
        self._agreement = agreement
        self._sealed = False
        self._buffers = InputBuffers(constants)
        self._graphs: OrderedDict[GraphKey, _Graph] = OrderedDict()
        self._counts = dict.fromkeys(("calls", "replays", "captures", "eager_calls", "evictions", "stale"), 0)
        self._capture_s = 0.0
        pool.owners.add(self)

    def __len__(self) -> int:
        """Graphs held now."""
        return len(self._graphs)

    def __bool__(self) -> bool:
        return True

    @property
    def function(self) -> Callable[..., Any]:
        """What is called without a graph."""
        return self._function

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What ``function`` returns: tensors and None in tuples, lists, mappings or dataclasses.

        Raises:
            GraphError: a new key after ``seal`` with ``strict``; ranks disagree; ``function`` writes to its inputs.
            TypeError: an argument has no part in a key.
        """
        if self._pool.backend.is_capturing():
            return self._function(*args, **kwargs)
        self._counts["calls"] += 1
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        key, tensors = key_and_tensors((), bound.arguments, self._state())
        graph = self._find(key)
        if graph is None:
            decision = self._decide(key)
            if decision == "eager":
                self._counts["eager_calls"] += 1
                return self._function(*args, **kwargs)
            self._counts["captures"] += 1
            graph = self._capture(key, bound, tensors)
        else:
            self._counts["replays"] += 1
            self._graphs.move_to_end(key)
            fill(graph.inputs, tensors)
        graph.captured.recording.replay()
        return self._hand_out(graph.captured.outputs)

    def seal(self) -> None:
        """End of the warm-up: keys that are new from now on are what ``strict`` and ``on_miss`` are about."""
        self._sealed = True

    def clear(self) -> None:
        """Drop all graphs and buffers and give their memory back, as before their weights leave the device."""
        while self._graphs:
            self._drop(next(iter(self._graphs)))

    def stats(self) -> GraphStats:
        counts = {name: count for name, count in self._counts.items() if name != "calls"}
        return GraphStats(
            **counts,
            capture_s=self._capture_s,
            graph_bytes=tuple(graph.captured.num_bytes for graph in self._graphs.values()),
            pool_bytes=self._pool.num_bytes,
            input_bytes=self._buffers.num_bytes,
        )

    def _find(self, key: GraphKey) -> _Graph | None:
        graph = self._graphs.get(key)
        if graph is not None and graph.weights is not None and not graph.weights.unchanged():
            self._counts["stale"] += 1
            del graph
            self._drop(key)
            return None
        return graph

    def _decide(self, key: GraphKey) -> str:
        """What to do with a call that there is no graph of; all ranks the same, or none does anything."""
        decision: str = "capture"
        if self._sealed:
            decision = "refuse" if self._strict else self._on_miss
        call, short = self._counts["calls"], digest(key).hex()[:8]
        if self._agreement is not None:
            self._agreement.check(call, digest(key), decision)
        if decision == "refuse":
            raise GraphError(
                f"call {call} has key {short}, which was not captured during the warm-up, or its weights have moved "
                f"since, and graph.strict=true allows no other; warm up with the same shapes and flags or use "
                f"graph.strict=false"
            )
        if self._sealed:
            log.warning("call %d has key %s, which was not captured during the warm-up: %s", call, short, decision)
        return decision

    def _capture(self, key: GraphKey, bound: inspect.BoundArguments, tensors: list[torch.Tensor]) -> _Graph:
        with compile_report() as compiled:
            started = time.perf_counter()
            graph = self._record(key, bound, tensors)
            elapsed_s = time.perf_counter() - started
        self._capture_s += elapsed_s - compiled.seconds
        return graph

    def _record(self, key: GraphKey, bound: inspect.BoundArguments, tensors: list[torch.Tensor]) -> _Graph:
        # First, so that the pool's memory is free for the new one.
        while len(self._graphs) >= self._max_graphs:
            self._counts["evictions"] += 1
            self._drop(next(iter(self._graphs)))
        arguments, inputs = self._buffers.build(dict(bound.arguments))
        fill(inputs, tensors)
        static = inspect.BoundArguments(self._signature, OrderedDict(arguments))
        versions = [buffer.target._version for buffer in inputs]
        storages = {buffer.target.untyped_storage().data_ptr() for buffer in inputs}

        def run() -> Any:
            outputs = self._function(*static.args, **static.kwargs)
            # What is handed through is copied: the next call overwrites the input.
            return map_tensors(
                outputs, lambda _, one: one.clone() if one.untyped_storage().data_ptr() in storages else one
            )

        captured = self._pool.backend.capture(run, self._warmup, self._pool.handle)
        self._pool.enter()
        weights = None if self._module is None else WeightAddresses(self._module)
        graph = self._graphs[key] = _Graph(captured, inputs, weights)
        if versions != [buffer.target._version for buffer in inputs]:
            del graph, captured
            self._drop(key)
            raise GraphError("the captured call writes to its inputs, which a replay would not see; let it copy them")
        return graph

    def _drop(self, key: GraphKey) -> None:
        graph = self._graphs.pop(key)
        # A graph must not be destroyed while it runs.
        self._pool.backend.wait()
        graph.captured.recording.reset()
        self._pool.leave()
        del graph
        self._pool.backend.trim()

    def _hand_out(self, outputs: Any) -> Any:
        if self._clone_outputs:
            return map_tensors(outputs, lambda _, tensor: tensor.clone())
        map_tensors(outputs, lambda _, tensor: _written(tensor))
        return outputs


def _written(tensor: torch.Tensor) -> torch.Tensor:
    # A replay writes without saying so, and whoever compares versions has to know.
    torch.autograd.graph.increment_version(tensor)
    return tensor
