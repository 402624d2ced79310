"""Schedules against published lists, the formula in float64, and diffusers' scheduler."""

import math

import numpy as np
import pytest
import torch

from vgen.diffusion.schedule import (
    DISTILLED_SIGMAS,
    DISTILLED_STAGE_2_SIGMAS,
    build_sigmas,
    sigmas_from_list,
    start_at,
    validate_sigmas,
)

# Lists that the official scheduler printed (30 steps, 4096 tokens), five digits.
OFFICIAL_30 = [
    1, 0.99496, 0.9896, 0.98391, 0.97784, 0.97136, 0.96442, 0.95698, 0.94897, 0.94034, 0.93099, 0.92085, 0.90981,
    0.89774, 0.88448, 0.86986, 0.85365, 0.83558, 0.81532, 0.79243, 0.76636, 0.73642, 0.70166, 0.66081, 0.61214,
    0.55315, 0.48016, 0.38754, 0.26612, 0.1, 0,
]  # fmt: skip
# The ends of the lists of 40 steps, likewise.
OFFICIAL_40 = ([1, 0.99645, 0.99274, 0.98885], [0.42072, 0.33781, 0.23394, 0.1, 0])
DIFFUSERS_40_OF_15360 = ([1, 0.99936, 0.99868], [0.77838, 0.69855, 0.54237, 0.1, 0])


def test_official_list() -> None:
    sigmas = build_sigmas(30, schedule="official", video_tokens=15360)
    np.testing.assert_allclose(sigmas.numpy(), OFFICIAL_30, atol=5e-6)


@pytest.mark.parametrize(
    ("schedule", "ends"),
    [("official", OFFICIAL_40), ("diffusers", DIFFUSERS_40_OF_15360)],
    ids=["official", "diffusers"],
)
def test_ends_of_published_lists(schedule: str, ends: tuple[list[float], list[float]]) -> None:
    sigmas = build_sigmas(40, schedule=schedule, video_tokens=15360).numpy()
    head, tail = ends
    assert len(sigmas) == 41
    np.testing.assert_allclose(sigmas[: len(head)], head, atol=5.1e-6)
    np.testing.assert_allclose(sigmas[-len(tail) :], tail, atol=5.1e-6)


def test_official_bits() -> None:
    """Nine digits name a float32: the list of 8 steps that LTX2Scheduler of Lightricks/LTX-2 at 400fd31 returned."""
    sigmas = build_sigmas(8, schedule="official", video_tokens=48)
    expected = [
        0.999999881, 0.965711713, 0.921874762, 0.863856077, 0.783445477, 0.664579272, 0.471002698, 0.100000024, 0.0
    ]  # fmt: skip
    assert torch.equal(sigmas, torch.tensor(expected))


@pytest.mark.parametrize("schedule", ["official", "diffusers"])
@pytest.mark.parametrize("steps", [2, 3, 8, 15, 30, 40])
def test_formula_in_float64(schedule: str, steps: int) -> None:
    """As a logistic function: the shift moves the log-odds of the linear grid, then the last sigma becomes 0.1."""
    mu = {"official": 2.05, "diffusers": 0.95 + 1.1 * (3840 - 1024) / 3072}[schedule]
    linear = [1 - i / steps for i in range(1, steps)]
    shifted = [1 / (1 + math.exp(-mu - math.log(s / (1 - s)))) for s in linear]
    stretch = 0.9 / (1 - shifted[-1])
    expected = [1.0, *(1 - (1 - s) * stretch for s in shifted), 0.0]
    sigmas = build_sigmas(steps, schedule=schedule, video_tokens=3840)
    assert sigmas.dtype == torch.float32
    np.testing.assert_allclose(sigmas.numpy(), expected, rtol=0, atol=1e-6)


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
    assert torch.equal(ours, scheduler.sigmas)


@pytest.mark.parametrize("schedule", ["official", "diffusers"])
def test_one_step_is_finite(schedule: str) -> None:
    assert build_sigmas(1, schedule=schedule, video_tokens=48).tolist() == [1.0, 0.0]


def test_distilled_lists_are_those_of_diffusers_and_of_the_official_pipelines() -> None:
    from diffusers.pipelines.ltx2.utils import DISTILLED_SIGMA_VALUES, STAGE_2_DISTILLED_SIGMA_VALUES

    # diffusers' scheduler appends the 0 itself.
    assert (*DISTILLED_SIGMA_VALUES, 0.0) == DISTILLED_SIGMAS
    assert (*STAGE_2_DISTILLED_SIGMA_VALUES, 0.0) == DISTILLED_STAGE_2_SIGMAS
    sigmas = build_sigmas(8, schedule="distilled", video_tokens=48)
    expected = torch.tensor([1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875, 0.0])
    assert torch.equal(sigmas, expected)
    assert torch.equal(sigmas_from_list(DISTILLED_STAGE_2_SIGMAS), expected[5:])


