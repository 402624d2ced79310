"""The vocoder: our own, trained by spectra and waveforms, without a discriminator.

A network without memory repeats itself from mel frame to mel frame where the sound does not change, so the frequencies
that it can hold are multiples of the frames' rate, 100 Hz. A spectrogram does not tell the phase, so each tone is
taught in one phase, in which each of its frames is the same waveform.

Shapes: B clips, S samples, T mel frames, M mel bins.
"""

import statistics
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vgen.config import TrainConfig
from vgen.models.ltx2.config import LTX2Config
from vgen.models.ltx2.mel import log_mel
from vgen.models.ltx2.vocoder import Vocoder
from vgen.tiny.grammar import PITCHES_HZ
from vgen.tiny.score import SAME_FREQUENCY, frequency_error, measure_sound
from vgen.tiny.training.audio_vae import SHORTEST, AudioVae
from vgen.tiny.training.data import mel_of, scenes_of, sound_of
from vgen.tiny.training.loop import Batch, Objective

WINDOWS = (256, 512, 1024, 2048)
WAVE_WEIGHT = 1.0
SPECTRA_WEIGHT = 0.3
MEL_WEIGHT = 0.1
FRAMES = 9
"""Of video, as long as which the sounds are: short ones do, since the network hears a few mel frames at a time."""

LOG_WEIGHT = 0.2
FLOOR = 1e-3
"""Of magnitudes, before the logarithm: what is below is silence."""

LATENT_NOISE = 0.1
"""Deviation of the noise on the latents whose spectrograms it hears, normalized: the transformer's are not exact."""

HELD_OUT_SOUNDS = 32
"""That are looked at when the stage ends."""


def build_vocoder(architecture: LTX2Config) -> Vocoder:
    vocoder = Vocoder(architecture.vocoder)
    _begin_simply(vocoder)
    return vocoder


@torch.no_grad()
def _begin_simply(vocoder: Vocoder) -> None:
    """Residual blocks that add nothing yet, and other activations of about 1: from torch's own start they fade away."""
    for name, module in vocoder.named_modules():
        if isinstance(module, nn.Conv1d | nn.ConvTranspose1d):
            stride = module.stride[0] if isinstance(module, nn.ConvTranspose1d) else 1
            fan_in = module.in_channels * module.kernel_size[0] / stride
            nn.init.normal_(module.weight, std=(2 / fan_in) ** 0.5)
            if ".convs2." in name:
                nn.init.zeros_(module.weight)
    # Logarithms of a spectrogram are about 10.
    vocoder.conv_pre.weight.mul_(0.1)
    vocoder.conv_post.weight.mul_(0.01)


def vocoder_objective(vocoder: Vocoder, audio_vae: AudioVae, config: TrainConfig, device: torch.device) -> Objective:
    """Half of each batch from true spectrograms, half from what the frozen audio VAE makes of them."""
    count, rate = config.stages.vocoder.batch_size, vocoder.output_sample_rate

    def draw(step: int, generator: torch.Generator) -> Batch:
        scenes = scenes_of(config, step * count, count)
        mel = mel_of(scenes, FRAMES, audio_vae.encoder.config, device)
        noise = torch.randn(audio_vae.latent_shape(mel), generator=generator, device=device)
        in_phase = [replace(scene, phase=0.0) for scene in scenes]
        return {"mel": mel, "noise": noise, "sound": sound_of(in_phase, FRAMES, rate, device)}

    def losses(batch: Batch) -> dict[str, Tensor]:
        made, true = vocoder(heard_mel(batch["mel"], batch["noise"], audio_vae)), batch["sound"]
        samples = min(made.shape[-1], true.shape[-1])
        made, true = made[..., :samples], true[..., :samples]
        spectra = spectral_loss(made, true)
        mel = mel_loss(made, true, audio_vae, rate)
        # Of each clip by itself, or the loud ones would be all.
        wave = ((made - true).abs().mean(dim=(1, 2)) / true.abs().mean(dim=(1, 2))).mean()
        return {
            "loss": WAVE_WEIGHT * wave + SPECTRA_WEIGHT * spectra + MEL_WEIGHT * mel,
            "spectra": spectra,
            "mel": mel,
            "wave": wave,
        }

    return Objective(draw, losses)


@torch.no_grad()
def heard_mel(mel: Tensor, noise: Tensor, vae: AudioVae) -> Tensor:
    """``mel`` [B, 2, T, M], the second half of the batch through the audio VAE with noise on its latents."""
    through = vae.decoder(vae.encoder(mel) + LATENT_NOISE * noise)
    mel = mel[:, :, : through.shape[2]]
    half = len(mel) // 2
    return torch.cat([mel[:half], through[half:]])


def spectral_loss(made: Tensor, true: Tensor) -> Tensor:
    """Magnitudes and their logarithms at several resolutions; both waveforms [B, 2, S]."""
    losses = []
    for length in WINDOWS:
        if length >= made.shape[-1]:
            continue
        a, b = _magnitudes(made, length), _magnitudes(true, length)
        losses.append((a - b).norm() / b.norm().clamp(min=1e-6))
        losses.append(LOG_WEIGHT * ((a + FLOOR).log() - (b + FLOOR).log()).abs().mean())
    return torch.stack(losses).mean()


def _magnitudes(waveform: Tensor, length: int) -> Tensor:
    """[2B, F, T], of a sine its amplitude whatever the length."""
    window = torch.hann_window(length, device=waveform.device)
    spectrum = torch.stft(waveform.flatten(0, 1), length, length // 4, window=window, return_complex=True)
    # The root of 0 has no gradient.
    return (spectrum.real.square() + spectrum.imag.square() + 1e-12).sqrt() * (2 / window.sum())


def mel_loss(made: Tensor, true: Tensor, audio_vae: AudioVae, sample_rate: int) -> Tensor:
    """Distance of the log-mel spectrograms that the audio VAE reads, at its sample rate."""
    config = audio_vae.encoder.config
    samples = made.shape[-1] * config.sample_rate // sample_rate
    a, b = (log_mel(F.interpolate(x, size=samples, mode="linear"), config) for x in (made, true))
    return (a - b).abs().mean()


@torch.no_grad()
def frequency_errors(vocoder: Vocoder, vae: AudioVae, config: TrainConfig, device: torch.device) -> dict[str, float]:
    """How far held-out tones of the first size's length are off after VAE and vocoder, as a part of their frequency."""
    scenes = scenes_of(config, 0, HELD_OUT_SOUNDS, "heldout")
    mel = mel_of(scenes, max(SHORTEST, config.sizes[0].num_frames), vae.encoder.config, device)
    waveforms = vocoder(vae.decoder(vae.encoder(mel))).float().cpu().numpy()
    found = [measure_sound(waveform, vocoder.output_sample_rate).frequency_hz for waveform in waveforms]
    errors = [frequency_error(hz, PITCHES_HZ[scene.pitch]) for hz, scene in zip(found, scenes, strict=True)]
    return {
        "frequency_error": statistics.fmean(errors),
        "within_3_percent": statistics.fmean(error <= SAME_FREQUENCY for error in errors),
    }
