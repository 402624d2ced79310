"""Images, a clip and a sound through the whole LTX-2 pipeline, fp32; diffusers' condition pipeline as the oracle.

Where diffusers and the official code part, the oracle is turned to the official side and the test says so: the noise
level behind the audio-to-video gate, the clean sample of a token that has a timestep of its own, and the schedule.
"""

import dataclasses
import itertools
import json
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from torch import Tensor

from tests import tiny_ltx2
from tests.pipelines.test_ltx2_pipeline import (
    SCALES,
    ListSink,
    assert_equals_diffusers,
    diffusers_arguments,
    diffusers_pipeline,
    generate,
    guidance_overrides,
    noise_of,
    official_job,
)
from vgen import media_in, transforms
from vgen.components import ltx2 as built
from vgen.diffusion.schedule import build_sigmas
from vgen.job import Job
from vgen.pipelines import ltx2
from vgen.stages.latents import latent_geometry, unpack_video
from vgen.stages.start import Inputs, start_latents
from vgen.typed import ConfigurationError

SIGMAS = [1.0, 0.8, 0.4, 0.0]
ONE_IMAGE = ((0, 1.0),)
THREE_IMAGES = ((0, 0.7), (9, 1.0), (16, 0.4))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three unlike pictures of another size than the video's."""
    from PIL import Image

    folder, generator = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    paths = []
    for index in range(3):
        small = generator.integers(0, 255, (6, 7, 3), dtype=np.uint8)
        paths.append(folder / f"{index}.png")
        Image.fromarray(small).resize((150, 110), Image.Resampling.BICUBIC).save(paths[-1])
    return paths


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """33 frames of a moving, textured square at 24 fps, with a tone of the same length."""
    path = tmp_path_factory.mktemp("clip") / "clip.mp4"
    texture = np.random.default_rng(1).integers(60, 255, (24, 24, 3), dtype=np.uint8)
    with av.open(str(path), "w") as container:
        video: Any = container.add_stream("libx264", rate=24, options={"crf": "12"})
        video.width, video.height, video.pix_fmt = 96, 64, "yuv420p"
        audio: Any = container.add_stream("aac", rate=48000, layout="stereo")
        for index in range(33):
            frame = np.full((64, 96, 3), 40, np.uint8)
            frame[10 + index // 2 : 34 + index // 2, 2 * index : 2 * index + 24] = texture
            container.mux(video.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        tone = np.sin(np.arange(round(48000 * 33 / 24)) * 2 * np.pi * 440 / 48000).astype(np.float32) * 0.5
        block = av.AudioFrame.from_ndarray(np.stack([tone, tone]), format="fltp", layout="stereo")
        block.sample_rate = 48000
        container.mux(audio.encode(block))
        container.mux(video.encode())
        container.mux(audio.encode())
    return path


def image_override(pictures: list[Path], places: tuple[tuple[int, float], ...]) -> str:
    entries = ",".join(
        f"{{path: {path}, frame: {frame}, strength: {strength}}}"
        for path, (frame, strength) in zip(pictures, places, strict=False)
    )
    return f"request.images=[{entries}]"


def oracle(
    job: Job, pictures: list[Path], scales: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, dict[str, Any]]:
    """diffusers' condition pipeline on our noise and our pixels, and what to call it with."""
    from diffusers import FlowMatchEulerDiscreteScheduler
    from diffusers.pipelines.ltx2 import pipeline_ltx2_condition as theirs

    version = job.architecture.version
    parts, request, noise = tiny_ltx2.tiny_checkpoints(version).parts, job.requests[0], noise_of(job)
    assert noise.audio is not None
    pixels = [media_in.load_image(Path(image.path), 64, 96, request.image_crf) for image in request.images]
    frames, strengths = [image.frame for image in request.images], [image.strength for image in request.images]

    class Official(theirs.LTX2ConditionPipeline):
        def preprocess_conditions(self, *_: Any, **__: Any) -> Any:
            # Their indices count latent frames, 1 standing for pixel frame 1: here pixel frames are set directly below.
            return pixels, strengths, frames, [1] * len(pixels)

        def _prepare_keyframe_coords(self, *args: Any, **kwargs: Any) -> Tensor:
            frame = (kwargs["pixel_frame_idx"] - 1) // 8 + 1
            return super()._prepare_keyframe_coords(*args, **{**kwargs, "pixel_frame_idx": frame})

        def prepare_latents(self, *args: Any, **kwargs: Any) -> Any:
            prepared = super().prepare_latents(*args, **kwargs)
            self.start, self.held = prepared[:2]
            return prepared

        def convert_velocity_to_x0(self, sample: Tensor, output: Tensor, step: int, scheduler: Any = None) -> Tensor:
            # Official: each token by its own sigma.
            is_video = sample.shape == self.start.shape
            return sample - output * scheduler.sigmas[step] * (1 - self.held if is_video else 1)

    draws = iter([noise.video, noise.audio])
    monkeypatch.setattr(theirs, "randn_tensor", lambda shape, **_: next(draws).reshape(shape).clone())
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=False, shift=1.0)
    pipeline = diffusers_pipeline(parts, Official, scheduler)
    gate_by_the_other_sigma(pipeline.transformer, monkeypatch)
    extra = {"conditions": [], "sigmas": SIGMAS[:-1], "num_inference_steps": 3, "use_cross_timestep": False}
    return pipeline, {**diffusers_arguments(scales, [1]), **extra}


def gate_by_the_other_sigma(transformer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Official: between the streams, scale and shift follow a token's own timestep, the gate the other's sigma."""
    forward, sigmas = transformer.forward, {}
    factor = transformer.config.cross_attn_timestep_scale_multiplier / transformer.config.timestep_scale_multiplier

    def remember(*args: Any, **kwargs: Any) -> Any:
        sigmas.update(video=kwargs["sigma"], audio=kwargs["audio_sigma"])
        return forward(*args, **kwargs)

    def gated_by(gate: Callable[..., Any], other: str) -> Callable[..., Any]:
        def by_sigma(timestep: Tensor, *args: Any, **kwargs: Any) -> Any:
            tokens = timestep.numel() // len(sigmas[other])
            return gate(sigmas[other].repeat_interleave(tokens) * factor, *args, **kwargs)

        return by_sigma

    monkeypatch.setattr(transformer, "forward", remember)
    for name, other in (("av_cross_attn_video_a2v_gate", "audio"), ("av_cross_attn_audio_v2a_gate", "video")):
        module = getattr(transformer, name)
        monkeypatch.setattr(module, "forward", gated_by(module.forward, other))


@pytest.mark.parametrize("version", ["2.0", "2.3"])
@pytest.mark.parametrize("places", [ONE_IMAGE, THREE_IMAGES], ids=["one", "three"])
@pytest.mark.parametrize("scales", [SCALES[1], SCALES[-1]], ids=["plain", "guided"])
def test_image_to_video_equals_diffusers(
    version: tiny_ltx2.Version,
    places: tuple[tuple[int, float], ...],
    scales: tuple[float, ...],
    pictures: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = official_job(
        tmp_path, image_override(pictures, places), f"sampler.sigmas={SIGMAS}".replace(" ", ""),
        *guidance_overrides(scales, [1]), version=version,
    )  # fmt: skip
    ours = generate(job)
    assert ours.video.shape == (1, 16, 3, 2, 3)
    pipeline, arguments = oracle(job, pictures, scales, monkeypatch)
    assert_equals_diffusers(ours, job, pipeline, **arguments)


def encoded_clip(parts: tiny_ltx2.Parts, clip: Path) -> Tensor:
    """The first 17 frames as normalized latents in token layout, by diffusers."""
    vae, pixels = parts.vae, media_in.load_video(clip, 17, 64, 96, 24.0)
    latents = vae.encode(pixels).latent_dist.mode()
    mean, std = (getattr(vae, name).view(1, -1, 1, 1, 1) for name in ("latents_mean", "latents_std"))
    return ((latents - mean) / std).flatten(2).transpose(1, 2)


@pytest.mark.parametrize("version", ["2.0", "2.3"])
def test_video_to_video_equals_diffusers_from_the_same_start(
    version: tiny_ltx2.Version, clip: Path, tmp_path: Path
) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler
    from diffusers.pipelines.ltx2.pipeline_ltx2 import LTX2Pipeline

    level, scales = 0.75, SCALES[0]
    job = official_job(
        tmp_path, f"request.video={clip}", f"request.noise_level={level}", *guidance_overrides(scales, [1]),
        version=version,
    )  # fmt: skip
    ours, noise, parts = generate(job), noise_of(job), tiny_ltx2.tiny_checkpoints(version).parts
    assert noise.audio is not None
    sigmas = [
        level,
        *(sigma for sigma in build_sigmas(3, schedule="official", video_tokens=0).tolist() if sigma < level),
    ]
    start = torch.lerp(encoded_clip(parts, clip), noise.video, level)
    components = transforms.build_components(job, torch.device("cpu"))
    assert components.encoders is not None
    sound = ltx2.encode_sound(
        components.encoders.audio, job.requests[0], latent_geometry(job.requests[0]), torch.device("cpu"), torch.float32
    )
    assert sound is not None
    # Normalized again by that pipeline.
    audio = torch.lerp(sound, noise.audio, level) * parts.audio_vae.latents_std + parts.audio_vae.latents_mean
    pipeline = diffusers_pipeline(
        parts, LTX2Pipeline, FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=False, shift=1.0)
    )
    assert_equals_diffusers(
        ours, job, pipeline, **diffusers_arguments(scales, [1]), sigmas=sigmas[:-1],
        num_inference_steps=len(sigmas) - 1, latents=start, audio_latents=audio,
    )  # fmt: skip


def test_all_noise_forgets_the_clip_and_little_keeps_it(clip: Path, tmp_path: Path) -> None:
    def latents(*overrides: str) -> Tensor:
        return generate(official_job(tmp_path, "request.audio=none", "sampler.steps=8", *overrides)).video

    from_clip = (f"request.video={clip}",)
    assert torch.equal(latents(*from_clip, "request.noise_level=1"), latents())
    kept = encoded_clip(tiny_ltx2.tiny_checkpoints().parts, clip)
    grid = latent_geometry(official_job(tmp_path).requests[0])
    distance = {
        level: float((latents(*from_clip, f"request.noise_level={level}") - unpack_video(kept, grid)).square().mean())
        for level in (0.01, 0.3, 0.9)
    }
    assert distance[0.01] < 1e-3 < distance[0.3] < distance[0.9]


def test_images_and_a_clip_together(clip: Path, pictures: list[Path], tmp_path: Path) -> None:
    places = ((0, 1.0), (9, 1.0))
    common = (f"request.video={clip}", "request.noise_level=0.5", "request.audio=none", "request.image_crf=33")
    with_images = generate(official_job(tmp_path, *common, image_override(pictures, places))).video
    without = generate(official_job(tmp_path, *common)).video
    parts = tiny_ltx2.tiny_checkpoints().parts
    image = parts.vae.encode(media_in.load_image(pictures[0], 64, 96, 33)).latent_dist.mode()
    mean, std = (getattr(parts.vae, name).view(1, -1, 1, 1, 1) for name in ("latents_mean", "latents_std"))
    torch.testing.assert_close(with_images[:, :, :1], (image - mean) / std, rtol=1e-5, atol=1e-5)
    assert not torch.equal(with_images[:, :, 1:], without[:, :, 1:])


@pytest.mark.parametrize("scales", [SCALES[1], (3.0, 1.0, 3.0, 0.7, 1.0, 0.0, 1.0, 0.0)], ids=["plain", "guided"])
def test_a_copied_sound_conditions_the_video_and_stays(
    scales: tuple[float, ...], clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = official_job(
        tmp_path, "request.audio=copy", f"request.sound={clip}", f"sampler.sigmas={SIGMAS}".replace(" ", ""),
        *guidance_overrides(scales, [1]),
    )  # fmt: skip
    ours, noise, request = generate(job), noise_of(job), job.requests[0]
    parts = tiny_ltx2.tiny_checkpoints().parts
    native = media_in.load_audio(clip, 17 / 24)
    assert native is not None and ours.sound is not None and ours.audio is not None
    assert ours.sound.sample_rate == native[1] == 48000
    assert ours.sound.waveform.shape == (2, 34000)
    assert torch.equal(ours.sound.waveform[:, : native[0].shape[1]], native[0])

    clean = ours.audio.transpose(1, 2).flatten(2)
    transformer = diffusers_pipeline(parts, lambda **modules: _Bare(modules), None).transformer
    gate_by_the_other_sigma(transformer, monkeypatch)
    contexts = _contexts(job)
    geometry = latent_geometry(request)

    def x0(latents: Tensor, sigma: float, text: tuple[Tensor, Tensor], **perturbation: Any) -> Tensor:
        level = torch.full((1,), sigma) * 1000
        velocity, _ = transformer(
            hidden_states=latents, audio_hidden_states=clean, encoder_hidden_states=text[0],
            audio_encoder_hidden_states=text[1], timestep=level, sigma=level, audio_timestep=torch.zeros(1),
            audio_sigma=torch.zeros(1), num_frames=3, height=2, width=3, fps=24.0,
            audio_num_frames=geometry.audio_tokens, use_cross_timestep=False, return_dict=False, **perturbation,
        )  # fmt: skip
        return latents - sigma * velocity

    video_cfg, video_stg, video_mod, rescale = scales[:4]
    positive, negative = contexts
    mixed = (negative[0], positive[1])  # the sound is an input: its stream reads the positive text in every pass
    latents = noise.video
    for sigma, following in itertools.pairwise(SIGMAS):
        cond = x0(latents, sigma, positive)
        guided = cond
        if video_cfg != 1:
            guided = guided + (video_cfg - 1) * (cond - x0(latents, sigma, mixed))
            # Perturbed in the video alone, which diffusers does not offer: the transformer's own tests do.
            guided = guided + video_stg * (cond - _video_perturbed(job, latents, clean, sigma, positive))
            guided = guided + (video_mod - 1) * (cond - x0(latents, sigma, positive, isolate_modalities=True))
            guided = guided * (rescale * cond.std() / guided.std() + 1 - rescale)
        latents = latents + (latents - guided) / sigma * (following - sigma)
    expected = unpack_video(latents, geometry)
    assert float((ours.video - expected).abs().max() / expected.abs().max()) <= 1e-5


class _Bare:
    """The parts of a pipeline without the pipeline."""

    def __init__(self, modules: dict[str, Any]) -> None:
        self.transformer = modules["transformer"]

    def set_progress_bar_config(self, **_: Any) -> None:
        """Has no progress."""


def _contexts(job: Job) -> list[tuple[Tensor, Tensor]]:
    components = transforms.build_components(job, torch.device("cpu"))
    request = job.requests[0]
    prompts = [request.prompt, request.negative_prompt]
    return [(context.video, context.audio) for context in components.encode_prompts(prompts)]


def _video_perturbed(job: Job, latents: Tensor, audio: Tensor, sigma: float, text: tuple[Tensor, Tensor]) -> Tensor:
    from vgen.models.ltx2.perturbation import Perturbation
    from vgen.models.ltx2.transformer import Stream

    transformer = built.build_transformer(job, torch.device("cpu"))
    rope = transformer.rope_tables(latent_geometry(job.requests[0]), "cpu", torch.float32)
    level, zero = torch.full((1,), sigma), torch.zeros(1)
    streams = Stream(latents, level, level, text[0]), Stream(audio, zero, zero, text[1])
    velocity, _ = transformer(*streams, rope, [Perturbation(skip_video_self=(1,))])
    assert velocity is not None
    return latents - sigma * velocity


def test_the_decode_task_finishes_with_the_same_sound(clip: Path, tmp_path: Path) -> None:
    from vgen import requests
    from vgen.stages.encode import load_sound

    job = official_job(tmp_path, "request.audio=copy", f"request.video={clip}")
    job.write()
    request = requests.from_mapping(json.loads(job.path.read_text())["requests"][0])
    sound, sink = load_sound(request), generate(job)
    assert sound is not None and torch.equal(sound.waveform, sink.waveform)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["request.images=[{path: PICTURE, frame: 8},{path: PICTURE, frame: 8}]"], "both put at frame 8"),
        (["request.image=PICTURE", "request.images=[{path: PICTURE}]"], "both put at frame 0"),
        (["request.images=[{path: PICTURE, frame: 17}]"], "frame 17 of 17"),
        (["request.images=[{path: PICTURE, strength: 1.5}]"], "strength=1.5"),
        (["request.image=CLIP"], "cannot be read as an image"),
        (["request.video=PICTURE", "request.noise_level=0.5"], "frame rate|frames per second|1 frames|no video"),
        (["request.video=CLIP", "request.fps=25"], "24 frames per second"),
        (["request.video=CLIP", "request.num_frames=41"], "33 frames"),
        (["request.audio=copy", "request.sound=PICTURE"], "has no sound"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_before_anything_loads(
    overrides: list[str], sentence: str, clip: Path, pictures: list[Path], tmp_path: Path
) -> None:
    filled = [text.replace("PICTURE", str(pictures[0])).replace("CLIP", str(clip)) for text in overrides]
    with pytest.raises(ConfigurationError, match=sentence):
        official_job(tmp_path, *filled)


def test_a_run_without_inputs_loads_no_encoder(tmp_path: Path) -> None:
    assert transforms.build_components(official_job(tmp_path), torch.device("cpu")).encoders is None


def test_the_sink_gets_no_sound_where_none_was_asked_for(clip: Path, tmp_path: Path) -> None:
    sink: ListSink = generate(official_job(tmp_path, f"request.video={clip}", "request.audio=none"))
    assert sink.sound is None and sink.audio is None


def write_wav(path: Path, rate: int, samples: int) -> Path:
    tone = (np.sin(np.arange(samples) * 2 * np.pi * 440 / rate) * 20000).astype("<i2")
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(tone.tobytes())
    return path


def test_a_sound_without_samples_is_refused(tmp_path: Path) -> None:
    from vgen.stages.encode import load_sound

    empty = write_wav(tmp_path / "empty.wav", 48000, 0)
    with pytest.raises(ConfigurationError, match=r"empty.wav has no sound, which request\.audio=copy needs"):
        official_job(tmp_path, "request.audio=copy", f"request.sound={empty}")
    job = official_job(tmp_path)
    with pytest.raises(ConfigurationError, match="has no sound"):
        load_sound(dataclasses.replace(job.requests[0], audio="copy", sound=str(empty)))


def test_a_given_sound_has_to_be_there(tmp_path: Path) -> None:
    job = official_job(tmp_path)
    with pytest.raises(ValueError, match="said to be given"):
        start_latents(latent_geometry(job.requests[0]), Inputs(), noise_of(job), 1.0, audio_is_given=True)


@pytest.mark.parametrize(("rate", "kept_at"), [(44100, 44100), (22050, 22050), (192000, 48000), (37800, 48000)])
def test_a_kept_sound_has_a_rate_that_the_file_can_hold(
    rate: int, kept_at: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from vgen import media
    from vgen.stages.encode import kept_sound

    tone = write_wav(tmp_path / "tone.wav", rate, rate)
    request = official_job(tmp_path, "request.audio=copy", f"request.sound={tone}").requests[0]
    with caplog.at_level("INFO", "vgen.notice"):
        sound = kept_sound(request)
    assert sound is not None and sound.sample_rate == kept_at
    assert sound.waveform.shape == (2, round(17 / 24 * kept_at))
    assert ("AAC does not" in caplog.text) == (rate != kept_at)
    frames = [torch.zeros(17, 64, 96, 3, dtype=torch.uint8)]
    media.write_mp4(tmp_path / "out.mp4", frames, fps=24, audio=(sound.waveform, sound.sample_rate))
    assert media.read_mp4(tmp_path / "out.mp4").has_audio


def test_a_clip_that_is_all_noise_lends_no_sound(clip: Path, tmp_path: Path) -> None:
    request = official_job(tmp_path, f"request.video={clip}", "request.noise_level=1").requests[0]
    assert request.sound_source is None
