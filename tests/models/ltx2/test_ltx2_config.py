"""Architecture records: both dialects describe one model, and nothing that no shape reveals is guessed."""

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from tests.tiny_ltx2 import (
    Version,
    build_upsampler,
    diffusers_configs,
    official_config,
    official_upsampler_config,
    tiny_checkpoints,
)
from vgen.models.errors import ConfigError
from vgen.models.ltx2.config import (
    AudioEncoderConfig,
    BandwidthExtensionConfig,
    DecoderBlock,
    EncoderBlock,
    LTX2Config,
    UpsamplerConfig,
    VideoEncoderConfig,
    VocoderConfig,
)
from vgen.models.ltx2.config_diffusers import from_diffusers
from vgen.models.ltx2.config_official import from_official
from vgen.models.ltx2.config_upsampler import upsampler_from_diffusers, upsampler_from_official


@pytest.fixture
def official() -> dict[str, Any]:
    return copy.deepcopy(official_config(tiny_checkpoints().parts))


@pytest.fixture
def diffusers() -> dict[str, Any]:
    return copy.deepcopy(dict(diffusers_configs(tiny_checkpoints().diffusers)))


@pytest.fixture
def official_2_3() -> dict[str, Any]:
    return copy.deepcopy(official_config(tiny_checkpoints("2.3").parts))


@pytest.fixture
def diffusers_2_3() -> dict[str, Any]:
    return copy.deepcopy(dict(diffusers_configs(tiny_checkpoints("2.3").diffusers)))


def edited(config: Mapping[str, Any], path: str, value: Any = None, *, delete: bool = False) -> dict[str, Any]:
    copied: Any = copy.deepcopy(dict(config))
    place = copied
    *parents, leaf = path.split(".")
    for parent in parents:
        place = place[parent]
    if delete:
        del place[leaf]
    else:
        place[leaf] = value
    return copied


@pytest.mark.parametrize("version", ["2.0", "2.3"])
def test_both_dialects_give_equal_records(version: Version) -> None:
    tiny = tiny_checkpoints(version)
    ours, theirs = from_official(official_config(tiny.parts)), from_diffusers(diffusers_configs(tiny.diffusers))
    for field in dataclasses.fields(LTX2Config):
        assert getattr(ours, field.name) == getattr(theirs, field.name), field.name
    assert ours.version == version


def test_values_that_no_shape_reveals_come_from_the_checkpoint(official: dict[str, Any]) -> None:
    config = from_official(official)
    assert config.transformer.av_timestep_scale_multiplier == 500
    assert config.transformer.timestep_scale_multiplier == 1000
    assert config.transformer.rope_float64 is True
    assert config.transformer.rope_max_pos == (20, 512, 1024)
    assert config.transformer.audio_rope_max_pos == 24
    assert config.video_connector.rope_max_pos == config.audio_connector.rope_max_pos == 64
    assert config.video_connector.rope_float64 is True
    assert config.video_decoder.spatial_padding_mode == "reflect"
    assert config.video_decoder.causal is False


# Where each of those values is in either dialect, another value for it, and the field that must follow.
SILENT = [
    (
        "av_ca_timestep_scale_multiplier",
        "cross_attn_timestep_scale_multiplier",
        250,
        250,
        "av_timestep_scale_multiplier",
    ),
    ("timestep_scale_multiplier", "timestep_scale_multiplier", 100, 100, "timestep_scale_multiplier"),
    ("frequencies_precision", "rope_double_precision", "float32", False, "rope_float64"),
    ("positional_embedding_theta", "rope_theta", 100.0, 100.0, "rope_theta"),
    ("norm_eps", "norm_eps", 1e-4, 1e-4, "norm_eps"),
]


@pytest.mark.parametrize(("ours", "theirs", "value", "their_value", "field"), SILENT)
def test_the_transformer_follows_its_metadata(
    official: dict[str, Any],
    diffusers: dict[str, Any],
    ours: str,
    theirs: str,
    value: Any,
    their_value: Any,
    field: str,
) -> None:
    for before, after in (
        (from_official(official), from_official(edited(official, f"transformer.{ours}", value))),
        (from_diffusers(diffusers), from_diffusers(edited(diffusers, f"transformer.{theirs}", their_value))),
    ):
        assert getattr(after.transformer, field) == their_value
        assert getattr(before.transformer, field) != their_value


