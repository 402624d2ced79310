"""Tiles of a VAE spread over the ranks of a group: each decodes or encodes its own, one collective adds up the sums.

Every rank has the whole input and computes the same assignment, so nothing is exchanged before the sums. Tiles and
weights are those of the serial path; only the order of additions differs where tiles of several ranks overlap, and one
rank alone is bit-identical. All ranks of the group call these functions together, ranks without a tile too.

Shapes as in ``tiles.py``: B batch, C channels, F frames, H height, W width; T, S: frames and pixels of one latent.
Source: NVIDIA/TensorRT-LLM pull request 15753. Unlike there, the summed weights are computed on each rank.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from vgen.parallel.balance import assign_tiles, imbalance, tile_volume
from vgen.parallel.tiles import (
    MIN_WEIGHT,
    Span,
    Tile,
    add_weighted,
    add_weighted_latents,
    decode_tile,
    encode_tile,
    frame_axes,
    grid_axes,
    latent_sum_buffer,
    sum_buffer,
    summed_latent_weights,
    summed_weights,
)
from vgen.parallel.watch import collective

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

# Frames that are divided by their weights at once, so that the weights of no more than these exist.
_DIVIDED_FRAMES = 8
_warned_of_idle_ranks = False


def decode_tiles_parallel(
    decode: Callable[[Tensor], Tensor],
    latents: Tensor,
    tiles: Sequence[Tile],
    group: dist.ProcessGroup | None,
    *,
    to_first_only: bool = False,
    sum_dtype: torch.dtype | None = None,
) -> Tensor | None:
    """Decode latents [B, C, F, H, W] to all frames [B, 3, T(F-1)+1, SH, SW], tiles spread over ``group``; collective.

    ``decode``, ``tiles``: as of ``decode_tiled``; ``latents``: the same on all ranks. ``group`` None: one rank, no
    collective. The frames have the latents' dtype and the decoder's memory format. ``to_first_only``: the group's first
    rank gets them, the others None. ``sum_dtype``: of the sums and of what travels, the latents' dtype if None; another
    one costs the first rank a second buffer of the clip's size. Besides, one tile is alive at a time.

    Raises:
        ValueError: as ``decode_tiled``, on each rank that sees it.
    """
    axes = grid_axes(tiles, latents)
    size = tuple(spans[-1].stop for spans in axes)
    total: Tensor | None = None
    for tile in _own_tiles(tiles, group):
        frames = decode_tile(decode, latents, tile)
        if total is None:
            total = sum_buffer(frames, size, sum_dtype or latents.dtype)
        add_weighted(total, frames, tile, 0)
        del frames  # before the next tile is decoded
    total, _ = _with_idle_ranks(total, latents.dtype, latents.device, len(tiles), group)
    return _divided(total, axes, latents.dtype) if _sum_over_ranks(total, group, to_first_only) else None


def encode_tiles_parallel(
    encode: Callable[[Tensor], Tensor],
    frames: Tensor,
    tiles: Sequence[Tile],
    group: dist.ProcessGroup | None,
    *,
    to_first_only: bool = False,
) -> Tensor | None:
    """Encode frames [B, 3, F, H, W] to latents [B, C, (F-1)/T + 1, H/S, W/S], tiles spread over ``group``; collective.

    ``encode``, ``tiles``, dtypes: as of ``encode_tiled``; ``frames``: the same on all ranks; the rest as of
    ``decode_tiles_parallel``.

    Raises:
        ValueError: as ``encode_tiled``, on each rank that sees it.
    """
    size = tuple(spans[-1].latent_stop for spans in frame_axes(tiles, frames))
    total, dtype = None, frames.dtype
    for tile in _own_tiles(tiles, group):
        latents = encode_tile(encode, frames, tile)
        if total is None:
            total, dtype = latent_sum_buffer(latents, size), latents.dtype
        add_weighted_latents(total, latents, tile)
        del latents
    total, dtype = _with_idle_ranks(total, dtype, frames.device, len(tiles), group)
    if not _sum_over_ranks(total, group, to_first_only):
        return None
    return total.div_(summed_latent_weights(tiles, total)).to(dtype)


def _own_tiles(tiles: Sequence[Tile], group: dist.ProcessGroup | None) -> Sequence[Tile]:
    """This rank's tiles, in the order of the grid, so that one rank adds as the serial path does."""
    if group is None:
        return tiles
    assignment = assign_tiles(tiles, dist.get_world_size(group))
    rank = dist.get_rank(group)
    if rank == 0:
        _tell(tiles, assignment)
    return [tiles[index] for index in assignment[rank]]


