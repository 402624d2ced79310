"""Checkpoint names: against the diffusers converters, and whole-segment renaming where substrings would go wrong."""

from collections.abc import Callable
from typing import Any

import pytest
from diffusers.loaders import single_file_utils
from tiny_ltx2 import official_tensors, tiny_checkpoints
from torch import Tensor

from vgen.models.ltx2 import keys


def strip(component: str, names: list[str]) -> dict[str, str]:
    """Our names of a component's tensors in an official file, by their names there."""
    owners = {name: keys.owner(name, keys.OFFICIAL) for name in names if not name.startswith(keys.OFFICIAL_IGNORED)}
    return {
        name: keys.rename(name, keys.OFFICIAL[component], owner[1])
        for name, owner in owners.items()
        if owner is not None and owner[0] == component
    }


@pytest.mark.parametrize(
    ("part", "prefix", "convert"),
    [
        ("transformer", "model.diffusion_model.", single_file_utils.convert_ltx2_transformer_to_diffusers),
        ("vae", "vae.", single_file_utils.convert_ltx2_vae_to_diffusers),
        ("audio_vae", "audio_vae.", single_file_utils.convert_ltx2_audio_vae_to_diffusers),
    ],
)
def test_the_tiny_official_file_is_what_diffusers_converts(
    part: str, prefix: str, convert: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> None:
    parts = tiny_checkpoints().parts
    official = {name: tensor for name, tensor in official_tensors(parts).items() if name.startswith(prefix)}
    converted, theirs = convert(official), getattr(parts, part).state_dict()
    assert converted.keys() == theirs.keys()
    assert all(converted[name].equal(tensor) for name, tensor in theirs.items())


@pytest.mark.parametrize("component", keys.COMPONENTS)
def test_both_layouts_give_a_component_the_same_names(component: str) -> None:
    parts = tiny_checkpoints().parts
    module: Any = getattr(parts, keys.DIFFUSERS_FOLDERS[component])
    layout = keys.DIFFUSERS[component]
    folder = {
        name: place for name, place in keys.DIFFUSERS_FOLDERS.items() if place == keys.DIFFUSERS_FOLDERS[component]
    }
    ignored = keys.DIFFUSERS_IGNORED.get(keys.DIFFUSERS_FOLDERS[component], ())
    from_diffusers = set()
    for name in module.state_dict():
        owner = keys.owner(name, {other: keys.DIFFUSERS[other] for other in folder})
        assert (owner is None) == name.startswith(ignored or ("\0",)), name
        if owner is not None and owner[0] == component:
            from_diffusers.add(keys.rename(name, layout, owner[1]))
    assert from_diffusers == set(strip(component, list(official_tensors(parts))).values())


def test_every_tensor_of_an_official_file_has_one_owner_or_is_ignored() -> None:
    names = list(official_tensors(tiny_checkpoints().parts))
    owned = [name for component in keys.COMPONENTS for name in strip(component, names)]
    ignored = [name for name in names if name.startswith(keys.OFFICIAL_IGNORED)]
    assert sorted([*owned, *ignored]) == sorted(names)
    statistics = [name for name in ignored if "statistics" in name]
    assert sorted(statistics) == [
        f"vae.per_channel_statistics.{name}" for name in ("channel", "mean-of-stds", "mean-of-stds_over_std-of-means")
    ]


@pytest.mark.parametrize(
    ("component", "theirs", "ours"),
    [
        ("transformer", "time_embed.linear.weight", "adaln_single.linear.weight"),
        ("transformer", "audio_time_embed.linear.weight", "audio_adaln_single.linear.weight"),
        ("transformer", "av_cross_attn_video_a2v_gate.linear.bias", "av_ca_a2v_gate_adaln_single.linear.bias"),
        ("transformer", "av_cross_attn_audio_v2a_gate.linear.bias", "av_ca_v2a_gate_adaln_single.linear.bias"),
        (
            "transformer",
            "transformer_blocks.3.audio_a2v_cross_attn_scale_shift_table",
            "transformer_blocks.3.scale_shift_table_a2v_ca_audio",
        ),
        ("transformer", "transformer_blocks.3.audio_scale_shift_table", "transformer_blocks.3.audio_scale_shift_table"),
        ("transformer", "transformer_blocks.3.ff.net.0.proj.weight", "transformer_blocks.3.ff.net.0.proj.weight"),
        ("transformer", "proj_out.weight", "proj_out.weight"),
        ("video_decoder", "decoder.mid_block.resnets.4.conv1.conv.bias", "up_blocks.0.res_blocks.4.conv1.conv.bias"),
        ("video_decoder", "decoder.up_blocks.0.upsamplers.0.conv.conv.bias", "up_blocks.1.conv.conv.bias"),
        ("video_decoder", "decoder.up_blocks.0.resnets.0.conv2.conv.bias", "up_blocks.2.res_blocks.0.conv2.conv.bias"),
        ("video_decoder", "decoder.up_blocks.2.resnets.0.conv2.conv.bias", "up_blocks.6.res_blocks.0.conv2.conv.bias"),
        ("video_decoder", "latents_std", "per_channel_statistics.std-of-means"),
        ("audio_decoder", "decoder.up.1.block.0.nin_shortcut.conv.bias", "up.1.block.0.nin_shortcut.conv.bias"),
        ("audio_decoder", "latents_mean", "per_channel_statistics.mean-of-means"),
        ("vocoder", "upsamplers.4.weight", "ups.4.weight"),
        ("vocoder", "resnets.14.convs2.1.bias", "resblocks.14.convs2.1.bias"),
        ("vocoder", "conv_in.weight", "conv_pre.weight"),
        ("text_projection", "text_proj_in.weight", "aggregate_embed.weight"),
        (
            "audio_connector",
            "audio_connector.transformer_blocks.1.attn1.norm_k.weight",
            "transformer_1d_blocks.1.attn1.k_norm.weight",
        ),
    ],
)
def test_diffusers_names(component: str, theirs: str, ours: str) -> None:
    folder = keys.DIFFUSERS_FOLDERS[component]
    layouts = {name: keys.DIFFUSERS[name] for name, place in keys.DIFFUSERS_FOLDERS.items() if place == folder}
    owner = keys.owner(theirs, layouts)
    assert owner is not None
    assert owner[0] == component
    assert keys.rename(theirs, keys.DIFFUSERS[component], owner[1]) == ours


def test_the_longest_prefix_owns_a_name() -> None:
    name = "model.diffusion_model.video_embeddings_connector.learnable_registers"
    assert keys.owner(name, keys.OFFICIAL) == ("video_connector", "model.diffusion_model.video_embeddings_connector.")
    assert keys.owner("model.diffusion_model.proj_out.bias", keys.OFFICIAL) == ("transformer", "model.diffusion_model.")
    assert keys.owner("vocoder.vocoder.ups.0.bias", keys.OFFICIAL) == ("vocoder", "vocoder.")
    assert keys.rename("vocoder.vocoder.ups.0.bias", keys.OFFICIAL["vocoder"], "vocoder.") == "vocoder.ups.0.bias"
    assert keys.owner("duration_head.linear.weight", keys.OFFICIAL) is None
    assert keys.owner("vae.per_channel_statistics.channel", keys.OFFICIAL) is None
