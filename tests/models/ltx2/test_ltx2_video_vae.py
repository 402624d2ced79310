import dataclasses
import math
import re

import pytest
import torch
from diffusers import AutoencoderKLLTX2Video
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from vgen.models.ltx2 import video_vae
from vgen.models.ltx2.config import DecoderBlock, VideoDecoderConfig
from vgen.models.ltx2.video_vae import BorderedConv3d, VideoDecoder, validate_latent_size
from vgen.tasks.peers import diffusers_video_decoder

CHANNELS_LAST = torch.channels_last_3d


VERSIONS = {
    "2.0": (("compress_all", 2, True),) * 3,
    "2.3": (
        ("compress_all", 2, False),
        ("compress_all", 1, False),
        ("compress_time", 2, False),
        ("compress_space", 2, False),
    ),
}
"""Upsampling blocks in order of execution: kind, multiplier, residual."""


def decoder_config(
    ups: tuple[tuple[str, int, bool], ...],
    *,
    layers: tuple[int, ...],
    latent_channels: int,
    base_channels: int,
    padding: str,
) -> VideoDecoderConfig:
    blocks = [DecoderBlock("res_x", num_layers=layers[0])]
    for (kind, multiplier, residual), num_layers in zip(ups, layers[1:], strict=True):
        blocks.append(DecoderBlock(kind, multiplier=multiplier, residual=residual))
        blocks.append(DecoderBlock("res_x", num_layers=num_layers))
    return VideoDecoderConfig(
        latent_channels=latent_channels,
        out_channels=3,
        base_channels=base_channels,
        patch_size=4,
        blocks=tuple(blocks),
        spatial_padding_mode=padding,
        causal=False,
    )


def tiny_config(padding: str = "reflect", version: str = "2.0") -> VideoDecoderConfig:
    ups = VERSIONS[version]
    layers = (2, 1, 2, 1, 2)[: len(ups) + 1]
    return decoder_config(ups, layers=layers, latent_channels=8, base_channels=8, padding=padding)


FULL_CONFIGS = {
    "2.0": decoder_config(
        VERSIONS["2.0"], layers=(5, 5, 5, 5), latent_channels=128, base_channels=128, padding="reflect"
    ),
    "2.3": decoder_config(
        VERSIONS["2.3"], layers=(2, 2, 4, 6, 4), latent_channels=128, base_channels=128, padding="zeros"
    ),
}


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


DIFFUSERS_STRIDES = {
    "compress_all": "spatiotemporal",
    "compress_time": "temporal",
    "compress_space": "spatial",
}


