import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from vgen.models.ltx2.audio_encoder import AudioEncoder, fit_latents
from vgen.models.ltx2.config import AudioEncoderConfig
from vgen.models.ltx2.mel import log_mel, mel_filters, num_audio_latents, num_mel_frames
from vgen.requests import Request
from vgen.stages.latents import latent_geometry

OFFICIAL = AudioEncoderConfig(
    base_channels=128,
    channel_multipliers=(1, 2, 4),
    num_res_blocks=2,
    in_channels=2,
    latent_channels=8,
    mel_bins=64,
    sample_rate=16000,
    mel_hop_length=160,
    n_fft=1024,
)
SMALL = dataclasses.replace(OFFICIAL, mel_bins=12, sample_rate=8000, mel_hop_length=60, n_fft=256)


def mel_to_hertz(mel: float) -> float:
    """Slaney's scale: 15 mel are 1000 Hz, straight below and, above, 27 mel to a factor of 6.4."""
    return mel * 200 / 3 if mel < 15 else 1000 * 6.4 ** ((mel - 15) / 27)


def reference_filters(config: AudioEncoderConfig) -> np.ndarray:
    top = config.sample_rate / 2
    top_mel = top * 3 / 200 if top < 1000 else 15 + 27 * math.log(top / 1000, 6.4)
    corners = [mel_to_hertz(top_mel * i / (config.mel_bins + 1)) for i in range(config.mel_bins + 2)]
    filters = np.zeros((config.n_fft // 2 + 1, config.mel_bins))
    for row in range(filters.shape[0]):
        hertz = row * config.sample_rate / config.n_fft
        for column, (low, peak, high) in enumerate(zip(corners, corners[1:], corners[2:], strict=False)):
            height = min((hertz - low) / (peak - low), (high - hertz) / (high - peak))
            filters[row, column] = max(height, 0.0) * 2 / (high - low)
    return filters


def reference_log_mel(waveform: np.ndarray, config: AudioEncoderConfig) -> np.ndarray:
    """One frame at a time: [S] -> [T, M]."""
    half, frames = config.n_fft // 2, len(waveform) // config.mel_hop_length + 1
    padded = np.concatenate([waveform[half:0:-1], waveform, waveform[-2 : -half - 2 : -1]])
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(config.n_fft) / config.n_fft)
    starts = [frame * config.mel_hop_length for frame in range(frames)]
    magnitudes = np.abs([np.fft.rfft(padded[start : start + config.n_fft] * window) for start in starts])
    return np.log(np.maximum(magnitudes @ reference_filters(config), 1e-5))


def random_waveform(samples: int) -> Tensor:
    """Stereo of different loudness, and silence from the middle on in the second sound: the logarithm's floor."""
    waveform = torch.rand(2, 2, samples, generator=torch.Generator().manual_seed(samples), dtype=torch.float64) * 2 - 1
    waveform[:, 1] *= 0.01
    waveform[1, :, samples // 2 :] = 0
    return waveform


@pytest.mark.parametrize("config", [OFFICIAL, SMALL])
def test_filters_match_the_definition(config: AudioEncoderConfig) -> None:
    filters = mel_filters(config)
    assert filters.shape == (config.n_fft // 2 + 1, config.mel_bins)
    assert filters.dtype == torch.float64
    np.testing.assert_allclose(filters.numpy(), reference_filters(config), rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize(
    ("config", "samples"), [(OFFICIAL, 513), (OFFICIAL, 16000), (OFFICIAL, 5439), (OFFICIAL, 5441), (SMALL, 1234)]
)
def test_matches_the_definition(config: AudioEncoderConfig, samples: int) -> None:
    waveform = random_waveform(samples)
    expected = np.array([[reference_log_mel(channel.numpy(), config) for channel in sound] for sound in waveform])
    exact = log_mel(waveform, config)
    assert exact.shape == (2, 2, num_mel_frames(samples, config), config.mel_bins)
    assert exact.dtype == torch.float64
    np.testing.assert_allclose(exact.numpy(), expected, rtol=0, atol=1e-9)
    mel = log_mel(waveform.float(), config)
    assert mel.dtype == torch.float32
    # Of a logarithm: the relative error of the magnitudes.
    np.testing.assert_allclose(mel.numpy(), expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_a_sine_stands_in_its_bin() -> None:
    """At 440 Hz: 6.6 mel of 45.245 in 65 steps, so the bin whose peak is nearest is the ninth."""
    seconds = torch.arange(16000) / 16000
    mel = log_mel(torch.sin(2 * torch.pi * 440 * seconds).expand(1, 2, -1), OFFICIAL)
    assert set(mel.argmax(dim=3).flatten().tolist()) == {8}


def test_silence_is_the_floor() -> None:
    mel = log_mel(torch.zeros(1, 2, 600), OFFICIAL)
    assert torch.equal(mel, torch.full((1, 2, 4, 64), 1e-5).log())


def test_a_bf16_waveform_is_transformed_in_float32() -> None:
    waveform = random_waveform(1600).bfloat16()
    assert torch.equal(log_mel(waveform, OFFICIAL), log_mel(waveform.float(), OFFICIAL))


@pytest.mark.parametrize("shape", [(1, 1, 1600), (1, 6, 1600), (2, 1600)])
def test_refuses_other_channels(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"the waveform has the shape .* with 2 channels: give one sound"):
        log_mel(torch.zeros(shape), OFFICIAL)


def test_refuses_what_is_too_short_to_reflect() -> None:
    with pytest.raises(ValueError, match=r"the waveform has 512 samples; .* more than 512 \(0.032 s\): use a longer"):
        log_mel(torch.zeros(1, 2, 512), OFFICIAL)


@pytest.mark.parametrize("samples", [513, 639, 640, 641, 6400, 80667])
def test_counts_are_those_of_the_modules(samples: int) -> None:
    with torch.device("meta"):
        encoder = AudioEncoder(OFFICIAL)
        latents = encoder(torch.empty(1, 2, num_mel_frames(samples, OFFICIAL), 64))
    assert latents.shape[2] == num_audio_latents(samples, OFFICIAL)


def request_of(num_frames: int, fps: float) -> Request:
    return Request(
        index=0,
        prompt="",
        negative_prompt="",
        images=(),
        image_crf=0,
        video=None,
        noise_level=1.0,
        audio="generate",
        sound=None,
        seed=0,
        height=64,
        width=64,
        num_frames=num_frames,
        fps=fps,
    )


@pytest.mark.parametrize("fps", [24, 25, 30, 50, 24000 / 1001])
def test_audio_tokens_follow_the_official_formula(fps: float) -> None:
    """As Lightricks/LTX-2 at 400fd31 has it: seconds times 16000 / 160 / 4, rounded half to even."""
    for frames in range(9, 258, 8):
        tokens = latent_geometry(request_of(frames, fps)).audio_tokens
        assert tokens == round(float(frames) / float(fps) * (float(16000) / float(160) / float(4)))


@pytest.mark.parametrize(
    ("frames", "fps", "tokens"),
    [(9, 24, 9), (121, 24, 126), (241, 25, 241), (121, 30, 101), (257, 30, 214), (9, 50, 4), (17, 50, 8), (25, 50, 12)],
)
def test_audio_tokens_of_known_sizes(frames: int, fps: float, tokens: int) -> None:
    """At 50 fps all of these end on half a token, which goes to the even side."""
    assert latent_geometry(request_of(frames, fps)).audio_tokens == tokens


@pytest.mark.parametrize("fps", [24, 25, 30, 50, 24000 / 1001])
def test_a_sound_as_long_as_the_video_fills_its_tokens(fps: float) -> None:
    for frames in range(9, 258, 8):
        tokens = latent_geometry(request_of(frames, fps)).audio_tokens
        latents = num_audio_latents(round(frames / fps * 16000), OFFICIAL)
        assert tokens <= latents <= tokens + 1
        assert fit_latents(torch.empty(1, 8, latents, 16), tokens).shape[2] == tokens
