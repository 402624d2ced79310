import dataclasses
import itertools
import math
import random
import subprocess
import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from vgen.models.ltx2.config import DecoderBlock, VideoDecoderConfig
from vgen.models.ltx2.video_vae import VideoDecoder
from vgen.parallel.tiles import (
    Span,
    Tile,
    TileSettings,
    blend_mask,
    decode_tiled,
    encode_tiled,
    plan_tiles,
    span_weights,
    summed_weights,
)

LTX2, WAN_2_1, WAN_2_2 = (8, 32, 32), (4, 8, 8), (4, 16, 16)
SMALL = TileSettings(tile_size=96, tile_overlap=32, tile_frames=24, tile_frames_overlap=8)


def axes(tiles: tuple[Tile, ...]) -> tuple[list[Span], list[Span], list[Span]]:
    times, heights, widths = (
        list(dict.fromkeys(getattr(tile, name) for tile in tiles)) for name in ("time", "height", "width")
    )
    return times, heights, widths


def latent_intervals(spans: list[Span]) -> list[tuple[int, int]]:
    return [(span.latent_start, span.latent_stop) for span in spans]


def outputs(spans: list[Span]) -> list[tuple[int, int, int, int]]:
    return [(span.start, span.stop, span.left_ramp, span.right_ramp) for span in spans]


def test_reference_grid() -> None:
    """The 27 tiles of 121x768x1280: the short side's tile is 16 * 24 / 40 latents, rounded."""
    tiles = plan_tiles(16, 24, 40, TileSettings())
    times, heights, widths = axes(tiles)
    assert len(tiles) == 27
    assert latent_intervals(times) == [(0, 8), (4, 13), (9, 16)]
    assert latent_intervals(heights) == [(0, 10), (8, 18), (16, 24)]
    assert latent_intervals(widths) == [(0, 16), (14, 30), (28, 40)]
    assert outputs(times) == [(0, 57, 0, 24), (32, 97, 25, 24), (72, 121, 25, 0)]
    assert outputs(heights) == [(0, 320, 0, 64), (256, 576, 64, 64), (512, 768, 64, 0)]
    assert outputs(widths) == [(0, 512, 0, 64), (448, 960, 64, 64), (896, 1280, 64, 0)]
    assert tiles == tuple(Tile(*spans) for spans in itertools.product(times, heights, widths))


def test_grid_of_a_smaller_clip() -> None:
    tiles = plan_tiles(16, 16, 24, TileSettings())
    _, heights, widths = axes(tiles)
    assert latent_intervals(heights) == [(0, 11), (9, 16)]
    assert latent_intervals(widths) == [(0, 16), (14, 24)]


