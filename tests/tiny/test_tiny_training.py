"""Training of the tiny model: a run goes on as if never interrupted, learns with all weights, and its export loads."""

import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from safetensors import safe_open
from torch import Tensor, nn

from tests import tiny_ltx2
from vgen import app, checkpoint, checkpoint_files, transforms
from vgen.components import ltx2
from vgen.config import ClipSize, Config, StageTraining, from_mapping
from vgen.diffusion.solver import to_x0
from vgen.job import Job, plan_job
from vgen.models import gemma3
from vgen.models.gemma3 import load_tokenizer
from vgen.models.ltx2.config import VIDEO_COMPRESSION
from vgen.models.ltx2.connectors import normalise_states
from vgen.models.ltx2.geometry import Geometry
from vgen.models.ltx2.mel import log_mel
from vgen.models.ltx2.transformer import Stream
from vgen.models.ltx2.upsampler import LatentUpsampler
from vgen.models.ltx2.video_vae import PerChannelStatistics
from vgen.models.ltx2.vocoder import Vocoder
from vgen.models.wan import text as umt5
from vgen.requests import build_requests
from vgen.stages.text import TextComponents, encode_prompts
from vgen.tasks import peers, train_tiny
from vgen.tasks.types import TaskContext
from vgen.tiny.grammar import caption
from vgen.tiny.tokenizer import GEMMA, UMT5, TextFormat, build_tokenizer
from vgen.tiny.training import (
    audio_vae,
    captions,
    data,
    diffusion,
    graphs,
    loop,
    ltx2_vae,
    store,
    upsampler,
    video_vae,
    vocoder,
)
from vgen.tiny.training import ltx2 as ltx2_training
from vgen.tiny.training.ltx2_export import CHECKPOINT, TEXT_ENCODER, UPSAMPLER, official_name, video_components
from vgen.typed import ConfigurationError
from vgen.validate import validate

CPU = torch.device("cpu")
PROMPT = "a red circle moves right, high tone"


def compose_config(*overrides: str) -> Config:
    with initialize_config_dir(app.conf_dir(), version_base="1.3"):
        composed = compose("config", ["experiment=train_ltx2_tiny_dry", *overrides])
    return from_mapping(OmegaConf.to_container(composed, resolve=True))  # type: ignore[arg-type]


def job_of(folder: Path, *overrides: str) -> Job:
    config = compose_config(f"train.folder={folder}", "device=cpu", *overrides)
    return plan_job(config, build_requests(config.request), folder, num_gpus=0, sweep=None)


def run_stage(folder: Path, stage: str, *overrides: str) -> None:
    job = job_of(folder, f"train.stage={stage}", *overrides)
    train_tiny.run(TaskContext(job, CPU))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every stage, one step each, and the export."""
    folder = tmp_path_factory.mktemp("tiny")
    for stage in train_tiny.STAGES:
        steps = [f"train.stages.{stage}.steps=1"] if stage != "export" else []
        run_stage(folder, stage, "train.table_clips=4", "sampler.steps=1", *steps)
    return folder


@pytest.fixture(scope="module")
def job(trained: Path) -> Job:
    """What loads the export, in fp32."""
    config = compose_config(
        "task=generate",
        "model.weights=load",
        f"model.checkpoint={trained / CHECKPOINT}",
        f"model.text_encoder.checkpoint={trained / TEXT_ENCODER}",
        "quant=fp32",
        "device=cpu",
    )
    return plan_job(config, build_requests(config.request), trained, num_gpus=0, sweep=None)


def geometry_of(size: ClipSize) -> Geometry:
    return ltx2_training.geometry_of(size, VIDEO_COMPRESSION)


def rounded(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As the export rounds, the latents' statistics excepted."""
    keep = ("latents_", "per_channel_statistics")
    return {name: t if any(part in name for part in keep) else t.bfloat16().float() for name, t in tensors.items()}


def average(trained: Path, stage: str, module: Any) -> Any:
    module.load_state_dict(rounded(store.load_average(trained, stage)))
    return module.eval().requires_grad_(False)