def test_the_other_parts_follow_their_metadata(official: dict[str, Any], diffusers: dict[str, Any]) -> None:
    zeros = from_official(edited(official, "vae.spatial_padding_mode", "zeros"))
    assert zeros.video_decoder.spatial_padding_mode == "zeros"
    zeros = from_diffusers(edited(diffusers, "vae.decoder_spatial_padding_mode", "zeros"))
    assert zeros.video_decoder.spatial_padding_mode == "zeros"
    assert from_official(edited(official, "vae.causal_decoder", True)).video_decoder.causal is True
    assert from_diffusers(edited(diffusers, "vae.decoder_causal", True)).video_decoder.causal is True
    far = from_official(edited(official, "transformer.connector_positional_embedding_max_pos", [4096]))
    assert far.video_connector.rope_max_pos == far.audio_connector.rope_max_pos == 4096
    far = from_diffusers(edited(diffusers, "connectors.connector_rope_base_seq_len", 4096))
    assert far.video_connector.rope_max_pos == far.audio_connector.rope_max_pos == 4096
    assert from_official(edited(official, "vocoder.output_sampling_rate", 48000)).vocoder.output_sample_rate == 48000


def test_the_switches_of_2_3(official: dict[str, Any], official_2_3: dict[str, Any]) -> None:
    old, new = from_official(official), from_official(official_2_3)
    for config, on in ((old, False), (new, True)):
        assert config.transformer.gated_attention is on
        assert config.transformer.cross_attention_adaln is on
        assert config.transformer.caption_projection is not on
        assert config.video_connector.gated_attention is config.audio_connector.gated_attention is on
    assert (old.text_projection, new.text_projection) == ("shared", "per_modality")
    # The audio connector of a 2.3 file has as many heads as the video one, and its own head size.
    video, audio = new.video_connector, new.audio_connector
    assert (video.num_layers, video.num_attention_heads, video.attention_head_dim) == (2, 4, 16)
    assert (audio.num_layers, audio.num_attention_heads, audio.attention_head_dim) == (1, 4, 8)
    assert (audio.width, video.width) == (new.transformer.audio_width, new.transformer.width)


SWITCHES = [
    "apply_gated_attention",
    "cross_attention_adaln",
    "caption_proj_before_connector",
    "connector_apply_gated_attention",
]


@pytest.mark.parametrize("switch", SWITCHES)
def test_mixed_switches_are_refused(official: dict[str, Any], official_2_3: dict[str, Any], switch: str) -> None:
    for config, value in ((official, True), (official_2_3, False)):
        with pytest.raises(ConfigError, match=r"mixes LTX-2 2\.0 and 2\.3") as raised:
            from_official(edited(config, f"transformer.{switch}", value))
        assert f"transformer.{switch}" in str(raised.value)
        from_official(edited(config, f"transformer.{switch}", not value))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("transformer.gated_attn", False),
        ("transformer.audio_gated_attn", False),
        ("transformer.cross_attn_mod", False),
        ("transformer.audio_cross_attn_mod", False),
        ("transformer.use_prompt_embeddings", True),
        ("connectors.per_modality_projections", False),
        ("connectors.video_gated_attn", False),
        ("connectors.audio_gated_attn", False),
    ],
)
def test_mixed_diffusers_switches_are_refused(
    diffusers: dict[str, Any], diffusers_2_3: dict[str, Any], path: str, value: bool
) -> None:
    for config, other in ((diffusers_2_3, value), (diffusers, not value)):
        with pytest.raises(ConfigError, match=r"mixes LTX-2 2\.0 and 2\.3"):
            from_diffusers(edited(config, path, other))


def test_a_flat_padding_mode_feeds_encoder_and_decoder(official: dict[str, Any]) -> None:
    def modes(config: dict[str, Any]) -> tuple[str, str]:
        parsed = from_official(config)
        return parsed.video_encoder.spatial_padding_mode, parsed.video_decoder.spatial_padding_mode

    assert modes(official) == ("zeros", "reflect")
    assert modes(edited(official, "vae.spatial_padding_mode", "zeros")) == ("zeros", "zeros")
    assert modes(edited(official, "vae.spatial_padding_mode", "reflect")) == ("reflect", "reflect")
    assert modes(edited(official, "vae.encoder_spatial_padding_mode", "reflect")) == ("reflect", "reflect")
    # The official code has not read the decoder's own key since March 2026.
    assert modes(edited(official, "vae.decoder_spatial_padding_mode", "zeros")) == ("zeros", "reflect")


