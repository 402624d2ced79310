"""Clips during training: exact for a model that is, as the pipeline's for any, and judged by what they show."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from torch import Tensor

from vgen import app, transforms
from vgen.config import from_mapping
from vgen.diffusion.guidance import Guidance
from vgen.diffusion.schedule import build_sigmas
from vgen.job import Job, plan_job
from vgen.media import to_uint8
from vgen.models.ltx2.config import VIDEO_COMPRESSION
from vgen.models.ltx2.video_vae import PerChannelStatistics
from vgen.models.ltx2.vocoder import Vocoder
from vgen.requests import build_requests
from vgen.stages.condition import EncodedImage, condition_images, noised
from vgen.stages.denoise import Conditioning, build_serial_step, denoise
from vgen.stages.latents import Latents, pack_audio, pack_video
from vgen.stages.passes import plan_passes
from vgen.stages.text import Context
from vgen.tiny.grammar import Scene, parse
from vgen.tiny.render import render_sound, render_video
from vgen.tiny.tokenizer import GEMMA
from vgen.tiny.training import audio_vae, captions, data, diffusion, ltx2, ltx2_vae, samples, video_vae
from vgen.tiny.training.families import FAMILIES

CPU = torch.device("cpu")
LENGTH = 32


@pytest.fixture(scope="module")
def job() -> Job:
    with initialize_config_dir(app.conf_dir(), version_base="1.3"):
        composed = compose("config", ["experiment=train_ltx2_tiny_dry", "train.folder=unused", "device=cpu"])
    config = from_mapping(OmegaConf.to_container(composed, resolve=True))  # type: ignore[arg-type]
    return plan_job(config, build_requests(config.request), Path("unused"), num_gpus=0, sweep=None)


@pytest.fixture(scope="module")
def model(job: Job) -> ltx2.DiffusionModel:
    torch.manual_seed(0)
    return ltx2.DiffusionModel(transforms.text_config(job), job.architecture).eval()


@pytest.fixture(scope="module")
def geometry(job: Job) -> Any:
    return ltx2.geometry_of(job.config.train.sizes[0], VIDEO_COMPRESSION)


TOKENS = captions.text_tokens(["a red circle moves right, high tone", "a cyan square goes up"], LENGTH, GEMMA)
EMPTY = captions.one_text("", LENGTH, GEMMA)


def sampler(steps: int, cfg_scale: float) -> Any:
    return SimpleNamespace(steps=steps, video=SimpleNamespace(cfg_scale=cfg_scale))


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---------------------------------------------------------------- generate


class FakeModel:
    """Answers with ``field``'s velocities; a context is the number of words in its caption. Keeps what it was given."""

    transformer = SimpleNamespace(config=SimpleNamespace(in_channels=5, audio_in_channels=6))

    def __init__(self, field: Callable[[diffusion.Noisy, Tensor], tuple[Tensor, Tensor]]) -> None:
        self.field = field
        self.seen: list[diffusion.Noisy] = []
        self.texts: list[tuple[Tensor, Tensor]] = []

    def contexts(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        assert ids.dtype == mask.dtype == torch.int64
        self.texts.append((ids, mask))
        words = mask.sum(dim=1).float() - 1
        return words, words

    def velocities(self, noisy: diffusion.Noisy, contexts: tuple[Tensor, Tensor], geometry: Any) -> Any:
        assert geometry.grid_tokens == noisy.video.shape[1]
        self.seen.append(noisy)
        return self.field(noisy, contexts[0])


def run(
    model: Any, geometry: Any, cfg_scale: float = 3.0, first_frame: Tensor | None = None, steps: int = 6
) -> tuple[Tensor, Tensor]:
    return ltx2.generate(model, TOKENS, EMPTY, geometry, sampler(steps, cfg_scale), seeded(), first_frame)


def test_exact_velocities_lead_to_the_clean_tokens(geometry: Any) -> None:
    x0 = torch.randn(2, geometry.grid_tokens, 5), torch.randn(2, geometry.audio_tokens, 6)

    def field(noisy: diffusion.Noisy, words: Tensor) -> tuple[Tensor, Tensor]:
        sigma = noisy.sigma[:, None, None]
        return (noisy.video - x0[0]) / sigma, (noisy.audio - x0[1]) / sigma

    model = FakeModel(field)
    video, audio = run(model, geometry)
    torch.testing.assert_close(video, x0[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(audio, x0[1], atol=1e-5, rtol=0)
    sigmas = build_sigmas(6, schedule="official", video_tokens=geometry.video_tokens)
    assert torch.equal(torch.stack([noisy.sigma for noisy in model.seen[::2]]), sigmas[:-1, None].expand(6, 2))
    assert not any(noisy.given.any() for noisy in model.seen)


def constant(noisy: diffusion.Noisy, words: Tensor) -> tuple[Tensor, Tensor]:
    """One velocity for each number of words."""
    each = words[:, None, None]
    return each.expand_as(noisy.video), (-2 * each - 1).expand_as(noisy.audio)


@pytest.mark.parametrize("cfg_scale", [1.0, 3.0])
def test_guidance_goes_on_from_the_empty_caption_through_the_caption(geometry: Any, cfg_scale: float) -> None:
    model = FakeModel(constant)
    video, audio = run(model, geometry, cfg_scale)
    generator = seeded()
    noise = (
        torch.randn(2, geometry.grid_tokens, 5, generator=generator),
        torch.randn(2, geometry.audio_tokens, 6, generator=generator),
    )
    words = (TOKENS[1].sum(dim=1).float() - 1)[:, None, None]
    # The velocities do not change on the way, which is from about 1 to 0; that of the empty caption is 0 and -1.
    torch.testing.assert_close(video, noise[0] - cfg_scale * words, atol=1e-4, rtol=0)
    torch.testing.assert_close(audio, noise[1] - (-1 + cfg_scale * -2 * words), atol=1e-4, rtol=0)
    assert all(map(torch.equal, model.texts[0], TOKENS))
    assert len(model.texts) == (1 if cfg_scale == 1 else 2), "without guidance nobody reads the empty caption"
    if cfg_scale != 1:
        for made, one in zip(model.texts[1], EMPTY, strict=True):
            assert torch.equal(made, one.long().expand(2, -1))


def test_a_held_first_frame_comes_back_unchanged(geometry: Any) -> None:
    model = FakeModel(constant)
    size = geometry.frame_tokens
    frame = torch.randn(2, size, 5)
    video, audio = run(model, geometry, first_frame=frame)
    assert torch.equal(video[:, :size], frame)
    free, free_audio = run(FakeModel(constant), geometry)
    assert torch.equal(video[:, size:], free[:, size:]) and torch.equal(audio, free_audio)
    for noisy in model.seen:
        assert noisy.given[:, :size].all() and not noisy.given[:, size:].any()
        assert torch.equal(noisy.video[:, :size], frame)


@pytest.mark.parametrize("held", [False, True])
def test_it_makes_what_the_pipeline_makes_of_the_same_noise(
    job: Job, model: ltx2.DiffusionModel, geometry: Any, held: bool
) -> None:
    config = job.architecture.transformer
    tokens = TOKENS[0][:1], TOKENS[1][:1]
    grid = torch.randn(1, config.in_channels, 1, geometry.latent_height, geometry.latent_width, generator=seeded(1))
    frame = pack_video(grid) if held else None
    video, audio = ltx2.generate(model, tokens, EMPTY, geometry, sampler(3, 3.0), seeded(), frame)

    generator = seeded()
    start = Latents(
        torch.randn(1, geometry.grid_tokens, config.in_channels, generator=generator),
        torch.randn(1, geometry.audio_tokens, config.audio_in_channels, generator=generator),
    )
    conditions = None
    if held:
        conditions = condition_images(geometry, (EncodedImage(grid, frame=0, strength=1.0),))
        start = Latents(noised(conditions, start.video, 1.0), start.audio)
    guidance = Guidance(cfg_scale=3.0)
    nothing = (EMPTY[0][None].long(), EMPTY[1][None].long())
    with torch.no_grad():
        texts = {"positive": Context(*model.contexts(*tokens)), "negative": Context(*model.contexts(*nothing))}
    conditioning = Conditioning(
        geometry, plan_passes(guidance, guidance), texts, guidance, guidance, conditions  # type: ignore[arg-type]
    )  # fmt: skip
    sigmas = build_sigmas(3, schedule="official", video_tokens=geometry.video_tokens)
    made = denoise(build_serial_step(model.transformer, conditioning), start, sigmas)
    torch.testing.assert_close(video, made.video, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(audio, made.audio, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(video, start.video, atol=0.1)


# ---------------------------------------------------------------- decoding


def test_tokens_are_decoded_as_the_grids_that_they_were(job: Job, geometry: Any) -> None:
    torch.manual_seed(0)
    architecture = job.architecture
    vae: Any = ltx2_vae.build_video_vae(architecture).eval()
    sounds, vocoder = audio_vae.AudioVae(architecture).eval(), Vocoder(architecture.vocoder).eval()
    statistics = PerChannelStatistics(architecture.video_encoder.latent_channels)
    statistics.get_buffer("mean-of-means").normal_()
    statistics.get_buffer("std-of-means").uniform_(0.5, 2)
    decoders = samples.Decoders(FAMILIES["ltx2"], vae, statistics, samples.SoundDecoders(sounds.decoder, vocoder))
    scenes = data.scenes_of(job.config.train, 0, 2)
    size = job.config.train.sizes[0]
    means = video_vae.encode_means(vae, data.video_of(scenes, size, CPU))
    made = samples.decode_video(decoders, pack_video(statistics.normalize(means)), geometry)
    with torch.no_grad():
        true = vae.decode(means, return_dict=False)[0]
        mel = data.mel_of(scenes, size.num_frames, sounds.encoder.config, CPU)
        encoded = sounds.encoder(mel)
        waveform = vocoder(sounds.decoder(encoded))
    assert [frames.shape for frames in made] == [(size.num_frames, size.height, size.width, 3)] * 2
    for frames, clip in zip(made, true, strict=True):
        difference = frames.astype(int) - to_uint8(clip[None]).numpy().astype(int)
        assert np.abs(difference).max() <= 1 and frames.std() > 1
    assert decoders.sound is not None
    np.testing.assert_array_equal(samples.decode_audio(decoders.sound, pack_audio(encoded)), waveform.numpy())


# ---------------------------------------------------------------- pictures and shares


class Puppet:
    """Decoders that show and sound the scenes whose numbers the tokens hold."""

    sample_rate = 16000
    frames = 17

    def __init__(self, scenes: list[Scene]) -> None:
        self.scenes = scenes
        statistics = PerChannelStatistics(4)
        statistics.get_buffer("mean-of-means").fill_(-3)
        statistics.get_buffer("std-of-means").fill_(2)
        vocoder: Any = _Vocoder(self)
        audio: Any = _Sounds()
        self.decoders = samples.Decoders(FAMILIES["ltx2"], self, statistics, samples.SoundDecoders(audio, vocoder))

    def make(self, tokens: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        assert tokens[0].shape == tokens[1].shape == (len(self.scenes), LENGTH)
        number = torch.arange(len(self.scenes), dtype=torch.float32)[:, None, None]
        return ((number + 3) / 2).expand(-1, 12, 4), number.expand(-1, 18, 4)

    def of(self, latents: Tensor) -> list[Scene]:
        return [self.scenes[round(float(one.mean()))] for one in latents]

    def decode(self, latents: Tensor, return_dict: bool) -> tuple[Tensor]:
        assert latents.shape[1:] == (4, 3, 2, 2) and not return_dict
        return (render_video(self.of(latents), self.frames, 64, 64),)


class _Sounds:
    config = SimpleNamespace(latent_mel_bins=2)

    def __call__(self, latents: Tensor) -> Tensor:
        assert latents.shape[1:] == (2, 18, 2)
        return latents


class _Vocoder:
    output_sample_rate = Puppet.sample_rate

    def __init__(self, puppet: Puppet) -> None:
        self.puppet = puppet

    def __call__(self, mel: Tensor) -> Tensor:
        return render_sound(self.puppet.of(mel), 11000, Puppet.sample_rate)


def judged(job: Job, count: int, change: Callable[[Scene], Scene] = lambda scene: scene) -> list[samples.Clip]:
    config = job.config.train
    scenes = [scene for split in samples.SPLITS for scene in data.scenes_of(config, 0, count, split)]
    puppet = Puppet([change(scene) for scene in scenes])
    size = type(config.sizes[0])(Puppet.frames, 64, 64)
    config = replace(config, judged_clips=count)
    return samples.judge(puppet.make, puppet.decoders, ltx2.geometry_of(size, VIDEO_COMPRESSION), config, LENGTH, CPU)


def changed(name: str, first: str, second: str) -> Callable[[Scene], Scene]:
    return lambda scene: replace(scene, **{name: second if getattr(scene, name) == first else first})


def test_clips_that_show_their_captions_pass(job: Job) -> None:
    clips = judged(job, count=6)
    assert [clip.split for clip in clips] == ["seen"] * 6 + ["heldout"] * 6
    scenes = [scene for split in samples.SPLITS for scene in data.scenes_of(job.config.train, 0, 6, split)]
    for clip, scene in zip(clips, scenes, strict=True):
        asked = parse(clip.caption)
        assert asked.items() <= vars(scene).items() and {"shape", "colour", "motion"} <= asked.keys()
    assert len({clip.caption.replace(parse(clip.caption)["colour"], "") for clip in clips}) == 12
    shares = samples.adherence(clips)
    names = ("shape", "colour", "motion", "pitch", "loudness", "passed", "picture")
    assert shares == {f"{split}_{name}": 1.0 for split in ("seen", "heldout") for name in names}


def test_each_share_is_of_its_own_attribute(job: Job) -> None:
    for name, values in (("colour", ("red", "green")), ("shape", ("circle", "square")), ("motion", ("up", "left"))):
        wrong = samples.adherence(judged(job, 4, changed(name, *values)))
        failed = {share for share, value in wrong.items() if value == 0}
        assert failed == {f"{split}_{share}" for split in samples.SPLITS for share in (name, "picture", "passed")}
        assert {value for share, value in wrong.items() if share not in failed} == {1.0}
    mixed = samples.adherence(judged(job, 4)[:4] + judged(job, 4, changed("colour", "red", "green"))[4:])
    assert (mixed["seen_colour"], mixed["heldout_colour"]) == (1, 0)
    clips = judged(job, 6, changed("pitch", "low", "high"))
    deaf = samples.adherence(clips)
    assert deaf["heldout_pitch"] == 0 and deaf["heldout_picture"] == deaf["heldout_loudness"] == 1
    silent = sum("pitch" not in parse(clip.caption) for clip in clips if clip.split == "heldout")
    assert deaf["heldout_passed"] == silent / 6 and 0 < silent < 6


def test_what_no_caption_asks_for_has_no_share(job: Job) -> None:
    shares = samples.adherence(judged(job, count=1))
    assert "pitch" not in " ".join(shares) and shares["seen_passed"] == 1.0


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sheets as the list of what is on them."""
    monkeypatch.setattr(samples, "contact_sheet", list)


def test_a_generation_sheet_shows_both_splits_and_says_what_failed(job: Job, entries: None) -> None:
    clips = judged(job, 4, changed("colour", "red", "green"))
    shown: Any = samples.generations(clips, count=2)
    for entry, clip in zip(shown, [*clips[:2], *clips[4:6]], strict=True):
        assert entry.caption == f"{clip.split}: {clip.caption}" and entry.failed == ("colour",)
        np.testing.assert_array_equal(entry.frames, clip.frames[[0, 8, 16]])
    right: Any = samples.generations(judged(job, 2))
    assert [entry.failed for entry in right] == [()] * 4


class Mirror:
    """A VAE whose round trip is ``gain`` times the clip."""

    def __init__(self, gain: float) -> None:
        self.gain = gain

    def encode(self, video: Tensor, return_dict: bool) -> Any:
        assert not return_dict
        return (SimpleNamespace(mean=video),)

    def decode(self, latents: Tensor, return_dict: bool) -> Any:
        assert not return_dict
        return (self.gain * latents,)


def test_a_reconstruction_sheet_has_each_line_of_clips_above_its_round_trips(job: Job, entries: None) -> None:
    config = job.config.train
    vae: Any = Mirror(0.5)
    sheet: Any = samples.reconstructions(vae, config, CPU)
    video = data.video_of(data.scenes_of(config, 0, 8, "heldout"), config.sizes[0], CPU)
    order = [(clip, gain) for first in (0, 4) for gain in (1.0, 0.5) for clip in range(first, first + 4)]
    for entry, (clip, gain) in zip(sheet, order, strict=True):
        np.testing.assert_array_equal(entry.frames, to_uint8(gain * video[clip][None]).numpy()[[0, 4, 8]])
        decibels = -10 * float((video[clip] / 4).square().mean().log10())
        assert entry.caption == f"clip {clip}" + (f", round trip: {decibels:.1f} dB" if gain < 1 else "")


def test_it_runs_on_what_training_trains(job: Job, model: ltx2.DiffusionModel, geometry: Any) -> None:
    architecture, config = job.architecture, replace(job.config.train, judged_clips=2)
    torch.manual_seed(0)
    vae: Any = ltx2_vae.build_video_vae(architecture).eval()
    statistics = PerChannelStatistics(len(vae.latents_mean))
    sounds, vocoder = audio_vae.AudioVae(architecture).eval(), Vocoder(architecture.vocoder).eval()

    def make(tokens: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return ltx2.generate(model, tokens, EMPTY, geometry, sampler(2, 3.0), seeded())

    decoders = samples.Decoders(FAMILIES["ltx2"], vae, statistics, samples.SoundDecoders(sounds.decoder, vocoder))
    clips = samples.judge(make, decoders, geometry, config, LENGTH, CPU)
    shares = samples.adherence(clips)
    assert len(clips) == 4 and all(0 <= share <= 1 for share in shares.values())
    assert samples.generations(clips).size[0] > 3 * 64
    assert samples.reconstructions(vae, config, CPU).size[0] > 3 * 64
