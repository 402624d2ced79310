"""Latents to frames and to sound."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

DecodeVideo = Callable[[Tensor], Iterator[Tensor]]
"""``[1, C, F, H, W]`` latents to ``[1, 3, f, H, W]`` frames in about [-1, 1], in one or more groups along time."""


@dataclass(frozen=True)
class AudioComponents:
    decoder: nn.Module
    vocoder: nn.Module
    sample_rate: int


def decode_whole(decoder: nn.Module) -> DecodeVideo:
    """The exact decode: all latents at once."""

    def decode(latents: Tensor) -> Iterator[Tensor]:
        with torch.no_grad():
            yield decoder(latents)

    return decode


def decode_audio(components: AudioComponents, latents: Tensor) -> Tensor:
    """``[1, C, T, M]`` audio latents to a ``[2, samples]`` float32 waveform in [-1, 1] on the CPU."""
    with torch.no_grad():
        mel = components.decoder(latents)
        waveform = components.vocoder(mel)
    return waveform[0].float().cpu()
