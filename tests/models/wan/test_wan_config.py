"""Wan's architecture records: what the checkpoints' configs say, what they leave out, and what is refused."""

import inspect
import json
from typing import Any

import pytest
from diffusers import AutoencoderKLWan, WanTransformer3DModel

from vgen.models.errors import ConfigError
from vgen.models.wan.config import (
    VAE_2_1,
    VAE_2_2,
    WanTransformerConfig,
    transformer_config,
    transformer_config_original,
    vae_config,
)

ORIGINAL_5B = {
    "_class_name": "WanModel",
    "_diffusers_version": "0.33.0",
    "dim": 3072,
    "eps": 1e-06,
    "ffn_dim": 14336,
    "freq_dim": 256,
    "in_dim": 48,
    "model_type": "ti2v",
    "num_heads": 24,
    "num_layers": 30,
    "out_dim": 48,
    "text_len": 512,
}
CONFIG_5B = WanTransformerConfig(
    num_attention_heads=24,
    attention_head_dim=128,
    in_channels=48,
    out_channels=48,
    text_dim=4096,
    freq_dim=256,
    ffn_dim=14336,
    num_layers=30,
)
ORIGINAL_I2V = ORIGINAL_5B | {"model_type": "i2v", "dim": 5120, "num_heads": 40, "in_dim": 36, "out_dim": 16}
CLIP_SHAPES = {"img_emb.proj.1.weight": (1280, 1280), "text_embedding.0.weight": (5120, 4096)}


def written(cls: Any, **sizes: Any) -> dict[str, Any]:
    """The ``config.json`` that diffusers writes of a model with these sizes and its own defaults."""
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(cls.__init__).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    return json.loads(json.dumps({"_class_name": cls.__name__, "_diffusers_version": "0.35.0", **defaults, **sizes}))


def diffusers_5b(**changes: Any) -> dict[str, Any]:
    sizes = {"num_attention_heads": 24, "ffn_dim": 14336, "num_layers": 30, "in_channels": 48, "out_channels": 48}
    return written(WanTransformer3DModel, **{**sizes, **changes})


def diffusers_vae_2_2(**changes: Any) -> dict[str, Any]:
    sizes = {
        "base_dim": 160,
        "decoder_base_dim": 256,
        "z_dim": 48,
        "latents_mean": VAE_2_2.latents_mean,
        "latents_std": VAE_2_2.latents_std,
        "is_residual": True,
        "in_channels": 12,
        "out_channels": 12,
        "patch_size": 2,
        "scale_factor_spatial": 16,
        # Not an argument of the class, yet in the published file.
        "clip_output": False,
    }
    return written(AutoencoderKLWan, **{**sizes, **changes})


def test_both_layouts_describe_one_transformer() -> None:
    assert transformer_config(diffusers_5b()) == transformer_config_original(ORIGINAL_5B) == CONFIG_5B
    assert CONFIG_5B.width == 3072


def test_the_published_files_of_2_1_leave_out_what_came_later() -> None:
    config = diffusers_5b()
    del config["pos_embed_seq_len"]
    assert transformer_config(config) == CONFIG_5B
    vae = written(AutoencoderKLWan)
    for name in ("decoder_base_dim", "is_residual", "in_channels", "out_channels", "patch_size"):
        del vae[name]
    del vae["scale_factor_temporal"], vae["scale_factor_spatial"]
    assert vae_config(vae) == VAE_2_1


def test_the_vaes_of_the_original_layout_are_those_of_the_folders() -> None:
    assert vae_config(written(AutoencoderKLWan)) == VAE_2_1
    assert vae_config(diffusers_vae_2_2()) == VAE_2_2
    for vae, frames, pixels in ((VAE_2_1, 4, 8), (VAE_2_2, 4, 16)):
        assert (vae.scale_factor_temporal, vae.scale_factor_spatial) == (frames, pixels)
        assert len(vae.latents_mean) == len(vae.latents_std) == vae.z_dim
        assert vae.temporal_downsample == (False, True, True)


def test_every_value_of_a_transformer_is_read() -> None:
    sizes = {
        "num_attention_heads": 3,
        "attention_head_dim": 22,
        "in_channels": 5,
        "out_channels": 7,
        "text_dim": 11,
        "freq_dim": 26,
        "ffn_dim": 13,
        "num_layers": 4,
        "eps": 1e-3,
        "cross_attn_norm": False,
        "image_dim": 9,
        "added_kv_proj_dim": 66,
        "pos_embed_seq_len": 10,
        "rope_max_seq_len": 17,
    }
    config = transformer_config(written(WanTransformer3DModel, **sizes))
    assert {name: getattr(config, name) for name in sizes} == sizes
    assert (config.patch_size, config.qk_norm, config.width) == ((1, 2, 2), "rms_norm_across_heads", 66)
    assert transformer_config(diffusers_5b(out_channels=None)).out_channels == 48


