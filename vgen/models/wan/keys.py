"""Checkpoint names of Wan: how the original layout and ``transformers`` rename ours, as data; needs no torch.

Our transformer and VAE use the diffusers names, so those two folders need no table; the text and image encoders are
modules of ``transformers`` and use its names. Each component has files of its own. Prefixes are complete: a tensor that
none of them starts is not the component's.

Source: Wan-Video/Wan2.1 at 9737cba and Wan-Video/Wan2.2 at 42bf4cf (``wan/modules/{model,vae,vae2_2,t5,clip}.py``,
``wan/configs``), huggingface/diffusers 0.42.1 (``loaders/single_file_utils.py``).
"""

from collections.abc import Collection, Mapping

from vgen.models.names import Layout

_LEVELS = 4
"""Of a VAE, each of two residual blocks in the encoder and three in the decoder; all but the last end resampled."""

_ATTENTION = {"q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out.0"}
_IMAGE_ATTENTION = {"k_img": "add_k_proj", "v_img": "add_v_proj", "norm_k_img": "norm_added_k"}

_VAE_PREFIXES = {
    "conv1.": "quant_conv.",
    "conv2.": "post_quant_conv.",
    **{
        f"{half}.{theirs}": f"{half}.{ours}"
        for half in ("encoder", "decoder")
        for theirs, ours in {
            "conv1.": "conv_in.",
            "middle.0.": "mid_block.resnets.0.",
            "middle.1.": "mid_block.attentions.0.",
            "middle.2.": "mid_block.resnets.1.",
            "head.0.": "norm_out.",
            "head.2.": "conv_out.",
        }.items()
    },
}
_RESNET = {
    "residual.0": "norm1",
    "residual.2": "conv1",
    "residual.3": "norm2",
    "residual.6": "conv2",
    "shortcut": "conv_shortcut",
}

ORIGINAL: Mapping[str, Layout] = {
    "transformer": Layout(
        {
            "patch_embedding.": "patch_embedding.",
            "time_embedding.0.": "condition_embedder.time_embedder.linear_1.",
            "time_embedding.2.": "condition_embedder.time_embedder.linear_2.",
            "time_projection.1.": "condition_embedder.time_proj.",
            "text_embedding.0.": "condition_embedder.text_embedder.linear_1.",
            "text_embedding.2.": "condition_embedder.text_embedder.linear_2.",
            "img_emb.proj.0.": "condition_embedder.image_embedder.norm1.",
            "img_emb.proj.1.": "condition_embedder.image_embedder.ff.net.0.proj.",
            "img_emb.proj.3.": "condition_embedder.image_embedder.ff.net.2.",
            "img_emb.proj.4.": "condition_embedder.image_embedder.norm2.",
            "img_emb.emb_pos": "condition_embedder.image_embedder.pos_embed",
            "blocks.": "blocks.",
            "head.modulation": "scale_shift_table",
            "head.head.": "proj_out.",
        },
        {
            "modulation": "scale_shift_table",
            "self_attn": "attn1",
            "cross_attn": "attn2",
            **_ATTENTION,
            **_IMAGE_ATTENTION,
            "norm3": "norm2",  # before the cross-attention; their norm2 has no tensors
            "ffn.0": "ffn.net.0.proj",
            "ffn.2": "ffn.net.2",
        },
    ),
    # One flat list of blocks on either side.
    "vae_2_1": Layout(
        {
            **_VAE_PREFIXES,
            "encoder.downsamples.": "encoder.down_blocks.",
            **{
                f"decoder.upsamples.{4 * level + index}.": f"decoder.up_blocks.{level}.resnets.{index}."
                for level in range(_LEVELS)
                for index in range(3)
            },
            **{
                f"decoder.upsamples.{4 * level + 3}.": f"decoder.up_blocks.{level}.upsamplers.0."
                for level in range(_LEVELS - 1)
            },
        },
        _RESNET,
    ),
    # A list for each level, which ends with its resampler.
    "vae_2_2": Layout(
        {
            **_VAE_PREFIXES,
            **{
                f"encoder.downsamples.{level}.downsamples.": f"encoder.down_blocks.{level}.resnets."
                for level in range(_LEVELS)
            },
            **{
                f"encoder.downsamples.{level}.downsamples.2.": f"encoder.down_blocks.{level}.downsampler."
                for level in range(_LEVELS - 1)
            },
            **{
                f"decoder.upsamples.{level}.upsamples.": f"decoder.up_blocks.{level}.resnets."
                for level in range(_LEVELS)
            },
            **{
                f"decoder.upsamples.{level}.upsamples.3.": f"decoder.up_blocks.{level}.upsampler."
                for level in range(_LEVELS - 1)
            },
        },
        _RESNET,
    ),
    "text_encoder": Layout(
        {"token_embedding.": "embed_tokens.", "blocks.": "block.", "norm.": "final_layer_norm."},
        {
            "norm1": "layer.0.layer_norm",
            "attn": "layer.0.SelfAttention",
            "pos_embedding.embedding": "layer.0.SelfAttention.relative_attention_bias",
            "norm2": "layer.1.layer_norm",
            "ffn.gate.0": "layer.1.DenseReluDense.wi_0",
            "ffn.fc1": "layer.1.DenseReluDense.wi_1",
            "ffn.fc2": "layer.1.DenseReluDense.wo",
        },
    ),
    "image_encoder": Layout(
        {
            "visual.cls_embedding": "embeddings.class_embedding",
            "visual.patch_embedding.": "embeddings.patch_embedding.",
            "visual.pos_embedding": "embeddings.position_embedding.weight",
            "visual.pre_norm.": "pre_layrnorm.",
            "visual.transformer.": "encoder.layers.",
            "visual.post_norm.": "post_layernorm.",
        },
        {
            "norm1": "layer_norm1",
            "attn.proj": "self_attn.out_proj",
            "attn": "self_attn",
            "norm2": "layer_norm2",
            "mlp.0": "mlp.fc1",
            "mlp.2": "mlp.fc2",
        },
    ),
}
"""Files of the original layout. The image encoder's also fuses tensors, see ``FUSED``."""

