"""Reads the ``config`` JSON in the header of an official LTX-2 file into the records of every part; needs no torch.

Source of names, values and defaults: Lightricks/LTX-2 at 400fd31 (``*/model_configurator.py``).
"""

from collections.abc import Mapping
from typing import Any

from vgen.models.errors import ConfigError
from vgen.models.ltx2.config import (
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
    "audio_ff_bias": True,
    "connector_ff_bias": True,
    "use_prompt_adaln_single": True,
    # 2.3 only: its text side is one projection per stream, without the parts that these would add.
    "caption_projection_first_linear": False,
    "caption_projection_second_linear": False,
    "caption_proj_input_norm": False,
}
_LTX2_3_SWITCHES = (
    "apply_gated_attention",
    "cross_attention_adaln",
    "caption_proj_before_connector",
    "connector_apply_gated_attention",
)
_VOCODER_CHANNELS = 128
"""Stereo times 64 mel bins: the official code builds no other vocoder."""


def from_official(config: Mapping[str, Any]) -> LTX2Config:
    """Read the ``config`` JSON object of an official single file's header.

    Raises:
        ConfigError: a section or a required value is missing, or a value describes another architecture.
    """
    transformer, vae = section(config, "transformer"), section(config, "vae")
    audio_vae, vocoder = section(config, "audio_vae"), section(config, "vocoder")
    version = official_version(config)
    check_fixed(transformer, "transformer", _FIXED_TRANSFORMER)
    check_fixed(
        vae,
        "vae",
        {"_class_name": "CausalVideoAutoencoder", "dims": 3, "norm_layer": "pixel_norm"},
    )
    generator, extension = _official_vocoders(vocoder)
    return LTX2Config(
        version=version,
        transformer=_official_transformer(transformer, version),
        text_projection="per_modality" if version == "2.3" else "shared",
        video_connector=_official_connector(transformer, "", version),
        audio_connector=_official_connector(transformer, "audio_", version),
        video_encoder=_official_video_encoder(vae),
        video_decoder=_official_video_decoder(vae),
        audio_encoder=_official_audio_encoder(audio_vae),
        audio_decoder=_official_audio_decoder(audio_vae),
        vocoder=generator,
        bandwidth_extension=extension,
    )


def official_version(config: Mapping[str, Any]) -> Version:
    """The version that the switches of an official ``config`` are of.

    Raises:
        ConfigError: they are of LTX-2.5, or some are of 2.0 and some of 2.3.
    """
    transformer = section(config, "transformer")
    refuse_2_5(transformer)
    return version_of({f"transformer.{name}": transformer.get(name, False) for name in _LTX2_3_SWITCHES})


def _official_transformer(transformer: Mapping[str, Any], version: str) -> TransformerConfig:
    t = "transformer"
    heads = require(transformer, t, "num_attention_heads")
    if transformer.get("audio_num_attention_heads", heads) != heads:
        raise ConfigError(
            f"the checkpoint's config has {transformer['audio_num_attention_heads']} audio heads and {heads} video "
            f"heads; audio-video attention needs equal numbers"
        )
    return TransformerConfig(
        num_layers=require(transformer, t, "num_layers"),
        num_attention_heads=heads,
        attention_head_dim=require(transformer, t, "attention_head_dim"),
        audio_attention_head_dim=require(transformer, t, "audio_attention_head_dim"),
        in_channels=transformer.get("in_channels", 128),
        out_channels=transformer.get("out_channels", 128),
        audio_in_channels=transformer.get("audio_in_channels", 128),
        audio_out_channels=transformer.get("audio_out_channels", 128),
        caption_channels=require(transformer, t, "caption_channels"),
        norm_eps=transformer.get("norm_eps", 1e-6),
        rope_theta=float(transformer.get("positional_embedding_theta", 10000.0)),
        rope_max_pos=max_pos(require(transformer, t, "positional_embedding_max_pos")),
        audio_rope_max_pos=float(require(transformer, t, "audio_positional_embedding_max_pos")[0]),
        rope_float64=require(transformer, t, "frequencies_precision") == "float64",
        timestep_scale_multiplier=transformer.get("timestep_scale_multiplier", 1000),
        av_timestep_scale_multiplier=require(transformer, t, "av_ca_timestep_scale_multiplier"),
        gated_attention=version == "2.3",
        cross_attention_adaln=version == "2.3",
        caption_projection=version == "2.0",
    )


def _official_connector(transformer: Mapping[str, Any], prefix: str, version: str) -> ConnectorConfig:
    def value(name: str, default: int) -> int:
        return transformer.get(f"{prefix}connector_{name}", transformer.get(f"connector_{name}", default))

    return ConnectorConfig(
        num_layers=value("num_layers", 2),
        num_attention_heads=value("num_attention_heads", 30),
        attention_head_dim=value("attention_head_dim", 128),
        num_registers=value("num_learnable_registers", 128),
        rope_max_pos=float(require(transformer, "transformer", "connector_positional_embedding_max_pos")[0]),
        rope_theta=float(transformer.get("positional_embedding_theta", 10000.0)),
        rope_float64=require(transformer, "transformer", "frequencies_precision") == "float64",
        norm_eps=1e-6,
        gated_attention=version == "2.3",
    )


