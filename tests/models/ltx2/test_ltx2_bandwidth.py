import dataclasses
import math
import re

import pytest
import torch
import torch.nn.functional as F
from diffusers.pipelines.ltx2.vocoder import LTX2VocoderWithBWE
from torch import Tensor

from vgen.models.ltx2.bandwidth import BandwidthExtendedVocoder, resample
from vgen.models.ltx2.config import BandwidthExtensionConfig, VocoderConfig

FULL = VocoderConfig(
    in_channels=128,
    out_channels=2,
    initial_channels=1536,
    upsample_rates=(5, 2, 2, 2, 2, 2),
    upsample_kernel_sizes=(11, 4, 4, 4, 4, 4),
    resblock_kernel_sizes=(3, 7, 11),
    resblock_dilations=((1, 3, 5),) * 3,
    output_sample_rate=16000,
    resblock="AMP1",
    final_activation="clamp",
    final_bias=False,
)
FULL_EXTENSION = BandwidthExtensionConfig(
    generator=dataclasses.replace(
        FULL,
        initial_channels=512,
        upsample_rates=(6, 5, 2, 2, 2),
        upsample_kernel_sizes=(12, 11, 4, 4, 4),
        output_sample_rate=48000,
        final_activation="none",
    ),
    input_sample_rate=16000,
    output_sample_rate=48000,
    mel_bins=64,
    n_fft=512,
    win_length=512,
    hop_length=80,
)
TINY = dataclasses.replace(
    FULL,
    in_channels=16,
    initial_channels=16,
    upsample_rates=(3, 2),
    upsample_kernel_sizes=(7, 4),
    resblock_kernel_sizes=(3, 5),
    resblock_dilations=((1, 3), (1, 2)),
)
TINY_EXTENSION = dataclasses.replace(
    FULL_EXTENSION,
    generator=dataclasses.replace(
        FULL_EXTENSION.generator,
        in_channels=10,
        initial_channels=8,
        upsample_rates=(4, 3),
        upsample_kernel_sizes=(8, 5),
        resblock_kernel_sizes=(3,),
        resblock_dilations=((1, 2),),
    ),
    mel_bins=5,
    n_fft=16,
    win_length=16,
    hop_length=4,
)


def random_vocoder(vocoder: VocoderConfig = TINY, *, loudness: float = 0.05) -> BandwidthExtendedVocoder:
    module = BandwidthExtendedVocoder(vocoder, TINY_EXTENSION)
    generator = torch.Generator().manual_seed(0)
    for tensor in module.parameters():
        fan_in = tensor[0].numel() if tensor.ndim > 1 else 4
        tensor.data = torch.randn(tensor.shape, generator=generator) / fan_in**0.5
    for name, buffer in module.named_buffers():
        noise = torch.randn(buffer.shape, generator=generator)
        # Bases as random as can be, mel weights positive, low-pass filters no longer symmetric.
        buffer.copy_({"forward_basis": noise, "mel_basis": noise.abs()}.get(name.split(".")[-1], buffer + 0.02 * noise))
    module.vocoder.conv_post.weight.data.mul_(loudness)
    module.bwe_generator.conv_post.weight.data.mul_(0.05)
    return module.eval()


def random_mel(time: int) -> Tensor:
    return torch.randn(2, 2, time, 8, generator=torch.Generator().manual_seed(1))


def diffusers_twin(module: BandwidthExtendedVocoder, first_activation: str | None = None) -> LTX2VocoderWithBWE:
    """``first_activation`` of the 16 kHz stage: none in diffusers' 2.3 config."""
    first, extension = module.vocoder.config, module.config
    second = extension.generator
    twin = LTX2VocoderWithBWE(
        in_channels=first.in_channels,
        hidden_channels=first.initial_channels,
        upsample_factors=list(first.upsample_rates),
        upsample_kernel_sizes=list(first.upsample_kernel_sizes),
        resnet_kernel_sizes=list(first.resblock_kernel_sizes),
        resnet_dilations=[list(dilations) for dilations in first.resblock_dilations],
        final_act_fn=first_activation,
        bwe_in_channels=second.in_channels,
        bwe_hidden_channels=second.initial_channels,
        bwe_upsample_factors=list(second.upsample_rates),
        bwe_upsample_kernel_sizes=list(second.upsample_kernel_sizes),
        bwe_resnet_kernel_sizes=list(second.resblock_kernel_sizes),
        bwe_resnet_dilations=[list(dilations) for dilations in second.resblock_dilations],
        filter_length=extension.n_fft,
        hop_length=extension.hop_length,
        window_length=extension.win_length,
        num_mel_channels=extension.mel_bins,
    )
    twin.load_state_dict({_diffusers_name(name): tensor for name, tensor in module.state_dict().items()})
    return twin.eval()


