"""Wan in the parent: its files, sizes and rules; needs no torch."""

import math
from typing import Any

from vgen import wan_files
from vgen.config import Config, FlowSamplerConfig
from vgen.families.sizes import SizeRule, halo_axis
from vgen.models.wan.config import WanArchitecture, architecture
from vgen.parallel.plans import Limits
from vgen.parallel.tiles import TileSettings
from vgen.requests import Request
from vgen.typed import ConfigurationError
from vgen.wan_files import WanCheckpoint

PATCH = 2
"""Latents of a token along height and width."""


def find_files(settings: Config) -> tuple[WanCheckpoint | None, None]:
    model = settings.model
    if model.weights == "random":
        if model.architecture is None:
            raise ConfigurationError(
                f"model={model.name} has no sizes for model.weights=random; set model.architecture"
            )
        return None, None
    assert model.checkpoint is not None
    checkpoint = wan_files.resolve_wan(
        model.checkpoint, model.revision, components=_components(settings), allow_pickle=model.allow_pickle
    )
    return checkpoint, None


def _components(settings: Config) -> tuple[str, ...]:
    """What the task reads."""
    model, task = settings.model, settings.task
    if task.generates:
        experts = ("transformer", "transformer_2") if model.boundary is not None else ("transformer",)
        images = ("image_encoder",) if model.kind == "i2v" and model.version == "2.1" else ()
        return ("text_encoder", *images, *experts, "vae")
    return ("transformer", "vae") if task.name == "bench_step" else ("vae",)


def read_files(checkpoint: Any, text_encoder: Any) -> tuple[WanCheckpoint | None, None]:  # noqa: ARG001
    return (WanCheckpoint.from_mapping(checkpoint) if checkpoint else None), None


def architecture_of(settings: Config, checkpoint: WanCheckpoint | None) -> WanArchitecture:
    if checkpoint is None:
        assert settings.model.architecture is not None
        return architecture(settings.model.architecture)
    return checkpoint.architecture


def size_rule(architecture: WanArchitecture) -> SizeRule:
    vae = architecture.vae
    space = PATCH * vae.scale_factor_spatial
    why = f" ({vae.scale_factor_spatial} pixels a latent, {PATCH} latents a token)"
    return SizeRule(vae.scale_factor_temporal, space, smallest=space, why=why)


def pass_names(request: Request, config: Config) -> tuple[str, ...]:  # noqa: ARG001
    """Of a guided step; with two experts one of them may be guided and the other not."""
    sampler = flow_sampler(config)
    guided = any(scale not in (None, 1) for scale in (sampler.guidance_scale, sampler.guidance_scale_2))
    return ("cond", "uncond") if guided else ("cond",)