def test_the_encoders(official: dict[str, Any], official_2_3: dict[str, Any]) -> None:
    def res(num_layers: int) -> EncoderBlock:
        return EncoderBlock("res_x", num_layers=num_layers)

    def down(axes: str, multiplier: int = 2) -> EncoderBlock:
        return EncoderBlock(f"compress_{axes}_res", multiplier=multiplier)

    config = from_official(official_2_3)
    assert config.video_encoder == VideoEncoderConfig(
        in_channels=3,
        latent_channels=16,
        patch_size=4,
        blocks=(res(1), down("space"), res(2), down("time"), res(1), down("all"), res(1), down("all", 1), res(2)),
        spatial_padding_mode="zeros",
    )
    assert from_official(official).video_encoder.blocks[-2] == down("all")
    assert config.audio_encoder == AudioEncoderConfig(
        base_channels=32,
        channel_multipliers=(1, 2, 4),
        num_res_blocks=1,
        in_channels=2,
        latent_channels=2,
        mel_bins=64,
        sample_rate=16000,
        mel_hop_length=160,
        n_fft=1024,
    )
    other = edited(official, "audio_vae.preprocessing.stft.filter_length", 512)
    assert from_official(other).audio_encoder.n_fft == 512
    # As the official code: a block without a multiplier doubles the channels, a number alone is the layers.
    short = edited(official, "vae.encoder_blocks", [["res_x", 3], ["compress_all_res", {}]])
    assert from_official(short).video_encoder.blocks == (res(3), down("all"))


def test_the_2_3_vocoders(official_2_3: dict[str, Any], diffusers_2_3: dict[str, Any]) -> None:
    config = from_official(official_2_3)
    assert config.vocoder == VocoderConfig(
        in_channels=128,
        out_channels=2,
        initial_channels=64,
        upsample_rates=(5, 4, 2, 2, 2),
        upsample_kernel_sizes=(11, 8, 4, 4, 4),
        resblock_kernel_sizes=(3, 5),
        resblock_dilations=((1, 3, 5), (1, 2, 3)),
        output_sample_rate=16000,
        resblock="AMP1",
        final_activation="clamp",
        final_bias=False,
    )
    extension = config.bandwidth_extension
    assert extension is not None
    assert extension.generator.final_activation == "none"
    assert extension.generator.upsample_rates == (6, 5, 2, 2, 2)
    assert extension == BandwidthExtensionConfig(
        extension.generator, 16000, 48000, mel_bins=64, n_fft=512, win_length=512, hop_length=80
    )
    tanh = edited(official_2_3, "vocoder.vocoder.use_tanh_at_final", True)
    assert from_official(tanh).vocoder.final_activation == "tanh"
    for given, expected in (("tanh", "tanh"), ("clamp", "clamp"), (None, "clamp")):
        config = from_diffusers(edited(diffusers_2_3, "vocoder.final_act_fn", given))
        assert config.vocoder.final_activation == expected
        assert config.bandwidth_extension is not None
        assert config.bandwidth_extension.generator.final_activation == "none"


def test_decoder_blocks_of_2_3(official_2_3: dict[str, Any]) -> None:
    def res(num_layers: int) -> DecoderBlock:
        return DecoderBlock("res_x", num_layers=num_layers)

    decoder = from_official(official_2_3).video_decoder
    assert decoder.blocks == (
        res(2), DecoderBlock("compress_all", multiplier=2),
        res(1), DecoderBlock("compress_all", multiplier=1),
        res(1), DecoderBlock("compress_time", multiplier=2),
        res(2), DecoderBlock("compress_space", multiplier=2),
        res(1),
    )  # fmt: skip
    assert decoder.base_channels == 8
    # Only compress_all has a residual in the official code.
    listed = edited(official_2_3, "vae.decoder_blocks", [["compress_time", {"multiplier": 2, "residual": True}]])
    assert from_official(listed).video_decoder.blocks == (DecoderBlock("compress_time", multiplier=2),)


