"""SnakeBeta at twice the sample rate: BigVGAN's periodic activation, low-passed so that it does not alias.

Shapes: B batch, C channels, T samples.
Source: Lightricks/LTX-2 at 400fd31, ``model/audio_vae/vocoder.py``; BigVGAN, arXiv 2206.04658.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

RATIO = 2
TAPS = 12
EPS = 1e-9


def kaiser_filter() -> Tensor:
    """Low-pass filter [1, 1, 12] that halves the band: a sinc under a Kaiser window, with sum 1."""
    cutoff, transition = 0.5 / RATIO, 2.4 / RATIO
    # Kaiser's formulas: what a window of this length attenuates (51 dB here), and its shape from 50 dB on.
    attenuation = 2.285 * (TAPS // 2 - 1) * math.pi * transition + 7.95
    window = torch.kaiser_window(TAPS, beta=0.1102 * (attenuation - 8.7), periodic=False)
    time = torch.arange(-(TAPS // 2), TAPS // 2) + 0.5
    weights = 2 * cutoff * window * torch.sinc(2 * cutoff * time)
    return (weights / weights.sum()).view(1, 1, TAPS)


def upsample(x: Tensor, weights: Tensor, ratio: int, centre: int) -> Tensor:
    """[B, C, T] -> [B, C, ratio * T] by a low-pass filter [1, 1, taps], the edges being repeated outwards.

    ``centre``: the filter's tap that falls on the first of the ``ratio`` samples of each input sample.
    """
    channels, samples = x.shape[1:]
    pad = weights.shape[2] // (2 * ratio)  # as far as the filter reaches
    x = F.pad(x, (pad, pad), mode="replicate")
    x = ratio * F.conv_transpose1d(x, weights.expand(channels, -1, -1), stride=ratio, groups=channels)
    return x.narrow(2, pad * ratio + centre, ratio * samples)


class Upsample(nn.Module):
    """Doubles the rate; the checkpoint holds the filter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("filter", kaiser_filter())

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, T] -> [B, C, 2T]."""
        return upsample(x, self.get_buffer("filter"), RATIO, TAPS // 2 - 1)


class LowPass(nn.Module):
    """Filters and keeps every second sample; the checkpoint holds the filter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("filter", kaiser_filter())

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, 2T] -> [B, C, T]."""
        channels = x.shape[1]
        x = F.pad(x, (TAPS // 2 - 1, TAPS // 2), mode="replicate")
        return F.conv1d(x, self.get_buffer("filter").expand(channels, -1, -1), stride=RATIO, groups=channels)


class Downsample(nn.Module):
    """The low pass, one level down as the checkpoint names it."""

    def __init__(self) -> None:
        super().__init__()
        self.lowpass = LowPass()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.lowpass(x)
        return out


class SnakeBeta(nn.Module):
    """x + sin²(αx) / β with a frequency and an amplitude per channel, both stored as logarithms."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(channels))
        self.beta = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, T] -> [B, C, T]."""
        alpha, beta = (logarithm.exp().view(1, -1, 1) for logarithm in (self.alpha, self.beta))
        return x + (1.0 / (beta + EPS)) * torch.sin(x * alpha).square()


class AntiAliasedSnake(nn.Module):
    """The activation at twice the rate, where its new frequencies have room, and back."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.act = SnakeBeta(channels)
        self.upsample = Upsample()
        self.downsample = Downsample()

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, T] -> [B, C, T]."""
        out: Tensor = self.downsample(self.act(self.upsample(x)))
        return out
