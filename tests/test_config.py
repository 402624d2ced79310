"""Every group option composes into the typed records, and what does not fit is refused in one sentence."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from vgen import app, typed
from vgen.checkpoint_files import resolve
from vgen.checkpoint_paths import PACKAGED
from vgen.config import Config, SamplerConfig, from_mapping, to_mapping
from vgen.families import family_of
from vgen.families.ltx2 import DISTILLED_STEPS
from vgen.job import plan_of
from vgen.models.ltx2.config_official import from_official
from vgen.pipelines.ltx2 import plan_request_passes
from vgen.requests import build_requests
from vgen.typed import ConfigurationError
from vgen.validate import validate, validate_request

CONF = Path(app.conf_dir())
GROUPS = (
    "task", "model", "parallel", "quant", "graph", "sampler", "request", "output", "logger", "bench", "measure",
    "score", "train", "launcher",
)  # fmt: skip
OPTIONS = [(group, path.stem) for group in (*GROUPS, "experiment") for path in sorted((CONF / group).glob("*.yaml"))]


def compose_mapping(*overrides: str) -> dict[str, Any]:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        container = OmegaConf.to_container(compose("config", list(overrides)), resolve=True)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def check(*overrides: str, num_gpus: int | None = 0) -> Config:
    config = from_mapping(compose_mapping(*overrides))
    validate(config, build_requests(config.request), family_of(config).architecture_of(config, None), num_gpus)
    return config


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_composes_and_validates(group: str, option: str, tmp_path: Path) -> None:
    overrides = [f"{group}={option}"]
    if option == "decode":
        overrides.append(f"task.latents={tmp_path}")
    if option.startswith("train_"):
        overrides += [f"train.folder={tmp_path}", "model.weights=random"]
    if "_i2v" in option:
        overrides.append("task=bench_decode")  # a video needs an image
    if option in ("unipc", "euler"):
        overrides.append("model=wan_tiny")
    if group == "graph" and "cuda" in option:
        with pytest.raises(ConfigurationError, match=f"graph={option} captures CUDA graphs"):
            check(*overrides)
    if option == "uly8":
        with pytest.raises(ConfigurationError, match=r"ulysses_size=8 does not divide the 4 heads .*use 4, or for"):
            check(*overrides)
        overrides.append("model=wan_tiny")  # 8 heads
    config = check(*overrides, num_gpus=None)
    assert from_mapping(to_mapping(config)) == config


def test_every_group_of_the_record_has_a_folder() -> None:
    assert {path.name for path in CONF.iterdir() if path.is_dir()} == {*GROUPS, "experiment", "hydra"}


def test_tiny_has_work_for_four_ranks() -> None:
    config = check()
    assert config.model.architecture is not None
    transformer = config.model.architecture["transformer"]
    assert transformer["num_attention_heads"] % 4 == 0
    assert config.request.height >= 128 and config.request.width >= 128 and config.request.num_frames >= 17


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ("request.height=720", "request.height=720 is not a multiple of 32; use 704 or 736"),
        ("request.width=1080", "request.width=1080 is not a multiple of 32; use 1056 or 1088"),
        ("request.height=32", "request.height=32 is not a multiple of 32 and at least 64; use 64"),
        ("request.num_frames=120", "request.num_frames=120 is not 8k \\+ 1; use 113 or 121"),
        ("request.num_frames=0", "use 1$"),
        ("request.fps=0", "outside 1 to 240"),
        ("request.seed=-1", "outside 0 to"),
        ("request.seed=1.5", "request.seed=1.5 is not a whole number"),
        ("request.audio=loud", "request.audio='loud' is not a choice; use one of: generate, copy, none"),
        ("request.audio=copy", "request.audio=copy has no sound to keep"),
        ("request.sound=/x.wav", "is not read with request.audio=generate and no clip"),
        ("request.image=/nowhere.png", "/nowhere.png cannot be read as an image"),
        ("request.image_crf=70", "outside 0"),
        ("request.video=/nowhere.mp4", "/nowhere.mp4 cannot be read"),
        ("request.noise_level=0", "outside 0 to 1"),
        ("output.save=[mp4,gif]", r"output.save\[1\]='gif' is not a choice; use one of: mp4, latents, frames"),
        ("output.save=mp4", "is not a list"),
        ("output.save=[]", "throw the video away"),
        ("output.video_crf=60", "outside H.264's"),
        ("device=tpu", "device='tpu' is not a choice"),
        ("device=cuda", "no CUDA device"),
        ("parallel.data_size=0", "not a number of ranks"),
        ("parallel.data_size=2", r"data_size=2 is above the number of prompts \(1\); use 1"),
        ("parallel.cfg_size=5", r"above the number of passes of a step \(2: cond, uncond\); use 2"),
        ("parallel.cfg_size=2 sampler.video.cfg_scale=1 sampler.audio.cfg_scale=1", r"\(1: cond\); use 1"),
        ("parallel.ulysses_size=3", "does not divide the 4 heads .* use 2 or 4"),
        ("parallel.vae_size=5 parallel.vae_strategy=halo", "above the 4 lines along height of 4 x 4 latents.*; use 4"),
        ("parallel.vae_size=2 parallel.vae_strategy=whole", "whole decodes on one rank.*use halo"),
        ("parallel.vae_strategy=strips", "is not a choice; use one of: auto, whole, tile, tile_balanced, halo"),
        ("task=score parallel=cfg2", "task=score spreads prompts over ranks and nothing else"),
        ("graph.max_graphs=0", "too few; give 1 or more"),
        ("graph.scope=pass", r"'pass' is not a choice; use one of: transformer, step"),
        ("graph=cuda", "on the CPU; use graph=compile or graph=eager"),
        ("sampler.steps=0", "denoises nothing"),
        ("sampler.video.cfg_scale=nan", "not a scale"),
        ("sampler.audio.rescale_scale=1.5", "outside 0"),
        ("sampler.video.stg_scale=-1", "not a scale"),
        ("sampler.audio.modality_scale=inf", "not a scale"),
        ("sampler.video.skip_step=-1", "negative"),
        ("sampler.video.stg_scale=1 sampler.video.stg_blocks=[]", "has no blocks to perturb"),
        ("sampler.audio.stg_scale=1 sampler.audio.stg_blocks=[0,4]", "has 4, but this model's blocks are 0 to 3"),
        ("sampler.sigmas=[1.0]", "does not fall from at most 1 to 0"),
        ("sampler.sigmas=[1.0,0.5,0.5,0.0]", "does not fall"),
        ("sampler.sigmas=[1.0,0.5]", "does not fall"),
        ("sampler.sigmas=[0.9,0.5,0.0]", "without request.video there is only noise"),
        ("sampler.schedule=distilled sampler.steps=8", "model=ltx2_tiny, which is not distilled"),
        ("model.kind=distilled", "does not fit model=ltx2_tiny, which is distilled.*use model=ltx2_distilled"),
        ("model.version='2.3'", "model=ltx2_tiny is LTX-2 2.0 and .* has the defaults of 2.3; use model=ltx2 with"),
        ("model.offload=disk", "use one of: none, text_encoder, expert, stages"),
        ("bench.warmup=-1", "negative"),
        ("bench.repeats=0", "runs nothing"),
        ("task.latents=/nowhere", "does not exist"),
        ("model.text_encoder.max_length=100", "not a multiple of the connectors' 32 registers; use 96"),
        ("model.vae.tile_size=100", "multiple of 32"),
        ("+foo=1", "'foo' is not a setting"),
        ("+request.hieght=1", "'request.hieght' is not a setting; did you mean 'height'"),
        ("model.name=???", "model.name is not set"),
        ("model.attention=fa5", "is not a choice; use one of: sdpa, cudnn, flash, fa3, fa4"),
    ],
)
def test_one_sentence_for_what_does_not_fit(overrides: str, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence) as caught:
        check(*overrides.split())
    assert "\n" not in str(caught.value)


def test_bench_step_needs_both_streams() -> None:
    with pytest.raises(ConfigurationError, match="runs video and audio together"):
        check("task=bench_step", "request.audio=none")


def test_the_default_is_the_models_own_checkpoint_and_random_weights_need_one_word() -> None:
    default, random, newer = (
        check(*overrides).model for overrides in ((), ("model.weights=random",), ("model=ltx2_3_tiny",))
    )
    assert (default.name, default.weights) == ("ltx2_tiny", "load")
    assert default.checkpoint == f"{PACKAGED}ltx2_tiny/ltx-2-tiny.safetensors"
    assert default.text_encoder.checkpoint == f"{PACKAGED}ltx2_tiny/gemma"
    for model in (random, newer):
        assert model.weights == "random" and model.text_encoder.architecture is not None
        assert model.text_encoder.architecture["vocab_size"] >= 260  # bytes and four special tokens
    assert newer.checkpoint is None and newer.text_encoder.checkpoint is None


def test_random_weights_have_the_architecture_of_the_checkpoint_inside_the_package() -> None:
    config = check()
    assert config.model.architecture is not None and config.model.checkpoint is not None
    shipped = resolve(config.model.checkpoint)
    assert from_official(config.model.architecture) == from_official(shipped.config)


def test_blocks_are_looked_at_only_where_they_are_perturbed() -> None:
    check("sampler.video.stg_scale=0", "sampler.video.stg_blocks=[40]")


def test_the_distilled_schedule_has_the_steps_that_validation_asks_for() -> None:
    from vgen.diffusion.schedule import DISTILLED_SIGMAS

    assert len(DISTILLED_SIGMAS) - 1 == DISTILLED_STEPS


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ("model.offload=stages", "keeps the addresses of the weights, which model.offload=stages moves"),
        ("graph.strict=true", "bench.warmup=0 has none"),
    ],
)
def test_what_a_captured_graph_needs(overrides: str, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        check("graph=compile_cuda", overrides, num_gpus=1)
    check("graph=compile_cuda", "graph.strict=true", "bench.warmup=1", num_gpus=1)


def test_inline_needs_one_rank() -> None:
    with pytest.raises(ConfigurationError, match=r"launcher\.inline=true runs one rank"):
        check("launcher.inline=true", "parallel=cfg2")


def test_more_ranks_than_devices() -> None:
    with pytest.raises(ConfigurationError, match=r"4 ranks and this machine shows 2 CUDA device\(s\)"):
        check("parallel=pvs4", num_gpus=2)
    check("parallel=pvs4", "device=cpu", num_gpus=2)
    check("parallel=pvs4", num_gpus=None)


def test_plans_named_by_their_ranks_split_the_tokens_of_a_single_pass() -> None:
    single = ("sampler.video.cfg_scale=1", "sampler.audio.cfg_scale=1")
    for overrides, sizes in (((), (1, 2, 2, 4)), (single, (1, 1, 4, 4))):
        config = check("parallel=pvs4", *overrides)
        assert dataclasses.astuple(plan_of(config, build_requests(config.request))) == sizes
    assert check("parallel=pvs8", "parallel.vae_size=1").parallel.world_size == 8


SCALES = [f"sampler.{s}.{k}" for s in ("video", "audio") for k in ("cfg_scale=1", "stg_scale=1", "modality_scale=2")]


@pytest.mark.parametrize("audio", ["generate", "copy", "none"])
@pytest.mark.parametrize("scales", [(), *((scale,) for scale in SCALES), tuple(SCALES)])
def test_passes_are_counted_as_the_pipeline_plans_them(audio: str, scales: tuple[str, ...]) -> None:
    config = from_mapping(compose_mapping(f"request.audio={audio}", *scales))
    (request,) = build_requests(config.request)
    assert isinstance(config.sampler, SamplerConfig)
    planned = tuple(one.name for one in plan_request_passes(request, config.sampler))
    assert family_of(config).pass_names(request, config) == planned


def test_one_guided_expert_of_two_makes_two_passes() -> None:
    for scales, names in (((1, 1), ("cond",)), ((4, 1), ("cond", "uncond")), ((1, 4), ("cond", "uncond"))):
        first, second = scales
        config = from_mapping(
            compose_mapping(
                "model=wan22_a14b_t2v", f"sampler.guidance_scale={first}", f"sampler.guidance_scale_2={second}"
            )
        )
        assert family_of(config).pass_names(build_requests(config.request)[0], config) == names


def test_a_request_of_a_file_is_named_by_its_number() -> None:
    config = from_mapping(compose_mapping("request.width=100"))
    rule = family_of(config).size_rule(family_of(config).architecture_of(config, None))
    with pytest.raises(ConfigurationError, match=r"request 0: request\.width=100"):
        validate_request(build_requests(config.request)[0], rule, several=True)


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("model.chekpoint", "did you mean 'checkpoint'"),
        ("modl", "did you mean 'model'"),
        ("request.height.x", "'request.height' has no parts"),
        ("nothing.like.it", "known here: task, model"),
    ],
)
def test_unknown_settings_suggest_the_known_one(path: str, sentence: str) -> None:
    assert sentence in typed.unknown_setting(Config, path)
