"""Latents to frames and to sound."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vgen.metrics.timer import Timer

DecodeVideo = Callable[[Tensor], Iterator[Tensor]]
"""``[1, C, F, H, W]`` latents to ``[1, 3, f, H, W]`` frames in about [-1, 1], in one or more groups along time."""


@dataclass(frozen=True, eq=False)
class Sound:
    """``waveform`` ``[2, samples]`` float32 in [-1, 1] on the CPU, ``sample_rate`` in Hz."""

    waveform: Tensor
    sample_rate: int


@dataclass(frozen=True)
class AudioComponents:
    decoder: nn.Module
    vocoder: nn.Module
    sample_rate: int


def decode_audio(components: AudioComponents, latents: Tensor) -> Sound:
    """``[1, C, T, M]`` audio latents to sound."""
    with torch.no_grad():
        waveform = components.vocoder(components.decoder(latents))
    return Sound(waveform[0].float().cpu(), components.sample_rate)


def timed_frames(frames: Iterator[Tensor], timer: Timer) -> Iterator[Tensor]:
    """Frames are decoded as the writer asks for them; their time counts as decode, the rest as write."""
    while True:
        with timer("decode_video"):
            group = next(frames, None)
        if group is None:
            return
        yield group
