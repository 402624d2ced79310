"""The whole LTX-2 pipeline against diffusers': same checkpoint, same noise, text to frames and waveform, fp32."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from torch import Tensor

from tests import tiny_ltx2
from vgen import app, transforms
from vgen.config import from_mapping
from vgen.job import Job, plan_job
from vgen.pipelines import ltx2
from vgen.requests import Request, build_requests
from vgen.stages.checks import NumericsError
from vgen.stages.latents import latent_geometry, make_noise

PROMPT, NEGATIVE = "A red fox runs through deep snow", "blurry rain"


class ListSink:
    """Keeps what a pipeline gives, in memory."""

    def __init__(self) -> None:
        self.frames: list[Tensor] = []

    def save_latents(self, video: Tensor, audio: Tensor | None) -> None:
        assert not self.frames, "latents must be saved before anything is decoded"
        self.video, self.audio = video, audio

    def write(self, frames: Iterator[Tensor], waveform: Tensor | None) -> None:
        self.frames, self.waveform = list(frames), waveform


@pytest.fixture(scope="module")
def parts() -> tiny_ltx2.Parts:
    return tiny_ltx2.build_parts()


@pytest.fixture(scope="module")
def files(parts: tiny_ltx2.Parts, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("ltx2")
    return {
        "official": tiny_ltx2.write_official(parts, folder / "official.safetensors"),
        "gemma": tiny_ltx2.write_gemma(parts, folder / "gemma"),
        "diffusers": tiny_ltx2.write_diffusers(parts, folder / "diffusers"),
    }


def make_job(tmp_path: Path, *overrides: str) -> Job:
    with initialize_config_dir(app.conf_dir(), version_base="1.3"):
        composed = OmegaConf.to_container(compose("config", ["quant=fp32", "device=cpu", *overrides]), resolve=True)
    assert isinstance(composed, dict)
    config = from_mapping({str(key): value for key, value in composed.items()})
    return plan_job(config, build_requests(config.request), tmp_path, num_gpus=0, sweep=None)


def official_job(files: dict[str, Path], tmp_path: Path, *overrides: str) -> Job:
    return make_job(
        tmp_path,
        "model.weights=load",
        f"model.checkpoint={files['official']}",
        f"model.text_encoder.checkpoint={files['gemma']}",
        f"model.text_encoder.max_length={tiny_ltx2.TEXT_LENGTH}",
        f"request.prompt={PROMPT}",
        f"request.negative_prompt={NEGATIVE}",
        "request.height=64",
        "request.width=96",
        "request.num_frames=17",
        "sampler.steps=3",
        *overrides,
    )


def generate(job: Job, request: Request | None = None) -> ListSink:
    sink = ListSink()
    components = transforms.build_components(job, torch.device("cpu"))
    ltx2.generate(components, request or job.requests[0], job.config.sampler, sink)
    return sink


def diffusers_pipeline(parts: tiny_ltx2.Parts) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler
    from diffusers.pipelines.ltx2.pipeline_ltx2 import LTX2Pipeline

    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.95, max_shift=2.05, base_image_seq_len=1024, max_image_seq_len=4096,
        shift_terminal=0.1,
    )  # fmt: skip
    pipeline = LTX2Pipeline(
        scheduler=scheduler, vae=parts.vae, audio_vae=parts.audio_vae, text_encoder=parts.text_encoder,
        tokenizer=parts.tokenizer, connectors=parts.connectors, transformer=parts.transformer, vocoder=parts.vocoder,
    )  # fmt: skip
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def relative(ours: Tensor, other: Tensor) -> float:
    return float((ours - other).abs().max() / other.abs().max())


@pytest.mark.parametrize("scales", [(3.0, 0.7, 7.0, 0.7), (1.0, 0.0, 1.0, 0.0), (4.0, 0.0, 1.0, 0.0)])
def test_whole_pipeline_equals_diffusers(
    scales: tuple[float, ...], parts: tiny_ltx2.Parts, files: dict[str, Path], tmp_path: Path
) -> None:
    video_cfg, video_rescale, audio_cfg, audio_rescale = scales
    job = official_job(
        files, tmp_path, "sampler.schedule=diffusers", f"sampler.video.cfg_scale={video_cfg}",
        f"sampler.video.rescale_scale={video_rescale}", f"sampler.audio.cfg_scale={audio_cfg}",
        f"sampler.audio.rescale_scale={audio_rescale}",
    )  # fmt: skip
    ours = generate(job)
    request = job.requests[0]
    noise = make_noise(
        latent_geometry(request), job.architecture, seed=request.seed, device=torch.device("cpu"), dtype=torch.float32
    )
    assert noise.audio is not None
    arguments: dict[str, Any] = {
        "prompt": PROMPT, "negative_prompt": NEGATIVE, "height": 64, "width": 96, "num_frames": 17, "frame_rate": 24.0,
        "num_inference_steps": 3, "guidance_scale": video_cfg, "guidance_rescale": video_rescale,
        "audio_guidance_scale": audio_cfg, "audio_guidance_rescale": audio_rescale, "stg_scale": 0.0,
        "audio_stg_scale": 0.0, "modality_scale": 1.0, "audio_modality_scale": 1.0,
        "max_sequence_length": tiny_ltx2.TEXT_LENGTH, "return_dict": False,
    }  # fmt: skip
    pipeline = diffusers_pipeline(parts)
    # That pipeline normalizes audio latents that it is given, also packed ones; the video's only where they are 5-D.
    audio_noise = noise.audio * parts.audio_vae.latents_std + parts.audio_vae.latents_mean
    video, waveform = pipeline(**arguments, latents=noise.video.clone(), audio_latents=audio_noise, output_type="np")
    frames = ((torch.cat(ours.frames, dim=2)[0].permute(1, 2, 3, 0) + 1) / 2).clamp(0, 1)
    assert relative(frames, torch.from_numpy(np.asarray(video[0]))) <= 1e-5
    assert ours.waveform is not None
    assert relative(ours.waveform, waveform[0].float()) <= 1e-5


def test_official_file_and_diffusers_folder_give_the_same_bits(files: dict[str, Path], tmp_path: Path) -> None:
    official = generate(official_job(files, tmp_path))
    folder = make_job(
        tmp_path,
        "model.weights=load",
        f"model.checkpoint={files['diffusers']}",
        "model.text_encoder.checkpoint=null",
        *(f"{key}" for key in (
            f"model.text_encoder.max_length={tiny_ltx2.TEXT_LENGTH}", f"request.prompt={PROMPT}",
            f"request.negative_prompt={NEGATIVE}", "request.height=64", "request.width=96", "request.num_frames=17",
            "sampler.steps=3",
        )),
    )  # fmt: skip
    other = generate(folder)
    assert torch.equal(official.video, other.video)
    assert torch.equal(official.frames[0], other.frames[0])
    assert official.waveform is not None and other.waveform is not None
    assert torch.equal(official.waveform, other.waveform)


def test_job_file_brings_the_same_job_to_the_ranks(files: dict[str, Path], tmp_path: Path) -> None:
    from vgen.job import read_job

    job = official_job(files, tmp_path)
    job.write()
    again = read_job(job.path)
    assert json.loads(job.path.read_text())["checkpoint"]["path"] == str(files["official"])
    assert (again.config, again.requests, again.architecture) == (job.config, job.requests, job.architecture)
    assert again.checkpoint == job.checkpoint and again.text_encoder == job.text_encoder


def test_official_schedule_is_the_default(files: dict[str, Path], tmp_path: Path) -> None:
    job = official_job(files, tmp_path)
    assert job.config.sampler.schedule == "official"
    assert not torch.equal(
        generate(job).video, generate(official_job(files, tmp_path, "sampler.schedule=diffusers")).video
    )


def test_no_audio_runs_no_audio_stream(files: dict[str, Path], tmp_path: Path) -> None:
    sink = generate(official_job(files, tmp_path, "request.audio=false"))
    assert sink.audio is None and sink.waveform is None
    assert torch.cat(sink.frames, dim=2).shape == (1, 3, 17, 64, 96)


def test_noise_of_the_video_does_not_depend_on_the_audio(files: dict[str, Path], tmp_path: Path) -> None:
    job = official_job(files, tmp_path)
    request = job.requests[0]
    silent = dataclasses.replace(request, audio=False)
    with_audio, without = (
        make_noise(latent_geometry(r), job.architecture, seed=5, device=torch.device("cpu"), dtype=torch.float32)
        for r in (request, silent)
    )
    assert torch.equal(with_audio.video, without.video)


def test_a_pass_that_no_scale_asks_for_is_not_run(files: dict[str, Path], tmp_path: Path) -> None:
    calls = []
    job = official_job(files, tmp_path, "sampler.video.cfg_scale=1", "sampler.audio.cfg_scale=1")
    components = transforms.build_components(job, torch.device("cpu"))
    components.transformer.register_forward_hook(lambda *_: calls.append(1))
    ltx2.generate(components, job.requests[0], job.config.sampler, ListSink())
    assert len(calls) == 3


def test_tiled_decode_runs_and_names_its_tiles(files: dict[str, Path], tmp_path: Path) -> None:
    sizes = ("request.height=128", "request.num_frames=33", "model.vae.tile_size=64", "model.vae.tile_overlap=32")
    times = ("model.vae.tile_frames=16", "model.vae.tile_frames_overlap=8")
    whole = generate(official_job(files, tmp_path, *sizes, *times))
    tiled_job = official_job(files, tmp_path, *sizes, *times, "parallel.vae_strategy=tile")
    tiled = generate(tiled_job)
    assert len(transforms.plan_decode(tiled_job, tiled_job.requests[0])) > 8
    assert len(tiled.frames) > 1
    assert torch.equal(whole.video, tiled.video)
    assert torch.cat(tiled.frames, dim=2).shape == torch.cat(whole.frames, dim=2).shape


def test_nan_weights_fail_by_name_after_the_first_step(files: dict[str, Path], tmp_path: Path) -> None:
    job = official_job(files, tmp_path)
    components = transforms.build_components(job, torch.device("cpu"))
    components.transformer.proj_out.weight[0, 0] = float("nan")
    sink = ListSink()
    with pytest.raises(NumericsError, match="the video latents are NaN or infinite after step 1"):
        ltx2.generate(components, job.requests[0], job.config.sampler, sink)
    assert not hasattr(sink, "video")


def test_nan_latents_fail_by_name_before_decode(files: dict[str, Path], tmp_path: Path) -> None:
    components = transforms.build_components(official_job(files, tmp_path), torch.device("cpu"))
    latents = torch.zeros(1, 16, 3, 2, 3)
    latents[0, 0, 0, 0, 0] = float("inf")
    with pytest.raises(NumericsError, match="before decode"):
        ltx2.decode(components.decoders, latents, None, ListSink())
