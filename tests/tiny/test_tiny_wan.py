"""Training of the tiny Wan: its VAE's twin is the VAE, clips are the pipeline's, and the export is what diffusers runs.

The loop, the captions and the judge are the tiny LTX-2's, and tested with it.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vgen import app, transforms
from vgen.components import wan as components
from vgen.config import Config, StageTraining, from_mapping
from vgen.job import Job, plan_job
from vgen.media import to_uint8
from vgen.models.ltx2.video_vae import PerChannelStatistics
from vgen.models.wan.conditioning import hold_first_frames
from vgen.models.wan.patches import patchify
from vgen.models.wan.vae import VideoDecoder, VideoEncoder
from vgen.pipelines import wan as pipeline
from vgen.requests import build_requests
from vgen.residency import Residency
from vgen.stages.wan_condition import WanInputs
from vgen.stages.wan_denoise import WanConditioning, build_serial_step, denoise
from vgen.tasks import train_tiny
from vgen.tasks.types import TaskContext
from vgen.tiny.tokenizer import UMT5
from vgen.tiny.training import captions, data, diffusion, loop, samples, store, video_vae, wan
from vgen.tiny.training.families import FAMILIES
from vgen.tiny.training.wan_export import PIPELINE
from vgen.tiny.training.wan_vae import WanVae, compression
from vgen.typed import ConfigurationError
from vgen.validate import validate

CPU = torch.device("cpu")
FAMILY = FAMILIES["wan"]
LENGTH = 32
PROMPT = "a red circle moves right"
STAGES = ("video_vae", "diffusion", "export")


def compose_config(*overrides: str, experiment: str = "train_wan_tiny_dry") -> Config:
    with initialize_config_dir(app.conf_dir(), version_base="1.3"):
        composed = compose("config", [f"experiment={experiment}", "device=cpu", *overrides])
    return from_mapping(OmegaConf.to_container(composed, resolve=True))  # type: ignore[arg-type]


def job_of(folder: Path, *overrides: str, experiment: str = "train_wan_tiny_dry") -> Job:
    config = compose_config(f"train.folder={folder}", *overrides, experiment=experiment)
    return plan_job(config, build_requests(config.request), folder, num_gpus=0, sweep=None)


def run_stage(folder: Path, stage: str, *overrides: str) -> None:
    job = job_of(folder, f"train.stage={stage}", *overrides)
    train_tiny.run(TaskContext(job, CPU))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every stage, one step each, and the export."""
    folder = tmp_path_factory.mktemp("wan")
    for stage in STAGES:
        steps = [f"train.stages.{stage}.steps=1"] if stage != "export" else []
        run_stage(folder, stage, "train.table_clips=4", "sampler.steps=1", *steps)
    return folder


@pytest.fixture(scope="module")
def job(trained: Path) -> Job:
    """What loads the export, in fp32, and makes a clip of two steps by diffusers' sigmas."""
    config = compose_config(
        "task=generate",
        "model.weights=load",
        f"model.checkpoint={trained / PIPELINE}",
        "quant=fp32",
        f"request.prompt={PROMPT}",
        "request.num_frames=9",
        "request.height=64",
        "request.width=96",
        "sampler.steps=3",
        "sampler.schedule=diffusers",
    )
    return plan_job(config, build_requests(config.request), trained, num_gpus=0, sweep=None)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def largest(ours: Tensor, other: Tensor) -> float:
    assert ours.shape == other.shape
    return float((ours - other).abs().max())


# ---------------------------------------------------------------- the VAE's twin


def shaken(vae: WanVae) -> WanVae:
    """With weights of which none is 0 or 1 by chance."""
    generator = seeded()
    with torch.no_grad():
        for name, parameter in vae.named_parameters():
            spread = 0.5 * max(1, parameter[0].numel()) ** -0.5
            parameter.copy_(spread * torch.randn(parameter.shape, generator=generator) + name.endswith("gamma"))
    return vae


