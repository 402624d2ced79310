import logging
import weakref
from collections.abc import Callable
from functools import cache, partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.parallel.test_tiles import (
    LTX2,
    SMALL,
    WAN_2_1,
    WAN_2_2,
    fake_decode,
    fake_encode,
    naive_blend,
    naive_encode_blend,
    relative_error,
)
from tests.ranks import run_ranks
from vgen.models.ltx2.config import DecoderBlock, VideoDecoderConfig
from vgen.models.ltx2.video_vae import VideoDecoder
from vgen.parallel import tile_parallel
from vgen.parallel.tile_parallel import decode_tiles_parallel, encode_tiles_parallel
from vgen.parallel.tiles import Tile, TileSettings, decode_tiled, encode_tiled, plan_tiles

# Relative to the largest value: other orders of up to eight additions. Measured: 2e-7 and 5e-16.
BOUNDS = {torch.float32: 1e-6, torch.float64: 1e-12}
GROUPS_OF_FOUR = {"all": (0, 1, 2, 3), "three": (1, 2, 3), "two": (2, 3)}
GROUPS_OF_EIGHT = {"all": tuple(range(8)), "seven": tuple(range(1, 8))}

Coder = Callable[[Tensor], Tensor]


@cache
def small_decoder(dtype: torch.dtype) -> VideoDecoder:
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
    return decoder.to(dtype)


def ltx2_decode(part: Tensor) -> Tensor:
    return cast(Tensor, small_decoder(part.dtype)(part))


def channels_last_decode(part: Tensor) -> Tensor:
    return fake_decode(part).contiguous(memory_format=torch.channels_last_3d)


def bf16_encode(part: Tensor) -> Tensor:
    return fake_encode(part).bfloat16()


def lonely_decode(compression: tuple[int, int, int] = LTX2) -> Coder:
    """A decode that insists on no other tile's frames being alive."""
    alive: list[weakref.ref[Tensor]] = []

    def decode(part: Tensor) -> Tensor:
        assert not [reference for reference in alive if reference() is not None]
        frames = fake_decode(part, compression)
        alive.append(weakref.ref(frames))
        return frames

    return decode


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


FOUR_TILES = plan_tiles(4, 2, 4, SMALL)
TWO_TILES = plan_tiles(2, 2, 4, SMALL)
MANY_TILES = plan_tiles(5, 4, 5, SMALL)
# Three tiles and more share a place: weights do not sum to 1.
CROWDED_TILES = plan_tiles(5, 2, 4, TileSettings(64, 32, 16, 8))
CAUSAL_TILES = plan_tiles(3, 7, 11, TileSettings(64, 32, None, 0, WAN_2_2))
BF16 = torch.bfloat16

# name -> (decode, latents, tiles, sum_dtype)
DECODES: dict[str, tuple[Coder, Tensor, tuple[Tile, ...], torch.dtype | None]] = {
    "ltx2": (ltx2_decode, noise(1, 8, 4, 2, 4), FOUR_TILES, None),
    "ltx2_fp64": (ltx2_decode, noise(1, 8, 4, 2, 4, dtype=torch.float64), FOUR_TILES, None),
    "fake": (lonely_decode(), noise(2, 4, 5, 4, 5), MANY_TILES, None),
    "fake_fp64": (lonely_decode(), noise(2, 4, 5, 4, 5, dtype=torch.float64), MANY_TILES, None),
    "channels_last": (channels_last_decode, noise(2, 4, 5, 4, 5), MANY_TILES, None),
    "bf16": (fake_decode, noise(1, 4, 5, 4, 5, dtype=BF16), MANY_TILES, None),
    "bf16_sum_fp32": (fake_decode, noise(1, 4, 5, 4, 5, dtype=BF16), MANY_TILES, torch.float32),
    "fp32_sum_fp64": (fake_decode, noise(1, 4, 5, 4, 5), MANY_TILES, torch.float64),
    "causal": (partial(fake_decode, compression=WAN_2_2), noise(1, 4, 3, 7, 11), CAUSAL_TILES, None),
    "crowded": (fake_decode, noise(1, 4, 5, 2, 4), CROWDED_TILES, None),
    "idle": (fake_decode, noise(1, 4, 2, 2, 4), TWO_TILES, None),
    "idle_channels_last": (channels_last_decode, noise(1, 4, 2, 2, 4), TWO_TILES, None),
    "idle_bf16_sum_fp32": (channels_last_decode, noise(1, 4, 2, 2, 4, dtype=BF16), TWO_TILES, torch.float32),
}
ENCODES: dict[str, tuple[Coder, Tensor, tuple[Tile, ...]]] = {
    "fp32": (fake_encode, noise(2, 3, 33, 128, 160), MANY_TILES),
    "fp64": (fake_encode, noise(2, 3, 33, 128, 160, dtype=torch.float64), MANY_TILES),
    "bf16": (bf16_encode, noise(2, 3, 33, 128, 160), MANY_TILES),
    "crowded": (fake_encode, noise(1, 3, 33, 64, 128), CROWDED_TILES),
    "idle": (fake_encode, noise(1, 3, 9, 64, 128), TWO_TILES),
    "idle_bf16": (bf16_encode, noise(1, 3, 9, 64, 128), TWO_TILES),
}

