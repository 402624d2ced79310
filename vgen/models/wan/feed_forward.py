"""The two-layer perceptron of Wan, with the parameter names of the diffusers checkpoints."""

from collections.abc import Callable

from torch import Tensor, nn

Activation = Callable[[Tensor], Tensor]


class _Expand(nn.Module):
    def __init__(self, width: int, inner: int, activation: Activation) -> None:
        super().__init__()
        self.proj = nn.Linear(width, inner)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.proj(x))


class FeedForward(nn.Module):
    """[..., ``width``] to [..., ``out_width``] through ``inner`` values."""

    def __init__(self, width: int, inner: int, out_width: int, activation: Activation) -> None:
        super().__init__()
        # The Identity keeps the place of a dropout, so that the second layer is called net.2 as in the checkpoints.
        self.net = nn.Sequential(_Expand(width, inner, activation), nn.Identity(), nn.Linear(inner, out_width))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out