def test_every_value_of_a_vae_is_read() -> None:
    sizes = {
        "base_dim": 6,
        "decoder_base_dim": 10,
        "z_dim": 2,
        "latents_mean": (0.5, -1.0),
        "latents_std": (2.0, 3.0),
        "dim_mult": (1, 2),
        "num_res_blocks": 1,
        "in_channels": 48,
        "out_channels": 48,
        "patch_size": 4,
        "is_residual": True,
        "scale_factor_temporal": 2,
        "scale_factor_spatial": 8,
    }
    config = vae_config(written(AutoencoderKLWan, temperal_downsample=(True,), **sizes))
    assert {name: getattr(config, name) for name in sizes} == sizes
    assert config.temporal_downsample == (True,)


def test_every_value_of_an_original_transformer_is_read() -> None:
    original = {
        "model_type": "flf2v",
        "dim": 66,
        "num_heads": 3,
        "eps": 1e-3,
        "ffn_dim": 13,
        "freq_dim": 26,
        "in_dim": 5,
        "out_dim": 7,
        "num_layers": 4,
    }
    shapes = {
        "img_emb.proj.1.weight": (9, 9),
        "img_emb.emb_pos": (1, 10, 9),
        "text_embedding.0.weight": (66, 11),
    }
    assert transformer_config_original(original, shapes) == WanTransformerConfig(
        num_attention_heads=3,
        attention_head_dim=22,
        in_channels=5,
        out_channels=7,
        text_dim=11,
        freq_dim=26,
        ffn_dim=13,
        num_layers=4,
        eps=1e-3,
        image_dim=9,
        added_kv_proj_dim=66,
        pos_embed_seq_len=10,
    )


def test_tensors_tell_the_image_models_of_2_1_and_2_2_apart() -> None:
    a14b = transformer_config_original(ORIGINAL_I2V, {"text_embedding.0.weight": (5120, 4096)})
    wan_2_1 = transformer_config_original(ORIGINAL_I2V, CLIP_SHAPES)
    assert (a14b.image_dim, a14b.added_kv_proj_dim, a14b.pos_embed_seq_len) == (None, None, None)
    assert (wan_2_1.image_dim, wan_2_1.added_kv_proj_dim, wan_2_1.pos_embed_seq_len) == (1280, 5120, None)
    assert (a14b.in_channels, a14b.text_dim, a14b.width) == (36, 4096, 5120)
    with pytest.raises(ConfigError, match=r"model_type='i2v', which 2\.1 and 2\.2 build differently; give the shapes"):
        transformer_config_original(ORIGINAL_I2V)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"_class_name": "WanVACETransformer3DModel"}, "'WanVACETransformer3DModel'; this code builds 'WanTrans"),
        ({"qk_norm": "rms_norm"}, "qk_norm='rms_norm'; this code builds 'rms_norm_across_heads' only"),
        ({"patch_size": [1, 4, 4]}, r"patch_size=\[1, 4, 4\]; this code builds \[1, 2, 2\] only"),
        ({"window_size": [8, 8]}, r"window_size=\[8, 8\]"),
        ({"num_layers": None}, "transformer/config.json lacks 'num_layers'; use the file that came with the weights"),
        ({"attention_head_dim": 127}, "heads of 127 values; positions turn pairs"),
        ({"freq_dim": 255}, "freq_dim=255; a timestep is as many cosines as sines"),
        ({"image_dim": 1280}, "image_dim=1280 and added_kv_proj_dim=None; a model that reads image tokens has both"),
        ({"image_dim": 1280, "added_kv_proj_dim": 1280}, "image tokens arrive in the model's width, 3072"),
        ({"pos_embed_seq_len": 514}, "pos_embed_seq_len=514 and no image_dim"),
    ],
)
def test_another_transformer_is_refused_in_one_sentence(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        transformer_config(diffusers_5b(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"_class_name": "VaceWanModel"}, "_class_name='VaceWanModel'; this code builds 'WanModel' only"),
        ({"model_type": "s2v"}, "model_type='s2v'; this code builds t2v, i2v, ti2v, flf2v"),
        ({"text_len": 256}, "text_len=256; this code builds 512 only"),
        ({"num_heads": 23}, "dim=3072, which its num_heads=23 does not divide"),
        ({"dim": None}, "config.json lacks 'dim'"),
    ],
)
def test_another_original_transformer_is_refused_in_one_sentence(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        transformer_config_original(ORIGINAL_5B | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"_class_name": "AutoencoderKL"}, "_class_name='AutoencoderKL'; this code builds 'AutoencoderKLWan' only"),
        ({"attn_scales": [0.5]}, r"attn_scales=\[0.5\]"),
        ({"z_dim": 16}, "z_dim=16, 48 latents_mean and 48 latents_std; give one of each per latent channel"),
        ({"latents_std": [1.0]}, "z_dim=48, 48 latents_mean and 1 latents_std"),
        ({"latents_mean": None}, "vae/config.json lacks 'latents_mean'"),
        ({"temperal_downsample": [True, True]}, "has 4 levels and 2 temperal_downsample"),
        ({"temperal_downsample": [True, True, True]}, "scale_factor_temporal=4; its levels and patches make 8"),
        ({"scale_factor_spatial": 8}, "scale_factor_spatial=8; its levels and patches make 16"),
        ({"in_channels": 3}, "3 channels in and 12 out; RGB in patches of 2 is 12"),
        ({"out_channels": 3}, "12 channels in and 3 out"),
    ],
)
def test_another_vae_is_refused_in_one_sentence(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        vae_config(diffusers_vae_2_2(**changes))
