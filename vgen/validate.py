"""Rules across settings, each with its sentence; runs before any process starts or any weight loads."""

import dataclasses
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from vgen import media_probe
from vgen.config import BenchConfig, Config, RequestConfig, ScoreConfig, TrainConfig
from vgen.families import family_of
from vgen.families.sizes import SizeRule
from vgen.job import plan_of
from vgen.parallel.plans import ParallelPlan, layout_reasons, reasons
from vgen.requests import Request
from vgen.typed import ConfigurationError


def validate(
    config: Config,
    requests: tuple[Request, ...],
    architecture: Any,
    num_gpus: int | None,
    checkpoint: Any = None,
) -> None:
    """Check everything that can be known from the configuration, the checkpoint's header, the files and the machine.

    ``num_gpus`` is None where it could not be told; ``architecture`` and ``checkpoint`` are of the model's family.

    Raises:
        ConfigurationError: the first rule that does not hold.
    """
    family = family_of(config)
    rule = family.size_rule(architecture)
    if config.sampler.steps < 1:
        raise ConfigurationError(f"sampler.steps={config.sampler.steps} denoises nothing; give 1 or more")
    _validate_bench(config.bench)
    _validate_output(config)
    if config.task.name == "score":
        _validate_score(config.score, config.request)
    if config.task.name == "train_tiny":
        family.validate_training(config, architecture)
        _validate_training(config, rule)
    for request in requests:
        validate_request(request, rule, several=len(requests) > 1)
        if config.task.generates:
            _validate_inputs(request, f"request {request.index}: " if len(requests) > 1 else "")
    family.validate(config, requests, architecture, checkpoint)
    _validate_parallel(config, requests, architecture, num_gpus)
    _validate_graph(config, num_gpus)


def _validate_bench(bench: BenchConfig) -> None:
    if bench.warmup < 0:
        raise ConfigurationError(f"bench.warmup={bench.warmup} is negative; give 0 or more")
    if bench.repeats < 1:
        raise ConfigurationError(f"bench.repeats={bench.repeats} runs nothing; give 1 or more")


def _validate_parallel(config: Config, requests: tuple[Request, ...], architecture: Any, num_gpus: int | None) -> None:
    plan = plan_of(config, requests)
    for sentence in _reasons(config, plan, requests, architecture):
        raise ConfigurationError(sentence)
    _validate_vae_strategy(config)
    if config.measure.drift and plan.replica_size > plan.denoise_size:
        raise ConfigurationError(
            f"measure.drift=true compares ranks that denoise, and {plan.replica_size - plan.denoise_size} rank(s) of "
            f"parallel.vae_size={plan.vae_size} only decode; use vae_size={plan.denoise_size} or less"
        )
    if config.launcher.inline and plan.world_size > 1:
        raise ConfigurationError(
            f"launcher.inline=true runs one rank in this process, but the plan has {plan.world_size}; "
            f"use parallel=pvs1 or launcher.inline=false"
        )
    if not config.task.needs_weights:
        return
    if config.device == "cuda" and num_gpus == 0:
        raise ConfigurationError("device=cuda, but this machine shows no CUDA device; use device=cpu")
    if config.device != "cpu" and num_gpus and plan.world_size > num_gpus:
        raise ConfigurationError(
            f"the plan has {plan.world_size} ranks and this machine shows {num_gpus} CUDA device(s); use a plan of "
            f"{num_gpus} (task=plan lists them) or device=cpu"
        )


def _reasons(config: Config, plan: ParallelPlan, requests: tuple[Request, ...], architecture: Any) -> tuple[str, ...]:
    """Why the plan cannot run this task."""
    if sentences := layout_reasons(plan):
        return sentences
    task, limits = config.task.name, family_of(config).limits(config, requests, architecture)
    if task == "plan":
        return ()  # it lists which plans can run
    if task in ("generate", "preflight"):
        return reasons(plan, limits)
    if task == "bench_step":
        return reasons(replace(plan, vae_size=1), limits)
    if task in ("decode", "bench_decode", "bench_encode"):
        # Nothing denoises: how the passes and tokens would be spread is not looked at.
        return reasons(ParallelPlan(vae_size=plan.vae_size), limits)
    if task != "train_tiny" and plan.world_size > plan.data_size:
        return (f"task={task} spreads prompts over ranks and nothing else; use parallel=pvs1 and parallel.data_size",)
    return ()


