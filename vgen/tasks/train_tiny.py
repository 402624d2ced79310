"""``task=train_tiny``: one stage of training a tiny model, or the export of all of them."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor, nn

from vgen import transforms
from vgen.config import ClipSize, FlowSamplerConfig, StageTraining
from vgen.job import Job
from vgen.models.ltx2.audio_encoder import AudioEncoder
from vgen.models.ltx2.upsampler import LatentUpsampler
from vgen.models.ltx2.video_vae import PerChannelStatistics
from vgen.models.ltx2.vocoder import Vocoder
from vgen.models.wan.vae_blocks import apply_channels_last
from vgen.tasks.types import RankResult, TaskContext
from vgen.tiny.training import audio_vae as audio
from vgen.tiny.training import (
    captions,
    diffusion,
    latents,
    loop,
    ltx2_export,
    samples,
    upsampler,
    video_vae,
    wan_export,
)
from vgen.tiny.training import vocoder as voice
from vgen.tiny.training.data import scenes_of
from vgen.tiny.training.families import FAMILIES, Family
from vgen.tiny.training.store import fill, load_average

MEAN, STD = "mean-of-means", "std-of-means"


def run(context: TaskContext) -> RankResult:
    config = context.job.config.train
    assert config.folder is not None
    # Of the matrix products that autocast leaves in fp32; convolutions take TF32 as they are.
    torch.backends.cuda.matmul.allow_tf32 = True
    STAGES[config.stage](context, Path(config.folder).expanduser())
    return RankResult()


def train_video_vae(context: TaskContext, folder: Path) -> None:
    job, device, config = context.job, context.device, context.job.config.train
    family = _family(job)
    vae: Any = _seeded(config.seed, lambda: family.build_video_vae(job.architecture)).to(device)
    if device.type == "cuda":
        apply_channels_last(vae)

    def look(step: int) -> None:
        _show(context, folder, samples.reconstructions(vae, config, device), step)

    compression = family.compression(job.architecture)
    objective = video_vae.video_objective(vae, compression, family.kl_weight, config, device)
    training = _train(context, folder, vae, objective, look)
    _take_averages(training)
    look(training.step)
    # Measured once, when the weights are final: a state that is gone on from has them too, and measures again.
    vae.latents_mean, vae.latents_std = video_vae.measure_statistics(vae, config, device)
    _finish(context, folder, training, video_vae.peak_ratio(vae, config, device))


def train_audio_vae(context: TaskContext, folder: Path) -> None:
    job, device, config = context.job, context.device, context.job.config.train
    vae = _seeded(config.seed, lambda: audio.AudioVae(job.architecture)).to(device)
    _set_statistics(vae, None)
    training = _train(context, folder, vae, audio.audio_objective(vae, config, device))
    _take_averages(training)
    _set_statistics(vae, audio.measure_statistics(vae, config, device))
    _finish(context, folder, training)


def train_vocoder(context: TaskContext, folder: Path) -> None:
    job, device, config = context.job, context.device, context.job.config.train
    vae = _loaded(audio.AudioVae(job.architecture), folder, "audio_vae", device)
    vocoder = _seeded(config.seed, lambda: voice.build_vocoder(job.architecture)).to(device)
    training = _train(context, folder, vocoder, voice.vocoder_objective(vocoder, vae, config, device))
    _take_averages(training)
    _finish(context, folder, training, voice.frequency_errors(vocoder, vae, config, device))


def train_diffusion(context: TaskContext, folder: Path) -> None:
    job, device, config = context.job, context.device, context.job.config.train
    family, text = _family(job), transforms.text_config(job)
    model = _seeded(config.seed, lambda: family.build_model(text, job.architecture)).to(device)
    vae, statistics = _video_vae(job, folder, device)
    sound, encoder = _sound(job, folder, device)
    decoders = samples.Decoders(family, vae, statistics, sound)
    tables = _build_tables(job, decoders, encoder, device)
    turns = [tables[size] for size in config.diffusion_sizes]
    geometry, length = turns[0].geometry, job.config.model.text_encoder.max_length

    def look(step: int) -> None:
        # The same noise each time, so that the pictures can be compared.
        generator = torch.Generator(device).manual_seed(config.seed)

        def make(tokens: captions.Tokens) -> tuple[Tensor, Tensor | None]:
            return family.generate(model, tokens, turns[0].empty, geometry, job.config.sampler, generator)

        clips = samples.judge(make, decoders, geometry, config, length, device)
        _show(context, folder, samples.generations(clips), step)
        _note(context, folder, step, samples.adherence(clips))

    objective = diffusion.diffusion_objective(model, turns, config)
    training = _train(context, folder, model, objective, look)
    _take_averages(training)
    look(training.step)


def _sound(
    job: Job, folder: Path, device: torch.device
) -> tuple[samples.SoundDecoders, AudioEncoder] | tuple[None, None]:
    """What LTX-2's sound goes through, from latents and to them; Wan has none."""
    if job.config.model.family == "wan":
        return None, None
    vae = _loaded(audio.AudioVae(job.architecture), folder, "audio_vae", device)
    vocoder = _loaded(Vocoder(job.architecture.vocoder), folder, "vocoder", device)
    return samples.SoundDecoders(vae.decoder, vocoder), vae.encoder