def _tell(tiles: Sequence[Tile], assignment: Sequence[Sequence[int]]) -> None:
    global _warned_of_idle_ranks
    loads = [sum(tile_volume(tiles[index]) for index in own) for own in assignment]
    log.debug(
        "%d tiles over %d ranks: %s tiles, %s latents, imbalance (max/mean - 1) %.1f %%",
        *(len(tiles), len(assignment), [len(own) for own in assignment], loads, 100 * imbalance(loads)),
    )
    if len(tiles) < len(assignment) and not _warned_of_idle_ranks:
        _warned_of_idle_ranks = True
        log.warning(
            "%d of %d ranks have no tile: a clip of %d tiles keeps at most %d ranks busy, so a smaller vae_size or "
            "smaller tiles serve it better",
            *(len(assignment) - len(tiles), len(assignment), len(tiles), len(tiles)),
        )


def _with_idle_ranks(
    total: Tensor | None, dtype: torch.dtype, device: torch.device, tiles: int, group: dist.ProcessGroup | None
) -> tuple[Tensor, torch.dtype]:
    """``total`` and ``dtype``; where the rank has no tile, zeros like the first rank's, and its dtype.

    Channels, dtype and memory format are known only after a tile, and have to be those of the other ranks, since the
    sum adds up memory. Nothing is sent where every rank has a tile.
    """
    if group is not None and tiles < dist.get_world_size(group):
        channels_last = total is not None and total.is_contiguous(memory_format=torch.channels_last_3d)
        layout: list[Any] = [None if total is None else (total.shape, total.dtype, channels_last, dtype)]
        with collective("tiles: layout", group):
            dist.broadcast_object_list(layout, src=dist.get_global_rank(group, 0), group=group, device=device)
        shape, sum_dtype, channels_last, dtype = layout[0]
        if total is None:
            memory_format = torch.channels_last_3d if channels_last else torch.contiguous_format
            total = torch.empty(shape, dtype=sum_dtype, device=device, memory_format=memory_format).zero_()
    assert total is not None
    return total, dtype


def _sum_over_ranks(total: Tensor, group: dist.ProcessGroup | None, to_first_only: bool) -> bool:
    """Add up ``total`` over the group in place; whether this rank is to have the sum."""
    if group is None:
        return True
    # Row-major by the order in memory: not every backend takes other strides.
    dense = total if total.is_contiguous() else total.permute(0, 2, 3, 4, 1)
    with collective("tiles: sum", group):
        if not to_first_only:
            dist.all_reduce(dense, group=group)
            return True
        dist.reduce(dense, dst=dist.get_global_rank(group, 0), group=group)
    return dist.get_rank(group) == 0


def _divided(
    total: Tensor, axes: tuple[tuple[Span, ...], tuple[Span, ...], tuple[Span, ...]], dtype: torch.dtype
) -> Tensor:
    """``total`` [B, 3, F, H, W] by the summed weights: in place, or in a buffer of its own if ``dtype`` is another."""
    time, height, width = (summed_weights(axis, total.device, total.dtype) for axis in axes)
    frames = total if dtype == total.dtype else torch.empty_like(total, dtype=dtype)
    for first in range(0, total.shape[2], _DIVIDED_FRAMES):
        part = slice(first, first + _DIVIDED_FRAMES)
        weights = (time[part, None, None] * height[:, None] * width).clamp_(min=MIN_WEIGHT)
        torch.div(total[:, :, part], weights, out=frames[:, :, part])
    return frames
