"""LTX-2 audio VAE decoder: normalized latents to a stereo log-mel spectrogram, causal in time.

Shapes: B batch, C channels of the level at hand, T time (latents, then mel frames), M mel (latent bins, then bins).
Source: Lightricks/LTX-2 at 400fd31, ``model/audio_vae/{audio_vae,resnet,upsample,causal_conv_2d}.py``.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vgen.models.ltx2.config import AUDIO_COMPRESSION, AudioDecoderConfig, AudioEncoderConfig

NORM_EPS = 1e-6


def pixel_norm(x: Tensor) -> Tensor:
    """x / sqrt(mean of x² over the channels + 1e-6), [B, C, T, M]."""
    return x * torch.rsqrt(x.square().mean(dim=1, keepdim=True) + NORM_EPS)


class CausalConv2d(nn.Module):
    """Convolution whose zero padding lies in the past along time and on both sides along mel."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size)
        self.reach = kernel_size - 1

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, T, M] -> [B, C', T, M]."""
        out: Tensor = self.conv(F.pad(x, (self.reach // 2, self.reach // 2, self.reach, 0)))
        return out


class ResBlock(nn.Module):
    """Two normalized convolutions beside the input; a 1x1 convolution fits the input where the channels change."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv1 = CausalConv2d(in_channels, out_channels)
        self.conv2 = CausalConv2d(out_channels, out_channels)
        self.nin_shortcut = CausalConv2d(in_channels, out_channels, 1) if in_channels != out_channels else None

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, T, M] -> [B, C', T, M]."""
        hidden = self.conv1(F.silu(pixel_norm(x)))
        hidden = self.conv2(F.silu(pixel_norm(hidden)))
        shortcut: Tensor = x if self.nin_shortcut is None else self.nin_shortcut(x)
        return shortcut + hidden


class Middle(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.block_1 = ResBlock(channels, channels)
        self.block_2 = ResBlock(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.block_2(self.block_1(x))
        return out


class Upsample(nn.Module):
    """Doubles time and mel; the first time row is dropped, so that T becomes 2T - 1 and stays causal."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = CausalConv2d(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, T, M] -> [B, C, 2T - 1, 2M]."""
        out: Tensor = self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return out[:, :, 1:]


class Level(nn.Module):
    """Residual blocks of one resolution and, except at the last, the step to the next."""

    def __init__(self, in_channels: int, out_channels: int, num_blocks: int, *, upsample: bool) -> None:
        super().__init__()
        widths = [in_channels] + [out_channels] * num_blocks
        self.block = nn.ModuleList(ResBlock(*pair) for pair in pairwise(widths))
        self.upsample = Upsample(out_channels) if upsample else None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.block:
            x = block(x)
        return x if self.upsample is None else self.upsample(x)


class PerFeatureStatistics(nn.Module):
    """Mean and standard deviation of the packed features (channel-major, c * M + m), under the checkpoint's names."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.register_buffer("mean-of-means", torch.zeros(features))
        self.register_buffer("std-of-means", torch.ones(features))

    def forward(self, latents: Tensor) -> Tensor:
        """Undo the normalization of [B, C, T, M], in its dtype."""
        mean, std = self._unpacked(latents)
        return latents * std + mean

    def normalize(self, latents: Tensor) -> Tensor:
        """Normalize [B, C, T, M], in its dtype."""
        mean, std = self._unpacked(latents)
        return (latents - mean) / std

    def _unpacked(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        mean, std = (
            self.get_buffer(name).to(latents.dtype).view(latents.shape[1], 1, latents.shape[3])
            for name in ("mean-of-means", "std-of-means")
        )
        return mean, std


def check_compression(part: str, config: AudioDecoderConfig | AudioEncoderConfig) -> None:
    """Refuse a config of the ``part`` whose levels do not give the fixed compression of 4, with a ValueError."""
    levels = len(config.channel_multipliers)
    if 2 ** (levels - 1) != AUDIO_COMPRESSION or config.mel_bins % AUDIO_COMPRESSION:
        raise ValueError(
            f"the audio {part}'s config has {levels} levels and {config.mel_bins} mel bins; LTX-2 "
            f"compresses by {AUDIO_COMPRESSION}: use 3 levels and a multiple of {AUDIO_COMPRESSION} mel bins"
        )


def check_shape(part: str, x: Tensor, channels: int, bins: int) -> None:
    """Refuse an input of the ``part`` that is not [B, channels, at least one frame, bins], with a ValueError."""
    if x.ndim != 4 or x.shape[1] != channels or x.shape[3] != bins or not x.shape[2]:
        raise ValueError(
            f"the audio {part} got the shape {list(x.shape)}; it reads [batch, channels, frames, mel bins] with "
            f"{channels} channels, {bins} mel bins and at least one frame"
        )


class AudioDecoder(nn.Module):
    """The decoder as built from its config: 56 tensors beside the statistics in LTX-2.

    Raises:
        ValueError: the number of levels does not give the fixed compression of 4.
    """

    def __init__(self, config: AudioDecoderConfig) -> None:
        super().__init__()
        check_compression("decoder", config)
        widths = [config.base_channels * multiplier for multiplier in config.channel_multipliers]
        self.config = config
        self.per_channel_statistics = PerFeatureStatistics(config.latent_channels * config.latent_mel_bins)
        self.conv_in = CausalConv2d(config.latent_channels, widths[-1])
        self.mid = Middle(widths[-1])
        # Stored from the finest level up, as the checkpoint numbers them; run from the coarsest down.
        self.up = nn.ModuleList(
            Level(wider, width, config.num_res_blocks + 1, upsample=level > 0)
            for level, (width, wider) in enumerate(zip(widths, [*widths[1:], widths[-1]], strict=True))
        )
        self.conv_out = CausalConv2d(widths[0], config.out_channels)

    def forward(self, latents: Tensor) -> Tensor:
        """Decode normalized latents [B, C, T, M] to a log-mel spectrogram [B, 2, 4T - 3, 4M], both in latents' dtype.

        Computes in the dtype of the weights.

        Raises:
            ValueError: the latents have other channels or mel bins than the config, or no frames.
        """
        check_shape("decoder", latents, self.config.latent_channels, self.config.latent_mel_bins)
        x = self.per_channel_statistics(latents.to(self.conv_in.conv.weight.dtype))
        x = self.mid(self.conv_in(x))
        for level in reversed(self.up):
            x = level(x)
        mel: Tensor = self.conv_out(F.silu(pixel_norm(x)))
        return mel.to(latents.dtype)