@pytest.mark.parametrize("num_frames", [1, 9])
def test_the_twin_is_the_vae_that_runs_and_diffusers(num_frames: int) -> None:
    from diffusers import AutoencoderKLWan

    from vgen.tiny.training.wan_export import STATISTICS, vae_config

    architecture = job_of(Path("unused")).architecture
    twin = shaken(WanVae(architecture.vae))
    weights = {name: tensor for name, tensor in twin.state_dict().items() if name not in STATISTICS}
    encoder, decoder = VideoEncoder(architecture.vae), VideoDecoder(architecture.vae)
    for half, starts in ((encoder, ("encoder.", "quant_conv.")), (decoder, ("decoder.", "post_quant_conv."))):
        half.load_state_dict({name: tensor for name, tensor in weights.items() if name.startswith(starts)})
    sizes = json.loads(json.dumps(vae_config(architecture)))  # with lists, as in the file
    del sizes["_class_name"]
    theirs = AutoencoderKLWan(**sizes, **{name: [0.0] * 48 for name in STATISTICS})
    theirs.load_state_dict(weights)

    video = 2 * torch.rand(2, 3, num_frames, 64, 96, generator=seeded(1)) - 1
    with torch.no_grad():
        (posterior,) = twin.encode(video)
        other = theirs.encode(video).latent_dist
        # Measured: 4e-7 of means whose deviation is 0.6, and 9e-7 of frames with 0.5.
        assert posterior.mean.std() > 0.3
        assert largest(posterior.mean, other.mean) < 2e-6 and largest(posterior.logvar, other.logvar) < 2e-6
        assert largest(posterior.mean, encoder(video)) < 2e-6
        latents = torch.randn(posterior.mean.shape, generator=seeded(2))
        (frames,) = twin.decode(latents)
        assert frames.std() > 0.2
        assert largest(frames, decoder(latents)) < 2e-6
        assert largest(frames.clamp(-1, 1), theirs.decode(latents).sample) < 2e-6


def test_it_begins_nearly_linear_with_little_noise() -> None:
    vae = WanVae(job_of(Path("unused")).architecture.vae)
    video = 2 * torch.rand(1, 3, 5, 64, 64, generator=seeded()) - 1
    with torch.no_grad():
        logvar = vae.encode(video)[0].logvar
    assert float(logvar.mean()) == pytest.approx(video_vae.FIRST_LOG_VARIANCE, abs=0.5)
    assert all(not p.any() for name, p in vae.named_parameters() if ".conv2." in name)


def test_latents_have_the_compression_of_the_architecture() -> None:
    architecture = job_of(Path("unused"), experiment="train_wan_tiny").architecture
    assert compression(architecture.vae) == (4, 16, 16)
    assert FAMILY.geometry(SimpleNamespace(num_frames=17, height=128, width=128), (4, 16, 16)).video_tokens == 80


# ---------------------------------------------------------------- stages


def objective_of(name: str) -> tuple[Any, loop.Objective]:
    job = job_of(Path("unused"))
    config, architecture = job.config.train, job.architecture
    torch.manual_seed(0)
    if name == "video_vae":
        vae = WanVae(architecture.vae)
        return vae, video_vae.video_objective(vae, compression(architecture.vae), FAMILY.kl_weight, config, CPU)
    model = wan.DiffusionModel(transforms.text_config(job), architecture)
    geometry = wan.geometry_of(config.sizes[0], compression(architecture.vae))
    tokens = captions.caption_tokens(data.scenes_of(config, 0, 4), 2, LENGTH, 0, UMT5)
    latents = torch.randn(4, geometry.video_tokens, 192)
    table = diffusion.Table(geometry, latents, None, tokens, captions.one_text("", LENGTH, UMT5), UMT5)
    return model, diffusion.diffusion_objective(model, [table], replace(config, image_conditioning=0.5))


