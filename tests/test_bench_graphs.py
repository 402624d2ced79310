"""The rows of graphs of ``task=bench_step``, with a recording of operators in place of CUDA's."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.graph.tape import TapeBackend
from tests.pipelines.test_ltx2_pipeline import make_job
from vgen.components.ranks import ALONE
from vgen.tasks import bench, bench_step
from vgen.tasks.types import TaskContext

SMALL = ("model.weights=random", "request.num_frames=9", "request.height=64", "request.width=64")


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> list[TapeBackend]:
    """Those that were made, one for each captured row."""
    made: list[TapeBackend] = []

    def backend(_: torch.device) -> TapeBackend:
        made.append(TapeBackend())
        return made[-1]

    monkeypatch.setattr(bench, "CudaBackend", backend)
    return made


def run(tmp_path: Path, model: str, *overrides: str) -> Any:
    job = make_job(tmp_path, f"model={model}", "task=bench_step", "bench.graphs=[cuda]", *SMALL, *overrides)
    bench_step.run(TaskContext(job, torch.device("cpu"), ALONE))
    return json.loads((job.out_dir / "bench.json").read_text())


@pytest.mark.parametrize("model", ["ltx2_tiny", "wan_tiny"])
def test_a_pass(model: str, tmp_path: Path, backends: list[TapeBackend]) -> None:
    made = run(tmp_path, model)
    assert [row["name"] for row in made["rows"]][:: len(made["rows"]) - 1] == ["vgen eager", "vgen cuda"]
    assert made["equal_bits"] == {"vgen cuda": True}
    assert len(backends) == 1 and len(backends[0].tapes) == 1


@pytest.mark.parametrize("model", ["ltx2_tiny", "wan_tiny"])
@pytest.mark.parametrize("scope", ["transformer", "step"])
def test_a_whole_step(model: str, scope: str, tmp_path: Path, backends: list[TapeBackend]) -> None:
    """Two passes that differ in their text alone are one graph; so is the step that has both."""
    made = run(tmp_path, model, "bench.steps=true", f"graph.scope={scope}")
    assert [row["name"] for row in made["rows"]] == ["vgen step, eager", "vgen step, cuda"]
    assert made["rows"][1]["relative_error"] == 0
    assert made["equal_bits"] == {"vgen step, cuda": True}
    assert made["baseline"] == made["error_against"] == "vgen step, eager"
    (backend,) = backends
    assert len(backend.tapes) == 1
    # Per capture a warm-up of two and the recording: of one pass each, or of all of a step.
    assert backend.runs == 3


def test_eager_steps_alone(tmp_path: Path, backends: list[TapeBackend]) -> None:
    made = run(tmp_path, "ltx2_tiny", "bench.steps=true", "bench.graphs=[]")
    assert [row["name"] for row in made["rows"]] == ["vgen step, eager"]
    assert backends == []
