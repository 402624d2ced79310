"""LTX-2 audio VAE encoder: a stereo log-mel spectrogram to normalized latents, causal in time.

Shapes: B batch, C channels of the level at hand, T time (mel frames, then latents), M mel (bins, then latent bins).
Source: Lightricks/LTX-2 at 400fd31, ``model/audio_vae/{audio_vae,downsample}.py``, ``ltx_pipelines/utils/helpers.py``.
"""

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from vgen.models.ltx2.audio_vae import (
    CausalConv2d,
    Middle,
    PerFeatureStatistics,
    ResBlock,
    check_compression,
    check_shape,
    pixel_norm,
)
from vgen.models.ltx2.config import AudioEncoderConfig


class Downsample(nn.Module):
    """Halves time and mel, rounding up; its padding lies in the past along time and at the end along mel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, T, M] -> [B, C, (T + 1) // 2, M / 2]."""
        out: Tensor = self.conv(F.pad(x, (0, 1, 2, 0)))
        return out


class Level(nn.Module):
    """Residual blocks of one resolution and, except at the last, the step to the next."""

    def __init__(self, in_channels: int, out_channels: int, num_blocks: int, *, downsample: bool) -> None:
        super().__init__()
        widths = [in_channels] + [out_channels] * num_blocks
        self.block = nn.ModuleList(ResBlock(*pair) for pair in pairwise(widths))
        self.downsample = Downsample(out_channels) if downsample else None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.block:
            x = block(x)
        return x if self.downsample is None else self.downsample(x)


class AudioEncoder(nn.Module):
    """The encoder as built from its config: 44 tensors beside the statistics in LTX-2.

    Raises:
        ValueError: the number of levels does not give the fixed compression of 4.
    """

    def __init__(self, config: AudioEncoderConfig) -> None:
        super().__init__()
        check_compression("encoder", config)
        widths = [config.base_channels * multiplier for multiplier in config.channel_multipliers]
        self.config = config
        self.per_channel_statistics = PerFeatureStatistics(config.latent_channels * config.latent_mel_bins)
        self.conv_in = CausalConv2d(config.in_channels, config.base_channels)
        self.down = nn.ModuleList(
            Level(narrower, width, config.num_res_blocks, downsample=level < len(widths) - 1)
            for level, (narrower, width) in enumerate(pairwise([config.base_channels, *widths]))
        )
        self.mid = Middle(widths[-1])
        # Mean and log-variance of a distribution of latents, of which only the mean is used.
        self.conv_out = CausalConv2d(widths[-1], 2 * config.latent_channels)

    def forward(self, mel: Tensor) -> Tensor:
        """Encode a log-mel spectrogram [B, 2, T, M] to normalized latents [B, C, ceil(T / 4), M / 4], in mel's dtype.

        Computes in the dtype of the weights.

        Raises:
            ValueError: the spectrogram has other channels or mel bins than the config, or no frames.
        """
        check_shape("encoder", mel, self.config.in_channels, self.config.mel_bins)
        x = self.conv_in(mel.to(self.conv_in.conv.weight.dtype))
        for level in self.down:
            x = level(x)
        means: Tensor = self.conv_out(F.silu(pixel_norm(self.mid(x)))).chunk(2, dim=1)[0]
        return self.per_channel_statistics.normalize(means).to(mel.dtype)


def fit_latents(latents: Tensor, num_latents: int) -> Tensor:
    """Normalized latents [B, C, T, M] cut or filled at the end to [B, C, num_latents, M].

    Filled with zeros, the mean of all latents: what the official code gives a sound that ends before the video.
    """
    missing = max(num_latents - latents.shape[2], 0)
    return F.pad(latents[:, :, :num_latents], (0, 0, 0, missing))
