"""The LTX-2 transformer: predicts the velocities of a video and an audio stream.

One set of modules is 2.0 and 2.3; the switches of ``TransformerConfig`` say which parts it has.

Shapes: B batch, S video tokens, A audio tokens, T tokens of the stream at hand, R its distinct timesteps, L text
tokens, C latent channels, K sinusoid channels, D model width of the stream at hand.
Source: Lightricks/LTX-2 at 400fd31, ``model/transformer/{model,transformer_args}.py``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vgen.models.attention import Attention, KeysValues, Rope
from vgen.models.ltx2.adaln import AdaLayerNorm, sinusoid
from vgen.models.ltx2.block import BASE_ROWS, TEXT_ROWS, Block, Conditioning, CrossConditioning
from vgen.models.ltx2.config import TransformerConfig
from vgen.models.ltx2.geometry import Geometry
from vgen.models.ltx2.perturbation import Perturbation, PerturbationPlan, plan_perturbations
from vgen.models.ltx2.rope import RopeTables, audio_positions, rope_table, video_positions
from vgen.models.modulation import Modulation, modulated
from vgen.models.projection import Projection, gelu
from vgen.models.stream import check_tokens
from vgen.models.tables import TableCache


@dataclass(frozen=True, eq=False)
class TextKeysValues:
    """One text as every block's text attention of one stream reads it, where no noise level changes it."""

    blocks: tuple[KeysValues, ...]


@dataclass(frozen=True, eq=False)
class Stream:
    """One modality's input; latents [B, T, C] and text in the model's dtype.

    ``timestep``: the sigmas (0 to 1) of the tokens themselves, fp32: [B], one for all tokens of a sample; or [B, R] and
    ``rows``, int64 [B, T], which of the R each token has; or [B, T] without ``rows``, which computes the modulation of
    every token and is the same to the last bit.
    ``sigma``: the noise level of the step, fp32 [B]; the other stream's gate and, in 2.3, the text follow it.
    ``context``: [B, L, caption channels], in 2.3 [B, L, D]; or what ``prepare_text`` made of it.
    ``enabled``: False leaves the tokens as they are put in; the other stream reads them in every block.
    """

    latents: Tensor
    timestep: Tensor
    sigma: Tensor
    context: Tensor | TextKeysValues
    rows: Tensor | None = None
    enabled: bool = True


