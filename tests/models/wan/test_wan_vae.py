import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import AvgDown3D, DupUp3D, WanUpsample
from torch import Tensor, nn

from vgen.models.attention import sdpa
from vgen.models.wan import vae_levels
from vgen.models.wan.config import VAE_2_1, VAE_2_2, WanVaeConfig
from vgen.models.wan.vae import VideoDecoder, VideoEncoder, denormalize_latents, normalize_latents, validate_frames
from vgen.models.wan.vae_blocks import (
    CausalConv3d,
    Downsample,
    FrameAttention,
    FrameConv,
    PixelNorm,
    ResBlock,
    State,
    Upsample,
    add_averaged,
    add_repeated,
    apply_channels_last,
    zero_border,
)
from vgen.models.wan.vae_levels import Level, largest_decoder_tensor, largest_encoder_tensor, most_decoder_frames

CHANNELS_LAST = torch.channels_last_3d

CONFIGS = {
    "2.1": replace(VAE_2_1, base_dim=4),
    "2.2": replace(VAE_2_2, base_dim=8, decoder_base_dim=4),
    # No release has these: time resampled first, other widths of the levels, and one block in each.
    "2.1 uneven": replace(
        VAE_2_1, base_dim=4, dim_mult=(1, 3, 2, 4), num_res_blocks=1, temporal_downsample=(True, False, True)
    ),
    "2.2 uneven": replace(
        VAE_2_2,
        base_dim=4,
        decoder_base_dim=None,
        dim_mult=(2, 8, 8, 8),
        num_res_blocks=1,
        temporal_downsample=(True, True, False),
    ),
}
KINDS = ("2.1", "2.2")