def test_the_kl_term_weighs_what_the_family_says() -> None:
    job = job_of(Path("unused"))
    vae = WanVae(job.architecture.vae)
    light, heavy = (video_vae.video_objective(vae, (4, 16, 16), weight, job.config.train, CPU) for weight in (0.0, 2.0))
    batch = light.draw(0, seeded())
    with torch.no_grad():
        one, other = light.losses(batch), heavy.losses(batch)
    assert one["kl"] > 1
    torch.testing.assert_close(other["loss"] - one["loss"], 2 * one["kl"], atol=1e-4, rtol=0)


@pytest.mark.parametrize(("name", "steps"), [("video_vae", 8), ("diffusion", 8)])
def test_every_weight_of_a_stage_is_reached_and_its_loss_falls(name: str, steps: int, tmp_path: Path) -> None:
    module, objective = objective_of(name)
    batch = objective.draw(0, seeded())
    same = loop.Objective(lambda *_: batch, objective.losses)
    with torch.no_grad():
        first = same.losses(batch)["loss"]
    settings = StageTraining(steps, 1, 2, 3e-3, False)
    loop.train(loop.begin(module, settings), same, settings, path=tmp_path / f"{name}.safetensors", seed=0)
    unreached = [n for n, p in module.named_parameters() if p.grad is None or not p.grad.any()]
    assert unreached == []
    with torch.no_grad():
        last = same.losses(batch)["loss"]
    assert last < 0.9 * first


def test_a_step_of_the_diffusion_draws_from_its_generator_alone() -> None:
    model, objective = objective_of("diffusion")
    model.train()
    batch = objective.draw(3, seeded())
    again = objective.draw(3, seeded())
    assert all(torch.equal(batch[name], again[name]) for name in batch)
    torch.manual_seed(1)
    first = objective.losses(batch)["loss"]
    torch.manual_seed(2)
    assert torch.equal(first, objective.losses(batch)["loss"])


