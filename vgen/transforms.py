"""The one place that builds a model and fixes the order of what is done to it.

load → LoRA → quantize → fuse → parallelize → compile → capture → guidance. A step that the configuration turns off
is not called, and the module stays the plain one. This version has the first and the last.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vgen import checkpoint, random_weights
from vgen.job import Job
from vgen.memory import VISITING, Decode
from vgen.metrics.timer import Timer, null_timer
from vgen.models import gemma3
from vgen.models.attention_backends import apply_attention
from vgen.models.ltx2.audio_encoder import AudioEncoder
from vgen.models.ltx2.audio_vae import AudioDecoder
from vgen.models.ltx2.bandwidth import BandwidthExtendedVocoder
from vgen.models.ltx2.connectors import TextConnectors
from vgen.models.ltx2.transformer import LTX2Transformer
from vgen.models.ltx2.video_encoder import VideoEncoder
from vgen.models.ltx2.video_vae import VideoDecoder
from vgen.models.ltx2.vocoder import Vocoder
from vgen.parallel.tiles import Tile, decode_tiled, plan_tiles
from vgen.pipelines.types import Components, Decoders
from vgen.progress import progress
from vgen.requests import Request
from vgen.residency import Residency
from vgen.stages.decode import AudioComponents, DecodeVideo, decode_whole
from vgen.stages.denoise import build_serial_predict
from vgen.stages.encode import Encoders
from vgen.stages.latents import latent_geometry
from vgen.stages.text import Context, EncodePrompts, TextComponents, encode_prompts
from vgen.validate import tile_settings

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


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
) -> Components:
    """Everything ``task=generate`` needs for ``requests`` (those of the job by default).

    Each component that visits the device leaves it before the next one loads.
    """
    requests = job.requests if requests is None else requests
    residency = Residency(device, {}, {})
    encode = build_encode_prompts(job, device, residency, requests, timer)
    transformer = build_transformer(job, device, residency)
    encoders = build_encoders(job, device, residency) if needs_encoders(job.requests) else None
    return Components(
        architecture=job.architecture,
        encode_prompts=encode,
        transformer=transformer,
        make_predict=partial(build_serial_predict, transformer),
        decoders=build_decoders(job, device, residency, decode),
        encoders=encoders,
        residency=residency,
        device=device,
        dtype=DTYPES[job.config.quant.mode],
    )


def needs_encoders(requests: Iterable[Request]) -> bool:
    """Whether any request brings an image, a clip or a sound."""
    return any(request.images or request.video or request.sound_source for request in requests)


def build_transformer(job: Job, device: torch.device, residency: Residency | None = None) -> LTX2Transformer:
    transformer = _load(job, "transformer", device)
    assert isinstance(transformer, LTX2Transformer)
    apply_attention(transformer, job.config.model.attention)
    _settle(job, residency, "transformer", transformer)
    return transformer


def build_encode_prompts(
    job: Job, device: torch.device, residency: Residency, requests: Sequence[Request], timer: Timer = null_timer
) -> EncodePrompts:
    """Prompts to contexts; with ``model.offload=text_encoder`` all of ``requests`` now, after which it is freed."""
    if job.config.model.offload != "text_encoder":
        return partial(_encode_prompts, build_text(job, device, residency), residency, device)
    with timer("text_encode"):
        text = build_text(job, device)
        prompts = list(dict.fromkeys(one for request in requests for one in (request.prompt, request.negative_prompt)))
        contexts = dict(zip(prompts, encode_prompts(text, prompts, device), strict=True))
        del text
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return lambda wanted: [contexts[prompt] for prompt in wanted]


def _encode_prompts(
    text: TextComponents, residency: Residency, device: torch.device, prompts: Sequence[str]
) -> list[Context]:
    with residency.use(*TEXT):
        return encode_prompts(text, prompts, device)


def build_text(job: Job, device: torch.device, residency: Residency | None = None) -> TextComponents:
    folder = None if job.text_encoder is None else job.text_encoder.tokenizer_folder
    tokenizer = gemma3.byte_tokenizer() if folder is None else gemma3.load_tokenizer(folder)
    parts = {}
    for name in TEXT:
        parts[name] = _load(job, name, device)
        _settle(job, residency, name, parts[name])
    connectors = parts["connectors"]
    assert isinstance(connectors, TextConnectors)
    return TextComponents(tokenizer, parts["text_encoder"], connectors, job.config.model.text_encoder.max_length)


def build_video_encoder(job: Job, device: torch.device) -> VideoEncoder:
    encoder = _load(job, "video_encoder", device)
    assert isinstance(encoder, VideoEncoder)
    encoder.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
    return encoder


def build_encoders(job: Job, device: torch.device, residency: Residency) -> Encoders:
    video = build_video_encoder(job, device)
    audio = _load(job, "audio_encoder", device)
    assert isinstance(audio, AudioEncoder)
    for name, module in zip(ENCODERS, (video, audio), strict=True):
        _settle(job, residency, name, module)
    return Encoders(video, audio)


def build_decoders(job: Job, device: torch.device, residency: Residency, decode: Decode = "whole") -> Decoders:
    video = build_video_decoder(job, device)
    vocoder = _load(job, "vocoder", device)
    assert isinstance(vocoder, Vocoder | BandwidthExtendedVocoder)
    audio = AudioComponents(_load(job, "audio_decoder", device), vocoder, vocoder.output_sample_rate)
    for name, module in zip(DECODERS, (video, audio.decoder, audio.vocoder), strict=True):
        _settle(job, residency, name, module)
    return Decoders(decode_video=_build_decode(job, video, decode), audio=audio)


def _settle(job: Job, residency: Residency | None, name: str, module: nn.Module) -> None:
    if residency is not None:
        (residency.park if name in VISITING[job.config.model.offload] else residency.keep)(name, module)


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


def plan_decode(job: Job, request: Request) -> tuple[Tile, ...]:
    """The tiles of one request's decode."""
    geometry = latent_geometry(request)
    return plan_tiles(
        geometry.latent_frames, geometry.latent_height, geometry.latent_width, tile_settings(job.config.model.vae)
    )


