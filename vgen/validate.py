"""Rules across settings, each with its sentence; runs before any process starts or any weight loads."""

import math
from pathlib import Path

from vgen.config import Config, GuidanceConfig, VaeConfig
from vgen.models.ltx2.config import VIDEO_COMPRESSION, LTX2Config
from vgen.parallel.tiles import TileSettings
from vgen.requests import Request
from vgen.typed import ConfigurationError


def validate(config: Config, requests: tuple[Request, ...], architecture: LTX2Config, num_gpus: int | None) -> None:
    """Check everything that can be known from the configuration, the checkpoint's header and the machine.

    ``num_gpus`` is None where it could not be told.

    Raises:
        ConfigurationError: the first rule that does not hold.
    """
    _validate_parallel(config, num_gpus)
    _validate_sampler(config)
    _validate_output(config)
    for request in requests:
        validate_request(request, several=len(requests) > 1)
    _validate_text(config, architecture)
    tile_settings(config.model.vae)


def tile_settings(vae: VaeConfig) -> TileSettings:
    """Raises ConfigurationError where the tile sizes do not fit the VAE's compression."""
    try:
        return TileSettings(vae.tile_size, vae.tile_overlap, vae.tile_frames, vae.tile_frames_overlap)
    except ValueError as error:
        raise ConfigurationError(f"model.vae: {error}") from None


def _validate_parallel(config: Config, num_gpus: int | None) -> None:
    parallel = config.parallel
    for name in ("data_size", "cfg_size", "ulysses_size", "vae_size"):
        if getattr(parallel, name) < 1:
            raise ConfigurationError(
                f"parallel.{name}={getattr(parallel, name)} is not a number of ranks; give 1 or more"
            )
    for name in ("cfg_size", "ulysses_size", "vae_size"):
        if getattr(parallel, name) > 1:
            raise ConfigurationError(
                f"parallel.{name}={getattr(parallel, name)} is not built yet: this version spreads prompts only; "
                f"use parallel.{name}=1 and parallel.data_size"
            )
    if config.launcher.inline and parallel.world_size > 1:
        raise ConfigurationError(
            f"launcher.inline=true runs one rank in this process, but the plan has {parallel.world_size}; "
            f"use parallel=pvs1 or launcher.inline=false"
        )
    if config.device == "cuda" and num_gpus == 0:
        raise ConfigurationError("device=cuda, but this machine shows no CUDA device; use device=cpu")
    if config.device != "cpu" and num_gpus and parallel.world_size > num_gpus:
        raise ConfigurationError(
            f"the plan has {parallel.world_size} ranks and this machine shows {num_gpus} CUDA device(s); "
            f"use parallel.data_size={num_gpus} or device=cpu"
        )


def _validate_sampler(config: Config) -> None:
    sampler = config.sampler
    if sampler.steps < 1:
        raise ConfigurationError(f"sampler.steps={sampler.steps} denoises nothing; give 1 or more")
    for name in ("video", "audio"):
        _validate_guidance(f"sampler.{name}", getattr(sampler, name))
    if config.bench.warmup < 0:
        raise ConfigurationError(f"bench.warmup={config.bench.warmup} is negative; give 0 or more")
    if config.bench.repeats < 1:
        raise ConfigurationError(f"bench.repeats={config.bench.repeats} runs nothing; give 1 or more")


def _validate_guidance(path: str, guidance: GuidanceConfig) -> None:
    if not math.isfinite(guidance.cfg_scale) or guidance.cfg_scale < 0:
        raise ConfigurationError(f"{path}.cfg_scale={guidance.cfg_scale} is not a scale; give 1 (off) or more")
    if not 0 <= guidance.rescale_scale <= 1:
        raise ConfigurationError(f"{path}.rescale_scale={guidance.rescale_scale} is outside 0 (off) to 1")


def _validate_output(config: Config) -> None:
    if config.task.name in ("generate", "decode") and not config.output.save:
        raise ConfigurationError("output.save=[] would throw the video away; give one or more of mp4, latents, frames")
    if not 0 <= config.output.video_crf <= 51:
        raise ConfigurationError(f"output.video_crf={config.output.video_crf} is outside H.264's 0 (best) to 51")
    if config.task.latents is not None and not Path(config.task.latents).exists():
        raise ConfigurationError(
            f"task.latents={config.task.latents} does not exist; give a run's folder or latents file"
        )


def validate_request(request: Request, several: bool = False) -> None:
    """Sizes the model can make: multiples of the VAE's compression, ``8k + 1`` frames.

    Raises:
        ConfigurationError: with the two nearest legal values.
    """
    where = f"request {request.index}: " if several else ""
    time, *space = VIDEO_COMPRESSION
    for name, step in zip(("height", "width"), space, strict=True):
        _validate_multiple(f"{where}request.{name}", getattr(request, name), step, offset=0, smallest=2 * step)
    _validate_multiple(f"{where}request.num_frames", request.num_frames, time, offset=1, smallest=1)
    if not (math.isfinite(request.fps) and 1 <= request.fps <= 240):
        raise ConfigurationError(f"{where}request.fps={request.fps} is outside 1 to 240 frames per second")
    if not 0 <= request.seed < 2**63:
        raise ConfigurationError(f"{where}request.seed={request.seed} is outside 0 to 2^63 - 1")


def _validate_multiple(name: str, value: int, step: int, *, offset: int, smallest: int) -> None:
    if value >= smallest and (value - offset) % step == 0:
        return
    below = (value - offset) // step * step + offset
    nearest = f"{below} or {below + step}" if below >= smallest else f"{smallest}"
    rule = f"a multiple of {step}" if offset == 0 else f"{step}k + {offset}"
    floor = f" and at least {smallest}" if value < smallest else ""
    raise ConfigurationError(f"{name}={value} is not {rule}{floor}; use {nearest}")


def _validate_text(config: Config, architecture: LTX2Config) -> None:
    length = config.model.text_encoder.max_length
    registers = architecture.video_connector.num_registers
    if length < 1 or length % registers:
        raise ConfigurationError(
            f"model.text_encoder.max_length={length} is not a multiple of the connectors' {registers} registers; "
            f"use {max(1, round(length / registers)) * registers}"
        )
