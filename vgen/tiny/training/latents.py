"""Latents of many clips, computed once and kept on the device, for the stages that train on latents.

Shapes: B clips, C channels, F, H, W latent frames, height and width, A audio tokens, M latent mel bins.
"""

from typing import Any

import torch
from torch import Tensor

from vgen.config import ClipSize, TrainConfig
from vgen.models.ltx2.audio_encoder import AudioEncoder, fit_latents
from vgen.models.ltx2.video_vae import PerChannelStatistics
from vgen.stages.latents import pack_audio
from vgen.tiny.training.data import mel_of, table_scenes, video_of
from vgen.tiny.training.loop import autocast
from vgen.tiny.training.video_vae import encode_means


@torch.no_grad()
def video_table(
    vae: Any, statistics: PerChannelStatistics, config: TrainConfig, size: ClipSize, device: torch.device
) -> Tensor:
    """Normalized latents [B, C, F, H, W] of the first ``table_clips`` scenes."""
    parts = []
    for scenes in table_scenes(config):
        with autocast(device, config.stages.diffusion.autocast):
            parts.append(statistics.normalize(encode_means(vae, video_of(scenes, size, device))))
    return torch.cat(parts)


@torch.no_grad()
def audio_table(
    encoder: AudioEncoder, config: TrainConfig, size: ClipSize, tokens: int, device: torch.device
) -> Tensor:
    """Normalized audio latents as ``tokens`` tokens [B, A, C * M] of the same clips."""
    parts = []
    for scenes in table_scenes(config):
        parts.append(pack_audio(fit_latents(encoder(mel_of(scenes, size.num_frames, encoder.config, device)), tokens)))
    return torch.cat(parts)