def _validate_graph(config: Config, num_gpus: int | None) -> None:
    graph, offload = config.graph, config.model.offload
    for name in ("warmup", "max_graphs"):
        if getattr(graph, name) < 1:
            raise ConfigurationError(f"graph.{name}={getattr(graph, name)} is too few; give 1 or more")
    if not graph.captures or not config.task.needs_weights:
        return
    if config.device == "cpu" or num_gpus == 0:
        raise ConfigurationError(
            f"graph={graph.mode} captures CUDA graphs, and this run is on the CPU; use graph=compile or graph=eager"
        )
    if offload in ("stages", "expert"):
        raise ConfigurationError(
            f"graph={graph.mode} keeps the addresses of the weights, which model.offload={offload} moves; use "
            f"model.offload=none or text_encoder, or graph=compile"
        )
    if graph.strict and not config.bench.warmup:
        raise ConfigurationError(
            "graph.strict=true allows only what the warm-up captured, and bench.warmup=0 has none; use bench.warmup=1"
        )


def _validate_vae_strategy(config: Config) -> None:
    parallel = config.parallel
    if parallel.vae_strategy == "whole" and parallel.vae_size > 1:
        raise ConfigurationError(
            f"parallel.vae_strategy=whole decodes on one rank, and parallel.vae_size={parallel.vae_size}; "
            f"use halo, which is as exact, or parallel.vae_size=1"
        )


def _validate_output(config: Config) -> None:
    if config.task.name in ("generate", "preflight", "decode") and not config.output.save:
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


def _validate_training(config: Config, rule: SizeRule) -> None:
    train = config.train
    if train.folder is None:
        raise ConfigurationError("train.folder is not set; give the folder that keeps the stages: train.folder=FOLDER")
    if config.parallel.world_size > 1:
        raise ConfigurationError("task=train_tiny runs on one device; use parallel=pvs1 parallel.data_size=1")
    _validate_training_sizes(train, rule)
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


def _validate_training_sizes(train: TrainConfig, rule: SizeRule) -> None:
    for group in ("sizes", "diffusion_sizes"):
        sizes = getattr(train, group)
        if not sizes:
            raise ConfigurationError(f"train.{group}=[] has no clips; give one size or more")
        for index, size in enumerate(sizes):
            rule.validate(f"train.{group}[{index}]", size)
    rule.validate_halved("train.sizes[0]", train.sizes[0])  # for the upsampler
    different = set(train.diffusion_sizes)
    tokens = {rule.tokens(size) for size in different}
    if len(tokens) < len(different) or len(tokens) > MOST_DIFFUSION_SIZES:
        raise ConfigurationError(
            f"train.diffusion_sizes has {len(different)} sizes with {len(tokens)} different numbers of tokens; give at "
            f"most {MOST_DIFFUSION_SIZES}, each with a number of its own"
        )


def validate_request(request: Request, rule: SizeRule, several: bool = False) -> None:
    """Sizes the model can make: multiples of the VAE's compression, its number of frames + 1.

    Raises:
        ConfigurationError: with the two nearest legal values.
    """
    where = f"request {request.index}: " if several else ""
    rule.validate(f"{where}request", request)
    if not (math.isfinite(request.fps) and 1 <= request.fps <= 240):
        raise ConfigurationError(f"{where}request.fps={request.fps} is outside 1 to 240 frames per second")
    if not 0 <= request.seed < 2**63:
        raise ConfigurationError(f"{where}request.seed={request.seed} is outside 0 to 2^63 - 1")


def _validate_inputs(request: Request, where: str) -> None:
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
    _validate_sound(request, where)


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
