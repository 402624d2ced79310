"""The denoising loop, and the plain way of predicting: the guidance passes one after another."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from vgen.diffusion.guidance import MOD, Guidance, apply_guidance
from vgen.diffusion.solver import step_euler, to_x0
from vgen.models.ltx2.geometry import Geometry
from vgen.models.ltx2.rope import RopeTables
from vgen.models.ltx2.transformer import LTX2Transformer, Stream, TextKeysValues
from vgen.stages.condition import Conditions, blend
from vgen.stages.latents import Latents
from vgen.stages.passes import Pass
from vgen.stages.text import Context

Predict = Callable[[Latents, Tensor, int], Latents]
"""``(latents, sigma, step)`` to the clean latents x0; ``sigma`` is a scalar tensor on the latents' device."""

Prompt = Literal["positive", "negative"]


@dataclass(frozen=True)
class Conditioning:
    """What stays the same over the steps of one request.

    ``contexts`` holds ``negative`` only where a pass reads it. ``video`` is None where all video tokens are denoised
    from noise alike; ``audio_is_given``: the audio latents are clean and stay as they are.
    """

    geometry: Geometry
    passes: tuple[Pass, ...]
    contexts: Mapping[Prompt, Context]
    video_guidance: Guidance
    audio_guidance: Guidance
    video: Conditions | None = None
    audio_is_given: bool = False


def denoise(
    predict: Predict, latents: Latents, sigmas: Tensor, on_step: Callable[[int, Latents], None] = lambda *_: None
) -> Latents:
    """Euler steps along ``sigmas`` (``[steps + 1]``, on the latents' device); video and audio step together."""
    for i in range(len(sigmas) - 1):
        x0 = predict(latents, sigmas[i], i)
        video = step_euler(latents.video, x0.video, sigmas[i], sigmas[i + 1])
        audio = latents.audio
        if audio is not None and x0.audio is not None:
            audio = step_euler(audio, x0.audio, sigmas[i], sigmas[i + 1])
        latents = Latents(video, audio)
        on_step(i, latents)
    return latents


def build_serial_predict(transformer: LTX2Transformer, conditioning: Conditioning) -> Predict:
    """Guidance passes one after another.

    The text's part that no step changes is computed here, once for the request. The prediction remembers the last
    clean latents for the modalities that a step skips, so build one for each request.
    """
    text = _prepare_text(transformer, conditioning)
    last: Latents | None = None

    def predict(latents: Latents, sigma: Tensor, step: int) -> Latents:
        nonlocal last
        skip_video, skip_audio = _skips(conditioning, latents, step)
        if last is None or not (skip_video and skip_audio):
            guided = _guided(transformer, conditioning, text, latents, sigma, skip_video, skip_audio)
            last = _keep(guided, last, skip_video, skip_audio)
        return _blended(last, conditioning, latents)

    return predict


def _skips(conditioning: Conditioning, latents: Latents, step: int) -> tuple[bool, bool]:
    """Which modalities keep their last clean latents; an absent or given audio has nothing to compute."""
    skip_video = conditioning.video_guidance.skips(step)
    if latents.audio is None or conditioning.audio_is_given:
        return skip_video, skip_video
    return skip_video, conditioning.audio_guidance.skips(step)


def _keep(guided: Latents, last: Latents | None, skip_video: bool, skip_audio: bool) -> Latents:
    if last is None:
        return guided
    return Latents(last.video if skip_video else guided.video, last.audio if skip_audio else guided.audio)


def _blended(x0: Latents, conditioning: Conditioning, latents: Latents) -> Latents:
    video = x0.video if conditioning.video is None else blend(x0.video, conditioning.video)
    return Latents(video, latents.audio if conditioning.audio_is_given else x0.audio)


_Text = Mapping[tuple[str, Prompt], Tensor | TextKeysValues]


def _prepare_text(transformer: LTX2Transformer, conditioning: Conditioning) -> _Text:
    with torch.no_grad():
        text: dict[tuple[str, Prompt], Tensor | TextKeysValues] = {}
        for prompt, context in conditioning.contexts.items():
            text["video", prompt] = transformer.prepare_text(context.video, "video")
            if conditioning.geometry.audio_tokens:
                text["audio", prompt] = transformer.prepare_text(context.audio, "audio")
        return text


def _guided(
    transformer: LTX2Transformer,
    conditioning: Conditioning,
    text: _Text,
    latents: Latents,
    sigma: Tensor,
    skip_video: bool,
    skip_audio: bool,
) -> Latents:
    rope = transformer.rope_tables(conditioning.geometry, latents.video.device, latents.video.dtype)
    streams = _Streams(conditioning, latents, sigma)
    x0 = {
        one.name: _forward(transformer, one, streams, text, rope, skip_video, skip_audio) for one in conditioning.passes
    }
    cond = x0["cond"]
    video = apply_guidance(cond.video, {name: other.video for name, other in x0.items()}, _without_mod(conditioning))
    if cond.audio is None or conditioning.audio_is_given:
        return Latents(video, cond.audio)
    others = {name: other.audio for name, other in x0.items() if other.audio is not None}
    return Latents(video, apply_guidance(cond.audio, others, conditioning.audio_guidance))


def _without_mod(conditioning: Conditioning) -> Guidance:
    """The video's guidance; with no audio stream the isolated pass equals the conditional one and was not run."""
    if any(one.name == MOD for one in conditioning.passes):
        return conditioning.video_guidance
    return replace(conditioning.video_guidance, modality_scale=1.0)


class _Streams:
    """The sigmas of one step, of both streams and of each token."""

    def __init__(self, conditioning: Conditioning, latents: Latents, sigma: Tensor) -> None:
        self.latents = latents
        self.sigma_B = sigma.reshape(1).expand(latents.video.shape[0])
        conditions = conditioning.video
        self.rows = None if conditions is None else conditions.rows
        self.timestep = self.sigma_B if conditions is None else conditions.levels.unsqueeze(0) * sigma
        self.token_sigma = self.sigma_B if conditions is None else conditions.mask * sigma
        self.audio_sigma_B = torch.zeros_like(self.sigma_B) if conditioning.audio_is_given else self.sigma_B


def _forward(
    transformer: LTX2Transformer,
    one: Pass,
    streams: _Streams,
    text: _Text,
    rope: RopeTables,
    skip_video: bool,
    skip_audio: bool,
) -> Latents:
    latents = streams.latents
    video = Stream(
        latents.video, streams.timestep, streams.sigma_B, text["video", one.video_text], streams.rows, not skip_video
    )
    audio = None
    if latents.audio is not None:
        sigma_B = streams.audio_sigma_B
        audio = Stream(latents.audio, sigma_B, sigma_B, text["audio", one.audio_text], enabled=not skip_audio)
    with torch.no_grad():
        video_velocity, audio_velocity = transformer(video, audio, rope, (one.perturbation,) * len(latents.video))
    x0_audio = None if latents.audio is None else to_x0(latents.audio, streams.audio_sigma_B, audio_velocity)
    return Latents(to_x0(latents.video, streams.token_sigma, video_velocity), x0_audio)
