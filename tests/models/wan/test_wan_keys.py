"""Checkpoint names: the original layout, spelled out, against modules of diffusers and transformers at full size."""

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from diffusers.loaders import single_file_utils
from transformers import CLIPVisionConfig, CLIPVisionModel, UMT5Config, UMT5EncoderModel

from vgen.models.names import Layout, owners, rename
from vgen.models.wan import keys
from vgen.models.wan.encoder_configs import CLIP_VIT_H14, UMT5_XXL
from vgen.models.wan.image_encoder import build_image_encoder
from vgen.models.wan.text import build_text_encoder

_LARGE = {"num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40}
_IMAGE = {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120}
VARIANTS: dict[str, tuple[dict[str, Any], int]] = {
    "wan21_t2v_1_3b": ({"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}, 825),
    "wan21_t2v_14b": (_LARGE, 1095),
    "wan21_i2v_14b": (_LARGE | _IMAGE, 1303),
    "wan21_flf2v_14b": (_LARGE | _IMAGE | {"pos_embed_seq_len": 514}, 1304),
    "wan22_i2v_a14b": (_LARGE | {"in_channels": 36}, 1095),
    "wan22_ti2v_5b": (
        {"num_attention_heads": 24, "ffn_dim": 14336, "num_layers": 30, "in_channels": 48, "out_channels": 48},
        825,
    ),
}
"""Sizes and numbers of tensors of every published transformer."""

VAE_2_2 = {
    "base_dim": 160,
    "decoder_base_dim": 256,
    "z_dim": 48,
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
    "latents_mean": [0.0] * 48,
    "latents_std": [1.0] * 48,
}


def both(*names: str) -> list[str]:
    return [f"{name}.{kind}" for name in names for kind in ("weight", "bias")]


def original_transformer(num_layers: int, image: bool, positions: bool) -> Iterator[str]:
    """Wan-Video/Wan2.1 at 9737cba, ``wan/modules/model.py``."""
    yield from both("patch_embedding", "text_embedding.0", "text_embedding.2", "time_embedding.0", "time_embedding.2")
    yield from both("time_projection.1", "head.head")
    yield "head.modulation"
    if image:
        yield from both(*(f"img_emb.proj.{index}" for index in (0, 1, 3, 4)))
    if positions:
        yield "img_emb.emb_pos"
    for layer in range(num_layers):
        block = f"blocks.{layer}"
        yield f"{block}.modulation"
        yield from both(f"{block}.norm3", f"{block}.ffn.0", f"{block}.ffn.2")
        for attention in ("self_attn", "cross_attn"):
            yield from both(*(f"{block}.{attention}.{part}" for part in "qkvo"))
            yield from (f"{block}.{attention}.{norm}.weight" for norm in ("norm_q", "norm_k"))
        if image:
            yield from both(f"{block}.cross_attn.k_img", f"{block}.cross_attn.v_img")
            yield f"{block}.cross_attn.norm_k_img.weight"


def original_resnet(block: str, shortcut: bool) -> Iterator[str]:
    yield from (f"{block}.residual.{norm}.gamma" for norm in (0, 3))
    yield from both(f"{block}.residual.2", f"{block}.residual.6")
    if shortcut:
        yield from both(f"{block}.shortcut")


def original_half(half: str) -> Iterator[str]:
    """What the encoders and decoders of both VAEs have in common."""
    yield from both(f"{half}.conv1", f"{half}.head.2", f"{half}.middle.1.to_qkv", f"{half}.middle.1.proj")
    yield from (f"{half}.head.0.gamma", f"{half}.middle.1.norm.gamma")
    for index in (0, 2):
        yield from original_resnet(f"{half}.middle.{index}", shortcut=False)


def original_vae_2_1() -> Iterator[str]:
    """``wan/modules/vae.py``: blocks of a level and its resampler, one after another."""
    yield from both("conv1", "conv2")
    for half, list_, resamplers, temporal, shortcuts in (
        ("encoder", "downsamples", (2, 5, 8), (5, 8), (3, 6)),
        ("decoder", "upsamples", (3, 7, 11), (3, 7), (4,)),
    ):
        yield from original_half(half)
        for index in range(11 if half == "encoder" else 15):
            block = f"{half}.{list_}.{index}"
            if index not in resamplers:
                yield from original_resnet(block, index in shortcuts)
                continue
            yield from both(f"{block}.resample.1", *([f"{block}.time_conv"] if index in temporal else []))


def original_vae_2_2() -> Iterator[str]:
    """Wan-Video/Wan2.2 at 42bf4cf, ``wan/modules/vae2_2.py``: a list for each level, its resampler the last."""
    yield from both("conv1", "conv2")
    for half, list_, num_resnets, temporal, shortcuts in (
        ("encoder", "downsamples", 2, (1, 2), (1, 2)),
        ("decoder", "upsamples", 3, (0, 1), (2, 3)),
    ):
        yield from original_half(half)
        for level in range(4):
            blocks = f"{half}.{list_}.{level}.{list_}"
            for index in range(num_resnets):
                yield from original_resnet(f"{blocks}.{index}", index == 0 and level in shortcuts)
            if level < 3:
                yield from both(f"{blocks}.{num_resnets}.resample.1")
            if level in temporal:
                yield from both(f"{blocks}.{num_resnets}.time_conv")


def original_text_encoder(num_layers: int) -> Iterator[str]:
    """``wan/modules/t5.py``."""
    yield from ("token_embedding.weight", "norm.weight")
    for layer in range(num_layers):
        for part in ("norm1", "norm2", "pos_embedding.embedding", "ffn.gate.0", "ffn.fc1", "ffn.fc2"):
            yield f"blocks.{layer}.{part}.weight"
        yield from (f"blocks.{layer}.attn.{part}.weight" for part in "qkvo")


def original_image_encoder(num_layers: int) -> Iterator[str]:
    """``wan/modules/clip.py``, a few names of the text model included."""
    yield from ("visual.cls_embedding", "visual.pos_embedding", "visual.patch_embedding.weight")
    yield from both("visual.pre_norm", "visual.post_norm")
    for layer in range(num_layers):
        yield from both(
            *(f"visual.transformer.{layer}.{part}" for part in ("norm1", "norm2", "attn.to_qkv", "attn.proj")),
            *(f"visual.transformer.{layer}.mlp.{part}" for part in (0, 2)),
        )
    yield from ("visual.head", "log_scale", "textual.token_embedding.weight", "textual.head.0.weight")


def renamed(names: Iterable[str], component: str, table: dict[str, Layout] | None = None) -> dict[str, str]:
    """Our name of each; all must be owned."""
    layouts = {component: (table or keys.ORIGINAL)[component]}
    found = {}
    for name in names:
        prefixes = owners(name, layouts)
        assert prefixes, name
        found[name] = rename(name, layouts[component], prefixes[component])
    return found


def parameters(cls: Any, *args: Any, **sizes: Any) -> list[str]:
    with torch.device("meta"):
        return list(cls(*args, **sizes).state_dict())


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_transformer_has_the_names_of_diffusers(variant: str) -> None:
    sizes, count = VARIANTS[variant]
    image, positions = "image_dim" in sizes, "pos_embed_seq_len" in sizes
    ours = renamed(original_transformer(sizes["num_layers"], image, positions), "transformer")
    expected = parameters(WanTransformer3DModel, **sizes)
    assert sorted(ours.values()) == sorted(expected)
    assert len(ours) == count
    theirs = single_file_utils.convert_wan_transformer_to_diffusers({name: name for name in ours})
    # Their table lacks the positions of first and last frame.
    known = {new: old for new, old in theirs.items() if old != "img_emb.emb_pos"}
    assert known == {new: old for old, new in ours.items() if old != "img_emb.emb_pos"}


def test_the_vae_of_2_1_has_the_names_of_diffusers() -> None:
    ours = renamed(original_vae_2_1(), "vae_2_1")
    assert sorted(ours.values()) == sorted(parameters(AutoencoderKLWan))
    assert len(ours) == 194
    theirs = single_file_utils.convert_wan_vae_to_diffusers({name: name for name in ours})
    assert theirs == {new: old for old, new in ours.items()}


def test_the_vae_of_2_2_has_the_names_of_diffusers() -> None:
    ours = renamed(original_vae_2_2(), "vae_2_2")
    assert sorted(ours.values()) == sorted(parameters(AutoencoderKLWan, **VAE_2_2))
    assert len(ours) == 196


def test_the_text_encoder_has_the_names_of_transformers() -> None:
    ours = renamed(original_text_encoder(24), "text_encoder")
    assert sorted(ours.values()) == sorted(build_text_encoder(UMT5_XXL).state_dict())
    assert len(ours) == 242


def test_the_image_encoder_has_the_names_of_transformers() -> None:
    names = [n for n in original_image_encoder(32) if not n.startswith(keys.ORIGINAL_IGNORED["image_encoder"])]
    ours = [part for name in renamed(names, "image_encoder").values() for part in keys.unfuse(name)]
    assert sorted(ours) == sorted(build_image_encoder(CLIP_VIT_H14).state_dict())
    assert len(names) == 7 + 32 * 12


@pytest.mark.parametrize(
    ("component", "theirs", "ours"),
    [
        ("transformer", "blocks.7.norm3.weight", "blocks.7.norm2.weight"),
        ("transformer", "head.modulation", "scale_shift_table"),
        ("transformer", "blocks.7.cross_attn.norm_k_img.weight", "blocks.7.attn2.norm_added_k.weight"),
        ("transformer", "img_emb.emb_pos", "condition_embedder.image_embedder.pos_embed"),
        ("vae_2_1", "encoder.downsamples.10.residual.6.bias", "encoder.down_blocks.10.conv2.bias"),
        ("vae_2_1", "encoder.downsamples.5.time_conv.weight", "encoder.down_blocks.5.time_conv.weight"),
        ("vae_2_1", "decoder.upsamples.4.shortcut.bias", "decoder.up_blocks.1.resnets.0.conv_shortcut.bias"),
        ("vae_2_1", "decoder.upsamples.11.resample.1.bias", "decoder.up_blocks.2.upsamplers.0.resample.1.bias"),
        ("vae_2_2", "conv1.weight", "quant_conv.weight"),
        ("vae_2_2", "conv2.bias", "post_quant_conv.bias"),
        ("vae_2_2", "encoder.conv1.weight", "encoder.conv_in.weight"),
        ("vae_2_2", "decoder.head.0.gamma", "decoder.norm_out.gamma"),
        ("vae_2_2", "decoder.middle.2.residual.3.gamma", "decoder.mid_block.resnets.1.norm2.gamma"),
        ("vae_2_2", "decoder.middle.1.norm.gamma", "decoder.mid_block.attentions.0.norm.gamma"),
        (
            "vae_2_2",
            "encoder.downsamples.1.downsamples.0.residual.2.weight",
            "encoder.down_blocks.1.resnets.0.conv1.weight",
        ),
        (
            "vae_2_2",
            "encoder.downsamples.2.downsamples.2.time_conv.bias",
            "encoder.down_blocks.2.downsampler.time_conv.bias",
        ),
        (
            "vae_2_2",
            "decoder.upsamples.3.upsamples.0.residual.0.gamma",
            "decoder.up_blocks.3.resnets.0.norm1.gamma",
        ),
        ("vae_2_2", "decoder.upsamples.0.upsamples.3.resample.1.bias", "decoder.up_blocks.0.upsampler.resample.1.bias"),
        ("text_encoder", "blocks.3.ffn.gate.0.weight", "block.3.layer.1.DenseReluDense.wi_0.weight"),
        ("text_encoder", "blocks.3.ffn.fc1.weight", "block.3.layer.1.DenseReluDense.wi_1.weight"),
        ("text_encoder", "blocks.3.norm2.weight", "block.3.layer.1.layer_norm.weight"),
        ("text_encoder", "norm.weight", "final_layer_norm.weight"),
        ("image_encoder", "visual.transformer.9.norm2.bias", "encoder.layers.9.layer_norm2.bias"),
        ("image_encoder", "visual.transformer.9.mlp.2.bias", "encoder.layers.9.mlp.fc2.bias"),
        ("image_encoder", "visual.transformer.9.attn.proj.bias", "encoder.layers.9.self_attn.out_proj.bias"),
        ("image_encoder", "visual.post_norm.weight", "post_layernorm.weight"),
    ],
)
def test_original_names(component: str, theirs: str, ours: str) -> None:
    assert renamed([theirs], component) == {theirs: ours}


def test_a_fused_tensor_has_its_parts_in_order() -> None:
    name = renamed(["visual.transformer.9.attn.to_qkv.weight"], "image_encoder").popitem()[1]
    assert keys.unfuse(name) == tuple(f"encoder.layers.9.self_attn.{part}_proj.weight" for part in "qkv")
    assert keys.unfuse("encoder.layers.9.self_attn.out_proj.bias") == ("encoder.layers.9.self_attn.out_proj.bias",)


@pytest.mark.parametrize(
    ("component", "name"),
    [
        ("transformer", "vace_blocks.0.modulation"),
        ("transformer", "head.bias"),
        ("vae_2_1", "decoder.upsamples.15.residual.0.gamma"),
        ("vae_2_2", "decoder.upsamples.4.upsamples.0.residual.0.gamma"),
        ("text_encoder", "decoder.norm.weight"),
        ("image_encoder", "visual.head"),
    ],
)
def test_names_of_others_are_not_owned(component: str, name: str) -> None:
    assert owners(name, {component: keys.ORIGINAL[component]}) == {}


@pytest.mark.parametrize("copied", [False, True])
def test_a_folder_s_text_encoder_may_hold_its_embeddings_twice(copied: bool) -> None:
    names = parameters(UMT5EncoderModel, UMT5Config(**UMT5_XXL))
    assert {"shared.weight", "encoder.embed_tokens.weight"} < set(names)
    if not copied:
        names.remove("encoder.embed_tokens.weight")
    kept = [name for name in names if not name.startswith(keys.text_encoder_ignored(names))]
    ours = renamed(kept, "text_encoder", dict(keys.TRANSFORMERS))
    assert sorted(ours.values()) == sorted(build_text_encoder(UMT5_XXL).state_dict())


def test_a_folder_s_text_encoder_may_hold_its_embeddings_under_the_other_name() -> None:
    name = "encoder.embed_tokens.weight"
    assert not name.startswith(keys.text_encoder_ignored([name]))
    assert renamed([name], "text_encoder", dict(keys.TRANSFORMERS)) == {name: "embed_tokens.weight"}


@pytest.mark.parametrize("prefix", ["", "vision_model."])
def test_a_folder_s_image_encoder_is_a_model_or_a_child(prefix: str) -> None:
    expected = parameters(CLIPVisionModel, CLIPVisionConfig(**CLIP_VIT_H14))
    names = [prefix + name for name in (*expected, "embeddings.position_ids")] + ["visual_projection.weight"]
    kept = [name for name in names if not name.startswith(keys.TRANSFORMERS_IGNORED["image_encoder"])]
    assert list(renamed(kept, "image_encoder", dict(keys.TRANSFORMERS)).values()) == expected


def test_a_norm_without_a_query_is_unused() -> None:
    names = [f"blocks.0.attn2.{norm}.weight" for norm in ("norm_added_q", "norm_added_k", "norm_q")]
    assert [keys.unused(name) for name in names] == [True, False, False]