def _build_decode(job: Job, decoder: nn.Module, strategy: Decode) -> DecodeVideo:
    if strategy == "whole":
        return decode_whole(decoder)
    settings = tile_settings(job.config.model.vae)

    def decode(latents: Tensor) -> Iterator[Tensor]:
        _, _, latent_frames, latent_height, latent_width = latents.shape
        tiles = plan_tiles(latent_frames, latent_height, latent_width, settings)
        with torch.no_grad():
            yield from decode_tiled(decoder, latents, tiles)

    return decode


def component_dtype(job: Job, component: str, device: torch.device) -> torch.dtype:
    """The dtype of a component's weights and of what it computes: the configuration's, but for VAEs on the CPU.

    torch has no fast bf16 convolution for most CPUs: the encoder of the tiny model takes 69 s there and 0.6 s in fp32.
    """
    convolves = component in (*ENCODERS, *DECODERS)
    return torch.float32 if convolves and device.type == "cpu" else DTYPES[job.config.quant.mode]


def _load(job: Job, component: str, device: torch.device) -> nn.Module:
    dtype = component_dtype(job, component, device)
    with torch.device("meta"):
        module = MODULES[component](job)
    module.requires_grad_(False).eval()
    source = None
    if component == "text_encoder" and job.text_encoder is not None:
        source = checkpoint.text_encoder_source(job.text_encoder)
    elif job.checkpoint is not None:
        source = checkpoint.component_source(job.checkpoint, component)
    if source is None:
        seed = job.config.model.weights_seed
        random_weights.fill_random(module, seed=seed, device=device, dtype=dtype, prefix=component)
        return module
    with source, progress(f"load {component}", source.total_bytes, unit="bytes") as bar:
        checkpoint.load_module(module, source, device=device, dtype=dtype, progress=bar.advance)
    return module


@contextmanager
def exact_fp32(enabled: bool) -> Iterator[None]:
    """fp32 means fp32: no TF32 in matrix products and convolutions while it lasts."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    if enabled:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
