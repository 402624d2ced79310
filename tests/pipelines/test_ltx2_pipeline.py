"""The whole LTX-2 pipeline against diffusers': same checkpoint, same noise, text to frames and waveform, fp32."""

import dataclasses
import gc
import json
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from torch import Tensor

from tests import tiny_ltx2
from vgen import app, media, residency, transforms
from vgen.components import ltx2 as built
from vgen.config import from_mapping
from vgen.job import Job, plan_job
from vgen.pipelines import ltx2
from vgen.planning import plan_run
from vgen.requests import Request, build_requests
from vgen.stages.checks import NumericsError
from vgen.stages.decode import Sound
from vgen.stages.latents import Latents, latent_geometry, make_noise
from vgen.validate import validate

PROMPT, NEGATIVE = "A red fox runs through deep snow", "blurry rain"
COMMON = (
    f"model.text_encoder.max_length={tiny_ltx2.TEXT_LENGTH}",
    f"request.prompt={PROMPT}",
    f"request.negative_prompt={NEGATIVE}",
    "request.height=64",
    "request.width=96",
    "request.num_frames=17",
    "sampler.steps=3",
)
NO_GUIDANCE = tuple(
    f"sampler.{stream}.{setting}"
    for stream in ("video", "audio")
    for setting in ("cfg_scale=1", "stg_scale=0", "stg_blocks=[1]", "modality_scale=1", "rescale_scale=0")
)


class ListSink:
    """Keeps what a pipeline gives, in memory."""

    def __init__(self) -> None:
        self.chunks: list[Tensor] = []

    def save_latents(self, video: Tensor, audio: Tensor | None) -> None:
        assert not self.chunks, "latents must be saved before anything is decoded"
        self.video, self.audio = video, audio

    def write(self, frames: Iterator[Tensor], sound: Sound | None) -> None:
        self.chunks, self.sound = list(frames), sound

    def note_fallback(self, name: str) -> None:
        self.fallback = name

    @property
    def frames(self) -> Tensor:
        return torch.cat(self.chunks, dim=2)

    @property
    def waveform(self) -> Tensor:
        assert self.sound is not None
        return self.sound.waveform


def official_job(tmp_path: Path, *overrides: str, version: tiny_ltx2.Version = "2.0") -> Job:
    """A job on the tiny official file: three steps, no guidance but what ``overrides`` ask for."""
    files = tiny_ltx2.tiny_checkpoints(version)
    return make_job(
        tmp_path,
        f"model={'ltx2_tiny' if version == '2.0' else 'ltx2_3_tiny'}",
        "model.weights=load",
        f"model.checkpoint={files.official}",
        f"model.text_encoder.checkpoint={files.gemma}",
        *COMMON,
        *NO_GUIDANCE,
        *overrides,
    )


def make_job(tmp_path: Path, *overrides: str) -> Job:
    with initialize_config_dir(app.conf_dir(), version_base="1.3"):
        composed = OmegaConf.to_container(compose("config", ["quant=fp32", "device=cpu", *overrides]), resolve=True)
    assert isinstance(composed, dict)
    config = from_mapping({str(key): value for key, value in composed.items()})
    job = plan_job(config, build_requests(config.request), tmp_path, num_gpus=0, sweep=None)
    validate(config, job.requests, job.architecture, 0, job.checkpoint)
    return job


def generate(job: Job, request: Request | None = None) -> ListSink:
    sink = ListSink()
    device = torch.device("cpu")
    plan = plan_run(job, job.requests, device, transforms.components_of(job))
    components = transforms.build_components(job, device, plan.decode)
    ltx2.generate(components, request or job.requests[0], job.config.sampler, sink)
    return sink


def noise_of(job: Job) -> Latents:
    request = job.requests[0]
    return make_noise(
        latent_geometry(request), job.architecture, seed=request.seed, device=torch.device("cpu"), dtype=torch.float32
    )


