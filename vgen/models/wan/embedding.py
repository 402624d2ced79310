"""What a Wan transformer is told besides its latents: timestep, text and image, in the model's width.

Shapes: B batch, R timesteps, L text or image tokens, D model width.
Source: Wan-Video/Wan2.1 at 9737cba, ``wan/modules/model.py``.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vgen.models.projection import Projection, gelu
from vgen.models.wan.block import BLOCK_ROWS
from vgen.models.wan.config import WanTransformerConfig
from vgen.models.wan.feed_forward import FeedForward
from vgen.models.wan.norm import Float32LayerNorm

PERIOD = 10000.0


def sinusoid(timestep_BR: Tensor, channels: int, dtype: torch.dtype) -> Tensor:
    """Embed timesteps (0 to 1000) as cosines followed by sines, computed in ``dtype``. Returns [B, R, channels]."""
    half = channels // 2
    exponents = -math.log(PERIOD) * torch.arange(half, dtype=dtype, device=timestep_BR.device) / half
    angles = timestep_BR.to(dtype).unsqueeze(-1) * exponents.exp()
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class ImageEmbedder(nn.Module):
    """CLIP tokens to the model's width; ``num_positions``: tokens of two images with positions, or None."""

    def __init__(self, image_dim: int, width: int, num_positions: int | None) -> None:
        super().__init__()
        self.norm1 = Float32LayerNorm(image_dim)
        self.ff = FeedForward(image_dim, image_dim, width, F.gelu)
        self.norm2 = Float32LayerNorm(width)
        self.pos_embed = None if num_positions is None else nn.Parameter(torch.empty(1, num_positions, image_dim))

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, L, image_dim] to [B, L, D], in the dtype of the tokens."""
        x = tokens if self.pos_embed is None else tokens + self.pos_embed
        out: Tensor = self.norm2(self.ff(self.norm1(x).to(tokens.dtype)))
        return out.to(tokens.dtype)


class ConditionEmbedder(nn.Module):
    def __init__(self, config: WanTransformerConfig) -> None:
        super().__init__()
        width = config.width
        self.freq_dim = config.freq_dim
        self.time_embedder = Projection(config.freq_dim, width, F.silu)
        self.time_proj = nn.Linear(width, BLOCK_ROWS * width)
        self.text_embedder = Projection(config.text_dim, width, gelu)
        self.image_embedder = None
        if config.image_dim is not None:
            self.image_embedder = ImageEmbedder(config.image_dim, width, config.pos_embed_seq_len)

    def time(self, timestep_BR: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The blocks' modulation rows [B, R, 6, D] and the embedded timestep [B, R, D], which the output head uses.

        ``dtype`` is that of the sinusoid; each of the two layers then computes in the dtype of its own weights.
        """
        waves = sinusoid(timestep_BR, self.freq_dim, dtype)
        embedded = self.time_embedder(waves.to(self.time_embedder.linear_1.weight.dtype))
        embedded = embedded.to(self.time_proj.weight.dtype)
        return self.time_proj(F.silu(embedded)).unflatten(-1, (BLOCK_ROWS, -1)), embedded
