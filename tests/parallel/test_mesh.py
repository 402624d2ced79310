"""Groups of a plan against tables written by hand, and that the ranks of a group really meet."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from vgen.parallel.mesh import KINDS, build_mesh
from vgen.parallel.plans import ParallelPlan

# data, cfg, ulysses and vae size; then the groups of more than one rank, over all replicas.
FOUR = {
    (1, 2, 2, 4): {"cfg": [[0, 2], [1, 3]], "ulysses": [[0, 1], [2, 3]], "vae": [[0, 1, 2, 3]]},
    (1, 2, 2, 3): {"cfg": [[0, 2], [1, 3]], "ulysses": [[0, 1], [2, 3]], "vae": [[0, 1, 2]]},
    (2, 2, 1, 1): {"cfg": [[0, 1], [2, 3]], "replica": [[0, 1], [2, 3]]},
    (2, 1, 2, 2): {"ulysses": [[0, 1], [2, 3]], "vae": [[0, 1], [2, 3]], "replica": [[0, 1], [2, 3]]},
    (4, 1, 1, 1): {"replica": []},
    (1, 4, 1, 1): {"cfg": [[0, 1, 2, 3]]},
    (1, 1, 2, 4): {"ulysses": [[0, 1]], "vae": [[0, 1, 2, 3]]},
    (1, 1, 1, 4): {"vae": [[0, 1, 2, 3]]},
}
SIX = {
    (1, 2, 3, 6): {"cfg": [[0, 3], [1, 4], [2, 5]], "ulysses": [[0, 1, 2], [3, 4, 5]], "vae": [[0, 1, 2, 3, 4, 5]]},
    (1, 3, 2, 1): {"cfg": [[0, 2, 4], [1, 3, 5]], "ulysses": [[0, 1], [2, 3], [4, 5]]},
    (3, 2, 1, 2): {name: [[0, 1], [2, 3], [4, 5]] for name in ("cfg", "vae", "replica")},
    (2, 3, 1, 2): {"cfg": [[0, 1, 2], [3, 4, 5]], "vae": [[0, 1], [3, 4]], "replica": [[0, 1, 2], [3, 4, 5]]},
    (1, 2, 2, 6): {"cfg": [[0, 2], [1, 3]], "ulysses": [[0, 1], [2, 3]], "vae": [[0, 1, 2, 3, 4, 5]]},
}  # fmt: skip
# What is None in a plan: (cfg_rank, ulysses_rank) and vae_rank, by rank.
PLACES: dict[tuple[int, ...], list[tuple[int, int | None, int | None, int | None]]] = {
    (1, 2, 2, 3): [(0, 0, 0, 0), (0, 0, 1, 1), (0, 1, 0, 2), (0, 1, 1, None)],
    (1, 1, 2, 4): [(0, 0, 0, 0), (0, 0, 1, 1), (0, None, None, 2), (0, None, None, 3)],
    (2, 1, 2, 2): [(0, 0, 0, 0), (0, 0, 1, 1), (1, 0, 0, 0), (1, 0, 1, 1)],
    (4, 1, 1, 1): [(0, 0, 0, 0), (1, 0, 0, 0), (2, 0, 0, 0), (3, 0, 0, 0)],
    (2, 3, 1, 2): [
        (0, 0, 0, 0), (0, 1, 0, 1), (0, 2, 0, None), (1, 0, 0, 0), (1, 1, 0, 1), (1, 2, 0, None),
    ],
    (1, 2, 2, 6): [
        (0, 0, 0, 0), (0, 0, 1, 1), (0, 1, 0, 2), (0, 1, 1, 3), (0, None, None, 4), (0, None, None, 5),
    ],
}  # fmt: skip


def describe(sizes: list[tuple[int, ...]]) -> list[dict[str, Any]]:
    """By plan: this rank's place, and for each group its members, its own rank there and the sum over 2**rank."""
    seen = []
    for one in sizes:
        mesh = build_mesh(ParallelPlan(*one), dist.get_world_size())
        groups: dict[str, Any] = {}
        for kind in KINDS:
            group = getattr(mesh, kind)
            if group is None:
                continue
            total = torch.tensor(2 ** dist.get_rank())
            dist.all_reduce(total, group=group)
            groups[kind] = (dist.get_process_group_ranks(group), dist.get_rank(group), int(total))
        if mesh.replica is None:
            assert mesh.patient is None
        else:
            assert mesh.patient is not mesh.replica
            assert dist.get_process_group_ranks(mesh.patient) == dist.get_process_group_ranks(mesh.replica)
        mesh.wait_for_replica()
        place = (mesh.data_rank, mesh.cfg_rank, mesh.ulysses_rank, mesh.vae_rank)
        seen.append({"place": place, "groups": groups})
    wrong = dist.get_world_size() + 1
    with pytest.raises(ValueError, match=f"the plan has {wrong} rank"):
        build_mesh(ParallelPlan(vae_size=wrong), wrong)
    with pytest.raises(ValueError, match="the plan has 1 rank"):
        build_mesh(ParallelPlan(), dist.get_world_size())
    with pytest.raises(ValueError, match="is above the 1 rank"):
        build_mesh(ParallelPlan(data_size=2, vae_size=4), 4)
    return seen


@pytest.mark.parametrize("tables", [FOUR, SIX], ids=["four", "six"])
def test_every_rank_meets_the_members_of_its_groups(tables: dict[tuple[int, ...], dict[str, list[list[int]]]]) -> None:
    world_size = 4 if tables is FOUR else 6
    by_rank = run_ranks(world_size, describe, list(tables))
    for index, (sizes, table) in enumerate(tables.items()):
        table = {"replica": [list(range(world_size))]} | table
        for rank, seen in enumerate(by_rank):
            expected = {
                kind: (members, members.index(rank), sum(2**member for member in members))
                for kind, groups in table.items()
                for members in groups
                if rank in members
            }
            assert seen[index]["groups"] == expected, (sizes, rank)
            if sizes in PLACES:
                assert seen[index]["place"] == PLACES[sizes][rank], (sizes, rank)
            cfg, ulysses = (expected.get(kind, (None, 0))[1] for kind in ("cfg", "ulysses"))
            if seen[index]["place"][1] is not None:
                assert seen[index]["place"][1:3] == (cfg, ulysses), (sizes, rank)


def test_one_rank_needs_no_process_group() -> None:
    assert not dist.is_initialized()
    mesh = build_mesh(ParallelPlan(), 1)
    assert (mesh.data_rank, mesh.cfg_rank, mesh.ulysses_rank, mesh.vae_rank) == (0, 0, 0, 0)
    assert [getattr(mesh, kind) for kind in KINDS] == [None] * 4
    mesh.wait_for_replica()
    with pytest.raises(ValueError, match=r"the plan has 2 rank\(s\), the job 2 and its process group 1; start as many"):
        build_mesh(ParallelPlan(cfg_size=2), 2)