def diffusers_pipeline(parts: tiny_ltx2.Parts, cls: Any, scheduler: Any) -> Any:
    pipeline = cls(
        scheduler=scheduler, vae=parts.vae, audio_vae=parts.audio_vae, text_encoder=parts.text_encoder,
        tokenizer=parts.tokenizer, connectors=parts.connectors, transformer=perturbable(parts.transformer),
        vocoder=parts.vocoder,
    )  # fmt: skip
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def perturbable(transformer: Any) -> Any:
    """The same transformer with the attention that diffusers perturbs; it has that switched off for 2.0."""
    if transformer.config.perturbed_attn:
        return transformer
    twin = type(transformer).from_config({**transformer.config, "perturbed_attn": True})
    twin.load_state_dict(transformer.state_dict())
    return twin.requires_grad_(False).eval()


def relative(ours: Tensor, other: Tensor) -> float:
    return float((ours - other).abs().max() / other.abs().max())


def assert_equals_diffusers(ours: ListSink, job: Job, pipeline: Any, **arguments: Any) -> None:
    """Run ``pipeline`` and compare frames and sound, largest error over largest value.

    The 2.3 vocoder takes the logarithm of its own faint spectrum: an error of 1e-7 in the latents moves its waveform by
    1e-4, in both codes alike. So the sound is compared before and behind that point, each at 1e-5.
    """
    mels: list[Tensor] = []
    handle = pipeline.vocoder.register_forward_pre_hook(lambda _, inputs: mels.append(inputs[0]))
    frames, waveform = pipeline(**arguments)
    handle.remove()
    pixels = ((ours.frames[0].permute(1, 2, 3, 0) + 1) / 2).clamp(0, 1)
    assert relative(pixels, torch.from_numpy(np.asarray(frames[0]))) <= 1e-5
    audio = transforms.build_components(job, torch.device("cpu")).decoders.audio
    assert ours.audio is not None
    assert relative(audio.decoder(ours.audio), mels[0]) <= 1e-5
    assert relative(audio.vocoder(mels[0]), waveform.float()) <= 1e-5
    limit = 1e-5 if job.architecture.version == "2.0" else 1e-3
    assert relative(ours.waveform, waveform[0].float()) <= limit


# cfg, stg, modality and rescale of the video, then of the audio.
SCALES = [
    (3.0, 0.0, 1.0, 0.7, 7.0, 0.0, 1.0, 0.7),
    (1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0),
    (4.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0),
    (1.0, 1.0, 1.0, 0.0, 1.0, 0.7, 1.0, 0.0),
    (1.0, 0.0, 3.0, 0.7, 1.0, 0.0, 2.0, 0.5),
    (3.0, 1.0, 1.0, 0.7, 7.0, 1.0, 1.0, 0.7),
    (3.0, 0.0, 3.0, 0.7, 7.0, 0.0, 3.0, 1.0),
    (1.0, 1.0, 3.0, 0.7, 1.0, 1.0, 3.0, 0.7),
    (3.0, 1.0, 3.0, 0.7, 7.0, 1.0, 3.0, 0.7),
]


def guidance_overrides(scales: tuple[float, ...], blocks: list[int]) -> list[str]:
    names = ("cfg_scale", "stg_scale", "modality_scale", "rescale_scale")
    keys = [f"sampler.{stream}.{name}" for stream in ("video", "audio") for name in names]
    stg = [f"sampler.{stream}.stg_blocks={blocks}".replace(" ", "") for stream in ("video", "audio")]
    return [*(f"{key}={scale}" for key, scale in zip(keys, scales, strict=True)), *stg]


def diffusers_arguments(scales: tuple[float, ...], blocks: list[int]) -> dict[str, Any]:
    names = ("guidance_scale", "stg_scale", "modality_scale", "guidance_rescale")
    keys = [f"{prefix}{name}" for prefix in ("", "audio_") for name in names]
    return {
        **dict(zip(keys, scales, strict=True)), "spatio_temporal_guidance_blocks": blocks, "prompt": PROMPT,
        "negative_prompt": NEGATIVE, "height": 64, "width": 96, "num_frames": 17, "frame_rate": 24.0,
        "max_sequence_length": tiny_ltx2.TEXT_LENGTH, "return_dict": False, "output_type": "np",
    }  # fmt: skip


