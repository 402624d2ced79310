"""Schedules against published lists and against diffusers' scheduler."""

import numpy as np
import pytest
import torch

from vgen.diffusion.schedule import build_sigmas, validate_sigmas

# Lists that the official scheduler printed (30 steps, 4096 tokens), five digits.
OFFICIAL_30 = [
    1, 0.99496, 0.9896, 0.98391, 0.97784, 0.97136, 0.96442, 0.95698, 0.94897, 0.94034, 0.93099, 0.92085, 0.90981,
    0.89774, 0.88448, 0.86986, 0.85365, 0.83558, 0.81532, 0.79243, 0.76636, 0.73642, 0.70166, 0.66081, 0.61214,
    0.55315, 0.48016, 0.38754, 0.26612, 0.1, 0,
]  # fmt: skip


def test_official_list() -> None:
    sigmas = build_sigmas(30, schedule="official", video_tokens=15360)
    np.testing.assert_allclose(sigmas.numpy(), OFFICIAL_30, atol=5e-6)


def test_official_ignores_the_tokens_and_diffusers_does_not() -> None:
    official = [build_sigmas(40, schedule="official", video_tokens=n) for n in (48, 15360)]
    assert torch.equal(*official)
    small, large = (build_sigmas(40, schedule="diffusers", video_tokens=n) for n in (3840, 15360))
    assert small[20] < large[20]


@pytest.mark.parametrize("tokens", [48, 3840, 4096, 15360])
@pytest.mark.parametrize("steps", [2, 8, 40])
def test_diffusers_schedule(tokens: int, steps: int) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler
    from diffusers.pipelines.ltx2.pipeline_ltx2 import calculate_shift

    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.95, max_shift=2.05, base_image_seq_len=1024, max_image_seq_len=4096,
        shift_terminal=0.1,
    )  # fmt: skip
    mu = calculate_shift(tokens, 1024, 4096, 0.95, 2.05)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
    ours = build_sigmas(steps, schedule="diffusers", video_tokens=tokens)
    torch.testing.assert_close(ours, scheduler.sigmas, rtol=0, atol=6e-8)  # one unit in the last place below 1


def test_one_step_is_finite() -> None:
    assert build_sigmas(1, schedule="official", video_tokens=48).tolist() == [1.0, 0.0]


@pytest.mark.parametrize("bad", [[1.0, 0.5], [1.0, 0.0, 0.0], [0.5, 1.0, 0.0], [0.0], [1.0, float("nan"), 0.0]])
def test_refuses_schedules_that_would_divide_by_zero(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="do not fall"):
        validate_sigmas(torch.tensor(bad))


def test_refuses_unknown_schedule_and_no_steps() -> None:
    with pytest.raises(ValueError, match="official or diffusers"):
        build_sigmas(4, schedule="linear", video_tokens=1)
    with pytest.raises(ValueError, match="steps=0"):
        build_sigmas(0, schedule="official", video_tokens=1)
