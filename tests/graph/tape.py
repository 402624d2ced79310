"""A backend of CUDA graphs without CUDA: a tape of operators with what makes a recording dangerous.

Replaying runs the same operators on the same memory, whatever Python would do now: tensors that were swapped are read
where they were, flags are as they were, and outputs are written where they were.
"""

import itertools
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from vgen.graph.backend import Captured
from vgen.graph.tree import map_tensors


class Tape(TorchDispatchMode):
    """``steps``: operators with aliases of their arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.steps.append((func, *tree_map_only(Tensor, torch.detach, (args, kwargs or {}, result))))
        return result

    def replay(self) -> None:
        for func, args, kwargs, result in self.steps:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
                elif hasattr(new, "wait"):
                    new.wait()

    def reset(self) -> None:
        self.steps = []


class TapeBackend:
    """``runs``: of the callable by Python. Every capture counts as ``GRAPH_BYTES`` of its pool."""

    GRAPH_BYTES = 1000

    def __init__(self) -> None:
        self.capturing = False
        self.runs = 0
        self.trims = 0
        self.pools: list[Hashable] = []
        self.tapes: list[Tape] = []
        self._numbers = itertools.count()

    def is_capturing(self) -> bool:
        return self.capturing

    def new_pool(self) -> Hashable:
        return next(self._numbers)

    def capture(self, run: Callable[[], Any], warmup: int, pool: Hashable) -> Captured:
        self.pools.append(pool)
        for _ in range(warmup):
            run()
        with Tape() as tape:
            outputs = run()
        self.runs += warmup + 1
        # Recorded, not run.
        map_tensors(outputs, lambda _, tensor: tensor.fill_(float("nan")))
        self.tapes.append(tape)
        return Captured(tape, outputs, self.GRAPH_BYTES)

    def wait(self) -> None:
        return

    def trim(self) -> None:
        self.trims += 1

    def pool_bytes(self, pool: Hashable) -> int:
        held = zip(self.pools, self.tapes, strict=True)
        return self.GRAPH_BYTES * sum(bool(tape.steps) for one, tape in held if one == pool)


class Rerun:
    """Runs the callable again and copies its results to where the first ones are."""

    def __init__(self, run: Callable[[], Any], outputs: Any) -> None:
        self.run = run
        self.outputs = outputs

    def replay(self) -> None:
        for old, new in zip(tree_leaves(self.outputs), tree_leaves(self.run()), strict=True):
            if isinstance(old, Tensor):
                old.copy_(new)

    def reset(self) -> None:
        self.outputs = None


class RerunBackend(TapeBackend):
    """Of code that does not run while a tape records."""

    def capture(self, run: Callable[[], Any], warmup: int, pool: Hashable) -> Captured:
        self.pools.append(pool)
        for _ in range(warmup):
            run()
        outputs = run()
        return Captured(Rerun(run, outputs), outputs, self.GRAPH_BYTES)
