"""Adaptive norms of LTX-2: timesteps become rows of shift, scale and gate, which modulate normalised tokens.

Shapes: B batch, T tokens, or 1 where one row serves all tokens of a sample, R rows, K sinusoid channels, D width.
Source: Lightricks/LTX-2 at 400fd31, ``model/transformer/{adaln,timestep_embedding}.py``.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vgen.models.ltx2.feed_forward import Projection

SINUSOID_CHANNELS = 256
SINUSOID_PERIOD = 10000.0


def sinusoid(timestep_BT: Tensor, dtype: torch.dtype) -> Tensor:
    """Embed scaled timesteps (0 to 1000) as cosines followed by sines, computed in fp32. Returns [B, T, K]."""
    half = SINUSOID_CHANNELS // 2
    exponents = -math.log(SINUSOID_PERIOD) * torch.arange(half, dtype=torch.float32, device=timestep_BT.device) / half
    angles = timestep_BT.float().unsqueeze(-1) * exponents.exp()
    return torch.cat([angles.cos(), angles.sin()], dim=-1).to(dtype)


def modulated(normed_BTD: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """``normed * (1 + scale) + shift`` in one pass over the tokens; scale and shift are [B, T or 1, D]."""
    return torch.addcmul(shift, normed_BTD, 1 + scale)


def rms_norm(x_BTD: Tensor, eps: float) -> Tensor:
    """Root mean square norm over D without a weight, as every block norm of LTX-2."""
    return F.rms_norm(x_BTD, (x_BTD.shape[-1],), eps=eps)


class AdaLayerNorm(nn.Module):
    """Maps sinusoids to ``num_rows`` modulation rows that all blocks share; each block adds its own table."""

    def __init__(self, width: int, num_rows: int) -> None:
        super().__init__()
        self.num_rows = num_rows
        self.emb = nn.ModuleDict({"timestep_embedder": Projection(SINUSOID_CHANNELS, width, F.silu)})
        self.linear = nn.Linear(width, num_rows * width)

    def forward(self, sinusoid_BTK: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows [B, T, R, D] and the embedded timestep [B, T, D], which the output head uses."""
        embedded = self.emb["timestep_embedder"](sinusoid_BTK)
        return self.linear(F.silu(embedded)).unflatten(-1, (self.num_rows, -1)), embedded
