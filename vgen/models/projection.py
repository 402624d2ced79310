"""The perceptron that both families make of timesteps and texts, and their activation.

Shapes: ``...`` any leading dims, D width.
"""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn


def gelu(x: Tensor) -> Tensor:
    """The tanh form of GELU, the only one of the transformers."""
    return F.gelu(x, approximate="tanh")


class Projection(nn.Module):
    """``linear_2(activation(linear_1(x)))``, [..., in] to [..., D]."""

    def __init__(self, in_width: int, width: int, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(in_width, width)
        self.linear_2 = nn.Linear(width, width)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear_2(self.activation(self.linear_1(x)))
        return out
