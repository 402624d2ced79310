"""Sizes of every LTX-2 part, read from a checkpoint's own metadata; needs no torch.

Two dialects describe one architecture: the ``config`` JSON in the header of an official single file, and the
``config.json`` files of a diffusers folder. Both end in the same frozen records, which the modules are built from.
Values that change no tensor shape (the audio-video timestep multiplier, the RoPE precision, the connectors' maximum
position, the decoder's padding) are required rather than defaulted: a wrong one would load and run silently wrong.

Source of names and values: Lightricks/LTX-2 at 400fd31 (``*/model_configurator.py``), huggingface/diffusers 0.42.1.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

VIDEO_COMPRESSION = (8, 32, 32)
"""Pixels per latent along time, height and width (time: after the first frame)."""

AUDIO_LATENTS_PER_SECOND = 25
AUDIO_COMPRESSION = 4
"""Mel frames per audio latent (and mel bins per latent bin)."""


class ConfigError(ValueError):
    """A checkpoint describes an architecture that is incomplete or that this code does not build."""


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

    @property
    def width(self) -> int:
        return self.num_attention_heads * self.attention_head_dim


@dataclass(frozen=True)
class DecoderBlock:
    """One entry of the video decoder in execution order.

    ``kind``: ``res_x`` (``num_layers`` residual blocks) or ``compress_all`` (depth-to-space by 2 along all axes,
    channels divided by ``multiplier``, ``residual`` adds the rearranged input).
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
class VocoderConfig:
    in_channels: int
    out_channels: int
    initial_channels: int
    upsample_rates: tuple[int, ...]
    upsample_kernel_sizes: tuple[int, ...]
    resblock_kernel_sizes: tuple[int, ...]
    resblock_dilations: tuple[tuple[int, ...], ...]
    output_sample_rate: int


@dataclass(frozen=True)
class LTX2Config:
    """All parts of one LTX-2 2.0 checkpoint except the Gemma text encoder, which brings its own config."""

    transformer: TransformerConfig
    video_connector: ConnectorConfig
    audio_connector: ConnectorConfig
    video_decoder: VideoDecoderConfig
    audio_decoder: AudioDecoderConfig
    vocoder: VocoderConfig


_FIXED_TRANSFORMER = {
    "dropout": 0.0,
    "attention_bias": True,
    "num_vector_embeds": None,
    "activation_fn": "gelu-approximate",
    "num_embeds_ada_norm": 1000,
    "use_linear_projection": False,
    "only_cross_attention": False,
    "cross_attention_norm": True,
    "double_self_attention": False,
    "upcast_attention": False,
    "standardization_norm": "rms_norm",
    "norm_elementwise_affine": False,
    "qk_norm": "rms_norm",
    "positional_embedding_type": "rope",
    "use_audio_video_cross_attention": True,
    "share_ff": False,
    "av_cross_ada_norm": True,
    "use_middle_indices_grid": True,
    "rope_type": "split",
    "ff_bias": True,
    "audio_ff_bias": True,
    "use_keyframes_abs_pos_embedding": False,
}
_FIXED_DIFFUSERS_TRANSFORMER = {
    "activation_fn": "gelu-approximate",
    "qk_norm": "rms_norm_across_heads",
    "norm_elementwise_affine": False,
    "attention_bias": True,
    "attention_out_bias": True,
    "ff_bias": True,
    "audio_ff_bias": True,
    "use_prompt_embeddings": True,
    "use_keyframes_abs_pos_embedding": False,
    "causal_offset": 1,
    "patch_size": 1,
    "patch_size_t": 1,
    "vae_scale_factors": [8, 32, 32],
    "audio_patch_size": 1,
    "audio_patch_size_t": 1,
    "audio_scale_factor": AUDIO_COMPRESSION,
    "audio_sampling_rate": 16000,
    "audio_hop_length": 160,
}
_LTX2_3_SWITCHES = ("apply_gated_attention", "cross_attention_adaln", "caption_proj_before_connector")


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    if not isinstance(section, Mapping):
        raise ConfigError(
            f"the checkpoint's config has no '{name}' section; LTX-2 needs transformer, vae, audio_vae and vocoder: "
            f"use an official LTX-2 2.0 file"
        )
    return section


