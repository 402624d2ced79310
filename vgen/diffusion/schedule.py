"""Sigma schedules of LTX-2, made and checked on the host.

Source: Lightricks/LTX-2 at 400fd31 (``components/schedulers.py``), whose pipelines call the schedule without a latent
and so always shift as for 4096 tokens; huggingface/diffusers 0.42.1 (``FlowMatchEulerDiscreteScheduler`` as set up by
``LTX2Pipeline``) shifts by the real number of video tokens.
"""

import math
from itertools import pairwise

import torch
from torch import Tensor

_BASE_TOKENS, _BASE_SHIFT = 1024, 0.95
_MAX_TOKENS, _MAX_SHIFT = 4096, 2.05
_TERMINAL_SIGMA = 0.1


def build_sigmas(steps: int, *, schedule: str, video_tokens: int) -> Tensor:
    """``steps + 1`` sigmas from 1 to 0, float32 on the host.

    Args:
        schedule: ``official`` (shift as for 4096 tokens) or ``diffusers`` (shift by ``video_tokens``).

    Raises:
        ValueError: ``steps`` below 1, or another ``schedule``.
    """
    if steps < 1:
        raise ValueError(f"steps={steps} denoises nothing; give 1 or more")
    if schedule not in ("official", "diffusers"):
        raise ValueError(f"schedule={schedule!r} is not known; use official or diffusers")
    tokens = _MAX_TOKENS if schedule == "official" else video_tokens
    shift = _BASE_SHIFT + (_MAX_SHIFT - _BASE_SHIFT) * (tokens - _BASE_TOKENS) / (_MAX_TOKENS - _BASE_TOKENS)
    # float32 step by step, as both codes do it; a sigma that is off by one unit in the last place moves the timestep
    # embedding by 1e-5. They part in their first line: the official one makes its grid in float32.
    if schedule == "official":
        linear = torch.linspace(1.0, 0.0, steps + 1, dtype=torch.float32)[:-1]
    else:
        linear = torch.linspace(1.0, 1 / steps, steps, dtype=torch.float64).float()
    factor = torch.tensor(math.exp(shift), dtype=torch.float32)
    shifted = factor / (factor + (1 / linear - 1))
    sigmas = torch.cat([_stretch(shifted), torch.zeros(1)])
    validate_sigmas(sigmas)
    return sigmas


def _stretch(sigmas: Tensor) -> Tensor:
    """Scale ``1 - sigma`` so that the last nonzero sigma is 0.1; a single step has nothing to stretch."""
    if len(sigmas) == 1:
        return torch.ones(1)
    scale = (1 - sigmas[-1]) / (1 - _TERMINAL_SIGMA)
    return 1 - (1 - sigmas) / scale


def validate_sigmas(sigmas: Tensor) -> None:
    """Check a host schedule once, so that no step has to look at a sigma on the device.

    Raises:
        ValueError: not on the host, not falling, a zero before the end, or an end that is not zero.
    """
    if sigmas.device.type != "cpu":
        raise ValueError(f"sigmas are on {sigmas.device}; check the schedule on the host, before it moves")
    values = sigmas.tolist()
    if len(values) < 2 or values[-1] != 0 or not all(high > low for high, low in pairwise(values)):
        raise ValueError(f"sigmas={values} do not fall from step to step to exactly 0; use another schedule")
