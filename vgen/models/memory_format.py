"""Tensors of the VAEs in the memory format of their weights.

Shapes: B batch, C channels, F frames, H, W height and width.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def memory_format_of(weight: Tensor) -> torch.memory_format:
    channels_last = weight.is_contiguous(memory_format=torch.channels_last_3d)
    return torch.channels_last_3d if channels_last else torch.contiguous_format


def write_into(out: Tensor, op: Callable[..., Tensor], *operands: Any) -> None:
    """``out`` = op(*operands) in one pass, where ``out`` may be a strided view."""
    if torch.compiler.is_compiling():
        out.copy_(op(*operands))  # Dynamo refuses out= on a strided view; the compiler fuses the two itself
    else:
        op(*operands, out=out)


def space_cells(x: Tensor, size: int, repeats: int) -> Tensor:
    """View [B, (repeats C'), F, (H size), (W size)] as [B, repeats, C', F, H, size, W, size]."""
    return x.unflatten(4, (-1, size)).unflatten(3, (-1, size)).unflatten(1, (repeats, -1))