ORIGINAL_IGNORED: Mapping[str, tuple[str, ...]] = {
    "image_encoder": ("textual.", "visual.head", "log_scale"),
}
"""Starts of names that a file of the original layout holds beside the component."""

ORIGINAL_FILES: Mapping[str, tuple[str, ...]] = {
    "transformer": ("", "high_noise_model", "low_noise_model"),
    "vae": ("Wan2.1_VAE.pth", "Wan2.2_VAE.pth"),
    "text_encoder": ("models_t5_umt5-xxl-enc-bf16.pth",),
    "tokenizer": ("google/umt5-xxl",),
    "image_encoder": ("models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth",),
}
"""Where a repository of the original layout has each component: folders of safetensors files, or one pickle."""

VAE_HALVES: Mapping[str, tuple[str, ...]] = {
    "video_encoder": ("encoder.", "quant_conv."),
    "video_decoder": ("decoder.", "post_quant_conv."),
}
"""Starts of our names of what the two halves of a VAE hold."""

FUSED: Mapping[str, tuple[str, ...]] = {"to_qkv": ("q_proj", "k_proj", "v_proj")}
"""Segments of the image encoder whose tensors are several of ours, one after another along dim 0."""

TRANSFORMERS: Mapping[str, Layout] = {
    "text_encoder": Layout({"shared.": "embed_tokens.", "encoder.": ""}),
    # Earlier versions of transformers save the vision model as a child; the published folders are theirs.
    "image_encoder": Layout(dict.fromkeys(("", "vision_model."), "")),
}
"""The two encoders of a diffusers folder."""

TRANSFORMERS_IGNORED: Mapping[str, tuple[str, ...]] = {
    "image_encoder": ("visual_projection.", "vision_model.embeddings.position_ids", "embeddings.position_ids"),
}


def text_encoder_ignored(names: Collection[str]) -> tuple[str, ...]:
    """Starts of the names of a diffusers folder's text encoder that are copies: some hold the embeddings twice."""
    return ("encoder.embed_tokens.",) if "shared.weight" in names else ()


def unfuse(name: str) -> tuple[str, ...]:
    """Our names of what a tensor holds whose segments are renamed already: itself, or the parts of a fused one."""
    for fused, parts in FUSED.items():
        start, found, end = name.partition(f".{fused}.")
        if found:
            return tuple(f"{start}.{part}.{end}" for part in parts)
    return (name,)


def unused(name: str) -> bool:
    """Whether a diffusers transformer's tensor has no use: some image-to-video folders of 2.1 hold the norm of a query
    that the image cross-attention does not have.
    """
    return "norm_added_q" in name.split(".")
