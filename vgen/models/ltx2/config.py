"""Sizes of every LTX-2 part as frozen records, which the modules are built from; needs no torch.

Two dialects describe one architecture and end in the same records: the ``config`` JSON in the header of an official
single file (``config_official``), and the ``config.json`` files of a diffusers folder (``config_diffusers``). Values
that change no tensor shape (the audio-video timestep multiplier, the RoPE precision, the connectors' maximum position)
are required rather than defaulted there: a wrong one would load and run silently wrong.
"""

from dataclasses import dataclass
from typing import Literal

VIDEO_COMPRESSION = (8, 32, 32)
"""Pixels per latent along time, height and width (time: after the first frame)."""

AUDIO_LATENTS_PER_SECOND = 25
AUDIO_COMPRESSION = 4
"""Mel frames per audio latent (and mel bins per latent bin)."""


Version = Literal["2.0", "2.3"]


@dataclass(frozen=True)
class TransformerConfig:
    num_layers: int
    num_attention_heads: int
    attention_head_dim: int
    audio_attention_head_dim: int
    in_channels: int
    out_channels: int
    audio_in_channels: int
    audio_out_channels: int
    caption_channels: int
    norm_eps: float
    rope_theta: float
    rope_max_pos: tuple[float, float, float]
    audio_rope_max_pos: float
    rope_float64: bool
    timestep_scale_multiplier: float
    av_timestep_scale_multiplier: float
    gated_attention: bool = False
    """2.3: a gate per head, from the queries' input, on the output of every attention."""
    cross_attention_adaln: bool = False
    """2.3: nine modulation rows instead of six, and text modulated by the noise level."""
    caption_projection: bool = True
    """2.0: the transformer projects the text; in 2.3 it arrives in the streams' widths."""

    @property
    def width(self) -> int:
        return self.num_attention_heads * self.attention_head_dim

    @property
    def audio_width(self) -> int:
        return self.num_attention_heads * self.audio_attention_head_dim


@dataclass(frozen=True)
class ConnectorConfig:
    """One text connector (video or audio): a small transformer over the projected text states."""

    num_layers: int
    num_attention_heads: int
    attention_head_dim: int
    num_registers: int
    rope_max_pos: float
    rope_theta: float
    rope_float64: bool
    norm_eps: float
    gated_attention: bool = False

    @property
    def width(self) -> int:
        return self.num_attention_heads * self.attention_head_dim


@dataclass(frozen=True)
class DecoderBlock:
    """One entry of the video decoder in execution order.

    ``kind``: ``res_x`` (``num_layers`` residual blocks), or depth-to-space by 2 with channels divided by
    ``multiplier`` and, with ``residual``, the rearranged input added: ``compress_all`` along time, height and width,
    ``compress_time`` and ``compress_space`` along those alone.
    """

    kind: str
    num_layers: int = 1
    multiplier: int = 1
    residual: bool = False


@dataclass(frozen=True)
class VideoDecoderConfig:
    latent_channels: int
    out_channels: int
    base_channels: int
    patch_size: int
    blocks: tuple[DecoderBlock, ...]
    spatial_padding_mode: str
    causal: bool

    @property
    def min_latents_per_axis(self) -> int:
        """Least latents along height and width: one row cannot be reflected."""
        return 2 if self.spatial_padding_mode == "reflect" else 1


@dataclass(frozen=True)
class EncoderBlock:
    """One entry of the video encoder in execution order.

    ``kind``: ``res_x`` (``num_layers`` residual blocks), or space-to-depth by 2 with channels times ``multiplier``
    beside the averaged input: ``compress_all_res``, ``compress_time_res``, ``compress_space_res``.
    """

    kind: str
    num_layers: int = 1
    multiplier: int = 1


@dataclass(frozen=True)
class VideoEncoderConfig:
    """``latent_channels`` is also the width after the first convolution, as in the official code."""

    in_channels: int
    latent_channels: int
    patch_size: int
    blocks: tuple[EncoderBlock, ...]
    spatial_padding_mode: str


@dataclass(frozen=True)
class AudioDecoderConfig:
    base_channels: int
    channel_multipliers: tuple[int, ...]
    num_res_blocks: int
    out_channels: int
    latent_channels: int
    mel_bins: int
    sample_rate: int
    mel_hop_length: int

    @property
    def latent_mel_bins(self) -> int:
        return self.mel_bins // AUDIO_COMPRESSION


@dataclass(frozen=True)
class AudioEncoderConfig:
    base_channels: int
    channel_multipliers: tuple[int, ...]
    num_res_blocks: int
    in_channels: int
    latent_channels: int
    mel_bins: int
    sample_rate: int
    mel_hop_length: int
    n_fft: int

    @property
    def latent_mel_bins(self) -> int:
        return self.mel_bins // AUDIO_COMPRESSION


FinalActivation = Literal["tanh", "clamp", "none"]


@dataclass(frozen=True)
class VocoderConfig:
    """``resblock``: ``1`` is HiFi-GAN with leaky ReLUs (2.0), ``AMP1`` BigVGAN with anti-aliased SnakeBeta (2.3).

    ``final_activation`` bounds the waveform: the official code clamps 2.3's to -1 to 1 where the file asks for no tanh.
    """

    in_channels: int
    out_channels: int
    initial_channels: int
    upsample_rates: tuple[int, ...]
    upsample_kernel_sizes: tuple[int, ...]
    resblock_kernel_sizes: tuple[int, ...]
    resblock_dilations: tuple[tuple[int, ...], ...]
    output_sample_rate: int
    resblock: Literal["1", "AMP1"] = "1"
    final_activation: FinalActivation = "tanh"
    final_bias: bool = True


@dataclass(frozen=True)
class BandwidthExtensionConfig:
    """2.3: a second generator that adds the band above ``input_sample_rate / 2`` (Hz) to the vocoder's waveform."""

    generator: VocoderConfig
    input_sample_rate: int
    output_sample_rate: int
    mel_bins: int
    n_fft: int
    win_length: int
    hop_length: int


@dataclass(frozen=True)
class UpsamplerConfig:
    """A latent upsampler's own file. ``spatial_scale`` 2.0 or 1.5; ``rational`` resamples by the 2.0 files' blur."""

    in_channels: int
    mid_channels: int
    num_blocks_per_stage: int
    spatial: bool
    temporal: bool
    spatial_scale: float
    rational: bool


@dataclass(frozen=True)
class LTX2Config:
    """All parts of one LTX-2 checkpoint except the Gemma text encoder, which brings its own config.

    ``version``: ``2.0`` (19B) or ``2.3`` (22B). ``text_projection``: one projection of Gemma's states for both streams
    (2.0) or one each (2.3). ``bandwidth_extension`` is 2.3's.
    """

    version: Version
    transformer: TransformerConfig
    text_projection: Literal["shared", "per_modality"]
    video_connector: ConnectorConfig
    audio_connector: ConnectorConfig
    video_encoder: VideoEncoderConfig
    video_decoder: VideoDecoderConfig
    audio_encoder: AudioEncoderConfig
    audio_decoder: AudioDecoderConfig
    vocoder: VocoderConfig
    bandwidth_extension: BandwidthExtensionConfig | None
