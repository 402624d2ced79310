"""Sigma schedules of LTX-2, made and checked on the host.

Source: Lightricks/LTX-2 at 400fd31 (``components/schedulers.py``), whose pipelines call the schedule without a latent
and so always shift as for 4096 tokens, and its distilled lists (``utils/constants.py``); huggingface/diffusers 0.42.1
(``FlowMatchEulerDiscreteScheduler`` as set up by ``LTX2Pipeline``) shifts by the real number of video tokens.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

DISTILLED_SIGMAS = (1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875, 0.0)
"""The noise levels that distilled checkpoints were trained on."""

DISTILLED_STAGE_2_SIGMAS = (0.909375, 0.725, 0.421875, 0.0)
"""The second, enlarged stage: it starts from the first stage's latents with noise added."""

_BASE_TOKENS, _BASE_SHIFT = 1024, 0.95
_MAX_TOKENS, _MAX_SHIFT = 4096, 2.05
_TERMINAL_SIGMA = 0.1


def build_sigmas(steps: int, *, schedule: str, video_tokens: int) -> Tensor:
    """``steps + 1`` sigmas from 1 to 0, float32 on the host, bit for bit those of the codes they are named after.

    One step is from 1 to 0 also with ``official``, whose own formula divides a rounding error by itself there.

    Args:
        schedule: ``official`` (shift as for 4096 tokens), ``diffusers`` (shift by ``video_tokens``) or ``distilled``
            (:data:`DISTILLED_SIGMAS`).

    Raises:
        ValueError: ``steps`` below 1 or, with ``distilled``, not 8; another ``schedule``.
    """
    if schedule not in ("official", "diffusers", "distilled"):
        raise ValueError(f"schedule={schedule!r} is not known; use official, diffusers or distilled")
    if steps < 1:
        raise ValueError(f"steps={steps} denoises nothing; give 1 or more")
    if schedule == "distilled":
        return _distilled(steps)
    tokens = _MAX_TOKENS if schedule == "official" else video_tokens
    shift = _BASE_SHIFT + (_MAX_SHIFT - _BASE_SHIFT) * (tokens - _BASE_TOKENS) / (_MAX_TOKENS - _BASE_TOKENS)
    # float32 step by step, as both codes do it; a sigma that is off by one unit in the last place moves the timestep
    # embedding by 1e-5. They part twice: the official grid is made in float32, and its quotient is torch's of a number
    # and a tensor, the reciprocal times the number, so its first sigma is 0.9999999; diffusers' NumPy divides.
    ratio = math.exp(shift)
    if schedule == "official":
        linear = torch.linspace(1.0, 0.0, steps + 1, dtype=torch.float32)[:-1]
        shifted = ratio / (ratio + (1 / linear - 1))
    else:
        linear = torch.linspace(1.0, 1 / steps, steps, dtype=torch.float64).float()
        shifted = torch.tensor(ratio, dtype=torch.float32) / (ratio + (1 / linear - 1))
    sigmas = torch.cat([_stretch(shifted), torch.zeros(1)])
    validate_sigmas(sigmas)
    return sigmas


def _distilled(steps: int) -> Tensor:
    num_steps = len(DISTILLED_SIGMAS) - 1
    if steps != num_steps:
        raise ValueError(
            f"steps={steps} does not fit the distilled schedule, whose {num_steps} steps are fixed; "
            f"use steps={num_steps}, or give a list of sigmas"
        )
    return sigmas_from_list(DISTILLED_SIGMAS)


def _stretch(sigmas: Tensor) -> Tensor:
    """Scale ``1 - sigma`` so that the last nonzero sigma is 0.1; a single step has nothing to stretch."""
    if len(sigmas) == 1:
        return torch.ones(1)
    scale = (1 - sigmas[-1]) / (1 - _TERMINAL_SIGMA)
    return 1 - (1 - sigmas) / scale


def sigmas_from_list(values: Sequence[float]) -> Tensor:
    """A schedule given in numbers, rounded to float32, on the host.

    Raises:
        ValueError: see :func:`validate_sigmas`; values that float32 cannot tell apart do not fall either.
    """
    sigmas = torch.tensor(values, dtype=torch.float32, device="cpu")
    validate_sigmas(sigmas)
    return sigmas


def start_at(sigmas: Tensor, noise_level: float) -> Tensor:
    """The part of a schedule for a clip with noise of ``noise_level``: that level, then all ``sigmas`` below it.

    The level 1 is the schedule itself, bit for bit, wherever that starts.

    Raises:
        ValueError: ``noise_level`` is not above 0, or is above the schedule's first sigma.
    """
    # Compared in float32, so that a level that the schedule holds is not a step of its own.
    level = torch.tensor([noise_level], dtype=torch.float32)
    if not level > 0:
        raise ValueError(f"noise_level={noise_level} leaves nothing to denoise; use a level above 0, up to 1")
    if level == 1:
        return sigmas
    if level > sigmas[0]:
        first = f"{sigmas[0].item():.7g}"
        raise ValueError(
            f"noise_level={noise_level} is above the schedule's first sigma {first}, so its noise would not be "
            f"removed; use {first} or less"
        )
    return torch.cat([level, sigmas[sigmas < level]])


def validate_sigmas(sigmas: Tensor) -> None:
    """Check a host schedule once, so that no step has to look at a sigma on the device.

    Raises:
        ValueError: not on the host, not falling, a zero before the end, an end that is not zero, or a start above 1.
    """
    if sigmas.device.type != "cpu":
        raise ValueError(f"sigmas are on {sigmas.device}; check the schedule on the host, before it moves")
    values = sigmas.tolist()
    if len(values) < 2 or values[-1] != 0 or not all(high > low for high, low in pairwise(values)):
        raise ValueError(f"sigmas={values} do not fall from step to step to exactly 0; use another schedule")
    if values[0] > 1:
        raise ValueError(f"sigmas={values} start above 1, which is noise alone; start at 1 or less")
