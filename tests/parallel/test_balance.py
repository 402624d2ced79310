import itertools
import subprocess
import sys

import pytest

from vgen.parallel.balance import (
    Balance,
    TileCost,
    assign_tiles,
    balanced_tiles,
    imbalance,
    predict_balance,
    tile_volume,
)
from vgen.parallel.tiles import Cut, Tile, TileSettings, plan_tiles, split_axis, tiles_of_cuts

LTX2 = ((16, 24, 40), TileSettings())
WAN_2_2 = ((31, 44, 80), TileSettings(512, 64, None, 0, (4, 16, 16)))
WAN_2_1 = ((21, 90, 160), TileSettings(512, 64, None, 0, (4, 8, 8)))
BY_VOLUME = TileCost(0, 1)


def row(*volumes: int) -> tuple[Tile, ...]:
    """Tiles of these volumes."""
    cuts: list[Cut] = [(0, volume, 0, 0) for volume in volumes]
    return tuple(tiles_of_cuts([(0, 1, 0, 0)], [(0, 1, 0, 0)], [cut], (1, 1, 1))[0] for cut in cuts)


@pytest.mark.parametrize(
    ("ranks", "counts", "loads"),
    [
        (1, [27], [29568]),
        (2, [14, 13], [15096, 14472]),
        (4, [6, 7, 7, 7], [6840, 7656, 7584, 7488]),
        (8, [3, 4, 3, 3, 4, 4, 3, 3], [3424, 4072, 3416, 3416, 4232, 4160, 3424, 3424]),
    ],
)
def test_assignment_of_the_reference_grid(ranks: int, counts: list[int], loads: list[int]) -> None:
    """The numbers of the source for 121x768x1280."""
    tiles = plan_tiles(*LTX2[0], LTX2[1])
    own = assign_tiles(tiles, ranks)
    assert [len(indices) for indices in own] == counts
    assert [sum(tile_volume(tiles[index]) for index in indices) for indices in own] == loads
    assert sorted(itertools.chain(*own)) == list(range(27))
    assert all(indices == tuple(sorted(indices)) for indices in own)


def test_equal_tiles_go_in_their_order_to_the_lowest_rank() -> None:
    assert assign_tiles(row(5, 5, 5, 5, 5), 3) == ((0, 3), (1, 4), (2,))
    assert assign_tiles(row(1, 4, 2, 3), 2) == ((0, 1), (2, 3))
    assert assign_tiles(row(7, 9), 4) == ((1,), (0,), (), ())
    assert assign_tiles((), 2) == ((), ())


def test_assignment_is_within_its_bound_of_the_best_one() -> None:
    """Graham: at most 4/3 - 1/(3 ranks) of the best makespan, here by trying all assignments."""
    for volumes in itertools.combinations_with_replacement((1, 3, 4, 7), 5):
        for ranks in (2, 3):
            best = min(
                max(sum(v for v, place in zip(volumes, places, strict=True) if place == rank) for rank in range(ranks))
                for places in itertools.product(range(ranks), repeat=5)
            )
            loads = [sum(volumes[index] for index in own) for own in assign_tiles(row(*volumes), ranks)]
            assert sum(loads) == sum(volumes)
            assert best <= max(loads) <= best * (4 / 3 - 1 / (3 * ranks))


def test_imbalance() -> None:
    assert imbalance([3, 3, 3]) == 0
    assert imbalance([4, 2, 0]) == 1
    assert imbalance([3, 1]) == 0.5


def test_prediction() -> None:
    tiles = row(6, 3, 2)  # ranks: 6 and 3 + 2
    assert predict_balance(tiles, 2, TileCost(10, 2)) == Balance(tiles, 30.0, 30 / 26 - 1, 11)


@pytest.mark.parametrize(
    ("clip", "ranks", "makespan", "volume", "plain_imbalance"),
    [
        (LTX2, 2, 15096, 29568, 0.021),
        (LTX2, 4, 7592, 29568, 0.036),
        (LTX2, 8, 3976, 30912, 0.145),
        (WAN_2_2, 2, 74152, 148304, 0.084),
        (WAN_2_2, 4, 37076, 148304, 0.217),
        (WAN_2_2, 8, 19964, 159712, 0.427),
        (WAN_2_1, 2, 204792, 409584, 0.088),
        (WAN_2_1, 4, 102396, 409584, 0.214),
        (WAN_2_1, 8, 55062, 440496, 0.441),
    ],
)
def test_clips_that_run_are_balanced(
    clip: tuple[tuple[int, int, int], TileSettings], ranks: int, makespan: int, volume: int, plain_imbalance: float
) -> None:
    sizes, settings = clip
    plain = predict_balance(plan_tiles(*sizes, settings), ranks, BY_VOLUME)
    assert plain.imbalance == pytest.approx(plain_imbalance, abs=1e-3)
    found = balanced_tiles(sizes, settings, ranks, BY_VOLUME)
    assert (found.makespan, found.volume) == (makespan, volume)
    assert found.imbalance <= 0.03
    assert found.makespan <= plain.makespan
    # The balance holds with a fixed part, here that of 100 latents.
    with_fixed = balanced_tiles(sizes, settings, ranks, TileCost(100, 1))
    assert with_fixed.imbalance <= 0.03
    assert with_fixed.makespan <= predict_balance(plan_tiles(*sizes, settings), ranks, TileCost(100, 1)).makespan


