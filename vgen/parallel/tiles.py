"""Tiles of a VAE: a plan of overlapping latent tiles, torch-free, and the serial decode and encode that blend them.

Each tile sees borders that the whole clip does not have, so tiles approximate the whole; they overlap and are blended
by ramps to hide it. The plan is a pure function of sizes: every rank computes the same one.

Shapes: B batch, C channels, F frames, H height, W width, in latents for latents and in pixels for frames. T, S: frames
and pixels of one latent; the first latent of a clip, and of any tile, is one frame.
Source: NVIDIA/TensorRT-LLM pull request 15753; Lightricks/LTX-2, ``tiling.py`` (geometry until 2026-04-23: 512/64 px,
64/24 frames, the short side's tile scaled by its share of the long side).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, product
from types import EllipsisType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MIN_WEIGHT = 1e-8

# Along one axis, in latents: start, stop, left ramp, right ramp.
Cut = tuple[int, int, int, int]


@dataclass(frozen=True)
class TileSettings:
    """Tile sizes in pixels and frames; the long side of the clip gets ``tile_size``.

    ``tile_frames`` None: every tile has all frames, and ``tile_frames_overlap`` plays no part. So it has to be for a
    VAE that is causal in time, whose tiles would each begin with the state of a first frame. ``compression``: frames,
    rows and columns of pixels per latent, LTX-2's if not given.

    Raises:
        ValueError: a size is below its minimum or off the latent grid, or an overlap is not below its tile.
    """

    tile_size: int = 512
    tile_overlap: int = 64
    tile_frames: int | None = 64
    tile_frames_overlap: int = 24
    compression: tuple[int, int, int] = (8, 32, 32)

    def __post_init__(self) -> None:
        frames, *space = self.compression
        for pixels in space:
            _check_axis("tile_size", self.tile_size, "tile_overlap", self.tile_overlap, pixels)
        if self.tile_frames is not None:
            _check_axis("tile_frames", self.tile_frames, "tile_frames_overlap", self.tile_frames_overlap, frames)


def _check_axis(name: str, size: int, overlap_name: str, overlap: int, unit: int) -> None:
    if size < 2 * unit or size % unit:
        raise ValueError(f"{name} is {size}; a tile must be a multiple of {unit} and at least {2 * unit}")
    if overlap < 0 or overlap % unit or overlap >= size:
        raise ValueError(
            f"{overlap_name} is {overlap}; an overlap must be a multiple of {unit} from 0 to below {name}={size}"
        )


@dataclass(frozen=True)
class Span:
    """One tile along one axis: latents [latent_start, latent_stop) stand for samples [start, stop) of the frames.

    The weight rises over the first ``left_ramp`` samples and falls over the last ``right_ramp``; 0 = no ramp there.
    ``from_zero``: the rising ramp's first weight is exactly 0 (time: the first latent of any tile is a single frame and
    is thrown away) instead of one step above it. ``unit``: samples per latent.
    """

    latent_start: int
    latent_stop: int
    start: int
    stop: int
    left_ramp: int
    right_ramp: int
    from_zero: bool
    unit: int

    def weights(self) -> list[float]:
        """The blend weights of the ``stop - start`` samples of a decode, 0 to 1."""
        return _ramped(self.stop - self.start, self.left_ramp, self.right_ramp, self.from_zero)

    def latent_weights(self) -> list[float]:
        """The blend weights of the ``latent_stop - latent_start`` latents of an encode, 0 to 1."""
        left = -(-self.left_ramp // self.unit)  # rounded up: along time the ramp begins with the latent of one frame
        return _ramped(self.latent_stop - self.latent_start, left, self.right_ramp // self.unit, self.from_zero)


def _ramped(length: int, left: int, right: int, from_zero: bool) -> list[float]:
    weights = [1.0] * length
    for i in range(min(left, length)):
        weights[i] *= i / left if from_zero else (i + 1) / (left + 1)
    for i in range(min(right, length)):
        weights[length - 1 - i] *= (i + 1) / (right + 1)
    return weights


@dataclass(frozen=True)
class Tile:
    """One call of a decoder or encoder: a box of latents and the box of frames that they stand for."""

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
    frames_unit, *space_units = settings.compression
    long_side = max(latent_height, latent_width)
    heights, widths = (
        _space_cuts(size, size / long_side, settings, unit)
        for size, unit in zip((latent_height, latent_width), space_units, strict=True)
    )
    if settings.tile_frames is None:
        times = split_axis(latent_frames, latent_frames, 0)
    else:
        tile, overlap = settings.tile_frames // frames_unit, settings.tile_frames_overlap // frames_unit
        times = split_axis(latent_frames, tile, overlap)
    return tiles_of_cuts(times, heights, widths, settings.compression)


def _space_cuts(size: int, share: float, settings: TileSettings, unit: int) -> Iterator[Cut]:
    """The cuts of a side of ``size`` latents that is ``share`` of the long one."""
    overlap = settings.tile_overlap // unit
    return split_axis(size, max(2, overlap + 1, round(settings.tile_size // unit * share)), overlap)


def tiles_of_cuts(
    times: Iterable[Cut], heights: Iterable[Cut], widths: Iterable[Cut], compression: tuple[int, int, int]
) -> tuple[Tile, ...]:
    """The grid of the cuts of three axes, time slowest and width fastest."""
    time, height, width = compression
    return _grid(
        [_time_span(*cut, time) for cut in times],
        [_space_span(*cut, height) for cut in heights],
        [_space_span(*cut, width) for cut in widths],
    )


def _grid(times: Sequence[Span], heights: Sequence[Span], widths: Sequence[Span]) -> tuple[Tile, ...]:
    return tuple(Tile(*spans) for spans in product(times, heights, widths))


def split_axis(length: int, tile: int, overlap: int) -> Iterator[Cut]:
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


def _space_span(start: int, stop: int, left: int, right: int, unit: int) -> Span:
    return Span(start, stop, start * unit, stop * unit, left * unit, right * unit, from_zero=False, unit=unit)


def _time_span(start: int, stop: int, left: int, right: int, unit: int) -> Span:
    if start:
        # One latent earlier: the first latent of any decode gives one frame instead of ``unit``, and a poor one.
        start, left = start - 1, left + 1
    left_ramp = 1 + (left - 1) * unit if left else 0
    return Span(start, stop, start * unit, 1 + (stop - 1) * unit, left_ramp, right * unit, from_zero=True, unit=unit)


def decode_tiled(decode: Callable[[Tensor], Tensor], latents: Tensor, tiles: Sequence[Tile]) -> Iterator[Tensor]:
    """Decode tile by tile and yield the finished frames in order, one group per place along time.

    ``decode``: latents [B, C, F, H, W] -> frames [B, 3, T(F-1)+1, SH, SW]; called with views of ``latents``
    [B, C, F, H, W], one at a time. Each group [B, 3, F', SH, SW] has the latents' dtype and the frames' memory
    format and is the caller's own; the groups' F' add up to T(F-1)+1. One tile and one group are alive at a time,
    beside the frames that two groups share. Sums are weighted in the latents' dtype and divided by the summed weights.

    Raises:
        ValueError: ``tiles`` is not the complete grid of ``plan_tiles`` for these latents, or ``decode`` returns
            another number of frames or pixels than its tile covers.
    """
    times, heights, widths = grid_axes(tiles, latents)
    carried: Tensor | None = None
    for (span, group), following in zip(groupby(tiles, lambda tile: tile.time), [*times[1:], None], strict=True):
        total = _sum_group(decode, latents, group, carried, (heights[-1].stop, widths[-1].stop))
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
    return _checked_axes(tiles, latents, "latents", lambda span: span.latent_stop)


def _checked_axes(
    tiles: Sequence[Tile], clip: Tensor, kind: str, end: Callable[[Span], int]
) -> tuple[tuple[Span, ...], tuple[Span, ...], tuple[Span, ...]]:
    """The axes of ``grid_axes``, whose last spans have their ``end`` at that of ``clip`` [B, C, F, H, W]."""
    times = tuple(dict.fromkeys(tile.time for tile in tiles))
    heights = tuple(dict.fromkeys(tile.height for tile in tiles))
    widths = tuple(dict.fromkeys(tile.width for tile in tiles))
    covered = tuple(end(axis[-1]) if axis else 0 for axis in (times, heights, widths))
    if covered != tuple(clip.shape[2:]) or tuple(tiles) != _grid(times, heights, widths):
        raise ValueError(
            f"{len(tiles)} tiles over {covered} {kind} do not make a complete grid over {tuple(clip.shape[2:])}: "
            f"pass all tiles of plan_tiles for this clip, in its order"
        )
    return times, heights, widths


def _sum_group(
    decode: Callable[[Tensor], Tensor],
    latents: Tensor,
    group: Iterator[Tile],
    carried: Tensor | None,
    size: tuple[int, int],
) -> Tensor:
    """Weighted sum of the tiles of one time span over the clip's ``size`` in pixels, on top of the carried frames."""
    total: Tensor | None = None
    for tile in group:
        frames = decode_tile(decode, latents, tile)
        if total is None:
            total = sum_buffer(frames, (frames.shape[2], *size), latents.dtype)
            if carried is not None:
                total[:, :, : carried.shape[2]].copy_(carried)
        add_weighted(total, frames, tile, tile.time.start)
        del frames  # before the next tile is decoded
    assert total is not None
    return total


def sum_buffer(frames: Tensor, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros [B, 3, *size] in ``dtype``, on the device and in the memory format of one tile's ``frames``."""
    import torch

    channels_last = frames.is_contiguous(memory_format=torch.channels_last_3d)
    return torch.empty(
        (*frames.shape[:2], *size),
        dtype=dtype,
        device=frames.device,
        memory_format=torch.channels_last_3d if channels_last else torch.contiguous_format,
    ).zero_()


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
            f"plan with the decoder's own compression instead of {tuple(span.unit for span in spans)}"
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


def encode_tiled(encode: Callable[[Tensor], Tensor], frames: Tensor, tiles: Sequence[Tile]) -> Tensor:
    """Encode frames [B, 3, F, H, W] tile by tile to latents [B, C, (F-1)/T + 1, H/S, W/S].

    ``tiles``: the plan of these latents. ``encode`` has the shapes of this function and is called with views of
    ``frames``, one at a time. Ramps lie over latents; sums are weighted in fp32 or wider, divided by the summed
    weights, and returned in the dtype of what ``encode`` returns.

    Raises:
        ValueError: ``tiles`` is not the complete grid of ``plan_tiles`` for these frames, or ``encode`` returns another
            number of latents than its tile covers.
    """
    axes = frame_axes(tiles, frames)
    parts = [encode_tile(encode, frames, tile) for tile in tiles]
    total = latent_sum_buffer(parts[0], tuple(spans[-1].latent_stop for spans in axes))
    for tile, latents in zip(tiles, parts, strict=True):
        add_weighted_latents(total, latents, tile)
    return (total / summed_latent_weights(tiles, total)).to(parts[0].dtype)


def frame_axes(tiles: Sequence[Tile], frames: Tensor) -> tuple[tuple[Span, ...], tuple[Span, ...], tuple[Span, ...]]:
    """As ``grid_axes``, of ``frames`` [B, 3, F, H, W]."""
    return _checked_axes(tiles, frames, "frames and pixels", lambda span: span.stop)


def latent_sum_buffer(latents: Tensor, size: tuple[int, ...]) -> Tensor:
    """Zeros [B, C, *size] in fp32 or wider, on the device of one tile's ``latents``."""
    import torch

    return latents.new_zeros((*latents.shape[:2], *size), dtype=torch.promote_types(latents.dtype, torch.float32))


def add_weighted_latents(total: Tensor, latents: Tensor, tile: Tile) -> None:
    """``total`` [B, C, F, H, W] of the clip += latents * blend weights at the tile's place, in place."""
    total[_latent_box(tile)].addcmul_(latents.to(total.dtype), _latent_mask(tile, total))


def summed_latent_weights(tiles: Sequence[Tile], total: Tensor) -> Tensor:
    """The sum [F, H, W] of all tiles' weights over the latents of the clip, dtype and device of ``total``."""
    weights = total.new_zeros(total.shape[2:])
    for tile in tiles:
        weights[_latent_box(tile)] += _latent_mask(tile, total)
    return weights


def _latent_box(tile: Tile) -> tuple[EllipsisType | slice, ...]:
    return (..., *(slice(span.latent_start, span.latent_stop) for span in (tile.time, tile.height, tile.width)))


def _latent_mask(tile: Tile, like: Tensor) -> Tensor:
    spans = (tile.time, tile.height, tile.width)
    time, height, width = (like.new_tensor(span.latent_weights()) for span in spans)
    return time[:, None, None] * height[:, None] * width


def encode_tile(encode: Callable[[Tensor], Tensor], frames: Tensor, tile: Tile) -> Tensor:
    """Latents [B, C, F, H, W] of one tile, cut from the whole clip's ``frames`` [B, 3, F, H, W].

    Raises:
        ValueError: ``encode`` returns another number of latents than the tile covers.
    """
    spans = (tile.time, tile.height, tile.width)
    t, h, w = (slice(span.start, span.stop) for span in spans)
    latents = encode(frames[:, :, t, h, w])
    expected = tuple(span.latent_stop - span.latent_start for span in spans)
    if tuple(latents.shape[2:]) != expected:
        raise ValueError(
            f"a tile was encoded to {tuple(latents.shape[2:])} latents; its plan has {expected}: "
            f"plan with the encoder's own compression instead of {tuple(span.unit for span in spans)}"
        )
    return latents
