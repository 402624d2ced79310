"""LTX-2 in the parent: its files, sizes and rules; needs no torch."""

import math
from itertools import pairwise
from typing import Any

from vgen import checkpoint_files
from vgen.checkpoint_files import Checkpoint, TextEncoderFiles
from vgen.config import Config, GuidanceConfig, SamplerConfig
from vgen.families.sizes import SizeRule, halo_axis
from vgen.models.ltx2.config import VIDEO_COMPRESSION, LTX2Config
from vgen.models.ltx2.config_diffusers import from_diffusers
from vgen.models.ltx2.config_official import from_official
from vgen.parallel.plans import Limits
from vgen.parallel.tiles import TileSettings
from vgen.requests import Request
from vgen.typed import ConfigurationError

DISTILLED_STEPS = 8
"""Steps of the schedule that distilled checkpoints were trained for."""

MODELS = {
    ("2.0", "dev"): "ltx2",
    ("2.0", "distilled"): "ltx2_distilled",
    ("2.3", "dev"): "ltx2_3",
    ("2.3", "distilled"): "ltx2_3_distilled",
}
"""The model group's option with the defaults of each checkpoint."""


def find_files(settings: Config) -> tuple[Checkpoint | None, TextEncoderFiles | None]:
    model = settings.model
    if model.weights == "random":
        if model.architecture is None or model.text_encoder.architecture is None:
            raise ConfigurationError(
                f"model={model.name} has no sizes for model.weights=random; set model.architecture and "
                f"model.text_encoder.architecture"
            )
        return None, None
    assert model.checkpoint is not None
    checkpoint = checkpoint_files.resolve(model.checkpoint, model.revision)
    if not settings.task.generates:
        return checkpoint, None
    return checkpoint, checkpoint_files.resolve_text_encoder(
        model.text_encoder.checkpoint, model.text_encoder.revision, checkpoint
    )


def read_files(checkpoint: Any, text_encoder: Any) -> tuple[Checkpoint | None, TextEncoderFiles | None]:
    return (
        Checkpoint.from_mapping(checkpoint) if checkpoint else None,
        TextEncoderFiles.from_mapping(text_encoder) if text_encoder else None,
    )


def architecture_of(settings: Config, checkpoint: Checkpoint | None) -> LTX2Config:
    if checkpoint is None:
        assert settings.model.architecture is not None
        return from_official(settings.model.architecture)
    return from_official(checkpoint.config) if checkpoint.layout == "official" else from_diffusers(checkpoint.config)


def size_rule(architecture: LTX2Config) -> SizeRule:  # noqa: ARG001
    time, space, _ = VIDEO_COMPRESSION
    return SizeRule(time, space, smallest=2 * space)


def pass_names(request: Request, config: Config) -> tuple[str, ...]:
    """As ``vgen.stages.passes.plan_passes`` plans them; a sound that is given is not guided."""
    sampler = _sampler(config)
    streams = [sampler.video, *([sampler.audio] if request.audio == "generate" else [])]
    asked = {
        "uncond": any(stream.cfg_scale != 1 for stream in streams),
        "ptb": any(stream.stg_scale != 0 for stream in streams),
        # With no sound the isolated pass would equal the conditional one.
        "mod": request.audio != "none" and any(stream.modality_scale != 1 for stream in streams),
    }
    return ("cond", *(name for name, wanted in asked.items() if wanted))


