"""What a run says of its compilation."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pipelines.test_ltx2_pipeline import make_job
from vgen.tasks import generate
from vgen.tasks.types import TaskContext

SMALL = (
    "model=ltx2_tiny", "model.weights=random", "request.num_frames=9", "request.height=64", "request.width=64",
    "sampler.steps=2", "bench.repeats=2", "output.save=[latents]",
)  # fmt: skip


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Dynamo without Inductor, which takes a minute; fills with what was compiled."""
    real, compiled = torch.compile, []

    def compile_(function: Any, **settings: Any) -> Any:
        compiled.append(function)
        return real(function, backend="eager", **{name: settings[name] for name in ("dynamic",)})

    monkeypatch.setattr(logging.getLogger("torch.__trace"), "propagate", False)
    monkeypatch.setattr(torch, "compile", compile_)
    torch._dynamo.reset()
    return compiled


@pytest.mark.parametrize("graph", ["eager", "compile"])
def test_compilation_is_a_time_of_the_run(graph: str, tmp_path: Path, compilations: list[Any]) -> None:
    job = make_job(tmp_path, *SMALL, f"graph={graph}")
    result = generate.run(TaskContext(job, torch.device("cpu")))
    assert bool(compilations) == (graph == "compile")
    if graph == "eager":
        assert "compile" not in result.job_timings
        return
    # All of it is in the first request, that is in its denoising.
    assert 0 < result.job_timings["compile"] < result.request_timings[0]["denoise"]
