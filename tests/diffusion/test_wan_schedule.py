"""Wan's sampling against numbers of the official scheduler, diffusers' schedulers, and diffusers' whole loop."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler, WanPipeline

from vgen.diffusion.flow_match import FlowSchedule, Grid, Solver, StepWeights, advance, build_flow_schedule
from vgen.diffusion.guidance import UNCOND, Guidance, apply_guidance
from vgen.diffusion.solver import to_x0
from vgen.diffusion.wan_guidance import (
    OFFICIAL_SAMPLING,
    GuidanceScales,
    StepPlan,
    plan_steps,
    switch_step,
)

# What FlowUniPCMultistepScheduler of Wan-Video/Wan2.2 at 42bf4cf returned for 4 steps: sigmas, timesteps, and where
# `velocity` below took [-2, -1, 0, 1, 2]. Nine digits name a float32.
OFFICIAL = {
    3.0: (
        [0.999666452, 0.899639785, 0.749624789, 0.499666572, 0.0],
        [999, 899, 749, 499],
        [-0.644268274, -0.158489823, -0.101629391, -0.076403558, 0.286873698],
    ),
    5.0: (
        [0.999799848, 0.937265456, 0.833055377, 0.624687374, 0.0],
        [999, 937, 833, 624],
        [-0.561153829, -0.051430404, -0.108804658, -0.209667861, 0.187382698],
    ),
    12.0: (
        [0.999916613, 0.972867668, 0.922934771, 0.799786508, 0.0],
        [999, 972, 922, 799],
        [-0.420349598, 0.174492896, -0.131453648, -0.500499547, 0.029423237],
    ),
}


def velocity(sample: torch.Tensor, timestep: float) -> torch.Tensor:
    return torch.tanh(1.3 * sample) * (1 + timestep / 1000) + 0.2


def run(schedule: FlowSchedule, sample: torch.Tensor) -> torch.Tensor:
    history: tuple[torch.Tensor, ...] = ()
    for sigma, timestep, weights in zip(schedule.sigmas[:-1], schedule.timesteps, schedule.weights, strict=True):
        x0 = sample - sigma * velocity(sample, timestep)
        sample, history = advance(sample, x0, weights, history)
    return sample


def diffusers_scheduler(solver: Solver, shift: float, steps: int) -> Any:
    scheduler: Any = FlowMatchEulerDiscreteScheduler(shift=shift)
    if solver == "unipc":
        scheduler = UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift, solver_order=2
        )
    scheduler.set_timesteps(steps)
    scheduler.set_begin_index(0)
    return scheduler


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


@pytest.mark.parametrize("shift", OFFICIAL)
def test_official_numbers(shift: float) -> None:
    sigmas, timesteps, end = OFFICIAL[shift]
    schedule = build_flow_schedule(4, shift=shift)
    assert torch.equal(torch.tensor(schedule.sigmas), torch.tensor(sigmas))
    assert list(schedule.timesteps) == timesteps
    assert relative(run(schedule, torch.linspace(-2, 2, 5)), torch.tensor(end)) <= 1e-6


@pytest.mark.parametrize("solver", ["unipc", "euler"])
@pytest.mark.parametrize(("steps", "shift"), [(4, 3.0), (40, 12.0), (50, 5.0), (1, 5.0)])
def test_official_grid_by_its_formula(solver: Solver, steps: int, shift: float) -> None:
    even = 0.999 * (1 - np.arange(steps + 1) / steps)
    schedule = build_flow_schedule(steps, shift=shift, solver=solver)
    np.testing.assert_allclose(schedule.sigmas, shift * even / (1 + (shift - 1) * even), rtol=0, atol=1e-7)
    timesteps = np.array(schedule.sigmas[:-1]) * 1000
    np.testing.assert_allclose(schedule.timesteps, np.floor(timesteps) if solver == "unipc" else timesteps, rtol=1e-7)


def test_equal_timesteps_skip_no_sigma() -> None:
    schedule = build_flow_schedule(100, shift=12.0, grid="diffusers")
    assert schedule.timesteps[0] == schedule.timesteps[1]
    assert len(schedule.weights) == 100
    sample, clean = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    first, _ = advance(sample, clean, schedule.weights[0])
    assert first.item() == pytest.approx(schedule.sigmas[1] / schedule.sigmas[0], abs=1e-9)


@pytest.mark.parametrize("solver", ["unipc", "euler"])
@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0, 12.0, 16.0])
def test_diffusers_grid_is_that_of_its_scheduler(solver: Solver, shift: float) -> None:
    for steps in (1, 2, 3, 40):
        scheduler = diffusers_scheduler(solver, shift, steps)
        schedule = build_flow_schedule(steps, shift=shift, solver=solver, grid="diffusers")
        assert schedule.sigmas == tuple(scheduler.sigmas.tolist())
        assert schedule.timesteps == tuple(scheduler.timesteps.tolist())


def test_the_grids_differ() -> None:
    official, other = (build_flow_schedule(40, shift=12.0, grid=grid) for grid in ("official", "diffusers"))
    assert np.abs(np.subtract(official.sigmas, other.sigmas)).max() == pytest.approx(0.0073, abs=5e-5)


@pytest.mark.parametrize("solver", ["unipc", "euler"])
@pytest.mark.parametrize("shift", [3.0, 5.0, 12.0])
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 50])
def test_steps_of_diffusers(solver: Solver, shift: float, steps: int) -> None:
    """In float32 to the rounding of that many steps; UniPC to 1e-14 in float64, its factors being float32."""
    sample = torch.randn(2, 3, 4, 5, 6, generator=torch.Generator().manual_seed(0))
    schedule = build_flow_schedule(steps, shift=shift, solver=solver, grid="diffusers")
    for dtype, tolerance in ((torch.float32, 3e-6 if steps == 50 else 1e-6), (torch.float64, 1e-14)):
        if dtype == torch.float64 and solver == "euler":
            continue  # diffusers' Euler casts to float32
        expected, scheduler = sample.to(dtype), diffusers_scheduler(solver, shift, steps)
        for timestep in scheduler.timesteps:
            v = velocity(expected, float(timestep))
            (expected,) = scheduler.step(v, timestep, expected, return_dict=False)
        assert relative(run(schedule, sample.to(dtype)), expected) <= tolerance


@pytest.mark.parametrize("grid", ["official", "diffusers"])
@pytest.mark.parametrize("solver", ["unipc", "euler"])
def test_a_constant_clean_sample_is_reached_on_a_straight_line(solver: Solver, grid: Grid) -> None:
    schedule = build_flow_schedule(7, shift=5.0, solver=solver, grid=grid)
    start, clean = torch.randn(2, 50, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    sample, history = start, ()
    for weights, following in zip(schedule.weights, schedule.sigmas[1:], strict=True):
        sample, history = advance(sample, clean, weights, history)
        torch.testing.assert_close(sample, clean + following / schedule.sigmas[0] * (start - clean), rtol=0, atol=1e-6)
    assert torch.equal(sample, clean)


@pytest.mark.parametrize("solver", ["unipc", "euler"])
def test_no_step_looks_at_the_device(solver: Solver) -> None:
    """A tensor without data would refuse."""
    schedule = build_flow_schedule(4, shift=5.0, solver=solver)
    assert run(schedule, torch.zeros(1, 2, 3, device="meta")).device.type == "meta"


def test_history_does_not_grow() -> None:
    history: tuple[torch.Tensor, ...] = ()
    for weights, length in zip(build_flow_schedule(5, shift=5.0).weights, (2, 3, 3, 3, 3), strict=True):
        _, history = advance(torch.ones(2), torch.zeros(2), weights, history)
        assert len(history) == length


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"steps": 0}, "steps=0 denoises nothing; give 1 or more"),
        ({"shift": 0.0}, r"shift=0.0 moves no schedule; give a number above 0"),
        ({"shift": float("nan")}, "shift=nan moves no schedule"),
        ({"shift": float("inf")}, "shift=inf moves no schedule"),
        ({"shift": 1e9}, "do not fall from step to step"),
        ({"solver": "heun"}, "solver='heun' is not known; use one of: unipc, euler"),
        ({"grid": "linear"}, "schedule='linear' is not known; use one of: official, diffusers"),
    ],
)
def test_refuses(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_flow_schedule(**{"steps": 4, "shift": 5.0, **changed})


def test_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "diffusers", None)
    with pytest.raises(ImportError, match=r"solver=unipc needs diffusers, which is not installed; pip install"):
        build_flow_schedule(4, shift=5.0)


# Counts that diffusers' loop has at its own grid, found by running it.
@pytest.mark.parametrize(
    ("shift", "boundary", "high_noise"), [(12.0, 0.875, 26), (5.0, 0.9, 15), (3.0, 0.875, 13), (3.0, 0.9, 11)]
)
def test_steps_of_each_expert(shift: float, boundary: float, high_noise: int) -> None:
    schedule = build_flow_schedule(40, shift=shift, grid="diffusers")
    plans = plan_steps(schedule, GuidanceScales(high_noise=4.0, low_noise=3.0), boundary)
    assert [plan.expert for plan in plans] == ["high_noise"] * high_noise + ["low_noise"] * (40 - high_noise)
    assert [plan.guidance for plan in plans] == [4.0] * high_noise + [3.0] * (40 - high_noise)
    assert switch_step(plans) == high_noise
    assert tuple(plan.sigma for plan in plans) == schedule.sigmas[:-1]
    assert tuple(plan.timestep for plan in plans) == schedule.timesteps


def test_the_boundary_itself_is_high_noise() -> None:
    schedule = FlowSchedule((0.9, 0.8999, 0.0), (900.0, 899.0), build_flow_schedule(2, shift=1.0).weights)
    plans = plan_steps(schedule, GuidanceScales(high_noise=1.0, low_noise=2.0), 0.9)
    assert [plan.expert for plan in plans] == ["high_noise", "low_noise"]


def test_one_transformer_has_one_expert() -> None:
    plans = plan_steps(build_flow_schedule(4, shift=5.0), 6.0)
    assert {(plan.expert, plan.guidance) for plan in plans} == {("high_noise", 6.0)}
    assert switch_step(plans) is None


def test_scales_have_names_only() -> None:
    with pytest.raises(TypeError):
        GuidanceScales(3.0, 4.0)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("guidance", "boundary", "message"),
    [
        (GuidanceScales(high_noise=4.0, low_noise=3.0), None, "does not fit one transformer; give one number"),
        (4.0, 0.9, "guidance=4.0 does not fit two experts; give high_noise and low_noise"),
        (GuidanceScales(high_noise=4.0, low_noise=3.0), 1.0, "boundary=1.0 leaves one expert unused"),
        (GuidanceScales(high_noise=4.0, low_noise=3.0), 0.0, "boundary=0.0 leaves one expert unused"),
        (GuidanceScales(high_noise=4.0, low_noise=3.0), 900, "boundary=900 leaves one expert unused"),
    ],
)
def test_refuses_plans(guidance: float | GuidanceScales, boundary: float | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_steps(build_flow_schedule(2, shift=5.0), guidance, boundary)


@pytest.mark.parametrize("name", OFFICIAL_SAMPLING)
def test_official_sampling_makes_a_plan(name: str) -> None:
    """Both experts take part where there are two; the pairs are written (low, high) noise in the official files."""
    official = OFFICIAL_SAMPLING[name]
    plans = plan_steps(build_flow_schedule(official.steps, shift=official.shift), official.guidance, official.boundary)
    experts = {plan.expert for plan in plans}
    assert len(experts) == (2 if "a14b" in name else 1)


def test_official_pair_of_a14b_is_not_reversed() -> None:
    assert OFFICIAL_SAMPLING["wan22_a14b_t2v"].guidance == GuidanceScales(high_noise=4.0, low_noise=3.0)


class FakeTransformer(torch.nn.Module):
    """A velocity that depends on all that it is given; remembers the timesteps."""

    def __init__(self, gain: float, channels: int = 16) -> None:
        super().__init__()
        self.gain, self.calls = gain, 0
        self.config = SimpleNamespace(patch_size=(1, 2, 2), in_channels=channels, image_dim=None)
        self.dtype, self.device = torch.float32, torch.device("cpu")

    @contextlib.contextmanager
    def cache_context(self, *_: Any, **__: Any) -> Iterator[None]:
        yield

    def forward(
        self, hidden_states: torch.Tensor, timestep: torch.Tensor, encoder_hidden_states: torch.Tensor, **_: Any
    ) -> tuple[torch.Tensor]:
        self.calls += 1
        assert bool((timestep == timestep.flatten()[0]).all())
        wave = torch.tanh(self.gain * hidden_states) * (1 + timestep.flatten()[0] / 1000)
        return (wave + encoder_hidden_states.mean() + 0.1 * hidden_states.roll(1, -1),)


def ours(plans: tuple[StepPlan, ...], models: dict[str, FakeTransformer], latents: torch.Tensor, texts: Any) -> Any:
    history: tuple[torch.Tensor, ...] = ()
    for plan in plans:
        model, timestep = models[plan.expert], torch.tensor([plan.timestep])
        cond, uncond = (model(latents, timestep, text)[0] for text in texts)
        v = apply_guidance(cond, {UNCOND: uncond}, Guidance(cfg_scale=plan.guidance))
        latents, history = advance(latents, to_x0(latents, plan.sigma, v), plan.weights, history)
    return latents


@pytest.mark.parametrize("steps", [3, 20])
@pytest.mark.parametrize(
    ("boundary", "shift", "expand"),
    [(None, 3.0, False), (None, 5.0, True), (0.875, 12.0, False)],
    ids=["2.1", "TI2V-5B", "A14B"],
)
def test_the_loop_of_diffusers(steps: int, boundary: float | None, shift: float, expand: bool) -> None:
    """Two texts, two experts, two scales; the same noise."""
    generator = torch.Generator().manual_seed(2)
    latents = torch.randn(1, 16, 3, 4, 6, generator=generator)
    texts = torch.randn(2, 1, 7, 8, generator=generator)
    models = {"high_noise": FakeTransformer(1.3), "low_noise": FakeTransformer(0.7)}
    pipeline = WanPipeline(
        tokenizer=None, text_encoder=None, vae=None, scheduler=diffusers_scheduler("unipc", shift, steps),
        transformer=models["high_noise"], transformer_2=models["low_noise"], boundary_ratio=boundary,
        expand_timesteps=expand,
    )  # fmt: skip
    pipeline.set_progress_bar_config(disable=True)
    expected = pipeline(
        prompt_embeds=texts[0], negative_prompt_embeds=texts[1], height=32, width=48, num_frames=9,
        num_inference_steps=steps, latents=latents.clone(), output_type="latent",
        guidance_scale=4.0, guidance_scale_2=None if boundary is None else 3.0,
    ).frames  # fmt: skip
    theirs = [model.calls for model in models.values()]
    scales = 4.0 if boundary is None else GuidanceScales(high_noise=4.0, low_noise=3.0)
    plans = plan_steps(build_flow_schedule(steps, shift=shift, grid="diffusers"), scales, boundary)
    result = ours(plans, models, latents, texts)
    assert [model.calls for model in models.values()] == [2 * calls for calls in theirs]
    assert (theirs[1] > 0) == (boundary is not None)
    assert relative(result, expected) <= 1e-6


def test_weights_on_a_device_give_the_bits_of_numbers() -> None:
    """As many terms as a full history has; a captured step reads its weights from memory."""
    draw = torch.Generator().manual_seed(0)
    sample, x0, *history = (torch.randn(1000, generator=draw) for _ in range(5))
    for weights in build_flow_schedule(6, shift=5.0).weights[2:]:
        read = StepWeights(*(torch.tensor(row, dtype=torch.float32) for row in (weights.corrected, weights.next)))
        expected, (corrected, *_) = advance(sample, x0, weights, tuple(history))
        actual, (read_corrected, *_) = advance(sample, x0, read, tuple(history))
        assert torch.equal(actual, expected) and torch.equal(read_corrected, corrected)
