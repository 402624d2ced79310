import dataclasses
import re

import pytest
import torch
from diffusers import AutoencoderKLLTX2Video
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from vgen.models.ltx2 import video_vae
from vgen.models.ltx2.config import DecoderBlock, VideoDecoderConfig
from vgen.models.ltx2.video_vae import BorderedConv3d, VideoDecoder, validate_latent_size

CHANNELS_LAST = torch.channels_last_3d


def decoder_config(
    *, latent_channels: int, base_channels: int, layers: int, padding: str = "reflect", multiplier: int = 2
) -> VideoDecoderConfig:
    blocks = [DecoderBlock("res_x", num_layers=layers)]
    for _ in range(3):
        blocks.append(DecoderBlock("compress_all", multiplier=multiplier, residual=multiplier == 2))
        blocks.append(DecoderBlock("res_x", num_layers=layers))
    return VideoDecoderConfig(
        latent_channels=latent_channels,
        out_channels=3,
        base_channels=base_channels,
        patch_size=4,
        blocks=tuple(blocks),
        spatial_padding_mode=padding,
        causal=False,
    )


def tiny_config(padding: str = "reflect", multiplier: int = 2) -> VideoDecoderConfig:
    return decoder_config(latent_channels=8, base_channels=8, layers=2, padding=padding, multiplier=multiplier)


FULL_CONFIG = decoder_config(latent_channels=128, base_channels=128, layers=5)


def randomize(module: nn.Module, seed: int = 0) -> None:
    """Random weights at a scale that keeps activations near 1; statistics away from 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in module.parameters():
        fan_in = tensor[0].numel() if tensor.ndim > 1 else 4
        tensor.data = torch.randn(tensor.shape, generator=generator) / fan_in**0.5
    for buffer in module.buffers():
        buffer.data = 0.5 + torch.rand(buffer.shape, generator=generator)


def random_decoder(config: VideoDecoderConfig, seed: int = 0) -> VideoDecoder:
    decoder = VideoDecoder(config)
    randomize(decoder, seed)
    return decoder


def random_latents(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def diffusers_name(name: str) -> str:
    """Our (official) name -> the name inside diffusers' decoder."""

    def renamed_block(match: re.Match[str]) -> str:
        index = int(match[1])
        if index == 0:
            return "mid_block"
        return f"up_blocks.{(index - 1) // 2}" + (".upsamplers.0" if index % 2 else "")

    return re.sub(r"^up_blocks\.(\d+)", renamed_block, name).replace("res_blocks", "resnets")


def diffusers_twin(decoder: VideoDecoder) -> AutoencoderKLLTX2Video:
    config = decoder.config
    width = config.base_channels
    multiplier = config.blocks[1].multiplier
    channels = tuple(width * multiplier ** (level + 1) for level in range(3))
    layers = (config.blocks[0].num_layers,) * 4
    vae = AutoencoderKLLTX2Video(
        latent_channels=config.latent_channels,
        block_out_channels=(16, 16, 16, 16),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_block_out_channels=channels,
        decoder_layers_per_block=layers,
        upsample_residual=(config.blocks[1].residual,) * 3,
        upsample_factor=(multiplier,) * 3,
        decoder_causal=False,
        decoder_spatial_padding_mode=config.spatial_padding_mode,
    )
    statistics = "per_channel_statistics."
    state = decoder.state_dict()
    vae.decoder.load_state_dict(
        {diffusers_name(name): value for name, value in state.items() if not name.startswith(statistics)}
    )
    vae.latents_mean.copy_(state[statistics + "mean-of-means"])
    vae.latents_std.copy_(state[statistics + "std-of-means"])
    return vae.eval()


