"""``task=preflight``: the job made small keeps what decides whether its plan works, and runs."""

import dataclasses
from pathlib import Path

import pytest
from PIL import Image

from tests.test_config import CONF, compose_mapping
from tests.test_wan_end_to_end import run
from vgen.app import _shrink
from vgen.config import from_mapping
from vgen.families import family_of
from vgen.job import Job, plan_job
from vgen.record import read_record
from vgen.requests import build_requests
from vgen.validate import validate

MODELS = sorted(path.stem for path in (CONF / "model").glob("*.yaml"))


def small_job(folder: Path, *overrides: str) -> tuple[Job, Job]:
    """The job of a command line, and what is run of it."""
    config = from_mapping(compose_mapping("task=preflight", *overrides))
    job = plan_job(config, build_requests(config.request), folder, num_gpus=0, sweep=None)
    validate(job.config, job.requests, job.architecture, 0)
    return job, _shrink(job)


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("picture") / "a.png"
    Image.new("RGB", (64, 48), (200, 30, 9)).save(path)
    return path


@pytest.mark.parametrize("model", MODELS)
def test_what_decides_about_the_plan_stays(model: str, picture: Path, tmp_path: Path) -> None:
    image = [f"request.image={picture}"] if "i2v" in model else []
    plan = ["parallel.vae_size=3", "parallel.ulysses_size=2"]
    whole, small = small_job(tmp_path, f"model={model}", *image, *plan)
    large, tiny = whole.architecture.transformer, small.architecture.transformer
    assert tiny.num_attention_heads == large.num_attention_heads
    assert tiny.num_layers == 2 and small.config.model.weights == "random" and small.device == "cpu"
    assert small.plan == whole.plan
    family = family_of(whole.config)
    assert family.pass_names(small.requests[0], small.config) == family.pass_names(whole.requests[0], whole.config)
    limits = family.limits(small.config, small.requests, small.architecture)
    assert max(limits.latent_height, limits.latent_width) >= 3 and limits.video_tokens <= 200
    assert small.architecture.version == whole.architecture.version


def test_one_prompt_for_each_replica_is_left(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("one\ntwo\nthree\n")
    overrides = (f"request.prompts_file={tmp_path / 'prompts.txt'}", "parallel.data_size=2")
    _, small = small_job(tmp_path, *overrides)
    assert [request.prompt for request in small.requests] == ["one", "two"]


def test_both_experts_have_a_step(tmp_path: Path) -> None:
    from vgen.pipelines.wan import plan_request

    for model in ("wan22_a14b_t2v",):
        _, small = small_job(tmp_path, f"model={model}")
        assert {plan.expert for plan in plan_request(small.config.sampler, small.config.model.boundary)} == {  # type: ignore[arg-type]
            "high_noise",
            "low_noise",
        }


def test_a_plan_that_cannot_run_is_refused_for_the_real_sizes(tmp_path: Path) -> None:
    result = run(tmp_path, "task=preflight", "model=ltx2", "parallel=uly8", "parallel.ulysses_size=3")
    assert result.returncode != 0
    assert "ulysses_size=3 does not divide the 32 heads" in result.stderr


def test_every_stage_runs_without_weights(picture: Path, tmp_path: Path) -> None:
    result = run(tmp_path, "task=preflight", "model=ltx2", "parallel=pvs2", f"request.image={picture}")
    assert result.returncode == 0, result.stderr
    record = read_record(tmp_path / "record.json")
    assert record["status"] == "ok" and record["active"]["vae_strategy"] == "halo"
    stages = ("load", "text_encode", "encode_video", "denoise", "decode_video", "decode_audio", "write")
    for stage in stages:
        assert record["timings_s"][stage] > 0
        assert f"{stage} " in result.stdout
    assert record["outputs"][0]["has_audio"] and (tmp_path / "sample_0.mp4").is_file()
    assert dataclasses.asdict(small_job(tmp_path, "model=ltx2")[0].plan)["vae_size"] == 1