class OnDevice(TorchDispatchMode):
    """Refuses what would wait for a device or copy to it; ``meta`` stands for it, and refuses ``item`` itself."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        devices = {leaf.device.type for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)}
        assert devices <= {"meta"}, f"{func} is on {devices}"
        return out


@pytest.mark.parametrize("name", ["video_vae", "diffusion"])
def test_a_cuda_graph_can_hold_a_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import masking_utils

    # As while a graph is captured: it then does not look at the mask.
    monkeypatch.setattr(masking_utils, "is_tracing", lambda *_: True)
    module, objective = objective_of(name)
    batch = {key: tensor.to("meta") for key, tensor in objective.draw(0, seeded()).items()}
    module.to("meta")
    if name == "diffusion":
        # Two steps run before a graph is captured, and the tables of positions are kept.
        geometry = wan.geometry_of(compose_config().train.sizes[0], (4, 16, 16))
        module.transformer.rope_tables(geometry, torch.device("meta"))
    with OnDevice():
        objective.losses(batch)["loss"].backward()


def test_a_vae_that_was_stopped_by_the_clock_goes_on_bit_for_bit(tmp_path: Path) -> None:
    settings = ("train.stages.video_vae.steps=2", "train.table_clips=4")
    run_stage(tmp_path / "whole", "video_vae", *settings)
    run_stage(tmp_path / "parts", "video_vae", *settings, "train.minutes=0")
    assert store.load_state(tmp_path / "parts" / "video_vae.safetensors")[1] == 1
    run_stage(tmp_path / "parts", "video_vae", *settings)
    whole, parts = (store.load_state(tmp_path / name / "video_vae.safetensors")[0] for name in ("whole", "parts"))
    assert whole.keys() == parts.keys() and all(torch.equal(whole[name], parts[name]) for name in whole)
    assert not torch.equal(whole["average.latents_std"], torch.ones(48))
    assert torch.equal(whole["weights.latents_std"], torch.ones(48))


def test_latents_of_the_diffusion_are_normalized(trained: Path) -> None:
    job = job_of(trained)
    vae, statistics = train_tiny._video_vae(job, trained, CPU)
    size = job.config.train.sizes[0]
    video = data.video_of(data.scenes_of(job.config.train, 0, 16), size, CPU)
    means = video_vae.encode_means(vae, video)
    normed = statistics.normalize(means)
    # The statistics are of 16 clips, 8 batches of 2: these.
    assert largest(normed.mean(dim=(0, 2, 3, 4)), torch.zeros(48)) < 1e-4
    torch.testing.assert_close(normed.std(dim=(0, 2, 3, 4)), torch.ones(48), atol=1e-4, rtol=0)
    torch.testing.assert_close(statistics(normed), means)


def test_the_diffusion_reads_the_latents_of_the_clips(trained: Path) -> None:
    job = job_of(trained, "train.table_clips=4")
    vae, statistics = train_tiny._video_vae(job, trained, CPU)
    decoders = samples.Decoders(FAMILY, vae, statistics)
    tables = train_tiny._build_tables(job, decoders, None, CPU)
    assert [table.video.shape for table in tables.values()] == [(4, 3 * 4, 192), (4, 5 * 4, 192)]
    size = job.config.train.diffusion_sizes[1]
    table = tables[size]
    assert table.audio is None and table.captions[0].shape == (4, 2, LENGTH)
    video = data.video_of(data.scenes_of(job.config.train, 0, 4), size, CPU)
    means = video_vae.encode_means(vae, video)
    assert largest(statistics(FAMILY.unpack(table.video, table.geometry)), means) < 1e-5
    with torch.no_grad():
        frames = to_uint8(vae.decode(means)[0][:1]).numpy()
    shown = samples.decode_video(decoders, table.video, table.geometry)[0]
    assert np.abs(shown.astype(int) - frames).max() <= 1 and frames.std() > 1


@pytest.mark.parametrize("stage", ["audio_vae", "vocoder", "upsampler"])
def test_stages_of_sound_and_upsampling_are_refused(stage: str, tmp_path: Path) -> None:
    job = job_of(tmp_path, f"train.stage={stage}")
    with pytest.raises(ConfigurationError, match=f"train.stage={stage} is not of Wan's training; use one of: video"):
        validate(job.config, job.requests, job.architecture, 0, job.checkpoint)


@pytest.mark.parametrize("experiment", ["train_wan_tiny", "train_wan_tiny_dry"])
def test_the_experiments_can_be_trained(experiment: str, tmp_path: Path) -> None:
    job = job_of(tmp_path, experiment=experiment)
    validate(job.config, job.requests, job.architecture, 0)


def test_the_full_experiment_is_small_enough_and_its_heads_divide_by_4(tmp_path: Path) -> None:
    job = job_of(tmp_path, experiment="train_wan_tiny")
    with torch.device("meta"):
        modules = [FAMILY.build_video_vae(job.architecture)]
        modules.append(FAMILY.build_model(transforms.text_config(job), job.architecture))
    assert 2 * sum(p.numel() for module in modules for p in module.parameters()) < 19.5e6
    transformer = job.architecture.transformer
    assert transformer.num_attention_heads % 4 == 0
    # Or the noise of a token would not pass.
    assert transformer.width > 4 * transformer.in_channels


# ---------------------------------------------------------------- clips


TOKENS = captions.text_tokens([PROMPT, "a cyan square goes up"], LENGTH, UMT5)
EMPTY = captions.one_text("", LENGTH, UMT5)
SAMPLER = SimpleNamespace(solver="unipc", schedule="official", shift=5.0, steps=6, guidance_scale=3.0)


class FakeModel:
    """Answers with ``field``'s velocities; a context is the number of words in its caption. Keeps what it was given."""

    transformer = SimpleNamespace(config=SimpleNamespace(in_channels=2))

    def __init__(self, field: Callable[[diffusion.Noisy, Tensor], Tensor]) -> None:
        self.field = field
        self.seen: list[diffusion.Noisy] = []
        self.texts: list[captions.Tokens] = []

    def contexts(self, ids: Tensor, mask: Tensor) -> Tensor:
        self.texts.append((ids, mask))
        return mask.sum(dim=1).float() - 1

    def velocities(self, noisy: diffusion.Noisy, contexts: Tensor, geometry: Any) -> tuple[Tensor, None]:
        assert geometry.video_tokens == noisy.video.shape[1] and noisy.audio is None
        self.seen.append(noisy)
        return self.field(noisy, contexts), None


