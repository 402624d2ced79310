"""What a run needs, told before it loads anything."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pipelines.test_ltx2_pipeline import make_job
from vgen import transforms
from vgen.families.ltx2 import tile_settings
from vgen.graph.break_even import GraphWork
from vgen.memory import GIB, Prediction
from vgen.models.attention_backends import AttentionError
from vgen.parallel.balance import TileCost, balanced_tiles
from vgen.parallel.tiles import plan_tiles
from vgen.planning import RunPlan, _graph_work, plan_run, predict_run
from vgen.typed import ConfigurationError

CPU = torch.device("cpu")
FULL = ("model=ltx2", "model.weights=random", "quant=bf16", "request.height=768", "request.width=1280")


def test_the_cpu_decodes_whole_unless_tiles_are_asked_for(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    plan = plan_run(job, job.requests, CPU, transforms.components_of(job))
    assert (plan.decode, plan.vae_split, plan.tiles) == ("whole", None, 1)
    job = make_job(tmp_path, "parallel.vae_strategy=tile", "model.vae.tile_size=64", "model.vae.tile_overlap=32")
    plan = plan_run(job, job.requests, CPU, transforms.components_of(job))
    assert (plan.decode, plan.vae_split, plan.tiles) == ("tile", None, 9)


def over_ranks(tmp_path: Path, *overrides: str, **sizes: int) -> RunPlan:
    """The plan on the CPU; of latents of 2 x 3 lines without ``overrides``."""
    plan = (f"parallel.{name}={size}" for name, size in sizes.items())
    job = make_job(tmp_path, "request.height=64", "request.width=96", *plan, *overrides)
    return plan_run(job, job.requests, CPU, transforms.components_of(job))


def test_ranks_decode_in_bands_of_the_side_that_is_cut(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "vgen.notice"):
        plan = over_ranks(tmp_path, vae_size=2)
    assert (plan.decode, plan.vae_split, plan.tiles) == ("halo", "height", 1)
    reason = "exact, and all ranks have a part: 2 ranks with up to 1 of the 2 lines along height each"
    assert plan.reason == reason and [record.message for record in caplog.records] == [f"decode: {reason}"]
    assert over_ranks(tmp_path, vae_size=3).vae_split == "width"  # too few lines the other way
    assert over_ranks(tmp_path, "parallel.vae_split=width", vae_size=2).vae_split == "width"
    active = plan.active()
    assert {name: active[name] for name in ("vae_strategy", "vae_split", "vae_reason", "tiles")} == {
        "vae_strategy": "halo",
        "vae_split": "height",
        "vae_reason": reason,
        "tiles": 1,
    }


def test_ranks_decode_tiles_where_there_are_too_few_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "vgen.notice"):
        plan = over_ranks(tmp_path, vae_size=4)
    assert (plan.decode, plan.vae_split) == ("tile", None)
    assert "3 lines of latents along width are too few for 4 ranks" in caplog.text


def test_balanced_tiles_are_of_the_ranks_that_decode(tmp_path: Path) -> None:
    job = make_job(tmp_path, *FULL, "parallel.vae_strategy=tile_balanced", "parallel.vae_size=8")
    settings, request = tile_settings(job.config), job.requests[0]
    balanced = balanced_tiles((16, 24, 40), settings, 8, TileCost(0, 1)).tiles
    plan = plan_run(job, job.requests, CPU, ("video_decoder",))
    assert (plan.decode, plan.tiles) == ("tile_balanced", len(balanced))
    family = transforms.FAMILIES["ltx2"]
    assert family.plan_decode(job, request, "tile_balanced") == balanced != family.plan_decode(job, request)
    assert family.plan_decode(job, request) == plan_tiles(16, 24, 40, settings)


def test_an_odd_request_has_all_decoded_alike(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "large", "width": 256}\n{"prompt": "small"}\n')
    asked = f"request.prompts_file={prompts}"
    assert over_ranks(tmp_path, asked, vae_size=3).decode == "halo"
    assert over_ranks(tmp_path, asked, vae_size=4).decode == "tile"


def test_benchmarks_are_planned_for_the_rank_that_runs_everything(tmp_path: Path) -> None:
    plan = over_ranks(tmp_path, "task=bench_decode", vae_size=2)
    assert plan.decode == "whole"


def test_ranks_need_less_than_one(tmp_path: Path) -> None:
    def predicted(*overrides: str) -> Prediction:
        job = make_job(tmp_path, *FULL, *overrides)
        return predict_run(job, job.requests, transforms.components_of(job), 139 * GIB)

    alone = predicted()
    ranks = predicted("parallel.ulysses_size=2", "parallel.vae_size=2")
    assert (alone.decode, ranks.decode) == ("whole", "halo")
    tokens = 16 * 24 * 40
    assert alone.stages["denoise"] - ranks.stages["denoise"] == tokens * 11 * 4096 * 2 / 2
    # Half of the decoder's work, which is three times 1 GiB or so.
    assert 0.4 < (alone.stages["decode_video"] - ranks.stages["decode_video"]) / (5.4 * GIB) < 0.6
    wan = ("model=wan22_a14b_t2v",)
    one, two = (predicted(*wan, *over) for over in ((), ("parallel.ulysses_size=2", "parallel.vae_size=2")))
    assert two.decode == "halo" and two.stages["denoise"] < one.stages["denoise"]
    assert two.stages["decode_video"] < one.stages["decode_video"]


def test_an_attention_backend_that_cannot_run_here_is_an_error(tmp_path: Path) -> None:
    job = make_job(tmp_path, "model.attention=cudnn")
    with pytest.raises(AttentionError, match=r"model\.attention=cudnn runs on CUDA devices and this run is on cpu"):
        plan_run(job, job.requests, CPU, transforms.components_of(job))


def test_the_record_names_the_kernel_of_the_automatic_choice(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    assert plan_run(job, job.requests, CPU, transforms.components_of(job)).attention.startswith("sdpa:")


@pytest.mark.parametrize(("offload", "measured_gib"), [("none", 66.60), ("text_encoder", 41.99), ("stages", 38.99)])
def test_predicted_peaks_of_2_0_are_those_of_an_h200(offload: str, measured_gib: float, tmp_path: Path) -> None:
    job = make_job(tmp_path, *FULL, f"model.offload={offload}")
    prediction = predict_run(job, job.requests, transforms.components_of(job), 139 * GIB)
    assert prediction.peak / GIB == pytest.approx(measured_gib, rel=0.01)


@pytest.mark.parametrize(("offload", "measured_gib"), [("none", 69.96), ("text_encoder", 42.10), ("stages", 36.94)])
def test_predicted_peaks_of_2_3_are_those_of_an_h200(offload: str, measured_gib: float, tmp_path: Path) -> None:
    job = make_job(tmp_path, *FULL, "model=ltx2_3", f"model.offload={offload}")
    prediction = predict_run(job, job.requests, transforms.components_of(job), 139 * GIB)
    assert prediction.peak / GIB == pytest.approx(measured_gib, rel=0.01)


def test_auto_falls_to_tiles_where_whole_does_not_fit_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = 43 * GIB  # the transformer with its step, but not beside the whole decode
    job = make_job(tmp_path, *FULL, "model.offload=text_encoder")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (room, 80 * GIB))
    monkeypatch.setattr("vgen.planning._plan_attention", lambda *_: "sdpa")
    with caplog.at_level(logging.WARNING, "vgen.notice"):
        plan = plan_run(job, job.requests, torch.device("cuda"), transforms.components_of(job))
    assert (
        plan.decode == "tile"
        and plan.tiles == len(transforms.plan_decode(job, job.requests[0])) > 8
        and "decoding in tiles" in caplog.text
    )
    job = make_job(tmp_path, *FULL, "model.offload=text_encoder", "parallel.vae_strategy=whole")
    assert predict_run(job, job.requests, transforms.components_of(job), room).decode == "whole"


def test_one_large_request_has_all_decoded_in_tiles(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "small", "num_frames": 9}\n{"prompt": "large"}\n')
    job = make_job(tmp_path, *FULL, "model.offload=text_encoder", f"request.prompts_file={prompts}")
    assert predict_run(job, job.requests, transforms.components_of(job), 42 * GIB).decode == "tile"
    assert predict_run(job, job.requests[:1], transforms.components_of(job), 42 * GIB).decode == "whole"


def test_a_task_counts_only_what_it_builds(tmp_path: Path) -> None:
    job = make_job(tmp_path, *FULL)
    decode = predict_run(job, job.requests, transforms.decoders_of(job), 139 * GIB)
    assert set(decode.stages) == {"decode_video", "decode_audio"}
    step = predict_run(job, job.requests, ("transformer",), 139 * GIB)
    assert set(step.stages) == {"denoise"}


def test_a_clip_of_2_3_is_predicted_as_measured(tmp_path: Path) -> None:
    job = make_job(tmp_path, *FULL, "model=ltx2_3")
    clip = dataclasses.replace(job.requests[0], video="clip.mp4", audio="copy", sound="clip.mp4")
    job = dataclasses.replace(job, requests=(clip,))
    prediction = predict_run(job, job.requests, transforms.components_of(job), 139 * GIB)
    assert prediction.peak_stage == "encode_video"
    assert prediction.peak / GIB == pytest.approx(71.75, rel=0.01)


def test_what_cannot_fit_is_refused_with_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job(tmp_path, *FULL)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (50 * GIB, 80 * GIB))
    monkeypatch.setattr("vgen.planning._plan_attention", lambda *_: "sdpa")
    with pytest.raises(ConfigurationError, match=r"the run needs .* GiB of GPU memory.*use model.offload=text_encoder"):
        plan_run(job, job.requests, torch.device("cuda"), transforms.components_of(job))


def test_graphs_stay_in_memory_to_the_end(tmp_path: Path) -> None:
    """2.6 GiB were held on an H200 by graphs of the transformer's calls; one of whole steps reads both prompts."""
    job = make_job(tmp_path, *FULL)

    def predicted(**graph: Any) -> Prediction:
        settings = dataclasses.replace(job.config.graph, **graph)
        one = dataclasses.replace(job, config=dataclasses.replace(job.config, graph=settings))
        return predict_run(one, one.requests, transforms.components_of(one), 139 * GIB)

    eager, calls = predicted(), predicted(mode="cuda")
    steps = predicted(mode="compile_cuda", scope="step")
    held = calls.stages["decode_video"] - eager.stages["decode_video"]
    assert held / GIB == pytest.approx(2.6, rel=0.05)
    prompt = eager.activations.prompt
    assert steps.stages["decode_video"] - calls.stages["decode_video"] == prompt > GIB
    assert eager.stages["denoise"] < calls.stages["denoise"] < steps.stages["denoise"]
    assert steps.stages["text_encode"] == eager.stages["text_encode"]
    assert predicted(mode="compile", scope="step").stages == eager.stages
    for rows, added in (("cuda", True), ("compile", False)):
        bench = make_job(tmp_path, *FULL, "task=bench_step", f"bench.graphs=[{rows}]")
        row = predict_run(bench, bench.requests, ("transformer",), 139 * GIB).stages["denoise"]
        alone = make_job(tmp_path, *FULL, "task=bench_step")
        assert (row > predict_run(alone, alone.requests, ("transformer",), 139 * GIB).stages["denoise"]) == added


def test_what_graphs_would_have_to_do(tmp_path: Path) -> None:
    """Per rank: passes in turns, tokens in parts, every request and repeat."""
    job = make_job(tmp_path, "model=ltx2_tiny", "model.weights=random", "parallel=uly2", "bench.repeats=3")
    # 17 x 128 x 128 has 3 x 4 x 4 tokens; two passes that differ in their text alone, 20 steps.
    assert _graph_work(job, job.requests) == GraphWork(kinds=1, passes=3 * 20 * 2, tokens=24)
    over = ("parallel=cfg2", "sampler.video.stg_scale=1", "sampler.video.modality_scale=2")
    job = make_job(tmp_path, "model=ltx2_tiny", "model.weights=random", *over)
    assert _graph_work(job, job.requests) == GraphWork(kinds=2, passes=20 * 2, tokens=48)
