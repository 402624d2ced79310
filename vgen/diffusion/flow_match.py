"""Steps of flow matching as numbers on the host: sigmas, timesteps and solver weights, from diffusers' schedulers.

Both solvers are linear in the tensors that they combine. What diffusers' scheduler makes of unit vectors is therefore
all that a step needs: the loop is a few scaled sums, with no look at the device, no solve and no order to branch on.

Source: huggingface/diffusers 0.42.1 (``UniPCMultistepScheduler`` as set up by the Wan folders,
``FlowMatchEulerDiscreteScheduler``), whose UniPC on the grid of Wan-Video/Wan2.2 at 42bf4cf
(``utils/fm_solvers_unipc.py``) equals the official one bit for bit. UniPC: Zhao et al., arXiv 2302.04867.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from vgen.diffusion.schedule import validate_sigmas

Solver = Literal["unipc", "euler"]
Grid = Literal["official", "diffusers"]

TRAIN_TIMESTEPS = 1000
"""The transformer is told 1000 times the sigma."""

_OFFICIAL_FIRST = float(np.float32(0.999))
"""Where the official grid starts before its shift: the training grid's last level, which it keeps in float32."""


@dataclass(frozen=True)
class StepWeights:
    """What one step weighs the sample, x0 and the tensors of its :data:`History` with, in this order.

    ``corrected``: the sample as UniPC's corrector leaves it, which the next step reads. ``next``: the next sample.
    Numbers, or fp32 tensors ``[terms]`` on the samples' device, with the same result.
    """

    corrected: tuple[float, ...] | Tensor
    next: tuple[float, ...] | Tensor


History = tuple[Tensor, ...]
"""The last step's corrected sample and x0, then the x0 before; empty at the first step, two tensors at the second."""


@dataclass(frozen=True)
class FlowSchedule:
    """``sigmas``: steps + 1, to 0. ``timesteps``: what the transformer is told, whole numbers with UniPC."""

    sigmas: tuple[float, ...]
    timesteps: tuple[float, ...]
    weights: tuple[StepWeights, ...]


def build_flow_schedule(steps: int, *, shift: float, solver: Solver = "unipc", grid: Grid = "official") -> FlowSchedule:
    """The schedule of a run, bit for bit the scheduler's sigmas and timesteps.

    Args:
        shift: moves the grid's sigmas s to ``shift * s / (1 + (shift - 1) * s)``; 1 leaves them.
        grid: ``official`` falls evenly from 0.999 to 0 before the shift, ``diffusers`` is what the scheduler does by
            itself: from 1 to 0.001, and Euler shifts the lower end twice.

    Raises:
        ValueError: another ``solver`` or ``grid``, ``steps`` below 1, a shift that is not above 0, or one that leaves
            sigmas that float32 cannot tell apart.
        ImportError: diffusers is not installed.
    """
    if solver not in get_args(Solver):
        raise ValueError(f"solver={solver!r} is not known; use one of: {', '.join(get_args(Solver))}")
    if grid not in get_args(Grid):
        raise ValueError(f"schedule={grid!r} is not known; use one of: {', '.join(get_args(Grid))}")
    if steps < 1:
        raise ValueError(f"steps={steps} denoises nothing; give 1 or more")
    if not 0 < shift < math.inf:
        raise ValueError(f"shift={shift} moves no schedule; give a number above 0, 1 for none")
    scheduler = _build_scheduler(solver, shift)
    if grid == "official":
        scheduler.set_timesteps(sigmas=np.linspace(_OFFICIAL_FIRST, 0.0, steps + 1)[:-1])
    else:
        scheduler.set_timesteps(steps)
    # By timestep diffusers takes the second of two equal ones, and so may skip a sigma: count instead.
    scheduler.set_begin_index(0)
    validate_sigmas(scheduler.sigmas)
    weights = _read_unipc(scheduler) if solver == "unipc" else _euler_weights(scheduler.sigmas)
    return FlowSchedule(tuple(scheduler.sigmas.tolist()), tuple(map(float, scheduler.timesteps)), weights)


def _build_scheduler(solver: Solver, shift: float) -> Any:
    try:
        from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
    except ImportError:
        raise ImportError(
            f"solver={solver} needs diffusers, which is not installed; pip install 'diffusers>=0.42'"
        ) from None
    if solver == "euler":
        return FlowMatchEulerDiscreteScheduler(num_train_timesteps=TRAIN_TIMESTEPS, shift=shift)
    # It is handed x0 instead of the velocity: the conversion is float32 and the caller's.
    return UniPCMultistepScheduler(
        num_train_timesteps=TRAIN_TIMESTEPS,
        prediction_type="sample",
        use_flow_sigmas=True,
        flow_shift=shift,
        solver_order=2,
        solver_type="bh2",
        final_sigmas_type="zero",
    )


def _read_unipc(scheduler: Any) -> tuple[StepWeights, ...]:
    """Each step done to unit vectors in float64: the scheduler's own float32 factors, their products unrounded."""
    # diffusers wants [B, C]: one row for the sample, for x0, and for each tensor of a full history.
    sample, x0, last_corrected, last_x0, older_x0 = torch.eye(5, dtype=torch.float64).unsqueeze(1)
    weights = []
    for step, timestep in enumerate(scheduler.timesteps):
        if step:
            scheduler.last_sample, scheduler.model_outputs = last_corrected, [older_x0, last_x0]
        (following,) = scheduler.step(x0, timestep, sample, return_dict=False)
        known = (2, 4, 5)[min(step, 2)]
        weights.append(StepWeights(*(tuple(row[0, :known].tolist()) for row in (scheduler.last_sample, following))))
    return tuple(weights)


def _euler_weights(sigmas: Tensor) -> tuple[StepWeights, ...]:
    """``sample + (next sigma - sigma) * velocity`` with the velocity as ``(sample - x0) / sigma``."""
    ratios = [following / sigma for sigma, following in zip(sigmas.tolist()[:-1], sigmas.tolist()[1:], strict=True)]
    return tuple(StepWeights((1.0, 0.0), (ratio, 1.0 - ratio)) for ratio in ratios)


def advance(sample: Tensor, x0: Tensor, weights: StepWeights, history: History = ()) -> tuple[Tensor, History]:
    """One step: the next sample and what the step after it needs.

    Args:
        sample, x0: of one shape, float32; a lower dtype would round the history anew in every step.
    """
    terms = (sample, x0, *history)
    return _combine(weights.next, terms), (_combine(weights.corrected, terms), x0, *history[1:2])


def _combine(weights: tuple[float, ...] | Tensor, terms: tuple[Tensor, ...]) -> Tensor:
    """The weighted sum, each product added unrounded where the device can."""
    # Euler weighs two terms and has no use for a history.
    (first, total), *rest = zip(weights, terms, strict=False)
    total = total * first
    for weight, term in rest:
        if isinstance(weight, Tensor):
            total = torch.addcmul(total, term, weight)
        else:
            total = torch.add(total, term, alpha=weight)
    return total