def diffusers_twin(decoder: VideoDecoder) -> AutoencoderKLLTX2Video:
    config = decoder.config
    ups, layers = config.blocks[1::2], [block.num_layers for block in config.blocks[::2]]
    factors = tuple(block.multiplier for block in reversed(ups))
    vae = AutoencoderKLLTX2Video(
        latent_channels=config.latent_channels,
        block_out_channels=(16, 16, 16, 16),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_block_out_channels=tuple(
            config.base_channels * math.prod(factors[: level + 1]) for level in range(len(ups))
        ),
        decoder_layers_per_block=tuple(reversed(layers)),
        decoder_spatio_temporal_scaling=(True,) * len(ups),
        decoder_inject_noise=(False,) * len(layers),
        upsample_type=tuple(DIFFUSERS_STRIDES[block.kind] for block in ups),
        upsample_residual=tuple(block.residual for block in reversed(ups)),
        upsample_factor=factors,
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


UNEVEN = (
    ("compress_time", 1, True),
    ("compress_space", 4, True),
    ("compress_all", 1, True),
    ("compress_time", 2, True),
)
"""Shortcuts of every repeat, and along some axes only: no release has them, the config can."""


@pytest.mark.parametrize(
    ("version", "padding", "shape"),
    [
        ("2.0", "reflect", (2, 8, 3, 2, 3)),
        ("2.0", "zeros", (2, 8, 3, 2, 3)),
        ("2.0", "reflect", (1, 8, 1, 3, 2)),
        ("2.3", "zeros", (2, 8, 3, 2, 3)),
        ("2.3", "zeros", (1, 8, 1, 1, 2)),
        ("2.3", "reflect", (1, 8, 2, 2, 2)),
    ],
)
def test_matches_diffusers(version: str, padding: str, shape: tuple[int, ...]) -> None:
    decoder = random_decoder(tiny_config(padding, version))
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


def test_any_strides_multiplier_and_shortcut_match_diffusers() -> None:
    config = decoder_config(UNEVEN, layers=(1,) * 5, latent_channels=8, base_channels=8, padding="zeros")
    decoder = random_decoder(config)
    latents = random_latents(1, 8, 2, 2, 3)
    assert relative_error(decoder(latents), diffusers_decode(diffusers_twin(decoder), latents)) <= 2e-6


@pytest.mark.parametrize(("version", "padding"), [("2.0", "reflect"), ("2.3", "zeros")])
def test_the_peer_of_the_benchmark_has_the_same_weights(version: str, padding: str) -> None:
    decoder = random_decoder(tiny_config(padding, version))
    latents = random_latents(1, 8, 2, 2, 3)
    peer = diffusers_video_decoder(decoder, decoder.config)
    assert relative_error(decoder(latents), diffusers_decode(peer, latents)) <= 2e-6


@pytest.mark.parametrize(("version", "padding"), [("2.0", "reflect"), ("2.3", "zeros")])
def test_both_memory_formats_give_the_same_frames(version: str, padding: str) -> None:
    decoder = random_decoder(tiny_config(padding, version))
    latents = random_latents(2, 8, 2, 2, 3)
    row_major = decoder(latents)
    decoder.to(memory_format=CHANNELS_LAST)
    channels_last = decoder(latents)
    assert row_major.is_contiguous()
    assert channels_last.is_contiguous(memory_format=CHANNELS_LAST)
    assert relative_error(channels_last, row_major) <= 2e-6


def keep_channels_last(model: nn.Module) -> None:
    """Let convolutions answer in the format of their input, as on CUDA; on the CPU that depends on the machine."""
    for module in model.modules():
        if isinstance(module, nn.Conv3d):
            module.register_forward_hook(lambda _, inputs, output: output.contiguous(memory_format=CHANNELS_LAST))


@pytest.mark.parametrize("version", ["2.0", "2.3"])
def test_no_activation_leaves_channels_last(version: str) -> None:
    decoder = random_decoder(tiny_config("zeros", version)).to(memory_format=CHANNELS_LAST)
    keep_channels_last(decoder)
    seen = []

    def check(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen.append(inputs[0].is_contiguous(memory_format=CHANNELS_LAST))
        seen.append(output.is_contiguous(memory_format=CHANNELS_LAST))

    for name, module in decoder.named_modules():
        if name and not isinstance(module, nn.ModuleList):
            module.register_forward_hook(check)
    decoder(random_latents(1, 8, 2, 2, 2))
    blocks = sum(block.num_layers for block in decoder.config.blocks[::2])
    stages, ups = len(decoder.config.blocks[::2]), len(decoder.config.blocks[1::2])
    # Per block two convolutions, one of them called through its border; the upsamplers', first and last with theirs.
    assert len(seen) == 2 * (blocks * 4 + stages + ups * 3 + 4 + 1)
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
    traced = torch.compile(decoder, backend="aot_eager", fullgraph=True, dynamic=False)
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
        causal = BorderedConv3d(4, 4, mode, time_border=(3, 0))
        assert torch.equal(causal.bordered(x), torch.cat([spatial[:, :, :1]] * 3 + [spatial], dim=2))


def test_norm_sums_squares_in_fp32() -> None:
    conv = BorderedConv3d(64, 64, "zeros", normalize=True).half()
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


@pytest.mark.parametrize(
    ("version", "parameters", "count", "last"),
    [
        ("2.0", 528.4e6, 90, "up_blocks.6.res_blocks.4.conv2.conv.bias"),
        ("2.3", 407.2e6, 84, "up_blocks.8.res_blocks.3.conv2.conv.bias"),
    ],
)
def test_full_size_has_the_official_tensors(version: str, parameters: float, count: int, last: str) -> None:
    with torch.device("meta"):
        decoder = VideoDecoder(FULL_CONFIGS[version])
    assert round(sum(parameter.numel() for parameter in decoder.parameters()), -5) == parameters
    names = set(decoder.state_dict())
    assert len(dict(decoder.named_parameters())) == count
    assert names >= {
        "conv_in.conv.weight",
        "up_blocks.5.conv.conv.weight",
        last,
        "conv_out.conv.bias",
        "per_channel_statistics.mean-of-means",
        "per_channel_statistics.std-of-means",
    }
    assert len(names) == count + 2


@pytest.mark.parametrize("version", ["2.0", "2.3"])
def test_no_activation_reaches_int32_at_the_reference_size(version: str) -> None:
    """121x768x1280, on the meta device: kernels index with 32 bits up to here."""
    with torch.device("meta"):
        decoder = VideoDecoder(FULL_CONFIGS[version]).to(torch.bfloat16, memory_format=CHANNELS_LAST)
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
    with pytest.raises(ValueError, match=r"'attn'.*res_x, compress_all, compress_time, compress_space"):
        VideoDecoder(dataclasses.replace(config, blocks=(DecoderBlock("attn"),)))


def test_refuses_latents_too_small_to_reflect() -> None:
    decoder = random_decoder(tiny_config())
    with pytest.raises(ValueError, match=r"height is 1.*reflect padding needs at least 2 \(64 pixels\)"):
        decoder(random_latents(1, 8, 1, 1, 2))
    with pytest.raises(ValueError, match="width is 1"):
        validate_latent_size(decoder.config, 2, 1)
    validate_latent_size(tiny_config("zeros"), 1, 1)
