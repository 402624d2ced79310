"""Latents to frames and to sound."""

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vgen.metrics.timer import Timer

notice = logging.getLogger("vgen.notice")

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


@dataclass(frozen=True, eq=False)
class Fallback:
    """Another way to the same frames that needs less memory. ``name``: what is different, for the console."""

    name: str
    decode_video: DecodeVideo


def write_frames(
    write: Callable[[Iterator[Tensor]], None],
    decode_video: DecodeVideo,
    fallbacks: Sequence[Fallback],
    latents: Tensor,
    timer: Timer,
) -> str | None:
    """Decode ``latents`` into ``write``, again from the start by the next of ``fallbacks`` where memory runs out.

    Returns the name of the fallback that it came to, None where there was no need.

    Raises:
        torch.OutOfMemoryError: the last one ran out of it, too.
    """
    ways = [Fallback("", decode_video), *fallbacks]
    for way, following in zip(ways, [*ways[1:], None], strict=True):
        if _is_written(write, way, latents, timer, last=following is None):
            return way.name or None
        assert following is not None
        notice.warning("the decode ran out of memory; again with %s", following.name)
        gc.collect()  # frames of the failed call hold what it had made
        if latents.is_cuda:
            torch.cuda.empty_cache()
    raise AssertionError


def _is_written(
    write: Callable[[Iterator[Tensor]], None], way: Fallback, latents: Tensor, timer: Timer, *, last: bool
) -> bool:
    try:
        write(timed_frames(way.decode_video(latents), timer))
    except torch.OutOfMemoryError:
        if last:
            raise
        return False
    return True


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