class LTX2Transformer(nn.Module):
    """48 blocks of two coupled streams at full size; parameter names are those of the official checkpoint."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        video, audio = config.width, config.audio_width
        self.patchify_proj = nn.Linear(config.in_channels, video)
        self.audio_patchify_proj = nn.Linear(config.audio_in_channels, audio)
        self.caption_projection = self.audio_caption_projection = None
        if config.caption_projection:
            self.caption_projection = Projection(config.caption_channels, video, gelu)
            self.audio_caption_projection = Projection(config.caption_channels, audio, gelu)
        rows = BASE_ROWS + (TEXT_ROWS if config.cross_attention_adaln else 0)
        self.adaln_single = AdaLayerNorm(video, rows)
        self.audio_adaln_single = AdaLayerNorm(audio, rows)
        self.prompt_adaln_single = self.audio_prompt_adaln_single = None
        if config.cross_attention_adaln:
            self.prompt_adaln_single = AdaLayerNorm(video, 2)
            self.audio_prompt_adaln_single = AdaLayerNorm(audio, 2)
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
        self._perturbation_cache: TableCache[PerturbationPlan] = TableCache(size=8)

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

    def perturbation_plan(self, perturbations: Sequence[Perturbation], device: torch.device | str) -> PerturbationPlan:
        """The flags and masks of ``perturbations`` (one per sample), built at the first call; the last eight are kept.

        A captured region reads the masks where they lie: keep the plan for as long as the region is replayed.

        Raises:
            ValueError: a block number is not one of this model's blocks.
        """
        samples, device = tuple(perturbations), torch.empty(0, device=device).device
        return self._perturbation_cache.get(
            (samples, device), lambda: plan_perturbations(samples, self.config.num_layers, device)
        )

    def prepare_text(self, context: Tensor, modality: Literal["video", "audio"]) -> Tensor | TextKeysValues:
        """What ``Stream.context`` takes in place of ``context`` [B, L, caption channels or D], with the same result.

        Where no noise level modulates the text (2.0), these are its keys and values in every block: computed once per
        prompt instead of once per step. In 2.3 it is ``context`` itself.
        """
        if self.config.cross_attention_adaln:
            return context
        video = modality == "video"
        projected = _projected(context, self.caption_projection if video else self.audio_caption_projection)
        keys_values = []
        for block in self.transformer_blocks:
            attention = block.get_submodule("attn2" if video else "audio_attn2")
            assert isinstance(attention, Attention)
            keys_values.append(attention.keys_values(projected))
        return TextKeysValues(tuple(keys_values))

    def forward(
        self,
        video: Stream | None,
        audio: Stream | None,
        rope: RopeTables,
        perturbations: Sequence[Perturbation] | PerturbationPlan = (),
    ) -> tuple[Tensor | None, Tensor | None]:
        """Velocities of ``video`` [B, S, C] and ``audio`` [B, A, C], in the dtype of the latents.

        A stream that is None is not computed and the attentions between the streams are left out. The velocity of a
        stream that is not enabled is, as in the official code, that of tokens no block has changed: of no use.
        ``perturbations``: one per sample, or none.

        Raises:
            ValueError: no stream is given, or the numbers of tokens, timesteps, samples or blocks do not fit.
        """
        stream = video or audio
        if stream is None:
            raise ValueError("the transformer got neither a video nor an audio stream; pass at least one of them")
        for name, one, table in (("video stream", video, rope.video), ("audio stream", audio, rope.audio)):
            if one is not None:
                check_tokens(name, one.latents, one.timestep, one.rows, table)
        if not isinstance(perturbations, PerturbationPlan):
            perturbations = self.perturbation_plan(perturbations, stream.latents.device)
        _check_samples(stream, perturbations)
        x = a = x_timestep = a_timestep = None
        x_conditionings: Sequence[Conditioning | None] = [None] * len(self.transformer_blocks)
        a_conditionings = x_conditionings
        if video is not None:
            x = self.patchify_proj(video.latents)
            rows, x_timestep = self._modulate(video, self.adaln_single)
            x_conditionings = self._condition(
                video, rows, rope.video, self.prompt_adaln_single, self.caption_projection
            )
        if audio is not None:
            a = self.audio_patchify_proj(audio.latents)
            rows, a_timestep = self._modulate(audio, self.audio_adaln_single)
            a_conditionings = self._condition(
                audio, rows, rope.audio, self.audio_prompt_adaln_single, self.audio_caption_projection
            )
        cross = None if video is None or audio is None else self._condition_cross(video, audio, rope)
        for block, x_conditioning, a_conditioning, keep in zip(
            self.transformer_blocks, x_conditionings, a_conditionings, perturbations.blocks, strict=True
        ):
            x, a = block(x, a, x_conditioning, a_conditioning, cross, keep)
        if x is not None and x_timestep is not None:
            x = self.proj_out(self._head(x, x_timestep, self.scale_shift_table))
        if a is not None and a_timestep is not None:
            a = self.audio_proj_out(self._head(a, a_timestep, self.audio_scale_shift_table))
        return x, a

    def _modulate(self, stream: Stream, adaln: AdaLayerNorm) -> tuple[Modulation, Modulation]:
        """The rows of the stream's own timesteps, and their embedding as one row."""
        timestep, lookup = stream.timestep, stream.rows
        if timestep.ndim == 1:
            timestep = timestep.unsqueeze(1)
        if lookup is not None:
            lookup = lookup + torch.arange(len(timestep), device=lookup.device).unsqueeze(1) * timestep.shape[1]
        rows, embedded = adaln(self._sinusoid(timestep, stream))
        return Modulation(rows, lookup), Modulation(embedded.unsqueeze(2), lookup)

    def _condition(
        self,
        stream: Stream,
        modulation: Modulation,
        rope: Rope,
        prompt_adaln: AdaLayerNorm | None,
        caption_projection: Projection | None,
    ) -> Sequence[Conditioning | None]:
        """What each block sees of a stream; nothing where the stream is not enabled."""
        num_layers = len(self.transformer_blocks)
        if not stream.enabled:
            return [None] * num_layers
        prompt = None
        if prompt_adaln is not None:
            prompt = Modulation(prompt_adaln(self._sinusoid(stream.sigma.unsqueeze(1), stream))[0])
        if isinstance(stream.context, TextKeysValues):
            return [Conditioning(text, modulation, prompt, rope) for text in stream.context.blocks]
        context = _projected(stream.context, caption_projection)
        return [Conditioning(context, modulation, prompt, rope)] * num_layers

    def _condition_cross(
        self, video: Stream, audio: Stream, rope: RopeTables
    ) -> tuple[CrossConditioning, CrossConditioning]:
        # Scale and shift follow a stream's own timesteps, its gate the noise level of the other one.
        return CrossConditioning(
            self._modulate(video, self.av_ca_video_scale_shift_adaln_single)[0],
            self._modulate_gate(audio, self.av_ca_a2v_gate_adaln_single),
            rope.video_cross,
        ), CrossConditioning(
            self._modulate(audio, self.av_ca_audio_scale_shift_adaln_single)[0],
            self._modulate_gate(video, self.av_ca_v2a_gate_adaln_single),
            rope.audio_cross,
        )

    def _modulate_gate(self, other: Stream, adaln: AdaLayerNorm) -> Modulation:
        factor = self.config.av_timestep_scale_multiplier / self.config.timestep_scale_multiplier
        return Modulation(adaln(self._sinusoid(other.sigma.unsqueeze(1), other, factor))[0])

    def _sinusoid(self, sigma_BR: Tensor, stream: Stream, factor: float = 1.0) -> Tensor:
        """Embedding [B, R, K] of sigmas, in the dtype of the stream's latents."""
        return sinusoid(sigma_BR * self.config.timestep_scale_multiplier * factor, stream.latents.dtype)

    def _head(self, x: Tensor, timestep: Modulation, table: Tensor) -> Tensor:
        shift, scale = timestep.of(table)
        return modulated(F.layer_norm(x, (x.shape[-1],), eps=self.config.norm_eps), scale, shift)


def _projected(context: Tensor, projection: Projection | None) -> Tensor:
    return context if projection is None else projection(context)


def _check_samples(stream: Stream, plan: PerturbationPlan) -> None:
    samples = len(stream.latents)
    if plan.num_samples not in (None, samples):
        raise ValueError(
            f"the batch has {samples} samples and {plan.num_samples} perturbations; give one per sample, or none"
        )
