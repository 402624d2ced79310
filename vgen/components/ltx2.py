"""What LTX-2 is built of, and what it needs of a device."""

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
    is_first,
    own_parts,
    passes_over,
    receive,
    transform,
)
from vgen.components.types import AttentionSizes
from vgen.config import SamplerConfig
from vgen.families.ltx2 import tile_settings
from vgen.job import Job
from vgen.loading import DTYPES, load, place
from vgen.ltx2_memory import TextSizes, estimate
from vgen.memory import Activations, Decode, Spread
from vgen.metrics.timer import Timer, null_timer
from vgen.models import gemma3
from vgen.models.attention_backends import apply_attention
from vgen.models.ltx2.audio_encoder import AudioEncoder
from vgen.models.ltx2.audio_vae import AudioDecoder
from vgen.models.ltx2.bandwidth import BandwidthExtendedVocoder
from vgen.models.ltx2.connectors import TextConnectors
from vgen.models.ltx2.plan import PLAN
from vgen.models.ltx2.transformer import LTX2Transformer
from vgen.models.ltx2.video_encoder import VideoEncoder
from vgen.models.ltx2.video_vae import VideoDecoder
from vgen.models.ltx2.vocoder import Vocoder
from vgen.parallel.balance import plan_grid
from vgen.parallel.mesh import Mesh
from vgen.parallel.tiles import Tile
from vgen.pipelines.ltx2 import plan_request_passes
from vgen.pipelines.types import Components, Decoders, Follower
from vgen.requests import Request
from vgen.residency import Residency
from vgen.stages.decode import AudioComponents, DecodeVideo
from vgen.stages.denoise import build_step, run_step
from vgen.stages.encode import Encoders, EncodeVideo
from vgen.stages.latents import latent_geometry
from vgen.stages.passes import needs_negative
from vgen.stages.text import TextComponents, encode_prompts

ENCODERS = ("video_encoder", "audio_encoder")
DECODERS = ("video_decoder", "audio_decoder", "vocoder")
TEXT = ("text_encoder", "connectors")


def components_of(job: Job) -> tuple[str, ...]:
    """What ``task=generate`` builds for the requests of ``job``."""
    return (*TEXT, "transformer", *(ENCODERS if needs_encoders(job.requests) else ()), *DECODERS)


def build_components(
    job: Job,
    device: torch.device,
    decode: Decode = "whole",
    requests: Sequence[Request] | None = None,
    timer: Timer = null_timer,
    mesh: Mesh = ALONE,
) -> Components:
    """Everything a rank that denoises needs for ``requests`` (those of the job by default) in ``task=generate``.

    Each component that visits the device leaves it before the next one loads.
    """
    requests = job.requests if requests is None else requests
    residency = Residency(device, {}, {})
    encode = build_encode_prompts(build_text, encode_prompts, TEXT, job, device, residency, requests, timer)
    transformer, pool = build_transformer(job, device, residency), graph_pool(job, device)
    transform(transformer, PLAN, job, device, mesh, pool)
    run = captured_step(partial(run_step, transformer, passes_over(mesh)), transformer, job, mesh, pool)
    return Components(
        architecture=job.architecture,
        encode_prompts=encode,
        transformer=transformer,
        make_step=partial(build_step, run, transformer),
        decoders=build_decoders(job, device, residency, decode, mesh) if mesh.vae_rank is not None else None,
        encoders=build_encoders(job, device, residency, decode, mesh) if needs_encoders(job.requests) else None,
        residency=residency,
        device=device,
        dtype=DTYPES[job.config.quant.mode],
        hand_over=hand_over(job, mesh),
        graph_pool=pool,
    )


def build_follower(job: Job, device: torch.device, decode: Decode, mesh: Mesh) -> Follower:
    """Everything a rank that only decodes needs in ``task=generate``."""
    residency = Residency(device, {}, {})
    encode = None
    if any(request.images or request.video for request in job.requests):
        encode = build_encode_video(job, device, residency, decode, mesh)
    return Follower(
        decoders=build_decoders(job, device, residency, decode, mesh),
        encode_video=encode,
        receive=partial(receive, mesh, device),
        residency=residency,
        device=device,
        dtype=DTYPES[job.config.quant.mode],
    )


