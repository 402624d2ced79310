"""The denoising loop, and the plain way of predicting: the guidance passes one after another."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vgen.diffusion.guidance import Guidance, apply_guidance, needs_uncond
from vgen.diffusion.solver import step_euler, to_x0
from vgen.models.ltx2.geometry import Geometry
from vgen.models.ltx2.transformer import LTX2Transformer, Stream
from vgen.stages.latents import Latents
from vgen.stages.text import Context

Predict = Callable[[Latents, Tensor], Latents]
"""``(latents, sigma)`` to the clean latents x0; ``sigma`` is a scalar tensor on the latents' device."""


@dataclass(frozen=True)
class Conditioning:
    """What stays the same over the steps of one request."""

    geometry: Geometry
    cond: Context
    uncond: Context | None
    video_guidance: Guidance
    audio_guidance: Guidance


def denoise(
    predict: Predict, latents: Latents, sigmas: Tensor, on_step: Callable[[int, Latents], None] = lambda *_: None
) -> Latents:
    """Euler steps along ``sigmas`` (``[steps + 1]``, on the latents' device); video and audio step together."""
    for i in range(len(sigmas) - 1):
        x0 = predict(latents, sigmas[i])
        video = step_euler(latents.video, x0.video, sigmas[i], sigmas[i + 1])
        audio = latents.audio
        if audio is not None and x0.audio is not None:
            audio = step_euler(audio, x0.audio, sigmas[i], sigmas[i + 1])
        latents = Latents(video, audio)
        on_step(i, latents)
    return latents


def build_serial_predict(transformer: LTX2Transformer, conditioning: Conditioning) -> Predict:
    """Guidance passes one after another; a pass that no scale asks for is not run."""

    def predict(latents: Latents, sigma: Tensor) -> Latents:
        video_guidance, audio_guidance = conditioning.video_guidance, conditioning.audio_guidance
        cond = _forward(transformer, conditioning.geometry, conditioning.cond, latents, sigma)
        guidances = [video_guidance, audio_guidance] if latents.audio is not None else [video_guidance]
        if not needs_uncond(*guidances):
            return cond
        assert conditioning.uncond is not None
        uncond = _forward(transformer, conditioning.geometry, conditioning.uncond, latents, sigma)
        audio = None
        if cond.audio is not None:
            audio = apply_guidance(cond.audio, uncond.audio, audio_guidance)
        return Latents(apply_guidance(cond.video, uncond.video, video_guidance), audio)

    return predict


def _forward(
    transformer: LTX2Transformer, geometry: Geometry, context: Context, latents: Latents, sigma: Tensor
) -> Latents:
    rope = transformer.rope_tables(geometry, latents.video.device, latents.video.dtype)
    sigma_B = sigma.reshape(1).expand(latents.video.shape[0])
    audio_stream = None
    if latents.audio is not None:
        audio_stream = Stream(latents.audio, timestep=sigma_B, sigma=sigma_B, context=context.audio)
    video_stream = Stream(latents.video, timestep=sigma_B, sigma=sigma_B, context=context.video)
    with torch.no_grad():
        video, audio = transformer(video_stream, audio_stream, rope)
    x0_audio = None if latents.audio is None else to_x0(latents.audio, sigma_B, audio)
    return Latents(to_x0(latents.video, sigma_B, video), x0_audio)
