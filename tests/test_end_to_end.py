"""The command itself, as a user runs it: ranks, faults, sweeps, files."""

import json
import os
import signal
import subprocess
import sys
import time
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests import tiny_ltx2

ROOT = Path(__file__).parent.parent
SMALL = (
    "device=cpu",
    "logger=none",
    "sampler.steps=2",
    "request.height=64",
    "request.width=64",
    "request.num_frames=9",
)


def command(out_dir: Path, *overrides: str) -> list[str]:
    return [sys.executable, "-m", "vgen.run", f"hydra.run.dir={out_dir}", *SMALL, *overrides]


def run(out_dir: Path, *overrides: str, **changes: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name != "WANDB_MODE"} | changes
    return subprocess.run(
        command(out_dir, *overrides), cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )


def read(out_dir: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((out_dir / "record.json").read_text())
    return record


def processes_of(out_dir: Path) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and str(out_dir / "job.json") in (entry / "cmdline").read_text():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def one_sentence(result: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("vgen: ")
    return lines[0]


def test_without_arguments_the_packages_own_model_makes_a_video_with_sound(tmp_path: Path) -> None:
    arguments = [f"hydra.run.dir={tmp_path / 'job'}", "device=cpu", "logger=none", "sampler.steps=2"]
    result = subprocess.run(
        [sys.executable, "-m", "vgen.run", *arguments],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "does not know" not in result.stdout
    record = read(tmp_path / "job")
    assert record["active"]["weights"] == "load"
    assert record["active"]["checkpoint"] == {
        "id": "vgen://ltx2_tiny/ltx-2-tiny.safetensors", "revision": None, "kind": "dev", "version": "2.0",
        "layout": "official",
    }  # fmt: skip
    (output,) = record["outputs"]
    assert output["prompt"] == "a red circle moves right, high tone"
    assert (output["num_frames"], output["height"], output["width"], output["fps"]) == (17, 128, 128, 24)
    assert output["has_audio"] and output["audio_seconds"] == pytest.approx(17 / 24, abs=0.03)
    assert (tmp_path / "job" / "sample_0.mp4").stat().st_size > 1000


def test_results_do_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"a circle, number {i}", "seed": i} for i in range(5)]
    prompts.write_text("\n".join(json.dumps(row) for row in rows))
    records = {}
    for size in (1, 2, 3):
        out_dir = tmp_path / str(size)
        result = run(
            out_dir, f"request.prompts_file={prompts}", f"parallel.data_size={size}", "output.save=[mp4,latents,frames]"
        )
        assert result.returncode == 0, result.stderr
        for i in range(5):
            assert result.stdout.count(f"the model does not know 'number', '{i}' and hears") == 1
        records[size] = read(out_dir)
        assert len(records[size]["memory_gib"]["per_rank"]) == size
    for i in range(5):
        for kind in ("latents", "frames"):
            one, *others = (load_file(tmp_path / str(size) / f"{kind}_{i}.safetensors") for size in (1, 2, 3))
            for other in others:
                assert all(torch.equal(one[name], other[name]) for name in one)
    assert records[1]["outputs"] == records[2]["outputs"] == records[3]["outputs"]
    assert [row["path"] for row in records[1]["outputs"]] == [f"sample_{i}.mp4" for i in range(5)]


@pytest.mark.parametrize("target", ["rank", "parent"])
def test_a_killed_process_ends_the_job(target: str, tmp_path: Path) -> None:
    out_dir = tmp_path / "job"
    parent = subprocess.Popen(
        command(out_dir, "sampler.steps=100000", "parallel=cfg2", 'request.prompt="x"'),
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        ranks = _wait_for(lambda: processes_of(out_dir), 2)
        time.sleep(6)  # into the run
        victim = max(ranks) if target == "rank" else parent.pid
        os.kill(victim, signal.SIGKILL)
        _, stderr = parent.communicate(timeout=30)
    finally:
        parent.kill()
    assert parent.returncode != 0
    _wait_for(lambda: [0] if not processes_of(out_dir) else [], 1)
    record = read(out_dir)
    assert record["status"] == "failed"
    if target == "rank":
        assert record["error"]["kind"] == "RankKilled" and record["error"]["rank"] == 1
        assert len([line for line in stderr.splitlines() if line.startswith("vgen: ")]) == 1
    else:
        assert record["error"]["kind"] == "Interrupted"


def _wait_for(look: Any, count: int) -> list[int]:
    for _ in range(300):
        if len(found := look()) >= count:
            return list(found)
        time.sleep(0.1)
    raise AssertionError("nothing came within 30 s")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_job(number: signal.Signals, code: int, tmp_path: Path) -> None:
    out_dir = tmp_path / "job"
    start = "import signal, runpy, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    start += "runpy.run_module('vgen.run', run_name='__main__')"
    arguments = command(out_dir, "sampler.steps=100000")[3:]
    parent = subprocess.Popen(
        [sys.executable, "-c", start, *arguments], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    try:
        _wait_for(lambda: processes_of(out_dir), 1)
        time.sleep(1)
        parent.send_signal(number)
        parent.communicate(timeout=30)
    finally:
        parent.kill()
    assert parent.returncode == code
    assert not processes_of(out_dir)
    assert read(out_dir)["error"]["kind"] == "Interrupted"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=88k", "tmpfs", str(disk)], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a small file system")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_loses_no_latents_and_decode_finishes_the_run(small_disk: Path, tmp_path: Path) -> None:
    save = "output.save=[mp4,latents,frames]"
    # The noise that random weights make fills the disk with its mp4.
    size = ("request.height=128", "request.width=128", "model.weights=random")
    undisturbed, finished = tmp_path / "undisturbed", tmp_path / "finished"
    assert run(undisturbed, save, *size).returncode == 0
    result = run(small_disk / "job", save, *size)
    assert result.returncode == 1
    assert "its disk is full" in one_sentence(result)
    assert not list((small_disk / "job").glob("*.mp4"))
    again = run(finished, "task=decode", f"task.latents={small_disk / 'job'}", save, size[-1])
    assert again.returncode == 0, again.stderr
    for name in ("frames_0.safetensors", "latents_0.safetensors", "sample_0.mp4"):
        assert (finished / name).read_bytes() == (undisturbed / name).read_bytes(), name


def test_a_truncated_checkpoint_is_named_before_anything_starts(tmp_path: Path) -> None:
    official = tiny_ltx2.tiny_checkpoints().official
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(official.read_bytes()[:-100])
    result = run(tmp_path / "job", "model.weights=load", f"model.checkpoint={cut}")
    assert result.returncode == 1
    assert "is truncated" in one_sentence(result)
    assert not (tmp_path / "job" / "ranks").exists()
    assert read(tmp_path / "job")["error"]["kind"] == "CheckpointError"


def test_an_unwritable_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = run(tmp_path / "file" / "job")
    assert result.returncode == 2
    assert "cannot be written" in one_sentence(result)


def test_tracking_out_of_reach_fails_nothing(tmp_path: Path) -> None:
    out_dir = tmp_path / "job"
    result = run(out_dir, "logger=wandb", WANDB_API_KEY="0" * 40, WANDB_BASE_URL="http://127.0.0.1:9")
    assert result.returncode == 0, result.stderr
    assert list((out_dir / "wandb").glob("offline-run-*/*.wandb"))


def test_a_rank_that_raises_is_told_once(tmp_path: Path) -> None:
    from vgen import media

    video = torch.full((1, 32, 2, 2, 2), float("nan"))
    request = {
        "index": 0, "prompt": "", "negative_prompt": "", "images": [], "image_crf": 33, "video": None,
        "noise_level": 0.7, "audio": "none", "sound": None, "seed": 0, "height": 64, "width": 64, "num_frames": 9,
        "fps": 24.0,
    }  # fmt: skip
    media.save_latents(tmp_path / "latents_0.safetensors", video, None, {"request": json.dumps(request)})
    out_dir = tmp_path / "job"
    result = run(out_dir, "task=decode", f"task.latents={tmp_path}")
    assert result.returncode == 1
    assert "NaN or infinite before decode" in one_sentence(result)
    assert (out_dir / "run.log").read_text().count("Traceback (most recent call last)") == 1
    error = read(out_dir)["error"]
    assert (error["kind"], error["rank"]) == ("NumericsError", 0)


def test_a_sweep_changes_its_world_size_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    arguments = [
        sys.executable, "-m", "vgen.run", "-m", f"hydra.sweep.dir={tmp_path}", *SMALL, "parallel=pvs1,pvs2",
    ]  # fmt: skip
    first = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False)
    assert first.returncode == 0, first.stderr
    assert "2 of 2 jobs done" in first.stdout
    assert [read(tmp_path / job)["active"]["world_size"] for job in "01"] == [1, 2]
    (tmp_path / "1" / "record.json").unlink()
    second = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False)
    assert second.returncode == 0, second.stderr
    assert second.stdout.count("done before, skipped") == 1


