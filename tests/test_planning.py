"""What a run needs, told before it loads anything."""

import dataclasses
import logging
from pathlib import Path

import pytest
import torch

from tests.pipelines.test_ltx2_pipeline import make_job
from vgen import transforms
from vgen.memory import GIB
from vgen.models.attention_backends import AttentionError
from vgen.planning import plan_run, predict_run
from vgen.typed import ConfigurationError

CPU = torch.device("cpu")
FULL = ("model=ltx2", "model.weights=random", "quant=bf16", "request.height=768", "request.width=1280")


def test_the_cpu_decodes_whole_unless_tiles_are_asked_for(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    assert plan_run(job, job.requests, CPU, transforms.components_of(job)).decode == "whole"
    job = make_job(tmp_path, "parallel.vae_strategy=tile")
    assert plan_run(job, job.requests, CPU, transforms.components_of(job)).decode == "tile"


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
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    room = 42 * GIB  # the transformer with its step, but not beside the whole decode
    job = make_job(tmp_path, *FULL, "model.offload=text_encoder")
    with caplog.at_level(logging.INFO, "vgen.notice"):
        prediction = predict_run(job, job.requests, transforms.components_of(job), room)
    assert prediction.decode == "tile" and "decoding in tiles" in caplog.text
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