def _require(section: Mapping[str, Any], where: str, key: str) -> Any:
    if key not in section:
        raise ConfigError(
            f"the checkpoint's config lacks '{where}.{key}', which no tensor shape reveals; "
            f"use a file with complete metadata"
        )
    return section[key]


def _check_fixed(section: Mapping[str, Any], where: str, fixed: Mapping[str, Any]) -> None:
    for key, value in fixed.items():
        if key in section and section[key] != value:
            raise ConfigError(
                f"the checkpoint's config has {where}.{key}={section[key]!r}; this LTX-2 code builds {value!r} only"
            )


def from_official(config: Mapping[str, Any]) -> LTX2Config:
    """Read the ``config`` JSON object of an official single file's header.

    Raises:
        ConfigError: a section or a required value is missing, or a value describes another architecture.
    """
    transformer = _section(config, "transformer")
    vae = _section(config, "vae")
    vocoder = _section(config, "vocoder")
    _check_fixed(transformer, "transformer", _FIXED_TRANSFORMER)
    for switch in _LTX2_3_SWITCHES:
        if transformer.get(switch, False):
            raise ConfigError(
                f"the checkpoint's config sets transformer.{switch}, so it is LTX-2.3; "
                f"this version runs LTX-2 2.0 files (ltx-2-19b-dev.safetensors)"
            )
    float64 = _require(transformer, "transformer", "frequencies_precision") == "float64"
    heads = _require(transformer, "transformer", "num_attention_heads")
    if transformer.get("audio_num_attention_heads", heads) != heads:
        raise ConfigError(
            f"the checkpoint's config has {transformer['audio_num_attention_heads']} audio heads and {heads} video "
            f"heads; audio-video attention needs equal numbers"
        )
    t = "transformer"
    return LTX2Config(
        transformer=TransformerConfig(
            num_layers=_require(transformer, t, "num_layers"),
            num_attention_heads=heads,
            attention_head_dim=_require(transformer, t, "attention_head_dim"),
            audio_attention_head_dim=_require(transformer, t, "audio_attention_head_dim"),
            in_channels=transformer.get("in_channels", 128),
            out_channels=transformer.get("out_channels", 128),
            audio_in_channels=transformer.get("audio_in_channels", 128),
            audio_out_channels=transformer.get("audio_out_channels", 128),
            caption_channels=_require(transformer, t, "caption_channels"),
            norm_eps=transformer.get("norm_eps", 1e-6),
            rope_theta=float(transformer.get("positional_embedding_theta", 10000.0)),
            rope_max_pos=_max_pos(_require(transformer, t, "positional_embedding_max_pos")),
            audio_rope_max_pos=float(_require(transformer, t, "audio_positional_embedding_max_pos")[0]),
            rope_float64=float64,
            timestep_scale_multiplier=transformer.get("timestep_scale_multiplier", 1000),
            av_timestep_scale_multiplier=_require(transformer, t, "av_ca_timestep_scale_multiplier"),
        ),
        video_connector=_official_connector(transformer, "", float64),
        audio_connector=_official_connector(transformer, "audio_", float64),
        video_decoder=_official_video_decoder(vae),
        audio_decoder=_official_audio_decoder(_section(config, "audio_vae")),
        vocoder=_official_vocoder(vocoder),
    )


def _max_pos(values: Any) -> tuple[float, float, float]:
    time, height, width = (float(value) for value in values)
    return time, height, width


def _official_connector(transformer: Mapping[str, Any], prefix: str, float64: bool) -> ConnectorConfig:
    def value(name: str, default: int) -> int:
        return transformer.get(f"{prefix}connector_{name}", transformer.get(f"connector_{name}", default))

    if transformer.get("connector_apply_gated_attention", False):
        raise ConfigError("the checkpoint's config sets transformer.connector_apply_gated_attention, so it is LTX-2.3")
    return ConnectorConfig(
        num_layers=value("num_layers", 2),
        num_attention_heads=value("num_attention_heads", 30),
        attention_head_dim=value("attention_head_dim", 128),
        num_registers=value("num_learnable_registers", 128),
        rope_max_pos=float(_require(transformer, "transformer", "connector_positional_embedding_max_pos")[0]),
        rope_theta=float(transformer.get("positional_embedding_theta", 10000.0)),
        rope_float64=float64,
        norm_eps=1e-6,
    )


