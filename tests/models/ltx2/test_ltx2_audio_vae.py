import dataclasses

import pytest
import torch
from diffusers import AutoencoderKLLTX2Audio
from torch import Tensor, nn

from vgen.models.ltx2.audio_vae import AudioDecoder
from vgen.models.ltx2.config import AudioDecoderConfig

TINY = AudioDecoderConfig(
    base_channels=32,
    channel_multipliers=(1, 2, 4),
    num_res_blocks=1,
    out_channels=2,
    latent_channels=4,
    mel_bins=32,
    sample_rate=16000,
    mel_hop_length=160,
)
FULL = dataclasses.replace(TINY, base_channels=128, num_res_blocks=2, latent_channels=8, mel_bins=64)


def random_decoder(config: AudioDecoderConfig) -> AudioDecoder:
    decoder = AudioDecoder(config)
    generator = torch.Generator().manual_seed(0)
    for tensor in decoder.parameters():
        fan_in = tensor[0].numel() if tensor.ndim > 1 else 4
        tensor.data = torch.randn(tensor.shape, generator=generator) / fan_in**0.5
    for buffer in decoder.buffers():
        buffer.data = 0.5 + torch.rand(buffer.shape, generator=generator)
    return decoder.eval()


def diffusers_twin(decoder: AudioDecoder) -> AutoencoderKLLTX2Audio:
    config = decoder.config
    vae = AutoencoderKLLTX2Audio(
        base_channels=config.base_channels,
        output_channels=config.out_channels,
        ch_mult=config.channel_multipliers,
        num_res_blocks=config.num_res_blocks,
        latent_channels=config.latent_channels,
        mel_bins=config.mel_bins,
    )
    state = decoder.state_dict()
    mean, std = (state.pop(f"per_channel_statistics.{name}") for name in ("mean-of-means", "std-of-means"))
    vae.decoder.load_state_dict(state)
    vae.latents_mean.copy_(mean)
    vae.latents_std.copy_(std)
    return vae.eval()


def diffusers_decode(vae: AutoencoderKLLTX2Audio, latents: Tensor) -> Tensor:
    """As its pipeline does: the statistics apply to the packed token, channel-major."""
    packed = latents.transpose(1, 2).flatten(2)
    packed = packed * vae.latents_std + vae.latents_mean
    channels, mel = latents.shape[1], latents.shape[3]
    return vae.decode(packed.unflatten(2, (channels, mel)).transpose(1, 2), return_dict=False)[0]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("time", [1, 2, 7])
@torch.no_grad()
def test_matches_diffusers(time: int) -> None:
    decoder = random_decoder(TINY)
    latents = torch.randn(2, 4, time, 8, generator=torch.Generator().manual_seed(1))
    twin = diffusers_twin(decoder)
    mel = decoder(latents)
    expected = diffusers_decode(twin, latents)
    assert mel.shape == (2, 2, 4 * time - 3, 32)
    assert 0.5 < expected.abs().max() < 20
    assert relative_error(mel, expected) <= 2e-6
    latents = latents.double()
    assert relative_error(decoder.double()(latents), diffusers_decode(twin.double(), latents)) < 1e-13


@torch.no_grad()
def test_is_causal_in_time() -> None:
    decoder = random_decoder(TINY)
    latents = torch.randn(1, 4, 6, 8, generator=torch.Generator().manual_seed(1))
    changed = latents.clone()
    changed[:, :, 4:] += 1
    before, after = decoder(latents), decoder(changed)
    # 4 latents give 13 mel frames, none of which may see the fifth latent.
    torch.testing.assert_close(before[:, :, :13], after[:, :, :13])
    assert not torch.allclose(before[:, :, 13], after[:, :, 13])


@torch.no_grad()
def test_mel_has_the_dtype_of_the_latents() -> None:
    decoder = random_decoder(TINY).to(torch.bfloat16)
    assert decoder(torch.randn(1, 4, 2, 8)).dtype == torch.float32


def test_full_size_has_the_official_tensors() -> None:
    with torch.device("meta"):
        decoder = AudioDecoder(FULL)
    names = set(decoder.state_dict())
    assert len(dict(decoder.named_parameters())) == 56
    assert len(names) == 58
    assert names >= {
        "conv_in.conv.weight",
        "mid.block_2.conv1.conv.weight",
        "up.0.block.0.nin_shortcut.conv.weight",
        "up.2.block.2.conv2.conv.bias",
        "up.1.upsample.conv.conv.weight",
        "conv_out.conv.bias",
    }
    assert decoder.get_buffer("per_channel_statistics.std-of-means").shape == (128,)
    assert nn.Module.get_submodule(decoder, "up.0").upsample is None


def test_refuses_another_compression() -> None:
    with pytest.raises(ValueError, match="2 levels and 32 mel bins"):
        AudioDecoder(dataclasses.replace(TINY, channel_multipliers=(1, 2)))


@pytest.mark.parametrize("shape", [(1, 8, 5, 8), (1, 4, 5, 16), (1, 4, 0, 8), (4, 5, 8)])
def test_refuses_other_latents(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"the audio decoder got the shape .* 4 channels, 8 mel bins and at least"):
        random_decoder(TINY)(torch.zeros(shape))


@torch.no_grad()
def test_normalization_is_undone_by_its_inverse() -> None:
    statistics = random_decoder(TINY).per_channel_statistics.double()
    latents = torch.randn(2, 4, 3, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(statistics(statistics.normalize(latents)), latents, rtol=1e-13, atol=1e-13)
    expected = (latents[1, 2, :, 3] - statistics.get_buffer("mean-of-means")[19]) / statistics.get_buffer(
        "std-of-means"
    )[19]
    torch.testing.assert_close(statistics.normalize(latents)[1, 2, :, 3], expected, rtol=1e-13, atol=1e-13)
