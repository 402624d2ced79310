"""One LTX-2 2.0 transformer block over a video and an audio stream.

Shapes: B batch, S video tokens, A audio tokens, T either of them, or 1 where one row serves all, L text tokens,
D model width of the stream at hand.
Source: Lightricks/LTX-2 at 400fd31, ``model/transformer/transformer.py``.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vgen.models.attention import Attention, Rope
from vgen.models.ltx2.adaln import modulated, rms_norm
from vgen.models.ltx2.config import TransformerConfig
from vgen.models.ltx2.feed_forward import FeedForward


@dataclass(frozen=True, eq=False)
class Conditioning:
    """What the blocks see of one stream besides its tokens; the same for every block of a forward."""

    context: Tensor
    """[B, L, D] projected text."""
    modulation: Tensor
    """[B, T, 6, D] rows: shift, scale, gate of self-attention, then of the feed-forward."""
    rope: Rope


@dataclass(frozen=True, eq=False)
class CrossConditioning:
    """One stream's side of the attentions between the streams; there is none for a stream that runs alone."""

    modulation: Tensor
    """[B, T, 4, D] rows: scale, shift towards audio-to-video, then towards video-to-audio."""
    gate: Tensor
    """[B, 1, 1, D], on what comes from the other stream."""
    rope: Rope


class Block(nn.Module):
    """Self-attention, text attention, attention between the streams, feed-forward; each step adds to its stream."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        video, audio = config.width, config.audio_width
        heads, eps = config.num_attention_heads, config.norm_eps
        head_dim, audio_head_dim = config.attention_head_dim, config.audio_attention_head_dim
        self.norm_eps = eps
        self.attn1 = Attention(video, video, heads, head_dim, eps)
        self.attn2 = Attention(video, video, heads, head_dim, eps)
        self.audio_attn1 = Attention(audio, audio, heads, audio_head_dim, eps)
        self.audio_attn2 = Attention(audio, audio, heads, audio_head_dim, eps)
        self.audio_to_video_attn = Attention(video, audio, heads, audio_head_dim, eps)
        self.video_to_audio_attn = Attention(audio, video, heads, audio_head_dim, eps)
        self.ff = FeedForward(video)
        self.audio_ff = FeedForward(audio)
        self.scale_shift_table = nn.Parameter(torch.empty(6, video))
        self.audio_scale_shift_table = nn.Parameter(torch.empty(6, audio))
        self.scale_shift_table_a2v_ca_video = nn.Parameter(torch.empty(5, video))
        self.scale_shift_table_a2v_ca_audio = nn.Parameter(torch.empty(5, audio))

    def forward(
        self,
        video: Tensor | None,
        audio: Tensor | None,
        video_conditioning: Conditioning | None,
        audio_conditioning: Conditioning | None,
        cross_conditioning: tuple[CrossConditioning, CrossConditioning] | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Advance ``video`` [B, S, D] and ``audio`` [B, A, D].

        A stream and its conditioning are None together; ``cross_conditioning`` (video's, audio's) is None unless both
        streams run.
        """
        if video is not None and video_conditioning is not None:
            video = self._attend_own(video, video_conditioning, self.attn1, self.scale_shift_table)
            video = video + self.attn2(rms_norm(video, self.norm_eps), video_conditioning.context)
        if audio is not None and audio_conditioning is not None:
            audio = self._attend_own(audio, audio_conditioning, self.audio_attn1, self.audio_scale_shift_table)
            audio = audio + self.audio_attn2(rms_norm(audio, self.norm_eps), audio_conditioning.context)
        if video is not None and audio is not None and cross_conditioning is not None:
            video, audio = self._attend_other(video, audio, *cross_conditioning)
        if video is not None and video_conditioning is not None:
            video = self._feed_forward(video, video_conditioning, self.ff, self.scale_shift_table)
        if audio is not None and audio_conditioning is not None:
            audio = self._feed_forward(audio, audio_conditioning, self.audio_ff, self.audio_scale_shift_table)
        return video, audio

    def _attend_own(self, x: Tensor, conditioning: Conditioning, attention: Attention, table: Tensor) -> Tensor:
        shift, scale, gate = (table[:3] + conditioning.modulation[:, :, :3]).unbind(2)
        x_in = modulated(rms_norm(x, self.norm_eps), scale, shift)
        return torch.addcmul(x, attention(x_in, rope=conditioning.rope), gate)

    def _feed_forward(self, x: Tensor, conditioning: Conditioning, feed_forward: FeedForward, table: Tensor) -> Tensor:
        shift, scale, gate = (table[3:] + conditioning.modulation[:, :, 3:]).unbind(2)
        x_in = modulated(rms_norm(x, self.norm_eps), scale, shift)
        return torch.addcmul(x, feed_forward(x_in), gate)

    def _attend_other(
        self, video: Tensor, audio: Tensor, video_cross: CrossConditioning, audio_cross: CrossConditioning
    ) -> tuple[Tensor, Tensor]:
        # Both directions read the streams as they are here: video-to-audio must not see what audio-to-video adds.
        video_normed, audio_normed = rms_norm(video, self.norm_eps), rms_norm(audio, self.norm_eps)
        video_rows, video_gate = _cross_rows(self.scale_shift_table_a2v_ca_video, video_cross)
        audio_rows, audio_gate = _cross_rows(self.scale_shift_table_a2v_ca_audio, audio_cross)
        from_audio = self.audio_to_video_attn(
            modulated(video_normed, video_rows[0], video_rows[1]),
            modulated(audio_normed, audio_rows[0], audio_rows[1]),
            video_cross.rope,
            audio_cross.rope,
        )
        video = torch.addcmul(video, from_audio, video_gate)
        del from_audio
        from_video = self.video_to_audio_attn(
            modulated(audio_normed, audio_rows[2], audio_rows[3]),
            modulated(video_normed, video_rows[2], video_rows[3]),
            audio_cross.rope,
            video_cross.rope,
        )
        return video, torch.addcmul(audio, from_video, audio_gate)


def _cross_rows(table: Tensor, cross: CrossConditioning) -> tuple[tuple[Tensor, ...], Tensor]:
    """The four scale and shift rows, each [B, T, D], and the gate [B, 1, D]."""
    return (table[:4] + cross.modulation).unbind(2), table[4] + cross.gate.squeeze(2)