def _official_video_decoder(vae: Mapping[str, Any]) -> VideoDecoderConfig:
    _check_fixed(vae, "vae", {"_class_name": "CausalVideoAutoencoder", "dims": 3, "norm_layer": "pixel_norm"})
    if _require(vae, "vae", "timestep_conditioning"):
        raise ConfigError("the checkpoint's config sets vae.timestep_conditioning; LTX-2 decoders have none")
    return VideoDecoderConfig(
        latent_channels=vae.get("latent_channels", 128),
        out_channels=vae.get("out_channels", 3),
        base_channels=vae.get("decoder_base_channels", 128),
        patch_size=vae.get("patch_size", 4),
        blocks=tuple(_official_block(entry) for entry in reversed(_require(vae, "vae", "decoder_blocks"))),
        # A file without the key is a 2.0 file: its decoder reflects. A flat key, where present, decides.
        spatial_padding_mode=vae.get("spatial_padding_mode", "reflect"),
        causal=vae.get("causal_decoder", False),
    )


def _official_block(entry: Any) -> DecoderBlock:
    kind, options = entry
    options = {"num_layers": options} if isinstance(options, int) else dict(options)
    if options.get("inject_noise", False):
        raise ConfigError(f"the checkpoint's decoder block '{kind}' injects noise; LTX-2 decoders do not")
    if kind not in ("res_x", "compress_all"):
        raise ConfigError(
            f"the checkpoint's config has the decoder block '{kind}'; LTX-2 2.0 has res_x and compress_all"
        )
    return DecoderBlock(
        kind=kind,
        num_layers=options.get("num_layers", 1),
        multiplier=options.get("multiplier", 1),
        residual=options.get("residual", False),
    )


def _official_audio_decoder(audio_vae: Mapping[str, Any]) -> AudioDecoderConfig:
    params = audio_vae.get("model", {}).get("params", {})
    sizes = params.get("ddconfig")
    if not isinstance(sizes, Mapping):
        raise ConfigError("the checkpoint's config lacks 'audio_vae.model.params.ddconfig'; use an official file")
    preprocessing = audio_vae.get("preprocessing", {})
    mel_bins = sizes.get("mel_bins") or preprocessing.get("mel", {}).get("n_mel_channels")
    if mel_bins is None:
        raise ConfigError("the checkpoint's config has no number of mel bins (audio_vae...ddconfig.mel_bins)")
    _check_fixed(
        sizes,
        "audio_vae.ddconfig",
        {"norm_type": "pixel", "causality_axis": "height", "mid_block_add_attention": False, "attn_resolutions": []},
    )
    return AudioDecoderConfig(
        base_channels=sizes.get("ch", 128),
        channel_multipliers=tuple(sizes.get("ch_mult", (1, 2, 4))),
        num_res_blocks=sizes.get("num_res_blocks", 2),
        out_channels=sizes.get("out_ch", 2),
        latent_channels=sizes.get("z_channels", 8),
        mel_bins=mel_bins,
        sample_rate=params.get("sampling_rate", 16000),
        mel_hop_length=preprocessing.get("stft", {}).get("hop_length", 160),
    )


def _official_vocoder(vocoder: Mapping[str, Any]) -> VocoderConfig:
    if "bwe" in vocoder:
        raise ConfigError("the checkpoint's vocoder extends the bandwidth, so it is LTX-2.3; this version runs 2.0")
    _check_fixed(vocoder, "vocoder", {"resblock": "1", "stereo": True})
    return VocoderConfig(
        in_channels=128,
        out_channels=2,
        initial_channels=vocoder.get("upsample_initial_channel", 1024),
        upsample_rates=tuple(vocoder.get("upsample_rates", (6, 5, 2, 2, 2))),
        upsample_kernel_sizes=tuple(vocoder.get("upsample_kernel_sizes", (16, 15, 8, 4, 4))),
        resblock_kernel_sizes=tuple(vocoder.get("resblock_kernel_sizes", (3, 7, 11))),
        resblock_dilations=tuple(
            tuple(dilations) for dilations in vocoder.get("resblock_dilation_sizes", ((1, 3, 5),) * 3)
        ),
        output_sample_rate=vocoder.get("output_sampling_rate", 24000),
    )