@pytest.mark.parametrize("version", ["2.0", "2.3"])
@pytest.mark.parametrize(("scales", "blocks"), [*((scales, [1]) for scales in SCALES), (SCALES[-1], [0, 1])])
def test_whole_pipeline_equals_diffusers(
    version: tiny_ltx2.Version, scales: tuple[float, ...], blocks: list[int], tmp_path: Path
) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler
    from diffusers.pipelines.ltx2.pipeline_ltx2 import LTX2Pipeline

    job = official_job(tmp_path, "sampler.schedule=diffusers", *guidance_overrides(scales, blocks), version=version)
    ours, noise = generate(job), noise_of(job)
    assert noise.audio is not None
    parts = tiny_ltx2.tiny_checkpoints(version).parts
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.95, max_shift=2.05, base_image_seq_len=1024, max_image_seq_len=4096,
        shift_terminal=0.1,
    )  # fmt: skip
    pipeline = diffusers_pipeline(parts, LTX2Pipeline, scheduler)
    # That pipeline normalizes audio latents that it is given, also packed ones; the video's only where they are 5-D.
    audio_noise = noise.audio * parts.audio_vae.latents_std + parts.audio_vae.latents_mean
    assert_equals_diffusers(
        ours, job, pipeline, **diffusers_arguments(scales, blocks), num_inference_steps=3, latents=noise.video.clone(),
        audio_latents=audio_noise,
    )  # fmt: skip


@pytest.mark.parametrize("version", ["2.0", "2.3"])
def test_official_file_and_diffusers_folder_give_the_same_bits(version: tiny_ltx2.Version, tmp_path: Path) -> None:
    official = generate(official_job(tmp_path, version=version))
    folder = f"model.checkpoint={tiny_ltx2.tiny_checkpoints(version).diffusers}"
    other = generate(official_job(tmp_path, folder, "model.text_encoder.checkpoint=null", version=version))
    assert torch.equal(official.video, other.video)
    assert torch.equal(official.frames, other.frames)
    assert torch.equal(official.waveform, other.waveform)


def test_job_file_brings_the_same_job_to_the_ranks(tmp_path: Path) -> None:
    from vgen.job import read_job

    job = official_job(tmp_path)
    job.write()
    again = read_job(job.path)
    official = tiny_ltx2.tiny_checkpoints().official
    assert json.loads(job.path.read_text())["checkpoint"]["path"] == str(official)
    assert (again.config, again.requests, again.architecture) == (job.config, job.requests, job.architecture)
    assert again.checkpoint == job.checkpoint and again.text_encoder == job.text_encoder


def test_official_schedule_is_the_default(tmp_path: Path) -> None:
    job = official_job(tmp_path)
    assert job.config.sampler.schedule == "official"
    assert not torch.equal(generate(job).video, generate(official_job(tmp_path, "sampler.schedule=diffusers")).video)


def test_no_audio_runs_no_audio_stream(tmp_path: Path) -> None:
    sink = generate(official_job(tmp_path, "request.audio=none"))
    assert sink.audio is None and sink.sound is None
    assert sink.frames.shape == (1, 3, 17, 64, 96)


def test_noise_of_the_video_does_not_depend_on_the_audio(tmp_path: Path) -> None:
    job = official_job(tmp_path)
    request = job.requests[0]
    silent = dataclasses.replace(request, audio="none")
    with_audio, without = (
        make_noise(latent_geometry(r), job.architecture, seed=5, device=torch.device("cpu"), dtype=torch.float32)
        for r in (request, silent)
    )
    assert torch.equal(with_audio.video, without.video)


def test_a_pass_that_no_scale_asks_for_is_not_run(tmp_path: Path) -> None:
    calls = []
    job = official_job(tmp_path)
    components = transforms.build_components(job, torch.device("cpu"))
    components.transformer.register_forward_hook(lambda *_: calls.append(1))
    ltx2.generate(components, job.requests[0], job.config.sampler, ListSink())
    assert len(calls) == 3


def test_tiled_decode_runs_and_names_its_tiles(tmp_path: Path) -> None:
    sizes = ("request.height=128", "request.num_frames=33", "model.vae.tile_size=64", "model.vae.tile_overlap=32")
    times = ("model.vae.tile_frames=16", "model.vae.tile_frames_overlap=8")
    whole = generate(official_job(tmp_path, *sizes, *times))
    tiled_job = official_job(tmp_path, *sizes, *times, "parallel.vae_strategy=tile")
    tiled = generate(tiled_job)
    assert len(transforms.plan_decode(tiled_job, tiled_job.requests[0])) > 8
    assert len(tiled.chunks) > 1
    assert torch.equal(whole.video, tiled.video)
    assert tiled.frames.shape == whole.frames.shape


