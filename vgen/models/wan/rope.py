"""Rotary positions of Wan: the cosines and sines of a grid of tokens, and the turn of neighbouring values.

Shapes: B batch, S tokens, N heads, H head dim.
Source: Wan-Video/Wan2.2 at 42bf4cf, ``wan/modules/model.py``.
"""

import torch
from torch import Tensor

from vgen.models.attention import Rope

THETA = 10000.0


def rope_table(grid: tuple[int, int, int], head_dim: int, device: torch.device) -> Rope:
    """Cosines and sines of a grid of (frames, height, width) tokens, each fp32 [1, 1, S, H/2], the same for all heads.

    A head's pairs belong to frames, height and width in this order; height and width have a third each, rounded down.
    Positions count from 0. Angles, cosines and sines are computed in fp64, as by the official code.
    """
    third = 2 * (head_dim // 6)
    dims = (head_dim - 2 * third, third, third)
    angles = [_angles(size, dim) for size, dim in zip(grid, dims, strict=True)]

    def over_grid(axes: list[Tensor]) -> Tensor:
        expanded = []
        for axis, table in enumerate(axes):
            shape = [1, 1, 1, -1]
            shape[axis] = grid[axis]
            expanded.append(table.float().to(device).view(shape).expand(*grid, -1))
        return torch.cat(expanded, dim=-1).flatten(0, 2)[None, None]

    return over_grid([axis.cos() for axis in angles]), over_grid([axis.sin() for axis in angles])


def _angles(size: int, dim: int) -> Tensor:
    # On the CPU, whatever the default device: the table has the same bits everywhere.
    frequencies = THETA ** -(torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / max(dim, 1))
    return torch.outer(torch.arange(size, dtype=torch.float64, device="cpu"), frequencies)


def rotate(x_BNSH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (2i, 2i + 1) of every head by the angles behind ``cos`` and ``sin`` ([1, 1, S, H/2]).

    Returns fp32 in the memory order of ``x_BNSH``, so a [B, S, N, H] buffer seen as [B, N, S, H] stays one.
    """
    pairs = x_BNSH.unflatten(-1, (-1, 2))
    rotated = pairs * cos.unsqueeze(-1)
    rotated[..., 0].addcmul_(pairs[..., 1], sin, value=-1)
    rotated[..., 1].addcmul_(pairs[..., 0], sin)
    return rotated.flatten(-2)