def from_diffusers(configs: Mapping[str, Mapping[str, Any]]) -> LTX2Config:
    """Read the ``config.json`` of each folder of a diffusers checkpoint, keyed by folder name.

    Folders: ``transformer``, ``connectors``, ``vae``, ``audio_vae``, ``vocoder``.

    Raises:
        ConfigError: a folder or a required value is missing, or a value describes another architecture.
    """
    transformer = _section(configs, "transformer")
    connectors = _section(configs, "connectors")
    for switch in ("gated_attn", "cross_attn_mod", "audio_gated_attn", "audio_cross_attn_mod"):
        if transformer.get(switch, False):
            raise ConfigError(f"transformer/config.json sets {switch}, so it is LTX-2.3; this version runs LTX-2 2.0")
    t = "transformer"
    _check_fixed(transformer, t, _FIXED_DIFFUSERS_TRANSFORMER)
    if _require(transformer, t, "rope_type") != "split":
        raise ConfigError(f"transformer/config.json has rope_type={transformer['rope_type']!r}; LTX-2 uses 'split'")
    if transformer.get("audio_num_attention_heads") != _require(transformer, t, "num_attention_heads"):
        raise ConfigError("transformer/config.json has different numbers of audio and video heads")
    return LTX2Config(
        transformer=TransformerConfig(
            num_layers=_require(transformer, t, "num_layers"),
            num_attention_heads=transformer["num_attention_heads"],
            attention_head_dim=_require(transformer, t, "attention_head_dim"),
            audio_attention_head_dim=_require(transformer, t, "audio_attention_head_dim"),
            in_channels=_require(transformer, t, "in_channels"),
            out_channels=transformer.get("out_channels") or transformer["in_channels"],
            audio_in_channels=_require(transformer, t, "audio_in_channels"),
            audio_out_channels=transformer.get("audio_out_channels") or transformer["audio_in_channels"],
            caption_channels=_require(transformer, t, "caption_channels"),
            norm_eps=_require(transformer, t, "norm_eps"),
            rope_theta=float(_require(transformer, t, "rope_theta")),
            rope_max_pos=_max_pos(
                _require(transformer, t, key) for key in ("pos_embed_max_pos", "base_height", "base_width")
            ),
            audio_rope_max_pos=float(_require(transformer, t, "audio_pos_embed_max_pos")),
            rope_float64=_require(transformer, t, "rope_double_precision"),
            timestep_scale_multiplier=_require(transformer, t, "timestep_scale_multiplier"),
            av_timestep_scale_multiplier=_require(transformer, t, "cross_attn_timestep_scale_multiplier"),
        ),
        video_connector=_diffusers_connector(connectors, "video"),
        audio_connector=_diffusers_connector(connectors, "audio"),
        video_decoder=_diffusers_video_decoder(_section(configs, "vae")),
        audio_decoder=_diffusers_audio_decoder(_section(configs, "audio_vae")),
        vocoder=_diffusers_vocoder(_section(configs, "vocoder")),
    )


def _diffusers_connector(connectors: Mapping[str, Any], modality: str) -> ConnectorConfig:
    c = "connectors"
    if connectors.get("per_modality_projections", False) or connectors.get(f"{modality}_gated_attn", False):
        raise ConfigError("connectors/config.json is of LTX-2.3; this version runs LTX-2 2.0")
    if _require(connectors, c, "rope_type") != "split":
        raise ConfigError(f"connectors/config.json has rope_type={connectors['rope_type']!r}; LTX-2 uses 'split'")
    return ConnectorConfig(
        num_layers=_require(connectors, c, f"{modality}_connector_num_layers"),
        num_attention_heads=_require(connectors, c, f"{modality}_connector_num_attention_heads"),
        attention_head_dim=_require(connectors, c, f"{modality}_connector_attention_head_dim"),
        num_registers=_require(connectors, c, f"{modality}_connector_num_learnable_registers"),
        rope_max_pos=float(_require(connectors, c, "connector_rope_base_seq_len")),
        rope_theta=float(_require(connectors, c, "rope_theta")),
        rope_float64=_require(connectors, c, "rope_double_precision"),
        norm_eps=1e-6,
    )


