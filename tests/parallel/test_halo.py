"""Bands, the axis they are cut along, and how lines and bands travel."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.ranks import run_ranks
from vgen.parallel.halo import bands, choose_axis, exchange_lines, gather_bands

CHANNELS_LAST = torch.channels_last_3d
FORMATS = (torch.contiguous_format, CHANNELS_LAST)


@pytest.mark.parametrize("unit", [1, 2, 16])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 8])
def test_bands_cover_all_lines_evenly(ranks: int, unit: int) -> None:
    for units in range(ranks, 5 * ranks + 3):
        cut = bands(unit * units, ranks, unit)
        assert len(cut) == ranks
        assert [line for start, stop in cut for line in range(start, stop)] == list(range(unit * units))
        sizes = [stop - start for start, stop in cut]
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] - sizes[-1] in (0, unit)
        assert all(size % unit == 0 for size in sizes)


def test_34_lines_on_8_ranks() -> None:
    assert [stop - start for start, stop in bands(34, 8)] == [5, 5, 4, 4, 4, 4, 4, 4]


def test_refuses_lines_that_no_ranks_can_share() -> None:
    with pytest.raises(
        ValueError, match=r"6 lines make 3 bands of at least 2, fewer than the 4 ranks .*at most 3 ranks"
    ):
        bands(6, 4, unit=2)
    with pytest.raises(ValueError, match="7 lines cannot be cut at multiples of 2"):
        bands(7, 2, unit=2)


@pytest.mark.parametrize(
    ("height", "width", "ranks", "axis"),
    [
        (44, 80, 2, "width"),
        (44, 80, 4, "width"),
        (44, 80, 8, "width"),
        (80, 44, 8, "height"),
        (60, 104, 8, "width"),
        (32, 32, 4, "height"),
        (16, 17, 8, "height"),  # 2 of 16 lines are less work than 3 of 17
        (3, 5, 4, "width"),  # less work by height, which has too few lines
    ],
)
def test_axis_with_least_work_then_traffic(height: int, width: int, ranks: int, axis: str) -> None:
    assert choose_axis((1, 16, 3, height, width), ranks) == axis


def whole_of(shape: tuple[int, ...], memory_format: torch.memory_format) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape).contiguous(memory_format=memory_format)


def travel() -> list[dict[str, Any]]:
    return [
        {
            **lines(memory_format, dim),
            "gathered": [gathered(memory_format, dim, first) for first in (True, False)],
            "lean": needs_the_whole_and_two_bands(memory_format, dim),
        }
        for memory_format in FORMATS
        for dim in (3, 4)
    ]


def needs_the_whole_and_two_bands(memory_format: torch.memory_format, dim: int) -> bool:
    """Whether gathering to the first rank makes no more there than that, and no more than a band elsewhere."""
    from tests.test_memory import least_peak_of  # here, because it takes each process a second

    rank, ranks = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    assert group is not None
    whole = whole_of((1, 5, 2, 12, 12), memory_format)
    cut = bands(12, ranks)
    start, stop = cut[rank]
    band = whole.narrow(dim, start, stop - start).clone(memory_format=memory_format)
    peak = least_peak_of(lambda: gather_bands(band, cut, dim, group, True, memory_format))
    return peak <= (0 if rank else whole.nbytes + band.nbytes) + band.nbytes


def lines(memory_format: torch.memory_format, dim: int) -> dict[str, Any]:
    """Whether lines at the edges of uneven bands are those of the whole, in the order of the band, and what is None."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole = whole_of((2, 3, 2, 7, 7), memory_format)
    start, stop = bands(7, ranks)[rank]
    band = whole.narrow(dim, start, stop - start).clone(memory_format=memory_format)
    group = dist.group.WORLD
    assert group is not None
    previous, following = exchange_lines(band.narrow(dim, 0, 1), band.narrow(dim, stop - start - 1, 1), group)
    one_way = exchange_lines(band.narrow(dim, 0, 2), None, group)
    right = [
        previous is None if rank == 0 else torch.equal(previous, whole.narrow(dim, start - 1, 1)),
        following is None if rank == ranks - 1 else torch.equal(following, whole.narrow(dim, stop, 1)),
        one_way[0] is None,
        one_way[1] is None if rank == ranks - 1 else torch.equal(one_way[1], whole.narrow(dim, stop, 2)),
        exchange_lines(None, None, group) == (None, None),
    ]
    came = [x for x in (previous, following, one_way[1]) if x is not None]
    return {"right": right, "order": all(x.is_contiguous(memory_format=memory_format) for x in came)}


def gathered(memory_format: torch.memory_format, dim: int, to_first_only: bool) -> bool:
    """Whether uneven bands make the whole, where it is due; the other side is one pixel, which has no order."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    assert group is not None
    for other in (1, 3):
        whole = whole_of((1, 5, 1, 4, other) if dim == 3 else (1, 5, 1, other, 4), memory_format)
        cut = bands(4, ranks)
        start, stop = cut[rank]
        got = gather_bands(whole.narrow(dim, start, stop - start), cut, dim, group, to_first_only, memory_format)
        if to_first_only and rank:
            right = got is None
        else:
            right = torch.equal(got, whole) and got.is_contiguous(memory_format=memory_format)
        if not right:
            return False
    return True


def test_lines_and_bands_arrive_as_they_were() -> None:
    for rank in run_ranks(3, travel):
        assert len(rank) == 4
        for found in rank:
            assert found == {"right": [True] * 5, "order": True, "gathered": [True, True], "lean": True}