@pytest.fixture
def picture_and_tone(tmp_path: Path) -> tuple[Path, Path]:
    import numpy as np
    from PIL import Image

    picture, tone = tmp_path / "picture.png", tmp_path / "tone.wav"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (50, 70, 3), dtype=np.uint8)).save(picture)
    wave_form = (np.sin(np.arange(22050) * 2 * np.pi * 440 / 22050) * 20000).astype("<i2")
    with wave.open(str(tone), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(22050)
        file.writeframes(wave_form.tobytes())
    return picture, tone


def test_an_image_and_a_kept_sound_reach_the_file(picture_and_tone: tuple[Path, Path], tmp_path: Path) -> None:
    picture, tone = picture_and_tone
    out_dir, again = tmp_path / "job", tmp_path / "again"
    inputs = (f"request.image={picture}", "request.audio=copy", f"request.sound={tone}")
    result = run(out_dir, *inputs, "model=ltx2_3_tiny", f"request.prompt={'word ' * 40}")
    assert result.returncode == 0, result.stderr
    assert "tokens longer than the 128" in result.stdout  # said on the console, not cut in silence
    record = read(out_dir)
    assert record["active"]["passes"] == ["cond", "uncond", "ptb", "mod"]
    assert record["active"]["checkpoint"]["version"] == "2.3"
    assert record["timings_s"]["encode_video"] > 0 and record["timings_s"]["encode_audio"] > 0
    (output,) = record["outputs"]
    assert output["has_audio"] and output["audio_seconds"] == pytest.approx(9 / 24, abs=0.03)
    finished = run(again, "model=ltx2_3_tiny", "task=decode", f"task.latents={out_dir}")
    assert finished.returncode == 0, finished.stderr
    assert (again / "sample_0.mp4").read_bytes() == (out_dir / "sample_0.mp4").read_bytes()


def test_what_does_not_fit_a_distilled_checkpoint_is_told_before_anything_starts(tmp_path: Path) -> None:
    files = tiny_ltx2.tiny_checkpoints()
    distilled = tmp_path / "ltx-2-tiny-distilled.safetensors"
    distilled.symlink_to(files.official)
    load = (f"model.checkpoint={distilled}", f"model.text_encoder.checkpoint={files.gemma}", "model.weights=load")
    result = run(tmp_path / "job", *load, "sampler.video.stg_blocks=[1]", "sampler.audio.stg_blocks=[1]")
    assert result.returncode == 1
    assert "which is distilled for 8 fixed sigmas without guidance" in one_sentence(result)
    assert not processes_of(tmp_path / "job")