def _official_video_encoder(vae: Mapping[str, Any]) -> VideoEncoderConfig:
    if vae.get("latent_log_var", "uniform") not in ("uniform", "constant"):
        raise ConfigError(
            f"the checkpoint's config has vae.latent_log_var={vae['latent_log_var']!r}; LTX-2's encoder has one "
            f"channel beside the means ('uniform' or 'constant')"
        )
    # A flat key decides for encoder and decoder; a 2.0 file has none.
    mode = vae.get("spatial_padding_mode", vae.get("encoder_spatial_padding_mode", "zeros"))
    return VideoEncoderConfig(
        in_channels=vae.get("in_channels", 3),
        latent_channels=vae.get("latent_channels", 128),
        patch_size=vae.get("patch_size", 4),
        blocks=tuple(_official_encoder_block(entry) for entry in require(vae, "vae", "encoder_blocks")),
        spatial_padding_mode=padding_mode(mode, "vae.spatial_padding_mode"),
    )


def _official_encoder_block(entry: Any) -> EncoderBlock:
    kind, options = _block_options(entry)
    if kind == "res_x":
        return EncoderBlock(kind, num_layers=require(options, "vae.encoder_blocks.res_x", "num_layers"))
    if kind in ("compress_all_res", "compress_time_res", "compress_space_res"):
        return EncoderBlock(kind, multiplier=options.get("multiplier", 2))
    raise ConfigError(
        f"the checkpoint's config has the encoder block '{kind}'; LTX-2 has res_x, compress_all_res, "
        f"compress_time_res and compress_space_res"
    )


def _official_video_decoder(vae: Mapping[str, Any]) -> VideoDecoderConfig:
    if require(vae, "vae", "timestep_conditioning"):
        raise ConfigError("the checkpoint's config sets vae.timestep_conditioning; LTX-2 decoders have none")
    return VideoDecoderConfig(
        latent_channels=vae.get("latent_channels", 128),
        out_channels=vae.get("out_channels", 3),
        base_channels=vae.get("decoder_base_channels", 128),
        patch_size=vae.get("patch_size", 4),
        blocks=tuple(_official_decoder_block(entry) for entry in reversed(require(vae, "vae", "decoder_blocks"))),
        spatial_padding_mode=padding_mode(vae.get("spatial_padding_mode", "reflect"), "vae.spatial_padding_mode"),
        causal=vae.get("causal_decoder", False),
    )


def _official_decoder_block(entry: Any) -> DecoderBlock:
    kind, options = _block_options(entry)
    if options.get("inject_noise", False):
        raise ConfigError(f"the checkpoint's decoder block '{kind}' injects noise; LTX-2 decoders do not")
    if kind == "res_x":
        return DecoderBlock(kind, num_layers=require(options, "vae.decoder_blocks.res_x", "num_layers"))
    if kind in ("compress_all", "compress_time", "compress_space"):
        # The official code reads `residual` for compress_all only.
        residual = kind == "compress_all" and options.get("residual", False)
        return DecoderBlock(kind, multiplier=options.get("multiplier", 1), residual=residual)
    raise ConfigError(
        f"the checkpoint's config has the decoder block '{kind}'; LTX-2 has res_x, compress_all, compress_time and "
        f"compress_space"
    )


def _block_options(entry: Any) -> tuple[str, Mapping[str, Any]]:
    """``[kind, layers]`` or ``[kind, {option: value}]`` of a block list."""
    kind, options = entry
    return kind, {"num_layers": options} if isinstance(options, int) else options


def _official_audio_decoder(audio_vae: Mapping[str, Any]) -> AudioDecoderConfig:
    params, sizes, preprocessing = _official_audio_sections(audio_vae)
    return AudioDecoderConfig(
        base_channels=sizes.get("ch", 128),
        channel_multipliers=tuple(sizes.get("ch_mult", (1, 2, 4))),
        num_res_blocks=sizes.get("num_res_blocks", 2),
        out_channels=sizes.get("out_ch", 2),
        latent_channels=sizes.get("z_channels", 8),
        mel_bins=_mel_bins(audio_vae),
        sample_rate=params.get("sampling_rate", 16000),
        mel_hop_length=preprocessing.get("stft", {}).get("hop_length", 160),
    )


