"""One Wan transformer block.

Shapes: B batch, S tokens, D model width.
Source: Wan-Video/Wan2.2 at 42bf4cf, ``wan/modules/model.py``.
"""

import torch
from torch import Tensor, nn

from vgen.models.attention import Rope
from vgen.models.modulation import Modulation, modulated
from vgen.models.projection import gelu
from vgen.models.wan.attention import Attention, BlockContext
from vgen.models.wan.config import WanTransformerConfig
from vgen.models.wan.feed_forward import FeedForward
from vgen.models.wan.norm import Float32LayerNorm

BLOCK_ROWS = 6
"""Modulation rows: shift, scale, gate of self-attention, then of the feed-forward."""


class Block(nn.Module):
    """Self-attention, attention to the context, feed-forward; each step adds to the tokens.

    Norms, modulation and gates are fp32; attention and feed-forward are in the dtype of the context. What they add is
    rounded to the dtype of the tokens that come in.
    """

    def __init__(self, config: WanTransformerConfig) -> None:
        super().__init__()
        width, heads, eps = config.width, config.num_attention_heads, config.eps
        self.norm1 = Float32LayerNorm(width, eps, elementwise_affine=False)
        self.attn1 = Attention(width, heads, eps)
        self.norm2 = Float32LayerNorm(width, eps) if config.cross_attn_norm else nn.Identity()
        self.attn2 = Attention(width, heads, eps, image=config.image_dim is not None)
        self.norm3 = Float32LayerNorm(width, eps, elementwise_affine=False)
        self.ffn = FeedForward(width, config.ffn_dim, width, gelu)
        self.scale_shift_table = nn.Parameter(torch.empty(1, BLOCK_ROWS, width))

    def forward(self, x: Tensor, context: BlockContext, modulation: Modulation, rope: Rope) -> Tensor:
        """Advance ``x`` [B, S, D], keeping its dtype."""
        dtype, table = context.text.values.dtype, self.scale_shift_table[0].float()

        shift, scale, gate = modulation.of(table[:3])
        x = _add_gated(x, self.attn1(modulated(self.norm1(x), scale, shift).to(dtype), rope), gate)

        x = x + self.attn2(self.norm2(x).to(dtype), context=context)

        shift, scale, gate = modulation.of(table[3:], first=3)
        return _add_gated(x, self.ffn(modulated(self.norm3(x), scale, shift).to(dtype)), gate)


def _add_gated(x: Tensor, out: Tensor, gate: Tensor) -> Tensor:
    return torch.addcmul(x.float(), out, gate).to(x.dtype)
