"""Balance of tiles over ranks: which rank has which tile, and cuts of a clip with which all ranks finish together.

Pure functions of sizes, torch-free: every rank computes the same result, and nothing is communicated.
Source of the assignment: NVIDIA/TensorRT-LLM pull request 15753 (longest processing time first).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

from vgen.parallel.tiles import Cut, Tile, TileSettings, plan_tiles, split_axis, tiles_of_cuts

Cuts = tuple[Cut, ...]  # of one axis


def tile_volume(tile: Tile) -> int:
    """Latents in the tile's box: the cost of a tile, up to a factor."""
    return prod(span.latent_stop - span.latent_start for span in (tile.time, tile.height, tile.width))


def assign_tiles(tiles: Sequence[Tile], ranks: int) -> tuple[tuple[int, ...], ...]:
    """By rank, the indices of its tiles, ascending; none where ranks outnumber the tiles.

    Largest volume first, equal ones in the order of ``tiles``, each to the rank with the least volume so far, the
    lowest of those.

    Raises:
        ValueError: ``ranks`` is below 1.
    """
    own = _assign([tile_volume(tile) for tile in tiles], ranks)
    return tuple(tuple(sorted(indices)) for indices in own)


def _assign(volumes: Sequence[int], ranks: int) -> list[list[int]]:
    if ranks < 1:
        raise ValueError(f"the number of ranks is {ranks}; it must be at least 1")
    own: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for index in sorted(range(len(volumes)), key=lambda index: -volumes[index]):
        rank = loads.index(min(loads))
        own[rank].append(index)
        loads[rank] += volumes[index]
    return own


def imbalance(loads: Sequence[float]) -> float:
    """Largest load over the mean, minus 1: 0 if all are equal."""
    return max(loads) * len(loads) / sum(loads) - 1


@dataclass(frozen=True)
class TileCost:
    """Predicted time of a tile: ``fixed`` + ``per_latent`` * its volume in latents, in any unit of time.

    Raises:
        ValueError: ``fixed`` is below 0, or ``per_latent`` not above 0.
    """

    fixed: float
    per_latent: float

    def __post_init__(self) -> None:
        if self.fixed < 0 or self.per_latent <= 0:
            raise ValueError(
                f"a tile costs {self.fixed} + {self.per_latent} per latent; the first must be at least 0 and the "
                f"second above 0"
            )


@dataclass(frozen=True)
class Balance:
    """Tiles and what is predicted of them.

    ``makespan``: the slowest rank's time; ``imbalance``: of the ranks' times; ``volume``: latents of all tiles.
    """

    tiles: tuple[Tile, ...]
    makespan: float
    imbalance: float
    volume: int


def predict_balance(tiles: tuple[Tile, ...], ranks: int, cost: TileCost) -> Balance:
    """What ``assign_tiles`` comes to on ``ranks`` ranks."""
    volumes = [tile_volume(tile) for tile in tiles]
    times = _times(volumes, ranks, cost)
    return Balance(tiles, max(times), imbalance(times), sum(volumes))


def _times(volumes: Sequence[int], ranks: int, cost: TileCost) -> list[float]:
    loads = [[volumes[index] for index in own] for own in _assign(volumes, ranks)]
    return [cost.fixed * len(own) + cost.per_latent * sum(own) for own in loads]


@lru_cache(maxsize=64)
def balanced_tiles(latent_sizes: tuple[int, int, int], settings: TileSettings, ranks: int, cost: TileCost) -> Balance:
    """The grid over ``latent_sizes`` (frames, height, width) with the least makespan, and of those the least volume.

    Each axis is cut by itself, evenly or with a shorter last tile, with the overlaps of ``settings`` and into tiles no
    longer than those of ``plan_tiles``, whose grid is one of the candidates. ``TileSettings`` could not say such cuts:
    its one size is for height and width.

    Raises:
        ValueError: a size or ``ranks`` is below 1.
    """
    best = predict_balance(plan_tiles(*latent_sizes, settings), ranks, cost)
    candidates = sorted(_candidates(best.tiles[0], latent_sizes, settings, cost), key=lambda candidate: candidate[0])
    for total, cuts in candidates:
        if total / ranks > best.makespan:  # the slowest rank takes a share of the total at least
            break
        found = predict_balance(tiles_of_cuts(*cuts, settings.compression), ranks, cost)
        if (found.makespan, found.volume) < (best.makespan, best.volume):
            best = found
    return best


def plan_grid(
    latent_sizes: tuple[int, int, int], settings: TileSettings, ranks: int, *, balanced: bool
) -> tuple[Tile, ...]:
    """The tiles that ``ranks`` share: those of ``plan_tiles``, or ``balanced`` ones by their volume alone."""
    if not balanced:
        return plan_tiles(*latent_sizes, settings)
    return balanced_tiles(latent_sizes, settings, ranks, TileCost(fixed=0, per_latent=1)).tiles


def _candidates(
    largest: Tile, latent_sizes: tuple[int, int, int], settings: TileSettings, cost: TileCost
) -> Iterator[tuple[float, tuple[Cuts, Cuts, Cuts]]]:
    """Cuts of the three axes and the total time of their tiles, none longer than ``largest``."""
    (frames, height, width), (frames_unit, height_unit, width_unit) = latent_sizes, settings.compression
    frames_overlap = settings.tile_frames_overlap // frames_unit
    for cuts in product(
        # Whole for a VAE that is causal in time.
        _cuts_of_axis(frames, largest.time.latent_stop, frames if settings.tile_frames is None else frames_overlap),
        _cuts_of_axis(height, largest.height.latent_stop, settings.tile_overlap // height_unit),
        _cuts_of_axis(width, largest.width.latent_stop, settings.tile_overlap // width_unit),
    ):
        count = prod(len(axis) for axis in cuts)
        lengths = [sum(stop - start for start, stop, _, _ in axis) for axis in cuts]
        lengths[0] += len(cuts[0]) - 1  # tiles but the first begin one latent earlier
        yield cost.fixed * count + cost.per_latent * prod(lengths), cuts


def _cuts_of_axis(length: int, longest: int, overlap: int) -> list[Cuts]:
    """Ways to cut ``length`` latents into tiles of up to ``longest``: of each size, and as even as that many can be."""
    shortest = min(max(2, overlap + 1), longest)
    shorter_last = [tuple(split_axis(length, tile, overlap)) for tile in range(shortest, longest + 1)]
    even = [tuple(_split_evenly(length, len(cuts), overlap)) for cuts in shorter_last]
    return list(dict.fromkeys([*shorter_last, *even]))


def _split_evenly(length: int, count: int, overlap: int) -> Iterator[Cut]:
    """``count`` cuts whose lengths differ by 1 at most, the longer ones first."""
    tile, longer = divmod(length + (count - 1) * overlap, count)
    start = 0
    for i in range(count):
        stop = start + tile + (i < longer)
        yield start, stop, overlap if i else 0, overlap if i < count - 1 else 0
        start = stop - overlap
