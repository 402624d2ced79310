"""The one place that builds a model and fixes the order of what is done to it.

load → LoRA → quantize → fuse → parallelize → compile → capture → guidance. A step that the configuration turns off
is not called, and the module stays the plain one. This version has the first and the last.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from vgen import checkpoint, random_weights
from vgen.job import Job
from vgen.models import gemma3
from vgen.models.ltx2.audio_vae import AudioDecoder
from vgen.models.ltx2.connectors import TextConnectors
from vgen.models.ltx2.transformer import LTX2Transformer
from vgen.models.ltx2.video_vae import VideoDecoder
from vgen.models.ltx2.vocoder import Vocoder
from vgen.parallel.tiles import Tile, decode_tiled, plan_tiles
from vgen.pipelines.types import Components, Decoders
from vgen.progress import progress
from vgen.requests import Request
from vgen.stages.decode import AudioComponents, DecodeVideo, decode_whole
from vgen.stages.denoise import build_serial_predict
from vgen.stages.latents import latent_geometry
from vgen.stages.text import TextComponents
from vgen.validate import tile_settings

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def build_components(job: Job, device: torch.device) -> Components:
    """Everything ``task=generate`` needs, on ``device``."""
    transformer = build_transformer(job, device)
    return Components(
        architecture=job.architecture,
        text=build_text(job, device),
        transformer=transformer,
        make_predict=partial(build_serial_predict, transformer),
        decoders=build_decoders(job, device),
        device=device,
        dtype=DTYPES[job.config.quant.mode],
    )


def build_transformer(job: Job, device: torch.device) -> LTX2Transformer:
    transformer = _load(job, "transformer", lambda: LTX2Transformer(job.architecture.transformer), device)
    assert isinstance(transformer, LTX2Transformer)
    return transformer


def build_text(job: Job, device: torch.device) -> TextComponents:
    config = job.config.model.text_encoder
    if job.text_encoder is None:
        assert config.architecture is not None
        tokenizer, architecture = gemma3.byte_tokenizer(), {**gemma3.GEMMA3_12B, **config.architecture}
    else:
        tokenizer, architecture = gemma3.load_tokenizer(job.text_encoder.tokenizer_folder), job.text_encoder.config
    text_encoder = _load(job, "text_encoder", lambda: gemma3.build_text_encoder(architecture), device)
    hidden_size, num_states = gemma3.hidden_sizes(text_encoder)
    connectors = _load(
        job,
        "connectors",
        lambda: TextConnectors(
            job.architecture.video_connector,
            job.architecture.audio_connector,
            hidden_size=hidden_size,
            num_states=num_states,
        ),
        device,
    )
    assert isinstance(connectors, TextConnectors)
    return TextComponents(tokenizer, text_encoder, connectors, config.max_length)


def build_decoders(job: Job, device: torch.device) -> Decoders:
    architecture = job.architecture
    audio = AudioComponents(
        decoder=_load(job, "audio_decoder", lambda: AudioDecoder(architecture.audio_decoder), device),
        vocoder=_load(job, "vocoder", lambda: Vocoder(architecture.vocoder), device),
        sample_rate=architecture.vocoder.output_sample_rate,
    )
    return Decoders(decode_video=_build_decode(job, build_video_decoder(job, device)), audio=audio)


def build_video_decoder(job: Job, device: torch.device) -> VideoDecoder:
    decoder = _load(job, "video_decoder", lambda: VideoDecoder(job.architecture.video_decoder), device)
    assert isinstance(decoder, VideoDecoder)
    # The decoder keeps its weights' memory format; convolutions want channels last, and converting each time costs.
    decoder.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
    return decoder


def decode_strategy(job: Job) -> str:
    """``auto`` is ``whole``: the exact decode."""
    strategy = job.config.parallel.vae_strategy
    return "whole" if strategy == "auto" else strategy


def plan_decode(job: Job, request: Request) -> tuple[Tile, ...]:
    """The tiles of one request's decode."""
    geometry = latent_geometry(request)
    return plan_tiles(
        geometry.latent_frames, geometry.latent_height, geometry.latent_width, tile_settings(job.config.model.vae)
    )


def _build_decode(job: Job, decoder: nn.Module) -> DecodeVideo:
    if decode_strategy(job) == "whole":
        return decode_whole(decoder)
    settings = tile_settings(job.config.model.vae)

    def decode(latents: Tensor) -> Iterator[Tensor]:
        _, _, latent_frames, latent_height, latent_width = latents.shape
        tiles = plan_tiles(latent_frames, latent_height, latent_width, settings)
        with torch.no_grad():
            yield from decode_tiled(decoder, latents, tiles)

    return decode


def _load(job: Job, component: str, build: Callable[[], nn.Module], device: torch.device) -> nn.Module:
    dtype = DTYPES[job.config.quant.mode]
    with torch.device("meta"):
        module = build()
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
