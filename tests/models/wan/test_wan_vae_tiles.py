"""Tiles of the Wan VAEs against the whole clip, and the size of the tensors of a whole one."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from vgen.models.wan.config import VAE_2_1, VAE_2_2, WanVaeConfig
from vgen.models.wan.vae import VideoDecoder, VideoEncoder
from vgen.models.wan.vae_levels import INT32_ELEMENTS, largest_decoder_tensor, largest_encoder_tensor
from vgen.parallel.tiles import Tile, TileSettings, decode_tiled, encode_tiled, plan_tiles

KINDS = ("2.1", "2.2")
CONFIGS = {
    "2.1": replace(VAE_2_1, base_dim=4, num_res_blocks=1),
    "2.2": replace(VAE_2_2, base_dim=8, decoder_base_dim=4, num_res_blocks=1),
}


def randomized(half: nn.Module) -> nn.Module:
    """Random weights at a scale that keeps activations near 1, and gains away from 1."""
    generator = torch.Generator().manual_seed(0)
    for name, tensor in half.named_parameters():
        if name.endswith("gamma"):
            tensor.data = 0.5 + torch.rand(tensor.shape, generator=generator)
        else:
            fan_in = tensor[0].numel() if tensor.ndim > 1 else 4
            tensor.data = torch.randn(tensor.shape, generator=generator) / fan_in**0.5
    return half


def settings(config: WanVaeConfig, tile: int, overlap: int) -> TileSettings:
    """Tiles of ``tile`` latents along the long side, all frames each."""
    S = config.scale_factor_spatial
    return TileSettings(S * tile, S * overlap, None, 0, (config.scale_factor_temporal, S, S))


def random_latents(config: WanVaeConfig, *size: int) -> Tensor:
    return torch.randn(2, config.z_dim, *size, generator=torch.Generator().manual_seed(1))


def random_frames(config: WanVaeConfig, latent_frames: int, *size: int) -> Tensor:
    """Frames of latents of this size, of a structure coarser than a pixel."""
    S = config.scale_factor_spatial
    coarse = torch.randn(1, 3, 4, *(n * S // 16 for n in size), generator=torch.Generator().manual_seed(2))
    return nn.functional.interpolate(coarse, (4 * latent_frames - 3, *(n * S for n in size)), mode="trilinear")


def decoded(decode: VideoDecoder, latents: Tensor, tiles: tuple[Tile, ...], chunk: int | None = 1) -> Tensor:
    (frames,) = decode_tiled(lambda part: decode(part, chunk), latents, tiles)
    return frames


def relative_error(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape
    return ((actual - expected).abs().max() / expected.abs().max()).item()


def relative_rms(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape
    return ((actual - expected).square().mean() / expected.square().mean()).sqrt().item()


@pytest.mark.parametrize("chunk", [1, 2, None])
@pytest.mark.parametrize("kind", KINDS)
def test_one_tile_is_the_whole(kind: str, chunk: int | None) -> None:
    config = CONFIGS[kind]
    tiles = plan_tiles(3, 2, 3, settings(config, 3, 1))
    assert len(tiles) == 1
    decoder, encoder = randomized(VideoDecoder(config)), randomized(VideoEncoder(config))
    latents, frames = random_latents(config, 3, 2, 3), random_frames(config, 3, 2, 3)
    assert torch.equal(decoded(decoder, latents, tiles, chunk), decoder(latents, chunk))
    assert torch.equal(encode_tiled(partial(encoder, chunk=chunk), frames, tiles), encoder(frames, chunk))


@pytest.mark.parametrize("kind", KINDS)
def test_each_tile_is_a_clip_of_its_own(kind: str) -> None:
    """Tiles that do not overlap are what they are alone: each begins without the state of another."""
    config = CONFIGS[kind]
    S = config.scale_factor_spatial
    tiles = plan_tiles(3, 4, 4, settings(config, 2, 0))
    assert len(tiles) == 4
    decoder, encoder = randomized(VideoDecoder(config)), randomized(VideoEncoder(config))
    latents, frames = random_latents(config, 3, 4, 4), random_frames(config, 3, 4, 4)
    pictures, codes = decoded(decoder, latents, tiles), encode_tiled(encoder, frames, tiles)
    for y in (0, 1):
        for x in (0, 1):
            small = (slice(None), slice(None), slice(None), slice(2 * y, 2 * y + 2), slice(2 * x, 2 * x + 2))
            large = (*small[:3], slice(2 * S * y, 2 * S * (y + 1)), slice(2 * S * x, 2 * S * (x + 1)))
            assert torch.equal(pictures[large], decoder(latents[small]))
            assert torch.equal(codes[small], encoder(frames[large]))


# How many latents the convolutions reach to each side, 3x3 each. Decoder: 1 + 4 + 4 at the latents, then per level the
# upsampling and two blocks, 5/2, 5/4 and 5/8, and the last one. Encoder, in cells of 1/8: (1 + 2 + 2) + 2(2 + 2) +
# 4(2 + 2) + 8(2 + 4 + 1), a downsampling reaching two cells to the right.
DECODER_REACH, ENCODER_REACH = 14, 11


@pytest.mark.parametrize("axis", ["height", "width"])
@pytest.mark.parametrize("kind", KINDS)
def test_far_from_a_seam_tiles_are_the_whole(kind: str, axis: str) -> None:
    """Without the attention, which sees all of its tile; in fp64, where nothing is left but the order of sums."""
    config = CONFIGS[kind]
    S = config.scale_factor_spatial
    size = (2, 44) if axis == "width" else (44, 2)
    tiles = plan_tiles(3, *size, settings(config, 24, 4))
    assert [(t.width if axis == "width" else t.height).latent_start for t in tiles] == [0, 20]
    decoder, encoder = randomized(VideoDecoder(config)).double(), randomized(VideoEncoder(config)).double()
    for half in (decoder.decoder, encoder.encoder):
        for parameter in half.mid_block.attentions[0].proj.parameters():
            parameter.data.zero_()  # x + 0
    latents, frames = random_latents(config, 3, *size).double(), random_frames(config, 3, *size).double()
    for reach, unit, tiled, whole in (
        (DECODER_REACH, S, decoded(decoder, latents, tiles), decoder(latents)),
        (ENCODER_REACH, 1, encode_tiled(encoder, frames, tiles), encoder(frames)),
    ):
        line = 4 if axis == "width" else 3
        # The first tile's far end is at latent 24, the second one's at 20.
        edges = [unit * (24 - reach), unit * (2 * reach - 4), unit * (24 - reach)]
        first, seam, second = zip(tiled.split(edges, line), whole.split(edges, line), strict=True)
        assert relative_error(*first) <= 1e-12
        assert relative_error(*second) <= 1e-12
        assert relative_error(*seam) > 1e-3


@pytest.mark.parametrize(
    ("kind", "tile", "height", "width", "encode_bound", "decode_bound"),
    [("2.1", 128, 152, 200, 0.027, 0.014), ("2.2", 256, 304, 400, 0.04, 0.034)],
)
def test_tiles_come_close(
    kind: str, tile: int, height: int, width: int, encode_bound: float, decode_bound: float
) -> None:
    """At 19x25 latents, which no tile divides; the tiles are in pixels of the frames, not in 2.2's patches of them.

    The bounds are measured, of random weights: the root mean square of the difference over that of the whole.
    """
    config = CONFIGS[kind]
    S = config.scale_factor_spatial
    tiles = plan_tiles(2, 19, 25, settings(config, 16, 4))
    encoder, decoder = randomized(VideoEncoder(config)), randomized(VideoDecoder(config))
    frames, latents = random_frames(config, 2, 19, 25), random_latents(config, 2, 19, 25)[:1]
    assert frames.shape == (1, 3, 5, height, width)
    seen: list[tuple[int, ...]] = []

    def encode(part: Tensor) -> Tensor:
        seen.append(tuple(part.shape[3:]))
        return encoder(part)

    encoded = encode_tiled(encode, frames, tiles)
    assert encoded.shape == (1, config.z_dim, 2, 19, 25)
    # The short side's tiles are 16 * 19 / 25 latents.
    assert seen == [(12 * S, tile), (12 * S, 13 * S), (11 * S, tile), (11 * S, 13 * S)]
    assert relative_rms(encoded, encoder(frames)) <= encode_bound
    assert relative_rms(decoded(decoder, latents, tiles), decoder(latents)) <= decode_bound


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation returned."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize(("config", "latents"), [(VAE_2_2, (31, 44, 80)), (VAE_2_1, (21, 90, 160))])
def test_no_tensor_of_a_whole_clip_is_too_large(config: WanVaeConfig, latents: tuple[int, int, int]) -> None:
    """704x1280x121 and 720x1280x81 on the meta device, as many frames at a time as the guard lets through."""
    frames, height, width = latents
    S = config.scale_factor_spatial
    with torch.device("meta"):
        decoder, encoder = VideoDecoder(config), VideoEncoder(config)
        z = torch.empty(1, config.z_dim, *latents)
        video = torch.empty(1, 3, 4 * frames - 3, S * height, S * width)
    for half, x, chunk, largest in (
        (decoder, z, decoder.decode_chunk, largest_decoder_tensor),
        (encoder, video, encoder.encode_chunk, largest_encoder_tensor),
    ):
        with LargestTensor() as guarded:
            half(x, None)
        assert INT32_ELEMENTS / 2 < guarded.elements < INT32_ELEMENTS
        with LargestTensor() as unguarded:
            chunk(x)
        assert unguarded.elements > INT32_ELEMENTS
        assert largest(config, frames, height, width) > INT32_ELEMENTS
