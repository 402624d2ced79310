"""``measure.drift``: how far the ranks are apart at each step, in the record."""

from pathlib import Path

import pytest
import torch

from tests.pipelines.test_ltx2_pipeline import make_job
from tests.test_config import check
from tests.test_end_to_end import read, run
from vgen.tasks import generate
from vgen.tasks.samples import NullSink
from vgen.tasks.types import TaskContext
from vgen.typed import ConfigurationError

TINY = ("model.weights=random", "sampler.steps=3", "output.save=[latents]", "request.num_frames=9")


def test_the_record_says_how_far_the_ranks_are_apart(tmp_path: Path) -> None:
    result = run(tmp_path, *TINY, "parallel=cfg2", "measure.drift=true")
    assert result.returncode == 0, result.stderr
    record = read(tmp_path)
    skew = record["drift"]["skew_ms"]
    assert len(skew["steps"]) == 3 and min(skew["steps"]) >= 0 and 0 < skew["max"] < 60_000
    # The extra run is neither timed nor written.
    assert len(record["outputs"]) == 1 and len(record["timings_s"]["denoise_steps"]) == 3


@pytest.mark.parametrize(("steps", "profiled"), [(1, 0), (2, 1), (6, 3)])
def test_steps_after_the_first_are_profiled(
    steps: int, profiled: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU there is nothing on a device to see; how many steps were looked at, and that the request ended there."""
    monkeypatch.setattr(generate, "_can_profile", lambda _: True)
    decoded = []
    monkeypatch.setattr(NullSink, "write", lambda _, frames, __: decoded.append(sum(1 for _ in frames)))
    job = make_job(tmp_path, "model=ltx2_tiny", *TINY, f"sampler.steps={steps}", "measure.drift=true")
    drift = generate.run(TaskContext(job, torch.device("cpu"))).drift
    assert drift is not None
    assert len(drift["skew_ms"]["steps"]) == steps
    if profiled:
        assert drift["launches"]["steps"] == [0] * profiled
        assert drift["idle_share"]["steps"] == [1.0] * profiled
    else:
        assert "launches" not in drift
    assert len(decoded) == 1  # of the run for the skew


def test_ranks_that_only_decode_have_no_steps() -> None:
    with pytest.raises(ConfigurationError, match=r"1 rank\(s\) of parallel.vae_size=3 only decode; use vae_size=2"):
        check("parallel=cfg2", "parallel.vae_size=3", "measure.drift=true")
    assert not check("parallel=cfg2", "parallel.vae_size=3").measure.drift