def randomize(module: nn.Module, seed: int) -> None:
    """Random weights at a scale that keeps activations near 1, and gains away from 1."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in module.named_parameters():
        if name.endswith("gamma"):
            tensor.data = 0.5 + torch.rand(tensor.shape, generator=generator)
        else:
            fan_in = tensor[0].numel() if tensor.ndim > 1 else 4
            tensor.data = torch.randn(tensor.shape, generator=generator) / fan_in**0.5


def random_encoder(config: WanVaeConfig) -> VideoEncoder:
    encoder = VideoEncoder(config)
    randomize(encoder, 0)
    return encoder


def random_decoder(config: WanVaeConfig) -> VideoDecoder:
    """Frames well inside -1 to 1, so that a clamp hides nothing."""
    decoder = VideoDecoder(config)
    randomize(decoder, 1)
    for parameter in decoder.decoder.conv_out.parameters():
        parameter.data *= 0.05
    return decoder


def diffusers_twin(encoder: VideoEncoder, decoder: VideoDecoder) -> AutoencoderKLWan:
    """Same names on both sides: the two halves are all of its tensors."""
    values = dict(vars(encoder.config))
    values["temperal_downsample"] = list(values.pop("temporal_downsample"))
    values["dim_mult"] = list(values["dim_mult"])
    vae = AutoencoderKLWan(**values)
    vae.load_state_dict({**encoder.state_dict(), **decoder.state_dict()})
    for module in vae.modules():
        if isinstance(module, WanUpsample):  # rounds fp64 to fp32
            module.forward = functools.partial(nn.Upsample.forward, module)
    return vae.eval()


def random_frames(
    config: WanVaeConfig, num_frames: int, batch: int = 1, latent_size: tuple[int, int] = (3, 1)
) -> Tensor:
    height, width = (config.scale_factor_spatial * size for size in latent_size)
    return torch.randn(batch, 3, num_frames, height, width, generator=torch.Generator().manual_seed(2))


def random_latents(config: WanVaeConfig, latent_frames: int, batch: int = 1, size: tuple[int, int] = (3, 1)) -> Tensor:
    return torch.randn(batch, config.z_dim, latent_frames, *size, generator=torch.Generator().manual_seed(3))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape
    return ((actual - expected).abs().max() / expected.abs().max()).item()


CASES = [
    *((kind, num_frames, batch) for kind in KINDS for num_frames, batch in ((1, 2), (5, 2), (9, 1), (17, 1))),
    ("2.1 uneven", 9, 1),
    ("2.2 uneven", 9, 1),
]


@pytest.mark.parametrize(("kind", "num_frames", "batch"), CASES)
@torch.no_grad()
def test_matches_diffusers(kind: str, num_frames: int, batch: int) -> None:
    config = CONFIGS[kind]
    encoder, decoder = random_encoder(config), random_decoder(config)
    twin = diffusers_twin(encoder, decoder)
    frames = random_frames(config, num_frames, batch)
    latents = random_latents(config, (num_frames - 1) // 4 + 1, batch)

    expected = twin.encode(frames).latent_dist.mode()
    assert expected.abs().max() > 0.5
    assert relative_error(encoder(frames), expected) <= 1e-5
    expected = twin.decode(latents).sample
    assert 0.02 < expected.abs().max() < 1
    assert expected.shape == (batch, 3, num_frames, 3 * config.scale_factor_spatial, config.scale_factor_spatial)
    assert relative_error(decoder(latents), expected) <= 1e-5

    # In fp64 nothing is left but the order of the sums, so any error of the architecture would stand out.
    for module in (encoder, decoder, *twin.children()):
        module.double()
    frames, latents = frames.double(), latents.double()
    assert relative_error(encoder(frames), twin.encode(frames).latent_dist.mode()) <= 1e-12
    assert relative_error(decoder(latents), twin.decode(latents).sample) <= 1e-12


@pytest.mark.parametrize("num_frames", [1, 5, 17, 81, 121])
@pytest.mark.parametrize("kind", KINDS)
def test_any_chunks_give_the_whole_clip(kind: str, num_frames: int) -> None:
    config = CONFIGS[kind]
    encoder, decoder = random_encoder(config).double(), random_decoder(config).double()
    size = (1, 1) if num_frames > 17 else (3, 1)
    frames = random_frames(config, num_frames, latent_size=size).double()
    latents = random_latents(config, (num_frames - 1) // 4 + 1, size=size).double()
    encoded, decoded = encoder(frames, None), decoder(latents, None)
    assert decoded.shape[2] == num_frames
    for chunk in (1, 2, 4):
        assert relative_error(encoder(frames, chunk), encoded) <= 1e-12
        assert relative_error(decoder(latents, chunk), decoded) <= 1e-12


def test_a_chunk_is_as_long_as_asked_for() -> None:
    config = CONFIGS["2.1"]
    decoder = random_decoder(config)
    assert [part.shape[2] for part in decoder.decode(random_latents(config, 6), 4)] == [13, 8]


@pytest.mark.parametrize("kind", KINDS)
def test_state_is_a_value_of_one_shape(kind: str) -> None:
    decoder = random_decoder(CONFIGS[kind])
    first, second, third = random_latents(CONFIGS[kind], 3).split(1, dim=2)
    _, state = decoder.decode_chunk(first)
    expected, later = decoder.decode_chunk(second, state)
    # Another clip in between, and the same state once more: nothing is on the module, and no state was written to.
    decoder.decode_chunk(third)
    again, _ = decoder.decode_chunk(second, state)
    assert torch.equal(again, expected)
    assert [frames.shape for frames in state] == [frames.shape for frames in later]
    assert len(state) == 30 + 2  # convolutions of 3x3x3 and along time
    assert all(frames.shape[2] == 2 for frames in state)
    # Not views, which would keep what the convolutions read.
    assert all(frames.untyped_storage().nbytes() == frames.nbytes for frames in (*state, *later))


def test_every_convolution_knows_its_history() -> None:
    encoder = VideoEncoder(CONFIGS["2.2"])
    history = {(conv.kernel_size[0], conv.stride[0]): conv.history for conv in causal_convs(encoder)}
    assert history == {(3, 1): 2, (3, 2): 1}


def causal_convs(module: nn.Module) -> Iterator[CausalConv3d]:
    return (child for child in module.modules() if isinstance(child, CausalConv3d))


@pytest.mark.parametrize("kind", KINDS)
def test_both_memory_formats_give_the_same(kind: str) -> None:
    config = CONFIGS[kind]
    encoder, decoder = random_encoder(config), random_decoder(config)
    frames, latents = random_frames(config, 9, batch=2), random_latents(config, 3, batch=2)
    encoded, decoded = encoder(frames, 2), decoder(latents, 2)
    apply_channels_last(encoder)
    apply_channels_last(decoder)
    assert relative_error(encoder(frames, 2), encoded) <= 1e-5
    channels_last = decoder(latents, 2)
    assert relative_error(channels_last, decoded) <= 1e-5
    assert decoded.is_contiguous()
    assert channels_last.is_contiguous(memory_format=CHANNELS_LAST)


@pytest.mark.parametrize("kind", KINDS)
def test_no_activation_leaves_channels_last(kind: str) -> None:
    config = CONFIGS[kind]
    encoder, decoder = random_encoder(config), random_decoder(config)
    seen: dict[str, bool] = {}

    def check(name: str, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        kept = all(tensor.is_contiguous(memory_format=CHANNELS_LAST) for tensor in (inputs[0], output))
        seen[name] = seen.get(name, True) and kept

    for half in (encoder, decoder):
        apply_channels_last(half)
        for name, module in half.named_modules():
            if isinstance(module, nn.Conv3d | FrameConv):
                # As on CUDA a convolution answers in the format of its input; on the CPU that depends on the machine.
                module.register_forward_hook(lambda _, inputs, output: output.contiguous(memory_format=CHANNELS_LAST))
            if isinstance(module, nn.Conv3d | FrameConv | FrameAttention | ResBlock | Upsample | Downsample):
                module.register_forward_hook(functools.partial(check, f"{type(half).__name__}.{name}"))
    # A first chunk of one frame and of more.
    for chunk in (1, 2):
        encoder(random_frames(config, 13, latent_size=(2, 2)), chunk)
        decoder(random_latents(config, 4, size=(2, 2)), chunk)
    assert len(seen) >= 99
    assert [name for name, kept in seen.items() if not kept] == []


@pytest.mark.parametrize("kind", KINDS)
def test_two_halves_with_a_halo_give_the_whole(kind: str) -> None:
    """Left and right half as two samples that read each other's lines: what ranks do, in one process."""
    config = CONFIGS[kind]
    encoder, decoder = random_encoder(config).double(), random_decoder(config).double()
    frames = random_frames(config, 9, latent_size=(2, 6)).double()
    latents = random_latents(config, 3, size=(2, 6)).double()
    encoded, decoded = encoder(frames), decoder(latents)
    calls = 0

    def halo(bordered: Tensor, before: int, after: int) -> None:
        nonlocal calls
        calls += 1
        zero_border(bordered, before, after)
        left, right = bordered
        end = bordered.shape[4] - after
        left[..., end:] = right[..., before : before + after]
        right[..., :before] = left[..., end - before : end]

    def gather(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        whole = [torch.cat(part.chunk(2), dim=2).repeat(2, 1, 1, 1) for part in (k, v)]
        return sdpa(q, *whole, mask)

    for half in (encoder, decoder):
        for module in half.modules():
            if isinstance(module, CausalConv3d | FrameConv):
                module.fill_border = halo
            elif isinstance(module, FrameAttention):
                module.attend = gather
    split = [torch.cat(tensor.chunk(2, dim=-1)) for tensor in (frames, latents)]
    joined = [torch.cat(half(tensor).chunk(2), dim=-1) for half, tensor in zip((encoder, decoder), split, strict=True)]
    assert relative_error(joined[0], encoded) <= 1e-12
    assert relative_error(joined[1], decoded) <= 1e-12
    assert calls == 3 * (25 + 33)  # chunks, and convolutions with a border of the encoder and of the decoder


def test_traces_as_one_graph() -> None:
    """The condition for compiling it whole; ``eager`` runs the traced graph as it is."""
    config = replace(CONFIGS["2.2"], dim_mult=(1, 1), num_res_blocks=0, temporal_downsample=(True,))
    decoder = random_decoder(config)
    apply_channels_last(decoder)
    latents = random_latents(config, 3)
    _, state = decoder.decode_chunk(latents[:, :, :2])
    last = latents[:, :, 2:]
    traced = torch.compile(decoder.decode_chunk, backend="eager", fullgraph=True, dynamic=False)
    expected, left = decoder.decode_chunk(last, state)
    frames, traced_left = traced(last, state)
    assert relative_error(frames, expected) <= 1e-5
    assert max(map(relative_error, traced_left, left)) <= 1e-5


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_bf16_loses_no_more_than_diffusers_does(kind: str) -> None:
    config = CONFIGS[kind]
    encoder, decoder = random_encoder(config), random_decoder(config)
    twin = diffusers_twin(encoder, decoder)
    frames, latents = random_frames(config, 9), random_latents(config, 3)
    encoded, decoded = encoder(frames), decoder(latents)
    for module in (encoder, decoder, *twin.children()):
        module.bfloat16()
    theirs = twin.encode(frames.bfloat16()).latent_dist.mode()
    assert rms(encoder(frames) - encoded) <= 1.2 * rms(theirs - encoded)
    ours = torch.cat(list(decoder.decode(latents)), dim=2)
    assert ours.dtype == torch.float32  # that of the latents
    assert rms(ours - decoded) <= 1.2 * rms(twin.decode(latents.bfloat16()).sample - decoded)


def rms(x: Tensor) -> float:
    return x.float().square().mean().sqrt().item()


def test_norm_of_nothing_is_nothing() -> None:
    x = torch.randn(1, 8, 1, 2, 2)
    x[..., 0, 0] = 0
    norm, out = PixelNorm(8, 3), torch.empty_like(x)
    with torch.no_grad():
        norm.write(x, out=out)
    torch.testing.assert_close(out, 8**0.5 * nn.functional.normalize(x, dim=1))


def test_inputs_are_left_alone() -> None:
    for kind in KINDS:
        config = CONFIGS[kind]
        for half, x in (
            (random_encoder(config), random_frames(config, 5)),
            (random_decoder(config), random_latents(config, 2)),
        ):
            before = x.clone()
            half(x)
            assert torch.equal(x, before)


SHORTCUTS = sorted(
    {
        (time, space, ratio)
        for time, space in itertools.product((1, 2), repeat=2)
        for ratio in itertools.accumulate((1, time, space, space), int.__mul__)
    }
)


@pytest.mark.parametrize(("time", "space", "ratio"), SHORTCUTS)
@pytest.mark.parametrize("num_frames", [1, 3])
def test_shortcuts_are_those_of_diffusers(time: int, space: int, ratio: int, num_frames: int) -> None:
    coarse, fine = 3 * ratio, 3
    x = torch.randn(2, fine, num_frames, 4, 6)
    expected = AvgDown3D(fine, coarse, time, space)(x)
    out = torch.zeros_like(expected)
    add_averaged(out, x, Level(fine, coarse, coarse, time, space), first=True)
    torch.testing.assert_close(out, expected)

    x = torch.randn(2, coarse, num_frames, 4, 6)
    for first in (True, False):
        expected = DupUp3D(coarse, fine, time, space)(x, first_chunk=first)
        out = torch.zeros_like(expected)
        add_repeated(out, x, Level(coarse, fine, fine, time, space), first=first)
        assert torch.equal(out, expected)


def test_refuses_a_shortcut_that_no_phases_make() -> None:
    with pytest.raises(ValueError, match=r"8 channels on its fine side and 24 .* one of 8, 16, 32, 64: check dim_mult"):
        VideoEncoder(replace(CONFIGS["2.2"], dim_mult=(1, 3, 3, 3)))
    with pytest.raises(ValueError, match=r"8 channels on its fine side and 12"):
        VideoDecoder(replace(CONFIGS["2.2"], dim_mult=(1, 2, 3, 3)))


def test_normalization_is_that_of_diffusers() -> None:
    config = CONFIGS["2.2"]
    latents = random_latents(config, 2)
    mean = torch.tensor(config.latents_mean).view(1, -1, 1, 1, 1)
    scale = 1 / torch.tensor(config.latents_std).view(1, -1, 1, 1, 1)
    torch.testing.assert_close(denormalize_latents(latents, config), latents / scale + mean)
    torch.testing.assert_close(normalize_latents(latents, config), (latents - mean) * scale)


FULL = {"2.1": (VAE_2_1, 126_892_531, 194), "2.2": (VAE_2_2, 704_688_668, 196)}


@pytest.mark.parametrize("kind", KINDS)
def test_full_size_has_the_official_tensors(kind: str) -> None:
    config, parameters, count = FULL[kind]
    with torch.device("meta"):
        halves = VideoEncoder(config), VideoDecoder(config)
    state = {**halves[0].state_dict(), **halves[1].state_dict()}
    assert len(state) == count
    assert sum(tensor.numel() for tensor in state.values()) == parameters


@pytest.mark.parametrize(
    ("config", "size"),
    [
        (VAE_2_1, (90, 160)),
        (VAE_2_2, (44, 80)),
        (replace(VAE_2_1, base_dim=4, dim_mult=(1, 1, 1, 64)), (1, 1)),  # at the latents, not at the pixels
    ],
)
def test_the_largest_tensor_is_the_one_that_runs(config: WanVaeConfig, size: tuple[int, int]) -> None:
    """The later chunks at 720x1280 and 704x1280, on the meta device: the arithmetic against what convolutions meet."""
    chunk = 2
    with torch.device("meta"):
        encoder, decoder = VideoEncoder(config).bfloat16(), VideoDecoder(config).bfloat16()
        latents = torch.empty(1, config.z_dim, chunk, *size)
        pixels = [config.scale_factor_spatial * side for side in size]
        frames = torch.empty(1, 3, 4 * chunk, *pixels)
    for half, run, x, expected in (
        (encoder, encoder.encode_chunk, frames, largest_encoder_tensor(config, chunk, *size)),
        (decoder, decoder.decode_chunk, latents, largest_decoder_tensor(config, chunk, *size)),
    ):
        apply_channels_last(half)
        sizes = watch_sizes(half)
        state: State | None = None
        _, state = run(x[:, :, :1], state)
        assert max(sizes) <= expected
        sizes.clear()
        run(x, state)
        assert max(sizes) == expected


def watch_sizes(module: nn.Module) -> list[int]:
    sizes: list[int] = []
    for conv in module.modules():
        if isinstance(conv, nn.Conv3d | FrameConv):
            conv.register_forward_hook(lambda _, inputs, output: sizes.extend((inputs[0].numel(), output.numel())))
    return sizes


def test_chunks_stay_below_2_31_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    # 2.1: the frames upsampled last, with their border. 2.2: what the last level's first convolution reads.
    assert largest_decoder_tensor(VAE_2_1, 1, 90, 160) == 192 * 4 * 722 * 1282
    assert largest_decoder_tensor(VAE_2_2, 2, 44, 80, batch=2) == 2 * 512 * (8 + 2) * 354 * 642
    assert most_decoder_frames(VAE_2_1, (1, 16, 21, 90, 160)) == 3
    assert most_decoder_frames(VAE_2_2, (1, 48, 31, 44, 80)) == 4
    assert most_decoder_frames(VAE_2_2, (2, 48, 31, 44, 80)) == 1
    assert most_decoder_frames(VAE_2_2, (1, 48, 2, 44, 80)) == 2
    assert vae_levels.most_encoder_frames(VAE_2_1, (1, 16, 21, 90, 160)) >= 5

    config = CONFIGS["2.1"]
    encoder, decoder = random_encoder(config), random_decoder(config)
    latents, frames = random_latents(config, 5), random_frames(config, 17)
    for largest, half, x in ((largest_encoder_tensor, encoder, frames), (largest_decoder_tensor, decoder, latents)):
        monkeypatch.setattr(vae_levels, "INT32_ELEMENTS", largest(config, 2, 3, 1) + 1)
        sizes = watch_sizes(half)
        half(x, None)
        assert max(sizes) == largest(config, 2, 3, 1)
        sizes.clear()
        half(x, 4)
        assert max(sizes) == largest(config, 2, 3, 1)
        monkeypatch.setattr(vae_levels, "INT32_ELEMENTS", largest(config, 1, 3, 1))
        with pytest.raises(ValueError, match=r"latents of 3x1 .* 2\^31 elements or more.*: (en|de)code in tiles"):
            half(x, 1)


@pytest.mark.parametrize(
    ("kind", "size", "message"),
    [
        ("2.1", (4, 16, 16), r"num_frames=4 is not 4k \+ 1: use 1 or 5"),
        ("2.1", (0, 16, 16), r"num_frames=0 is not 4k \+ 1: use 1$"),
        ("2.1", (1, 20, 16), "height=20 is not a multiple of 8: use 16 or 24"),
        ("2.2", (1, 32, 24), "width=24 is not a multiple of 16: use 16 or 32"),
        ("2.2", (1, 8, 32), "height=8 is not a multiple of 16: use 16"),
    ],
)
def test_refuses_sizes_in_words(kind: str, size: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validate_frames(CONFIGS[kind], *size)
    with pytest.raises(ValueError, match=message):
        VideoEncoder(CONFIGS[kind])(torch.zeros(1, 3, *size))


def test_refuses_a_chunk_of_nothing() -> None:
    decoder = random_decoder(CONFIGS["2.1"])
    with pytest.raises(ValueError, match="chunk=0 latent frames is none: use 1 or more"):
        decoder.decode(random_latents(CONFIGS["2.1"], 1), 0)
