"""Architecture records: both dialects describe one model, and nothing that no shape reveals is guessed."""

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
from tiny_ltx2 import diffusers_configs, official_config, tiny_checkpoints

from vgen.models.ltx2.config import ConfigError, DecoderBlock, LTX2Config, from_diffusers, from_official


@pytest.fixture
def official() -> dict[str, Any]:
    return copy.deepcopy(official_config(tiny_checkpoints().parts))


@pytest.fixture
def diffusers() -> dict[str, Any]:
    return copy.deepcopy(dict(diffusers_configs(tiny_checkpoints().diffusers)))


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


def test_both_dialects_give_equal_records(official: dict[str, Any], diffusers: dict[str, Any]) -> None:
    ours, theirs = from_official(official), from_diffusers(diffusers)
    for field in dataclasses.fields(LTX2Config):
        assert getattr(ours, field.name) == getattr(theirs, field.name), field.name


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


def test_a_2_0_file_without_a_padding_mode_reflects(official: dict[str, Any]) -> None:
    config = from_official(edited(official, "vae.spatial_padding_mode", delete=True))
    assert config.video_decoder.spatial_padding_mode == "reflect"


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
    "vae.decoder_blocks",
]


@pytest.mark.parametrize("path", OFFICIAL_REQUIRED)
def test_a_missing_official_value_is_refused_by_name(official: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError, match=f"lacks '{path}', which no tensor shape reveals"):
        from_official(edited(official, path, delete=True))


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
        "decoder_spatial_padding_mode"
    ),
    "audio_vae": (
        "base_channels ch_mult num_res_blocks output_channels latent_channels mel_bins sample_rate mel_hop_length"
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
    ("path", "value", "says"),
    [
        ("transformer.apply_gated_attention", True, "so it is LTX-2.3"),
        ("transformer.cross_attention_adaln", True, "so it is LTX-2.3"),
        ("transformer.caption_proj_before_connector", True, "so it is LTX-2.3"),
        ("transformer.connector_apply_gated_attention", True, "so it is LTX-2.3"),
        ("transformer.rope_type", "interleaved", "transformer.rope_type='interleaved'; this LTX-2 code builds 'split'"),
        ("transformer.audio_num_attention_heads", 8, "8 audio heads and 4 video heads"),
        ("transformer.use_middle_indices_grid", False, "use_middle_indices_grid=False"),
        ("transformer.qk_norm", None, "transformer.qk_norm=None"),
        ("vae.timestep_conditioning", True, "LTX-2 decoders have none"),
        ("vae.norm_layer", "group_norm", "vae.norm_layer='group_norm'"),
        ("vae._class_name", "CausalDiffusionVAE", "vae._class_name='CausalDiffusionVAE'"),
        ("vae.decoder_blocks", [["compress_time", {"multiplier": 2}]], "decoder block 'compress_time'"),
        ("vae.decoder_blocks", [["res_x", {"inject_noise": True}]], "injects noise"),
        ("audio_vae.model.params.ddconfig.causality_axis", "width", "causality_axis='width'"),
        ("audio_vae.model.params.ddconfig.mid_block_add_attention", True, "mid_block_add_attention=True"),
        ("vocoder.resblock", "AMP1", "vocoder.resblock='AMP1'"),
        ("vocoder.bwe", {}, "so it is LTX-2.3"),
    ],
)
def test_other_official_architectures_are_refused(official: dict[str, Any], path: str, value: Any, says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        from_official(edited(official, path, value))
    assert says in str(raised.value)


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("transformer.gated_attn", True, "so it is LTX-2.3"),
        ("transformer.audio_cross_attn_mod", True, "so it is LTX-2.3"),
        ("transformer.rope_type", "interleaved", "rope_type='interleaved'"),
        ("transformer.audio_num_attention_heads", 8, "different numbers of audio and video heads"),
        ("transformer.qk_norm", "layer_norm", "transformer.qk_norm='layer_norm'"),
        ("connectors.per_modality_projections", True, "is of LTX-2.3"),
        ("connectors.video_gated_attn", True, "is of LTX-2.3"),
        ("connectors.rope_type", "interleaved", "rope_type='interleaved'"),
        ("vae.upsample_type", ["spatial"] * 3, "is not the LTX-2 2.0 decoder"),
        ("vae.timestep_conditioning", True, "is not the LTX-2 2.0 decoder"),
        ("audio_vae.attn_resolutions", [8], "attention levels"),
        ("audio_vae.causality_axis", "width", "audio_vae.causality_axis='width'"),
        ("vocoder._class_name", "LTX2VocoderWithBWE", "is not the LTX-2 2.0 vocoder"),
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