def needs_encoders(requests: Sequence[Request]) -> bool:
    """Whether any request brings an image, a clip or a sound."""
    return any(request.images or request.video or request.sound_source for request in requests)


def build_transformer(job: Job, device: torch.device, residency: Residency | None = None) -> LTX2Transformer:
    transformer = _load(job, "transformer", device)
    assert isinstance(transformer, LTX2Transformer)
    apply_attention(transformer, job.config.model.attention)
    place(job, residency, "transformer", transformer)
    return transformer


def build_text(job: Job, device: torch.device, residency: Residency | None = None) -> TextComponents:
    folder = None if job.text_encoder is None else job.text_encoder.tokenizer_folder
    tokenizer = gemma3.byte_tokenizer() if folder is None else gemma3.load_tokenizer(folder)
    parts = {}
    for name in TEXT:
        parts[name] = _load(job, name, device)
        place(job, residency, name, parts[name])
    connectors = parts["connectors"]
    assert isinstance(connectors, TextConnectors)
    return TextComponents(tokenizer, parts["text_encoder"], connectors, job.config.model.text_encoder.max_length)


def build_video_encoder(job: Job, device: torch.device) -> VideoEncoder:
    encoder = _load(job, "video_encoder", device)
    assert isinstance(encoder, VideoEncoder)
    encoder.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
    return encoder


def build_encode_video(
    job: Job, device: torch.device, residency: Residency, decode: Decode = "whole", mesh: Mesh = ALONE
) -> EncodeVideo:
    """In bands over the ranks where the video is decoded so and all of them have a part."""
    encoder = build_video_encoder(job, device)
    place(job, residency, "video_encoder", encoder)
    share = VaeShare(job, mesh, decode, tile_settings(job.config))
    encode: EncodeVideo = share.adapt(encoder) if share.shares_encode else encoder
    return encode


def build_encoders(
    job: Job, device: torch.device, residency: Residency, decode: Decode = "whole", mesh: Mesh = ALONE
) -> Encoders:
    video = build_encode_video(job, device, residency, decode, mesh)
    audio = _load(job, "audio_encoder", device)
    assert isinstance(audio, AudioEncoder)
    place(job, residency, "audio_encoder", audio)
    return Encoders(video, audio)


def build_decoders(
    job: Job, device: torch.device, residency: Residency, decode: Decode = "whole", mesh: Mesh = ALONE
) -> Decoders:
    """Of one rank that decodes; the sound is the first one's."""
    video = build_video_decoder(job, device)
    place(job, residency, "video_decoder", video)
    share = VaeShare(job, mesh, decode, tile_settings(job.config))
    decode_video = build_decode(video, share)
    # LTX-2's VAE has no chunks, and the number of frames no meaning here.
    others = fallbacks(share, None, 1, chunked=False, build=partial(build_decode, video))
    if not is_first(mesh):
        return Decoders(decode_video, None, others)
    vocoder = _load(job, "vocoder", device)
    assert isinstance(vocoder, Vocoder | BandwidthExtendedVocoder)
    audio = AudioComponents(_load(job, "audio_decoder", device), vocoder, vocoder.output_sample_rate)
    for name, module in (("audio_decoder", audio.decoder), ("vocoder", audio.vocoder)):
        place(job, residency, name, module)
    return Decoders(decode_video, audio, others)


def text_config(job: Job) -> dict[str, Any]:
    """Sizes of the text encoder, in transformers' words."""
    if job.text_encoder is not None:
        return gemma3.text_config(job.text_encoder.config)
    assert job.config.model.text_encoder.architecture is not None
    return {**gemma3.GEMMA3_12B, **job.config.model.text_encoder.architecture}


def _connectors(job: Job) -> nn.Module:
    text, architecture = text_config(job), job.architecture
    return TextConnectors(
        architecture.video_connector,
        architecture.audio_connector,
        hidden_size=text["hidden_size"],
        num_states=text["num_hidden_layers"] + 1,
        text_projection=architecture.text_projection,
    )


def _vocoder(job: Job) -> nn.Module:
    architecture = job.architecture
    if architecture.bandwidth_extension is None:
        return Vocoder(architecture.vocoder)
    return BandwidthExtendedVocoder(architecture.vocoder, architecture.bandwidth_extension)


