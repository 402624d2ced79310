"""The LTX-2 2.0 transformer: predicts the velocities of a video and an audio stream.

Shapes: B batch, S video tokens, A audio tokens, T tokens of the stream at hand, L text tokens, C latent channels,
D model width of the stream at hand.
Source: Lightricks/LTX-2 at 400fd31, ``model/transformer/{model,transformer_args}.py``.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vgen.models.attention import Rope
from vgen.models.ltx2.adaln import AdaLayerNorm, modulated, sinusoid
from vgen.models.ltx2.block import Block, Conditioning, CrossConditioning
from vgen.models.ltx2.config import TransformerConfig
from vgen.models.ltx2.feed_forward import Projection, gelu
from vgen.models.ltx2.rope import Geometry, RopeTables, TableCache, audio_positions, rope_table, video_positions


@dataclass(frozen=True, eq=False)
class Stream:
    """One modality's input: latents [B, T, C], text context [B, L, caption channels], both in the model's dtype.

    ``timestep``: the sigmas (0 to 1) of the tokens themselves, fp32 [B] for all tokens of a sample or [B, T] per token.
    ``sigma``: the noise level of the step, fp32 [B]; the other stream's gate follows it.
    """

    latents: Tensor
    timestep: Tensor
    sigma: Tensor
    context: Tensor


class LTX2Transformer(nn.Module):
    """48 blocks of two coupled streams at full size; parameter names are those of the official checkpoint."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        video, audio = config.width, config.audio_width
        self.patchify_proj = nn.Linear(config.in_channels, video)
        self.audio_patchify_proj = nn.Linear(config.audio_in_channels, audio)
        self.caption_projection = Projection(config.caption_channels, video, gelu)
        self.audio_caption_projection = Projection(config.caption_channels, audio, gelu)
        self.adaln_single = AdaLayerNorm(video, 6)
        self.audio_adaln_single = AdaLayerNorm(audio, 6)
        self.av_ca_video_scale_shift_adaln_single = AdaLayerNorm(video, 4)
        self.av_ca_audio_scale_shift_adaln_single = AdaLayerNorm(audio, 4)
        self.av_ca_a2v_gate_adaln_single = AdaLayerNorm(video, 1)
        self.av_ca_v2a_gate_adaln_single = AdaLayerNorm(audio, 1)
        self.transformer_blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.scale_shift_table = nn.Parameter(torch.empty(2, video))
        self.audio_scale_shift_table = nn.Parameter(torch.empty(2, audio))
        self.proj_out = nn.Linear(video, config.out_channels)
        self.audio_proj_out = nn.Linear(audio, config.audio_out_channels)
        self._rope_cache: TableCache[RopeTables] = TableCache(size=4)

    def rope_tables(self, geometry: Geometry, device: torch.device | str, dtype: torch.dtype) -> RopeTables:
        """The position tables of ``geometry``, built at the first call and kept for the four geometries used last.

        ``dtype`` is that of the activations: the official code rotates in it. A second call copies nothing.
        """
        # "cuda" and "cuda:0" name one device; an empty tensor knows which.
        device = torch.empty(0, device=device).device
        return self._rope_cache.get((geometry, device, dtype), lambda: self._build_rope(geometry, device, dtype))

    def _build_rope(self, geometry: Geometry, device: torch.device, dtype: torch.dtype) -> RopeTables:
        config = self.config
        seconds = max(config.rope_max_pos[0], config.audio_rope_max_pos)

        def table(positions: Tensor, max_positions: tuple[float, ...], width: int) -> Rope:
            heads, theta, float64 = config.num_attention_heads, config.rope_theta, config.rope_float64
            return rope_table(positions, max_positions, width, heads, theta, float64, dtype)

        video, audio = video_positions(geometry, device), audio_positions(geometry, device)
        return RopeTables(
            video=table(video, config.rope_max_pos, config.width),
            audio=table(audio, (config.audio_rope_max_pos,), config.audio_width),
            video_cross=table(video[:1], (seconds,), config.audio_width),
            audio_cross=table(audio, (seconds,), config.audio_width),
        )

    def forward(
        self, video: Stream | None, audio: Stream | None, rope: RopeTables
    ) -> tuple[Tensor | None, Tensor | None]:
        """Velocities of ``video`` [B, S, C] and ``audio`` [B, A, C], in the dtype of the latents.

        A stream that is None is not computed and the attentions between the streams are left out.

        Raises:
            ValueError: no stream is given, or ``rope`` was built for another number of tokens.
        """
        if video is None and audio is None:
            raise ValueError("the transformer got neither a video nor an audio stream; pass at least one of them")
        _check_tokens("video", video, rope.video)
        _check_tokens("audio", audio, rope.audio)
        x = a = x_embedded = a_embedded = x_conditioning = a_conditioning = None
        if video is not None:
            x = self.patchify_proj(video.latents)
            modulation, x_embedded = self.adaln_single(self._own_sinusoid(video))
            x_conditioning = Conditioning(self.caption_projection(video.context), modulation, rope.video)
        if audio is not None:
            a = self.audio_patchify_proj(audio.latents)
            modulation, a_embedded = self.audio_adaln_single(self._own_sinusoid(audio))
            a_conditioning = Conditioning(self.audio_caption_projection(audio.context), modulation, rope.audio)
        cross = None if video is None or audio is None else self._condition_cross(video, audio, rope)
        for block in self.transformer_blocks:
            x, a = block(x, a, x_conditioning, a_conditioning, cross)
        if x is not None:
            x = self.proj_out(self._head(x, x_embedded, self.scale_shift_table))
        if a is not None:
            a = self.audio_proj_out(self._head(a, a_embedded, self.audio_scale_shift_table))
        return x, a

    def _condition_cross(
        self, video: Stream, audio: Stream, rope: RopeTables
    ) -> tuple[CrossConditioning, CrossConditioning]:
        # Scale and shift follow a stream's own timesteps, its gate the noise level of the other one.
        return CrossConditioning(
            self.av_ca_video_scale_shift_adaln_single(self._own_sinusoid(video))[0],
            self.av_ca_a2v_gate_adaln_single(self._gate_sinusoid(audio))[0],
            rope.video_cross,
        ), CrossConditioning(
            self.av_ca_audio_scale_shift_adaln_single(self._own_sinusoid(audio))[0],
            self.av_ca_v2a_gate_adaln_single(self._gate_sinusoid(video))[0],
            rope.audio_cross,
        )

    def _own_sinusoid(self, stream: Stream) -> Tensor:
        """Embedding of the stream's own timesteps, [B, T, K], or [B, 1, K] where a sample's tokens share one."""
        # One row then serves them all: rows of 15360 tokens would take 0.75 GB.
        timestep = stream.timestep if stream.timestep.ndim == 2 else stream.timestep.unsqueeze(1)
        return sinusoid(timestep * self.config.timestep_scale_multiplier, stream.latents.dtype)

    def _gate_sinusoid(self, other: Stream) -> Tensor:
        """Embedding of the other stream's noise level for this stream's gate, [B, 1, K]."""
        scale = self.config.timestep_scale_multiplier
        gate_scale = self.config.av_timestep_scale_multiplier / scale
        return sinusoid(other.sigma.unsqueeze(1) * scale * gate_scale, other.latents.dtype)

    def _head(self, x: Tensor, embedded: Tensor | None, table: Tensor) -> Tensor:
        assert embedded is not None
        shift, scale = (table + embedded.unsqueeze(2)).unbind(2)
        return modulated(F.layer_norm(x, (x.shape[-1],), eps=self.config.norm_eps), scale, shift)


def _check_tokens(name: str, stream: Stream | None, rope: Rope) -> None:
    tokens = rope[0].shape[2]
    if stream is not None and stream.latents.shape[1] != tokens:
        raise ValueError(
            f"the {name} stream has {stream.latents.shape[1]} tokens and the position tables {tokens}; "
            f"build the tables from the geometry of these latents"
        )