@torch.no_grad()
def diffusers_decode(vae: AutoencoderKLLTX2Video, latents: Tensor) -> Tensor:
    """As its pipeline does: undo the normalization, then decode."""
    mean, std = (vae.latents_mean.view(1, -1, 1, 1, 1), vae.latents_std.view(1, -1, 1, 1, 1))
    return vae.decode(latents * std + mean, return_dict=False)[0]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize(
    ("padding", "multiplier", "shape"),
    [
        ("reflect", 2, (2, 8, 3, 2, 3)),
        ("zeros", 2, (2, 8, 3, 2, 3)),
        ("reflect", 2, (1, 8, 1, 3, 2)),
        ("zeros", 2, (1, 8, 1, 1, 2)),
        ("reflect", 1, (1, 8, 2, 2, 2)),
    ],
)
def test_matches_diffusers(padding: str, multiplier: int, shape: tuple[int, ...]) -> None:
    decoder = random_decoder(tiny_config(padding, multiplier))
    twin = diffusers_twin(decoder)
    latents = random_latents(*shape)
    expected = diffusers_decode(twin, latents)
    frames = decoder(latents)
    B, _, latent_frames, height, width = shape
    assert frames.shape == (B, 3, 8 * (latent_frames - 1) + 1, 32 * height, 32 * width)
    assert 0.5 < expected.abs().max() < 20
    assert relative_error(frames, expected) <= 2e-6
    # In fp64 nothing is left but the order of the sums, so any error of the architecture would stand out.
    assert relative_error(decoder.double()(latents.double()), diffusers_decode(twin.double(), latents.double())) < 1e-13


@pytest.mark.parametrize("padding", ["reflect", "zeros"])
def test_both_memory_formats_give_the_same_frames(padding: str) -> None:
    decoder = random_decoder(tiny_config(padding))
    latents = random_latents(2, 8, 2, 2, 3)
    row_major = decoder(latents)
    decoder.to(memory_format=CHANNELS_LAST)
    channels_last = decoder(latents)
    assert row_major.is_contiguous()
    assert channels_last.is_contiguous(memory_format=CHANNELS_LAST)
    assert relative_error(channels_last, row_major) <= 2e-6


