"""Guidance over ranks: each runs some of a step's passes, then all have all of them and combine them alike.

Every rank of the group combines the same bits as one rank would with the same arithmetic, so guidance, its rescale
included, and the latents are those of one rank to the last bit, as far as the passes themselves are.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from vgen.parallel.watch import collective

Outputs = tuple[Tensor | None, ...]
"""What a pass predicts, one tensor per stream; None for a stream that is not there."""

RunPasses = Callable[[Mapping[str, Callable[[], Outputs]]], Mapping[str, Outputs]]
"""The passes of a step by name to what each predicts; the serial one is in ``vgen.stages.run_passes``."""


def assign_passes(costs: Mapping[str, float], ranks: int) -> tuple[tuple[str, ...], ...]:
    """The passes of each rank: the longest first, each to the rank with the least to do so far.

    Passes of equal cost keep their order and ranks of equal load take turns from the first on, so all ranks compute the
    same.

    Raises:
        ValueError: there are more ranks than passes.
    """
    if ranks > len(costs):
        raise ValueError(
            f"{ranks} ranks cannot share {len(costs)} pass(es) ({', '.join(costs)}); "
            f"use parallel.cfg_size={len(costs)} or less"
        )
    loads = [0.0] * ranks
    passes: list[list[str]] = [[] for _ in range(ranks)]
    for name in sorted(costs, key=lambda name: -costs[name]):
        least = loads.index(min(loads))
        loads[least] += costs[name]
        passes[least].append(name)
    return tuple(map(tuple, passes))


def exchange(
    outputs: Mapping[str, Outputs], assignment: Sequence[Sequence[str]], group: ProcessGroup | None
) -> Mapping[str, Outputs]:
    """All passes of ``assignment`` on every rank, from ``outputs``, which has this rank's own.

    A stream has one shape and dtype in all passes, and one gather: a rank with fewer passes than another repeats its
    last. The tensors of the result are contiguous. Without a group there is one rank, and ``outputs`` has all passes.
    """
    if group is None:
        return outputs
    own = [outputs[name] for name in assignment[dist.get_rank(group)]]
    turns = max(map(len, assignment))
    own += own[-1:] * (turns - len(own))
    streams = [_gather(stream, group) for stream in zip(*own, strict=True)]
    return {
        name: tuple(None if stream is None else stream[rank][turn] for stream in streams)
        for rank, names in enumerate(assignment)
        for turn, name in enumerate(names)
    }


def _gather(own: Sequence[Tensor | None], group: ProcessGroup) -> list[Tensor] | None:
    """One stream of all ranks' passes: for each rank [passes of a rank, ...]."""
    present = [one for one in own if one is not None]
    if not present:
        return None
    packed = torch.stack(present)
    gathered = [torch.empty_like(packed) for _ in range(group.size())]
    with collective("cfg: passes", group):
        dist.all_gather(gathered, packed, group=group)
    return gathered


def build_run_passes(group: ProcessGroup) -> RunPasses:
    """Passes over the ranks of ``group``, in turns where they are more; a step's only pass is run by all, alike.

    Raises, when called:
        ValueError: there are more ranks than passes, and more than one pass.
    """

    def run_passes(passes: Mapping[str, Callable[[], Outputs]]) -> Mapping[str, Outputs]:
        if len(passes) == 1:
            return {name: run() for name, run in passes.items()}
        assignment = assign_passes(dict.fromkeys(passes, 1.0), group.size())
        mine = assignment[dist.get_rank(group)]
        return exchange({name: passes[name]() for name in mine}, assignment, group)

    return run_passes
