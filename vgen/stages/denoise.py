"""The denoising loop, and the prediction of a step from its guidance passes, plainly one after another."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from vgen.diffusion.guidance import MOD, Guidance, apply_guidance
from vgen.diffusion.solver import step_euler, to_x0
from vgen.models.ltx2.geometry import Geometry
from vgen.models.ltx2.rope import RopeTables
from vgen.models.ltx2.transformer import LTX2Transformer, Stream, TextKeysValues
from vgen.stages.condition import Conditions, blend
from vgen.stages.latents import Latents
from vgen.stages.passes import Pass, Text
from vgen.stages.run_passes import Outputs, RunPasses, run_serially
from vgen.stages.text import Context

Predict = Callable[[Latents, Tensor, int], Latents]
"""``(latents, sigma, step)`` to the clean latents x0; ``sigma`` is a scalar tensor on the latents' device."""


@dataclass(frozen=True)
class Conditioning:
    """What stays the same over the steps of one request.

    ``contexts`` holds ``negative`` only where a pass reads it. ``video`` is None where all video tokens are denoised
    from noise alike; ``audio_is_given``: the audio latents are clean and stay as they are.
    """

    geometry: Geometry
    passes: tuple[Pass, ...]
    contexts: Mapping[Text, Context]
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


def build_serial_predict(
    transformer: LTX2Transformer, conditioning: Conditioning, run_passes: RunPasses = run_serially
) -> Predict:
    """Guidance passes one after another, or as ``run_passes`` has them run.

    The text's part that no step changes is computed here, once for the request. The prediction remembers the last
    clean latents for the modalities that a step skips, so build one for each request.
    """
    contexts = _prepare_contexts(transformer, conditioning)
    last: Latents | None = None

    def predict(latents: Latents, sigma: Tensor, step: int) -> Latents:
        nonlocal last
        now = _plan_step(conditioning, latents, sigma, step)
        if last is None or now.video_runs or now.audio_runs:
            guided = _guide(transformer, conditioning, contexts, now, run_passes)
            last = guided if last is None else _newer(guided, last, now)
        return _held(last, conditioning, latents)

    return predict


@dataclass(frozen=True, eq=False)
class _Step:
    """One step: its latents, the sigmas of the streams and of each token, and which streams it computes."""

    latents: Latents
    sigma: Tensor
    """fp32 [B], as ``audio_sigma``."""
    timestep: Tensor
    """fp32 [B], or [B, R] distinct sigmas of the video that ``rows`` gives to its tokens."""
    rows: Tensor | None
    token_sigma: Tensor
    """fp32 [B] or [B, T]: ``timestep`` token by token."""
    audio_sigma: Tensor
    video_runs: bool
    audio_runs: bool


def _plan_step(conditioning: Conditioning, latents: Latents, sigma: Tensor, step: int) -> _Step:
    sigma_B = sigma.reshape(1).expand(latents.video.shape[0])
    held, given = conditioning.video, conditioning.audio_is_given
    video_runs = not conditioning.video_guidance.skips(step)
    # An absent or a given sound has nothing to compute: the video alone decides.
    alone = latents.audio is None or given
    return _Step(
        latents,
        sigma_B,
        timestep=sigma_B if held is None else held.levels.unsqueeze(0) * sigma,
        rows=None if held is None else held.rows,
        token_sigma=sigma_B if held is None else held.mask * sigma,
        audio_sigma=torch.zeros_like(sigma_B) if given else sigma_B,
        video_runs=video_runs,
        audio_runs=video_runs if alone else not conditioning.audio_guidance.skips(step),
    )


def _newer(guided: Latents, last: Latents, now: _Step) -> Latents:
    return Latents(guided.video if now.video_runs else last.video, guided.audio if now.audio_runs else last.audio)


def _held(x0: Latents, conditioning: Conditioning, latents: Latents) -> Latents:
    """Conditioned tokens and a given sound as they should be."""
    video = x0.video if conditioning.video is None else blend(x0.video, conditioning.video)
    return Latents(video, latents.audio if conditioning.audio_is_given else x0.audio)


_Contexts = Mapping[tuple[str, Text], Tensor | TextKeysValues]


def _prepare_contexts(transformer: LTX2Transformer, conditioning: Conditioning) -> _Contexts:
    """What the passes read, each text once."""
    contexts, passes = conditioning.contexts, conditioning.passes
    with torch.no_grad():
        video = {
            ("video", text): transformer.prepare_text(contexts[text].video, "video")
            for text in {one.video_text for one in passes}
        }
        if not conditioning.geometry.audio_tokens:
            return video
        audio = {
            ("audio", text): transformer.prepare_text(contexts[text].audio, "audio")
            for text in {one.audio_text for one in passes}
        }
    return {**video, **audio}


def _guide(
    transformer: LTX2Transformer, conditioning: Conditioning, contexts: _Contexts, now: _Step, run_passes: RunPasses
) -> Latents:
    latents = now.latents
    rope = transformer.rope_tables(conditioning.geometry, latents.video.device, latents.video.dtype)
    outputs = run_passes(
        {one.name: partial(_forward, transformer, one, contexts, rope, now) for one in conditioning.passes}
    )
    x0 = {name: _as_latents(one) for name, one in outputs.items()}
    cond = x0["cond"]
    video_guidance = conditioning.video_guidance
    if MOD not in x0:
        # With no sound the isolated pass equals the conditional one and was not run.
        video_guidance = replace(video_guidance, modality_scale=1.0)
    video = apply_guidance(cond.video, {name: other.video for name, other in x0.items()}, video_guidance)
    if cond.audio is None or conditioning.audio_is_given:
        return Latents(video, cond.audio)
    others = {name: other.audio for name, other in x0.items() if other.audio is not None}
    return Latents(video, apply_guidance(cond.audio, others, conditioning.audio_guidance))


def _as_latents(outputs: Outputs) -> Latents:
    video, audio = outputs
    assert video is not None
    return Latents(video, audio)


def _forward(transformer: LTX2Transformer, one: Pass, contexts: _Contexts, rope: RopeTables, now: _Step) -> Outputs:
    """The clean latents of one pass, of the video and the audio."""
    latents, audio_latents = now.latents, now.latents.audio
    context = contexts["video", one.video_text]
    video = Stream(latents.video, now.timestep, now.sigma, context, now.rows, enabled=now.video_runs)
    audio = None
    if audio_latents is not None:
        context, sigma = contexts["audio", one.audio_text], now.audio_sigma
        audio = Stream(audio_latents, sigma, sigma, context, enabled=now.audio_runs)
    # Made outside the forward, which may be captured.
    perturbations = transformer.perturbation_plan((one.perturbation,) * len(latents.video), latents.video.device)
    with torch.no_grad():
        video_velocity, audio_velocity = transformer(video, audio, rope, perturbations)
    x0_audio = None if audio_latents is None else to_x0(audio_latents, now.audio_sigma, audio_velocity)
    return to_x0(latents.video, now.token_sigma, video_velocity), x0_audio
