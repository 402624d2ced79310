"""``task=bench_step``: one transformer forward, or a whole step, of one request's size; over ranks, bench.peers."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from vgen import planning, transforms
from vgen.components import ltx2
from vgen.components.ranks import passes_over
from vgen.config import SamplerConfig
from vgen.job import Job
from vgen.metrics.timer import StageTimer
from vgen.models.ltx2.geometry import Geometry
from vgen.models.ltx2.plan import PLAN
from vgen.models.ltx2.transformer import LTX2Transformer, Stream, TextKeysValues
from vgen.pipelines.ltx2 import make_guidance, plan_request_passes, request_sigmas
from vgen.stages.denoise import Conditioning, RunStep, build_step, run_step
from vgen.stages.latents import Latents, latent_geometry, make_noise
from vgen.stages.text import Context
from vgen.tasks import bench_wan, peers
from vgen.tasks.bench import Bench, rows_of_graphs, rows_of_plan, rows_of_steps
from vgen.tasks.types import RankResult, TaskContext

SIGMA = 0.5


def run(context: TaskContext) -> RankResult:
    return (bench_wan.step if context.job.config.model.family == "wan" else _run_ltx2)(context)


def _run_ltx2(context: TaskContext) -> RankResult:
    """One conditional pass at sigma 0.5, batch 1, random latents and context; errors are shown before times."""
    job, device, bench = context.job, context.device, context.job.config.bench
    dtype = transforms.DTYPES[job.config.quant.mode]
    timer, result = StageTimer(device), RankResult()
    plan = planning.plan_run(job, job.requests, device, ("transformer",))
    result.active = {"attention": plan.attention}
    with timer("load"):
        transformer = ltx2.build_transformer(job, device)
    result.add_once(timer)
    geometry = dataclasses.replace(latent_geometry(job.requests[0]), keyframes=())
    latents = make_noise(geometry, job.architecture, seed=job.requests[0].seed, device=device, dtype=dtype)
    assert latents.audio is not None
    text = _random_text(job, device, dtype)
    rows = Bench(context)
    with torch.no_grad():
        if bench.steps:
            rows.write(**_rows_of_steps(rows, context, transformer, latents, text))
            return result
        prepared = transformer.prepare_text(text.video, "video"), transformer.prepare_text(text.audio, "audio")

        def ours() -> tuple[Tensor, Tensor]:
            return _forward(transformer, geometry, latents, *prepared)

        rows.row("vgen eager", ours)
        if transformer.config.caption_projection:
            name = "vgen, text each step"
            rows.row(name, lambda: _forward(transformer, geometry, latents, text.video, text.audio))
        if "diffusers" in bench.peers:
            peer = peers.diffusers_transformer(transformer, job.architecture.transformer) if context.is_first else None
            rows.row("diffusers eager", lambda: _forward_diffusers(cast(nn.Module, peer), geometry, latents, text))
        rows_of_plan(rows, context, transformer, PLAN, ours)
        facts = rows_of_graphs(rows, context, transformer, PLAN, ours)
    rows.write(**facts)
    return result


def _rows_of_steps(
    rows: Bench, context: TaskContext, transformer: LTX2Transformer, latents: Latents, text: Context
) -> dict[str, Any]:
    """Of the first step of the request: all its passes over random text, guidance, and the solver."""
    job, request = context.job, context.job.requests[0]
    geometry, sampler = dataclasses.replace(latent_geometry(request), keyframes=()), job.config.sampler
    assert isinstance(sampler, SamplerConfig)
    conditioning = Conditioning(
        geometry,
        plan_request_passes(request, sampler),
        {"positive": text, "negative": Context(text.video.flip(1), text.audio.flip(1))},
        make_guidance(sampler.video),
        make_guidance(sampler.audio),
    )
    sigmas = request_sigmas(request, sampler, geometry).to(context.device)

    def call(run: RunStep) -> Callable[[], tuple[Tensor, ...]]:
        step = build_step(run, transformer, conditioning)

        def once() -> tuple[Tensor, ...]:
            after = step(latents, sigmas[0], sigmas[1], 0)
            return (after.video,) if after.audio is None else (after.video, after.audio)

        return once

    return rows_of_steps(
        rows, context, transformer, PLAN, partial(run_step, transformer, passes_over(context.mesh)), call
    )


def _random_text(job: Job, device: torch.device, dtype: torch.dtype) -> Context:
    """Text of the widths that the transformer takes: the text encoder's in 2.0, the streams' own in 2.3."""
    config, length = job.architecture.transformer, job.config.model.text_encoder.max_length
    widths = (config.caption_channels,) * 2 if config.caption_projection else (config.width, config.audio_width)
    draw = torch.Generator().manual_seed(0)
    return Context(*(torch.randn(1, length, width, generator=draw).to(device, dtype) for width in widths))


def _forward(
    transformer: LTX2Transformer,
    geometry: Geometry,
    latents: Latents,
    video_text: Tensor | TextKeysValues,
    audio_text: Tensor | TextKeysValues,
) -> tuple[Tensor, Tensor]:
    sigma = torch.full((1,), SIGMA, device=latents.video.device)
    rope = transformer.rope_tables(geometry, latents.video.device, latents.video.dtype)
    assert latents.audio is not None
    video, audio = transformer(
        Stream(latents.video, timestep=sigma, sigma=sigma, context=video_text),
        Stream(latents.audio, timestep=sigma, sigma=sigma, context=audio_text),
        rope,
    )
    return video, audio


def _forward_diffusers(peer: nn.Module, geometry: Geometry, latents: Latents, text: Context) -> tuple[Tensor, Tensor]:
    sigma = torch.full((1,), SIGMA, device=latents.video.device) * 1000
    video, audio = peer(
        hidden_states=latents.video,
        audio_hidden_states=latents.audio,
        encoder_hidden_states=text.video,
        audio_encoder_hidden_states=text.audio,
        timestep=sigma,
        sigma=sigma,
        num_frames=geometry.latent_frames,
        height=geometry.latent_height,
        width=geometry.latent_width,
        fps=geometry.fps,
        audio_num_frames=geometry.audio_tokens,
        return_dict=False,
    )
    return video, audio