GEOMETRY = wan.geometry_of(SimpleNamespace(num_frames=9, height=64, width=96), (4, 16, 16))  # type: ignore[arg-type]


def constant(noisy: diffusion.Noisy, words: Tensor) -> Tensor:
    """One velocity for each number of words."""
    return words[:, None, None].expand_as(noisy.video)


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_guidance_goes_on_from_the_empty_caption_through_the_caption(scale: float) -> None:
    model: Any = FakeModel(constant)
    sampler: Any = SimpleNamespace(**{**vars(SAMPLER), "guidance_scale": scale})
    video, audio = wan.generate(model, TOKENS, EMPTY, GEOMETRY, sampler, seeded())
    noise = torch.randn(2, GEOMETRY.video_tokens, 8, generator=seeded())
    words = (TOKENS[1].sum(dim=1).float() - 1)[:, None, None]
    # The velocities do not change on the way, which is from 0.9998 to 0; that of the empty caption is 0.
    assert audio is None
    torch.testing.assert_close(video, noise - 0.9998 * scale * words, atol=1e-3, rtol=0)
    assert all(map(torch.equal, model.texts[0], TOKENS))
    assert len(model.texts) == (1 if scale == 1 else 2), "without guidance nobody reads the empty caption"
    if scale != 1:
        for made, one in zip(model.texts[1], EMPTY, strict=True):
            assert torch.equal(made, one.long().expand(2, -1))


def test_a_held_first_frame_comes_back_unchanged() -> None:
    model: Any = FakeModel(constant)
    size, sampler = GEOMETRY.frame_tokens, SAMPLER
    frame = torch.randn(2, size, 8, generator=seeded(1))
    video, _ = wan.generate(model, TOKENS, EMPTY, GEOMETRY, sampler, seeded(), frame)  # type: ignore[arg-type]
    assert torch.equal(video[:, :size], frame)
    for noisy in model.seen:
        assert noisy.given[:, :size].all() and not noisy.given[:, size:].any()
        assert torch.equal(noisy.video[:, :size], frame)


def test_tokens_are_the_latents_that_they_were() -> None:
    grid = (2, 48, GEOMETRY.latent_frames, GEOMETRY.latent_height, GEOMETRY.latent_width)
    latents = torch.randn(grid, generator=seeded())
    tokens = FAMILY.pack(latents, GEOMETRY)
    assert tokens.shape == (2, GEOMETRY.video_tokens, 192)
    assert torch.equal(FAMILY.unpack(tokens, GEOMETRY), latents)


@pytest.fixture(scope="module")
def model() -> wan.DiffusionModel:
    job = job_of(Path("unused"))
    torch.manual_seed(0)
    return wan.DiffusionModel(transforms.text_config(job), job.architecture).eval()


@pytest.mark.parametrize("held", [False, True])
def test_it_makes_what_the_pipeline_makes_of_the_same_noise(model: wan.DiffusionModel, held: bool) -> None:
    tokens = TOKENS[0][:1], TOKENS[1][:1]
    sampler: Any = SAMPLER
    size = (GEOMETRY.latent_height, GEOMETRY.latent_width)
    clean = torch.randn(1, 48, 1, *size, generator=seeded(1))
    frame = patchify(clean, wan.Geometry(1, *size)) if held else None
    video, _ = wan.generate(model, tokens, EMPTY, GEOMETRY, sampler, seeded(), frame)

    start = wan.unpack(torch.randn(1, GEOMETRY.video_tokens, 192, generator=seeded()), GEOMETRY)
    with torch.no_grad():
        texts = [model.contexts(*tokens), model.contexts(EMPTY[0][None].long(), EMPTY[1][None].long())]
    inputs = WanInputs(held=hold_first_frames(clean, GEOMETRY.latent_frames) if held else None)
    conditioning = WanConditioning(GEOMETRY, texts[0], texts[1], inputs)
    plans = pipeline.plan_request(replace_sampler(sampler), None)
    residency = Residency(CPU, {"transformer": model.transformer}, {})
    made = denoise(lambda _, c: build_serial_step(model.transformer, c), conditioning, start, plans, residency)
    # Measured: 3e-6 of values whose deviation is 1.2.
    assert largest(wan.unpack(video, GEOMETRY), made) < 1e-5
    assert largest(made, start) > 0.5


