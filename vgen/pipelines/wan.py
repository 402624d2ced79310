"""Wan, 2.1 and 2.2: text, or text and images, to video."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vgen.config import FlowSamplerConfig
from vgen.diffusion.flow_match import build_flow_schedule
from vgen.diffusion.wan_guidance import Expert, GuidanceScales, StepPlan, plan_steps
from vgen.graph.pool import GraphPool
from vgen.metrics.timer import Timer, null_timer
from vgen.models.wan.config import WanArchitecture
from vgen.models.wan.geometry import Geometry
from vgen.models.wan.transformer import WanTransformer
from vgen.models.wan.vae import denormalize_latents
from vgen.pipelines.types import Sink
from vgen.progress import progress
from vgen.requests import Request
from vgen.residency import Residency
from vgen.stages.checks import check_finite
from vgen.stages.decode import DecodeVideo, Fallback, Sound, write_frames
from vgen.stages.wan_condition import WanEncoders, WanInputs, encode_inputs
from vgen.stages.wan_denoise import MakeStep, WanConditioning, denoise
from vgen.stages.wan_text import EncodePrompts


@dataclass(frozen=True)
class WanDecoders:
    """``decode_video`` takes the VAE's own latents."""

    decode_video: DecodeVideo
    architecture: WanArchitecture
    fallbacks: tuple[Fallback, ...] = ()


@dataclass(frozen=True)
class WanComponents:
    """A model ready to run. ``encoders`` is None where no request brings an image; ``boundary`` where there is one
    transformer, ``decoders`` on a rank that only denoises. ``hand_over`` gives the final latents to ranks that only
    decode. ``graph_pool``: of what is captured; None where nothing is."""

    architecture: WanArchitecture
    encode_prompts: EncodePrompts
    experts: Mapping[Expert, WanTransformer]
    boundary: float | None
    make_step: MakeStep
    decoders: WanDecoders | None
    encoders: WanEncoders | None
    residency: Residency
    device: torch.device
    hand_over: Callable[[Tensor], None] = lambda _: None
    graph_pool: GraphPool | None = None


@dataclass(frozen=True)
class WanFollower:
    """A rank that only decodes. ``encoders``, without an image encoder, is None where no request brings an image;
    ``receive`` waits for the final latents ``[1, C, T, h, w]``."""

    architecture: WanArchitecture
    decoders: WanDecoders
    encoders: WanEncoders | None
    receive: Callable[[], Tensor]
    residency: Residency
    device: torch.device


def generate(
    components: WanComponents, request: Request, sampler: FlowSamplerConfig, sink: Sink, timer: Timer = null_timer
) -> None:
    """One request to its files; latents reach ``sink`` before anything is decoded.

    Raises:
        NumericsError: NaN or infinity after the first step or before decode.
    """
    geometry = latent_geometry(request, components.architecture)
    plans = plan_request(sampler, components.boundary)
    prompts = [request.prompt, request.negative_prompt] if is_guided(plans) else [request.prompt]
    with timer("text_encode"):
        contexts = components.encode_prompts(prompts)
    conditioning = WanConditioning(
        geometry,
        positive=contexts[0],
        negative=contexts[1] if len(contexts) > 1 else None,
        inputs=_encode(components, request, timer),
    )
    noise = make_noise(geometry, components.architecture, seed=request.seed, device=components.device)

    with timer("denoise"), progress("denoise", len(plans)) as bar:

        def on_step(step: int, latents: Tensor) -> None:
            timer.step()
            bar.advance(1)
            if step == 0:
                check_finite("the video latents", latents, "after step 1")

        latents = denoise(components.make_step, conditioning, noise, plans, components.residency, on_step)

    components.hand_over(latents)
    sink.save_latents(latents, None)
    if components.decoders is not None:
        decode(components.decoders, latents, None, sink, components.residency, timer)


def follow(follower: WanFollower, request: Request, sink: Sink, timer: Timer = null_timer) -> None:
    """One request on a rank that only decodes: its part of the encode and of the decode.

    Raises:
        NumericsError: NaN or infinity before decode.
    """
    _encode(follower, request, timer)
    # Not a stage of its own: the time of this is that of the ranks that denoise.
    decode(follower.decoders, follower.receive(), None, sink, follower.residency, timer)


def _encode(components: WanComponents | WanFollower, request: Request, timer: Timer) -> WanInputs:
    encoders = components.encoders
    if encoders is None or not request.images:
        return WanInputs()
    parts = ["video_encoder"] if encoders.image_encoder is None else ["video_encoder", "image_encoder"]
    with timer("encode_video"), components.residency.use(*parts):
        return encode_inputs(encoders, request, components.architecture, components.device)


def latent_geometry(request: Request, architecture: WanArchitecture) -> Geometry:
    vae = architecture.vae
    return Geometry(
        latent_frames=(request.num_frames - 1) // vae.scale_factor_temporal + 1,
        latent_height=request.height // vae.scale_factor_spatial,
        latent_width=request.width // vae.scale_factor_spatial,
    )


def make_noise(geometry: Geometry, architecture: WanArchitecture, *, seed: int, device: torch.device) -> Tensor:
    """Unit normal latents ``[1, C, T, h, w]`` fp32, a function of ``seed`` and position only: drawn on the CPU, so that
    they are the same bits whatever the device, the ranks or the precision of the model."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (geometry.latent_frames, geometry.latent_height, geometry.latent_width)
    return torch.randn(1, architecture.vae.z_dim, *sizes, generator=generator).to(device)


def plan_request(sampler: FlowSamplerConfig, boundary: float | None) -> tuple[StepPlan, ...]:
    """The steps of every request."""
    schedule = build_flow_schedule(sampler.steps, shift=sampler.shift, solver=sampler.solver, grid=sampler.schedule)
    if boundary is None:
        return plan_steps(schedule, sampler.guidance_scale)
    assert sampler.guidance_scale_2 is not None
    scales = GuidanceScales(high_noise=sampler.guidance_scale, low_noise=sampler.guidance_scale_2)
    return plan_steps(schedule, scales, boundary)


def is_guided(plans: tuple[StepPlan, ...]) -> bool:
    """Whether the negative prompt is read at all."""
    return any(plan.guidance != 1 for plan in plans)


def decode(
    decoders: WanDecoders,
    video: Tensor,
    audio: Tensor | None,
    sink: Sink,
    residency: Residency,
    timer: Timer = null_timer,
    kept: Sound | None = None,
) -> None:
    """Latents ``[1, C, T, h, w]``, normalized, fp32, to files; ``audio`` and ``kept`` are None: Wan has no sound.

    Raises:
        NumericsError: NaN or infinity in the latents.
    """
    assert audio is None and kept is None
    check_finite("the video latents", video, "before decode")
    latents = denormalize_latents(video, decoders.architecture.vae)
    with timer("write"), residency.use("video_decoder"):
        fallback = write_frames(
            lambda frames: sink.write(frames, None), decoders.decode_video, decoders.fallbacks, latents, timer
        )
    if fallback is not None:
        sink.note_fallback(fallback)