def limits(config: Config, requests: tuple[Request, ...], architecture: LTX2Config) -> Limits:
    time, space, _ = VIDEO_COMPRESSION
    smallest = min(requests, key=lambda request: request.height * request.width * request.num_frames)
    height, width = (min(getattr(one, side) for one in requests) // space for side in ("height", "width"))
    keyframes = sum(image.frame != 0 for image in smallest.images)
    frames = (smallest.num_frames - 1) // time + 1 + keyframes
    return Limits(
        model=f"model={config.model.name}",
        heads={"the attentions": architecture.transformer.num_attention_heads},
        video_tokens=frames * (smallest.height // space) * (smallest.width // space),
        passes=min((pass_names(request, config) for request in requests), key=len),
        latent_height=height,
        latent_width=width,
        halo_axis=halo_axis(config, height, width),
        prompts=len(requests),
    )


def tile_settings(config: Config) -> TileSettings:
    """Raises ConfigurationError where the tile sizes do not fit the VAE's compression."""
    vae = config.model.vae
    if vae.tile_frames is None:
        raise ConfigurationError("model.vae.tile_frames=null does not cut along time, which LTX-2 needs; give frames")
    try:
        return TileSettings(vae.tile_size, vae.tile_overlap, vae.tile_frames, vae.tile_frames_overlap)
    except ValueError as error:
        raise ConfigurationError(f"model.vae: {error}") from None


def validate(
    config: Config, requests: tuple[Request, ...], architecture: LTX2Config, checkpoint: Checkpoint | None = None
) -> None:
    """Raises ConfigurationError: the first rule that does not hold."""
    sampler = _sampler(config)
    _validate_sampler(sampler, architecture)
    _validate_checkpoint(config, architecture, checkpoint)
    if config.model.offload == "expert":
        raise ConfigurationError("model.offload=expert is for two transformers, and LTX-2 has one; use stages or none")
    if config.model.vae.backend != "native" or config.model.vae.chunk is not None:
        raise ConfigurationError("model.vae.backend and model.vae.chunk are Wan's; leave them out with LTX-2")
    for request in requests:
        if config.task.name == "bench_step" and not request.has_audio:
            raise ConfigurationError("task=bench_step runs video and audio together; use request.audio=generate")
        if config.task.generates:
            _validate_start(request, f"request {request.index}: " if len(requests) > 1 else "", sampler)
    _validate_text(config, architecture)
    tile_settings(config)


def validate_training(config: Config, architecture: LTX2Config) -> None:
    """Raises ConfigurationError: the tiny LTX-2 is of 2.0 and begins without weights."""
    if architecture.version != "2.0" or config.model.weights != "random":
        raise ConfigurationError(
            f"task=train_tiny trains LTX-2 2.0 from nothing, not model={config.model.name} with "
            f"model.weights={config.model.weights}; use experiment=train_ltx2_tiny"
        )


def _sampler(config: Config) -> SamplerConfig:
    if not isinstance(config.sampler, SamplerConfig):
        raise ConfigurationError(f"sampler={config.sampler.solver} is Wan's; use sampler=default with LTX-2")
    return config.sampler


def _validate_sampler(sampler: SamplerConfig, architecture: LTX2Config) -> None:
    if sampler.steps < 1:
        raise ConfigurationError(f"sampler.steps={sampler.steps} denoises nothing; give 1 or more")
    _validate_sigmas(sampler)
    for name in ("video", "audio"):
        _validate_guidance(f"sampler.{name}", getattr(sampler, name), architecture.transformer.num_layers)


def _validate_sigmas(sampler: SamplerConfig) -> None:
    if sampler.sigmas is None:
        if sampler.schedule == "distilled" and sampler.steps != DISTILLED_STEPS:
            raise ConfigurationError(
                f"sampler.steps={sampler.steps} does not fit sampler.schedule=distilled, whose {DISTILLED_STEPS} "
                f"sigmas are fixed; use sampler.steps={DISTILLED_STEPS} or a list in sampler.sigmas"
            )
        return
    falls = all(high > low for high, low in pairwise(sampler.sigmas))
    if len(sampler.sigmas) < 2 or not falls or sampler.sigmas[-1] != 0 or not 0 < sampler.sigmas[0] <= 1:
        raise ConfigurationError(
            f"sampler.sigmas={list(sampler.sigmas)} does not fall from at most 1 to 0; "
            f"give a list such as [1.0,0.5,0.0]"
        )


def _validate_guidance(path: str, guidance: GuidanceConfig, num_layers: int) -> None:
    for name, off in (("cfg_scale", 1), ("stg_scale", 0), ("modality_scale", 1)):
        value = getattr(guidance, name)
        if not math.isfinite(value) or value < 0:
            raise ConfigurationError(f"{path}.{name}={value} is not a scale; give {off} (off) or more")
    if not 0 <= guidance.rescale_scale <= 1:
        raise ConfigurationError(f"{path}.rescale_scale={guidance.rescale_scale} is outside 0 (off) to 1")
    if guidance.skip_step < 0:
        raise ConfigurationError(f"{path}.skip_step={guidance.skip_step} is negative; give 0 (none) or more")
    if guidance.stg_scale != 0 and not guidance.stg_blocks:
        raise ConfigurationError(
            f"{path}.stg_scale={guidance.stg_scale} has no blocks to perturb; name some in {path}.stg_blocks=[…] or "
            f"use {path}.stg_scale=0"
        )
    wrong = [block for block in guidance.stg_blocks if not 0 <= block < num_layers]
    if wrong and guidance.stg_scale != 0:
        raise ConfigurationError(
            f"{path}.stg_blocks has {wrong[0]}, but this model's blocks are 0 to {num_layers - 1}; use one of those"
        )


def _validate_checkpoint(config: Config, architecture: LTX2Config, checkpoint: Checkpoint | None) -> None:
    """Steps, guidance and schedule are those of one version and kind; the file's own word on both counts for more."""
    kind = (checkpoint.kind if checkpoint else None) or config.model.kind
    version, sampler = architecture.version, _sampler(config)
    name = checkpoint.id if checkpoint else f"model={config.model.name}"
    if version != config.model.version:
        raise ConfigurationError(
            f"{name} is LTX-2 {version} and model={config.model.name} has the defaults of {config.model.version}; "
            f"use model={MODELS[version, kind]} with this checkpoint"
        )
    if sampler.sigmas is not None or not config.task.generates:
        return
    if (sampler.schedule == "distilled") == (kind == "distilled"):
        return
    if kind == "distilled":
        raise ConfigurationError(
            f"sampler.schedule={sampler.schedule} does not fit {name}, which is distilled for {DISTILLED_STEPS} fixed "
            f"sigmas without guidance; use model={MODELS[version, kind]} with this checkpoint"
        )
    raise ConfigurationError(
        f"sampler.schedule=distilled does not fit {name}, which is not distilled; use sampler.schedule=official or a "
        f"distilled checkpoint"
    )


def _validate_start(request: Request, where: str, sampler: SamplerConfig) -> None:
    if sampler.sigmas is None:
        return
    first = sampler.sigmas[0]
    if request.video is None and first != 1:
        raise ConfigurationError(
            f"{where}sampler.sigmas starts at {first}, but without request.video there is only noise to start from; "
            f"start at 1.0 or give request.video"
        )
    if request.video is not None and request.noise_level > first:
        raise ConfigurationError(
            f"{where}request.noise_level={request.noise_level} is above the first of sampler.sigmas, {first}; "
            f"use {first} or less, or a list that starts higher"
        )


def _validate_text(config: Config, architecture: LTX2Config) -> None:
    length = config.model.text_encoder.max_length
    registers = architecture.video_connector.num_registers
    if length < 1 or length % registers:
        raise ConfigurationError(
            f"model.text_encoder.max_length={length} is not a multiple of the connectors' {registers} registers; "
            f"use {max(1, round(length / registers)) * registers}"
        )
