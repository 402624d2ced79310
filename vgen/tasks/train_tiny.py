"""``task=train_tiny``: one stage of training the tiny LTX-2, or the export of all of them."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vgen import transforms
from vgen.config import StageTraining
from vgen.job import Job
from vgen.models.ltx2.upsampler import LatentUpsampler
from vgen.models.ltx2.video_vae import PerChannelStatistics
from vgen.models.ltx2.vocoder import Vocoder
from vgen.stages.latents import pack_video
from vgen.tasks.types import RankResult, TaskContext
from vgen.tiny.training import audio_vae as audio
from vgen.tiny.training import captions, diffusion, latents, loop, upsampler, video_vae
from vgen.tiny.training import vocoder as voice
from vgen.tiny.training.data import scenes_of
from vgen.tiny.training.export import export
from vgen.tiny.training.store import load_average
from vgen.typed import ConfigurationError

MEAN, STD = "mean-of-means", "std-of-means"


def run(context: TaskContext) -> RankResult:
    config = context.job.config.train
    if config.folder is None:
        raise ConfigurationError(
            "train.folder is not set; give the folder that keeps the stages: train.folder=<folder>"
        )
    if context.job.config.parallel.data_size > 1:
        raise ConfigurationError("task=train_tiny runs on one device; use parallel.data_size=1")
    _require_diffusers()
    STAGES[config.stage](context, Path(config.folder))
    return RankResult()


def train_video_vae(context: TaskContext, folder: Path) -> None:
    job, device, config = context.job, context.device, context.job.config.train
    vae: Any = _seeded(config.seed, lambda: video_vae.build_video_vae(job.architecture)).to(device)
    if device.type == "cuda":
        vae.to(memory_format=torch.channels_last_3d)
    training = _train(context, folder, vae, video_vae.video_loss(vae, config, device))
    _take_averages(training)
    # Measured once, when the weights are final: a state that is gone on from has them too, and measures again.
    vae.latents_mean, vae.latents_std = video_vae.measure_statistics(vae, config, device)
    _finish(context, folder, training, video_vae.peak_ratio(vae, config, config.sizes[0], device))


def train_audio_vae(context: TaskContext, folder: Path) -> None:
    job, device, config = context.job, context.device, context.job.config.train
    vae = _seeded(config.seed, lambda: audio.AudioVae(job.architecture)).to(device)
    _set_statistics(vae, None)
    training = _train(context, folder, vae, audio.audio_loss(vae, config, device))
    _take_averages(training)
    _set_statistics(vae, audio.measure_statistics(vae, config, device))
    _finish(context, folder, training, {})


def train_vocoder(context: TaskContext, folder: Path) -> None:
    job, device, config = context.job, context.device, context.job.config.train
    vae = _loaded(audio.AudioVae(job.architecture), folder, "audio_vae", device)
    vocoder = _seeded(config.seed, lambda: Vocoder(job.architecture.vocoder)).to(device)
    training = _train(context, folder, vocoder, voice.vocoder_loss(vocoder, vae, config, device))
    _take_averages(training)
    _finish(context, folder, training, voice.frequency_errors(vocoder, vae, config, device))


def train_diffusion(context: TaskContext, folder: Path) -> None:
    job, device, config = context.job, context.device, context.job.config.train
    text, size = transforms.text_config(job), config.sizes[0]
    model = _seeded(config.seed, lambda: diffusion.DiffusionModel(text, job.architecture)).to(device)
    table = _build_table(job, folder, device)
    _train(context, folder, model, diffusion.diffusion_loss(model, table, latents.geometry_of(size), config))


def _build_table(job: Job, folder: Path, device: torch.device) -> diffusion.Table:
    config, length = job.config.train, job.config.model.text_encoder.max_length
    size = config.sizes[0]
    vae, statistics = _video_vae(job, folder, device)
    encoder = _loaded(audio.AudioVae(job.architecture), folder, "audio_vae", device).encoder
    scenes = scenes_of(config, 0, config.table_clips)
    tokens = captions.caption_tokens(scenes, config.table_captions, length, config.seed)
    empty = captions.one_text("", length)
    return diffusion.Table(
        pack_video(latents.video_table(vae, statistics, config, size, device)),
        latents.audio_table(encoder, config, size, device),
        (tokens[0].to(device), tokens[1].to(device)),
        (empty[0].to(device), empty[1].to(device)),
    )


def train_upsampler(context: TaskContext, folder: Path) -> None:
    job, device, config = context.job, context.device, context.job.config.train
    size = config.sizes[0]
    vae, statistics = _video_vae(job, folder, device)
    module = _seeded(config.seed, lambda: LatentUpsampler(upsampler.upsampler_config(job.architecture, config)))
    small, large = (
        latents.video_table(vae, statistics, config, one, device) for one in (upsampler.half_of(size), size)
    )
    module.to(device)
    _train(context, folder, module, upsampler.upsampler_loss(module, small, large, statistics, config))


def export_all(context: TaskContext, folder: Path) -> None:
    job = context.job
    assert job.config.model.architecture is not None
    enlarging = upsampler.official_upsampler_config(upsampler.upsampler_config(job.architecture, job.config.train))
    export(folder, job.config.model.architecture, transforms.text_config(job), enlarging)


STAGES: dict[str, Callable[[TaskContext, Path], None]] = {
    "video_vae": train_video_vae,
    "audio_vae": train_audio_vae,
    "vocoder": train_vocoder,
    "diffusion": train_diffusion,
    "upsampler": train_upsampler,
    "export": export_all,
}


def _train(context: TaskContext, folder: Path, module: nn.Module, loss_of: loop.LossOf) -> loop.Training:
    config = context.job.config.train
    settings: StageTraining = getattr(config.stages, config.stage)
    training = loop.begin(module, settings)
    started = time.perf_counter()

    def stop(_: int) -> bool:
        return config.minutes is not None and time.perf_counter() - started > 60 * config.minutes

    path = folder / f"{config.stage}.safetensors"
    loop.train(training, loss_of, settings, path=path, seed=config.seed, log=context.log, stop=stop)
    return training


def _take_averages(training: loop.Training) -> None:
    """Put the averages in the place of the weights, for what is measured when a stage ends; its file has both."""
    for parameter, average in zip(training.parameters, training.average, strict=True):
        parameter.data.copy_(average)
    training.module.eval()


def _finish(context: TaskContext, folder: Path, training: loop.Training, measured: dict[str, float]) -> None:
    """Store the statistics beside the state, and what was measured beside the losses."""
    path = folder / f"{context.job.config.train.stage}.safetensors"
    loop.store_buffers(training.module, path)
    if measured:
        loop.append(path.with_suffix(".jsonl"), {"step": training.step, **measured})
        context.log({f"{path.stem}/{name}": value for name, value in measured.items()}, training.step)


def _seeded(seed: int, build: Callable[[], Any]) -> Any:
    """Built on the CPU, so that the initial weights are the same on every device."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def _loaded(module: Any, folder: Path, stage: str, device: torch.device) -> Any:
    """The averaged weights of an earlier stage, frozen."""
    module.load_state_dict(load_average(folder, stage))
    return module.to(device).eval().requires_grad_(False)


def _video_vae(job: Job, folder: Path, device: torch.device) -> tuple[nn.Module, PerChannelStatistics]:
    vae: Any = _loaded(video_vae.build_video_vae(job.architecture), folder, "video_vae", device)
    statistics = PerChannelStatistics(len(vae.latents_mean))
    statistics.load_state_dict({MEAN: vae.latents_mean, STD: vae.latents_std})
    return vae, statistics.to(device)


def _set_statistics(vae: audio.AudioVae, values: tuple[Tensor, Tensor] | None) -> None:
    """Of both halves, in place; 0 and 1 without ``values``."""
    for half in (vae.encoder, vae.decoder):
        for name, value in zip((MEAN, STD), values or (torch.zeros(()), torch.ones(())), strict=True):
            buffer = half.per_channel_statistics.get_buffer(name)
            buffer.copy_(value.expand_as(buffer))


def _require_diffusers() -> None:
    try:
        import diffusers  # noqa: F401
    except ImportError:
        raise ConfigurationError(
            "task=train_tiny needs diffusers, which is not installed; pip install 'vgen[train]'"
        ) from None
