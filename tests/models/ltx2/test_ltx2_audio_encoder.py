import dataclasses

import pytest
import torch
from diffusers import AutoencoderKLLTX2Audio
from torch import Tensor

from vgen.models.ltx2.audio_encoder import AudioEncoder, fit_latents
from vgen.models.ltx2.config import AudioEncoderConfig

TINY = AudioEncoderConfig(
    base_channels=32,
    channel_multipliers=(1, 2, 4),
    num_res_blocks=1,
    in_channels=2,
    latent_channels=4,
    mel_bins=32,
    sample_rate=16000,
    mel_hop_length=160,
    n_fft=1024,
)
FULL = dataclasses.replace(TINY, base_channels=128, num_res_blocks=2, latent_channels=8, mel_bins=64)


def random_encoder(config: AudioEncoderConfig) -> AudioEncoder:
    encoder = AudioEncoder(config)
    generator = torch.Generator().manual_seed(0)
    for tensor in encoder.parameters():
        fan_in = tensor[0].numel() if tensor.ndim > 1 else 4
        tensor.data = torch.randn(tensor.shape, generator=generator) / fan_in**0.5
    for buffer in encoder.buffers():
        buffer.data = 0.5 + torch.rand(buffer.shape, generator=generator)
    return encoder.eval()


def random_mel(time: int, config: AudioEncoderConfig = TINY) -> Tensor:
    return torch.randn(2, config.in_channels, time, config.mel_bins, generator=torch.Generator().manual_seed(1))


def diffusers_twin(encoder: AudioEncoder) -> AutoencoderKLLTX2Audio:
    config = encoder.config
    vae = AutoencoderKLLTX2Audio(
        base_channels=config.base_channels,
        in_channels=config.in_channels,
        ch_mult=config.channel_multipliers,
        num_res_blocks=config.num_res_blocks,
        latent_channels=config.latent_channels,
        mel_bins=config.mel_bins,
    )
    state = encoder.state_dict()
    mean, std = (state.pop(f"per_channel_statistics.{name}") for name in ("mean-of-means", "std-of-means"))
    vae.encoder.load_state_dict(state)
    vae.latents_mean.copy_(mean)
    vae.latents_std.copy_(std)
    return vae.eval()


def diffusers_encode(vae: AutoencoderKLLTX2Audio, mel: Tensor) -> Tensor:
    """The distribution's mean, normalized as the official encoder does: on the packed token, channel-major."""
    mean = vae.encode(mel).latent_dist.mode()
    packed = (mean.transpose(1, 2).flatten(2) - vae.latents_mean) / vae.latents_std
    return packed.unflatten(2, (mean.shape[1], mean.shape[3])).transpose(1, 2)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize(("time", "latents"), [(1, 1), (4, 1), (5, 2), (6, 2), (7, 2), (8, 2), (25, 7)])
@torch.no_grad()
def test_matches_diffusers(time: int, latents: int) -> None:
    encoder = random_encoder(TINY)
    twin = diffusers_twin(encoder)
    mel = random_mel(time)
    actual, expected = encoder(mel), diffusers_encode(twin, mel)
    assert actual.shape == (2, 4, latents, 8)
    assert 0.5 < expected.abs().max() < 30
    assert relative_error(actual, expected) <= 2e-6
    assert relative_error(encoder.double()(mel.double()), diffusers_encode(twin.double(), mel.double())) < 1e-13


@torch.no_grad()
def test_matches_diffusers_with_two_blocks_a_level() -> None:
    encoder = random_encoder(dataclasses.replace(TINY, num_res_blocks=2, channel_multipliers=(2, 1, 3)))
    assert relative_error(encoder(random_mel(9)), diffusers_encode(diffusers_twin(encoder), random_mel(9))) <= 2e-6


@torch.no_grad()
def test_is_causal_in_time() -> None:
    encoder = random_encoder(TINY)
    mel = random_mel(21)
    changed = mel.clone()
    changed[:, :, 9:] += 1
    before, after = encoder(mel), encoder(changed)
    # Latent i ends with mel frame 4 * i, so frame 9 is first heard by the fourth.
    torch.testing.assert_close(before[:, :, :3], after[:, :, :3])
    assert not torch.allclose(before[:, :, 3], after[:, :, 3])


@torch.no_grad()
def test_latents_have_the_dtype_of_the_mel() -> None:
    assert random_encoder(TINY).to(torch.bfloat16)(random_mel(3)).dtype == torch.float32


def test_full_size_has_the_official_tensors() -> None:
    with torch.device("meta"):
        encoder = AudioEncoder(FULL)
        latents = encoder(torch.empty(1, 2, 505, 64))
    assert latents.shape == (1, 8, 127, 16)
    names = set(encoder.state_dict())
    assert len(dict(encoder.named_parameters())) == 44
    assert len(names) == 46
    assert names >= {
        "conv_in.conv.weight",
        "down.0.block.1.conv2.conv.bias",
        "down.0.downsample.conv.weight",
        "down.1.block.0.nin_shortcut.conv.weight",
        "down.2.block.1.conv1.conv.weight",
        "mid.block_2.conv1.conv.weight",
        "conv_out.conv.bias",
    }
    assert encoder.get_parameter("conv_out.conv.weight").shape == (16, 512, 3, 3)
    assert encoder.get_buffer("per_channel_statistics.std-of-means").shape == (128,)


def test_refuses_another_compression() -> None:
    with pytest.raises(ValueError, match="the audio encoder's config has 2 levels and 32 mel bins"):
        AudioEncoder(dataclasses.replace(TINY, channel_multipliers=(1, 2)))
    with pytest.raises(ValueError, match="3 levels and 30 mel bins"):
        AudioEncoder(dataclasses.replace(TINY, mel_bins=30))


@pytest.mark.parametrize("shape", [(1, 1, 5, 32), (1, 2, 5, 64), (1, 2, 0, 32), (2, 5, 32)])
def test_refuses_another_mel(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"the audio encoder got the shape .* 2 channels, 32 mel bins and at least"):
        random_encoder(TINY)(torch.zeros(shape))


def test_latents_are_cut_or_filled_with_zeros_at_the_end() -> None:
    latents = 1 + torch.rand(2, 3, 5, 4)
    assert torch.equal(fit_latents(latents, 3), latents[:, :, :3])
    assert torch.equal(fit_latents(latents, 5), latents)
    longer = fit_latents(latents, 7)
    assert torch.equal(longer[:, :, :5], latents)
    assert longer.shape == (2, 3, 7, 4) and not longer[:, :, 5:].any()
