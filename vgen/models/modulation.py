"""Rows of shift, scale and gate that timesteps become, and how they modulate normalised tokens.

Shapes: B batch, T tokens, R timesteps (T of them, or 1 for all tokens of a sample, or the distinct ones, which a lookup
gives to the tokens), n modulation rows per timestep, m rows of a table, D width.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


def modulated(normed_BTD: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """``normed * (1 + scale) + shift`` in one pass over the tokens; scale and shift are [B, T or 1, D]."""
    return torch.addcmul(shift, normed_BTD, 1 + scale)


@dataclass(frozen=True, eq=False)
class Modulation:
    """The rows of a stream's timesteps, [B, R, n, D], which all blocks share; each block adds its own table.

    ``lookup``: int64 [B, T], which of the B * R timesteps of all samples each token has; None where R is T or 1.
    """

    rows: Tensor
    lookup: Tensor | None = None

    def of(self, table: Tensor, first: int = 0) -> tuple[Tensor, ...]:
        """``table`` [m, D] plus the rows from number ``first`` on: m tensors [B, T or 1, D].

        Tokens are looked up after the sum, so m * D values are computed per timestep instead of per token.
        """
        summed = (table + self.rows[:, :, first : first + len(table)]).unbind(2)
        if self.lookup is None:
            return summed
        return tuple(F.embedding(self.lookup, row.flatten(0, 1)) for row in summed)
