"""``task=plan``: what it writes, for tiny models whose memory is quickly predicted, and full ones without it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from vgen import app, config, planning, record
from vgen.families import family_of
from vgen.job import Job, plan_job
from vgen.memory import GIB
from vgen.parallel.cost import H200
from vgen.parallel.plans import Limits, ParallelPlan, layout_reasons, legal_plans, reasons
from vgen.requests import build_requests
from vgen.tasks import plan
from vgen.tasks.types import TaskContext
from vgen.typed import ConfigurationError


def make_job(out_dir: Path, *overrides: str) -> Job:
    with initialize_config_dir(app.conf_dir(), version_base="1.3"):
        composed = compose("config", ["task=plan", "device=cpu", "model.weights=random", *overrides])
    data: Any = OmegaConf.to_container(composed, resolve=True)
    settings = config.from_mapping(data)
    return plan_job(settings, build_requests(settings.request), out_dir, num_gpus=0, sweep=None)


def run(job: Job) -> tuple[dict[str, Any], str]:
    plan.run(TaskContext(job, torch.device("cpu")))
    return json.loads((job.out_dir / "plan.json").read_text()), (job.out_dir / "plan.txt").read_text()


def limits_of(job: Job) -> Limits:
    return family_of(job.config).limits(job.config, job.requests, job.architecture)


def plan_in(row: dict[str, Any]) -> ParallelPlan:
    return ParallelPlan(*(row[name] for name in ("data_size", "cfg_size", "ulysses_size", "vae_size")))


@pytest.mark.parametrize("model", ["ltx2_tiny", "wan_tiny"])
def test_all_legal_plans_are_written_with_their_predictions(model: str, tmp_path: Path) -> None:
    job = make_job(tmp_path, f"model={model}", "task.num_gpus=4", "parallel=pvs4")
    written, text = run(job)
    limits = limits_of(job)
    assert written["num_gpus"] == 4 and "predictions" in written["note"]
    assert {plan_in(row) for row in written["plans"]} == set(legal_plans(4, limits))
    assert written["plans"] == sorted(written["plans"], key=lambda row: row["total_s"])
    for row in written["plans"]:
        assert row["total_s"] == pytest.approx(row["denoise_s"] + row["decode_s"])
        assert row["denoise_s"] == pytest.approx(written["steps"] * row["step_s"])
        assert row["memory_gib"] > 0 and row["fits"] and row["decode"] == ("halo" if row["vae_size"] > 1 else "whole")
        assert (row["step_mib"] > 0) == (row["cfg_size"] * row["ulysses_size"] > 1)
        assert (row["decode_mib"] > 0) == (row["vae_size"] > 1)
    assert written["recommended"] in [{name: row[name] for name in written["recommended"]} for row in written["plans"]]
    assert written["asked"] == {"data_size": 1, "cfg_size": 2, "ulysses_size": 2, "vae_size": 4}
    assert written["recommendation"] in text and "All figures are predictions" in text
    assert all(words in text for words in written["basis"].values())
    assert "\x1b" not in text and max(map(len, text.splitlines())) < 300


def test_the_table_marks_what_was_asked_for_and_what_is_recommended(tmp_path: Path) -> None:
    explained = plan.explain(make_job(tmp_path, "task.num_gpus=4", "parallel=pvs4", "parallel.vae_size=3"), 4)
    lines = [line.split() for line in explained.to_text().splitlines()]
    marked = {line[0]: line[1:5] for line in lines if line and line[0] in (">", "*", ">*")}
    assert marked[">"] == ["1", "2", "2", "3"]
    best = explained.recommended
    assert best is not None and marked["*"] == [str(getattr(best.plan, name)) for name in plan.SIZES]
    ways = {plan._denoising(row.plan) for row in explained.rows}
    assert len(explained.shown()) == len(ways) + 1  # the one that was asked for has another vae_size


def test_of_plans_that_are_about_as_fast_the_one_with_least_memory_is_recommended(tmp_path: Path) -> None:
    explained = plan.explain(make_job(tmp_path), 2)
    first = explained.rows[0]

    def row(total_s: float, gib: float, fits: bool = True) -> plan.PlanRow:
        return replace(first, cost=replace(first.cost, total_s=total_s), memory_gib=gib, fits=fits)

    rows = (row(1.0, 3, fits=False), row(2.0, 30), row(2.01, 20), row(2.1, 10))
    assert replace(explained, rows=rows).recommended == rows[2]
    assert replace(explained, rows=rows[:1]).recommended is None


def test_plans_that_do_not_fit_are_told_and_none_is_recommended(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    explained = plan.explain(job, 2, machine=replace(H200, memory_bytes=2**20))
    assert explained.recommended is None and not any(row.fits for row in explained.rows)
    assert "too much" in explained.to_text()
    assert explained.to_mapping()["recommended"] is None
    assert "no plan of 2 GPU(s) fits into 0 GiB each" in explained.sentence()


def test_a_request_that_cannot_run_under_a_plan_is_an_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    predict_run = planning.predict_run

    def refusing(job: Job, *args: Any) -> Any:
        if job.plan.ulysses_size == 2:
            raise ConfigurationError("too large for words")
        return predict_run(job, *args)

    monkeypatch.setattr(planning, "predict_run", refusing)
    explained = plan.explain(make_job(tmp_path), 2)
    stopped = [row for row in explained.rows if row.plan.ulysses_size == 2]
    assert stopped and all(row.obstacle == "too large for words" and row.memory_gib is None for row in stopped)
    assert explained.recommended is not None and explained.recommended.plan.ulysses_size == 1
    assert explained.to_text().count("cannot run: too large for words") == 1


def test_memory_is_predicted_under_each_plan_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, predict_run = [], planning.predict_run

    def noting(job: Job, *args: Any) -> Any:
        seen.append((job.plan, job.config.parallel.single_pass, args[2]))
        return predict_run(job, *args)

    monkeypatch.setattr(planning, "predict_run", noting)
    explained = plan.explain(make_job(tmp_path, "parallel=pvs2"), 2)
    expected = {row.plan for row in explained.rows} | {ParallelPlan()}
    assert {one for one, *_ in seen} == expected and len(seen) == len(expected)
    assert {rest for _, *rest in map(tuple, seen) for rest in [tuple(rest)]} == {("refuse", 139 * GIB)}


# ---------------------------------------------------------------- legal and not


@pytest.mark.parametrize("num_ranks", [1, 2, 6, 8])
def test_every_combination_of_sizes_is_looked_at_once(num_ranks: int, tmp_path: Path) -> None:
    plans = list(plan.all_plans(num_ranks))
    assert len(set(plans)) == len(plans)
    limits = limits_of(make_job(tmp_path))
    assert set(legal_plans(num_ranks, limits)) == {one for one in plans if not reasons(one, limits)}
    assert all(one.world_size == num_ranks for one in plans if not layout_reasons(one))


def test_twelve_heads_on_eight_ranks_and_each_reason_once(tmp_path: Path) -> None:
    job = make_job(tmp_path, "model=wan21_t2v_1_3b")
    found = plan.count_refusals(8, limits_of(job), "auto")
    heads = next(one for one in found if one.setting == "parallel.ulysses_size")
    assert heads.values == (5, 7, 8) and heads.rule.startswith("does not divide the 12 heads of the attentions")
    settings = [one.setting for one in found]
    assert sorted(settings) == [f"parallel.{name}" for name in sorted(plan.SIZES)]
    passes = next(one for one in found if one.setting == "parallel.cfg_size")
    assert passes.reason.startswith("parallel.cfg_size=3,4,5,6,7,8 is above the number of passes of a step (2: cond")
    assert not {one.example for one in found} & set(legal_plans(8, limits_of(job)))


def test_all_plans_are_legal_or_counted_as_refused(tmp_path: Path) -> None:
    limits = limits_of(make_job(tmp_path, "model=wan21_t2v_1_3b"))
    wrong = {one for one in plan.all_plans(8) if plan.refusals(one, limits, "auto")}
    assert len(wrong) + len(legal_plans(8, limits)) == len(list(plan.all_plans(8)))
    sentences = sum(len(plan.refusals(one, limits, "auto")) for one in wrong)
    assert sum(one.plans for one in plan.count_refusals(8, limits, "auto")) == sentences


def test_a_whole_decode_is_shared_by_no_ranks(tmp_path: Path) -> None:
    explained = plan.explain(make_job(tmp_path, "parallel.vae_strategy=whole"), 4)
    assert {row.plan.vae_size for row in explained.rows} == {1}
    (refused,) = [one for one in explained.refused if "vae_strategy=whole" in one.rule]
    assert refused.values == (2, 3, 4)


@pytest.mark.parametrize(
    ("strategy", "vae_size", "predicted", "decode"),
    [
        ("auto", 1, "whole", "whole"), ("auto", 2, "whole", "halo"), ("auto", 2, "halo", "halo"),
        ("auto", 1, "tile", "tile"), ("auto", 4, "tile", "tile"), ("halo", 1, "whole", "whole"),
        ("halo", 3, "halo", "halo"), ("tile", 2, "whole", "tile"), ("tile_balanced", 2, "whole", "tile_balanced"),
    ],
)  # fmt: skip
def test_the_decode_is_that_of_the_strategy_and_of_the_memory(
    strategy: str, vae_size: int, predicted: str, decode: str
) -> None:
    assert plan.decode_of(strategy, ParallelPlan(vae_size=vae_size), predicted) == decode


# ---------------------------------------------------------------- the request as numbers


@pytest.mark.parametrize(
    ("model", "sizes", "measured_s"),
    [
        ("ltx2", (768, 1280, 121), 1.082), ("ltx2_3", (768, 1280, 121), 1.138), ("wan", (704, 1280, 121), 1.018),
        ("wan22_a14b_t2v", (720, 1280, 81), 11.945), ("wan21_t2v_1_3b", (480, 832, 81), 0.594),
    ],
)  # fmt: skip
def test_a_pass_of_the_configured_request_takes_what_was_measured(
    model: str, sizes: tuple[int, int, int], measured_s: float, tmp_path: Path
) -> None:
    named = zip(("height", "width", "num_frames"), sizes, strict=True)
    job = make_job(tmp_path, f"model={model}", *(f"request.{name}={size}" for name, size in named))
    workload = plan.workload_of(job)
    assert H200.seconds(workload.pass_parts(1)) == pytest.approx(measured_s, rel=0.1)
    assert workload.clip_bytes == 2 * 3 * sizes[0] * sizes[1] * sizes[2]
    assert (workload.passes, workload.chunks) == ((4, 1) if model.startswith("ltx2") else (2, workload.latents[0]))


def test_steps_passes_and_graphs_are_those_of_the_configuration(tmp_path: Path) -> None:
    job = make_job(tmp_path, "sampler.sigmas=[1.0,0.5,0.0]", "request.audio=none", "model.vae.tile_size=128")
    workload = plan.workload_of(job)
    assert (workload.steps, workload.graph, workload.tiles.tile_size) == (2, False, 128)
    assert workload.passes == len(limits_of(job).passes)
    captured = replace(job, config=replace(job.config, graph=replace(job.config.graph, mode="cuda")))
    assert plan.workload_of(captured).graph
    chunked = plan.workload_of(make_job(tmp_path, "model=wan", "model.vae.chunk=4", "request.num_frames=81"))
    assert chunked.chunks == 6  # of 21 latent frames


def test_images_of_wan_2_1_are_attended_to(tmp_path: Path) -> None:
    keys = [
        sum(op.flops for op in plan.workload_of(make_job(tmp_path, *overrides)).pass_parts(1)[0].ops)
        for overrides in (("model=wan21_i2v_14b_480p",), ("model=wan21_i2v_14b_480p", "request.image=first.png"))
    ]
    job = make_job(tmp_path, "model=wan21_i2v_14b_480p")
    tokens, width = limits_of(job).video_tokens, job.architecture.transformer.width
    assert keys[1] - keys[0] == 4 * tokens * 257 * width


def test_the_largest_of_several_requests_counts(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "small"}\n{"prompt": "large", "num_frames": 49}\n{"prompt": "small"}\n')
    workload = plan.workload_of(make_job(tmp_path, f"request.prompts_file={prompts}"))
    assert workload.latents[0] == 7 and workload.prompts == 3


def test_the_number_of_gpus_is_asked_for_or_that_of_the_plan(tmp_path: Path) -> None:
    assert plan.num_gpus_of(make_job(tmp_path, "task.num_gpus=6", "parallel=pvs4")) == 6
    assert plan.num_gpus_of(make_job(tmp_path, "parallel=pvs4")) == 4
    with pytest.raises(ConfigurationError, match=r"task\.num_gpus=0 has no GPU to plan for; give 1 or more"):
        plan.num_gpus_of(make_job(tmp_path, "task.num_gpus=0"))


# ---------------------------------------------------------------- earlier runs


def test_records_of_earlier_runs_correct_the_predictions(tmp_path: Path) -> None:
    job = make_job(tmp_path / "now", f"task.records={tmp_path}")
    job.out_dir.mkdir()
    plain = plan.explain(job, 1)
    alone = plain.alone.cost
    earlier = make_job(tmp_path, "task=generate")  # the settings of its task differ
    warm = {"denoise_steps": [3 * alone.step_s] * 4, "decode_video": 2 * alone.decode_s}
    done = record.build_record(
        config=config.to_mapping(earlier.config),
        status="ok",
        active={"data_size": 1, "cfg_size": 1, "ulysses_size": 1, "vae_size": 1, "vae_strategy": "whole"},
        timings_s={"cold": warm, "warm": warm},
        environment={"gpu": {"name": "NVIDIA H200", "count": 1}},
    )
    for name, text in (("run/record.json", json.dumps(record.plain(done))), ("broken/record.json", "{")):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    written, text = run(job)
    assert written["calibration"] == {"step": pytest.approx(3), "decode": pytest.approx(2), "step_records": 1,
                                      "decode_records": 1}  # fmt: skip
    assert written["one_gpu"]["step_s"] == pytest.approx(3 * alone.step_s)
    assert "prediction times 3.000, the median of measured / predicted of 1 run(s)" in text
    assert "pure prediction" in plain.basis()["step"] and "pure" not in written["basis"]["decode"]


def test_runs_of_another_size_do_not_count(tmp_path: Path) -> None:
    job, other = make_job(tmp_path), make_job(tmp_path, "request.height=64")
    settings = {"config": record.plain(config.to_mapping(job.config))}
    for path, value in plan.comparable(job).items():
        found: Any = settings
        for key in path.split("."):
            found = found[key]
        assert found == value
    assert plan.comparable(other) != plan.comparable(job)


def test_a_folder_of_records_has_to_be_there(tmp_path: Path) -> None:
    assert plan.read_records(None) == []
    with pytest.raises(ConfigurationError, match=r"task\.records=.*nowhere is no folder; give one with earlier runs"):
        plan.read_records(str(tmp_path / "nowhere"))
