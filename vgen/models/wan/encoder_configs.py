"""Sizes of Wan's two encoders in the words of transformers; the original layout has no file of them; no torch."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

UMT5_XXL: Mapping[str, Any] = MappingProxyType(
    {
        "model_type": "umt5",
        "vocab_size": 256384,
        "d_model": 4096,
        "d_kv": 64,
        "d_ff": 10240,
        "num_layers": 24,
        "num_heads": 64,
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128,
        "layer_norm_epsilon": 1e-6,
        "feed_forward_proj": "gated-gelu",
        "dropout_rate": 0.1,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }
)
"""The text encoder of every Wan model, google/umt5-xxl."""

CLIP_VIT_H14: Mapping[str, Any] = MappingProxyType(
    {
        "model_type": "clip_vision_model",
        "hidden_size": 1280,
        "intermediate_size": 5120,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "image_size": 224,
        "patch_size": 14,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "projection_dim": 1024,
    }
)
"""The image encoder of every Wan 2.1 image-to-video model."""
