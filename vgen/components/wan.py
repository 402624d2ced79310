"""What Wan is built of, and what it needs of a device."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vgen import checkpoint, memory
from vgen.components.prompts import build_encode_prompts
from vgen.components.ranks import (
    ALONE,
    VaeShare,
    captured_step,
    fallbacks,
    graph_pool,
    hand_over,
    own_parts,
    passes_over,
    receive,
    transform,
)
from vgen.components.types import AttentionSizes
from vgen.diffusion.wan_guidance import Expert
from vgen.families.wan import flow_sampler, tile_settings
from vgen.job import Job
from vgen.loading import DTYPES, load, place
from vgen.memory import Activations, Decode, Spread
from vgen.metrics.timer import Timer, null_timer
from vgen.models.attention_backends import apply_attention
from vgen.models.wan import plan, text
from vgen.models.wan.encoder_configs import CLIP_VIT_H14, UMT5_XXL
from vgen.models.wan.image_encoder import build_image_encoder, restore_buffers
from vgen.models.wan.transformer import WanTransformer
from vgen.models.wan.vae import VideoDecoder, VideoEncoder
from vgen.models.wan.vae_blocks import apply_channels_last
from vgen.parallel.balance import plan_grid
from vgen.parallel.mesh import Mesh
from vgen.parallel.tiles import Tile
from vgen.pipelines.wan import WanComponents, WanDecoders, WanFollower, is_guided, latent_geometry, plan_request
from vgen.requests import Request
from vgen.residency import Residency
from vgen.stages.decode import DecodeVideo
from vgen.stages.wan_condition import EncodeVideo, WanEncoders
from vgen.stages.wan_denoise import PARTS, Step, WanConditioning, build_step, run_step
from vgen.stages.wan_text import TextComponents, encode_prompts
from vgen.wan_memory import estimate

TEXT = ("text_encoder",)
ENCODERS = ("video_encoder",)
DECODERS = ("video_decoder",)


def components_of(job: Job) -> tuple[str, ...]:
    """What ``task=generate`` builds for the requests of ``job``."""
    images: tuple[str, ...] = ()
    if needs_encoders(job.requests):
        images = ("image_encoder", *ENCODERS) if job.architecture.transformer.image_dim else ENCODERS
    return (*TEXT, *_experts(job).values(), *images, *DECODERS)


def needs_encoders(requests: Sequence[Request]) -> bool:
    """Whether any request brings an image."""
    return any(request.images for request in requests)


def _experts(job: Job) -> dict[Expert, str]:
    """The components that share the steps."""
    return PARTS if job.architecture.num_transformers > 1 else {"high_noise": PARTS["high_noise"]}


def build_components(
    job: Job,
    device: torch.device,
    decode: Decode = "whole",
    requests: Sequence[Request] | None = None,
    timer: Timer = null_timer,
    mesh: Mesh = ALONE,
) -> WanComponents:
    """Everything a rank that denoises needs for ``requests`` (those of the job by default) in ``task=generate``.

    Each component that visits the device leaves it before the next one loads.
    """
    requests = job.requests if requests is None else requests
    residency = Residency(device, {}, {})
    encode = build_encode_prompts(build_text, encode_prompts, TEXT, job, device, residency, requests, timer)
    experts = {expert: build_transformer(job, device, residency, name) for expert, name in _experts(job).items()}
    pool = graph_pool(job, device)  # one for both, which never run at the same time
    runs = {}
    for expert, transformer in experts.items():
        transform(transformer, plan.PLAN, job, device, mesh, pool)
        run = partial(run_step, transformer, passes_over(mesh))
        runs[expert] = captured_step(run, transformer, job, mesh, pool)

    def make_step(expert: Expert, conditioning: WanConditioning) -> Step:
        return build_step(runs[expert], experts[expert], conditioning)

    return WanComponents(
        architecture=job.architecture,
        encode_prompts=encode,
        experts=experts,
        boundary=job.config.model.boundary,
        make_step=make_step,
        decoders=build_decoders(job, device, residency, decode, mesh) if mesh.vae_rank is not None else None,
        encoders=build_encoders(job, device, residency, decode, mesh) if needs_encoders(job.requests) else None,
        residency=residency,
        device=device,
        hand_over=hand_over(job, mesh),
        graph_pool=pool,
    )


def build_follower(job: Job, device: torch.device, decode: Decode, mesh: Mesh) -> WanFollower:
    """Everything a rank that only decodes needs in ``task=generate``."""
    residency = Residency(device, {}, {})
    encoders = None
    if needs_encoders(job.requests):
        encoders = WanEncoders(build_encode_video(job, device, residency, decode, mesh))
    return WanFollower(
        architecture=job.architecture,
        decoders=build_decoders(job, device, residency, decode, mesh),
        encoders=encoders,
        receive=partial(receive, mesh, device),
        residency=residency,
        device=device,
    )


def build_transformer(
    job: Job, device: torch.device, residency: Residency | None = None, name: str = "transformer"
) -> WanTransformer:
    transformer = _load(job, name, device)
    assert isinstance(transformer, WanTransformer)
    apply_attention(transformer, job.config.model.attention)
    place(job, residency, name, transformer)
    return transformer


def build_text(job: Job, device: torch.device, residency: Residency | None = None) -> TextComponents:
    found = job.checkpoint
    tokenizer = text.byte_tokenizer() if found is None else text.load_tokenizer(found.tokenizer_folder)
    encoder = _load(job, "text_encoder", device)
    place(job, residency, "text_encoder", encoder)
    return TextComponents(tokenizer, encoder, job.config.model.text_encoder.max_length)


def build_video_encoder(job: Job, device: torch.device) -> nn.Module:
    encoder = _load(job, "video_encoder", device)
    if isinstance(encoder, VideoEncoder):
        apply_channels_last(encoder)
    return encoder


def build_encode_video(
    job: Job, device: torch.device, residency: Residency, decode: Decode = "whole", mesh: Mesh = ALONE
) -> EncodeVideo:
    """Over the ranks as the video is decoded, where all of them have a part."""
    video = build_video_encoder(job, device)
    place(job, residency, "video_encoder", video)
    return build_encode(job, video, VaeShare(job, mesh, decode, tile_settings(job.config, job.architecture)))


def build_encoders(
    job: Job, device: torch.device, residency: Residency, decode: Decode = "whole", mesh: Mesh = ALONE
) -> WanEncoders:
    encode = build_encode_video(job, device, residency, decode, mesh)
    if job.architecture.transformer.image_dim is None:
        return WanEncoders(encode)
    images = _load(job, "image_encoder", device)
    restore_buffers(images, device)
    place(job, residency, "image_encoder", images)
    return WanEncoders(encode, images, image_config(job)["image_size"])


def build_video_decoder(job: Job, device: torch.device) -> nn.Module:
    decoder = _load(job, "video_decoder", device)
    if isinstance(decoder, VideoDecoder):
        apply_channels_last(decoder)
    return decoder


def build_decoders(
    job: Job, device: torch.device, residency: Residency, decode: Decode = "whole", mesh: Mesh = ALONE
) -> WanDecoders:
    """Of one rank that decodes."""
    decoder = build_video_decoder(job, device)
    place(job, residency, "video_decoder", decoder)
    share = VaeShare(job, mesh, decode, tile_settings(job.config, job.architecture))
    longest = max(latent_geometry(request, job.architecture).latent_frames for request in job.requests)
    others = fallbacks(
        share,
        job.config.model.vae.chunk,
        longest,
        chunked=job.config.model.vae.backend == "native",
        build=lambda one: build_decode(one.job, decoder, one),
    )
    return WanDecoders(build_decode(job, decoder, share), job.architecture, others)


def text_config(job: Job) -> dict[str, Any]:
    """Sizes of the text encoder, in transformers' words."""
    if job.checkpoint is not None:
        return dict(job.checkpoint.text_encoder_config)
    return {**UMT5_XXL, **(job.config.model.text_encoder.architecture or {})}


