"""The two-layer perceptrons of LTX-2, with the parameter names of its checkpoints.

Shapes: ``...`` any leading dims, D width.
"""

from torch import Tensor, nn

from vgen.models.projection import gelu


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
