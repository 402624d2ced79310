"""From Gemma's hidden states to the text context of LTX-2: projections, then one connector per stream.

2.0 projects the states once for both streams, 2.3 once for each, into the stream's own width.

Shapes: B batch, L text tokens, C channels of a hidden state, n hidden states (layers + 1), D connector width,
R registers.
Source: Lightricks/LTX-2 at 400fd31, ``text_encoders/gemma/{feature_extractor,embeddings_processor,
embeddings_connector}.py``.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from vgen.models.attention import Attention, Rope
from vgen.models.ltx2.adaln import rms_norm
from vgen.models.ltx2.config import ConnectorConfig
from vgen.models.ltx2.feed_forward import FeedForward
from vgen.models.ltx2.rope import rope_table
from vgen.models.tables import TableCache

STATES_EPS = 1e-6


def normalise_states(states_BLCn: Tensor, mask_BL: Tensor) -> Tensor:
    """Centre and scale each hidden state of a sample over its valid tokens and channels; padding becomes zero.

    ``8 * (x - mean) / (max - min + 1e-6)``, flattened with the hidden state fastest. Returns [B, L, C * n].
    """
    channels = states_BLCn.shape[2]
    valid = mask_BL.bool()[:, :, None, None]
    count = (mask_BL.sum(dim=-1) * channels).view(-1, 1, 1, 1)
    mean = states_BLCn.masked_fill(~valid, 0.0).sum(dim=(1, 2), keepdim=True) / (count + 1e-6)
    low = states_BLCn.masked_fill(~valid, float("inf")).amin(dim=(1, 2), keepdim=True)
    high = states_BLCn.masked_fill(~valid, float("-inf")).amax(dim=(1, 2), keepdim=True)
    # In place after the first difference, which is fp32 and has 193 million elements per sample at full size.
    normed = (states_BLCn - mean).mul_(8).div_(high - low + 1e-6).masked_fill_(~valid, 0.0)
    return normed.flatten(2).to(states_BLCn.dtype)


def rms_normalise_states(states_BLCn: Tensor, mask_BL: Tensor) -> Tensor:
    """Scale each hidden state of a token to a root mean square of 1 over its channels; padding becomes zero.

    Flattened with the hidden state fastest: [B, L, C * n]. Rounds in the states' dtype, as the official code does.
    """
    normed = states_BLCn * torch.rsqrt(states_BLCn.square().mean(dim=2, keepdim=True) + STATES_EPS)
    return normed.masked_fill_(~mask_BL.bool()[:, :, None, None], 0.0).flatten(2)


class SharedTextProjection(nn.Module):
    """All hidden states of a token, normalised, to one feature vector that both connectors read."""

    def __init__(self, hidden_size: int, num_states: int, out: int) -> None:
        super().__init__()
        self.aggregate_embed = nn.Linear(hidden_size * num_states, out, bias=False)

    def forward(self, states_BLCn: Tensor, mask_BL: Tensor) -> tuple[Tensor, Tensor]:
        """Features for video and audio, which are the same [B, L, out]."""
        features: Tensor = self.aggregate_embed(normalise_states(states_BLCn, mask_BL))
        return features, features


class TextProjectionPerModality(nn.Module):
    """All hidden states of a token, normalised, to one feature vector per stream."""

    def __init__(self, hidden_size: int, num_states: int, video: int, audio: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.video_aggregate_embed = nn.Linear(hidden_size * num_states, video)
        self.audio_aggregate_embed = nn.Linear(hidden_size * num_states, audio)

    def forward(self, states_BLCn: Tensor, mask_BL: Tensor) -> tuple[Tensor, Tensor]:
        """Features for video [B, L, video width] and audio [B, L, audio width]."""
        normed = rms_normalise_states(states_BLCn, mask_BL)
        return self._project(normed, self.video_aggregate_embed), self._project(normed, self.audio_aggregate_embed)

    def _project(self, normed: Tensor, linear: nn.Linear) -> Tensor:
        projected: Tensor = linear(normed * math.sqrt(linear.out_features / self.hidden_size))
        return projected


class ConnectorBlock(nn.Module):
    """Self-attention and feed-forward over the text, unmasked and without modulation."""

    def __init__(self, config: ConnectorConfig) -> None:
        super().__init__()
        self.norm_eps = config.norm_eps
        heads, head_dim = config.num_attention_heads, config.attention_head_dim
        self.attn1 = Attention(config.width, config.width, heads, head_dim, config.norm_eps, config.gated_attention)
        self.ff = FeedForward(config.width)

    def forward(self, x: Tensor, rope: Rope) -> Tensor:
        x = x + self.attn1(rms_norm(x, self.norm_eps), rope=rope)
        out: Tensor = x + self.ff(rms_norm(x, self.norm_eps))
        return out


class Connector(nn.Module):
    """A small transformer over one stream's text features; learned registers take the place of the padding."""

    def __init__(self, config: ConnectorConfig) -> None:
        super().__init__()
        self.config = config
        self.learnable_registers = nn.Parameter(torch.empty(config.num_registers, config.width))
        self.transformer_1d_blocks = nn.ModuleList(ConnectorBlock(config) for _ in range(config.num_layers))
        self._rope_cache: TableCache[Rope] = TableCache(size=4)

    def forward(self, features: Tensor, valid: Tensor) -> Tensor:
        """``features`` [B, L, D] with the valid tokens first, ``valid`` bool [B, L] in the same order: [B, L, D].

        Raises:
            ValueError: L is no multiple of the number of registers.
        """
        length, registers = features.shape[1], self.config.num_registers
        if length % registers:
            raise ValueError(
                f"the text has {length} tokens, padding included; this connector needs a multiple of its {registers} "
                f"registers: pad the prompt to {-(-length // registers) * registers} tokens"
            )
        # A register belongs to a position, whatever the length of the prompt before it.
        filling = self.learnable_registers.repeat(length // registers, 1).to(features.dtype)
        x = torch.where(valid.unsqueeze(-1), features, filling)
        rope = self._rope(length, x.device, x.dtype)
        for block in self.transformer_1d_blocks:
            x = block(x, rope)
        return rms_norm(x, self.config.norm_eps)

    def _rope(self, length: int, device: torch.device, dtype: torch.dtype) -> Rope:
        config = self.config

        def build() -> Rope:
            positions = torch.arange(length, dtype=torch.float32, device=device)[None]
            heads, theta, float64 = config.num_attention_heads, config.rope_theta, config.rope_float64
            return rope_table(positions, (config.rope_max_pos,), config.width, heads, theta, float64, dtype)

        return self._rope_cache.get((length, device, dtype), build)


class TextConnectors(nn.Module):
    """The whole text side after Gemma: hidden states and mask to the video and the audio context.

    ``hidden_size`` and ``num_states`` (layers + 1) describe the text encoder.

    Raises:
        ValueError: a shared projection is asked for and the connectors' widths differ.
    """

    def __init__(
        self,
        video: ConnectorConfig,
        audio: ConnectorConfig,
        hidden_size: int,
        num_states: int,
        text_projection: Literal["shared", "per_modality"] = "shared",
    ) -> None:
        super().__init__()
        self.text_embedding_projection: SharedTextProjection | TextProjectionPerModality
        if text_projection == "per_modality":
            self.text_embedding_projection = TextProjectionPerModality(
                hidden_size, num_states, video.width, audio.width
            )
        elif video.width == audio.width:
            self.text_embedding_projection = SharedTextProjection(hidden_size, num_states, video.width)
        else:
            raise ValueError(
                f"the connectors are {video.width} (video) and {audio.width} (audio) wide and share one projection of "
                f"the text; give them equal widths or use text_projection=per_modality"
            )
        self.video_embeddings_connector = Connector(video)
        self.audio_embeddings_connector = Connector(audio)

    def forward(self, hidden_states: Sequence[Tensor] | Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """``hidden_states``: n of [B, L, C], or stacked [B, L, C, n]; mask [B, L], 1 = valid, padding on any side.

        Returns the video context [B, L, video width] and the audio context [B, L, audio width]; all L are attended.

        Raises:
            ValueError: L is no multiple of a connector's number of registers.
        """
        states = hidden_states if isinstance(hidden_states, Tensor) else torch.stack(list(hidden_states), dim=-1)
        video, audio = self.text_embedding_projection(states, attention_mask)
        return (
            self.video_embeddings_connector(*valid_first(video, attention_mask)),
            self.audio_embeddings_connector(*valid_first(audio, attention_mask)),
        )


def valid_first(features_BLD: Tensor, mask_BL: Tensor) -> tuple[Tensor, Tensor]:
    """Move the valid tokens of each sample to the front in their order: features [B, L, D] and bool mask [B, L].

    Sorting keeps every shape independent of the prompt, so nothing waits for the device.
    """
    valid, order = torch.sort(mask_BL.bool().int(), dim=1, descending=True, stable=True)
    return torch.gather(features_BLD, 1, order.unsqueeze(-1).expand_as(features_BLD)), valid.bool()