@pytest.mark.parametrize("steps", [1, 7, 9, 40])
def test_distilled_has_eight_steps(steps: int) -> None:
    with pytest.raises(ValueError, match=f"steps={steps} does not fit the distilled schedule.*use steps=8"):
        build_sigmas(steps, schedule="distilled", video_tokens=48)


def test_list_keeps_its_numbers() -> None:
    sigmas = sigmas_from_list([0.9, 0.3, 0])
    assert sigmas.dtype == torch.float32
    assert torch.equal(sigmas, torch.tensor([0.9, 0.3, 0.0]))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([], "do not fall"),
        ([0.0], "do not fall"),
        ([1.0, 0.5], "do not fall"),
        ([1.0, 0.0, 0.0], "do not fall"),
        ([0.5, 1.0, 0.0], "do not fall"),
        ([1.0, 0.5, -0.1, 0.0], "do not fall"),
        ([1.0, float("nan"), 0.0], "do not fall"),
        ([float("nan"), 0.0], "do not fall"),
        ([1.0, 0.5, 0.5 - 1e-10, 0.0], "do not fall"),  # equal in float32
        ([1.5, 0.5, 0.0], "start above 1"),
        ([float("inf"), 0.0], "start above 1"),
    ],
)
def test_refuses_schedules_that_would_divide_by_zero_or_exceed_noise(bad: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sigmas_from_list(bad)


def test_refuses_to_look_at_a_device() -> None:
    with pytest.raises(ValueError, match="sigmas are on meta"):
        validate_sigmas(torch.tensor([1.0, 0.0], device="meta"))


@pytest.mark.parametrize("schedule", ["official", "diffusers", "distilled"])
def test_full_noise_is_the_schedule_itself(schedule: str) -> None:
    sigmas = build_sigmas(8, schedule=schedule, video_tokens=48)
    assert torch.equal(start_at(sigmas, 1), sigmas)


def test_full_noise_leaves_a_list_that_starts_lower_as_it_is() -> None:
    sigmas = sigmas_from_list(DISTILLED_STAGE_2_SIGMAS)
    assert torch.equal(start_at(sigmas, 1.0), sigmas)


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        (0.8, [0.8, 0.725, 0.421875, 0.0]),
        (0.725, [0.725, 0.421875, 0.0]),  # in the schedule: no second, empty step
        (0.7, [0.7, 0.421875, 0.0]),
        (0.01, [0.01, 0.0]),
    ],
)
def test_noise_level_starts_inside_the_schedule(level: float, expected: list[float]) -> None:
    started = start_at(sigmas_from_list(DISTILLED_SIGMAS), level)
    assert torch.equal(started, torch.tensor(expected))
    validate_sigmas(started)


def test_noise_level_that_float32_rounds_to_a_sigma_is_that_sigma() -> None:
    sigmas = build_sigmas(30, schedule="official", video_tokens=48)
    for i in range(30):
        assert torch.equal(start_at(sigmas, sigmas[i].item() * (1 + 1e-9)), sigmas[i:])


def test_one_step_from_a_noise_level() -> None:
    sigmas = build_sigmas(1, schedule="official", video_tokens=48)
    assert torch.equal(start_at(sigmas, 0.6), torch.tensor([0.6, 0.0]))


@pytest.mark.parametrize("level", [0, -0.5, 1e-60, float("nan")])
def test_refuses_noise_levels_with_nothing_to_denoise(level: float) -> None:
    with pytest.raises(ValueError, match="leaves nothing to denoise; use a level above 0"):
        start_at(torch.tensor([1.0, 0.0]), level)


@pytest.mark.parametrize("level", [0.95, 1.1, float("inf")])
def test_refuses_noise_levels_above_the_schedule(level: float) -> None:
    with pytest.raises(ValueError, match=r"above the schedule's first sigma 0\.909375.*use 0\.909375 or less"):
        start_at(sigmas_from_list(DISTILLED_STAGE_2_SIGMAS), level)


def test_refuses_unknown_schedule_and_no_steps() -> None:
    with pytest.raises(ValueError, match="use official, diffusers or distilled"):
        build_sigmas(4, schedule="linear", video_tokens=1)
    with pytest.raises(ValueError, match="steps=0"):
        build_sigmas(0, schedule="official", video_tokens=1)