def image_config(job: Job) -> dict[str, Any]:
    """Sizes of the image encoder, in transformers' words."""
    return {**CLIP_VIT_H14, **job.architecture.image_encoder}


def _video_encoder(job: Job) -> nn.Module:
    if job.config.model.vae.backend == "native":
        return VideoEncoder(job.architecture.vae)
    from vgen.components.wan_diffusers_vae import DiffusersVideoEncoder  # diffusers takes seconds to import

    return DiffusersVideoEncoder(job.architecture.vae)


def _video_decoder(job: Job) -> nn.Module:
    if job.config.model.vae.backend == "native":
        return VideoDecoder(job.architecture.vae)
    from vgen.components.wan_diffusers_vae import DiffusersVideoDecoder

    return DiffusersVideoDecoder(job.architecture.vae)


def _transformer(job: Job) -> nn.Module:
    return WanTransformer(job.architecture.transformer, job.config.model.residual)


MODULES: Mapping[str, Callable[[Job], nn.Module]] = {
    "text_encoder": lambda job: text.build_text_encoder(text_config(job)),
    "image_encoder": lambda job: build_image_encoder(image_config(job)),
    "transformer": _transformer,
    "transformer_2": _transformer,
    "video_encoder": _video_encoder,
    "video_decoder": _video_decoder,
}
"""How each component is built from the job, before it has weights."""


