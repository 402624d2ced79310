"""A run that has no memory for its decode is finished from its latents, and says how."""

import dataclasses
import json
import os
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.pipelines.test_ltx2_pipeline import make_job
from tests.test_end_to_end import read, run
from vgen import rescue
from vgen.job import Job
from vgen.record import cell_hash

WAN = ("model=wan_tiny", "model.weights=random", "request.height=64", "request.width=64", "request.num_frames=13",
       "model.vae.chunk=4")  # fmt: skip
LTX2 = ("model=ltx2_tiny", "model.weights=random")
ALONE = "latents decoded by themselves"
# In a rank's interpreter, before vgen: the first frames of its decode do not fit where ``fails`` says so.
SITE = """
import json, os, sys
if "LOCAL_RANK" in os.environ and sys.orig_argv[-1].endswith("job.json"):
    config = json.load(open(sys.orig_argv[-1]))["config"]
    task, chunk, ranks = config["task"]["name"], config["model"]["vae"]["chunk"], config["parallel"]["vae_size"]
    if {fails}:
        import torch
        from vgen.stages import decode

        def timed_frames(frames, timer):
            with timer("decode_video"):
                raise torch.OutOfMemoryError("CUDA out of memory")
            yield

        decode.timed_frames = timed_frames
"""


def saved(job: Job) -> Job:
    """``job`` as it is when its latents are on disk."""
    job.out_dir.mkdir(parents=True, exist_ok=True)
    job.write()
    for request in job.requests:
        (job.out_dir / f"latents_{request.index}.safetensors").touch()
    return job


def names(job: Job, kind: str = "OutOfMemoryError", stage: str = "decode_video") -> list[str]:
    return [attempt.name for attempt in rescue.attempts(job, kind, stage)]


def test_nothing_is_worse_than_what_was_asked_for(tmp_path: Path) -> None:
    wan = saved(make_job(tmp_path / "wan", *WAN, "parallel=pvs2"))
    assert names(wan) == [ALONE, "model.vae.chunk=2", "model.vae.chunk=1"]
    ltx2 = saved(make_job(tmp_path / "ltx2", *LTX2, "parallel=pvs2"))
    assert names(ltx2) == [ALONE]
    tiles = saved(make_job(tmp_path / "tiles", *LTX2, "parallel=pvs2", "parallel.vae_strategy=tile"))
    assert names(tiles) == [ALONE, *(f"model.vae.tile_size={size}" for size in (256, 128))]


def test_ranks_that_only_denoised_help(tmp_path: Path) -> None:
    job = saved(make_job(tmp_path, *LTX2, "parallel=cfg2", "parallel.vae_size=1"))
    first, second = rescue.attempts(job, "OutOfMemoryError", "write")
    assert second.name == "parallel.vae_size=2 parallel.vae_strategy=halo"
    assert (first.job.num_ranks, second.job.num_ranks) == (1, 2)
    for attempt in (first, second):
        assert attempt.job.config.task.name == "decode"
        assert attempt.job.config.task.latents == str(tmp_path)
        assert attempt.job.out_dir == tmp_path


@pytest.mark.parametrize("missing", ["latents", "run", "kind", "stage", "task"])
def test_other_matters_are_left_alone(missing: str, tmp_path: Path) -> None:
    job = saved(make_job(tmp_path, *WAN, "parallel=pvs2"))
    kind, stage, latents = "OutOfMemoryError", "decode_video", tmp_path / "latents_0.safetensors"
    if missing == "latents":
        latents.unlink()
    elif missing == "run":  # those of an earlier one
        os.utime(latents, ns=(0, job.path.stat().st_mtime_ns - 1))
    elif missing == "kind":
        kind = "RuntimeError"
    elif missing == "stage":
        stage = "denoise"
    else:
        task = dataclasses.replace(job.config.task, name="decode")
        job = dataclasses.replace(job, config=dataclasses.replace(job.config, task=task))
    assert names(job, kind, stage) == []


def test_a_decode_over_ranks_is_made_again_from_the_latents(tmp_path: Path) -> None:
    """By itself, and where that is too much as well with shorter chunks; what nothing helps keeps its latents."""
    common = (*WAN, "quant=fp32", "parallel=pvs2", "sampler.steps=1", "output.save=[mp4,latents,frames]")
    made = {"expected": run(tmp_path / "expected", *common, "model.vae.chunk=2")}
    for name, fails, chunk in (("chunks", "chunk != 1", 2), ("never", "True", 1)):
        (site := tmp_path / f"site_{name}").mkdir()
        (site / "sitecustomize.py").write_text(SITE.replace("{fails}", fails))
        made[name] = run(tmp_path / name, *common, f"model.vae.chunk={chunk}", PYTHONPATH=str(site))
    assert [one.returncode for one in made.values()] == [0, 0, 1], [one.stderr for one in made.values()]
    expected, found, failed = (read(tmp_path / name) for name in made)
    for tried in (ALONE, "model.vae.chunk=1"):
        assert f"its latents are kept, again with: {tried}" in made["chunks"].stdout
    assert (found["status"], found["error"], found["task"]) == ("ok", None, "generate")
    assert found["cell"] == expected["cell"] == cell_hash(found["config"])
    assert found["active"]["decode_fallbacks"] == [ALONE, "model.vae.chunk=1"]
    assert [found["active"][size] for size in ("world_size", "cfg_size", "vae_size")] == [2, 2, 2]
    assert found["timings_s"]["denoise"] is None
    assert found["timings_s"]["total"] > found["timings_s"]["decode_video"] > 0
    frames, whole = (load_file(tmp_path / name / "frames_0.safetensors")["frames"] for name in ("chunks", "expected"))
    # Chunks of other lengths are summed in another order: a level of 255 at most.
    assert (frames.int() - whole.int()).abs().max() <= 1
    assert json.loads((tmp_path / "chunks" / "job.json").read_text())["config"] == found["config"]
    assert failed["status"] == "failed" and failed["error"]["kind"] == "OutOfMemoryError"
    assert (tmp_path / "never" / "latents_0.safetensors").is_file()
    assert f"finish with task=decode task.latents={tmp_path / 'never'}" in made["never"].stdout