# 45x80 latents, of eight pixels to keep them small.
WIDE_SETTINGS = TileSettings(128, 16, None, 0, WAN_2_1)
WIDE = (lonely_decode(WAN_2_1), noise(1, 3, 2, 45, 80), plan_tiles(2, 45, 80, WIDE_SETTINGS))


def serial(decode: Coder, latents: Tensor, tiles: tuple[Tile, ...]) -> Tensor:
    return torch.cat(list(decode_tiled(decode, latents, tiles)), dim=2)


def on_groups(groups: dict[str, tuple[int, ...]], cases: Callable[[dist.ProcessGroup], Any]) -> dict[str, Any]:
    """The cases' results by the groups that this rank is in."""
    made = {name: dist.new_group(list(ranks)) for name, ranks in groups.items()}
    return {name: cases(made[name]) for name, ranks in groups.items() if dist.get_rank() in ranks}


def cases_of_four(group: dist.ProcessGroup) -> dict[str, Any]:
    log = logging.getLogger("vgen.parallel.tile_parallel")
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    results: dict[str, Any] = {}
    for to_first_only in (False, True):
        for name, (decode, latents, tiles, sum_dtype) in DECODES.items():
            results["decode", name, to_first_only] = decode_tiles_parallel(
                decode, latents, tiles, group, to_first_only=to_first_only, sum_dtype=sum_dtype
            )
        for name, (encode, frames, tiles) in ENCODES.items():
            results["encode", name, to_first_only] = encode_tiles_parallel(
                encode, frames, tiles, group, to_first_only=to_first_only
            )
    log.removeHandler(handler)
    results["messages"] = [(record.levelname, record.getMessage()) for record in records]
    return results


def cases_of_eight(group: dist.ProcessGroup) -> dict[str, Any]:
    frames = decode_tiles_parallel(*WIDE, group)
    assert frames is not None
    return {"error": relative_error(frames, serial(*WIDE)), "idle": decode_tiles_parallel(*DECODES["idle"][:3], group)}


@pytest.fixture(scope="module")
def four() -> list[dict[str, Any]]:
    return run_ranks(4, on_groups, GROUPS_OF_FOUR, cases_of_four)


@pytest.fixture(scope="module")
def expected() -> dict[tuple[str, str], Tensor]:
    frames = {("decode", name): serial(*case[:3]) for name, case in DECODES.items()}
    return frames | {("encode", name): encode_tiled(*case) for name, case in ENCODES.items()}


@pytest.mark.parametrize("group", GROUPS_OF_FOUR)
def test_ranks_together_equal_the_serial_path(
    four: list[dict[str, Any]], expected: dict[tuple[str, str], Tensor], group: str
) -> None:
    ranks = GROUPS_OF_FOUR[group]
    for (kind, name), serial_result in expected.items():
        for to_first_only in (False, True):
            first, *others = (four[rank][group][kind, name, to_first_only] for rank in ranks)
            assert first.dtype == serial_result.dtype
            assert first.shape == serial_result.shape
            assert first.stride() == serial_result.stride(), (kind, name)
            if to_first_only:
                assert all(other is None for other in others)
            else:
                assert all(torch.equal(first, other) for other in others)
                assert all(first.stride() == other.stride() for other in others)
            if first.dtype in BOUNDS:
                assert relative_error(first, serial_result) <= BOUNDS[first.dtype], (kind, name)