def _diffusers_video_decoder(vae: Mapping[str, Any]) -> VideoDecoderConfig:
    channels = tuple(_require(vae, "vae", "decoder_block_out_channels"))
    layers = tuple(_require(vae, "vae", "decoder_layers_per_block"))
    levels = len(channels)
    factors = tuple(vae.get("upsample_factor", (2,) * levels))
    residual = vae.get("upsample_residual", True)
    residuals = (residual,) * levels if isinstance(residual, bool) else tuple(residual)
    kinds = tuple(vae.get("upsample_type", ("spatiotemporal",) * levels))
    if set(kinds) != {"spatiotemporal"} or vae.get("timestep_conditioning", False):
        raise ConfigError("vae/config.json is not the LTX-2 2.0 decoder (upsample_type, timestep_conditioning)")
    # diffusers lists every level from the output side; execution runs the other way.
    blocks = [DecoderBlock("res_x", num_layers=layers[-1])]
    for level in reversed(range(levels)):
        blocks.append(DecoderBlock("compress_all", multiplier=factors[level], residual=residuals[level]))
        blocks.append(DecoderBlock("res_x", num_layers=layers[level]))
    return VideoDecoderConfig(
        latent_channels=_require(vae, "vae", "latent_channels"),
        out_channels=_require(vae, "vae", "out_channels"),
        base_channels=channels[0] // factors[0],
        patch_size=_require(vae, "vae", "patch_size"),
        blocks=tuple(blocks),
        spatial_padding_mode=_require(vae, "vae", "decoder_spatial_padding_mode"),
        causal=_require(vae, "vae", "decoder_causal"),
    )


def _diffusers_audio_decoder(audio_vae: Mapping[str, Any]) -> AudioDecoderConfig:
    a = "audio_vae"
    _check_fixed(audio_vae, a, {"norm_type": "pixel", "causality_axis": "height", "mid_block_add_attention": False})
    if audio_vae.get("attn_resolutions"):
        raise ConfigError("audio_vae/config.json has attention levels; LTX-2's audio VAE has none")
    return AudioDecoderConfig(
        base_channels=_require(audio_vae, a, "base_channels"),
        channel_multipliers=tuple(_require(audio_vae, a, "ch_mult")),
        num_res_blocks=_require(audio_vae, a, "num_res_blocks"),
        out_channels=_require(audio_vae, a, "output_channels"),
        latent_channels=_require(audio_vae, a, "latent_channels"),
        mel_bins=_require(audio_vae, a, "mel_bins"),
        sample_rate=_require(audio_vae, a, "sample_rate"),
        mel_hop_length=_require(audio_vae, a, "mel_hop_length"),
    )


def _diffusers_vocoder(vocoder: Mapping[str, Any]) -> VocoderConfig:
    v = "vocoder"
    if vocoder.get("_class_name", "LTX2Vocoder") != "LTX2Vocoder" or vocoder.get("antialias", False):
        raise ConfigError("vocoder/config.json is not the LTX-2 2.0 vocoder; this version runs 2.0")
    activation = {"act_fn": "leaky_relu", "leaky_relu_negative_slope": 0.1, "final_act_fn": "tanh", "final_bias": True}
    _check_fixed(vocoder, v, activation)
    return VocoderConfig(
        in_channels=_require(vocoder, v, "in_channels"),
        out_channels=_require(vocoder, v, "out_channels"),
        initial_channels=_require(vocoder, v, "hidden_channels"),
        upsample_rates=tuple(_require(vocoder, v, "upsample_factors")),
        upsample_kernel_sizes=tuple(_require(vocoder, v, "upsample_kernel_sizes")),
        resblock_kernel_sizes=tuple(_require(vocoder, v, "resnet_kernel_sizes")),
        resblock_dilations=tuple(tuple(dilations) for dilations in _require(vocoder, v, "resnet_dilations")),
        output_sample_rate=_require(vocoder, v, "output_sampling_rate"),
    )
