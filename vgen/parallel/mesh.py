"""The process groups of a parallel plan, and one rank's place in each."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup

from vgen.parallel.plans import ParallelPlan, layout_reasons

KINDS = ("cfg", "ulysses", "vae", "replica")


@dataclass(frozen=True, eq=False)
class Mesh:
    """One rank's place. A rank is None outside the ranks that denoise (``cfg_rank``, ``ulysses_rank``) or decode.

    A group is None where this rank is in none of more than one rank: nothing to do, and never to be given to a
    collective, for which None is all ranks. ``cfg``: the ranks with the same tokens and other passes; ``ulysses``: with
    the same passes and other tokens; ``vae``: that decode together; ``replica``: all that work on the same prompt.
    """

    data_rank: int
    cfg_rank: int | None
    ulysses_rank: int | None
    vae_rank: int | None
    cfg: ProcessGroup | None
    ulysses: ProcessGroup | None
    vae: ProcessGroup | None
    replica: ProcessGroup | None


def build_mesh(plan: ParallelPlan, world_size: int) -> Mesh:
    """The place of this rank among ``world_size``, and its groups; to be called by all ranks, with the same plan.

    Every rank makes every group, in one order, as ``new_group`` needs it. Groups of the same ranks are one group.
    A world of one rank needs no process group.

    Raises:
        ValueError: the plan is no layout, or of another number of ranks than ``world_size`` or the process group.
    """
    for sentence in layout_reasons(plan):
        raise ValueError(sentence)
    started = dist.get_world_size() if dist.is_initialized() else 1
    if not plan.world_size == world_size == started:
        raise ValueError(
            f"the plan has {plan.world_size} rank(s), the job {world_size} and its process group {started}; "
            f"start as many ranks as the plan has"
        )
    rank = dist.get_rank() if world_size > 1 else 0
    made: dict[tuple[int, ...], ProcessGroup] = {}
    own: dict[str, ProcessGroup] = {}
    for kind in KINDS:
        for ranks in group_ranks(plan, kind):
            if len(ranks) > 1 and ranks not in made:
                made[ranks] = dist.new_group(ranks)
            if len(ranks) > 1 and rank in ranks:
                own[kind] = made[ranks]
    data_rank, place = divmod(rank, plan.replica_size)
    cfg_rank, ulysses_rank = divmod(place, plan.ulysses_size)
    denoises = place < plan.denoise_size
    return Mesh(
        data_rank,
        cfg_rank if denoises else None,
        ulysses_rank if denoises else None,
        vae_rank=place if place < plan.vae_size else None,
        **{kind: own.get(kind) for kind in KINDS},
    )


def group_ranks(plan: ParallelPlan, kind: str) -> Sequence[tuple[int, ...]]:
    """The groups of ``kind`` over all replicas, each with its global ranks in order."""
    width, denoises = plan.ulysses_size, plan.denoise_size
    firsts = range(0, plan.world_size, plan.replica_size)
    if kind == "cfg":
        return [tuple(range(first + i, first + denoises, width)) for first in firsts for i in range(width)]
    if kind == "ulysses":
        return [tuple(range(first + i, first + i + width)) for first in firsts for i in range(0, denoises, width)]
    size = plan.vae_size if kind == "vae" else plan.replica_size
    return [tuple(range(first, first + size)) for first in firsts]