def test_nan_weights_fail_by_name_after_the_first_step(tmp_path: Path) -> None:
    job = official_job(tmp_path)
    components = transforms.build_components(job, torch.device("cpu"))
    components.transformer.proj_out.weight[0, 0] = float("nan")
    sink = ListSink()
    with pytest.raises(NumericsError, match="the video latents are NaN or infinite after step 1"):
        ltx2.generate(components, job.requests[0], job.config.sampler, sink)
    assert not hasattr(sink, "video")


def test_nan_latents_fail_by_name_before_decode(tmp_path: Path) -> None:
    components = transforms.build_components(official_job(tmp_path), torch.device("cpu"))
    latents = torch.zeros(1, 16, 3, 2, 3)
    latents[0, 0, 0, 0, 0] = float("inf")
    with pytest.raises(NumericsError, match="before decode"):
        ltx2.decode(components.decoders, latents, None, ListSink(), components.residency)


@pytest.fixture
def travelling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights travel on the CPU as well, and what is away is NaN: a module computes within ``use`` or not at all."""

    def vanish(visitor: Any) -> None:
        for tensor, _, on_host in visitor.places:
            # Integers know no NaN; there are no weights among them.
            tensor.data = torch.full_like(on_host, float("nan") if on_host.is_floating_point() else 0)

    monkeypatch.setattr(residency._Visitor, "move_home", vanish)
    monkeypatch.setattr(built, "Residency", partial(residency.Residency, active=True))


@pytest.fixture(scope="module")
def sounding_clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """17 frames with a tone: started from, it takes both encoders, and both decoders run."""
    path = tmp_path_factory.mktemp("clip") / "clip.mp4"
    grey = torch.arange(17 * 64 * 96 * 3).remainder(251).to(torch.uint8).reshape(17, 64, 96, 3)
    tone = torch.sin(torch.arange(48000) * 0.05).expand(2, -1)
    media.write_mp4(path, [grey], fps=24, audio=(tone, 48000))
    return path


@pytest.mark.usefixtures("travelling")
@pytest.mark.parametrize("offload", ["text_encoder", "stages"])
def test_offload_changes_no_bit(offload: str, sounding_clip: Path, tmp_path: Path) -> None:
    overrides = (*guidance_overrides(SCALES[-1], [1]), f"request.video={sounding_clip}")
    usual = generate(official_job(tmp_path, *overrides))
    other = generate(official_job(tmp_path, *overrides, f"model.offload={offload}"))
    assert torch.equal(usual.video, other.video)
    assert torch.equal(usual.frames, other.frames)
    assert torch.equal(usual.waveform, other.waveform)


@pytest.mark.usefixtures("travelling")
@pytest.mark.parametrize("forgotten", [*built.TEXT, "transformer", *built.ENCODERS, *built.DECODERS])
def test_a_stage_that_forgets_its_weights_is_found_out(
    forgotten: str, sounding_clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above can fail: without the visit of any one component there is NaN somewhere."""
    use = residency.Residency.use
    left_out: list[str] = []

    def use_all_but_one(self: residency.Residency, *names: str) -> AbstractContextManager[None]:
        left_out.extend(name for name in names if name == forgotten)
        return use(self, *(name for name in names if name != forgotten))

    monkeypatch.setattr(residency.Residency, "use", use_all_but_one)
    job = official_job(tmp_path, f"request.video={sounding_clip}", "model.offload=stages")
    try:
        sink = generate(job)
    except NumericsError:
        pass
    else:
        assert sink.frames.isnan().any()
    assert left_out == [forgotten]


def test_a_freed_text_encoder_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build, seen = built.build_text, []

    def remember(*arguments: Any) -> Any:
        text = build(*arguments)
        seen.append(weakref.ref(text.text_encoder))
        return text

    monkeypatch.setattr(built, "build_text", remember)
    job = official_job(tmp_path, "model.offload=text_encoder")
    components = transforms.build_components(job, torch.device("cpu"))
    gc.collect()
    assert [reference() for reference in seen] == [None]
    (context,) = components.encode_prompts([PROMPT])
    assert context.video.shape[1] == tiny_ltx2.TEXT_LENGTH