MODULES: Mapping[str, Callable[[Job], nn.Module]] = {
    "text_encoder": lambda job: gemma3.build_text_encoder(text_config(job)),
    "connectors": _connectors,
    "transformer": lambda job: LTX2Transformer(job.architecture.transformer),
    "video_encoder": lambda job: VideoEncoder(job.architecture.video_encoder),
    "audio_encoder": lambda job: AudioEncoder(job.architecture.audio_encoder),
    "video_decoder": lambda job: VideoDecoder(job.architecture.video_decoder),
    "audio_decoder": lambda job: AudioDecoder(job.architecture.audio_decoder),
    "vocoder": _vocoder,
}
"""How each component is built from the job, before it has weights."""


def build_video_decoder(job: Job, device: torch.device) -> VideoDecoder:
    decoder = _load(job, "video_decoder", device)
    assert isinstance(decoder, VideoDecoder)
    # The decoder keeps its weights' memory format; convolutions want channels last, and converting each time costs.
    decoder.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
    return decoder


def plan_decode(job: Job, request: Request, decode: Decode = "tile") -> tuple[Tile, ...]:
    """The tiles of one request's decode, ``tile`` or ``tile_balanced``."""
    geometry, settings = latent_geometry(request), tile_settings(job.config)
    sizes = (geometry.latent_frames, geometry.latent_height, geometry.latent_width)
    return plan_grid(sizes, settings, job.plan.vae_size, balanced=decode == "tile_balanced")


def build_decode(decoder: nn.Module, share: VaeShare) -> DecodeVideo:
    """This rank's part of a decode, as the strategy has it."""
    if share.strategy in ("whole", "halo"):
        adapted = share.adapt(decoder)

        def decode(latents: Tensor) -> Iterator[Tensor]:
            with torch.no_grad():
                yield from own_parts(iter([adapted(latents)]))

        return decode
    return partial(share.decode_tiles, decoder)


def _load(job: Job, component: str, device: torch.device) -> nn.Module:
    source = None
    if component == "text_encoder" and job.text_encoder is not None:
        source = checkpoint.text_encoder_source(job.text_encoder)
    elif job.checkpoint is not None:
        source = checkpoint.component_source(job.checkpoint, component)
    return load(job, component, device, lambda: MODULES[component](job), source)


def attention_sizes(job: Job, request: Request) -> AttentionSizes:
    config = job.architecture.transformer
    return AttentionSizes(
        num_heads=config.num_attention_heads,
        head_dim=config.attention_head_dim,
        tokens=latent_geometry(request).video_tokens,
        other_head_dims=(config.audio_attention_head_dim,),
    )


def latents_dtype(job: Job) -> torch.dtype:
    return DTYPES[job.config.quant.mode]


def keeps_float32(job: Job, component: str) -> Callable[[str], bool] | None:  # noqa: ARG001
    return None


def activations(
    job: Job,
    request: Request,
    components: Collection[str],  # noqa: ARG001
    spread: Spread = memory.ALONE,
) -> Activations:
    text = text_config(job)
    sampler = job.config.sampler
    assert isinstance(sampler, SamplerConfig)
    passes = plan_request_passes(request, sampler)
    return estimate(
        job.architecture,
        latent_geometry(request),
        TextSizes(
            tokens=job.config.model.text_encoder.max_length,
            hidden_size=text["hidden_size"],
            intermediate_size=text["intermediate_size"],
            num_states=text["num_hidden_layers"] + 1,
        ),
        {decode: plan_decode(job, request, decode) for decode in memory.TILED},
        value_bytes=DTYPES[job.config.quant.mode].itemsize,
        contexts=1 + needs_negative(passes),
        passes=len(passes),
        encoded_frames=_encoded_frames(job, request),
        encodes_sound=request.sound_source is not None,
        conditioned=bool(request.images),
        spread=spread,
    )


def _encoded_frames(job: Job, request: Request) -> int:
    """Frames of the longest clip that the video encoder gets."""
    if request.video or job.config.task.name == "bench_encode":
        return request.num_frames
    return min(1, len(request.images))
