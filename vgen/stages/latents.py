"""Latent sizes, their noise, and the two layouts: tokens for the transformer, grids for the decoders.

B batch, F latent frames, H and W latent height and width, T audio latents, M latent mel bins, C channels.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vgen.models.ltx2.config import AUDIO_LATENTS_PER_SECOND, VIDEO_COMPRESSION, LTX2Config
from vgen.models.ltx2.geometry import Geometry
from vgen.requests import Request


@dataclass(frozen=True)
class Latents:
    """State of one denoising run. ``video`` ``[B, F*H*W, C]``, ``audio`` ``[B, T, C*M]`` or None, model dtype."""

    video: Tensor
    audio: Tensor | None


def latent_geometry(request: Request) -> Geometry:
    """Latent sizes of a request; 25 audio latents a second of video, 0 tokens without audio."""
    time, height, width = VIDEO_COMPRESSION
    seconds = request.num_frames / request.fps
    return Geometry(
        latent_frames=(request.num_frames - 1) // time + 1,
        latent_height=request.height // height,
        latent_width=request.width // width,
        fps=request.fps,
        audio_tokens=max(1, round(seconds * AUDIO_LATENTS_PER_SECOND)) if request.audio else 0,
    )


def make_noise(
    geometry: Geometry, config: LTX2Config, *, seed: int, device: torch.device, dtype: torch.dtype
) -> Latents:
    """Unit normal latents of one video, a function of ``seed`` and position only.

    Drawn in float32 on the CPU in token layout, video first and audio after it, then rounded to ``dtype``: the same
    bits whatever the device, the ranks or the precision of the model. (The official code draws in bfloat16 on the
    device, so its noise differs from machine to machine.)
    """
    generator = torch.Generator().manual_seed(seed)
    video = torch.randn(1, geometry.video_tokens, config.transformer.in_channels, generator=generator)
    audio = None
    if geometry.audio_tokens:
        audio = torch.randn(1, geometry.audio_tokens, config.transformer.audio_in_channels, generator=generator)
        audio = audio.to(device, dtype)
    return Latents(video.to(device, dtype), audio)


def unpack_video(video: Tensor, geometry: Geometry) -> Tensor:
    """``[B, F*H*W, C]`` to ``[B, C, F, H, W]``."""
    grid = (geometry.latent_frames, geometry.latent_height, geometry.latent_width)
    return video.transpose(1, 2).unflatten(2, grid).contiguous()


def unpack_audio(audio: Tensor, latent_mel_bins: int) -> Tensor:
    """``[B, T, C*M]`` to ``[B, C, T, M]``."""
    return audio.unflatten(2, (-1, latent_mel_bins)).transpose(1, 2).contiguous()
