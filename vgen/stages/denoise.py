"""The denoising loop, and a step from its guidance passes, plainly one after another."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from vgen.diffusion.guidance import MOD, Guidance, apply_guidance
from vgen.diffusion.solver import step_euler, to_x0
from vgen.models.ltx2.geometry import Geometry
from vgen.models.ltx2.perturbation import PerturbationPlan
from vgen.models.ltx2.rope import RopeTables
from vgen.models.ltx2.transformer import LTX2Transformer, Stream, TextKeysValues
from vgen.stages.condition import Conditions, blend
from vgen.stages.latents import Latents
from vgen.stages.passes import Pass, Text
from vgen.stages.run_passes import Outputs, RunPasses, run_serially
from vgen.stages.text import Context

Predict = Callable[[Latents, Tensor, int], Latents]
"""``(latents, sigma, step)`` to the clean latents x0; ``sigma`` is a scalar tensor on the latents' device."""

Step = Callable[[Latents, Tensor, Tensor, int], Latents]
"""``(latents, sigma, next sigma, step)`` to the latents at the next sigma; sigmas as in :data:`Predict`."""


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
    step: Step, latents: Latents, sigmas: Tensor, on_step: Callable[[int, Latents], None] = lambda *_: None
) -> Latents:
    """Steps along ``sigmas`` (``[steps + 1]``, on the latents' device); video and audio step together."""
    for i in range(len(sigmas) - 1):
        latents = step(latents, sigmas[i], sigmas[i + 1], i)
        on_step(i, latents)
    return latents


def euler(predict: Predict) -> Step:
    """Euler steps towards what ``predict`` says."""

    def step(latents: Latents, sigma: Tensor, sigma_next: Tensor, index: int) -> Latents:
        return _go_on(latents, predict(latents, sigma, index), sigma, sigma_next)

    return step


def _go_on(latents: Latents, x0: Latents, sigma: Tensor, sigma_next: Tensor) -> Latents:
    video = step_euler(latents.video, x0.video, sigma, sigma_next)
    audio = latents.audio
    if audio is not None and x0.audio is not None:
        audio = step_euler(audio, x0.audio, sigma, sigma_next)
    return Latents(video, audio)


@dataclass(frozen=True, eq=False)
class StepConstants:
    """What a step reads and no step of a request changes: numbers, flags and tensors only, as a captured step needs.

    ``contexts``: by stream and text, as ``LTX2Transformer.prepare_text`` made them. ``perturbations``: by pass.
    """

    passes: tuple[Pass, ...]
    video_guidance: Guidance
    audio_guidance: Guidance
    video: Conditions | None
    audio_is_given: bool
    contexts: Mapping[tuple[str, Text], Tensor | TextKeysValues]
    rope: RopeTables
    perturbations: Mapping[str, PerturbationPlan]


RunStep = Callable[[StepConstants, Latents, Latents | None, Tensor, Tensor, bool, bool], tuple[Latents, Latents]]
"""``run_step`` of one transformer and one way to run passes."""


def build_serial_step(
    transformer: LTX2Transformer, conditioning: Conditioning, run_passes: RunPasses = run_serially
) -> Step:
    """Guidance passes one after another, or as ``run_passes`` has them run."""
    return build_step(partial(run_step, transformer, run_passes), transformer, conditioning)


def build_step(run: RunStep, transformer: LTX2Transformer, conditioning: Conditioning) -> Step:
    """The steps of one request by ``run``, which may be captured.

    What no step changes is computed here, once. A step remembers the clean latents of the last one for the modalities
    that the next one skips, so build one for each request.
    """
    constants: StepConstants | None = None
    last: Latents | None = None

    def step(latents: Latents, sigma: Tensor, sigma_next: Tensor, index: int) -> Latents:
        nonlocal constants, last
        if constants is None:
            constants = _build_constants(transformer, conditioning, latents)
        video_runs = not conditioning.video_guidance.skips(index)
        # An absent or a given sound has nothing to compute: the video alone decides.
        alone = latents.audio is None or conditioning.audio_is_given
        audio_runs = video_runs if alone else not conditioning.audio_guidance.skips(index)
        needed = None if video_runs and audio_runs else last
        latents, last = run(constants, latents, needed, sigma, sigma_next, video_runs, audio_runs)
        return latents

    return step


def run_step(
    transformer: LTX2Transformer,
    run_passes: RunPasses,
    constants: StepConstants,
    latents: Latents,
    last: Latents | None,
    sigma: Tensor,
    sigma_next: Tensor,
    video_runs: bool,
    audio_runs: bool,
) -> tuple[Latents, Latents]:
    """One guided Euler step: the next latents, and the clean ones it went towards.

    Of its arguments alone, with no look at the device, so that all of it can be one graph. ``last``: the clean latents
    of the step before; None where both streams are computed.
    """
    now = _plan_step(constants, latents, sigma, video_runs, audio_runs)
    clean = last
    if last is None or video_runs or audio_runs:
        guided = _guide(transformer, constants, now, run_passes)
        clean = guided if last is None else _newer(guided, last, now)
    assert clean is not None
    return _go_on(latents, _held(clean, constants, latents), sigma, sigma_next), clean