def check_cuts(tiles: tuple[Tile, ...], plain: tuple[Tile, ...], settings: TileSettings) -> None:
    """The rules of a grid: legal, complete, no tile longer than a plain one, the overlaps of the settings."""
    overlaps = (settings.tile_frames_overlap, settings.tile_overlap, settings.tile_overlap)
    for axis, (name, overlap) in enumerate(zip(("time", "height", "width"), overlaps, strict=True)):
        spans = list(dict.fromkeys(getattr(tile, name) for tile in tiles))
        plain_spans = [getattr(tile, name) for tile in plain]
        assert spans[0].latent_start == 0
        assert spans[-1].latent_stop == max(span.latent_stop for span in plain_spans)
        longest = max(span.latent_stop - span.latent_start for span in plain_spans)
        assert all(span.latent_stop - span.latent_start <= longest for span in spans)
        shared = overlap // settings.compression[axis] + (axis == 0)
        for left, right in itertools.pairwise(spans):
            assert left.latent_stop - right.latent_start == shared
        if axis == 0 and settings.tile_frames is None:
            assert len(spans) == 1


@pytest.mark.parametrize(
    "settings",
    [
        TileSettings(96, 32, 24, 8),
        TileSettings(128, 64, 32, 24),
        TileSettings(96, 0, 16, 0),
        TileSettings(64, 32, None, 0, (4, 16, 16)),
    ],
)
def test_small_clips_never_lose_and_find_the_best_of_plain_cuts(settings: TileSettings) -> None:
    """Against a search of its own over all grids of equal tiles with a shorter last one."""
    for sizes in [(1, 1, 1), (1, 5, 9), (3, 1, 7), (3, 6, 4), (5, 4, 7), (7, 9, 2)]:
        plain = plan_tiles(*sizes, settings)
        grids = list(every_grid(sizes, plain[0], settings))
        assert plain in grids
        for ranks, cost in itertools.product((1, 2, 3, 5), (BY_VOLUME, TileCost(8, 0.5))):
            found = balanced_tiles(sizes, settings, ranks, cost)
            check_cuts(found.tiles, plain, settings)
            assert found == predict_balance(found.tiles, ranks, cost)
            assert found.makespan <= predict_balance(plain, ranks, cost).makespan
            best = min((b.makespan, b.volume) for b in (predict_balance(grid, ranks, cost) for grid in grids))
            assert (found.makespan, found.volume) <= best


def every_grid(sizes: tuple[int, int, int], largest: Tile, settings: TileSettings) -> list[tuple[Tile, ...]]:
    overlaps = (settings.tile_frames_overlap, settings.tile_overlap, settings.tile_overlap)
    axes = []
    for size, span, overlap, unit in zip(
        sizes, (largest.time, largest.height, largest.width), overlaps, settings.compression, strict=True
    ):
        tiles = range(max(2, overlap // unit + 1), span.latent_stop + 1)
        axes.append([tuple(split_axis(size, tile, overlap // unit)) for tile in tiles] or [((0, size, 0, 0),)])
    if settings.tile_frames is None:
        axes[0] = [((0, sizes[0], 0, 0),)]
    return [tiles_of_cuts(*cuts, settings.compression) for cuts in itertools.product(*axes)]


def test_even_cuts_are_found_where_equal_tiles_leave_a_rest() -> None:
    """13 columns in tiles of up to 8 that share 1: 8 and 6 as they come, 7 and 7 evenly."""
    settings = TileSettings(256, 32, 16, 0)
    found = balanced_tiles((1, 2, 13), settings, 2, BY_VOLUME)
    widths = [(tile.width.latent_start, tile.width.latent_stop) for tile in found.tiles]
    assert widths == [(0, 7), (6, 13)]
    assert found.imbalance == 0


def test_refusals() -> None:
    with pytest.raises(ValueError, match="the number of ranks is 0; it must be at least 1"):
        assign_tiles(row(1), 0)
    with pytest.raises(ValueError, match="the number of ranks is 0"):
        balanced_tiles(*LTX2, 0, BY_VOLUME)
    for fixed, per_latent in ((-1, 1), (1, 0)):
        with pytest.raises(ValueError, match=rf"a tile costs {fixed} \+ {per_latent} per latent; the first must"):
            TileCost(fixed, per_latent)


def test_needs_no_torch() -> None:
    check = (
        "import sys\nfrom vgen.parallel.balance import *\nfrom vgen.parallel.tiles import TileSettings\n"
        "balanced_tiles((16, 24, 40), TileSettings(), 8, TileCost(0, 1))\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", check], check=True)