# ---------------------------------------------------------------- the loop


def toy() -> tuple[nn.Module, StageTraining]:
    """With weights in another memory order than the file's, as those of a video VAE on a GPU."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 8, 2), nn.SiLU(), nn.Conv2d(8, 1, 2))
    return module.to(memory_format=torch.channels_last), StageTraining(8, 1, 4, 0.01, False)  # type: ignore[call-overload]


def run_toy(path: Path, stop_at: int | None = None) -> dict[str, Tensor]:
    module, settings = toy()

    def draw(step: int, generator: torch.Generator) -> loop.Batch:
        return {"x": torch.randn(4, 3, 4, 4, generator=generator) + step / 8}

    def losses(batch: loop.Batch) -> loop.Losses:
        x = batch["x"]
        return {"loss": (module(x) - x.sum(dim=1, keepdim=True)[..., 1:-1, 1:-1]).square().mean()}

    stop = (lambda _: False) if stop_at is None else (lambda step: step == stop_at)
    training = loop.begin(module, settings)
    loop.train(training, loop.Objective(draw, losses), settings, path=path, seed=3, stop=stop)
    for parameter, state in training.optimizer.state.items():
        assert state["exp_avg"].stride() == parameter.stride()
    return store.load_state(path)[0]


def test_a_run_that_was_interrupted_ends_bit_for_bit_as_one_that_was_not(tmp_path: Path) -> None:
    whole = run_toy(tmp_path / "whole" / "toy.safetensors")
    run_toy(tmp_path / "parts" / "toy.safetensors", stop_at=3)
    assert store.load_state(tmp_path / "parts" / "toy.safetensors")[1] == 3
    parts = run_toy(tmp_path / "parts" / "toy.safetensors")
    assert {name.split(".")[0] for name in whole} == {"weights", "average", "optimizer"}
    assert whole.keys() == parts.keys() and all(torch.equal(whole[name], parts[name]) for name in whole)
    assert not torch.equal(whole["weights.0.weight"], whole["average.0.weight"])


def test_a_stage_that_was_stopped_by_the_clock_goes_on_bit_for_bit(tmp_path: Path) -> None:
    # The statistics that a stage ends with must not come into the steps that follow.
    two = "train.stages.audio_vae.steps=2"
    run_stage(tmp_path / "whole", "audio_vae", two)
    run_stage(tmp_path / "parts", "audio_vae", two, "train.minutes=0")
    assert store.load_state(tmp_path / "parts" / "audio_vae.safetensors")[1] == 1
    run_stage(tmp_path / "parts", "audio_vae", two)
    (whole, steps), (parts, _) = (
        store.load_state(tmp_path / name / "audio_vae.safetensors") for name in ("whole", "parts")
    )
    assert steps == 2 and all(torch.equal(whole[name], parts[name]) for name in whole)
    assert not torch.equal(
        whole["average.decoder.per_channel_statistics.std-of-means"], torch.ones(32)
    ) and torch.equal(whole["weights.decoder.per_channel_statistics.std-of-means"], torch.ones(32))


def test_the_rate_rises_and_falls() -> None:
    settings = StageTraining(100, 3, 1, 1.0, False)
    rates = [loop.rate(step, settings) for step in range(100)]
    assert rates[0] < rates[1] < rates[2] == max(rates) > 0.99 and rates[-1] == pytest.approx(0.02, abs=0.001)


def always(losses: loop.Losses) -> loop.Objective:
    return loop.Objective(lambda *_: {}, lambda _: losses)


def test_a_loss_that_is_no_number_ends_the_run(tmp_path: Path) -> None:
    module, settings = toy()
    bad = {"loss": module[0].weight.sum() * float("nan")}  # type: ignore[index,union-attr]
    with pytest.raises(FloatingPointError, match=r"lower train\.stages\.x\.learning_rate"):
        loop.train(loop.begin(module, settings), always(bad), settings, path=tmp_path / "x.safetensors", seed=0)


def test_weights_that_are_no_numbers_are_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "SAVE_EVERY_S", 0.0)
    module, settings = toy()
    path = tmp_path / "x.safetensors"

    def losses(batch: loop.Batch) -> loop.Losses:
        # The root of 0 is a number and its slope is none; the steps between are not logged.
        return {"loss": (module[0].weight * (3 - batch["step"]).clamp(min=0)).square().sum().sqrt()}  # type: ignore[operator,index,union-attr]

    objective = loop.Objective(lambda step, _: {"step": torch.tensor(float(step))}, losses)
    with pytest.raises(FloatingPointError, match="the gradient of step 4 is nan"):
        loop.train(loop.begin(module, settings), objective, settings, path=path, seed=0)
    tensors, step = store.load_state(path)
    assert step == 3 and all(tensor.isfinite().all() for tensor in tensors.values())


def test_a_stage_names_the_one_that_it_needs(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"run train\.stage=audio_vae with this train\.folder first"):
        run_stage(tmp_path, "vocoder")


def test_a_stage_that_was_killed_is_not_read_before_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its statistics are measured when it ends.
    with monkeypatch.context() as patched:
        patched.setattr(train_tiny, "_finish", lambda *_: None)
        run_stage(tmp_path, "audio_vae", "train.stages.audio_vae.steps=1")
    with pytest.raises(ConfigurationError, match=r"left at step 1; run train\.stage=audio_vae again"):
        run_stage(tmp_path, "vocoder")
    run_stage(tmp_path, "audio_vae", "train.stages.audio_vae.steps=1")
    assert "decoder.per_channel_statistics.std-of-means" in store.load_average(tmp_path, "audio_vae")


def test_a_state_of_another_architecture_is_named(tmp_path: Path) -> None:
    module, settings = toy()
    path = tmp_path / "x.safetensors"
    loop.store(loop.begin(module, settings), path)
    for other in (nn.Sequential(nn.Conv2d(3, 4, 2)), nn.Sequential(nn.Conv2d(3, 4, 2), nn.SiLU(), nn.Conv2d(4, 1, 2))):
        with pytest.raises(ConfigurationError, match=r"x\.safetensors is of another architecture, which shows in '"):
            loop.restore(loop.begin(other, settings), path)


FIVE_SIZES = ",".join(f"{{num_frames: {frames}, height: 64, width: 64}}" for frames in range(1, 41, 8))


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["train.folder=null"], "train.folder is not set; give"),
        (["parallel.data_size=2"], "runs on one device"),
        (["model=ltx2_3_tiny"], "trains LTX-2 2.0 from nothing, not model=ltx2_3_tiny with"),
        (["model.weights=load"], "model.weights=load; use experiment=train_ltx2_tiny"),
        (["train.judged_clips=0"], "train.judged_clips=0 is too few"),
        (["train.caption_dropout=1.5"], "train.caption_dropout=1.5 is no part of 1"),
        (["train.stages.vocoder.steps=0"], "train.stages.vocoder.steps=0 is too few"),
        (["train.sizes=[]"], r"train.sizes=\[\] has no clips"),
        (["train.sizes=[{num_frames: 9, height: 96, width: 64}]"], r"train.sizes\[0\].height=96 is not a multiple of"),
        (["train.sizes=[{num_frames: 8, height: 64, width: 64}]"], r"train.sizes\[0\].num_frames=8 is not 8k \+ 1"),
        (
            ["train.diffusion_sizes=[{num_frames: 9, height: 64, width: 96}, {num_frames: 9, height: 96, width: 64}]"],
            "has 2 sizes with 1 different numbers of tokens",
        ),
        (
            [f"train.diffusion_sizes=[{FIVE_SIZES}]"],
            "has 5 sizes .* give at most 4",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_is_refused(overrides: list[str], sentence: str, tmp_path: Path) -> None:
    job = job_of(tmp_path, *overrides)
    with pytest.raises(ConfigurationError, match=sentence):
        validate(job.config, job.requests, job.architecture, 0, job.checkpoint)


@pytest.mark.parametrize("experiment", ["train_ltx2_tiny", "train_ltx2_tiny_dry"])
def test_the_experiments_can_be_trained(experiment: str, tmp_path: Path) -> None:
    job = job_of(tmp_path, f"experiment={experiment}")
    validate(job.config, job.requests, job.architecture, 0)


# ---------------------------------------------------------------- each stage


@dataclass
class Stage:
    module: nn.Module
    objective: loop.Objective


def stage_of(name: str) -> Stage:
    config = compose_config()
    job = job_of(Path("unused"))
    train, architecture = config.train, job.architecture
    torch.manual_seed(0)
    if name == "video_vae":
        vae: Any = ltx2_vae.build_video_vae(architecture)
        return Stage(vae, video_vae.video_objective(vae, VIDEO_COMPRESSION, 1e-6, train, CPU))
    sounds = audio_vae.AudioVae(architecture)
    if name == "audio_vae":
        return Stage(sounds, audio_vae.audio_objective(sounds, train, CPU))
    if name == "vocoder":
        module = vocoder.build_vocoder(architecture)
        sounds.requires_grad_(False)
        return Stage(module, vocoder.vocoder_objective(module, sounds, train, CPU))
    size = train.sizes[0]
    geometry = geometry_of(size)
    if name == "diffusion":
        model = ltx2_training.DiffusionModel(transforms.text_config(job), architecture)
        tokens = captions.caption_tokens(data.scenes_of(train, 0, 4), 2, 32, 0, GEMMA)
        table = diffusion.Table(
            geometry,
            torch.randn(4, geometry.grid_tokens, 32),
            torch.randn(4, geometry.audio_tokens, 32),
            tokens,
            captions.one_text("", 32, GEMMA),
            GEMMA,
        )
        return Stage(model, diffusion.diffusion_objective(model, [table], replace(train, image_conditioning=0.5)))
    enlarge = LatentUpsampler(upsampler.upsampler_config(architecture, train))
    small, large = torch.randn(4, 32, 2, 2, 2), torch.randn(4, 32, 2, 4, 4)
    return Stage(enlarge, upsampler.upsampler_objective(enlarge, small, large, PerChannelStatistics(32), train))


STEPS = {"video_vae": 5, "audio_vae": 5, "vocoder": 8, "diffusion": 8, "upsampler": 20}


@pytest.mark.parametrize("name", STEPS)
def test_every_weight_of_a_stage_is_reached_and_its_loss_falls(name: str, tmp_path: Path) -> None:
    stage = stage_of(name)

    batch = stage.objective.draw(0, torch.Generator().manual_seed(0))
    same = loop.Objective(lambda *_: batch, stage.objective.losses)
    with torch.no_grad():
        first = same.losses(batch)["loss"]
    settings = StageTraining(STEPS[name], 1, 2, 3e-3, False)
    loop.train(loop.begin(stage.module, settings), same, settings, path=tmp_path / f"{name}.safetensors", seed=0)
    # Those of the last step: what residual blocks begin with hears of nothing before what they end with has moved.
    unreached = [n for n, p in stage.module.named_parameters() if p.grad is None or not p.grad.any()]
    assert unreached == []
    with torch.no_grad():
        last = same.losses(batch)["loss"]
    assert last < 0.9 * first


def test_normalised_states_have_the_gradient_of_the_same_maths_out_of_place() -> None:
    torch.manual_seed(0)
    states = torch.randn(2, 5, 3, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    weight = torch.randn(2, 5, 12, dtype=torch.float64)

    def plain(x: Tensor) -> Tensor:
        rows = []
        for sample, valid in zip(x, mask.bool(), strict=True):
            kept = sample[valid]
            spread = kept.amax(dim=(0, 1)) - kept.amin(dim=(0, 1))
            mean = kept.sum(dim=(0, 1)) / (kept[..., 0].numel() + 1e-6)
            rows.append(torch.where(valid[:, None, None], 8 * (sample - mean) / (spread + 1e-6), 0.0))
        return torch.stack(rows).flatten(2)

    torch.testing.assert_close(normalise_states(states, mask), plain(states))
    (ours,) = torch.autograd.grad((normalise_states(states, mask) * weight).sum(), states)
    (theirs,) = torch.autograd.grad((plain(states) * weight).sum(), states)
    torch.testing.assert_close(ours, theirs)


# ---------------------------------------------------------------- flow matching


def test_the_velocity_leads_back_to_the_clean_tokens_and_a_given_frame_is_clean() -> None:
    generator = torch.Generator().manual_seed(0)
    geometry = geometry_of(compose_config().train.sizes[0])
    video, audio = torch.randn(64, geometry.grid_tokens, 5), torch.randn(64, geometry.audio_tokens, 6)
    noisy = diffusion.add_noise(video, audio, geometry, shift=1.0, held=0.5, generator=generator)
    token_sigma = torch.where(noisy.given, 0.0, noisy.sigma[:, None])
    torch.testing.assert_close(to_x0(noisy.video, token_sigma, noisy.video_velocity), video)
    torch.testing.assert_close(to_x0(noisy.audio, noisy.sigma, noisy.audio_velocity), audio)
    held = noisy.given.any(dim=1)
    assert 20 < held.sum() < 44 and noisy.given[held].sum(dim=1).eq(geometry.frame_tokens).all()
    first = slice(0, geometry.frame_tokens)
    assert torch.equal(noisy.video[held][:, first], video[held][:, first])
    assert noisy.given[held][:, first].all() and not noisy.given[:, geometry.frame_tokens :].any()


def test_a_given_frame_has_no_part_in_the_loss() -> None:
    geometry = geometry_of(compose_config().train.sizes[0])
    video, audio = torch.zeros(4, geometry.grid_tokens, 5), torch.zeros(4, geometry.audio_tokens, 6)
    noisy = diffusion.add_noise(video, audio, geometry, 1.0, 1.0, torch.Generator().manual_seed(0))
    wrong = noisy.video_velocity + 100 * noisy.given[..., None] + 2 * ~noisy.given[..., None]
    assert float(diffusion.flow_losses(wrong, audio + noisy.audio_velocity, noisy)["loss"]) == pytest.approx(
        4, abs=1e-4
    )


def test_noise_levels_are_those_of_a_shifted_logit_normal() -> None:
    sigma = diffusion.draw_sigma(20000, 1.5, torch.Generator().manual_seed(0))
    assert float(sigma.median()) == pytest.approx(0.80, abs=0.02) and float((sigma < 0.05).float().mean()) > 0.004
    assert sigma.min() >= diffusion.LEAST_SIGMA and sigma.max() <= 1


@pytest.mark.parametrize("text_format", [GEMMA, UMT5])
def test_captions_in_one_batch_are_the_tokens_of_each(text_format: TextFormat) -> None:
    scenes = data.scenes_of(compose_config().train, 0, 3)
    ids, mask = captions.caption_tokens(scenes, 2, 32, 0, text_format)
    draw = random.Random("0/captions")
    texts = [caption(scene, draw) for scene in scenes for _ in range(2)]
    assert len(set(texts)) > 3
    backend = build_tokenizer(text_format)
    pipeline = gemma3.Tokenizer(backend, bos_id=2, pad_id=0) if text_format is GEMMA else umt5.Tokenizer(backend, 1, 0)
    tokens = pipeline.tokenize(texts, 32)
    assert torch.equal(ids.flatten(0, 1).long(), tokens.input_ids)
    assert torch.equal(mask.flatten(0, 1).long(), tokens.attention_mask)
    for text, row, valid in zip(texts, ids.flatten(0, 1), mask.flatten(0, 1), strict=True):
        one_ids, one_mask = captions.one_text(text, 32, text_format)
        assert torch.equal(row, one_ids) and torch.equal(valid, one_mask)
    with pytest.raises(ValueError, match="max_length=4; use"):
        captions.caption_tokens(scenes, 2, 4, 0, text_format)


def test_captions_are_dropped_whole() -> None:
    tokens = captions.caption_tokens(data.scenes_of(compose_config().train, 0, 3), 2, 32, 0, GEMMA)
    empty = captions.one_text("", 32, GEMMA)
    chosen = captions.choose(tokens, torch.tensor([2, 0]), torch.tensor([1, 0]))
    ids, mask = captions.with_dropout(chosen, empty, torch.tensor([True, False]))
    assert int(mask[0].sum()) == 1 and int(ids[0, -1]) == 2
    assert torch.equal(ids[1], tokens[0][0, 0].long()) and int(mask[1].sum()) > 5


# ---------------------------------------------------------------- the export


def load(job: Job, component: str) -> Any:
    return ltx2._load(job, component, CPU)


def test_the_export_has_the_official_names_of_diffusers_video_vae() -> None:
    parts = tiny_ltx2.build_parts()
    official = {name: t for name, t in tiny_ltx2.official_tensors(parts).items() if name.startswith("vae.")}
    known = {name: t for name, t in official.items() if "statistics.channel" not in name and "mean-of-stds" not in name}
    ours = {
        official_name(component, name): tensor
        for component, tensors in video_components(parts.vae.state_dict()).items()
        for name, tensor in tensors.items()
    }
    assert ours.keys() == known.keys() and all(torch.equal(ours[name], known[name]) for name in ours)


def test_the_exported_video_vae_is_the_trained_one(trained: Path, job: Job) -> None:
    twin = average(trained, "video_vae", ltx2_vae.build_video_vae(job.architecture))
    video = data.video_of(data.scenes_of(job.config.train, 0, 1), job.config.train.sizes[0], CPU)
    means = video_vae.encode_means(twin, video)
    mean, std = (t.view(-1, 1, 1, 1) for t in (twin.latents_mean, twin.latents_std))
    normed = load(job, "video_encoder")(video)
    torch.testing.assert_close(normed, (means - mean) / std, atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        theirs = twin.decode(means, return_dict=False)[0]
    torch.testing.assert_close(load(job, "video_decoder")((means - mean) / std), theirs, atol=1e-5, rtol=1e-4)
    assert not torch.equal(twin.latents_std, torch.ones(32))


def test_the_exported_audio_parts_are_the_trained_ones(trained: Path, job: Job) -> None:
    vae = average(trained, "audio_vae", audio_vae.AudioVae(job.architecture))
    voice = average(trained, "vocoder", Vocoder(job.architecture.vocoder))
    mel = log_mel(torch.randn(1, 2, 6000), job.architecture.audio_encoder)
    encoded = load(job, "audio_encoder")(mel)
    assert torch.equal(encoded, vae.encoder(mel))
    decoded = load(job, "audio_decoder")(encoded)
    assert torch.equal(decoded, vae.decoder(encoded)) and torch.equal(load(job, "vocoder")(decoded), voice(decoded))


def test_the_exported_transformer_and_text_are_the_trained_ones_and_diffusers(trained: Path, job: Job) -> None:
    model = average(trained, "diffusion", ltx2_training.DiffusionModel(transforms.text_config(job), job.architecture))
    text = TextComponents(
        load_tokenizer(trained / TEXT_ENCODER), load(job, "text_encoder"), load(job, "connectors"), 32
    )
    context = encode_prompts(text, [PROMPT], CPU)[0]
    ids, mask = captions.one_text(PROMPT, 32, GEMMA)
    video_text, audio_text = model.contexts(ids[None].long(), mask[None].long())
    torch.testing.assert_close(context.video, video_text)
    torch.testing.assert_close(context.audio, audio_text)

    geometry = geometry_of(job.config.train.sizes[0])
    video, audio = torch.randn(1, geometry.grid_tokens, 32), torch.randn(1, geometry.audio_tokens, 32)
    noisy = diffusion.add_noise(video, audio, geometry, 1.0, 0.0, torch.Generator().manual_seed(1))
    trained_velocities = model.velocities(noisy, (video_text, audio_text), geometry)
    ours = load(job, "transformer")
    streams = (Stream(x, noisy.sigma, noisy.sigma, text) for x, text in (
        (noisy.video, context.video), (noisy.audio, context.audio)
    ))  # fmt: skip
    ours_velocities = ours(*streams, ours.rope_tables(geometry, CPU, torch.float32))
    theirs = peers.diffusers_transformer(ours, job.architecture.transformer)(
        hidden_states=noisy.video,
        audio_hidden_states=noisy.audio,
        encoder_hidden_states=context.video,
        audio_encoder_hidden_states=context.audio,
        timestep=noisy.sigma * 1000,
        sigma=noisy.sigma * 1000,
        num_frames=geometry.latent_frames,
        height=geometry.latent_height,
        width=geometry.latent_width,
        fps=geometry.fps,
        audio_num_frames=geometry.audio_tokens,
        return_dict=False,
    )
    for one, two, three in zip(trained_velocities, ours_velocities, theirs, strict=True):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(two, three, atol=1e-5, rtol=1e-5)


def test_the_exported_upsampler_loads(trained: Path, job: Job) -> None:
    files = checkpoint_files.resolve_upsampler(str(trained / UPSAMPLER))
    module = LatentUpsampler(upsampler.upsampler_config(job.architecture, job.config.train))
    with checkpoint.upsampler_source(files) as source:
        checkpoint.load_module(module, source, device=CPU, dtype=torch.float32)
    twin = average(trained, "upsampler", LatentUpsampler(module.config))
    grid = torch.randn(1, 32, 2, 2, 2)
    assert torch.equal(module(grid), twin(grid))


def test_the_full_experiment_is_small_enough(tmp_path: Path) -> None:
    with initialize_config_dir(app.conf_dir(), version_base="1.3"):
        composed = compose("config", ["experiment=train_ltx2_tiny", "device=cpu"])
    config = from_mapping(OmegaConf.to_container(composed, resolve=True))  # type: ignore[arg-type]
    job = plan_job(config, build_requests(config.request), tmp_path, num_gpus=0, sweep=None)
    with torch.device("meta"):
        modules = [build(job) for build in ltx2.MODULES.values()]
        modules.append(LatentUpsampler(upsampler.upsampler_config(job.architecture, config.train)))
    assert 2 * sum(p.numel() for module in modules for p in module.parameters()) < 20e6


def test_the_export_is_bf16_with_the_config(trained: Path) -> None:
    with safe_open(trained / CHECKPOINT, framework="pt") as file:
        assert json.loads(file.metadata()["config"])["transformer"]["num_layers"] == 4
        dtypes = {name: file.get_tensor(name).dtype for name in file.keys()}  # noqa: SIM118
    assert all((dtype == torch.float32) == ("statistics" in name) for name, dtype in dtypes.items())


# ---------------------------------------------------------------- on a GPU


@pytest.mark.gpu
def test_graphed_steps_are_the_eager_ones_bit_for_bit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    device = torch.device("cuda")

    def run(path: Path) -> dict[str, Tensor]:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 1)).to(device)

        def draw(step: int, generator: torch.Generator) -> loop.Batch:
            # Two sets of shapes that take turns, so that each has its own graph.
            return {"x": torch.randn(16 + step % 2, 8, generator=generator, device=device)}

        def losses(batch: loop.Batch) -> loop.Losses:
            x = batch["x"]
            return {"loss": (module(x) - x.sum(dim=1, keepdim=True)).square().mean()}

        settings = StageTraining(12, 1, 16, 1e-2, False)
        loop.train(loop.begin(module, settings), loop.Objective(draw, losses), settings, path=path, seed=3)
        return store.load_state(path)[0]

    replays: list[int] = []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda self: (replays.append(1), replay(self))[1])
    graphed = run(tmp_path / "graphed" / "toy.safetensors")
    assert len(replays) == 12 - 2 * graphs.WARM_STEPS
    monkeypatch.setattr(graphs, "WARM_STEPS", 100)
    eager = run(tmp_path / "eager" / "toy.safetensors")
    assert len(replays) == 12 - 4 and all(torch.equal(graphed[name], eager[name]) for name in eager)
