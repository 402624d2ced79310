"""The audio VAE: our own encoder and decoder, which have gradients, its loss and its latents' statistics.

Shapes: B clips, C channels, T time (mel frames, or latents), M mel (bins, or latent bins).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vgen.config import TrainConfig
from vgen.models.ltx2.audio_encoder import AudioEncoder
from vgen.models.ltx2.audio_vae import AudioDecoder, pixel_norm
from vgen.models.ltx2.config import AUDIO_COMPRESSION, LTX2Config
from vgen.tiny.training.data import mel_of, scenes_of, size_of
from vgen.tiny.training.loop import Batch, Objective

KL_WEIGHT = 1e-4
SHORTEST = 9
"""Frames of video: a spectrogram needs more sound than one frame's."""


class AudioVae(nn.Module):
    """Both halves under one name each; their statistics stay 0 and 1 until the training has ended."""

    def __init__(self, architecture: LTX2Config) -> None:
        super().__init__()
        self.encoder = AudioEncoder(architecture.audio_encoder)
        self.decoder = AudioDecoder(architecture.audio_decoder)

    def moments(self, mel: Tensor) -> tuple[Tensor, Tensor]:
        """Means and logarithms of variances [B, C, ceil(T / 4), M / 4] of ``mel`` [B, 2, T, M]."""
        x = self.encoder.conv_in(mel)
        for level in self.encoder.down:
            x = level(x)
        moments = self.encoder.conv_out(F.silu(pixel_norm(self.encoder.mid(x))))
        mean, log_variance = moments.chunk(2, dim=1)
        return mean, log_variance.clamp(-30, 20)

    def latent_shape(self, mel: Tensor) -> tuple[int, int, int, int]:
        """Of the latents of ``mel`` [B, 2, T, M]."""
        clips, _, frames, bins = mel.shape
        return clips, self.encoder.config.latent_channels, -(-frames // AUDIO_COMPRESSION), bins // AUDIO_COMPRESSION


def audio_objective(vae: AudioVae, config: TrainConfig, device: torch.device) -> Objective:
    count = config.stages.audio_vae.batch_size

    def draw(step: int, generator: torch.Generator) -> Batch:
        frames = max(SHORTEST, size_of(config, step).num_frames)
        mel = mel_of(scenes_of(config, step * count, count), frames, vae.encoder.config, device)
        return {"mel": mel, "noise": torch.randn(vae.latent_shape(mel), generator=generator, device=device)}

    def losses(batch: Batch) -> dict[str, Tensor]:
        mel, noise = batch["mel"], batch["noise"]
        mean, log_variance = vae.moments(mel)
        decoded = vae.decoder(mean + noise * (log_variance / 2).exp())
        kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
        l1 = (decoded - mel[:, :, : decoded.shape[2]]).abs().mean()
        return {"loss": l1 + KL_WEIGHT * kl, "l1": l1, "kl": kl}

    return Objective(draw, losses)


@torch.no_grad()
def measure_statistics(vae: AudioVae, config: TrainConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation [C * M] of each feature of a latent, the channel being the slower."""
    scenes = scenes_of(config, 0, 8 * config.stages.audio_vae.batch_size)
    frames = max(SHORTEST, config.sizes[0].num_frames)
    means, _ = vae.moments(mel_of(scenes, frames, vae.encoder.config, device))
    features = means.transpose(1, 2).flatten(2)
    return features.mean(dim=(0, 1)), features.std(dim=(0, 1)).clamp(min=1e-4)
