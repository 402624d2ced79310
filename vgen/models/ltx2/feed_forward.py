"""The two-layer perceptrons of LTX-2, with the parameter names of its checkpoints.

Shapes: ``...`` any leading dims, D width.
"""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn


def gelu(x: Tensor) -> Tensor:
    """The tanh form of GELU, the only one LTX-2 uses."""
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


class _Expand(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, inner)

    def forward(self, x: Tensor) -> Tensor:
        return gelu(self.proj(x))


class FeedForward(nn.Module):
    """GELU perceptron of four times the width, [..., D] to [..., D]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        # The Identity keeps the place of a dropout, so that the second layer is called net.2 as in the checkpoints.
        self.net = nn.Sequential(_Expand(width, 4 * width), nn.Identity(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out