def limits(config: Config, requests: tuple[Request, ...], architecture: WanArchitecture) -> Limits:
    vae = architecture.vae
    smallest = min(requests, key=lambda request: request.height * request.width * request.num_frames)
    height, width = (
        min(getattr(one, side) for one in requests) // vae.scale_factor_spatial for side in ("height", "width")
    )
    space = PATCH * vae.scale_factor_spatial
    frames = (smallest.num_frames - 1) // vae.scale_factor_temporal + 1
    return Limits(
        model=f"model={config.model.name}",
        heads={"the attentions": architecture.transformer.num_attention_heads},
        video_tokens=frames * (smallest.height // space) * (smallest.width // space),
        passes=pass_names(smallest, config),
        latent_height=height,
        latent_width=width,
        halo_axis=halo_axis(config, height, width),
        prompts=len(requests),
    )


def tile_settings(config: Config, architecture: WanArchitecture) -> TileSettings:
    """Raises ConfigurationError where the tile sizes do not fit the VAE's compression."""
    vae, sizes = config.model.vae, architecture.vae
    compression = (sizes.scale_factor_temporal, sizes.scale_factor_spatial, sizes.scale_factor_spatial)
    if vae.tile_frames is not None:
        raise ConfigurationError(
            f"model.vae.tile_frames={vae.tile_frames} would cut along time, where Wan's VAE goes by chunks; use null"
        )
    try:
        return TileSettings(vae.tile_size, vae.tile_overlap, None, 0, compression)
    except ValueError as error:
        raise ConfigurationError(f"model.vae: {error}") from None


def validate(
    config: Config, requests: tuple[Request, ...], architecture: WanArchitecture, checkpoint: WanCheckpoint | None
) -> None:
    """Raises ConfigurationError: the first rule that does not hold."""
    _validate_model(config, architecture, checkpoint)
    _validate_sampler(config)
    _validate_vae(config)
    tile_settings(config, architecture)
    for request in requests:
        where = f"request {request.index}: " if len(requests) > 1 else ""
        _validate_positions(request, where, architecture)
        if config.task.generates:
            _validate_request(request, where, config, architecture)


def validate_training(config: Config, architecture: WanArchitecture) -> None:
    """Raises ConfigurationError: the tiny Wan is of 2.2's TI2V, begins without weights and has no sound."""
    if architecture.kind != "ti2v" or config.model.weights != "random":
        raise ConfigurationError(
            f"task=train_tiny trains Wan 2.2 TI2V from nothing, not model={config.model.name} with "
            f"model.weights={config.model.weights}; use experiment=train_wan_tiny"
        )
    stages = ("video_vae", "diffusion", "export")
    if config.train.stage not in stages:
        raise ConfigurationError(
            f"train.stage={config.train.stage} is not of Wan's training; use one of: {', '.join(stages)}"
        )


def _validate_model(config: Config, architecture: WanArchitecture, checkpoint: WanCheckpoint | None) -> None:
    model = config.model
    name = checkpoint.id if checkpoint else f"model={model.name}"
    if (architecture.version, architecture.kind) != (model.version, model.kind):
        raise ConfigurationError(
            f"{name} is Wan {architecture.version} {architecture.kind} and model={model.name} has the defaults of "
            f"{model.version} {model.kind}; use the model option of this checkpoint"
        )
    two = architecture.num_transformers == 2
    if two != (model.boundary is not None) and config.task.name not in ("decode", "bench_decode", "bench_encode"):
        experts, fix = ("two experts", "give 0.875 (text) or 0.9 (image)") if two else ("one transformer", "use null")
        raise ConfigurationError(f"model.boundary={model.boundary} does not fit {name}, which has {experts}; {fix}")
    if model.boundary is not None and not 0 < model.boundary < 1:
        raise ConfigurationError(f"model.boundary={model.boundary} leaves one expert unused; give 0 to 1")
    if model.offload == "expert" and model.boundary is None:
        raise ConfigurationError(
            f"model.offload=expert is for two transformers, and model={model.name} has one; use stages or none"
        )
    if model.text_encoder.max_length < 2:
        raise ConfigurationError(
            f"model.text_encoder.max_length={model.text_encoder.max_length} has no room for a word and its end; "
            f"use 512, with which Wan was trained"
        )


def _validate_sampler(config: Config) -> None:
    sampler = flow_sampler(config)
    if not 0 < sampler.shift < math.inf:
        raise ConfigurationError(f"sampler.shift={sampler.shift} moves no schedule; give a number above 0, 1 for none")
    for name in ("guidance_scale", "guidance_scale_2"):
        value = getattr(sampler, name)
        if value is not None and not 0 <= value < math.inf:
            raise ConfigurationError(f"sampler.{name}={value} is not a scale; give 1 (off) or more")
    if config.model.boundary is not None and sampler.guidance_scale_2 is None:
        raise ConfigurationError(
            "sampler.guidance_scale_2=null, but there are two experts; give the scale at low noise"
        )
    if config.model.boundary is None and sampler.guidance_scale_2 is not None:
        raise ConfigurationError(
            f"sampler.guidance_scale_2={sampler.guidance_scale_2} is for a second expert, and "
            f"model={config.model.name} has one transformer; use null"
        )


def flow_sampler(config: Config) -> FlowSamplerConfig:
    """Raises ConfigurationError: the sampler is LTX-2's."""
    if not isinstance(config.sampler, FlowSamplerConfig):
        raise ConfigurationError("sampler=default is LTX-2's; use sampler=unipc or sampler=euler with Wan")
    return config.sampler


def _validate_vae(config: Config) -> None:
    vae = config.model.vae
    if vae.chunk is not None and vae.chunk < 1:
        raise ConfigurationError(
            f"model.vae.chunk={vae.chunk} latent frames is none; give 1 or more, or null for as many as possible"
        )
    if vae.backend == "diffusers" and vae.chunk not in (None, 1):
        raise ConfigurationError(
            f"model.vae.chunk={vae.chunk} does not fit model.vae.backend=diffusers, which goes frame by frame; use 1"
        )


def _validate_positions(request: Request, where: str, architecture: WanArchitecture) -> None:
    rule, limit = size_rule(architecture), architecture.transformer.rope_max_seq_len
    for name, size, step in (
        ("height", request.height, rule.space),
        ("width", request.width, rule.space),
        ("num_frames", request.num_frames - 1, rule.time),
    ):
        if size // step > limit - (name == "num_frames"):
            raise ConfigurationError(
                f"{where}request.{name}={getattr(request, name)} has more than the transformer's {limit} positions; "
                f"use {(limit - 1) * step + 1 if name == 'num_frames' else limit * step} or less"
            )


def _validate_request(request: Request, where: str, config: Config, architecture: WanArchitecture) -> None:
    if request.audio != "none":
        raise ConfigurationError(f"{where}request.audio={request.audio}, but Wan has no sound; use request.audio=none")
    if request.video is not None:
        raise ConfigurationError(
            f"{where}request.video={request.video} is not read with Wan; give a first frame with request.image"
        )
    for image in request.images:
        if image.strength != 1:
            raise ConfigurationError(
                f"{where}request.images has strength {image.strength}, but Wan keeps an image fully; use 1"
            )
    frames = sorted(image.frame for image in request.images)
    kind, name = architecture.kind, config.model.name
    if kind == "t2v" and frames:
        raise ConfigurationError(
            f"{where}request.image is not read with model={name}, which makes a video of text alone; use an "
            f"image-to-video model"
        )
    if kind == "ti2v" and frames and (frames != [0] or request.num_frames == 1):
        raise ConfigurationError(
            f"{where}request.images at frames {frames} of {request.num_frames} do not fit model={name}, which takes "
            f"the first frame of several; give one image at frame 0"
        )
    if kind == "i2v":
        _validate_image_channels(frames, request, where, name, architecture)


def _validate_image_channels(
    frames: list[int], request: Request, where: str, name: str, architecture: WanArchitecture
) -> None:
    if not frames:
        raise ConfigurationError(f"{where}model={name} makes a video of an image; give one in request.image=<file>")
    transformer = architecture.transformer
    if transformer.image_dim is None:
        return  # a mask says which frames are given: any
    wanted = [0] if transformer.pos_embed_seq_len is None else [0, request.num_frames - 1]
    if frames != wanted:
        raise ConfigurationError(
            f"{where}request.images at frames {frames} do not fit model={name}, which reads the images at {wanted}; "
            f"give those"
        )