def _official_audio_encoder(audio_vae: Mapping[str, Any]) -> AudioEncoderConfig:
    params, sizes, preprocessing = _official_audio_sections(audio_vae)
    check_fixed(sizes, "audio_vae.ddconfig", {"double_z": True, "resamp_with_conv": True})
    stft = preprocessing.get("stft", {})
    return AudioEncoderConfig(
        base_channels=sizes.get("ch", 128),
        channel_multipliers=tuple(sizes.get("ch_mult", (1, 2, 4))),
        num_res_blocks=sizes.get("num_res_blocks", 2),
        in_channels=sizes.get("in_channels", 2),
        latent_channels=sizes.get("z_channels", 8),
        mel_bins=_mel_bins(audio_vae),
        sample_rate=params.get("sampling_rate", 16000),
        mel_hop_length=stft.get("hop_length", 160),
        n_fft=stft.get("filter_length", 1024),
    )


def _official_audio_sections(
    audio_vae: Mapping[str, Any],
) -> tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]]:
    """``model.params``, its ``ddconfig`` and ``preprocessing``, checked for what both halves of the VAE rely on."""
    params = audio_vae.get("model", {}).get("params", {})
    sizes = params.get("ddconfig")
    if not isinstance(sizes, Mapping):
        raise ConfigError("the checkpoint's config lacks 'audio_vae.model.params.ddconfig'; use an official file")
    preprocessing = audio_vae.get("preprocessing", {})
    check_fixed(
        sizes,
        "audio_vae.ddconfig",
        {"norm_type": "pixel", "causality_axis": "height", "mid_block_add_attention": False, "attn_resolutions": []},
    )
    check_fixed(preprocessing.get("stft", {}), "audio_vae.preprocessing.stft", {"causal": True})
    return params, sizes, preprocessing


def _mel_bins(audio_vae: Mapping[str, Any]) -> int:
    _, sizes, preprocessing = _official_audio_sections(audio_vae)
    mel_bins = sizes.get("mel_bins") or preprocessing.get("mel", {}).get("n_mel_channels")
    if mel_bins is None:
        raise ConfigError("the checkpoint's config has no number of mel bins (audio_vae...ddconfig.mel_bins)")
    return int(mel_bins)


def _official_vocoders(vocoder: Mapping[str, Any]) -> tuple[VocoderConfig, BandwidthExtensionConfig | None]:
    """The vocoder and, in the nested config of 2.3, what extends its band."""
    if "bwe" not in vocoder:
        return _official_vocoder_2_0(vocoder), None
    where, base, bwe = "vocoder.bwe", section(vocoder, "vocoder"), section(vocoder, "bwe")
    input_sample_rate = require(bwe, where, "input_sampling_rate")
    output_sample_rate = require(bwe, where, "output_sampling_rate")
    final: FinalActivation = "tanh" if require(base, "vocoder.vocoder", "use_tanh_at_final") else "clamp"
    n_fft = require(bwe, where, "n_fft")
    extension = BandwidthExtensionConfig(
        generator=_official_vocoder_2_3(bwe, where, "none", output_sample_rate),
        input_sample_rate=input_sample_rate,
        output_sample_rate=output_sample_rate,
        mel_bins=require(bwe, where, "num_mels"),
        n_fft=n_fft,
        win_length=n_fft,
        hop_length=require(bwe, where, "hop_length"),
    )
    return _official_vocoder_2_3(base, "vocoder.vocoder", final, input_sample_rate), extension


def _official_vocoder_2_0(vocoder: Mapping[str, Any]) -> VocoderConfig:
    check_fixed(vocoder, "vocoder", {"resblock": "1", "stereo": True})
    return VocoderConfig(
        in_channels=_VOCODER_CHANNELS,
        out_channels=2,
        initial_channels=vocoder.get("upsample_initial_channel", 1024),
        upsample_rates=tuple(vocoder.get("upsample_rates", (6, 5, 2, 2, 2))),
        upsample_kernel_sizes=tuple(vocoder.get("upsample_kernel_sizes", (16, 15, 8, 4, 4))),
        resblock_kernel_sizes=tuple(vocoder.get("resblock_kernel_sizes", (3, 7, 11))),
        resblock_dilations=nested_tuple(vocoder.get("resblock_dilation_sizes", ((1, 3, 5),) * 3)),
        output_sample_rate=vocoder.get("output_sampling_rate", 24000),
    )


def _official_vocoder_2_3(
    vocoder: Mapping[str, Any], where: str, final: FinalActivation, sample_rate: int
) -> VocoderConfig:
    check_fixed(vocoder, where, {"resblock": "AMP1", "stereo": True, "activation": "snakebeta"})
    return VocoderConfig(
        in_channels=_VOCODER_CHANNELS,
        out_channels=2,
        initial_channels=require(vocoder, where, "upsample_initial_channel"),
        upsample_rates=tuple(require(vocoder, where, "upsample_rates")),
        upsample_kernel_sizes=tuple(require(vocoder, where, "upsample_kernel_sizes")),
        resblock_kernel_sizes=tuple(require(vocoder, where, "resblock_kernel_sizes")),
        resblock_dilations=nested_tuple(require(vocoder, where, "resblock_dilation_sizes")),
        output_sample_rate=sample_rate,
        resblock="AMP1",
        final_activation=final,
        final_bias=vocoder.get("use_bias_at_final", True),
    )