def _build_tables(
    job: Job, decoders: samples.Decoders, encoder: AudioEncoder | None, device: torch.device
) -> dict[ClipSize, diffusion.Table]:
    config, length = job.config.train, job.config.model.text_encoder.max_length
    family, text_format = decoders.family, decoders.family.text_format
    scenes = scenes_of(config, 0, config.table_clips)
    ids, mask = captions.caption_tokens(scenes, config.table_captions, length, config.seed, text_format)
    no_ids, no_mask = captions.one_text("", length, text_format)
    tables = {}
    for size in dict.fromkeys(config.diffusion_sizes):
        geometry = family.geometry(size, family.compression(job.architecture))
        video = latents.video_table(decoders.video, decoders.statistics, config, size, device)
        tables[size] = diffusion.Table(
            geometry,
            family.pack(video, geometry),
            None if encoder is None else latents.audio_table(encoder, config, size, geometry.audio_tokens, device),
            (ids.to(device), mask.to(device)),
            (no_ids.to(device), no_mask.to(device)),
            text_format,
        )
    return tables


def train_upsampler(context: TaskContext, folder: Path) -> None:
    job, device, config = context.job, context.device, context.job.config.train
    size = config.sizes[0]
    vae, statistics = _video_vae(job, folder, device)
    module = _seeded(config.seed, lambda: LatentUpsampler(upsampler.upsampler_config(job.architecture, config)))
    small, large = (
        latents.video_table(vae, statistics, config, one, device) for one in (upsampler.half_of(size), size)
    )
    module.to(device)
    training = _train(context, folder, module, upsampler.upsampler_objective(module, small, large, statistics, config))
    _finish(context, folder, training)


def export_all(context: TaskContext, folder: Path) -> None:
    job, text = context.job, transforms.text_config(context.job)
    if job.config.model.family == "wan":
        assert isinstance(job.config.sampler, FlowSamplerConfig)
        wan_export.export(folder, job.architecture, text, job.config.sampler)
        return
    assert job.config.model.architecture is not None
    enlarging = upsampler.official_upsampler_config(upsampler.upsampler_config(job.architecture, job.config.train))
    ltx2_export.export(folder, job.config.model.architecture, text, enlarging)


STAGES: dict[str, Callable[[TaskContext, Path], None]] = {
    "video_vae": train_video_vae,
    "audio_vae": train_audio_vae,
    "vocoder": train_vocoder,
    "diffusion": train_diffusion,
    "upsampler": train_upsampler,
    "export": export_all,
}


def _family(job: Job) -> Family:
    return FAMILIES[job.config.model.family]


def _train(
    context: TaskContext,
    folder: Path,
    module: nn.Module,
    objective: loop.Objective,
    look: Callable[[int], Any] = lambda _: None,
) -> loop.Training:
    config = context.job.config.train
    settings: StageTraining = getattr(config.stages, config.stage)
    training = loop.begin(module, settings)
    started = time.perf_counter()

    def stop(_: int) -> bool:
        return config.minutes is not None and time.perf_counter() - started > 60 * config.minutes

    path = folder / f"{config.stage}.safetensors"
    loop.train(training, objective, settings, path=path, seed=config.seed, log=context.log, stop=stop, look=look)
    return training


def _take_averages(training: loop.Training) -> None:
    """Put the averages in the place of the weights, for what is measured when a stage ends; its file has both."""
    for parameter, average in zip(training.parameters, training.average, strict=True):
        parameter.data.copy_(average)
    training.module.eval()


def _finish(
    context: TaskContext, folder: Path, training: loop.Training, measured: Mapping[str, float] | None = None
) -> None:
    """Store the statistics beside the state, and what was measured beside the losses."""
    loop.store_buffers(training.module, folder / f"{context.job.config.train.stage}.safetensors")
    if measured:
        _note(context, folder, training.step, measured)


def _note(context: TaskContext, folder: Path, step: int, measured: Mapping[str, float]) -> None:
    """Put what was measured beside the losses."""
    stage = context.job.config.train.stage
    loop.append(folder / f"{stage}.jsonl", {"step": step, **measured})
    context.log({f"{stage}/{name}": value for name, value in measured.items()}, step)


def _show(context: TaskContext, folder: Path, image: Image, step: int) -> None:
    stage = context.job.config.train.stage
    image.save(folder / f"{stage}.png")
    context.log_image(f"{stage}/samples", image, step)


def _seeded(seed: int, build: Callable[[], Any]) -> Any:
    """Built on the CPU, so that the initial weights are the same on every device."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def _loaded(module: Any, folder: Path, stage: str, device: torch.device) -> Any:
    """The averaged weights of an earlier stage, frozen."""
    fill(module, load_average(folder, stage), folder / f"{stage}.safetensors")
    return module.to(device).eval().requires_grad_(False)


def _video_vae(job: Job, folder: Path, device: torch.device) -> tuple[nn.Module, PerChannelStatistics]:
    vae: Any = _loaded(_family(job).build_video_vae(job.architecture), folder, "video_vae", device)
    if device.type == "cuda":
        apply_channels_last(vae)
    statistics = PerChannelStatistics(len(vae.latents_mean))
    statistics.load_state_dict({MEAN: vae.latents_mean, STD: vae.latents_std})
    return vae, statistics.to(device)


def _set_statistics(vae: audio.AudioVae, values: tuple[Tensor, Tensor] | None) -> None:
    """Of both halves, in place; 0 and 1 without ``values``."""
    for half in (vae.encoder, vae.decoder):
        for name, value in zip((MEAN, STD), values or (torch.zeros(()), torch.ones(())), strict=True):
            buffer = half.per_channel_statistics.get_buffer(name)
            buffer.copy_(value.expand_as(buffer))