def latents_dtype(job: Job) -> torch.dtype:  # noqa: ARG001
    return torch.float32  # the solver's, in which a run saves them


def keeps_float32(job: Job, component: str) -> Callable[[str], bool] | None:
    """Which parameters of a component stay in fp32 whatever the precision of the rest; None for none."""
    if component not in PARTS.values():
        return None
    return partial(plan.keeps_float32, residual=job.config.model.residual)


def _load(job: Job, component: str, device: torch.device) -> nn.Module:
    source = None if job.checkpoint is None else checkpoint.wan_source(job.checkpoint, component)
    return load(
        job, component, device, lambda: MODULES[component](job), source, keep_float32=keeps_float32(job, component)
    )


def plan_decode(job: Job, request: Request, decode: Decode = "tile") -> tuple[Tile, ...]:
    """The tiles of one request's decode, ``tile`` or ``tile_balanced``."""
    geometry, settings = latent_geometry(request, job.architecture), tile_settings(job.config, job.architecture)
    sizes = (geometry.latent_frames, geometry.latent_height, geometry.latent_width)
    return plan_grid(sizes, settings, job.plan.vae_size, balanced=decode == "tile_balanced")


def build_decode(job: Job, decoder: Any, share: VaeShare) -> DecodeVideo:
    """This rank's part of a decode of the VAE's own latents, as the strategy has it."""
    chunk, dtype = job.config.model.vae.chunk, next(decoder.parameters()).dtype
    adapted = share.adapt(decoder)

    def decode(latents: Tensor) -> Iterator[Tensor]:
        latents = latents.to(dtype)
        if share.strategy in ("whole", "halo"):
            yield from own_parts(adapted.decode(latents, chunk))
        else:
            yield from share.decode_tiles(lambda part: decoder(part, chunk), latents)

    return decode


def build_encode(job: Job, encoder: Any, share: VaeShare) -> EncodeVideo:
    """This rank's part of an encode, as the strategy has it where all ranks of a replica have a part."""
    chunk, dtype = job.config.model.vae.chunk, next(encoder.parameters()).dtype
    adapted = share.adapt(encoder) if share.shares_encode else encoder

    def encode(frames: Tensor) -> Tensor:
        frames = frames.to(dtype)
        if share.strategy in ("whole", "halo"):
            latents: Tensor = adapted(frames, chunk)
            return latents
        return share.encode_tiles(lambda part: encoder(part, chunk), frames)

    return encode


def attention_sizes(job: Job, request: Request) -> AttentionSizes:
    config = job.architecture.transformer
    tokens = latent_geometry(request, job.architecture).video_tokens
    return AttentionSizes(num_heads=config.num_attention_heads, head_dim=config.attention_head_dim, tokens=tokens)


def activations(
    job: Job,
    request: Request,
    components: Collection[str],  # noqa: ARG001
    spread: Spread = memory.ALONE,
) -> Activations:
    plans = plan_request(flow_sampler(job.config), job.config.model.boundary)
    encoded = 0
    if request.images or job.config.task.name == "bench_encode":
        encoded = 1 if job.architecture.kind == "ti2v" and request.images else request.num_frames
    return estimate(
        job.architecture,
        latent_geometry(request, job.architecture),
        text_config(job),
        {decode: plan_decode(job, request, decode) for decode in memory.TILED},
        text_tokens=job.config.model.text_encoder.max_length,
        value_bytes=DTYPES[job.config.quant.mode].itemsize,
        contexts=1 + is_guided(plans),
        chunk=job.config.model.vae.chunk,
        encoded_frames=encoded,
        residual=job.config.model.residual,
        held=bool(request.images) and job.architecture.kind == "ti2v",
        spread=spread,
    )
