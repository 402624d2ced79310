"""Velocity, clean sample and Euler steps of flow matching: ``x = (1 - sigma) * x0 + sigma * noise``.

All arithmetic is float32 and rounded once to the sample's dtype, as in Lightricks/LTX-2 at 400fd31
(``utils.py``, ``components/diffusion_steps.py``). A tensor sigma stays on its device and is never looked at: the
schedule was checked on the host (:func:`vgen.diffusion.schedule.validate_sigmas`), and a test for zero here would
stop the device once a step and forbid capture in a graph.
"""

import torch
from torch import Tensor

Sigma = Tensor | float


def to_velocity(sample: Tensor, sigma: Sigma, x0: Tensor) -> Tensor:
    """``(sample - x0) / sigma`` in the sample's dtype.

    Args:
        sample, x0: ``[B, T, C]``.
        sigma: a number, or ``[]``, ``[B]`` or ``[B, T]``.

    Raises:
        ValueError: a host number that is zero, or a sigma whose shape does not fit.
    """
    if not isinstance(sigma, Tensor) and sigma == 0:
        raise ValueError("sigma=0 has no velocity; stop the schedule's steps before its last sigma")
    velocity = (sample.float() - x0.float()) / _broadcast(sigma, sample)
    return velocity.to(sample.dtype)


def to_x0(sample: Tensor, sigma: Sigma, velocity: Tensor) -> Tensor:
    """``sample - sigma * velocity`` in the sample's dtype; shapes as :func:`to_velocity`."""
    return (sample.float() - velocity.float() * _broadcast(sigma, sample)).to(sample.dtype)


def step_euler(sample: Tensor, x0: Tensor, sigma: Tensor, sigma_next: Tensor) -> Tensor:
    """One Euler step from ``sigma`` to ``sigma_next`` (each ``[]``), velocity rounded to the sample's dtype."""
    velocity = to_velocity(sample, sigma, x0)
    return (sample.float() + velocity.float() * (sigma_next - sigma).float()).to(sample.dtype)


def _broadcast(sigma: Sigma, sample: Tensor) -> Tensor | float:
    """Sigma aligned with the leading axes of ``sample``, so that ``[B, T]`` never meets the channel axis."""
    if not isinstance(sigma, Tensor) or sigma.ndim == 0:
        return sigma
    if sigma.shape != sample.shape[: sigma.ndim] and sigma.shape != (1,):
        raise ValueError(f"sigma of shape {tuple(sigma.shape)} does not lead a sample of shape {tuple(sample.shape)}")
    return sigma.to(torch.float32).reshape(*sigma.shape, *(1,) * (sample.ndim - sigma.ndim))
