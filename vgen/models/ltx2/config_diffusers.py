"""Reads the ``config.json`` files of a diffusers LTX-2 folder into the records of every part; needs no torch.

Source of names, values and defaults: huggingface/diffusers 0.42.1.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vgen.models.errors import ConfigError
from vgen.models.ltx2.config import (
    AUDIO_COMPRESSION,
    AudioDecoderConfig,
    AudioEncoderConfig,
    BandwidthExtensionConfig,
    ConnectorConfig,
    DecoderBlock,
    EncoderBlock,
    FinalActivation,
    LTX2Config,
    TransformerConfig,
    Version,
    VideoDecoderConfig,
    VideoEncoderConfig,
    VocoderConfig,
)
from vgen.models.ltx2.config_checks import (
    check_fixed,
    max_pos,
    nested_tuple,
    padding_mode,
    refuse_2_5,
    require,
    section,
    version_of,
)

_FIXED_DIFFUSERS_TRANSFORMER = {
    "activation_fn": "gelu-approximate",
    "qk_norm": "rms_norm_across_heads",
    "norm_elementwise_affine": False,
    "attention_bias": True,
    "attention_out_bias": True,
    "audio_ff_bias": True,
    "use_prompt_adaln_single": True,
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


def from_diffusers(configs: Mapping[str, Mapping[str, Any]]) -> LTX2Config:
    """Read the ``config.json`` of each folder of a diffusers checkpoint, keyed by folder name.

    Folders: ``transformer``, ``connectors``, ``vae``, ``audio_vae``, ``vocoder``.

    Raises:
        ConfigError: a folder or a required value is missing, or a value describes another architecture.
    """
    transformer, connectors = section(configs, "transformer"), section(configs, "connectors")
    vae, audio_vae = section(configs, "vae"), section(configs, "audio_vae")
    version = diffusers_version(configs)
    check_fixed(transformer, "transformer", _FIXED_DIFFUSERS_TRANSFORMER)
    generator, extension = _diffusers_vocoders(section(configs, "vocoder"))
    return LTX2Config(
        version=version,
        transformer=_diffusers_transformer(transformer, version),
        text_projection="per_modality" if version == "2.3" else "shared",
        video_connector=_diffusers_connector(connectors, "video", version),
        audio_connector=_diffusers_connector(connectors, "audio", version),
        video_encoder=_diffusers_video_encoder(vae),
        video_decoder=_diffusers_video_decoder(vae),
        audio_encoder=_diffusers_audio_encoder(audio_vae),
        audio_decoder=_diffusers_audio_decoder(audio_vae),
        vocoder=generator,
        bandwidth_extension=extension,
    )


def diffusers_version(configs: Mapping[str, Mapping[str, Any]]) -> Version:
    """As ``official_version``, of the ``config.json`` files of a diffusers checkpoint."""
    transformer, connectors = section(configs, "transformer"), section(configs, "connectors")
    refuse_2_5(transformer)
    return version_of(_diffusers_switches(transformer, connectors))


def _diffusers_switches(transformer: Mapping[str, Any], connectors: Mapping[str, Any]) -> dict[str, bool]:
    parts = ("gated_attn", "cross_attn_mod", "audio_gated_attn", "audio_cross_attn_mod")
    text = ("per_modality_projections", "video_gated_attn", "audio_gated_attn")
    return {
        **{f"transformer.{name}": transformer.get(name, False) for name in parts},
        "transformer without use_prompt_embeddings": not transformer.get("use_prompt_embeddings", True),
        **{f"connectors.{name}": connectors.get(name, False) for name in text},
    }


def _diffusers_transformer(transformer: Mapping[str, Any], version: str) -> TransformerConfig:
    t = "transformer"
    if require(transformer, t, "rope_type") != "split":
        raise ConfigError(f"transformer/config.json has rope_type={transformer['rope_type']!r}; LTX-2 uses 'split'")
    if transformer.get("audio_num_attention_heads") != require(transformer, t, "num_attention_heads"):
        raise ConfigError("transformer/config.json has different numbers of audio and video heads")
    return TransformerConfig(
        num_layers=require(transformer, t, "num_layers"),
        num_attention_heads=transformer["num_attention_heads"],
        attention_head_dim=require(transformer, t, "attention_head_dim"),
        audio_attention_head_dim=require(transformer, t, "audio_attention_head_dim"),
        in_channels=require(transformer, t, "in_channels"),
        out_channels=transformer.get("out_channels") or transformer["in_channels"],
        audio_in_channels=require(transformer, t, "audio_in_channels"),
        audio_out_channels=transformer.get("audio_out_channels") or transformer["audio_in_channels"],
        caption_channels=require(transformer, t, "caption_channels"),
        norm_eps=require(transformer, t, "norm_eps"),
        rope_theta=float(require(transformer, t, "rope_theta")),
        rope_max_pos=max_pos(
            require(transformer, t, key) for key in ("pos_embed_max_pos", "base_height", "base_width")
        ),
        audio_rope_max_pos=float(require(transformer, t, "audio_pos_embed_max_pos")),
        rope_float64=require(transformer, t, "rope_double_precision"),
        timestep_scale_multiplier=require(transformer, t, "timestep_scale_multiplier"),
        av_timestep_scale_multiplier=require(transformer, t, "cross_attn_timestep_scale_multiplier"),
        gated_attention=version == "2.3",
        cross_attention_adaln=version == "2.3",
        caption_projection=version == "2.0",
    )


def _diffusers_connector(connectors: Mapping[str, Any], modality: str, version: str) -> ConnectorConfig:
    c = "connectors"
    if require(connectors, c, "rope_type") != "split":
        raise ConfigError(f"connectors/config.json has rope_type={connectors['rope_type']!r}; LTX-2 uses 'split'")
    return ConnectorConfig(
        num_layers=require(connectors, c, f"{modality}_connector_num_layers"),
        num_attention_heads=require(connectors, c, f"{modality}_connector_num_attention_heads"),
        attention_head_dim=require(connectors, c, f"{modality}_connector_attention_head_dim"),
        num_registers=require(connectors, c, f"{modality}_connector_num_learnable_registers"),
        rope_max_pos=float(require(connectors, c, "connector_rope_base_seq_len")),
        rope_theta=float(require(connectors, c, "rope_theta")),
        rope_float64=require(connectors, c, "rope_double_precision"),
        norm_eps=1e-6,
        gated_attention=version == "2.3",
    )


_DOWN = {"spatial": "compress_space_res", "temporal": "compress_time_res", "spatiotemporal": "compress_all_res"}
_UP = {"spatial": "compress_space", "temporal": "compress_time", "spatiotemporal": "compress_all"}


def _diffusers_video_encoder(vae: Mapping[str, Any]) -> VideoEncoderConfig:
    channels = tuple(require(vae, "vae", "block_out_channels"))
    layers = tuple(require(vae, "vae", "layers_per_block"))
    types = tuple(require(vae, "vae", "downsample_type"))
    if not require(vae, "vae", "encoder_causal") or not _all(vae.get("spatio_temporal_scaling", True), True):
        raise ConfigError("vae/config.json is not LTX-2's encoder (encoder_causal, spatio_temporal_scaling)")
    width = require(vae, "vae", "latent_channels")
    blocks = []
    for level, out in enumerate(channels):
        blocks.append(EncoderBlock("res_x", num_layers=layers[level]))
        blocks.append(EncoderBlock(_resampling(_DOWN, types[level], "downsample_type"), multiplier=out // width))
        width = out
    blocks.append(EncoderBlock("res_x", num_layers=layers[-1]))
    return VideoEncoderConfig(
        in_channels=require(vae, "vae", "in_channels"),
        latent_channels=require(vae, "vae", "latent_channels"),
        patch_size=require(vae, "vae", "patch_size"),
        blocks=tuple(blocks),
        spatial_padding_mode=padding_mode(
            require(vae, "vae", "encoder_spatial_padding_mode"), "vae.encoder_spatial_padding_mode"
        ),
    )


def _diffusers_video_decoder(vae: Mapping[str, Any]) -> VideoDecoderConfig:
    channels = tuple(require(vae, "vae", "decoder_block_out_channels"))
    layers = tuple(require(vae, "vae", "decoder_layers_per_block"))
    levels = len(channels)
    factors = tuple(vae.get("upsample_factor", (2,) * levels))
    residual = vae.get("upsample_residual", True)
    residuals = (residual,) * levels if isinstance(residual, bool) else tuple(residual)
    types = tuple(vae.get("upsample_type", ("spatiotemporal",) * levels))
    if vae.get("timestep_conditioning", False) or not _all(vae.get("decoder_inject_noise", False), False):
        raise ConfigError("vae/config.json is not LTX-2's decoder (timestep_conditioning, decoder_inject_noise)")
    if not _all(vae.get("decoder_spatio_temporal_scaling", True), True):
        raise ConfigError("vae/config.json is not LTX-2's decoder (decoder_spatio_temporal_scaling)")
    # Diffusers lists levels from the output side, except the types of upsampling, which are in execution order.
    blocks = [DecoderBlock("res_x", num_layers=layers[-1])]
    for level, type_ in zip(reversed(range(levels)), types, strict=True):
        kind = _resampling(_UP, type_, "upsample_type")
        blocks.append(DecoderBlock(kind, multiplier=factors[level], residual=residuals[level]))
        blocks.append(DecoderBlock("res_x", num_layers=layers[level]))
    return VideoDecoderConfig(
        latent_channels=require(vae, "vae", "latent_channels"),
        out_channels=require(vae, "vae", "out_channels"),
        base_channels=channels[0] // factors[0],
        patch_size=require(vae, "vae", "patch_size"),
        blocks=tuple(blocks),
        spatial_padding_mode=padding_mode(
            require(vae, "vae", "decoder_spatial_padding_mode"), "vae.decoder_spatial_padding_mode"
        ),
        causal=require(vae, "vae", "decoder_causal"),
    )


def _all(values: Any, value: bool) -> bool:
    """A flag of a diffusers config, given once or per level, is ``value`` everywhere."""
    return all(one == value for one in (values if isinstance(values, list | tuple) else [values]))


def _resampling(kinds: Mapping[str, str], type_: Any, key: str) -> str:
    if type_ not in kinds:
        raise ConfigError(f"vae/config.json has {key} {type_!r}; LTX-2 has {', '.join(kinds)}")
    return kinds[type_]


def _diffusers_audio_decoder(audio_vae: Mapping[str, Any]) -> AudioDecoderConfig:
    a = "audio_vae"
    _check_diffusers_audio_vae(audio_vae)
    return AudioDecoderConfig(
        base_channels=require(audio_vae, a, "base_channels"),
        channel_multipliers=tuple(require(audio_vae, a, "ch_mult")),
        num_res_blocks=require(audio_vae, a, "num_res_blocks"),
        out_channels=require(audio_vae, a, "output_channels"),
        latent_channels=require(audio_vae, a, "latent_channels"),
        mel_bins=require(audio_vae, a, "mel_bins"),
        sample_rate=require(audio_vae, a, "sample_rate"),
        mel_hop_length=require(audio_vae, a, "mel_hop_length"),
    )


def _diffusers_audio_encoder(audio_vae: Mapping[str, Any]) -> AudioEncoderConfig:
    a = "audio_vae"
    _check_diffusers_audio_vae(audio_vae)
    return AudioEncoderConfig(
        base_channels=require(audio_vae, a, "base_channels"),
        channel_multipliers=tuple(require(audio_vae, a, "ch_mult")),
        num_res_blocks=require(audio_vae, a, "num_res_blocks"),
        in_channels=require(audio_vae, a, "in_channels"),
        latent_channels=require(audio_vae, a, "latent_channels"),
        mel_bins=require(audio_vae, a, "mel_bins"),
        sample_rate=require(audio_vae, a, "sample_rate"),
        mel_hop_length=require(audio_vae, a, "mel_hop_length"),
        # diffusers makes no mel spectrogram, so its config has no window; all official files say 1024.
        n_fft=1024,
    )


def _check_diffusers_audio_vae(audio_vae: Mapping[str, Any]) -> None:
    fixed = {"norm_type": "pixel", "causality_axis": "height", "mid_block_add_attention": False}
    check_fixed(audio_vae, "audio_vae", {**fixed, "double_z": True, "is_causal": True})
    if audio_vae.get("attn_resolutions"):
        raise ConfigError("audio_vae/config.json has attention levels; LTX-2's audio VAE has none")


def _diffusers_vocoders(vocoder: Mapping[str, Any]) -> tuple[VocoderConfig, BandwidthExtensionConfig | None]:
    v, name = "vocoder", vocoder.get("_class_name", "LTX2Vocoder")
    if name == "LTX2Vocoder":
        fixed = {"act_fn": "leaky_relu", "leaky_relu_negative_slope": 0.1, "final_act_fn": "tanh", "final_bias": True}
        check_fixed(vocoder, v, {**fixed, "antialias": False})
        return _diffusers_vocoder(vocoder, "", require(vocoder, v, "output_sampling_rate")), None
    if name != "LTX2VocoderWithBWE":
        raise ConfigError(f"vocoder/config.json is of a {name}; LTX-2 has LTX2Vocoder and LTX2VocoderWithBWE")
    input_sample_rate = require(vocoder, v, "input_sampling_rate")
    output_sample_rate = require(vocoder, v, "output_sampling_rate")
    extension = BandwidthExtensionConfig(
        generator=_diffusers_vocoder_2_3(vocoder, "bwe_", output_sample_rate),
        input_sample_rate=input_sample_rate,
        output_sample_rate=output_sample_rate,
        mel_bins=require(vocoder, v, "num_mel_channels"),
        n_fft=require(vocoder, v, "filter_length"),
        win_length=require(vocoder, v, "window_length"),
        hop_length=require(vocoder, v, "hop_length"),
    )
    return _diffusers_vocoder_2_3(vocoder, "", input_sample_rate), extension


def _diffusers_vocoder_2_3(vocoder: Mapping[str, Any], prefix: str, sample_rate: int) -> VocoderConfig:
    fixed = {"act_fn": "snakebeta", "antialias": True, "antialias_ratio": 2, "antialias_kernel_size": 12}
    check_fixed(vocoder, "vocoder", {f"{prefix}{key}": value for key, value in fixed.items()})
    final = require(vocoder, "vocoder", f"{prefix}final_act_fn")
    if final not in ("tanh", "clamp", None):
        raise ConfigError(f"vocoder/config.json has {prefix}final_act_fn={final!r}; LTX-2 has tanh, clamp and null")
    # Null in the first stage is what the official code clamps; the second stage's sum is clamped at the end anyway.
    activation: FinalActivation = "none" if prefix else final or "clamp"
    return replace(
        _diffusers_vocoder(vocoder, prefix, sample_rate),
        resblock="AMP1",
        final_activation=activation,
        final_bias=require(vocoder, "vocoder", f"{prefix}final_bias"),
    )


def _diffusers_vocoder(vocoder: Mapping[str, Any], prefix: str, sample_rate: int) -> VocoderConfig:
    def value(name: str) -> Any:
        return require(vocoder, "vocoder", f"{prefix}{name}")

    return VocoderConfig(
        in_channels=value("in_channels"),
        out_channels=value("out_channels"),
        initial_channels=value("hidden_channels"),
        upsample_rates=tuple(value("upsample_factors")),
        upsample_kernel_sizes=tuple(value("upsample_kernel_sizes")),
        resblock_kernel_sizes=tuple(value("resnet_kernel_sizes")),
        resblock_dilations=nested_tuple(value("resnet_dilations")),
        output_sample_rate=sample_rate,
    )
