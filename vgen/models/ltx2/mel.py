"""The log-mel spectrogram that LTX-2's audio VAE encodes, and how many frames and latents a waveform gives.

Magnitudes of a Hann-windowed Fourier transform, summed by triangular filters that are evenly spaced on Slaney's mel
scale from 0 Hz to half the sample rate and have equal areas; then the logarithm. Frame i is centred on sample
i * hop; at both ends the waveform is reflected.

Shapes: B batch, C channels, S samples, T time (frames), M mel bins.
Source: Lightricks/LTX-2 at 400fd31, ``model/audio_vae/{ops,audio_vae}.py``, which takes
torchaudio's ``MelSpectrogram``.
"""

from functools import lru_cache

import torch
from torch import Tensor

from vgen.models.ltx2.config import AUDIO_COMPRESSION, AudioEncoderConfig

FLOOR = 1e-5


def log_mel(waveform: Tensor, config: AudioEncoderConfig) -> Tensor:
    """Log-mel spectrogram [B, C, T, M] of a waveform [B, C, S] at ``config.sample_rate``, at least in float32.

    T is ``num_mel_frames(S, config)``.

    Raises:
        ValueError: the waveform has another number of channels, or is too short to be reflected.
    """
    _check_waveform(waveform, config)
    waveform = waveform.to(torch.promote_types(waveform.dtype, torch.float32))
    spectrum = torch.stft(
        waveform.flatten(0, 1),
        config.n_fft,
        config.mel_hop_length,
        window=torch.hann_window(config.n_fft, dtype=waveform.dtype, device=waveform.device),
        center=True,
        pad_mode="reflect",
        return_complex=True,
    )
    mel = spectrum.abs().transpose(1, 2) @ _filters(config, waveform.dtype, waveform.device)
    return mel.clamp(min=FLOOR).log().unflatten(0, waveform.shape[:2])


@lru_cache(maxsize=4)
def _filters(config: AudioEncoderConfig, dtype: torch.dtype, device: torch.device) -> Tensor:
    return mel_filters(config).to(device, dtype)


def mel_filters(config: AudioEncoderConfig) -> Tensor:
    """Weights [n_fft / 2 + 1, M] of every frequency in every mel bin, float64 on the CPU."""
    # Imported where it is used: it takes a second, and only encoding needs it.
    from transformers.audio_utils import mel_filter_bank

    filters = mel_filter_bank(
        num_frequency_bins=config.n_fft // 2 + 1,
        num_mel_filters=config.mel_bins,
        min_frequency=0.0,
        max_frequency=config.sample_rate / 2,
        sampling_rate=config.sample_rate,
        norm="slaney",
        mel_scale="slaney",
    )
    return torch.from_numpy(filters)


def num_mel_frames(samples: int, config: AudioEncoderConfig) -> int:
    """Frames of a waveform of ``samples``: one at its start and one every hop."""
    return samples // config.mel_hop_length + 1


def num_audio_latents(samples: int, config: AudioEncoderConfig) -> int:
    """Latents that the encoder makes of a waveform of ``samples``: a quarter of its frames, rounded up."""
    return -(-num_mel_frames(samples, config) // AUDIO_COMPRESSION)


def _check_waveform(waveform: Tensor, config: AudioEncoderConfig) -> None:
    if waveform.ndim != 3 or waveform.shape[1] != config.in_channels:
        raise ValueError(
            f"the waveform has the shape {list(waveform.shape)}; the audio encoder hears [batch, channels, samples] "
            f"with {config.in_channels} channels: give one sound of one channel twice"
        )
    if waveform.shape[2] <= config.n_fft // 2:
        raise ValueError(
            f"the waveform has {waveform.shape[2]} samples; the reflection at its ends needs more than "
            f"{config.n_fft // 2} ({config.n_fft / 2 / config.sample_rate:.3f} s): use a longer sound and video"
        )