def test_no_activation_leaves_channels_last() -> None:
    # bf16, because torch's fp32 3-D convolution on the CPU always answers row-major.
    decoder = random_decoder(tiny_config()).to(torch.bfloat16, memory_format=CHANNELS_LAST)
    seen = []

    def check(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen.append(inputs[0].is_contiguous(memory_format=CHANNELS_LAST))
        seen.append(output.is_contiguous(memory_format=CHANNELS_LAST))

    for name, module in decoder.named_modules():
        if name and not isinstance(module, nn.ModuleList):
            module.register_forward_hook(check)
    decoder(random_latents(1, 8, 2, 2, 2).bfloat16().to(memory_format=CHANNELS_LAST))
    # 21 convolutions, 13 of them called through their border, 8 blocks, 4 stages, 3 upsamplers, the statistics.
    assert len(seen) == 2 * (21 + 13 + 8 + 4 + 3 + 1)
    assert all(seen)


class CountCopies(TorchDispatchMode):
    """Counts whole-tensor copies that are no part of the plan: conversions of format or dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.overloadpacket.__name__
        large = args and isinstance(args[0], Tensor) and args[0].numel() > 64
        if name in ("clone", "_to_copy", "contiguous", "reflection_pad3d", "constant_pad_nd", "cat") and large:
            # The norm's scale, one value per pixel, is cast from fp32.
            self.count += args[0].shape[1] > 1
        return func(*args, **(kwargs or {}))


def test_row_major_latents_are_converted_once() -> None:
    decoder = random_decoder(tiny_config()).to(torch.bfloat16, memory_format=CHANNELS_LAST)
    latents = random_latents(1, 8, 2, 2, 3).bfloat16()
    with CountCopies() as copies:
        decoder(latents)
    assert copies.count == 1


def test_traces_as_one_graph() -> None:
    """The condition for compiling it whole; ``aot_eager`` runs the traced graph without generating code."""
    decoder = random_decoder(tiny_config()).to(memory_format=CHANNELS_LAST)
    latents = random_latents(1, 8, 2, 2, 3)
    traced = torch.compile(decoder, backend="aot_eager", fullgraph=True)
    assert relative_error(traced(latents), decoder(latents)) <= 2e-6


def test_latents_are_left_alone() -> None:
    decoder = random_decoder(tiny_config())
    latents = random_latents(1, 8, 2, 2, 2)
    before = latents.clone()
    first = decoder(latents)
    assert torch.equal(latents, before)
    assert torch.equal(decoder(latents), first)


def test_frames_have_the_dtype_of_the_latents() -> None:
    decoder = random_decoder(tiny_config())
    latents = random_latents(1, 8, 1, 2, 2)
    exact = decoder(latents)
    assert decoder(latents.double()).dtype == torch.float64
    decoder.to(torch.bfloat16)
    frames = decoder(latents)
    assert frames.dtype == torch.float32
    assert relative_error(frames, exact) < 0.1


@pytest.mark.parametrize("shape", [(1, 4, 3, 4, 5), (2, 4, 1, 2, 2), (1, 4, 2, 2, 7)])
def test_borders_are_those_of_pad(shape: tuple[int, ...]) -> None:
    x = random_latents(*shape)
    for mode, pad_mode in (("reflect", "reflect"), ("zeros", "constant")):
        conv = BorderedConv3d(4, 4, mode)
        spatial = nn.functional.pad(x.flatten(1, 2), (1, 1, 1, 1), mode=pad_mode).unflatten(1, shape[1:3])
        expected = torch.cat([spatial[:, :, :1], spatial, spatial[:, :, -1:]], dim=2)
        assert torch.equal(conv.bordered(x), expected)


def test_norm_sums_squares_in_fp32() -> None:
    conv = BorderedConv3d(64, 64, "zeros", normalize=True)
    signs = torch.sign(random_latents(1, 64, 2, 2, 2))
    inner = conv.bordered(100 * signs.half())[..., 1:-1, 1:-1, 1:-1]  # 64 * 100² is beyond fp16
    torch.testing.assert_close(inner, nn.functional.silu(signs).half())


def test_the_border_is_a_seam() -> None:
    """Replacing the attribute is all that another border needs."""
    decoder = random_decoder(tiny_config("zeros"))
    latents = random_latents(1, 8, 2, 2, 2)
    zeros = decoder(latents)
    for module in decoder.modules():
        if isinstance(module, BorderedConv3d):
            module.fill_border = video_vae.reflect_border
    reflected = decoder(latents)
    twin = VideoDecoder(tiny_config("reflect"))
    twin.load_state_dict(decoder.state_dict())
    assert torch.equal(reflected, twin(latents))
    assert relative_error(reflected, zeros) > 0.01


def test_full_size_has_the_official_tensors() -> None:
    with torch.device("meta"):
        decoder = VideoDecoder(FULL_CONFIG)
    assert round(sum(parameter.numel() for parameter in decoder.parameters()) / 1e5) == 5284
    names = set(decoder.state_dict())
    assert len(dict(decoder.named_parameters())) == 90
    assert names >= {
        "conv_in.conv.weight",
        "up_blocks.0.res_blocks.4.conv2.conv.bias",
        "up_blocks.5.conv.conv.weight",
        "conv_out.conv.bias",
        "per_channel_statistics.mean-of-means",
        "per_channel_statistics.std-of-means",
    }
    assert len(names) == 92


def test_no_activation_reaches_int32_at_the_reference_size() -> None:
    """121x768x1280, on the meta device: kernels index with 32 bits up to here."""
    with torch.device("meta"):
        decoder = VideoDecoder(FULL_CONFIG).to(torch.bfloat16, memory_format=CHANNELS_LAST)
    sizes: list[int] = []
    for module in decoder.modules():
        if isinstance(module, nn.Conv3d):
            module.register_forward_hook(lambda _, inputs, output: sizes.extend((inputs[0].numel(), output.numel())))
    frames = decoder(torch.empty(1, 128, 16, 24, 40, dtype=torch.bfloat16, device="meta"))
    assert frames.shape == (1, 3, 121, 768, 1280)
    assert max(sizes) == 128 * 123 * 194 * 322
    assert max(*sizes, frames.numel()) < 2**31


def test_refuses_what_it_does_not_build() -> None:
    config = tiny_config()
    with pytest.raises(ValueError, match="causal=True"):
        VideoDecoder(dataclasses.replace(config, causal=True))
    with pytest.raises(ValueError, match="spatial_padding_mode='circular'"):
        VideoDecoder(dataclasses.replace(config, spatial_padding_mode="circular"))
    with pytest.raises(ValueError, match="'compress_time'"):
        VideoDecoder(dataclasses.replace(config, blocks=(DecoderBlock("compress_time"),)))


def test_refuses_latents_too_small_to_reflect() -> None:
    decoder = random_decoder(tiny_config())
    with pytest.raises(ValueError, match=r"height is 1.*reflect padding needs at least 2 \(64 pixels\)"):
        decoder(random_latents(1, 8, 1, 1, 2))
    with pytest.raises(ValueError, match="width is 1"):
        validate_latent_size(decoder.config, 2, 1)
    validate_latent_size(tiny_config("zeros"), 1, 1)
