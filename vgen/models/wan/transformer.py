"""The Wan transformer: predicts the velocity of a video from its tokens, a text and, in some variants, an image.

One module is all variants; ``WanTransformerConfig`` says which parts it has. 2.2 TI2V has one timestep per token, of
which few are distinct; A14B's image-to-video has its condition among the input channels; 2.1's also attends to the
image.

Shapes: B batch, S video tokens, R distinct timesteps, C channels, P latents per patch, L text or image tokens, D width.
Source: Wan-Video/Wan2.1 at 9737cba and Wan-Video/Wan2.2 at 42bf4cf, ``wan/modules/model.py``.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vgen.models.attention import Rope
from vgen.models.modulation import Modulation, modulated
from vgen.models.stream import check_tokens
from vgen.models.tables import TableCache
from vgen.models.wan.attention import BlockContext
from vgen.models.wan.block import Block
from vgen.models.wan.config import Residual, WanTransformerConfig
from vgen.models.wan.embedding import ConditionEmbedder
from vgen.models.wan.geometry import Geometry
from vgen.models.wan.norm import Float32LayerNorm
from vgen.models.wan.rope import rope_table


@dataclass(frozen=True, eq=False)
class PreparedContext:
    """One text, and the image if the model attends to one, as every block's cross-attention reads them."""

    blocks: tuple[BlockContext, ...]


@dataclass(frozen=True, eq=False)
class Stream:
    """One call's input; latents, text and image in the model's dtype.

    ``latents``: [B, S, C * P], as ``patchify`` makes them.
    ``timestep``: 0 to 1000, integer or fp32: [B], one for all tokens of a sample; or [B, R] and ``rows``, int64 [B, S],
    which of the R each token has; or [B, S] without ``rows``, which computes the modulation of every token.
    ``context``: [B, L, text_dim]; or what ``prepare_text`` made of it and of the image.
    ``image``: [B, L, image_dim], where the model attends to one and ``context`` is not prepared; the tokens of a first
    and a last image one after the other.
    """

    latents: Tensor
    timestep: Tensor
    context: Tensor | PreparedContext
    image: Tensor | None = None
    rows: Tensor | None = None


class WanTransformer(nn.Module):
    """30 or 40 blocks at full size; parameter names are those of a diffusers checkpoint.

    ``residual="fp32"`` gives the numbers of the official code, ``"model"`` those of diffusers; what they keep in fp32
    besides is a matter of the parameters' dtypes (``plan.keeps_float32``). In fp32 they differ by the timestep's
    sinusoid only, which the official code computes in fp64. Two of its roundings are left out: of the first block's
    first norm, and of queries and keys between their norm and its weight.
    """

    def __init__(self, config: WanTransformerConfig, residual: Residual = "fp32") -> None:
        super().__init__()
        self.config = config
        self.residual = residual
        width, patch = config.width, config.patch_size
        self.patch_embedding = nn.Conv3d(config.in_channels, width, kernel_size=patch, stride=patch)
        self.condition_embedder = ConditionEmbedder(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm_out = Float32LayerNorm(width, config.eps, elementwise_affine=False)
        self.proj_out = nn.Linear(width, config.out_channels * math.prod(patch))
        self.scale_shift_table = nn.Parameter(torch.empty(1, 2, width))
        self._rope_cache: TableCache[Rope] = TableCache(size=4)

    def rope_tables(self, geometry: Geometry, device: torch.device | str) -> Rope:
        """The position tables of ``geometry``, fp32 [1, 1, S, H/2], built at the first call; the last four are kept.

        Raises:
            ValueError: the grid is longer along an axis than the model has positions.
        """
        # "cuda" and "cuda:0" name one device; an empty tensor knows which.
        device = torch.empty(0, device=device).device
        longest, limit = max(geometry.grid), self.config.rope_max_seq_len
        if longest > limit:
            raise ValueError(f"the video is {longest} patches long along one axis and the model has {limit} positions")
        return self._rope_cache.get(
            (geometry.grid, device), lambda: rope_table(geometry.grid, self.config.attention_head_dim, device)
        )

    def prepare_text(self, context: Tensor, image: Tensor | None = None) -> PreparedContext:
        """What ``Stream.context`` takes in place of ``context`` and ``image``, with the same result.

        The keys and values of every block: computed once per prompt instead of once per step.

        Raises:
            ValueError: the image is missing, or the model does not attend to one, or has positions for another length.
        """
        _check_image(self.config, image)
        text = self.condition_embedder.text_embedder(context)
        if image is not None:
            assert self.condition_embedder.image_embedder is not None
            image = self.condition_embedder.image_embedder(image)
        blocks = []
        for block in self.blocks:
            assert isinstance(block, Block)
            blocks.append(block.attn2.context(text, image))
        return PreparedContext(tuple(blocks))

    def forward(self, stream: Stream, rope: Rope) -> Tensor:
        """The velocity of ``stream``, [B, S, P * C], which ``unpatchify`` makes latents, in the dtype of ``proj_out``.

        Raises:
            ValueError: the numbers of tokens, timesteps or samples do not fit, or as ``prepare_text``.
        """
        _check_stream(stream, rope)
        context = stream.context
        if not isinstance(context, PreparedContext):
            context = self.prepare_text(context, stream.image)
        # A convolution whose kernel is its stride is a linear map of each patch.
        x = F.linear(stream.latents, self.patch_embedding.weight.flatten(1), self.patch_embedding.bias)
        if self.residual == "fp32":
            x = x.float()
        modulation, embedded = self._modulate(stream)
        for block, block_context in zip(self.blocks, context.blocks, strict=True):
            x = block(x, block_context, modulation, rope)
        shift, scale = embedded.of(self.scale_shift_table[0].float())
        out: Tensor = self.proj_out(modulated(self.norm_out(x), scale, shift).to(self.proj_out.weight.dtype))
        return out

    def _modulate(self, stream: Stream) -> tuple[Modulation, Modulation]:
        """The rows of the stream's timesteps, and their embedding as one row."""
        timestep, lookup = stream.timestep, stream.rows
        if timestep.ndim == 1:
            timestep = timestep.unsqueeze(1)
        if lookup is not None:
            lookup = lookup + torch.arange(len(timestep), device=lookup.device).unsqueeze(1) * timestep.shape[1]
        rows, embedded = self.condition_embedder.time(
            timestep, torch.float64 if self.residual == "fp32" else torch.float32
        )
        return Modulation(rows, lookup), Modulation(embedded.unsqueeze(2), lookup)


def _check_image(config: WanTransformerConfig, image: Tensor | None) -> None:
    if (image is None) != (config.image_dim is None):
        raise ValueError(
            "this model attends to an image and got none; give its CLIP tokens"
            if image is None
            else "this model does not attend to an image and got one; its image is part of the latents"
        )
    if image is not None and config.pos_embed_seq_len not in (None, image.shape[1]):
        raise ValueError(
            f"the image has {image.shape[1]} tokens and the model {config.pos_embed_seq_len} positions; "
            f"give the tokens of the first image, then those of the last"
        )


def _check_stream(stream: Stream, rope: Rope) -> None:
    check_tokens("stream", stream.latents, stream.timestep, stream.rows, rope)
    if isinstance(stream.context, PreparedContext) and stream.image is not None:
        raise ValueError("the context is prepared and the stream has an image besides; prepare it with the text")
