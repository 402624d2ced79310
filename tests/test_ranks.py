"""The helper itself: ranks see each other, and one that fails is told."""

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks


def add_ranks(offset: int) -> tuple[int, float]:
    total = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(total)
    return dist.get_rank(), float(total)


def fail_on_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank one is not well")


def test_ranks_meet_and_results_come_by_rank() -> None:
    assert run_ranks(3, add_ranks, 10) == [(0, 33.0), (1, 33.0), (2, 33.0)]


def test_a_failing_rank_is_told() -> None:
    with pytest.raises(RuntimeError, match="rank one is not well"):
        run_ranks(2, fail_on_one)