def _diffusers_name(name: str) -> str:
    names = {
        "ups": "upsamplers",
        "resblocks": "resnets",
        "conv_pre": "conv_in",
        "conv_post": "conv_out",
        "act_post": "act_out",
    }
    pattern = rf"(?<=^vocoder\.)(?:{'|'.join(names)})|(?<=^bwe_generator\.)(?:{'|'.join(names)})"
    return re.sub(pattern, lambda match: names[match[0]], name).replace("lowpass.", "")


def sinc_sum(waveform: Tensor, ratio: int) -> Tensor:
    """Each output sample as a sum over the input's, the ends repeated: [B, C, S] -> [B, C, ratio * S]."""
    samples, out = waveform.shape[2], []
    for position in range(ratio * samples):
        total = torch.zeros(waveform.shape[:2], dtype=waveform.dtype)
        for source in range(position // ratio - 8, position // ratio + 9):
            x = 0.99 * (position / ratio - source)
            if abs(x) < 6:
                sinc = math.sin(math.pi * x) / (math.pi * x) if x else 1.0
                total += waveform[..., min(max(source, 0), samples - 1)] * 0.99 * sinc * math.cos(math.pi * x / 12) ** 2
        out.append(total)
    return torch.stack(out, dim=2)


def official(module: BandwidthExtendedVocoder, mel: Tensor) -> Tensor:
    """The official order over diffusers' generators: the first stage bounded, padded to hops, cropped at the end."""
    twin, config = diffusers_twin(module).to(mel.dtype), module.config
    waveform = twin.vocoder(mel)
    waveform = waveform.tanh() if module.vocoder.config.final_activation == "tanh" else waveform.clamp(-1, 1)
    samples = waveform.shape[2]
    waveform = F.pad(waveform, (0, math.ceil(samples / config.hop_length) * config.hop_length - samples))
    history = torch.cat([torch.zeros(*waveform.shape[:2], config.n_fft - config.hop_length), waveform], dim=2)
    frames = history.unfold(2, config.n_fft, config.hop_length)
    basis = twin.mel_stft.stft_fn.forward_basis[:, 0]
    cosines, sines = basis[: config.n_fft // 2 + 1], basis[config.n_fft // 2 + 1 :]
    magnitudes = torch.hypot(frames @ cosines.T, frames @ sines.T)
    log_mel = torch.log(torch.clamp(magnitudes @ twin.mel_stft.mel_basis.T, min=1e-5))
    wide = twin.bwe_generator(log_mel) + sinc_sum(waveform, 3)
    return wide.clamp(-1, 1)[..., : 3 * samples]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("time", [2, 10])
@torch.no_grad()
def test_matches_diffusers_within_the_bounds(time: int) -> None:
    module = random_vocoder()
    twin = diffusers_twin(module)
    mel = random_mel(time)
    first = twin.vocoder(mel).abs().max()
    waveform, expected = module(mel), twin(mel)
    assert waveform.shape == (2, 2, 18 * time)
    assert 0.2 < first < 1 and 0.2 < expected.abs().max() < 0.99
    assert relative_error(waveform, expected) <= 2e-6
    assert relative_error(module.double()(mel.double()), twin.double()(mel.double())) < 1e-13


@torch.no_grad()
def test_matches_diffusers_when_told_to_clamp_the_first_stage() -> None:
    module = random_vocoder(loudness=0.5)
    mel = random_mel(10)
    expected = diffusers_twin(module, "clamp")(mel)
    assert relative_error(module(mel), expected) <= 2e-6
    # What diffusers' own config would give.
    assert relative_error(diffusers_twin(module)(mel), expected) > 1e-2


@pytest.mark.parametrize("activation", ["clamp", "tanh"])
@pytest.mark.parametrize("time", [1, 7, 8])
@torch.no_grad()
def test_matches_the_official_order(time: int, activation: str) -> None:
    """Beyond the bounds, and with 6 samples per frame at a hop of 4: odd numbers of frames are padded."""
    module = random_vocoder(dataclasses.replace(TINY, final_activation=activation), loudness=0.5)
    mel = random_mel(time)
    assert diffusers_twin(module).vocoder(mel).abs().max() > 1.5
    waveform, expected = module(mel), official(module, mel)
    assert waveform.shape == (2, 2, 18 * time)
    assert relative_error(waveform, expected) <= 1e-5


@torch.no_grad()
def test_bf16_weights_are_computed_with_in_float32() -> None:
    narrow = random_vocoder().to(torch.bfloat16)
    mel = random_mel(7)
    waveform = narrow(mel)
    assert {tensor.dtype for tensor in narrow.state_dict().values()} == {torch.bfloat16}
    wide = random_vocoder()
    wide.load_state_dict(narrow.state_dict())
    assert waveform.dtype == torch.float32
    assert torch.equal(waveform, wide(mel))
    rounded = narrow(mel.bfloat16())
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(rounded, wide(mel.bfloat16().float()).bfloat16())


@torch.no_grad()
def test_second_spectrogram_is_causal() -> None:
    module = random_vocoder()
    waveform = torch.randn(1, 2, 40, generator=torch.Generator().manual_seed(1))
    changed = waveform.clone()
    changed[..., 20:] += 1
    before, after = module.mel_stft(waveform), module.mel_stft(changed)
    assert before.shape == (1, 2, 10, 5)
    torch.testing.assert_close(before[:, :, :5], after[:, :, :5])
    assert not torch.allclose(before[:, :, 5], after[:, :, 5])


@pytest.mark.parametrize("ratio", [2, 3])
def test_resampling_is_the_windowed_sinc(ratio: int) -> None:
    waveform = torch.randn(2, 3, 31, generator=torch.Generator().manual_seed(1))
    expected = sinc_sum(waveform.double(), ratio)
    assert relative_error(resample(waveform, ratio).double(), expected) <= 2e-6
    # A slow wave keeps its shape and its place.
    wave = torch.sin(torch.arange(200) / 20).view(1, 1, -1)
    slow = torch.sin(torch.arange(200 * ratio) / (20 * ratio))
    torch.testing.assert_close(resample(wave, ratio)[0, 0, 30:-30], slow[30:-30], rtol=0, atol=1e-2)


def test_full_size_has_the_official_tensors() -> None:
    with torch.device("meta"):
        module = BandwidthExtendedVocoder(FULL, FULL_EXTENSION)
        waveform = module(torch.empty(1, 2, 501, 64))
    assert waveform.shape == (1, 2, 501 * 480)
    assert module.samples_per_frame == 480
    assert module.output_sample_rate == 48000
    assert round(sum(parameter.numel() for parameter in module.parameters()) / 1e5) == 1285
    state = module.state_dict()
    assert len(state) == 1227
    assert "vocoder.conv_post.bias" not in state and "bwe_generator.conv_post.bias" not in state
    shapes = {
        "vocoder.conv_pre.weight": (1536, 128, 7),
        "vocoder.resblocks.17.acts2.2.act.beta": (24,),
        "vocoder.act_post.downsample.lowpass.filter": (1, 1, 12),
        "bwe_generator.ups.0.weight": (512, 256, 12),
        "bwe_generator.act_post.act.alpha": (16,),
        "bwe_generator.conv_post.weight": (2, 16, 7),
        "mel_stft.mel_basis": (64, 257),
        "mel_stft.stft_fn.forward_basis": (514, 1, 512),
        "mel_stft.stft_fn.inverse_basis": (514, 1, 512),
    }
    assert {name: tuple(state[name].shape) for name in shapes} == shapes


def test_refuses_another_mel() -> None:
    with pytest.raises(ValueError, match=r"of shape \[1, 2, 3, 5\]; .* 2 channels, 8 mel bins and at least one frame"):
        random_vocoder()(torch.zeros(1, 2, 3, 5))


@pytest.mark.parametrize(
    ("vocoder", "extension", "message"),
    [
        ({"output_sample_rate": 24000}, {}, "from 16000 to 48000 Hz after a vocoder of 24000 Hz; it must start"),
        ({}, {"output_sample_rate": 40000}, "from 16000 to 40000 Hz .* a multiple"),
        ({}, {"n_fft": 32}, "a window of 16 with n_fft 32 and a hop of 4; the window must equal n_fft"),
        ({}, {"hop_length": 20}, "a window of 16 with n_fft 16 and a hop of 20; the window must"),
        ({}, {"hop_length": 5}, "makes 12 samples per frame; a hop of 5 from 16000 to 48000 Hz needs 15"),
        ({}, {"mel_bins": 6}, "reads 10 channels and gives 2; 2 channels of 6 mel bins need 12 and 2"),
        ({"out_channels": 1}, {}, "reads 10 channels and gives 2; 1 channels of 5 mel bins need 5 and 1"),
    ],
)
def test_refuses_parts_that_do_not_fit(vocoder: dict[str, int], extension: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BandwidthExtendedVocoder(dataclasses.replace(TINY, **vocoder), dataclasses.replace(TINY_EXTENSION, **extension))
