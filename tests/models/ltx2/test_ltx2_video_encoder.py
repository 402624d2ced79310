import dataclasses
import math
import re
import weakref

import pytest
import torch
from diffusers import AutoencoderKLLTX2Video
from test_ltx2_video_vae import (
    CHANNELS_LAST,
    CountCopies,
    diffusers_decode,
    keep_channels_last,
    random_decoder,
    random_latents,
    randomize,
    relative_error,
)
from test_ltx2_video_vae import diffusers_twin as decoder_twin
from test_ltx2_video_vae import tiny_config as tiny_decoder_config
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from vgen.models.ltx2.config import EncoderBlock, VideoEncoderConfig
from vgen.models.ltx2.video_encoder import SpaceToDepthDownsample, VideoEncoder, validate_frames
from vgen.models.ltx2.video_vae import BorderedConv3d, reflect_border
from vgen.tasks.peers import diffusers_video_encoder

KINDS = ("compress_space_res", "compress_time_res", "compress_all_res", "compress_all_res")
MULTIPLIERS = {"2.0": (2, 2, 2, 2), "2.3": (2, 2, 2, 1)}
STATISTICS = ("per_channel_statistics.mean-of-means", "per_channel_statistics.std-of-means")


def encoder_config(
    multipliers: tuple[int, ...], *, layers: tuple[int, ...], latent_channels: int, padding: str = "zeros"
) -> VideoEncoderConfig:
    blocks = [EncoderBlock("res_x", num_layers=layers[0])]
    for kind, multiplier, num_layers in zip(KINDS, multipliers, layers[1:], strict=True):
        blocks.append(EncoderBlock(kind, multiplier=multiplier))
        blocks.append(EncoderBlock("res_x", num_layers=num_layers))
    return VideoEncoderConfig(
        in_channels=3,
        latent_channels=latent_channels,
        patch_size=4,
        blocks=tuple(blocks),
        spatial_padding_mode=padding,
    )


def tiny_config(version: str = "2.0", padding: str = "zeros") -> VideoEncoderConfig:
    return encoder_config(MULTIPLIERS[version], layers=(1, 2, 1, 2, 1), latent_channels=8, padding=padding)


FULL_CONFIGS = {
    "2.0": encoder_config(MULTIPLIERS["2.0"], layers=(4, 6, 6, 2, 2), latent_channels=128),
    "2.3": encoder_config(MULTIPLIERS["2.3"], layers=(4, 6, 4, 2, 2), latent_channels=128),
}


def random_encoder(config: VideoEncoderConfig, seed: int = 0) -> VideoEncoder:
    encoder = VideoEncoder(config)
    randomize(encoder, seed)
    return encoder


