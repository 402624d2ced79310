import numpy as np
import torch

from vgen.models.ltx2.snake import AntiAliasedSnake, kaiser_filter


@torch.no_grad()
def test_snake_is_its_formula_where_nothing_aliases() -> None:
    """A slow wave passes both filters, so the activation at twice the rate is the activation."""
    snake = AntiAliasedSnake(2).double()
    snake.act.alpha.copy_(torch.tensor([0.3, -0.2]))
    snake.act.beta.copy_(torch.tensor([-0.4, 0.1]))
    x = torch.sin(torch.arange(400, dtype=torch.float64) / 40).expand(1, 2, -1)
    alpha, beta = snake.act.alpha.exp()[:, None], snake.act.beta.exp()[:, None]
    expected = x + torch.sin(alpha * x) ** 2 / beta
    inner = slice(10, -10)
    torch.testing.assert_close(snake(x)[..., inner], expected[..., inner], rtol=0, atol=2e-3)


def test_filter_is_the_kaiser_windowed_sinc() -> None:
    """51 dB at twelve taps: a beta of 4.66."""
    n = np.arange(12) - 5.5
    beta = 0.1102 * (2.285 * 5 * np.pi * 1.2 + 7.95 - 8.7)
    taps = np.sinc(n / 2) * np.i0(beta * np.sqrt(1 - (n / 5.5) ** 2))
    np.testing.assert_allclose(kaiser_filter().flatten().numpy(), taps / taps.sum(), rtol=1e-5, atol=1e-7)
