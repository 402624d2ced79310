"""Adaptive norms of LTX-2: timesteps become rows of shift, scale and gate, which modulate normalised tokens.

Shapes: B batch, T tokens, R timesteps (T of them, or 1 for all tokens of a sample, or the distinct ones, which a lookup
gives to the tokens), n modulation rows per timestep, K sinusoid channels, D width.
Source: Lightricks/LTX-2 at 400fd31, ``model/transformer/{adaln,timestep_embedding}.py``.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vgen.models.projection import Projection

SINUSOID_CHANNELS = 256
SINUSOID_PERIOD = 10000.0

ROWS_MULTIPLE = 64
"""Linears run on a multiple of this many timesteps, the rest zero, so that a row does not depend on how many there are.

BLAS takes another kernel, with another order of summation, for fewer than four rows per thread. Filling up costs next
to nothing: the time goes into reading the weights.
"""


def sinusoid(timestep_BR: Tensor, dtype: torch.dtype) -> Tensor:
    """Embed scaled timesteps (0 to 1000) as cosines followed by sines, computed in fp32. Returns [B, R, K]."""
    half = SINUSOID_CHANNELS // 2
    exponents = -math.log(SINUSOID_PERIOD) * torch.arange(half, dtype=torch.float32, device=timestep_BR.device) / half
    angles = timestep_BR.float().unsqueeze(-1) * exponents.exp()
    return torch.cat([angles.cos(), angles.sin()], dim=-1).to(dtype)


def rms_norm(x_BTD: Tensor, eps: float) -> Tensor:
    """Root mean square norm over D without a weight, as every block norm of LTX-2."""
    return F.rms_norm(x_BTD, (x_BTD.shape[-1],), eps=eps)


class AdaLayerNorm(nn.Module):
    """Maps sinusoids to ``num_rows`` modulation rows."""

    def __init__(self, width: int, num_rows: int) -> None:
        super().__init__()
        self.num_rows = num_rows
        self.emb = nn.ModuleDict({"timestep_embedder": Projection(SINUSOID_CHANNELS, width, F.silu)})
        self.linear = nn.Linear(width, num_rows * width)

    def forward(self, sinusoid_BRK: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows [B, R, n, D] and the embedded timestep [B, R, D], which the output head uses."""
        batch, timesteps = sinusoid_BRK.shape[:2]
        filled = F.pad(sinusoid_BRK.flatten(0, 1), (0, 0, 0, -batch * timesteps % ROWS_MULTIPLE))
        embedded = self.emb["timestep_embedder"](filled)
        rows = self.linear(F.silu(embedded)).unflatten(-1, (self.num_rows, -1))

        def unfilled(x: Tensor) -> Tensor:
            return x[: batch * timesteps].unflatten(0, (batch, timesteps))

        return unfilled(rows), unfilled(embedded)
