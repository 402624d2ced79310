"""Batches of the tiny world, drawn on the device; a batch depends on the seed and its number alone."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from vgen.config import ClipSize, TrainConfig
from vgen.models.ltx2.config import AudioEncoderConfig
from vgen.models.ltx2.mel import log_mel
from vgen.tiny.grammar import Scene, Split, sample_scene
from vgen.tiny.render import render_sound, render_video

FPS = 24.0


def scenes_of(config: TrainConfig, first: int, count: int, split: Split = "train") -> list[Scene]:
    return [sample_scene(config.seed, index, split) for index in range(first, first + count)]


def size_of(config: TrainConfig, step: int) -> ClipSize:
    return config.sizes[step % len(config.sizes)]


def video_of(scenes: Sequence[Scene], size: ClipSize, device: torch.device) -> Tensor:
    """[B, 3, F, H, W] in -1..1. One frame is the first of the usual clip, as an image to start from is."""
    return render_video(scenes, size.num_frames, size.height, size.width, device)


BATCH = 256


def table_scenes(config: TrainConfig) -> Iterator[list[Scene]]:
    """The first ``table_clips`` scenes, in batches."""
    for first in range(0, config.table_clips, BATCH):
        yield scenes_of(config, first, min(BATCH, config.table_clips - first))


def video_table(config: TrainConfig, size: ClipSize, device: torch.device) -> Tensor:
    """uint8 [N, 3, F, H, W] of the first ``table_clips`` scenes: drawing them in each step takes longer than it."""
    return torch.cat([to_bytes(video_of(scenes, size, device)) for scenes in table_scenes(config)])


def to_bytes(video: Tensor) -> Tensor:
    """uint8 of -1..1."""
    return ((video + 1) * 127.5).round().to(torch.uint8)


def from_bytes(video: Tensor) -> Tensor:
    return video.float() / 127.5 - 1


def sound_of(scenes: Sequence[Scene], num_frames: int, sample_rate: int, device: torch.device) -> Tensor:
    """[B, 2, S] in -1..1, as long as the video."""
    return render_sound(scenes, round(num_frames / FPS * sample_rate), sample_rate, device)


def mel_of(scenes: Sequence[Scene], num_frames: int, config: AudioEncoderConfig, device: torch.device) -> Tensor:
    """[B, 2, T, M]."""
    return log_mel(sound_of(scenes, num_frames, config.sample_rate, device), config)
