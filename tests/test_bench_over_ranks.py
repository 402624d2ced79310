"""The benchmark tasks over ranks: a row for each way, each with the output of one rank."""

import json
from pathlib import Path

import pytest
import torch

from tests.pipelines.test_ltx2_pipeline import make_job
from tests.ranks import run_ranks
from vgen.job import Job
from vgen.parallel.mesh import build_mesh
from vgen.tasks import bench_decode, bench_encode, bench_step
from vgen.tasks.types import TaskContext

TASKS = {"bench_step": bench_step.run, "bench_decode": bench_decode.run, "bench_encode": bench_encode.run}
COMMON = ("model.weights=random", "bench.warmup=0", "bench.repeats=1")
SMALL = {
    "ltx2_tiny": ("request.num_frames=9",),
    "wan_tiny": ("request.num_frames=5", "request.height=64", "request.width=64"),
}
"""Four lines of latents along both sides."""
CFG_AND_ULYSSES = (
    "vgen, 2 passes",
    "vgen, Ulysses 2",
    "vgen, 2 passes, CFG 2, Ulysses 2",
)
HALO = ("vgen halo by height, 4 ranks", "vgen halo by width, 4 ranks")
TILES = ("vgen tile, 4 ranks", "vgen tile_balanced, 4 ranks")

CASES = (
    ("bench_step", "ltx2_tiny", CFG_AND_ULYSSES),
    ("bench_step", "wan_tiny", CFG_AND_ULYSSES),
    ("bench_decode", "ltx2_tiny", (*HALO, *TILES)),
    ("bench_decode", "wan_tiny", (*HALO, *TILES)),
    ("bench_encode", "ltx2_tiny", HALO),
    ("bench_encode", "wan_tiny", (*HALO, *TILES)),
)
"""What the rows over 4 ranks are called."""


def run_tasks(jobs: list[Job]) -> None:
    for job in jobs:
        mesh = build_mesh(job.plan, torch.distributed.get_world_size(), timeout_s=600)
        TASKS[job.config.task.name](TaskContext(job, torch.device("cpu"), mesh))


def test_rows_over_ranks_have_the_output_of_one(tmp_path: Path) -> None:
    jobs = []
    for number, (task, model, _) in enumerate(CASES):
        (folder := tmp_path / str(number)).mkdir()
        plan = ("parallel=cfg2_uly2",) if task == "bench_step" else ("parallel.vae_size=4",)
        jobs.append(make_job(folder, f"task={task}", f"model={model}", *COMMON, *SMALL[model], *plan))
    run_ranks(4, run_tasks, jobs)
    for job, (task, model, names) in zip(jobs, CASES, strict=True):
        bench = json.loads((job.out_dir / "bench.json").read_text())
        rows = {row["name"]: row for row in bench["rows"]}
        assert [name for name in rows if name in names] == list(names), (task, model)
        assert bench["baseline"] == bench["error_against"] == bench["rows"][0]["name"]
        for name in names:
            # The plain grid has one tile here, as the clip is smaller than one; the balanced one has several.
            limit = 1.0 if "balanced" in name else 1e-5
            assert rows[name]["relative_error"] <= limit, (task, model, name)
            assert len(rows[name]["runs_ms"]) == 1 and min(rows[name]["runs_ms"]) > 0
        assert (job.out_dir / "bench.txt").read_text().count("\n") == len(rows) + 1


def test_a_named_strategy_is_the_only_row_over_ranks(tmp_path: Path) -> None:
    overrides = ("parallel.vae_size=2", "parallel.vae_strategy=halo", "parallel.vae_split=width")
    job = make_job(tmp_path, "task=bench_decode", "model=ltx2_tiny", *COMMON, *SMALL["ltx2_tiny"], *overrides)
    run_ranks(2, run_tasks, [job])
    names = [row["name"] for row in json.loads((tmp_path / "bench.json").read_text())["rows"]]
    assert [name for name in names if "ranks" in name] == ["vgen halo by width, 2 ranks"]


@pytest.mark.parametrize("task", TASKS)
def test_one_rank_has_no_rows_over_ranks(task: str, tmp_path: Path) -> None:
    job = make_job(tmp_path, f"task={task}", "model=wan_tiny", *COMMON, *SMALL["wan_tiny"])
    TASKS[task](TaskContext(job, torch.device("cpu")))
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert rows and not any("ranks" in row["name"] or "Ulysses" in row["name"] for row in rows)
