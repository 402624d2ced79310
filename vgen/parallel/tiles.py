"""Tiled decode: a plan of overlapping latent tiles, torch-free, and the serial decode that blends them.

Each tile sees borders that the whole clip does not have, so a tiled decode approximates the whole one; tiles overlap
and are blended by ramps to hide it. The plan is a pure function of sizes: every rank computes the same one.

Shapes: B batch, C channels, F frames, H height, W width (latents at the input of ``decode``, pixels at its output).
Source: NVIDIA/TensorRT-LLM pull request 15753; Lightricks/LTX-2, ``tiling.py`` (geometry until 2026-04-23: 512/64 px,
64/24 frames, the short side's tile scaled by its share of the long side).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, product
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

FRAMES_PER_LATENT = 8
PIXELS_PER_LATENT = 32

MIN_WEIGHT = 1e-8


@dataclass(frozen=True)
class TileSettings:
    """Tile sizes in pixels and frames; the long side of the clip gets ``tile_size``.

    Raises:
        ValueError: a size is below its minimum or off the latent grid, or an overlap is not below its tile.
    """

    tile_size: int = 512
    tile_overlap: int = 64
    tile_frames: int = 64
    tile_frames_overlap: int = 24

    def __post_init__(self) -> None:
        _check_axis("tile_size", self.tile_size, "tile_overlap", self.tile_overlap, PIXELS_PER_LATENT)
        _check_axis("tile_frames", self.tile_frames, "tile_frames_overlap", self.tile_frames_overlap, FRAMES_PER_LATENT)


def _check_axis(name: str, size: int, overlap_name: str, overlap: int, unit: int) -> None:
    if size < 2 * unit or size % unit:
        raise ValueError(f"{name} is {size}; a tile must be a multiple of {unit} and at least {2 * unit}")
    if overlap < 0 or overlap % unit or overlap >= size:
        raise ValueError(
            f"{overlap_name} is {overlap}; an overlap must be a multiple of {unit} from 0 to below {name}={size}"
        )


@dataclass(frozen=True)
class Span:
    """One tile along one axis: latents [latent_start, latent_stop) become samples [start, stop) of the output.

    The weight rises over the first ``left_ramp`` samples and falls over the last ``right_ramp``; 0 = no ramp there.
    ``from_zero``: the rising ramp's first weight is exactly 0 (time: the first latent of any tile decodes to a single
    frame and is thrown away) instead of one step above it.
    """

    latent_start: int
    latent_stop: int
    start: int
    stop: int
    left_ramp: int
    right_ramp: int
    from_zero: bool

    def weights(self) -> list[float]:
        """The blend weights of the ``stop - start`` samples, 0 to 1."""
        length = self.stop - self.start
        weights = [1.0] * length
        steps = self.left_ramp if self.from_zero else self.left_ramp + 1
        for i in range(min(self.left_ramp, length)):
            weights[i] *= (i if self.from_zero else i + 1) / steps
        for i in range(min(self.right_ramp, length)):
            weights[length - 1 - i] *= (i + 1) / (self.right_ramp + 1)
        return weights


@dataclass(frozen=True)
class Tile:
    """One decode call: a box of latents and where its frames go."""

    time: Span
    height: Span
    width: Span


def plan_tiles(latent_frames: int, latent_height: int, latent_width: int, settings: TileSettings) -> tuple[Tile, ...]:
    """The complete grid of tiles over a clip of latents, time slowest and width fastest.

    Raises:
        ValueError: a size is below 1.
    """
    for name, size in (("frames", latent_frames), ("height", latent_height), ("width", latent_width)):
        if size < 1:
            raise ValueError(f"the number of latents along {name} is {size}; it must be at least 1")
    overlap = settings.tile_overlap // PIXELS_PER_LATENT
    long_tile = settings.tile_size // PIXELS_PER_LATENT
    long_side = max(latent_height, latent_width)
    heights, widths = (
        [_space_span(*cut) for cut in _split(size, max(2, overlap + 1, round(long_tile * size / long_side)), overlap)]
        for size in (latent_height, latent_width)
    )
    tile_frames, frames_overlap = (n // FRAMES_PER_LATENT for n in (settings.tile_frames, settings.tile_frames_overlap))
    times = [_time_span(*cut) for cut in _split(latent_frames, tile_frames, frames_overlap)]
    return _grid(times, heights, widths)


def _grid(times: Sequence[Span], heights: Sequence[Span], widths: Sequence[Span]) -> tuple[Tile, ...]:
    return tuple(Tile(*spans) for spans in product(times, heights, widths))


def _split(length: int, tile: int, overlap: int) -> Iterator[tuple[int, int, int, int]]:
    """Cut ``length`` latents into (start, stop, left ramp, right ramp); the last tile may be shorter."""
    if length <= tile:
        yield 0, length, 0, 0
        return
    stride = tile - overlap
    count = -(-(length - overlap) // stride)
    for i in range(count):
        last = i == count - 1
        stop = length if last else i * stride + tile
        yield i * stride, stop, overlap if i else 0, 0 if last else overlap


def _space_span(start: int, stop: int, left: int, right: int) -> Span:
    n = PIXELS_PER_LATENT
    return Span(start, stop, start * n, stop * n, left * n, right * n, from_zero=False)


def _time_span(start: int, stop: int, left: int, right: int) -> Span:
    n = FRAMES_PER_LATENT
    if start:
        # One latent earlier: the first latent of any decode gives one frame instead of eight, and a poor one.
        start, left = start - 1, left + 1
    left_ramp = 1 + (left - 1) * n if left else 0
    return Span(start, stop, start * n, 1 + (stop - 1) * n, left_ramp, right * n, from_zero=True)


def decode_tiled(decode: Callable[[Tensor], Tensor], latents: Tensor, tiles: Sequence[Tile]) -> Iterator[Tensor]:
    """Decode tile by tile and yield the finished frames in order, one group per place along time.

    ``decode``: latents [B, C, F, H, W] -> frames [B, 3, 8(F-1)+1, 32H, 32W]; called with views of ``latents``
    [B, C, F, H, W], one at a time. Each group [B, 3, F', 32H, 32W] has the latents' dtype and the frames' memory
    format and is the caller's own; the groups' F' add up to 8(F-1)+1. One tile and one group are alive at a time,
    beside the frames that two groups share. Sums are weighted in the latents' dtype and divided by the summed weights.

    Raises:
        ValueError: ``tiles`` is not the complete grid of ``plan_tiles`` for these latents, or ``decode`` returns
            another number of frames or pixels than its tile covers.
    """
    times, heights, widths = grid_axes(tiles, latents)
    carried: Tensor | None = None
    for (span, group), following in zip(groupby(tiles, lambda tile: tile.time), [*times[1:], None], strict=True):
        total = _sum_group(decode, latents, group, carried)
        ready = (span.stop if following is None else following.start) - span.start
        # Later groups reach into the rest: its sums are not final, and a copy of it lets the group go.
        carried = total[:, :, ready:].clone()
        finished = _normalized(total[:, :, :ready], span.start, times, heights, widths)
        del total
        if ready:
            yield finished
        del finished


def grid_axes(tiles: Sequence[Tile], latents: Tensor) -> tuple[tuple[Span, ...], tuple[Span, ...], tuple[Span, ...]]:
    """The spans of a grid of tiles along time, height and width, each in order.

    Raises:
        ValueError: ``tiles`` is not a complete grid in the order of ``plan_tiles``, or not of ``latents``.
    """
    times = tuple(dict.fromkeys(tile.time for tile in tiles))
    heights = tuple(dict.fromkeys(tile.height for tile in tiles))
    widths = tuple(dict.fromkeys(tile.width for tile in tiles))
    covered = tuple(axis[-1].latent_stop if axis else 0 for axis in (times, heights, widths))
    if covered != tuple(latents.shape[2:]) or tuple(tiles) != _grid(times, heights, widths):
        raise ValueError(
            f"{len(tiles)} tiles over {covered} latents do not make a complete grid over {tuple(latents.shape[2:])}: "
            f"pass all tiles of plan_tiles for this clip, in its order"
        )
    return times, heights, widths


def _sum_group(
    decode: Callable[[Tensor], Tensor],
    latents: Tensor,
    group: Iterator[Tile],
    carried: Tensor | None,
) -> Tensor:
    """Weighted sum of the tiles of one time span over the full height and width, on top of the carried frames."""
    import torch

    total: Tensor | None = None
    for tile in group:
        frames = decode_tile(decode, latents, tile)
        if total is None:
            channels_last = frames.is_contiguous(memory_format=torch.channels_last_3d)
            total = torch.empty(
                (*frames.shape[:3], latents.shape[3] * PIXELS_PER_LATENT, latents.shape[4] * PIXELS_PER_LATENT),
                dtype=latents.dtype,
                device=frames.device,
                memory_format=torch.channels_last_3d if channels_last else torch.contiguous_format,
            ).zero_()
            if carried is not None:
                total[:, :, : carried.shape[2]].copy_(carried)
        add_weighted(total, frames, tile, tile.time.start)
        del frames  # before the next tile is decoded
    assert total is not None
    return total


def decode_tile(decode: Callable[[Tensor], Tensor], latents: Tensor, tile: Tile) -> Tensor:
    """Frames [B, 3, F, H, W] of one tile, cut from the whole clip's ``latents`` [B, C, F, H, W].

    Raises:
        ValueError: ``decode`` returns another number of frames or pixels than the tile covers.
    """
    spans = (tile.time, tile.height, tile.width)
    t, h, w = (slice(span.latent_start, span.latent_stop) for span in spans)
    frames = decode(latents[:, :, t, h, w])
    expected = tuple(span.stop - span.start for span in spans)
    if tuple(frames.shape[2:]) != expected:
        raise ValueError(
            f"a tile was decoded to {tuple(frames.shape[2:])} frames and pixels; its plan has {expected}: "
            f"the plan fits decoders of {FRAMES_PER_LATENT} frames and {PIXELS_PER_LATENT} pixels per latent"
        )
    return frames


def add_weighted(total: Tensor, frames: Tensor, tile: Tile, first_frame: int) -> None:
    """``total`` [B, 3, F, H, W] += frames * blend weights at the tile's place, in place.

    ``first_frame``: the clip's frame at index 0 of ``total``; height and width are the clip's.
    """
    t, h, w = (
        slice(span.start - first, span.stop - first)
        for span, first in ((tile.time, first_frame), (tile.height, 0), (tile.width, 0))
    )
    mask = blend_mask(tile, total.device, total.dtype)
    total[:, :, t, h, w].addcmul_(frames.to(total.dtype), mask)


def blend_mask(tile: Tile, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The tile's blend weights [F, H, W], multiplied on the device from 1-D pieces already in ``dtype``.

    A mask made on the host and copied per tile leaves the GPU waiting; the order of cast and product is part of the
    result in bf16, so every decode that shall agree with this one must take its weights from here.
    """
    time, height, width = (span_weights(span, device, dtype) for span in (tile.time, tile.height, tile.width))
    return time[:, None, None] * height[:, None] * width


@lru_cache(maxsize=256)
def span_weights(span: Span, device: torch.device, dtype: torch.dtype) -> Tensor:
    """``span.weights()`` on the device; cached, so that a second decode of the same grid copies nothing there."""
    import torch

    return torch.tensor(span.weights(), dtype=torch.float64).to(dtype).to(device)


@lru_cache(maxsize=64)
def summed_weights(spans: tuple[Span, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Per sample of one axis, the sum over all its spans of the weights as cast to ``dtype``; fp32 or wider.

    A complete grid's summed weights are the outer product of its three axes' sums, so no buffer of the size of the
    clip has to collect them.
    """
    import torch

    summed = torch.zeros(spans[-1].stop, dtype=torch.promote_types(dtype, torch.float32), device=device)
    for span in spans:
        summed[span.start : span.stop] += span_weights(span, device, dtype)
    return summed


def _normalized(
    total: Tensor, first_frame: int, times: tuple[Span, ...], heights: tuple[Span, ...], widths: tuple[Span, ...]
) -> Tensor:
    """``total`` divided by the summed weights, as a new tensor of the same dtype and memory format."""
    import torch

    time, height, width = (summed_weights(axis, total.device, total.dtype) for axis in (times, heights, widths))
    time = time[first_frame : first_frame + total.shape[2]]
    weights = (time[:, None, None] * height[:, None] * width).clamp_(min=MIN_WEIGHT)
    return torch.div(total, weights, out=torch.empty_like(total))
