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
    """State of one denoising run, model dtype. ``video`` ``[B, F*H*W, C]`` and the tokens of keyframes after them,
    ``audio`` ``[B, T, C*M]`` or None."""

    video: Tensor
    audio: Tensor | None


def latent_geometry(request: Request) -> Geometry:
    """Latent sizes of a request; 25 audio latents a second of video, 0 tokens without audio.

    An image for the first frame takes the place of that frame's tokens; any other one brings tokens of its own.
    """
    time, height, width = VIDEO_COMPRESSION
    seconds = request.num_frames / request.fps
    return Geometry(
        latent_frames=(request.num_frames - 1) // time + 1,
        latent_height=request.height // height,
        latent_width=request.width // width,
        fps=request.fps,
        audio_tokens=max(1, round(seconds * AUDIO_LATENTS_PER_SECOND)) if request.has_audio else 0,
        keyframes=tuple(image.frame for image in request.images if image.frame != 0),
    )


def make_noise(
    geometry: Geometry, config: LTX2Config, *, seed: int, device: torch.device, dtype: torch.dtype
) -> Latents:
    """Unit normal latents of one video, a function of ``seed`` and position only.

    Drawn in float32 on the CPU in token layout, video first, audio after it, then what keyframes need, so that an image
    changes the noise of nothing else; then rounded to ``dtype``: the same bits whatever the device, the ranks or the
    precision of the model. (The official code draws in bfloat16 on the device, so its noise differs from machine to
    machine.)
    """
    generator = torch.Generator().manual_seed(seed)
    channels = config.transformer.in_channels
    video = torch.randn(1, geometry.grid_tokens, channels, generator=generator)
    audio = None
    if geometry.audio_tokens:
        audio = torch.randn(1, geometry.audio_tokens, config.transformer.audio_in_channels, generator=generator)
        audio = audio.to(device, dtype)
    keyframes = torch.randn(1, geometry.video_tokens - geometry.grid_tokens, channels, generator=generator)
    return Latents(torch.cat([video, keyframes], dim=1).to(device, dtype), audio)


def pack_video(video: Tensor) -> Tensor:
    """``[B, C, F, H, W]`` to ``[B, F*H*W, C]``."""
    return video.flatten(2).transpose(1, 2)


def unpack_video(video: Tensor, geometry: Geometry) -> Tensor:
    """``[B, T, C]`` to ``[B, C, F, H, W]``; the tokens of keyframes are dropped."""
    grid = (geometry.latent_frames, geometry.latent_height, geometry.latent_width)
    return video[:, : geometry.grid_tokens].transpose(1, 2).unflatten(2, grid).contiguous()


def pack_audio(audio: Tensor) -> Tensor:
    """``[B, C, T, M]`` to ``[B, T, C*M]``."""
    return audio.transpose(1, 2).flatten(2)


def unpack_audio(audio: Tensor, latent_mel_bins: int) -> Tensor:
    """``[B, T, C*M]`` to ``[B, C, T, M]``."""
    return audio.unflatten(2, (-1, latent_mel_bins)).transpose(1, 2).contiguous()