def replace_sampler(sampler: Any) -> Any:
    return SimpleNamespace(**{**vars(sampler), "guidance_scale_2": None})


def test_clips_are_judged_by_their_frames_alone(model: wan.DiffusionModel) -> None:
    job = job_of(Path("unused"), "train.judged_clips=3")
    torch.manual_seed(0)
    vae = WanVae(job.architecture.vae).eval()
    decoders = samples.Decoders(FAMILY, vae, PerChannelStatistics(48))
    geometry = wan.geometry_of(job.config.train.sizes[0], (4, 16, 16))
    sampler: Any = SAMPLER
    clips = samples.judge(
        lambda tokens: wan.generate(model, tokens, EMPTY, geometry, sampler, seeded()),
        decoders, geometry, job.config.train, LENGTH, CPU,
    )  # fmt: skip
    assert len(clips) == 6 and all(clip.frames.shape == (9, 64, 64, 3) for clip in clips)
    assert all(clip.score.sound is None and clip.score.pitch is None for clip in clips)
    names = ("shape", "colour", "motion", "passed", "picture")
    assert samples.adherence(clips).keys() == {f"{split}_{name}" for split in ("seen", "heldout") for name in names}


# ---------------------------------------------------------------- the export


def rounded(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As the export rounds, the latents' statistics excepted."""
    return {name: t if name.startswith("latents_") else t.bfloat16().float() for name, t in tensors.items()}


def average(trained: Path, stage: str, module: Any) -> Any:
    module.load_state_dict(rounded(store.load_average(trained, stage)))
    return module.eval().requires_grad_(False)


def test_the_exported_parts_are_the_trained_ones(trained: Path, job: Job) -> None:
    twin = average(trained, "video_vae", WanVae(job.architecture.vae))
    assert job.architecture.vae.latents_std == tuple(twin.latents_std.tolist()) != (1.0,) * 48
    video = data.video_of(data.scenes_of(job.config.train, 0, 1), job.config.train.sizes[0], CPU)
    means = video_vae.encode_means(twin, video)
    encoder, decoder = (components._load(job, f"video_{half}", CPU) for half in ("encoder", "decoder"))
    assert largest(encoder(video), means) < 1e-5
    assert largest(decoder(means), twin.decode(means)[0]) < 1e-5
    model = average(trained, "diffusion", wan.DiffusionModel(transforms.text_config(job), job.architecture))
    loaded = {name: components._load(job, name, CPU) for name in ("transformer", "text_encoder")}
    for name, module in loaded.items():
        trained_one = getattr(model, name).state_dict()
        assert all(torch.equal(tensor, trained_one[key]) for key, tensor in module.state_dict().items())
    text = components.build_text(job, CPU)
    tokens = text.tokenizer.tokenize([PROMPT], LENGTH)
    ids, mask = captions.one_text(PROMPT, LENGTH, UMT5)
    assert torch.equal(tokens.input_ids[0], ids.long()) and torch.equal(tokens.attention_mask[0], mask.long())


def test_the_export_is_bf16_in_diffusers_layout(trained: Path) -> None:
    folder = trained / PIPELINE
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    assert files == [
        "model_index.json",
        "scheduler/scheduler_config.json",
        "text_encoder/config.json", "text_encoder/model.safetensors",
        "tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json",
        "transformer/config.json", "transformer/diffusion_pytorch_model.safetensors",
        "vae/config.json", "vae/diffusion_pytorch_model.safetensors",
    ]  # fmt: skip
    for file in folder.rglob("*.safetensors"):
        assert {tensor.dtype for tensor in load_file(file).values()} == {torch.bfloat16}
    text = load_file(folder / "text_encoder" / "model.safetensors")
    assert "shared.weight" in text and "encoder.embed_tokens.weight" not in text
    assert json.loads((folder / "model_index.json").read_text())["expand_timesteps"] is True


class Sink:
    def save_latents(self, video: Tensor, audio: Tensor | None) -> None:
        assert audio is None
        self.latents = video

    def write(self, frames: Iterator[Tensor], sound: Any) -> None:
        assert sound is None
        self.frames = torch.cat(list(frames), dim=2)


def diffusers_transformer(folder: Path) -> Any:
    """What ``from_pretrained`` makes; that asks for accelerate, for which there is no other use here."""
    from diffusers import WanTransformer3DModel

    config = WanTransformer3DModel.load_config(folder / "transformer", local_files_only=True)
    model = WanTransformer3DModel.from_config(config)
    model.load_state_dict(load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors"))
    return model.float().eval()


def test_diffusers_makes_the_same_clip_of_the_export(trained: Path, job: Job) -> None:
    from diffusers import WanPipeline

    request, sampler = job.requests[0], job.config.sampler
    sink = Sink()
    pipeline.generate(components.build_components(job, CPU), request, sampler, sink)  # type: ignore[arg-type]

    folder = trained / PIPELINE
    theirs = WanPipeline.from_pretrained(
        folder, transformer=diffusers_transformer(folder), dtype=torch.float32, local_files_only=True
    )
    theirs.set_progress_bar_config(disable=True)
    assert theirs.config.expand_timesteps and theirs.scheduler.config.flow_shift == 5.0
    geometry = pipeline.latent_geometry(request, job.architecture)
    noise = pipeline.make_noise(geometry, job.architecture, seed=request.seed, device=CPU)
    asked: dict[str, Any] = {
        "prompt": request.prompt,
        "negative_prompt": request.negative_prompt,
        "height": request.height,
        "width": request.width,
        "num_frames": request.num_frames,
        "num_inference_steps": sampler.steps,
        "guidance_scale": sampler.guidance_scale,  # type: ignore[union-attr]
        "max_sequence_length": LENGTH,
    }
    latents = theirs(**asked, latents=noise.clone(), output_type="latent").frames
    # Measured: 4e-6 of latents whose deviation is 1.1, and equal frames.
    assert largest(sink.latents, latents) < 1e-5 and latents.std() > 0.3
    frames = theirs(**asked, latents=noise.clone(), output_type="np").frames
    ours = to_uint8(sink.frames).numpy()
    other = (255 * frames[0]).round().astype(np.uint8)
    assert np.abs(ours.astype(int) - other).max() <= 1 and ours.std() > 5


def test_diffusers_takes_the_same_first_frame(job: Job, trained: Path) -> None:
    theirs = diffusers_transformer(trained / PIPELINE)
    model = average(trained, "diffusion", wan.DiffusionModel(transforms.text_config(job), job.architecture))
    geometry = wan.geometry_of(job.requests[0], (4, 16, 16))  # type: ignore[arg-type]
    video = torch.randn(1, geometry.video_tokens, 192, generator=seeded())
    noisy = diffusion.add_noise(video, None, geometry, 1.0, 1.0, seeded(1))
    assert noisy.given.any() and not noisy.given.all()
    ids, mask = captions.one_text(PROMPT, LENGTH, UMT5)
    with torch.no_grad():
        context = model.contexts(ids[None].long(), mask[None].long())
        velocity, _ = model.velocities(noisy, context, geometry)
        (other,) = theirs(
            hidden_states=wan.unpack(noisy.video, geometry),
            timestep=torch.where(noisy.given, 0.0, 1000 * noisy.sigma[:, None]),
            encoder_hidden_states=context,
            return_dict=False,
        )
    # Measured: 4e-6 of values whose deviation is 0.6; the two embed the timestep in fp64 and in fp32.
    assert largest(wan.unpack(velocity, geometry), other) < 1e-5 and other.std() > 0.1
