"""The benchmark tasks for Wan: a transformer forward, a decode, an encode, and diffusers with the same tensors."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from vgen import planning, transforms
from vgen.components import wan
from vgen.components.ranks import VaeShare, passes_over
from vgen.families.wan import flow_sampler, tile_settings
from vgen.job import Job
from vgen.metrics.timer import StageTimer
from vgen.models.wan import plan
from vgen.models.wan.conditioning import hold_first_frames
from vgen.models.wan.patches import patchify, unpatchify
from vgen.models.wan.transformer import Stream, WanTransformer
from vgen.models.wan.vae import denormalize_latents
from vgen.pipelines.wan import is_guided, latent_geometry, make_noise, plan_request
from vgen.stages.wan_condition import WanInputs
from vgen.stages.wan_denoise import RunStep, WanConditioning, build_step, run_step, step_numbers
from vgen.tasks import peers
from vgen.tasks.bench import Bench, rows_of_graphs, rows_of_plan, rows_of_steps, shares, timed_and_joined
from vgen.tasks.types import RankResult, TaskContext

TIMESTEP = 500.0


def step(context: TaskContext) -> RankResult:
    """One conditional pass at timestep 500, batch 1, random latents, text and image; errors are shown before times.

    diffusers runs in its own precision: its fp32 islands, the rest in the model's dtype.
    """
    job, device, bench = context.job, context.device, context.job.config.bench
    dtype = transforms.DTYPES[job.config.quant.mode]
    timer, result = StageTimer(device), RankResult()
    result.active = {"attention": planning.plan_run(job, job.requests, device, ("transformer",)).attention}
    with timer("load"):
        transformer = wan.build_transformer(job, device)
    result.add_once(timer)
    request, config = job.requests[0], job.architecture.transformer
    geometry = latent_geometry(request, job.architecture)
    draw = torch.Generator().manual_seed(request.seed)
    sizes = (geometry.latent_frames, geometry.latent_height, geometry.latent_width)
    latents = torch.randn(1, config.in_channels, *sizes, generator=draw).to(device, dtype)
    length = job.config.model.text_encoder.max_length
    text = torch.randn(1, length, config.text_dim, generator=draw).to(device, dtype)
    image = None
    if config.image_dim is not None:
        image = torch.randn(1, config.pos_embed_seq_len or 257, config.image_dim, generator=draw).to(device, dtype)
    rope = transformer.rope_tables(geometry, device)
    timestep = torch.full((1,), TIMESTEP, device=device)
    rows = Bench(context)
    with torch.no_grad():
        if bench.steps:
            rows.write(**_rows_of_steps(rows, context, transformer, text, image))
            return result
        prepared = transformer.prepare_text(text, image)

        def ours(timestep: Tensor = timestep, lookup: Tensor | None = None) -> Tensor:
            tokens = patchify(latents, geometry)
            return unpatchify(transformer(Stream(tokens, timestep, prepared, rows=lookup), rope), geometry)

        rows.row("vgen eager", ours)
        if job.architecture.kind == "ti2v":
            held = hold_first_frames(latents[:, :, :1], geometry.latent_frames)
            told = (held.levels * TIMESTEP).unsqueeze(0)
            rows.row("vgen, first frame held", lambda: ours(told, held.rows))
        if "diffusers" in bench.peers:
            peer = peers.diffusers_wan_transformer(transformer, config, dtype) if context.is_first else None

            def theirs() -> Tensor:
                velocity: Tensor = cast(Any, peer)(
                    hidden_states=latents,
                    timestep=timestep,
                    encoder_hidden_states=text,
                    encoder_hidden_states_image=image,
                    return_dict=False,
                )[0]
                return velocity

            rows.row("diffusers eager", theirs)
        rows_of_plan(rows, context, transformer, plan.PLAN, ours)
        facts = rows_of_graphs(rows, context, transformer, plan.PLAN, ours)
    rows.write(**facts)
    return result


def _rows_of_steps(
    rows: Bench, context: TaskContext, transformer: WanTransformer, text: Tensor, image: Tensor | None
) -> dict[str, Any]:
    """Of the first step of the request: all its passes over random text, guidance, and the solver."""
    job = context.job
    geometry, config = latent_geometry(job.requests[0], job.architecture), job.architecture.transformer
    plans = plan_request(flow_sampler(job.config), job.config.model.boundary)[:1]
    channels = None
    if config.in_channels > config.out_channels:
        sizes = (geometry.latent_frames, geometry.latent_height, geometry.latent_width)
        channels = torch.zeros(1, config.in_channels - config.out_channels, *sizes, device=context.device)
    conditioning = WanConditioning(
        geometry, text, text.flip(1) if is_guided(plans) else None, WanInputs(channels=channels, tokens=image)
    )
    noise = make_noise(geometry, job.architecture, seed=job.requests[0].seed, device=context.device)
    (numbers,) = step_numbers(plans, context.device)

    def call(run: RunStep) -> Callable[[], Tensor]:
        step = build_step(run, transformer, conditioning)
        return lambda: step(noise, (), plans[0], numbers)[0]

    run = partial(run_step, transformer, passes_over(context.mesh))
    return rows_of_steps(rows, context, transformer, plan.PLAN, run, call)


def decode(context: TaskContext) -> RankResult:
    """Random latents from ``request.seed``; errors are shown before times. Chunks of 1, 2 and 4 latent frames, and as
    many as convolutions can where ``model.vae.chunk`` is null."""
    job, device, bench = context.job, context.device, context.job.config.bench
    request, architecture = job.requests[0], job.architecture
    dtype = transforms.component_dtype(job, "video_decoder", device)
    timer, result = StageTimer(device), RankResult()
    planning.plan_run(job, job.requests, device, ("video_decoder",))
    with timer("load"):
        decoder: Any = wan.build_video_decoder(job, device)
    result.add_once(timer)
    noise = make_noise(latent_geometry(request, architecture), architecture, seed=request.seed, device=device)
    latents = denormalize_latents(noise, architecture.vae).to(dtype)
    rows = Bench(context)
    with torch.no_grad():
        for chunk in _chunks(job):
            rows.row(_chunk_name(chunk), *timed_and_joined(partial(decoder.decode, latents, chunk)))

        def shared(share: VaeShare) -> tuple[Callable[[], object], Callable[[], Tensor | None]]:
            return timed_and_joined(partial(wan.build_decode(job, decoder, share), latents))

        ways = shares(
            context,
            tile_settings(job.config, architecture),
            (latents.shape[3], latents.shape[4]),
            ("halo", "tile", "tile_balanced"),
        )
        rows.rows_over_ranks(ways, shared)
        if "diffusers" in bench.peers:
            peer = peers.diffusers_wan_decoder(decoder, architecture.vae) if context.is_first else None

            def theirs() -> Tensor:
                out: Tensor = cast(Any, peer).decode(latents, return_dict=False)[0]
                return out

            rows.row("diffusers", theirs, like_reference=_clamped)
    rows.write()
    return result


def _clamped(frames: Tensor) -> Tensor:
    """As diffusers returns them."""
    return frames.clamp(-1, 1)


def encode(context: TaskContext) -> RankResult:
    """Random pixels from ``request.seed``; errors are shown before times."""
    job, device, bench = context.job, context.device, context.job.config.bench
    request, architecture = job.requests[0], job.architecture
    dtype = transforms.component_dtype(job, "video_encoder", device)
    timer, result = StageTimer(device), RankResult()
    planning.plan_run(job, job.requests, device, ("video_encoder",))
    with timer("load"):
        encoder = wan.build_video_encoder(job, device)
    result.add_once(timer)
    draw = torch.Generator().manual_seed(request.seed)
    shape = (1, 3, request.num_frames, request.height, request.width)
    frames = (2 * torch.rand(shape, generator=draw) - 1).to(device, dtype)
    rows = Bench(context)
    settings = tile_settings(job.config, architecture)
    sizes = (request.height // settings.compression[1], request.width // settings.compression[2])
    with torch.no_grad():
        for chunk in _chunks(job):
            rows.row(_chunk_name(chunk), partial(encoder, frames, chunk))

        def shared(share: VaeShare) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
            return (partial(wan.build_encode(job, encoder, share), frames),) * 2

        rows.rows_over_ranks(shares(context, settings, sizes, ("halo", "tile", "tile_balanced")), shared)
        if "diffusers" in bench.peers:
            peer = peers.diffusers_wan_encoder(encoder, architecture.vae) if context.is_first else None

            def theirs() -> Tensor:
                latents: Tensor = cast(Any, peer).encode(frames, return_dict=False)[0].mode()
                return latents

            rows.row("diffusers", theirs)
    rows.write()
    return result


def _chunks(job: Job) -> tuple[int | None, ...]:
    vae = job.config.model.vae
    if vae.backend == "diffusers":
        return (1,)
    return (1, 2, 4) if vae.chunk is not None else (1, 2, 4, None)


def _chunk_name(chunk: int | None) -> str:
    return "vgen, longest chunk" if chunk is None else f"vgen, chunk {chunk}"
