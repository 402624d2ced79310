"""Multi-head attention whose kernel is one replaceable attribute, ``attend``.

Shapes: B batch, S query tokens, L key tokens, N heads, H head dim, D width of the tokens coming in.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""``attend(q_BNSH, k_BNLH, v_BNLH, mask) -> out_BNSH``."""

Rope: TypeAlias = tuple[Tensor, Tensor]
"""Cosines and sines, each [1, N, S, H/2]."""

Keep: TypeAlias = bool | Tensor
"""Whether attention is kept: by all samples, by none, or where the bool tensor [B, 1, 1] is True."""


class KeysValues(NamedTuple):
    """Normalised keys and the values of one context, each [B, N, L, H]."""

    keys: Tensor
    values: Tensor


def sdpa(q_BNSH: Tensor, k_BNLH: Tensor, v_BNLH: Tensor, mask: Tensor | None = None) -> Tensor:
    """Softmax attention with scale 1/sqrt(H), by torch's own choice of kernel.

    ``mask``: as ``attn_mask`` of torch (bool, True = attend, or added to the scores); None keeps the unmasked kernels,
    which are about twice as fast. Returns [B, N, S, H].
    """
    return F.scaled_dot_product_attention(q_BNSH, k_BNLH, v_BNLH, attn_mask=mask)


def rotate(x_BNSH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + H/2) of every head by the angles behind ``cos`` and ``sin`` ([1, N, S, H/2]).

    Runs in the dtype of ``x_BNSH`` and keeps its memory order, so a [B, S, N, H] buffer seen as [B, N, S, H] stays one.
    """
    halves = x_BNSH.unflatten(-1, (2, -1))
    rotated = halves * cos.unsqueeze(-2)
    rotated[..., 0, :].addcmul_(halves[..., 1, :], sin, value=-1)
    rotated[..., 1, :].addcmul_(halves[..., 0, :], sin)
    return rotated.flatten(-2)


class Attention(nn.Module):
    """Attention with biased projections and a weighted RMS norm of queries and keys over all heads together.

    ``gated``: each head's output is multiplied by 0 to 2, as the token that asks decides. ``attend`` is the one seam:
    sequence parallelism and other kernels replace this attribute and nothing else.
    """

    def __init__(
        self, width: int, context_width: int, num_heads: int, head_dim: int, norm_eps: float, gated: bool = False
    ) -> None:
        super().__init__()
        inner = num_heads * head_dim
        self.num_heads = num_heads
        self.to_q = nn.Linear(width, inner)
        self.to_k = nn.Linear(context_width, inner)
        self.to_v = nn.Linear(context_width, inner)
        self.to_out = nn.ModuleList([nn.Linear(inner, width)])
        self.q_norm = nn.RMSNorm(inner, eps=norm_eps)
        self.k_norm = nn.RMSNorm(inner, eps=norm_eps)
        self.to_gate_logits = nn.Linear(width, num_heads) if gated else None
        self.attend: Attend = sdpa

    def forward(
        self,
        x: Tensor,
        context: Tensor | KeysValues | None = None,
        rope: Rope | None = None,
        context_rope: Rope | None = None,
        mask: Tensor | None = None,
        keep: Keep = True,
    ) -> Tensor:
        """Attend from ``x`` [B, S, D] to ``context`` [B, L, context width], or to ``x`` itself where it is None.

        ``rope`` turns the queries, ``context_rope`` the keys (``rope`` again where it is None). A sample that ``keep``
        excludes, which only self-attention allows, has the values of its own tokens in place of the attended ones; if
        it excludes all, queries and keys are not computed and ``attend`` is not called. Returns [B, S, D].
        """
        if keep is False:
            heads_BSNH = self._heads(self.to_v(x)).transpose(1, 2)
        else:
            k, v = context if isinstance(context, KeysValues) else self.keys_values(x if context is None else context)
            q = self._heads(self.q_norm(self.to_q(x)))
            if rope is not None:
                q = rotate(q, *rope)
                k = rotate(k, *(rope if context_rope is None else context_rope))
            heads_BSNH = self.attend(q, k, v, mask).transpose(1, 2)
            if isinstance(keep, Tensor):
                heads_BSNH = torch.where(keep.unsqueeze(-1), heads_BSNH, v.transpose(1, 2))
        if self.to_gate_logits is not None:
            heads_BSNH = heads_BSNH * (2 * torch.sigmoid(self.to_gate_logits(x))).unsqueeze(-1)
        out: Tensor = self.to_out[0](heads_BSNH.flatten(2))
        return out

    def keys_values(self, context: Tensor) -> KeysValues:
        """Keys and values of ``context`` [B, L, context width], not turned by any position."""
        return KeysValues(self._heads(self.k_norm(self.to_k(context))), self._heads(self.to_v(context)))

    def _heads(self, x_BSD: Tensor) -> Tensor:
        return x_BSD.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