@pytest.mark.parametrize(
    ("options", "spatial", "temporal", "scale", "rational"),
    [
        ({}, True, False, 2.0, True),
        ({"rational": False}, True, False, 2.0, False),
        ({"scale": 1.5}, True, False, 1.5, True),
        ({"spatial": False, "temporal": True}, False, True, 2.0, False),
    ],
)
def test_upsamplers(options: dict[str, Any], spatial: bool, temporal: bool, scale: float, rational: bool) -> None:
    upsampler = build_upsampler(**options)
    expected = UpsamplerConfig(16, 32, 2, spatial, temporal, scale, rational)
    assert upsampler_from_official(official_upsampler_config(upsampler)) == expected
    assert upsampler_from_diffusers(dict(upsampler.config)) == expected


def test_defaults_of_upsamplers_are_those_of_each_code() -> None:
    assert upsampler_from_official({"mid_channels": 32}) == UpsamplerConfig(128, 32, 4, True, False, 2.0, False)
    assert upsampler_from_diffusers({"mid_channels": 32}) == UpsamplerConfig(128, 32, 4, True, False, 2.0, True)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"transformer": {}}, "is no latent upsampler's"),
        ({"mid_channels": 32, "dims": 2}, "upsampler.dims=2"),
        ({"mid_channels": 32, "spatial_upsample": False}, "neither spatial_upsample nor temporal_upsample"),
        ({"mid_channels": 32, "spatial_scale": 4.0}, "spatial_scale=4.0; LTX-2 has 1.5 and 2.0"),
    ],
)
def test_other_upsamplers_are_refused(config: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        upsampler_from_official(config)
    assert says in str(raised.value)


def test_decoder_blocks_are_in_execution_order(official: dict[str, Any]) -> None:
    blocks = from_official(official).video_decoder.blocks
    up = DecoderBlock("compress_all", multiplier=2, residual=True)
    assert blocks == (
        DecoderBlock("res_x", num_layers=3), up,
        DecoderBlock("res_x", num_layers=2), up,
        DecoderBlock("res_x", num_layers=1), up,
        DecoderBlock("res_x", num_layers=1),
    )  # fmt: skip


OFFICIAL_REQUIRED = [
    "transformer.num_layers",
    "transformer.num_attention_heads",
    "transformer.attention_head_dim",
    "transformer.audio_attention_head_dim",
    "transformer.caption_channels",
    "transformer.frequencies_precision",
    "transformer.positional_embedding_max_pos",
    "transformer.audio_positional_embedding_max_pos",
    "transformer.av_ca_timestep_scale_multiplier",
    "transformer.connector_positional_embedding_max_pos",
    "vae.timestep_conditioning",
    "vae.encoder_blocks",
    "vae.decoder_blocks",
]
OFFICIAL_2_3_REQUIRED = [
    "vocoder.vocoder.use_tanh_at_final",
    "vocoder.vocoder.upsample_rates",
    "vocoder.vocoder.resblock_dilation_sizes",
    "vocoder.bwe.upsample_rates",
    "vocoder.bwe.input_sampling_rate",
    "vocoder.bwe.output_sampling_rate",
    "vocoder.bwe.hop_length",
    "vocoder.bwe.n_fft",
    "vocoder.bwe.num_mels",
]


@pytest.mark.parametrize("path", OFFICIAL_REQUIRED)
def test_a_missing_official_value_is_refused_by_name(official: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError, match=f"lacks '{path}', which no tensor shape reveals"):
        from_official(edited(official, path, delete=True))


@pytest.mark.parametrize("path", OFFICIAL_2_3_REQUIRED)
def test_a_missing_official_2_3_value_is_refused_by_name(official_2_3: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError, match=f"lacks '{path}', which no tensor shape reveals"):
        from_official(edited(official_2_3, path, delete=True))


@pytest.mark.parametrize("section", ["transformer", "vae", "audio_vae", "vocoder"])
def test_a_missing_official_section_is_refused_by_name(official: dict[str, Any], section: str) -> None:
    with pytest.raises(ConfigError, match=f"no '{section}' section"):
        from_official(edited(official, section, delete=True))


DIFFUSERS_REQUIRED = {
    "transformer": (
        "num_layers num_attention_heads attention_head_dim audio_attention_head_dim in_channels audio_in_channels "
        "caption_channels norm_eps rope_type rope_theta rope_double_precision pos_embed_max_pos base_height base_width "
        "audio_pos_embed_max_pos timestep_scale_multiplier cross_attn_timestep_scale_multiplier"
    ),
    "connectors": (
        "rope_type rope_theta rope_double_precision connector_rope_base_seq_len video_connector_num_layers "
        "video_connector_num_attention_heads video_connector_attention_head_dim "
        "video_connector_num_learnable_registers audio_connector_num_layers audio_connector_num_attention_heads "
        "audio_connector_attention_head_dim audio_connector_num_learnable_registers"
    ),
    "vae": (
        "latent_channels out_channels decoder_block_out_channels decoder_layers_per_block patch_size decoder_causal "
        "decoder_spatial_padding_mode in_channels block_out_channels layers_per_block downsample_type encoder_causal "
        "encoder_spatial_padding_mode"
    ),
    "audio_vae": (
        "base_channels ch_mult num_res_blocks output_channels latent_channels mel_bins sample_rate mel_hop_length "
        "in_channels"
    ),
    "vocoder": (
        "in_channels out_channels hidden_channels upsample_factors upsample_kernel_sizes resnet_kernel_sizes "
        "resnet_dilations output_sampling_rate"
    ),
}


@pytest.mark.parametrize(
    "path", [f"{part}.{key}" for part, names in DIFFUSERS_REQUIRED.items() for key in names.split()]
)
def test_a_missing_diffusers_value_is_refused_by_name(diffusers: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError, match=f"lacks '{path}', which no tensor shape reveals"):
        from_diffusers(edited(diffusers, path, delete=True))


@pytest.mark.parametrize(
    "key",
    [
        "final_act_fn",
        "final_bias",
        "bwe_final_act_fn",
        "bwe_final_bias",
        "bwe_upsample_factors",
        "input_sampling_rate",
        "output_sampling_rate",
        "num_mel_channels",
        "filter_length",
        "window_length",
        "hop_length",
    ],
)
def test_a_missing_diffusers_2_3_value_is_refused_by_name(diffusers_2_3: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=f"lacks 'vocoder.{key}', which no tensor shape reveals"):
        from_diffusers(edited(diffusers_2_3, f"vocoder.{key}", delete=True))


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("transformer.ff_bias", False, "transformer.ff_bias=False, so it is LTX-2.5"),
        ("transformer.use_keyframes_abs_pos_embedding", True, "so it is LTX-2.5, which this version does not run"),
        ("transformer.audio_ff_bias", False, "transformer.audio_ff_bias=False"),
        ("transformer.connector_ff_bias", False, "transformer.connector_ff_bias=False"),
        ("transformer.use_prompt_adaln_single", False, "transformer.use_prompt_adaln_single=False"),
        ("transformer.caption_proj_input_norm", True, "transformer.caption_proj_input_norm=True"),
        ("transformer.rope_type", "interleaved", "transformer.rope_type='interleaved'; this LTX-2 code builds 'split'"),
        ("transformer.audio_num_attention_heads", 8, "8 audio heads and 4 video heads"),
        ("transformer.use_middle_indices_grid", False, "use_middle_indices_grid=False"),
        ("transformer.qk_norm", None, "transformer.qk_norm=None"),
        ("vae.timestep_conditioning", True, "LTX-2 decoders have none"),
        ("vae.norm_layer", "group_norm", "vae.norm_layer='group_norm'"),
        ("vae._class_name", "CausalDiffusionVAE", "vae._class_name='CausalDiffusionVAE'"),
        ("vae.decoder_blocks", [["attn", {}]], "decoder block 'attn'"),
        ("vae.decoder_blocks", [["res_x_y", {}]], "decoder block 'res_x_y'"),
        ("vae.decoder_blocks", [["res_x", {}]], "lacks 'vae.decoder_blocks.res_x.num_layers'"),
        ("vae.encoder_blocks", [["compress_all", {}]], "encoder block 'compress_all'"),
        ("vae.encoder_blocks", [["res_x", {}]], "lacks 'vae.encoder_blocks.res_x.num_layers'"),
        ("vae.latent_log_var", "per_channel", "vae.latent_log_var='per_channel'"),
        ("vae.spatial_padding_mode", "replicate", "vae.spatial_padding_mode='replicate'"),
        ("audio_vae.model.params.ddconfig.double_z", False, "double_z=False"),
        ("audio_vae.preprocessing.stft.causal", False, "stft.causal=False"),
        ("vae.decoder_blocks", [["res_x", {"inject_noise": True}]], "injects noise"),
        ("audio_vae.model.params.ddconfig.causality_axis", "width", "causality_axis='width'"),
        ("audio_vae.model.params.ddconfig.mid_block_add_attention", True, "mid_block_add_attention=True"),
        ("vocoder.resblock", "AMP1", "vocoder.resblock='AMP1'"),
        ("vocoder.bwe", {}, "no 'vocoder' section"),
    ],
)
def test_other_official_architectures_are_refused(official: dict[str, Any], path: str, value: Any, says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        from_official(edited(official, path, value))
    assert says in str(raised.value)


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("transformer.ff_bias", False, "transformer.ff_bias=False, so it is LTX-2.5"),
        ("transformer.use_prompt_adaln_single", False, "transformer.use_prompt_adaln_single=False"),
        ("transformer.rope_type", "interleaved", "rope_type='interleaved'"),
        ("transformer.audio_num_attention_heads", 8, "different numbers of audio and video heads"),
        ("transformer.qk_norm", "layer_norm", "transformer.qk_norm='layer_norm'"),
        ("connectors.rope_type", "interleaved", "rope_type='interleaved'"),
        ("vae.upsample_type", ["nearest"] * 3, "upsample_type 'nearest'"),
        ("vae.downsample_type", ["conv"] * 4, "downsample_type 'conv'"),
        ("vae.timestep_conditioning", True, "is not LTX-2's decoder"),
        ("vae.decoder_inject_noise", [False, True, False, False], "is not LTX-2's decoder"),
        ("vae.decoder_spatio_temporal_scaling", [True, True, False], "is not LTX-2's decoder"),
        ("vae.spatio_temporal_scaling", False, "is not LTX-2's encoder"),
        ("vae.encoder_causal", False, "is not LTX-2's encoder"),
        ("vae.encoder_spatial_padding_mode", "circular", "vae.encoder_spatial_padding_mode='circular'"),
        ("audio_vae.double_z", False, "audio_vae.double_z=False"),
        ("audio_vae.attn_resolutions", [8], "attention levels"),
        ("audio_vae.causality_axis", "width", "audio_vae.causality_axis='width'"),
        ("vocoder._class_name", "LTX2VocoderWithBWE", "lacks 'vocoder.input_sampling_rate'"),
        ("vocoder._class_name", "Vocos", "is of a Vocos"),
        ("vocoder.act_fn", "snakebeta", "vocoder.act_fn='snakebeta'"),
        ("vocoder.leaky_relu_negative_slope", 0.2, "vocoder.leaky_relu_negative_slope=0.2"),
        ("transformer.vae_scale_factors", [8, 16, 16], "transformer.vae_scale_factors=[8, 16, 16]"),
        ("transformer.audio_hop_length", 80, "transformer.audio_hop_length=80"),
    ],
)
def test_other_diffusers_architectures_are_refused(diffusers: dict[str, Any], path: str, value: Any, says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        from_diffusers(edited(diffusers, path, value))
    assert says in str(raised.value)


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("vocoder.act_fn", "snake", "vocoder.act_fn='snake'"),
        ("vocoder.bwe_antialias", False, "vocoder.bwe_antialias=False"),
        ("vocoder.antialias_ratio", 4, "vocoder.antialias_ratio=4"),
        ("vocoder.final_act_fn", "relu", "final_act_fn='relu'"),
    ],
)
def test_other_diffusers_2_3_vocoders_are_refused(
    diffusers_2_3: dict[str, Any], path: str, value: Any, says: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        from_diffusers(edited(diffusers_2_3, path, value))
    assert says in str(raised.value)


@pytest.mark.parametrize(
    ("path", "value"),
    [("vocoder.vocoder.resblock", "1"), ("vocoder.bwe.activation", "snake"), ("vocoder.bwe.stereo", False)],
)
def test_other_official_2_3_vocoders_are_refused(official_2_3: dict[str, Any], path: str, value: Any) -> None:
    with pytest.raises(ConfigError) as raised:
        from_official(edited(official_2_3, path, value))
    assert f"{path}={value!r}" in str(raised.value)