def _build_constants(transformer: LTX2Transformer, conditioning: Conditioning, latents: Latents) -> StepConstants:
    device, dtype = latents.video.device, latents.video.dtype
    samples = len(latents.video)
    return StepConstants(
        conditioning.passes,
        conditioning.video_guidance,
        conditioning.audio_guidance,
        conditioning.video,
        conditioning.audio_is_given,
        _prepare_contexts(transformer, conditioning),
        transformer.rope_tables(conditioning.geometry, device, dtype),
        {one.name: transformer.perturbation_plan((one.perturbation,) * samples, device) for one in conditioning.passes},
    )


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


def _plan_step(constants: StepConstants, latents: Latents, sigma: Tensor, video_runs: bool, audio_runs: bool) -> _Step:
    sigma_B = sigma.reshape(1).expand(latents.video.shape[0])
    held = constants.video
    return _Step(
        latents,
        sigma_B,
        timestep=sigma_B if held is None else held.levels.unsqueeze(0) * sigma,
        rows=None if held is None else held.rows,
        token_sigma=sigma_B if held is None else held.mask * sigma,
        audio_sigma=torch.zeros_like(sigma_B) if constants.audio_is_given else sigma_B,
        video_runs=video_runs,
        audio_runs=audio_runs,
    )


def _newer(guided: Latents, last: Latents, now: _Step) -> Latents:
    return Latents(guided.video if now.video_runs else last.video, guided.audio if now.audio_runs else last.audio)


def _held(x0: Latents, constants: StepConstants, latents: Latents) -> Latents:
    """Conditioned tokens and a given sound as they should be."""
    video = x0.video if constants.video is None else blend(x0.video, constants.video)
    return Latents(video, latents.audio if constants.audio_is_given else x0.audio)


def _prepare_contexts(
    transformer: LTX2Transformer, conditioning: Conditioning
) -> Mapping[tuple[str, Text], Tensor | TextKeysValues]:
    """What the passes read, each text once, in one order in every process: it is in the key of a captured step."""
    contexts, passes = conditioning.contexts, conditioning.passes
    with torch.no_grad():
        video = {
            ("video", text): transformer.prepare_text(contexts[text].video, "video")
            for text in dict.fromkeys(one.video_text for one in passes)
        }
        if not conditioning.geometry.audio_tokens:
            return video
        audio = {
            ("audio", text): transformer.prepare_text(contexts[text].audio, "audio")
            for text in dict.fromkeys(one.audio_text for one in passes)
        }
    return {**video, **audio}


def _guide(transformer: LTX2Transformer, constants: StepConstants, now: _Step, run_passes: RunPasses) -> Latents:
    outputs = run_passes({one.name: partial(_forward, transformer, one, constants, now) for one in constants.passes})
    x0 = {name: _as_latents(one) for name, one in outputs.items()}
    cond = x0["cond"]
    video_guidance = constants.video_guidance
    if MOD not in x0:
        # With no sound the isolated pass equals the conditional one and was not run.
        video_guidance = replace(video_guidance, modality_scale=1.0)
    video = apply_guidance(cond.video, {name: other.video for name, other in x0.items()}, video_guidance)
    if cond.audio is None or constants.audio_is_given:
        return Latents(video, cond.audio)
    others = {name: other.audio for name, other in x0.items() if other.audio is not None}
    return Latents(video, apply_guidance(cond.audio, others, constants.audio_guidance))


def _as_latents(outputs: Outputs) -> Latents:
    video, audio = outputs
    assert video is not None
    return Latents(video, audio)


def _forward(transformer: LTX2Transformer, one: Pass, constants: StepConstants, now: _Step) -> Outputs:
    """The clean latents of one pass, of the video and the audio."""
    latents, audio_latents = now.latents, now.latents.audio
    context = constants.contexts["video", one.video_text]
    video = Stream(latents.video, now.timestep, now.sigma, context, now.rows, enabled=now.video_runs)
    audio = None
    if audio_latents is not None:
        context, sigma = constants.contexts["audio", one.audio_text], now.audio_sigma
        audio = Stream(audio_latents, sigma, sigma, context, enabled=now.audio_runs)
    with torch.no_grad():
        video_velocity, audio_velocity = transformer(video, audio, constants.rope, constants.perturbations[one.name])
    x0_audio = None if audio_latents is None else to_x0(audio_latents, now.audio_sigma, audio_velocity)
    return to_x0(latents.video, now.token_sigma, video_velocity), x0_audio
