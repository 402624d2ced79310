"""Attention of Wan, to the video's own tokens or to a text and, in 2.1 image-to-video, an image.

Shapes: B batch, S video tokens, L text or image tokens, N heads, H head dim, D model width.
Source: Wan-Video/Wan2.1 at 9737cba, ``wan/modules/model.py``.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from vgen.models.attention import Attend, KeysValues, Rope, sdpa
from vgen.models.wan.rope import rotate


@dataclass(frozen=True, eq=False)
class BlockContext:
    """What one block's cross-attention reads, in the model's dtype."""

    text: KeysValues
    image: KeysValues | None = None


class Attention(nn.Module):
    """Attention with a weighted RMS norm of queries and keys over all heads together.

    ``image``: the same queries also attend to image tokens, and the two results are added. ``attend`` is the one seam,
    as in ``models/attention.py``; keys and values are of the dtype of the tokens that come in, and so are the queries.
    """

    def __init__(self, width: int, num_heads: int, eps: float, image: bool = False) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.to_q = nn.Linear(width, width)
        self.to_k = nn.Linear(width, width)
        self.to_v = nn.Linear(width, width)
        self.to_out = nn.ModuleList([nn.Linear(width, width)])
        self.norm_q = nn.RMSNorm(width, eps=eps)
        self.norm_k = nn.RMSNorm(width, eps=eps)
        self.add_k_proj = nn.Linear(width, width) if image else None
        self.add_v_proj = nn.Linear(width, width) if image else None
        self.norm_added_k = nn.RMSNorm(width, eps=eps) if image else None
        self.attend: Attend = sdpa

    def forward(self, x: Tensor, rope: Rope | None = None, context: BlockContext | None = None) -> Tensor:
        """Attend from ``x`` [B, S, D] to ``context``, or to ``x`` itself, turned by ``rope``. Returns [B, S, D]."""
        q = self._normed(self.norm_q, self.to_q(x))
        if context is None:
            assert rope is not None
            k, v = self._normed(self.norm_k, self.to_k(x)), self._heads(self.to_v(x))
            heads_BNSH = self.attend(rotate(q, *rope).to(v.dtype), rotate(k, *rope).to(v.dtype), v, None)
        else:
            q = q.to(context.text.values.dtype)
            heads_BNSH = self.attend(q, *context.text, None)
            if context.image is not None:
                heads_BNSH = heads_BNSH + self.attend(q, *context.image, None)
        out: Tensor = self.to_out[0](heads_BNSH.transpose(1, 2).flatten(2))
        return out

    def context(self, text: Tensor, image: Tensor | None) -> BlockContext:
        """Keys and values of ``text`` and ``image``, both [B, L, D]."""
        text_keys = self._normed(self.norm_k, self.to_k(text)).to(text.dtype)
        of_text = KeysValues(text_keys, self._heads(self.to_v(text)))
        if image is None:
            return BlockContext(of_text)
        assert self.add_k_proj is not None
        assert self.add_v_proj is not None
        assert self.norm_added_k is not None
        image_keys = self._normed(self.norm_added_k, self.add_k_proj(image)).to(image.dtype)
        return BlockContext(of_text, KeysValues(image_keys, self._heads(self.add_v_proj(image))))

    def _normed(self, norm: nn.RMSNorm, x_BSD: Tensor) -> Tensor:
        """Heads of the normalised ``x_BSD``, in the dtype of the norm's weight."""
        return self._heads(norm(x_BSD.to(norm.weight.dtype)))

    def _heads(self, x_BSD: Tensor) -> Tensor:
        return x_BSD.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