def moving_shapes(num_frames: int, height: int, width: int) -> Tensor:
    """A clip [1, 3, F, H, W] in -1 to 1: a striped disk and a chequered box cross a waving ground."""
    time = torch.arange(num_frames).view(-1, 1, 1) / num_frames
    y, x = torch.arange(height).view(1, -1, 1), torch.arange(width).view(1, 1, -1)
    ground = torch.sin(x / 5 + 9 * time) * torch.cos(y / 7 - 4 * time)
    stripes = torch.sin((x + 2 * y) / 3)
    chequers = torch.where((x // 4 + y // 4) % 2 == 0, 0.9, -0.7)
    disk = (x - width * (0.1 + 0.8 * time)) ** 2 + (y - height * (0.4 + 0.2 * time)) ** 2 < (height / 4) ** 2
    box = ((x - width * (0.9 - 0.7 * time)).abs() < width / 8) & ((y - height * time).abs() < height / 6)
    luma = torch.where(disk, stripes, torch.where(box, chequers, ground))
    return torch.stack((luma, 0.6 * luma + 0.3 * disk, 0.5 - 0.5 * luma + 0.0 * time)).unsqueeze(0)


def diffusers_name(name: str) -> str:
    """Our (official) name -> the name inside diffusers' encoder."""

    def renamed_block(match: re.Match[str]) -> str:
        index = int(match[1])
        if index == 8:
            return "mid_block"
        return f"down_blocks.{index // 2}" + (".downsamplers.0" if index % 2 else "")

    return re.sub(r"^down_blocks\.(\d+)", renamed_block, name).replace("res_blocks", "resnets")


def diffusers_twin(encoder: VideoEncoder) -> AutoencoderKLLTX2Video:
    config = encoder.config
    multipliers = [block.multiplier for block in config.blocks[1::2]]
    vae = AutoencoderKLLTX2Video(
        latent_channels=config.latent_channels,
        block_out_channels=tuple(
            config.latent_channels * math.prod(multipliers[: level + 1]) for level in range(len(multipliers))
        ),
        layers_per_block=tuple(block.num_layers for block in config.blocks[::2]),
        decoder_block_out_channels=(16, 16, 16),
        decoder_layers_per_block=(1, 1, 1, 1),
        encoder_spatial_padding_mode=config.spatial_padding_mode,
    )
    state = encoder.state_dict()
    vae.encoder.load_state_dict(
        {diffusers_name(name): value for name, value in state.items() if name not in STATISTICS}
    )
    vae.latents_mean.copy_(state[STATISTICS[0]])
    vae.latents_std.copy_(state[STATISTICS[1]])
    return vae.eval()


@torch.no_grad()
def diffusers_encode(vae: AutoencoderKLLTX2Video, frames: Tensor) -> Tensor:
    """As its pipelines do: the distribution's mode, then normalize."""
    mean, std = (vae.latents_mean.view(1, -1, 1, 1, 1), vae.latents_std.view(1, -1, 1, 1, 1))
    return (vae.encode(frames, return_dict=False)[0].mode() - mean) / std


def rms_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def test_the_peer_of_the_benchmark_has_the_same_weights() -> None:
    encoder = random_encoder(tiny_config("2.3"))
    frames = random_latents(1, 3, 9, 32, 64)
    peer = diffusers_video_encoder(encoder, encoder.config)
    assert relative_error(encoder(frames), diffusers_encode(peer, frames)) <= 2e-6


@pytest.mark.parametrize(
    ("version", "padding", "shape"),
    [
        ("2.0", "zeros", (2, 3, 17, 64, 96)),
        ("2.3", "zeros", (2, 3, 17, 96, 64)),
        ("2.0", "zeros", (1, 3, 1, 96, 64)),
        ("2.3", "zeros", (1, 3, 1, 32, 64)),
        ("2.0", "reflect", (1, 3, 9, 64, 96)),
    ],
)
def test_matches_diffusers(version: str, padding: str, shape: tuple[int, ...]) -> None:
    encoder = random_encoder(tiny_config(version, padding))
    twin = diffusers_twin(encoder)
    frames = random_latents(*shape)
    expected = diffusers_encode(twin, frames)
    latents = encoder(frames)
    B, _, num_frames, height, width = shape
    assert latents.shape == (B, 8, (num_frames - 1) // 8 + 1, height // 32, width // 32)
    assert 0.5 < expected.abs().max() < 20
    assert relative_error(latents, expected) <= 2e-6
    # In fp64 nothing is left but the order of the sums, so any error of the architecture would stand out.
    assert relative_error(encoder.double()(frames.double()), diffusers_encode(twin.double(), frames.double())) < 1e-13


@pytest.mark.parametrize("version", ["2.0", "2.3"])
def test_a_clip_there_and_back_matches_diffusers(version: str) -> None:
    encoder = random_encoder(tiny_config(version), seed=3)
    decoder = random_decoder(tiny_decoder_config("reflect" if version == "2.0" else "zeros", version), seed=4)
    for name in STATISTICS:  # one file holds one pair for both
        decoder.get_submodule("per_channel_statistics").get_buffer(name.rpartition(".")[2]).copy_(
            encoder.state_dict()[name]
        )
    clip = moving_shapes(33, 64, 96)
    there = diffusers_encode(diffusers_twin(encoder), clip)
    back = diffusers_decode(decoder_twin(decoder), there)
    latents = encoder(clip)
    assert latents.shape == (1, 8, 5, 2, 3)
    assert relative_error(latents, there) <= 1e-5
    frames = decoder(latents)
    assert frames.shape == clip.shape
    assert relative_error(frames, back) <= 1e-5
    # Not the trivial agreement of constants: the frames differ from one another as the clip's do.
    assert (back[:, :, 1:] - back[:, :, :-1]).abs().mean() > 0.05 * back.abs().mean()


@pytest.mark.parametrize(
    ("kind", "strides", "multiplier"),
    [
        ("compress_space_res", (1, 2), 1),
        ("compress_space_res", (1, 2), 2),
        ("compress_space_res", (1, 2), 4),
        ("compress_time_res", (2, 1), 1),
        ("compress_time_res", (2, 1), 2),
        ("compress_all_res", (2, 2), 1),
        ("compress_all_res", (2, 2), 2),
        ("compress_all_res", (2, 2), 4),
        ("compress_all_res", (2, 2), 8),
    ],
)
@pytest.mark.parametrize("num_frames", [1, 5])
def test_downsampling_adds_the_averaged_input(
    kind: str, strides: tuple[int, int], multiplier: int, num_frames: int
) -> None:
    """Without the convolution only the shortcut is left: groups of consecutive rearranged channels."""
    time, space = strides
    block = SpaceToDepthDownsample(8, strides, multiplier, "zeros")
    randomize(block)
    x = random_latents(2, 8, num_frames, 4, 6)
    with torch.no_grad():
        both = block(x)
        block.conv.conv.weight.zero_()
        block.conv.conv.bias.zero_()
        shortcut = block(x)
    doubled = torch.cat([x[:, :, : time - 1], x], dim=2)
    # One channel per cell's pixel, the width phase fastest, then consecutive groups.
    phases = [
        doubled[:, :, t::time, p::space, q::space] for t in range(time) for p in range(space) for q in range(space)
    ]
    expected = torch.stack(phases, dim=2).flatten(1, 2).unflatten(1, (8 * multiplier, -1)).mean(dim=2)
    torch.testing.assert_close(shortcut, expected, rtol=1e-6, atol=1e-6)
    assert relative_error(both, expected) > 0.1


def test_no_frame_sees_a_later_one() -> None:
    encoder = random_encoder(tiny_config())
    frames = moving_shapes(25, 64, 64)
    whole, start = encoder(frames), encoder(frames[:, :, :17])
    assert relative_error(whole[:, :, :3], start) <= 2e-6


@pytest.mark.parametrize("version", ["2.0", "2.3"])
def test_both_memory_formats_give_the_same_latents(version: str) -> None:
    encoder = random_encoder(tiny_config(version))
    frames = random_latents(2, 3, 9, 64, 96)
    row_major = encoder(frames)
    encoder.to(memory_format=CHANNELS_LAST)
    keep_channels_last(encoder)
    channels_last = encoder(frames)
    assert row_major.is_contiguous()
    assert channels_last.is_contiguous(memory_format=CHANNELS_LAST)
    assert relative_error(channels_last, row_major) <= 2e-6


def test_no_activation_leaves_channels_last() -> None:
    encoder = random_encoder(tiny_config()).to(memory_format=CHANNELS_LAST)
    keep_channels_last(encoder)
    seen = []

    def check(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if inputs[0].ndim == 5:
            seen.append(inputs[0].is_contiguous(memory_format=CHANNELS_LAST))
        seen.append(output.is_contiguous(memory_format=CHANNELS_LAST))

    for name, module in encoder.named_modules():
        if name and not isinstance(module, nn.ModuleList):
            module.register_forward_hook(check)
    encoder(random_latents(1, 3, 9, 64, 64))
    # 7 blocks of two convolutions, one called through its border; 5 stages; 4 downsamplers, first and last
    # convolution each with its border, the first of which reads the frames.
    assert len(seen) == 2 * (7 * 4 + 5 + 4 * 3 + 4) - 1
    assert all(seen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frames_are_copied_once(dtype: torch.dtype) -> None:
    """Into the border of the first convolution, whatever their format and dtype."""
    encoder = random_encoder(tiny_config()).to(torch.bfloat16, memory_format=CHANNELS_LAST)
    frames = random_latents(1, 3, 9, 64, 64).to(dtype)
    with CountCopies() as copies:
        encoder(frames)
    assert copies.count == 0


def test_frames_are_left_alone() -> None:
    encoder = random_encoder(tiny_config())
    frames = random_latents(1, 3, 9, 64, 64)
    before = frames.clone()
    first = encoder(frames)
    assert torch.equal(frames, before)
    assert torch.equal(encoder(frames), first)


def test_traces_as_one_graph() -> None:
    """The condition for compiling it whole."""
    encoder = random_encoder(tiny_config()).to(memory_format=CHANNELS_LAST)
    frames = random_latents(1, 3, 9, 64, 64)
    traced = torch.compile(encoder, backend="eager", fullgraph=True, dynamic=False)
    assert relative_error(traced(frames), encoder(frames)) <= 2e-6


@pytest.mark.parametrize("version", ["2.0", "2.3"])
def test_bf16_loses_no_more_than_diffusers_does(version: str) -> None:
    encoder = random_encoder(tiny_config(version))
    clip = moving_shapes(9, 64, 96)
    exact = encoder(clip)
    twin = diffusers_twin(encoder).bfloat16()
    encoder.to(torch.bfloat16, memory_format=CHANNELS_LAST)
    latents = encoder(clip)
    assert latents.dtype == torch.bfloat16
    assert latents.isfinite().all()
    lost = rms_error(diffusers_encode(twin, clip.bfloat16()), exact)
    assert rms_error(latents, exact) <= 1.1 * lost


@pytest.mark.gpu
@pytest.mark.parametrize("version", ["2.0", "2.3"])
def test_the_gpu_gives_the_latents_of_the_cpu(version: str) -> None:
    """In fp32 to its rounding, in bf16 no worse than the CPU's bf16."""
    encoder = random_encoder(tiny_config(version))
    clip = moving_shapes(33, 64, 96)
    exact = encoder(clip)
    on_cpu = rms_error(encoder.bfloat16()(clip), exact)
    encoder = random_encoder(tiny_config(version)).cuda()
    with torch.backends.cudnn.flags(allow_tf32=False):
        assert relative_error(encoder(clip.cuda()).cpu(), exact) <= 1e-5
    encoder.to(torch.bfloat16, memory_format=CHANNELS_LAST)
    latents = encoder(clip.cuda())
    assert latents.is_contiguous(memory_format=CHANNELS_LAST)
    assert rms_error(latents.cpu(), exact) <= 1.5 * on_cpu


def test_the_border_is_a_seam() -> None:
    """Replacing the attribute is all that another border needs; it is told the frames before and after."""
    encoder = random_encoder(tiny_config("2.3"))
    frames = random_latents(1, 3, 9, 64, 64)
    zeros = encoder(frames)
    for module in encoder.modules():
        if isinstance(module, BorderedConv3d):
            module.fill_border = reflect_border
    reflected = encoder(frames)
    twin = VideoEncoder(tiny_config("2.3", "reflect"))
    twin.load_state_dict(encoder.state_dict())
    assert torch.equal(reflected, twin(frames))
    assert relative_error(reflected, zeros) > 0.01


@pytest.mark.parametrize(
    ("version", "parameters", "count", "widths"), [("2.0", 694.1e6, 92, 2048), ("2.3", 318.9e6, 84, 1024)]
)
def test_full_size_has_the_official_tensors(version: str, parameters: float, count: int, widths: int) -> None:
    with torch.device("meta"):
        encoder = VideoEncoder(FULL_CONFIGS[version])
    assert round(sum(parameter.numel() for parameter in encoder.parameters()), -5) == parameters
    state = encoder.state_dict()
    assert len(dict(encoder.named_parameters())) == count
    assert len(state) == count + 2
    assert state["conv_in.conv.weight"].shape == (128, 48, 3, 3, 3)
    assert state["down_blocks.7.conv.conv.weight"].shape[0] == 2 * widths // 16
    assert state["down_blocks.8.res_blocks.1.conv2.conv.weight"].shape == (widths, widths, 3, 3, 3)
    assert state["conv_out.conv.bias"].shape == (129,)
    assert set(STATISTICS) < set(state)


class PeakBytes(TorchDispatchMode):
    """The most bytes that tensors made under it hold at once."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        given = [arg.untyped_storage() for arg in (*args, *(kwargs or {}).values()) if isinstance(arg, Tensor)]
        if isinstance(out, Tensor) and all(storage is not out.untyped_storage() for storage in given):
            size = out.untyped_storage().nbytes()
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(out.untyped_storage(), self.release, size)
        return out

    def release(self, size: int) -> None:
        self.live -= size


@pytest.mark.parametrize("version", ["2.0", "2.3"])
def test_the_reference_size_fits_int32_and_a_few_activations(version: str) -> None:
    """121x768x1280, on the meta device: kernels index with 32 bits up to here; diffusers needs 36.6 GiB."""
    with torch.device("meta"):
        encoder = VideoEncoder(FULL_CONFIGS[version]).to(torch.bfloat16, memory_format=CHANNELS_LAST)
    sizes: list[int] = []
    for module in encoder.modules():
        if isinstance(module, nn.Conv3d):
            module.register_forward_hook(lambda _, inputs, output: sizes.extend((inputs[0].numel(), output.numel())))
    frames = torch.empty(1, 3, 121, 768, 1280, device="meta")
    with PeakBytes() as memory:
        latents = encoder(frames)
    assert latents.shape == (1, 128, 16, 24, 40)
    assert max(sizes) == 128 * 123 * 194 * 322
    assert max(*sizes, frames.numel()) < 2**31
    assert memory.live <= 2 * 129 * 16 * 24 * 40 * 2
    # Three of the first level's activations: the block's input, its norm within a border, the convolution's output.
    level = 2 * 128 * 121 * 192 * 320
    assert memory.peak < 3.1 * level


def test_refuses_what_it_does_not_build() -> None:
    config = tiny_config()
    with pytest.raises(ValueError, match="spatial_padding_mode='circular'"):
        VideoEncoder(dataclasses.replace(config, spatial_padding_mode="circular"))
    with pytest.raises(ValueError, match=r"'compress_all'; .* res_x, compress_all_res, compress_time_res"):
        VideoEncoder(dataclasses.replace(config, blocks=(EncoderBlock("compress_all"),)))
    with pytest.raises(ValueError, match=r"'compress_space_res' with multiplier=8; use a power of 2 up to 4"):
        VideoEncoder(dataclasses.replace(config, blocks=(EncoderBlock("compress_space_res", multiplier=8),)))
    with pytest.raises(ValueError, match="multiplier=3"):
        VideoEncoder(dataclasses.replace(config, blocks=(EncoderBlock("compress_all_res", multiplier=3),)))
    with pytest.raises(ValueError, match="compresses by 4 along time and 16 along height and width"):
        VideoEncoder(dataclasses.replace(config, blocks=config.blocks[:-2]))


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ((120, 768, 1280), "num_frames=120 is not 8k + 1: use 113 or 121"),
        ((0, 768, 1280), "num_frames=0 is not 8k + 1: use 1"),
        ((-7, 768, 1280), "num_frames=-7 is not 8k + 1: use 1"),
        ((2, 768, 1280), "num_frames=2 is not 8k + 1: use 1 or 9"),
        ((121, 720, 1280), "height=720 is not a multiple of 32: use 704 or 736"),
        ((121, 1080, 1920), "height=1080 is not a multiple of 32: use 1056 or 1088"),
        ((121, 1280, 720), "width=720 is not a multiple of 32: use 704 or 736"),
        ((121, 1920, 1080), "width=1080 is not a multiple of 32: use 1056 or 1088"),
        ((1, 8, 64), "height=8 is not a multiple of 32 of at least 32: use 32"),
    ],
)
def test_refuses_sizes_in_words(size: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        validate_frames(tiny_config(), *size)


def test_one_frame_is_a_clip_and_reflection_needs_two_latents() -> None:
    validate_frames(tiny_config(), 1, 32, 32)
    validate_frames(tiny_config(padding="reflect"), 1, 64, 64)
    with pytest.raises(ValueError, match=r"^width=32 is not a multiple of 32 of at least 64: use 64$"):
        VideoEncoder(tiny_config(padding="reflect"))(torch.zeros(1, 3, 1, 64, 32))
    with pytest.raises(ValueError, match="num_frames=8 is not 8k"):
        VideoEncoder(tiny_config())(torch.zeros(1, 3, 8, 32, 32))
