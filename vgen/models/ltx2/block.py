"""One LTX-2 transformer block over a video and an audio stream.

Shapes: B batch, S video tokens, A audio tokens, T either of them, L text tokens, D model width of the stream at hand.
Source: Lightricks/LTX-2 at 400fd31, ``model/transformer/transformer.py``.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vgen.models.attention import Attention, Keep, KeysValues, Rope
from vgen.models.ltx2.adaln import rms_norm
from vgen.models.ltx2.config import TransformerConfig
from vgen.models.ltx2.feed_forward import FeedForward
from vgen.models.ltx2.perturbation import BlockKeep
from vgen.models.modulation import Modulation, modulated

BASE_ROWS = 6
"""Modulation rows: shift, scale, gate of self-attention, then of the feed-forward."""

TEXT_ROWS = 3
"""Further rows where the noise level modulates text attention: shift and scale of its queries, gate of its output."""


@dataclass(frozen=True, eq=False)
class Conditioning:
    """What a block sees of one stream besides its tokens."""

    context: Tensor | KeysValues
    """Text in the stream's width, [B, L, D], or the block's own keys and values of it."""
    modulation: Modulation
    """``BASE_ROWS`` and, in a block with prompt tables, ``TEXT_ROWS``."""
    prompt_modulation: Modulation | None
    """Shift and scale of the text, one row for all text tokens of a sample; for a block with prompt tables."""
    rope: Rope


@dataclass(frozen=True, eq=False)
class CrossConditioning:
    """One stream's side of the attentions between the streams; there is none for a stream that runs alone."""

    modulation: Modulation
    """Scale, shift towards audio-to-video, then towards video-to-audio."""
    gate: Modulation
    """One row, on what comes from the other stream."""
    rope: Rope


