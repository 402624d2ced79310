"""Rules across settings, each with its sentence; runs before any process starts or any weight loads."""

import dataclasses
import math
from itertools import pairwise
from pathlib import Path

from vgen import media_probe
from vgen.checkpoint_files import Checkpoint
from vgen.config import (
    ClipSize,
    Config,
    GuidanceConfig,
    RequestConfig,
    SamplerConfig,
    ScoreConfig,
    TrainConfig,
    VaeConfig,
)
from vgen.models.ltx2.config import VIDEO_COMPRESSION, LTX2Config
from vgen.parallel.tiles import TileSettings
from vgen.requests import Request
from vgen.typed import ConfigurationError

DISTILLED_STEPS = 8
"""Steps of the schedule that distilled checkpoints were trained for."""


def validate(
    config: Config,
    requests: tuple[Request, ...],
    architecture: LTX2Config,
    num_gpus: int | None,
    checkpoint: Checkpoint | None = None,
) -> None:
    """Check everything that can be known from the configuration, the checkpoint's header, the files and the machine.

    ``num_gpus`` is None where it could not be told.

    Raises:
        ConfigurationError: the first rule that does not hold.
    """
    _validate_parallel(config, num_gpus)
    _validate_sampler(config, architecture)
    _validate_checkpoint(config, architecture, checkpoint)
    _validate_output(config)
    if config.task.name == "score":
        _validate_score(config.score, config.request)
    if config.task.name == "train_tiny":
        _validate_training(config, architecture)
    for request in requests:
        validate_request(request, several=len(requests) > 1)
        if config.task.name == "bench_step" and not request.has_audio:
            raise ConfigurationError("task=bench_step runs video and audio together; use request.audio=generate")
        if config.task.generates:
            _validate_inputs(request, f"request {request.index}: " if len(requests) > 1 else "", config.sampler)
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


def _validate_sampler(config: Config, architecture: LTX2Config) -> None:
    sampler = config.sampler
    if sampler.steps < 1:
        raise ConfigurationError(f"sampler.steps={sampler.steps} denoises nothing; give 1 or more")
    _validate_sigmas(sampler)
    for name in ("video", "audio"):
        _validate_guidance(f"sampler.{name}", getattr(sampler, name), architecture.transformer.num_layers)
    if config.bench.warmup < 0:
        raise ConfigurationError(f"bench.warmup={config.bench.warmup} is negative; give 0 or more")
    if config.bench.repeats < 1:
        raise ConfigurationError(f"bench.repeats={config.bench.repeats} runs nothing; give 1 or more")


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


MODELS = {
    ("2.0", "dev"): "ltx2",
    ("2.0", "distilled"): "ltx2_distilled",
    ("2.3", "dev"): "ltx2_3",
    ("2.3", "distilled"): "ltx2_3_distilled",
}
"""The model group's option with the defaults of each checkpoint."""


def _validate_checkpoint(config: Config, architecture: LTX2Config, checkpoint: Checkpoint | None) -> None:
    """Steps, guidance and schedule are those of one version and kind; the file's own word on both counts for more."""
    kind = (checkpoint.kind if checkpoint else None) or config.model.kind
    version, sampler = architecture.version, config.sampler
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


def _validate_output(config: Config) -> None:
    if config.task.name in ("generate", "decode") and not config.output.save:
        raise ConfigurationError("output.save=[] would throw the video away; give one or more of mp4, latents, frames")
    if not 0 <= config.output.video_crf <= 51:
        raise ConfigurationError(f"output.video_crf={config.output.video_crf} is outside H.264's 0 (best) to 51")
    if config.task.latents is not None and not Path(config.task.latents).exists():
        raise ConfigurationError(
            f"task.latents={config.task.latents} does not exist; give a run's folder or latents file"
        )


def _validate_score(score: ScoreConfig, request: RequestConfig) -> None:
    """The task brings prompts and inputs of its own; the rest of the request is what it makes them at."""
    counts = dataclasses.asdict(score)
    for name, count in counts.items():
        if count < 0:
            raise ConfigurationError(f"score.{name}={count} is negative; give 0 (leaves it out) or more")
    if not any(counts.values()):
        raise ConfigurationError(f"task=score has nothing to do; give 1 or more for one of: {', '.join(counts)}")
    for name in ("prompts_file", "image", "images", "video", "sound"):
        if value := getattr(request, name):
            raise ConfigurationError(f"request.{name}={value} is not read with task=score; leave it out")
    if request.audio == "copy":
        raise ConfigurationError("request.audio=copy has no sound to judge with task=score; use generate or none")
    if request.num_frames == 1:
        raise ConfigurationError("request.num_frames=1 has no motion that task=score could judge; use 9 or more")


MOST_DIFFUSION_SIZES = 4
"""Of one training: the transformer keeps its position tables for as many, and captured steps read them in place."""


