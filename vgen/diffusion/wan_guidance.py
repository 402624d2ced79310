"""Which expert and which guidance scale each step of Wan has, decided before the loop.

Source: Wan-Video/Wan2.2 at 42bf4cf (``configs/``, ``text2video.py``), Wan-Video/Wan2.1 at 9737cba (``generate.py``).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from vgen.diffusion.flow_match import TRAIN_TIMESTEPS, FlowSchedule, StepWeights

Expert = Literal["high_noise", "low_noise"]


@dataclass(frozen=True, kw_only=True)
class GuidanceScales:
    """Scales of the two experts, by name since the order differs: the official pairs are (low, high) noise.

    Wherever they are a list here, high noise comes first, as in the run; so it is diffusers' ``guidance_scale``, and
    ``low_noise`` its ``guidance_scale_2``. 1 is no guidance.
    """

    high_noise: float
    low_noise: float


@dataclass(frozen=True)
class StepPlan:
    """One step, in numbers: the loop asks the device for nothing.

    ``guidance`` 1 needs no pass over the negative prompt. With one transformer every step is ``high_noise``.
    """

    sigma: float
    timestep: float
    expert: Expert
    guidance: float
    weights: StepWeights


def plan_steps(
    schedule: FlowSchedule, guidance: float | GuidanceScales, boundary: float | None = None
) -> tuple[StepPlan, ...]:
    """The steps of a run; the solver's history goes on over the change of expert.

    Args:
        guidance: one scale for one transformer, two for two.
        boundary: part of 1000 that the timestep has to reach for high noise; None where there is one transformer.

    Raises:
        ValueError: a ``boundary`` outside 0 to 1, or scales that do not fit it.
    """
    if boundary is not None and not 0 < boundary < 1:
        raise ValueError(f"boundary={boundary} leaves one expert unused; give a number between 0 and 1")
    if isinstance(guidance, GuidanceScales) != (boundary is not None):
        experts = "one transformer" if boundary is None else "two experts"
        wanted = "one number" if boundary is None else "high_noise and low_noise"
        raise ValueError(f"guidance={guidance} does not fit {experts}; give {wanted}")
    plans = []
    for sigma, timestep, weights in zip(schedule.sigmas[:-1], schedule.timesteps, schedule.weights, strict=True):
        expert: Expert = "high_noise"
        if boundary is not None and timestep < boundary * TRAIN_TIMESTEPS:
            expert = "low_noise"
        scale = getattr(guidance, expert) if isinstance(guidance, GuidanceScales) else guidance
        plans.append(StepPlan(sigma, timestep, expert, scale, weights))
    return tuple(plans)


def switch_step(plans: tuple[StepPlan, ...]) -> int | None:
    """Index of the first step of the second expert, by when its weights are needed; None without a change."""
    return next((i for i, (one, two) in enumerate(pairwise(plans), start=1) if one.expert != two.expert), None)


@dataclass(frozen=True)
class OfficialSampling:
    """What the official code samples a variant with at its own size."""

    steps: int
    shift: float
    guidance: float | GuidanceScales
    boundary: float | None = None


OFFICIAL_SAMPLING: Mapping[str, OfficialSampling] = {
    "wan": OfficialSampling(50, 5.0, 5.0),
    "wan22_a14b_t2v": OfficialSampling(40, 12.0, GuidanceScales(high_noise=4.0, low_noise=3.0), 0.875),
    "wan22_a14b_i2v": OfficialSampling(40, 5.0, GuidanceScales(high_noise=3.5, low_noise=3.5), 0.9),
    "wan21_t2v_1_3b": OfficialSampling(50, 5.0, 5.0),
    "wan21_t2v_14b": OfficialSampling(50, 5.0, 5.0),
    "wan21_i2v_14b_480p": OfficialSampling(40, 3.0, 5.0),
    "wan21_i2v_14b_720p": OfficialSampling(40, 5.0, 5.0),
}
"""By the name of the configuration. The official notes advise shift 8 to 12 and guidance 6 for 2.1 1.3B, and shift 3
for image-to-video at 480p. The scheduler files that diffusers converts A14B to say shift 3, not the official one.
"""