@pytest.mark.parametrize("group", GROUPS_OF_FOUR)
def test_bf16_is_within_its_rounding_and_sums_in_fp32_are_better(four: list[dict[str, Any]], group: str) -> None:
    _, latents, tiles, _ = DECODES["bf16"]
    blended = naive_blend(latents, tiles)  # decoded in bf16, blended in fp64
    results = four[GROUPS_OF_FOUR[group][0]][group]
    # Eight tiles meet in a place: eight sums, each rounded by up to 2^-9 of the largest value; in fp32, the result is.
    assert relative_error(results["decode", "bf16", False], blended) < 8 * 2**-9
    assert relative_error(results["decode", "bf16_sum_fp32", False], blended) <= 2**-8
    encode, frames, tiles = ENCODES["bf16"]
    blended = naive_encode_blend(encode, frames, tiles, LTX2)
    assert relative_error(results["encode", "bf16", False], blended) <= 2**-8


def test_the_first_rank_tells_the_loads_and_warns_of_idle_ranks_once(four: list[dict[str, Any]]) -> None:
    warnings = {
        (group, rank): [text for level, text in four[rank][group]["messages"] if level == "WARNING"]
        for group, ranks in GROUPS_OF_FOUR.items()
        for rank in ranks
    }
    (text,) = warnings.pop(("all", 0))
    assert text.startswith("2 of 4 ranks have no tile: a clip of 2 tiles keeps at most 2 ranks busy")
    (text,) = warnings.pop(("three", 1))
    assert text.startswith("1 of 3 ranks have no tile")
    assert not any(warnings.values())
    debug = [text for level, text in four[2]["two"]["messages"] if level == "DEBUG"]
    assert "4 tiles over 2 ranks: [2, 2] tiles, [30, 30] latents, imbalance (max/mean - 1) 0.0 %" in debug
    assert not four[3]["two"]["messages"]


def test_a_wide_clip_on_seven_and_eight_ranks() -> None:
    results = run_ranks(8, on_groups, GROUPS_OF_EIGHT, cases_of_eight)
    idle = serial(*DECODES["idle"][:3])
    for group, ranks in GROUPS_OF_EIGHT.items():
        for rank in ranks:
            assert results[rank][group]["error"] <= 1e-6
            assert relative_error(results[rank][group]["idle"], idle) <= 1e-6


def test_without_a_group_it_is_the_serial_path_bit_for_bit(expected: dict[tuple[str, str], Tensor]) -> None:
    for name, (decode, latents, tiles, sum_dtype) in DECODES.items():
        frames = decode_tiles_parallel(decode, latents, tiles, None, to_first_only=True, sum_dtype=sum_dtype)
        assert frames is not None
        assert sum_dtype or torch.equal(frames, expected["decode", name]), name
    for name, (encode, clip, tiles) in ENCODES.items():
        latents = encode_tiles_parallel(encode, clip, tiles, None)
        assert latents is not None
        assert torch.equal(latents, expected["encode", name]), name


def test_the_sums_are_divided_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The frames are the buffer of the sums: no second one of their size is made."""
    buffers = []
    make = tile_parallel.sum_buffer

    def spy(frames: Tensor, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        buffers.append(make(frames, size, dtype))
        return buffers[-1]

    monkeypatch.setattr(tile_parallel, "sum_buffer", spy)
    frames = decode_tiles_parallel(fake_decode, noise(1, 4, 5, 4, 5), MANY_TILES, None)
    assert frames is not None
    (buffer,) = buffers
    assert frames.data_ptr() == buffer.data_ptr()


def test_refuses_an_incomplete_grid() -> None:
    with pytest.raises(ValueError, match="do not make a complete grid"):
        decode_tiles_parallel(fake_decode, noise(1, 4, 5, 4, 5), MANY_TILES[1:], None)
    with pytest.raises(ValueError, match="do not make a complete grid"):
        encode_tiles_parallel(fake_encode, noise(1, 3, 33, 128, 160), MANY_TILES[1:], None)