@pytest.mark.parametrize(
    ("num_frames", "height", "width", "count", "volume"),
    [
        (121, 768, 1280, 27, 1.925),
        (121, 512, 768, 12, 1.828),
        (121, 1024, 1536, 48, 2.004),
        (121, 1088, 1920, 75, 2.100),
        (49, 512, 768, 4, None),
        (121, 256, 256, 3, None),
        (121, 768, 512, 12, 1.828),
    ],
)
def test_counts_and_decoded_volume(num_frames: int, height: int, width: int, count: int, volume: float | None) -> None:
    latents = ((num_frames - 1) // 8 + 1, height // 32, width // 32)
    tiles = plan_tiles(*latents, TileSettings())
    assert len(tiles) == count
    if volume is not None:
        decoded = sum(
            math.prod(span.latent_stop - span.latent_start for span in (tile.time, tile.height, tile.width))
            for tile in tiles
        )
        assert round(decoded / math.prod(latents), 3) == volume


def test_ramps() -> None:
    times, heights, _ = axes(plan_tiles(16, 24, 40, TileSettings()))
    rows = heights[1].weights()
    assert len(rows) == 320
    assert rows[:64] == [k / 65 for k in range(1, 65)]
    assert set(rows[64:256]) == {1.0}
    assert rows[256:] == rows[:64][::-1]
    frames = times[1].weights()
    assert len(frames) == 65
    assert frames[:25] == [k / 25 for k in range(25)]
    assert set(frames[25:41]) == {1.0}
    assert frames[41:] == [k / 25 for k in range(24, 0, -1)]


def total_weights(spans: list[Span]) -> list[float]:
    total = [0.0] * spans[-1].stop
    for span in spans:
        for position, weight in enumerate(span.weights(), start=span.start):
            total[position] += weight
    return total


def total_latent_weights(spans: list[Span]) -> list[float]:
    total = [0.0] * spans[-1].latent_stop
    for span in spans:
        for position, weight in enumerate(span.latent_weights(), start=span.latent_start):
            total[position] += weight
    return total


def test_ramps_over_latents() -> None:
    times, heights, _ = axes(plan_tiles(16, 24, 40, TileSettings(tile_overlap=96)))
    rows = heights[1].latent_weights()
    assert rows[:4] == rows[-4:][::-1] == [1 / 4, 2 / 4, 3 / 4, 1]
    assert latent_intervals(times)[1] == (4, 13)
    # The first latent is the one frame that is thrown away; three overlap.
    assert times[1].latent_weights() == [0, 1 / 4, 2 / 4, 3 / 4, 1, 1, 3 / 4, 2 / 4, 1 / 4]


def test_weights_sum_to_one_at_the_default_settings() -> None:
    for size in range(1, 70):
        for spans in axes(plan_tiles(size, size, max(1, size // 3), TileSettings()))[:2]:
            assert max(abs(weight - 1) for weight in total_weights(spans)) < 1e-12, size


def random_settings(rng: random.Random) -> TileSettings:
    compression = rng.choice((LTX2, WAN_2_1, WAN_2_2))
    time, space, _ = compression
    size, frames = rng.randint(2, 20), rng.randint(2, 12)
    return TileSettings(
        space * size, space * rng.randrange(size), time * frames, time * rng.randrange(frames), compression
    )


def test_any_grid_covers_the_clip_and_nothing_else() -> None:
    rng = random.Random(0)
    for _ in range(300):
        settings = random_settings(rng)
        sizes = (rng.randint(1, 40), rng.randint(1, 60), rng.randint(1, 60))
        all_spans = axes(plan_tiles(*sizes, settings))
        time, space, _ = settings.compression
        overlaps = (settings.tile_frames_overlap // time, *(settings.tile_overlap // space,) * 2)
        for axis, (spans, size, overlap) in enumerate(zip(all_spans, sizes, overlaps, strict=True)):
            scale = time if axis == 0 else space
            assert spans[0].latent_start == spans[0].left_ramp == spans[-1].right_ramp == 0
            assert spans[-1].latent_stop == size
            assert spans[-1].stop == (scale * (size - 1) + 1 if axis == 0 else scale * size)
            for span in spans:
                length = span.latent_stop - span.latent_start
                assert length > (overlap if len(spans) > 1 else 0)
                assert span.unit == scale
                assert span.start == scale * span.latent_start
                assert span.stop - span.start == (scale * (length - 1) + 1 if axis == 0 else scale * length)
                assert all(0 <= weight <= 1 for weight in (*span.weights(), *span.latent_weights()))
            for span, following in itertools.pairwise(spans):
                extra = 1 if axis == 0 else 0
                assert span.latent_stop - following.latent_start == overlap + extra
                # Only where the stride is 1 can the second tile, which begins one latent early, share a start.
                assert span.start < following.start or (axis, following.latent_start) == (0, 0)
                assert span.stop < following.stop
            totals = (total_weights(spans), total_latent_weights(spans))
            assert min(map(min, totals)) > 0
            tile = spans[0].latent_stop
            if len(spans) == 1 or tile >= 2 * overlap:
                assert max(abs(weight - 1) for total in totals for weight in total) < 1e-12


@pytest.mark.parametrize(("compression", "latents"), [(WAN_2_2, (31, 44, 80)), (WAN_2_1, (21, 90, 160))])
def test_causal_tiles_have_all_frames(compression: tuple[int, int, int], latents: tuple[int, int, int]) -> None:
    """704x1280x121 and 720x1280x81: nine tiles, all of the whole time."""
    settings = TileSettings(512, 64, None, compression=compression)
    times, heights, widths = axes(plan_tiles(*latents, settings))
    assert outputs(times) == [(0, 4 * latents[0] - 3, 0, 0)]
    assert outputs(widths) == [(0, 512, 0, 64), (448, 960, 64, 64), (896, 1280, 64, 0)]
    assert [span.start for span in heights] == [0, 224, 448]
    assert heights[-1].stop == latents[1] * compression[1]


def test_reflecting_decoders_get_two_latents_per_side() -> None:
    for height, width in itertools.product(range(2, 50), (2, 7, 17, 40, 60)):
        for spans in axes(plan_tiles(1, height, width, TileSettings()))[1:]:
            assert min(span.latent_stop - span.latent_start for span in spans) >= 2


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"tile_size": 32}, "tile_size is 32; a tile must be a multiple of 32 and at least 64"),
        ({"tile_size": 500}, "tile_size is 500"),
        ({"tile_overlap": 48}, "tile_overlap is 48; an overlap must be a multiple of 32 from 0 to below tile_size=512"),
        ({"tile_overlap": 512}, "tile_overlap is 512"),
        ({"tile_overlap": -32}, "tile_overlap is -32"),
        ({"tile_frames": 8}, "tile_frames is 8; a tile must be a multiple of 8 and at least 16"),
        ({"tile_frames": 60}, "tile_frames is 60"),
        ({"tile_frames_overlap": 4}, "tile_frames_overlap is 4"),
        ({"tile_frames_overlap": 64}, "tile_frames_overlap is 64"),
        (
            {"tile_size": 200, "compression": WAN_2_2},
            "tile_size is 200; a tile must be a multiple of 16 and at least 32",
        ),
        (
            {"tile_overlap": 24, "compression": WAN_2_2},
            "tile_overlap is 24; an overlap must be a multiple of 16 from 0 to below tile_size=512",
        ),
        ({"tile_size": 8, "compression": WAN_2_1}, "tile_size is 8; a tile must be a multiple of 8 and at least 16"),
        (
            {"tile_frames": 10, "compression": WAN_2_1},
            "tile_frames is 10; a tile must be a multiple of 4 and at least 8",
        ),
        ({"tile_frames": None, "tile_size": 500}, "tile_size is 500"),
    ],
)
def test_refuses_settings_off_the_grid(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        TileSettings(**changes)


def test_accepts_the_least_settings() -> None:
    assert dataclasses.astuple(TileSettings(64, 32, 16, 8)) == (64, 32, 16, 8, LTX2)
    assert len(plan_tiles(3, 3, 3, TileSettings(64, 0, 16, 0))) == 8
    assert len(plan_tiles(3, 3, 3, TileSettings(32, 0, 8, 0, WAN_2_2))) == 8
    assert len(plan_tiles(3, 3, 3, TileSettings(16, 0, None, 24, WAN_2_1))) == 4


def test_refuses_an_empty_clip() -> None:
    with pytest.raises(ValueError, match="latents along height is 0"):
        plan_tiles(1, 0, 1, TileSettings())


def test_planning_needs_no_torch() -> None:
    code = (
        "import sys; from vgen.parallel.tiles import TileSettings, plan_tiles; "
        "plan_tiles(16, 24, 40, TileSettings()); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def place_waves(x: Tensor) -> Tensor:
    """``x`` [B, C, F, H, W] plus what depends on the place inside it, so that wrong blending cannot cancel out."""
    for dim in (2, 3, 4):
        place = torch.arange(x.shape[dim], dtype=x.dtype) / x.shape[dim]
        x = x + torch.sin(3 * place).view(-1, *[1] * (4 - dim))
    return x


def fake_decode(latents: Tensor, compression: tuple[int, int, int] = LTX2) -> Tensor:
    time, height, width = compression
    frames = torch.cat([latents[:, :3, :1], latents[:, :3, 1:].repeat_interleave(time, dim=2)], dim=2)
    return place_waves(frames.repeat_interleave(height, dim=3).repeat_interleave(width, dim=4))


def fake_encode(frames: Tensor, compression: tuple[int, int, int] = LTX2) -> Tensor:
    time, height, width = compression
    return place_waves(frames[:, :, ::time, height - 1 :: height, width - 1 :: width])


def naive_mask(length: int, left: int, right: int, axis: int) -> Tensor:
    mask = torch.ones(length, dtype=torch.float64)
    if left:
        rising = torch.linspace(0, 1, left + (1 if axis == 0 else 2), dtype=torch.float64)[:-1]
        mask[:left] *= rising[0 if axis == 0 else 1 :]
    if right:
        mask[-right:] *= torch.linspace(1, 0, right + 2, dtype=torch.float64)[1:-1]
    return mask


def naive_blend(latents: Tensor, tiles: tuple[Tile, ...], compression: tuple[int, int, int] = LTX2) -> Tensor:
    """Full-size masks and buffers in fp64, ramps from linspace: shares no code with what it checks."""
    B, _, F, H, W = latents.shape
    time, height, width = compression
    total, weights = (torch.zeros(B, 3, time * (F - 1) + 1, height * H, width * W).double() for _ in range(2))
    for tile in tiles:
        spans = (tile.time, tile.height, tile.width)
        inside = tuple(slice(span.latent_start, span.latent_stop) for span in spans)
        outside = tuple(slice(span.start, span.stop) for span in spans)
        masks = [
            naive_mask(span.stop - span.start, span.left_ramp, span.right_ramp, axis) for axis, span in enumerate(spans)
        ]
        mask = torch.einsum("t,h,w->thw", *masks)
        total[(..., *outside)] += fake_decode(latents[(..., *inside)], compression).double() * mask
        weights[(..., *outside)] += mask
    return total / weights


def naive_encode_blend(
    encode: Callable[[Tensor], Tensor], frames: Tensor, tiles: tuple[Tile, ...], compression: tuple[int, int, int]
) -> Tensor:
    """As ``naive_blend``, the other way; the ramps are what neighbours share."""
    times, heights, widths = axes(tiles)
    total, weights = (
        torch.zeros(*frames.shape[:2], *(spans[-1].latent_stop for spans in (times, heights, widths))).double()
        for _ in range(2)
    )
    for tile in tiles:
        spans = (tile.time, tile.height, tile.width)
        latent_boxes, pixel_boxes, masks = [], [], []
        for axis, (span, line) in enumerate(zip(spans, (times, heights, widths), strict=True)):
            start, stop = span.latent_start, span.latent_stop
            index = line.index(span)
            left = line[index - 1].latent_stop - start if index else 0
            # Along time one latent of what a tile shares with the next one is for that one's first frame only.
            right = stop - line[index + 1].latent_start - (axis == 0) if index + 1 < len(line) else 0
            masks.append(naive_mask(stop - start, left, right, axis))
            latent_boxes.append(slice(start, stop))
            unit = compression[axis]
            pixel_boxes.append(slice(unit * start, unit * (stop - 1) + 1 if axis == 0 else unit * stop))
        mask = torch.einsum("t,h,w->thw", *masks)
        total[(..., *latent_boxes)] += encode(frames[(..., *pixel_boxes)]).double() * mask
        weights[(..., *latent_boxes)] += mask
    return total / weights


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize(
    ("shape", "settings"),
    [
        ((2, 4, 5, 4, 5), SMALL),
        ((1, 4, 5, 2, 4), TileSettings(64, 32, 16, 8)),  # three tiles and more share a place: weights do not sum to 1
        ((1, 4, 8, 2, 4), TileSettings(96, 64, 32, 24)),
        ((1, 4, 5, 3, 4), TileSettings(64, 0, 16, 0)),
        ((1, 4, 1, 4, 2), SMALL),
        ((1, 4, 5, 7, 11), TileSettings(64, 32, None, 0, WAN_2_2)),
        ((2, 4, 5, 11, 5), TileSettings(64, 16, None, 0, WAN_2_1)),
        ((1, 4, 9, 3, 4), TileSettings(24, 8, 16, 8, WAN_2_1)),
    ],
)
def test_equals_the_naive_blend(shape: tuple[int, ...], settings: TileSettings) -> None:
    latents = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    decode = partial(fake_decode, compression=settings.compression)
    tiles = plan_tiles(*shape[2:], settings)
    assert len(tiles) > 1
    expected = naive_blend(latents, tiles, settings.compression)
    groups = list(decode_tiled(decode, latents, tiles))
    assert len(groups) == len({tile.time.start for tile in tiles})
    assert all(group.shape[2] for group in groups)
    assert sum(group.shape[2] for group in groups) == settings.compression[0] * (shape[2] - 1) + 1
    assert relative_error(torch.cat(groups, dim=2), expected) < 1e-13
    single = torch.cat(list(decode_tiled(decode, latents.float(), tiles)), dim=2)
    assert single.dtype == torch.float32
    assert relative_error(single, expected) < 1e-6


@pytest.mark.parametrize(
    ("latents", "settings"),
    [
        ((7, 4, 5), SMALL),
        ((8, 2, 4), TileSettings(96, 64, 32, 24)),
        ((5, 3, 4), TileSettings(64, 0, 16, 0)),
        ((3, 7, 11), TileSettings(64, 32, None, 0, WAN_2_2)),
        ((9, 11, 5), TileSettings(40, 16, 16, 8, WAN_2_1)),
    ],
)
def test_encode_equals_the_naive_blend(latents: tuple[int, int, int], settings: TileSettings) -> None:
    time, height, width = settings.compression
    size = (time * (latents[0] - 1) + 1, height * latents[1], width * latents[2])
    frames = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    encode = partial(fake_encode, compression=settings.compression)
    tiles = plan_tiles(*latents, settings)
    assert len(tiles) > 1
    expected = naive_encode_blend(encode, frames, tiles, settings.compression)
    encoded = encode_tiled(encode, frames, tiles)
    assert encoded.shape == (2, 3, *latents)
    assert relative_error(encoded, expected) < 1e-13

    def encode_bf16(part: Tensor) -> Tensor:
        return encode(part).bfloat16()

    encoded = encode_tiled(encode_bf16, frames, tiles)
    assert encoded.dtype == torch.bfloat16
    # Summed in fp32 and rounded once.
    assert relative_error(encoded, naive_encode_blend(encode_bf16, frames, tiles, settings.compression)) <= 2**-8


def coordinate(latents: Tensor, axis: int, compression: tuple[int, int, int]) -> Tensor:
    """[1, 3, F, H, W], the places of latents -> [1, 1, F', H', W'], the place along ``axis`` of each sample."""
    unit = compression[axis]
    places = latents[0, axis].movedim(axis, 0)[:, 0, 0]
    assert latents[0, axis].eq(places.view(-1, *[1] * (2 - axis))).all()
    if axis == 0:  # a latent stands for the frames up to the one at ``unit`` times its place
        samples = (unit * places[:, None] + torch.arange(1 - unit, 1)).flatten()[unit - 1 :]
    else:
        samples = (unit * places[:, None] + torch.arange(unit)).flatten()
    _, _, F, H, W = latents.shape
    time, height, width = compression
    size = (time * (F - 1) + 1, height * H, width * W)
    return samples.view(-1, *[1] * (2 - axis)).expand(1, 1, *size)


GEOMETRIES = [(WAN_2_2, (31, 44, 80), (121, 704, 1280)), (WAN_2_1, (21, 90, 160), (81, 720, 1280))]


@pytest.mark.parametrize(("compression", "latents", "pixels"), GEOMETRIES)
def test_every_pixel_of_a_full_decode_has_its_place(
    compression: tuple[int, int, int], latents: tuple[int, int, int], pixels: tuple[int, int, int]
) -> None:
    """A decoder that upsamples coordinates exactly gives back those of each frame, row and column."""
    tiles = plan_tiles(*latents, TileSettings(512, 64, None, 0, compression))
    assert len(tiles) == 9
    coordinates = torch.stack(torch.meshgrid(*(torch.arange(float(n)) for n in latents), indexing="ij"))[None]
    for axis, size in enumerate(pixels):
        (frames,) = decode_tiled(partial(coordinate, axis=axis, compression=compression), coordinates, tiles)
        assert frames.shape == (1, 1, *pixels)
        expected = torch.arange(float(size)).view(-1, *[1] * (2 - axis))
        # Products with weights, sums and the quotient are rounded: two units in the last place, of fp32.
        assert (frames - expected).abs().max() <= size * 2**-22


@pytest.mark.parametrize(("compression", "latents", "pixels"), GEOMETRIES)
def test_every_latent_of_a_full_encode_has_its_place(
    compression: tuple[int, int, int], latents: tuple[int, int, int], pixels: tuple[int, int, int]
) -> None:
    tiles = plan_tiles(*latents, TileSettings(512, 64, None, 0, compression))
    for axis, (unit, size) in enumerate(zip(compression, pixels, strict=True)):
        coordinates = torch.arange(float(size)).view(-1, *[1] * (2 - axis)).expand(1, 1, *pixels)
        encoded = encode_tiled(
            lambda part: part[:, :, :: compression[0], :: compression[1], :: compression[2]], coordinates, tiles
        )
        assert encoded.shape == (1, 1, *latents)
        expected = unit * torch.arange(float(latents[axis])).view(-1, *[1] * (2 - axis))
        assert (encoded - expected).abs().max() <= size * 2**-22


def test_bf16_sums_stay_within_its_rounding() -> None:
    latents = torch.randn(1, 4, 5, 4, 5, generator=torch.Generator().manual_seed(0))
    tiles = plan_tiles(5, 4, 5, SMALL)
    expected = naive_blend(latents.bfloat16(), tiles)  # decoded in bf16, blended in fp64
    frames = torch.cat(list(decode_tiled(fake_decode, latents.bfloat16(), tiles)), dim=2)
    assert frames.dtype == torch.bfloat16
    # Eight tiles meet in a place: eight sums, each rounded by up to 2^-9 of the largest value.
    assert relative_error(frames, expected) < 8 * 2**-9


def test_summed_weights_equal_a_full_buffer() -> None:
    """The outer product of the three sums is what a buffer of the clip's size would collect."""
    tiles = plan_tiles(6, 4, 5, TileSettings(64, 32, 24, 16))
    device = torch.device("cpu")
    for dtype, tolerance in ((torch.float64, 1e-14), (torch.float32, 1e-6)):
        buffer = torch.zeros(41, 128, 160, dtype=dtype)
        for tile in tiles:
            t, h, w = (slice(span.start, span.stop) for span in (tile.time, tile.height, tile.width))
            buffer[t, h, w] += blend_mask(tile, device, dtype)
        time, height, width = (summed_weights(tuple(spans), device, dtype) for spans in axes(tiles))
        assert relative_error(time[:, None, None] * height[:, None] * width, buffer) < tolerance


def test_mask_is_multiplied_after_the_cast() -> None:
    tile = plan_tiles(16, 24, 40, TileSettings())[13]
    mask = blend_mask(tile, torch.device("cpu"), torch.bfloat16)
    time, height, width = (torch.tensor(span.weights()).bfloat16() for span in (tile.time, tile.height, tile.width))
    assert torch.equal(mask, time[:, None, None] * height[:, None] * width)
    assert mask.shape == (65, 320, 512)


@pytest.fixture(scope="module")
def decoder() -> VideoDecoder:
    blocks = [DecoderBlock("res_x", num_layers=1)]
    for _ in range(3):
        blocks += [DecoderBlock("compress_all", multiplier=2, residual=True), DecoderBlock("res_x", num_layers=1)]
    decoder = VideoDecoder(
        VideoDecoderConfig(
            latent_channels=8,
            out_channels=3,
            base_channels=8,
            patch_size=4,
            blocks=tuple(blocks),
            spatial_padding_mode="reflect",
            causal=False,
        )
    )
    generator = torch.Generator().manual_seed(0)
    for tensor in decoder.parameters():
        fan_in = tensor[0].numel() if tensor.ndim > 1 else 4
        tensor.data = torch.randn(tensor.shape, generator=generator) / fan_in**0.5
    return decoder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_tile_is_the_whole_decode(decoder: VideoDecoder, dtype: torch.dtype) -> None:
    latents = torch.randn(1, 8, 2, 2, 3, generator=torch.Generator().manual_seed(1)).to(dtype)
    tiles = plan_tiles(2, 2, 3, TileSettings())
    assert len(tiles) == 1
    (frames,) = decode_tiled(decoder, latents, tiles)
    assert torch.equal(frames, decoder(latents))


def test_tiles_of_the_decoder_keep_its_memory_format(decoder: VideoDecoder) -> None:
    latents = torch.randn(1, 8, 4, 2, 4, generator=torch.Generator().manual_seed(1))
    tiles = plan_tiles(4, 2, 4, SMALL)
    assert len(tiles) == 4
    row_major = list(decode_tiled(decoder, latents, tiles))
    channels_last = list(
        decode_tiled(lambda part: decoder(part).contiguous(memory_format=torch.channels_last_3d), latents, tiles)
    )
    for one, other in zip(row_major, channels_last, strict=True):
        assert torch.equal(one, other)
        assert one.stride(1) > 1
        assert other.stride(1) == 1


def test_frames_come_as_they_are_finished_with_one_tile_in_flight() -> None:
    latents = torch.randn(1, 4, 7, 4, 6)
    tiles = plan_tiles(7, 4, 6, SMALL)
    times, heights, widths = axes(tiles)
    alive: list[weakref.ref[Tensor]] = []

    def decode(part: Tensor) -> Tensor:
        assert not [reference for reference in alive if reference() is not None]
        frames = fake_decode(part)
        alive.append(weakref.ref(frames))
        return frames

    groups = decode_tiled(decode, latents, tiles)
    for index, following in enumerate([*times[1:], None]):
        group = next(groups)
        assert len(alive) == (index + 1) * len(heights) * len(widths)
        assert group.shape[2] == (49 if following is None else following.start) - times[index].start
    with pytest.raises(StopIteration):
        next(groups)


def test_a_second_decode_makes_no_weights() -> None:
    latents = torch.randn(1, 4, 7, 4, 6)
    tiles = plan_tiles(7, 4, 6, SMALL)
    first = list(decode_tiled(fake_decode, latents, tiles))
    misses = (span_weights.cache_info().misses, summed_weights.cache_info().misses)
    second = list(decode_tiled(fake_decode, latents, tiles))
    assert (span_weights.cache_info().misses, summed_weights.cache_info().misses) == misses
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def test_one_tile_is_the_whole_encode() -> None:
    frames = torch.randn(1, 3, 9, 64, 96, generator=torch.Generator().manual_seed(0))
    tiles = plan_tiles(2, 2, 3, TileSettings())
    assert len(tiles) == 1
    for dtype in (torch.float32, torch.bfloat16):
        encoded = encode_tiled(fake_encode, frames.to(dtype), tiles)
        assert encoded.dtype == dtype
        assert torch.equal(encoded, fake_encode(frames.to(dtype)))


def test_refuses_an_incomplete_or_foreign_grid() -> None:
    latents = torch.randn(1, 4, 7, 4, 6)
    tiles = plan_tiles(7, 4, 6, SMALL)
    for wrong in (tiles[1:], tiles[:-1], tiles[::-1], (), plan_tiles(7, 4, 7, SMALL)):
        with pytest.raises(ValueError, match="do not make a complete grid"):
            next(decode_tiled(fake_decode, latents, wrong))
        with pytest.raises(ValueError, match=r"over \(.*\) frames and pixels do not make a complete grid over \(49, "):
            encode_tiled(fake_encode, torch.randn(1, 3, 49, 128, 192), wrong)


def test_refuses_a_vae_of_another_compression() -> None:
    latents, tiles = torch.randn(1, 4, 2, 2, 2), plan_tiles(2, 2, 2, SMALL)
    with pytest.raises(
        ValueError,
        match=r"decoded to \(2, 2, 2\) frames and pixels; its plan has \(9, 64, 64\): plan with the decoder's own "
        r"compression instead of \(8, 32, 32\)",
    ):
        next(decode_tiled(lambda part: part, latents, tiles))
    with pytest.raises(
        ValueError, match=r"encoded to \(3, 4, 4\) latents; its plan has \(2, 2, 2\): plan with the encoder's own"
    ):
        encode_tiled(partial(fake_encode, compression=WAN_2_2), torch.randn(1, 3, 9, 64, 64), tiles)
