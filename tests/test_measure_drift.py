"""``measure.drift``: how far the ranks are apart at each step, in the record."""

from pathlib import Path

import pytest

from tests.test_config import check
from tests.test_end_to_end import read, run
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


def test_ranks_that_only_decode_have_no_steps() -> None:
    with pytest.raises(ConfigurationError, match=r"1 rank\(s\) of parallel.vae_size=3 only decode; use vae_size=2"):
        check("parallel=cfg2", "parallel.vae_size=3", "measure.drift=true")
    assert not check("parallel=cfg2", "parallel.vae_size=3").measure.drift