def _validate_training(config: Config, architecture: LTX2Config) -> None:
    train = config.train
    if train.folder is None:
        raise ConfigurationError("train.folder is not set; give the folder that keeps the stages: train.folder=FOLDER")
    if config.parallel.data_size > 1:
        raise ConfigurationError("task=train_tiny runs on one device; use parallel.data_size=1")
    if architecture.version != "2.0" or config.model.weights != "random":
        raise ConfigurationError(
            f"task=train_tiny trains LTX-2 2.0 from nothing, not model={config.model.name} with "
            f"model.weights={config.model.weights}; use experiment=train_ltx2_tiny"
        )
    _validate_training_sizes(train)
    for name in ("table_clips", "table_captions", "judged_clips", "upsampler_channels"):
        if getattr(train, name) < 1:
            raise ConfigurationError(f"train.{name}={getattr(train, name)} is too few; give 1 or more")
    for name in ("caption_dropout", "unknown_words", "image_conditioning"):
        if not 0 <= getattr(train, name) <= 1:
            raise ConfigurationError(f"train.{name}={getattr(train, name)} is no part of 1; give 0 to 1")
    for field in dataclasses.fields(train.stages):
        stage = getattr(train.stages, field.name)
        for name in ("steps", "batch_size"):
            if getattr(stage, name) < 1:
                raise ConfigurationError(
                    f"train.stages.{field.name}.{name}={getattr(stage, name)} is too few; give 1 or more"
                )


def _validate_training_sizes(train: TrainConfig) -> None:
    for group in ("sizes", "diffusion_sizes"):
        sizes = getattr(train, group)
        if not sizes:
            raise ConfigurationError(f"train.{group}=[] has no clips; give one size or more")
        for index, size in enumerate(sizes):
            _validate_size(f"train.{group}[{index}]", size)
    # Halved for the upsampler.
    time, *space = VIDEO_COMPRESSION
    for name, step in zip(("height", "width"), space, strict=True):
        _validate_multiple(
            f"train.sizes[0].{name}", getattr(train.sizes[0], name), 2 * step, offset=0, smallest=2 * step
        )
    different = set(train.diffusion_sizes)
    tokens = {(size.num_frames // time + 1) * size.height * size.width for size in different}
    if len(tokens) < len(different) or len(tokens) > MOST_DIFFUSION_SIZES:
        raise ConfigurationError(
            f"train.diffusion_sizes has {len(different)} sizes with {len(tokens)} different numbers of tokens; give at "
            f"most {MOST_DIFFUSION_SIZES}, each with a number of its own"
        )


def _validate_size(where: str, size: Request | ClipSize) -> None:
    time, *space = VIDEO_COMPRESSION
    for name, step in zip(("height", "width"), space, strict=True):
        _validate_multiple(f"{where}.{name}", getattr(size, name), step, offset=0, smallest=2 * step)
    _validate_multiple(f"{where}.num_frames", size.num_frames, time, offset=1, smallest=1)


def validate_request(request: Request, several: bool = False) -> None:
    """Sizes the model can make: multiples of the VAE's compression, ``8k + 1`` frames.

    Raises:
        ConfigurationError: with the two nearest legal values.
    """
    where = f"request {request.index}: " if several else ""
    _validate_size(f"{where}request", request)
    if not (math.isfinite(request.fps) and 1 <= request.fps <= 240):
        raise ConfigurationError(f"{where}request.fps={request.fps} is outside 1 to 240 frames per second")
    if not 0 <= request.seed < 2**63:
        raise ConfigurationError(f"{where}request.seed={request.seed} is outside 0 to 2^63 - 1")


def _validate_inputs(request: Request, where: str, sampler: SamplerConfig) -> None:
    """The files that a request brings, and whether they fit what it asks for."""
    try:
        frames, strengths = [image.frame for image in request.images], [image.strength for image in request.images]
        media_probe.validate_images(frames, strengths, request.num_frames)
        for image in request.images:
            media_probe.probe_image(Path(image.path))
        if request.video is not None:
            media_probe.validate_video(Path(request.video), request.num_frames, request.fps)
    except ConfigurationError as error:
        raise ConfigurationError(f"{where}{error}") from None
    if not 0 <= request.image_crf <= 51:
        raise ConfigurationError(f"{where}request.image_crf={request.image_crf} is outside 0 (off) to H.264's 51")
    if not 0 < request.noise_level <= 1:
        raise ConfigurationError(f"{where}request.noise_level={request.noise_level} is outside 0 to 1 (nothing kept)")
    _validate_start(request, where, sampler)
    _validate_sound(request, where)


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


def _validate_sound(request: Request, where: str) -> None:
    source = request.sound_source
    if request.sound is not None and source is None:
        raise ConfigurationError(
            f"{where}request.sound={request.sound} is not read with request.audio={request.audio} and no clip to start "
            f"from; use request.audio=copy to keep it"
        )
    if source is None and request.audio == "copy":
        raise ConfigurationError(
            f"{where}request.audio=copy has no sound to keep; give request.sound=<file> or use request.audio=generate"
        )
    if source is not None and not media_probe.has_sound(Path(source)):
        raise ConfigurationError(
            f"{where}{source} has no sound, which request.audio={request.audio} needs; use "
            f"request.sound=<file with sound> or request.audio=none"
        )


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
