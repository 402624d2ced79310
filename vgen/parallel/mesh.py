"""The process groups of a parallel plan, and one rank's place in each."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup

from vgen.parallel.plans import ParallelPlan, layout_reasons
from vgen.parallel.watch import collective, know_timeout

KINDS = ("cfg", "ulysses", "vae", "replica")

# Between the first and the last rank at a collective of a running request. A job has to end within a minute of a stall:
# this, the supervisor's two graces and what it takes to notice.
TIMEOUT_S = 45.0
# Where a rank may load weights, compile or write a file meanwhile; torch's own limit.
PATIENCE_S = 1800.0


@dataclass(frozen=True, eq=False)
class Mesh:
    """One rank's place. A rank is None outside the ranks that denoise (``cfg_rank``, ``ulysses_rank``) or decode.

    A group is None where this rank is in none of more than one rank: nothing to do, and never to be given to a
    collective, for which None is all ranks. ``cfg``: the ranks with the same tokens and other passes; ``ulysses``: with
    the same passes and other tokens; ``vae``: that decode together; ``replica``: all that work on the same prompt.

    A rank that waits in one of them for longer than ``timeout_s`` of ``build_mesh`` fails. ``patient`` has the ranks of
    ``replica`` and waits for long: no place for tensors of a device, since it is gloo's everywhere.
    """

    data_rank: int
    cfg_rank: int | None
    ulysses_rank: int | None
    vae_rank: int | None
    cfg: ProcessGroup | None
    ulysses: ProcessGroup | None
    vae: ProcessGroup | None
    replica: ProcessGroup | None
    patient: ProcessGroup | None = None

    def wait_for_replica(self) -> None:
        """Wait on the host, for long if need be, until all ranks of the replica are here; with one, return at once.

        To be called by all of them before they meet in other groups, whenever one may be late: after weights are
        loaded, before each request, and where some ranks only decode, before they are given latents.
        """
        if self.patient is not None:
            with collective("wait for the replica", self.patient):
                dist.barrier(group=self.patient)


def build_mesh(plan: ParallelPlan, world_size: int, timeout_s: float = TIMEOUT_S) -> Mesh:
    """The place of this rank among ``world_size``, and its groups; to be called by all ranks, with the same plan.

    Every rank makes every group, in one order, as ``new_group`` needs it. Groups of the same ranks are one group.
    A world of one rank needs no process group. ``timeout_s``: seconds that a rank waits for the others in a collective
    of the groups, after which it fails: gloo raises RuntimeError in it, NCCL's watchdog aborts its process.

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
    # First, and for long: to make a group is to meet all ranks, and one of them may have been kept (by a tracker, say).
    patient = _make_groups(group_ranks(plan, "replica"), PATIENCE_S, backend="gloo")
    made: dict[tuple[int, ...], ProcessGroup] = {}
    for kind in KINDS:
        made |= _make_groups([ranks for ranks in group_ranks(plan, kind) if ranks not in made], timeout_s)
    own = {kind: ranks for kind in KINDS for ranks in group_ranks(plan, kind) if rank in ranks}
    data_rank, place = divmod(rank, plan.replica_size)
    cfg_rank, ulysses_rank = divmod(place, plan.ulysses_size)
    denoises = place < plan.denoise_size
    return Mesh(
        data_rank,
        cfg_rank if denoises else None,
        ulysses_rank if denoises else None,
        vae_rank=place if place < plan.vae_size else None,
        **{kind: made.get(own.get(kind, ())) for kind in KINDS},
        patient=patient.get(own["replica"]),
    )


def _make_groups(
    groups: Sequence[tuple[int, ...]], timeout_s: float, backend: str | None = None
) -> dict[tuple[int, ...], ProcessGroup]:
    """A group for all of ``groups`` that have more than one rank, by its ranks."""
    made = {}
    for ranks in groups:
        if len(ranks) > 1:
            with collective("groups of the mesh"):
                made[ranks] = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s), backend=backend)
            if dist.get_rank() in ranks:
                know_timeout(made[ranks], timeout_s)
    return made


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
