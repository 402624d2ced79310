"""Checkpoint names: against the diffusers converters, and whole-segment renaming where substrings would go wrong."""

from collections.abc import Callable
from typing import Any

import pytest
from diffusers.loaders import single_file_utils
from torch import Tensor

from tests.tiny_ltx2 import Version, build_upsampler, official_tensors, tiny_checkpoints
from vgen.models.ltx2 import keys
from vgen.models.names import owners, rename


def strip(component: str, names: list[str]) -> dict[str, str]:
    """Our names of a component's tensors in an official file, by their names there."""
    owned_by = {name: owners(name, keys.OFFICIAL) for name in names if not name.startswith(keys.OFFICIAL_IGNORED)}
    return {
        name: rename(name, keys.OFFICIAL[component], prefixes[component])
        for name, prefixes in owned_by.items()
        if component in prefixes
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


@pytest.mark.parametrize("version", ["2.0", "2.3"])
@pytest.mark.parametrize("component", keys.COMPONENTS)
def test_both_layouts_give_a_component_the_same_names(component: str, version: Version) -> None:
    parts = tiny_checkpoints(version).parts
    module: Any = getattr(parts, keys.DIFFUSERS_FOLDERS[component])
    layouts = {
        name: keys.DIFFUSERS[name]
        for name, folder in keys.DIFFUSERS_FOLDERS.items()
        if folder == keys.DIFFUSERS_FOLDERS[component]
    }
    from_diffusers = set()
    for name in module.state_dict():
        owned_by = owners(name, layouts)
        assert owned_by, name
        if component in owned_by:
            from_diffusers.add(rename(name, layouts[component], owned_by[component]))
    assert from_diffusers == set(strip(component, list(official_tensors(parts))).values())


@pytest.mark.parametrize("version", ["2.0", "2.3"])
def test_every_tensor_of_an_official_file_is_owned_or_ignored(version: Version) -> None:
    names = list(official_tensors(tiny_checkpoints(version).parts))
    owned = [name for component in keys.COMPONENTS for name in strip(component, names)]
    ignored = [name for name in names if name.startswith(keys.OFFICIAL_IGNORED)]
    # Encoder and decoder both have the statistics of their VAE.
    shared = [f"{vae}.{name}" for vae in ("vae", "audio_vae") for name in keys.STATISTICS]
    assert sorted([*owned, *ignored]) == sorted([*names, *shared])
    unused = ("channel", "mean-of-stds", "mean-of-stds_over_std-of-means") if version == "2.0" else ()
    assert sorted(ignored) == [f"vae.per_channel_statistics.{name}" for name in unused]


def test_an_upsampler_has_the_official_names() -> None:
    """Lightricks/LTX-2 at 400fd31, ``model/upsampler``: the same modules under the same names as in diffusers."""
    rational, shuffled = (set(build_upsampler(rational=value).state_dict()) for value in (True, False))
    assert rational - shuffled == {f"upsampler.{name}" for name in ("conv.weight", "conv.bias", "blur_down.kernel")}
    assert shuffled - rational == {"upsampler.0.weight", "upsampler.0.bias"}


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
        ("vocoder", "vocoder.upsamplers.4.weight", "vocoder.ups.4.weight"),
        ("vocoder", "bwe_generator.act_out.act.beta", "bwe_generator.act_post.act.beta"),
        (
            "vocoder",
            "vocoder.resnets.0.acts1.2.downsample.filter",
            "vocoder.resblocks.0.acts1.2.downsample.lowpass.filter",
        ),
        ("vocoder", "vocoder.resnets.0.acts2.1.upsample.filter", "vocoder.resblocks.0.acts2.1.upsample.filter"),
        ("vocoder", "mel_stft.stft_fn.forward_basis", "mel_stft.stft_fn.forward_basis"),
        ("transformer", "prompt_adaln.linear.weight", "prompt_adaln_single.linear.weight"),
        ("transformer", "audio_prompt_adaln.linear.weight", "audio_prompt_adaln_single.linear.weight"),
        (
            "transformer",
            "transformer_blocks.3.prompt_scale_shift_table",
            "transformer_blocks.3.prompt_scale_shift_table",
        ),
        (
            "transformer",
            "transformer_blocks.3.attn1.to_gate_logits.bias",
            "transformer_blocks.3.attn1.to_gate_logits.bias",
        ),
        (
            "video_encoder",
            "encoder.down_blocks.0.resnets.3.conv1.conv.bias",
            "down_blocks.0.res_blocks.3.conv1.conv.bias",
        ),
        ("video_encoder", "encoder.down_blocks.3.downsamplers.0.conv.conv.bias", "down_blocks.7.conv.conv.bias"),
        ("video_encoder", "encoder.mid_block.resnets.1.conv2.conv.bias", "down_blocks.8.res_blocks.1.conv2.conv.bias"),
        ("video_encoder", "latents_mean", "per_channel_statistics.mean-of-means"),
        ("video_decoder", "decoder.up_blocks.3.upsamplers.0.conv.conv.bias", "up_blocks.7.conv.conv.bias"),
        ("audio_encoder", "encoder.down.1.downsample.conv.bias", "down.1.downsample.conv.bias"),
        ("audio_encoder", "latents_std", "per_channel_statistics.std-of-means"),
        ("text_projection", "text_proj_in.weight", "aggregate_embed.weight"),
        ("text_projection", "video_text_proj_in.bias", "video_aggregate_embed.bias"),
        ("text_projection", "audio_text_proj_in.weight", "audio_aggregate_embed.weight"),
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
    prefix = owners(theirs, layouts)[component]
    assert rename(theirs, keys.DIFFUSERS[component], prefix) == ours


def test_the_longest_prefix_owns_a_name() -> None:
    connector = "model.diffusion_model.video_embeddings_connector."
    owned_by = owners(f"{connector}learnable_registers", keys.OFFICIAL)
    assert owned_by == {"video_connector": connector}
    assert owners("model.diffusion_model.proj_out.bias", keys.OFFICIAL) == {"transformer": "model.diffusion_model."}
    assert owners("vocoder.vocoder.ups.0.bias", keys.OFFICIAL) == {"vocoder": "vocoder."}
    assert rename("vocoder.vocoder.ups.0.bias", keys.OFFICIAL["vocoder"], "vocoder.") == "vocoder.ups.0.bias"
    assert owners("duration_head.linear.weight", keys.OFFICIAL) == {}
    assert owners("vae.per_channel_statistics.channel", keys.OFFICIAL) == {}
    mean = "vae.per_channel_statistics.mean-of-means"
    assert owners(mean, keys.OFFICIAL) == {"video_encoder": mean, "video_decoder": mean}