class Block(nn.Module):
    """Self-attention, text attention, attention between the streams, feed-forward; each step adds to its stream."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        video, audio = config.width, config.audio_width
        head_dim, audio_head_dim = config.attention_head_dim, config.audio_attention_head_dim
        rows = BASE_ROWS + (TEXT_ROWS if config.cross_attention_adaln else 0)
        self.norm_eps = config.norm_eps

        def attention(width: int, context_width: int, head_dim: int) -> Attention:
            heads, eps, gated = config.num_attention_heads, config.norm_eps, config.gated_attention
            return Attention(width, context_width, heads, head_dim, eps, gated)

        self.attn1 = attention(video, video, head_dim)
        self.attn2 = attention(video, video, head_dim)
        self.audio_attn1 = attention(audio, audio, audio_head_dim)
        self.audio_attn2 = attention(audio, audio, audio_head_dim)
        self.audio_to_video_attn = attention(video, audio, audio_head_dim)
        self.video_to_audio_attn = attention(audio, video, audio_head_dim)
        self.ff = FeedForward(video)
        self.audio_ff = FeedForward(audio)
        self.scale_shift_table = nn.Parameter(torch.empty(rows, video))
        self.audio_scale_shift_table = nn.Parameter(torch.empty(rows, audio))
        self.scale_shift_table_a2v_ca_video = nn.Parameter(torch.empty(5, video))
        self.scale_shift_table_a2v_ca_audio = nn.Parameter(torch.empty(5, audio))
        self.prompt_scale_shift_table: nn.Parameter | None = None
        self.audio_prompt_scale_shift_table: nn.Parameter | None = None
        if config.cross_attention_adaln:
            self.prompt_scale_shift_table = nn.Parameter(torch.empty(2, video))
            self.audio_prompt_scale_shift_table = nn.Parameter(torch.empty(2, audio))

    def forward(
        self,
        video: Tensor | None,
        audio: Tensor | None,
        video_conditioning: Conditioning | None,
        audio_conditioning: Conditioning | None,
        cross_conditioning: tuple[CrossConditioning, CrossConditioning] | None,
        keep: BlockKeep,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Advance ``video`` [B, S, D] and ``audio`` [B, A, D].

        A stream without conditioning is returned as it came, and read by the other one as it is.
        ``cross_conditioning`` (video's, audio's) is None unless both streams are given.
        """
        if video is not None and video_conditioning is not None:
            video = self._attend_own(video, video_conditioning, self.attn1, self.scale_shift_table, keep.video_self)
            video = self._attend_text(
                video, video_conditioning, self.attn2, self.scale_shift_table, self.prompt_scale_shift_table
            )
        if audio is not None and audio_conditioning is not None:
            audio = self._attend_own(
                audio, audio_conditioning, self.audio_attn1, self.audio_scale_shift_table, keep.audio_self
            )
            audio = self._attend_text(
                audio,
                audio_conditioning,
                self.audio_attn2,
                self.audio_scale_shift_table,
                self.audio_prompt_scale_shift_table,
            )
        if video is not None and audio is not None and cross_conditioning is not None:
            to_video = False if video_conditioning is None else keep.audio_to_video
            to_audio = False if audio_conditioning is None else keep.video_to_audio
            video, audio = self._attend_other(video, audio, *cross_conditioning, to_video, to_audio)
        if video is not None and video_conditioning is not None:
            video = self._feed_forward(video, video_conditioning, self.ff, self.scale_shift_table)
        if audio is not None and audio_conditioning is not None:
            audio = self._feed_forward(audio, audio_conditioning, self.audio_ff, self.audio_scale_shift_table)
        return video, audio

    def _attend_own(
        self, x: Tensor, conditioning: Conditioning, attention: Attention, table: Tensor, keep: Keep
    ) -> Tensor:
        shift, scale, gate = conditioning.modulation.of(table[:3])
        x_in = modulated(rms_norm(x, self.norm_eps), scale, shift)
        return torch.addcmul(x, attention(x_in, rope=conditioning.rope, keep=keep), gate)

    def _attend_text(
        self,
        x: Tensor,
        conditioning: Conditioning,
        attention: Attention,
        table: Tensor,
        prompt_table: Tensor | None,
    ) -> Tensor:
        x_in, context = rms_norm(x, self.norm_eps), conditioning.context
        if prompt_table is None:
            return x + attention(x_in, context)
        assert conditioning.prompt_modulation is not None
        assert isinstance(context, Tensor)
        shift, scale, gate = conditioning.modulation.of(table[BASE_ROWS:], first=BASE_ROWS)
        text_shift, text_scale = conditioning.prompt_modulation.of(prompt_table)
        out = attention(modulated(x_in, scale, shift), modulated(context, text_scale, text_shift))
        return torch.addcmul(x, out, gate)

    def _feed_forward(self, x: Tensor, conditioning: Conditioning, feed_forward: FeedForward, table: Tensor) -> Tensor:
        shift, scale, gate = conditioning.modulation.of(table[3:BASE_ROWS], first=3)
        x_in = modulated(rms_norm(x, self.norm_eps), scale, shift)
        return torch.addcmul(x, feed_forward(x_in), gate)

    def _attend_other(
        self,
        video: Tensor,
        audio: Tensor,
        video_cross: CrossConditioning,
        audio_cross: CrossConditioning,
        keep_to_video: Keep,
        keep_to_audio: Keep,
    ) -> tuple[Tensor, Tensor]:
        if keep_to_video is False and keep_to_audio is False:
            return video, audio
        # Both directions read the streams as they are here: video-to-audio must not see what audio-to-video adds.
        video_side = _Side(rms_norm(video, self.norm_eps), video_cross, self.scale_shift_table_a2v_ca_video)
        audio_side = _Side(rms_norm(audio, self.norm_eps), audio_cross, self.scale_shift_table_a2v_ca_audio)
        if keep_to_video is not False:
            video = _add_other(video, video_side, audio_side, self.audio_to_video_attn, 0, keep_to_video)
        if keep_to_audio is not False:
            audio = _add_other(audio, audio_side, video_side, self.video_to_audio_attn, 2, keep_to_audio)
        return video, audio


@dataclass(frozen=True, eq=False)
class _Side:
    """One stream's normalised tokens and modulation for the attention between the streams."""

    normed: Tensor
    cross: CrossConditioning
    table: Tensor

    def tokens(self, first: int) -> Tensor:
        """The tokens with scale and shift from rows ``first`` and ``first`` + 1."""
        scale, shift = self.cross.modulation.of(self.table[first : first + 2], first)
        return modulated(self.normed, scale, shift)


def _add_other(x: Tensor, own: _Side, other: _Side, attention: Attention, first: int, keep: Keep) -> Tensor:
    (gate,) = own.cross.gate.of(own.table[4:])
    out = attention(own.tokens(first), other.tokens(first), own.cross.rope, other.cross.rope)
    return torch.addcmul(x, out, gate * keep if isinstance(keep, Tensor) else gate)
