"""Other implementations with the very same weights, for equal output first and a ratio after.

diffusers is an optional extra (``pip install vgen[test]``); a module of ours lends it its tensors, nothing is copied.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from vgen.models.ltx2 import keys
from vgen.models.ltx2.config import (
    DecoderBlock,
    EncoderBlock,
    TransformerConfig,
    VideoDecoderConfig,
    VideoEncoderConfig,
)
from vgen.models.names import owners, rename
from vgen.models.wan.config import WanTransformerConfig, WanVaeConfig
from vgen.models.wan.plan import keeps_float32
from vgen.typed import ConfigurationError


def diffusers_transformer(ours: nn.Module, config: TransformerConfig) -> nn.Module:
    """``diffusers.LTX2VideoTransformer3DModel`` on our tensors."""
    cls = _diffusers("LTX2VideoTransformer3DModel")
    with torch.device("meta"):
        peer = cls(
            in_channels=config.in_channels,
            out_channels=config.out_channels,
            num_attention_heads=config.num_attention_heads,
            attention_head_dim=config.attention_head_dim,
            cross_attention_dim=config.width,
            pos_embed_max_pos=int(config.rope_max_pos[0]),
            base_height=int(config.rope_max_pos[1]),
            base_width=int(config.rope_max_pos[2]),
            audio_in_channels=config.audio_in_channels,
            audio_out_channels=config.audio_out_channels,
            audio_num_attention_heads=config.num_attention_heads,
            audio_attention_head_dim=config.audio_attention_head_dim,
            audio_cross_attention_dim=config.audio_width,
            audio_pos_embed_max_pos=int(config.audio_rope_max_pos),
            num_layers=config.num_layers,
            norm_eps=config.norm_eps,
            caption_channels=config.caption_channels,
            rope_theta=config.rope_theta,
            rope_double_precision=config.rope_float64,
            timestep_scale_multiplier=config.timestep_scale_multiplier,
            cross_attn_timestep_scale_multiplier=config.av_timestep_scale_multiplier,
            rope_type="split",
            gated_attn=config.gated_attention,
            audio_gated_attn=config.gated_attention,
            cross_attn_mod=config.cross_attention_adaln,
            audio_cross_attn_mod=config.cross_attention_adaln,
            perturbed_attn=config.gated_attention,
            use_prompt_embeddings=config.caption_projection,
        )
    return _lend(ours, peer, "transformer")


_STRIDES = {"all": "spatiotemporal", "time": "temporal", "space": "spatial"}
"""Middle of a block's kind to diffusers' word for the axes that it halves or doubles."""


def diffusers_video_decoder(ours: nn.Module, config: VideoDecoderConfig) -> nn.Module:
    """``diffusers.AutoencoderKLLTX2Video`` with our decoder's tensors and no encoder."""
    cls = _diffusers("AutoencoderKLLTX2Video")
    ups = [block for block in config.blocks if block.kind != "res_x"]
    layers = [block.num_layers for block in config.blocks if block.kind == "res_x"]
    width, channels = config.base_channels, []
    for block in reversed(ups):
        width *= block.multiplier
        channels.append(width)
    with torch.device("meta"):
        peer = cls(
            latent_channels=config.latent_channels,
            out_channels=config.out_channels,
            decoder_block_out_channels=tuple(channels),
            decoder_layers_per_block=tuple(reversed(layers)),
            decoder_spatio_temporal_scaling=(True,) * len(ups),
            decoder_inject_noise=(False,) * len(layers),
            # In order of execution, where every other list of the decoder is in reverse.
            upsample_type=_strides(ups),
            upsample_residual=tuple(block.residual for block in reversed(ups)),
            upsample_factor=tuple(block.multiplier for block in reversed(ups)),
            patch_size=config.patch_size,
            decoder_causal=config.causal,
            decoder_spatial_padding_mode=config.spatial_padding_mode,
        )
    peer.encoder = nn.Identity()
    return _lend(ours, peer, "video_decoder")


def diffusers_video_encoder(ours: nn.Module, config: VideoEncoderConfig) -> nn.Module:
    """``diffusers.AutoencoderKLLTX2Video`` with our encoder's tensors and no decoder."""
    cls = _diffusers("AutoencoderKLLTX2Video")
    downs = [block for block in config.blocks if block.kind != "res_x"]
    width, channels = config.latent_channels, []
    for block in downs:
        width *= block.multiplier
        channels.append(width)
    with torch.device("meta"):
        peer = cls(
            in_channels=config.in_channels,
            latent_channels=config.latent_channels,
            block_out_channels=tuple(channels),
            down_block_types=("LTX2VideoDownBlock3D",) * len(downs),
            layers_per_block=tuple(block.num_layers for block in config.blocks if block.kind == "res_x"),
            spatio_temporal_scaling=(True,) * len(downs),
            downsample_type=_strides(downs),
            patch_size=config.patch_size,
            encoder_causal=True,
            encoder_spatial_padding_mode=config.spatial_padding_mode,
        )
    peer.decoder = nn.Identity()
    return _lend(ours, peer, "video_encoder")


def diffusers_wan_transformer(ours: nn.Module, config: WanTransformerConfig, dtype: torch.dtype) -> nn.Module:
    """``diffusers.WanTransformer3DModel`` on our tensors, those that it keeps in ``dtype`` and we do not as copies."""
    cls = _diffusers("WanTransformer3DModel")
    with torch.device("meta"):
        peer = cls(
            patch_size=config.patch_size,
            num_attention_heads=config.num_attention_heads,
            attention_head_dim=config.attention_head_dim,
            in_channels=config.in_channels,
            out_channels=config.out_channels,
            text_dim=config.text_dim,
            freq_dim=config.freq_dim,
            ffn_dim=config.ffn_dim,
            num_layers=config.num_layers,
            cross_attn_norm=config.cross_attn_norm,
            eps=config.eps,
            image_dim=config.image_dim,
            added_kv_proj_dim=config.added_kv_proj_dim,
            rope_max_seq_len=config.rope_max_seq_len,
            pos_embed_seq_len=config.pos_embed_seq_len,
        )
    tensors = {
        name: tensor if keeps_float32(name, "model") else tensor.to(dtype) for name, tensor in ours.state_dict().items()
    }
    peer.load_state_dict(tensors, assign=True)
    # Its tables of positions are in no checkpoint.
    device = next(ours.parameters()).device
    rope = type(peer.rope)(config.attention_head_dim, config.patch_size, config.rope_max_seq_len)
    peer.rope = rope.to(device)
    return peer.eval().requires_grad_(False)


def diffusers_wan_decoder(ours: nn.Module, config: WanVaeConfig) -> nn.Module:
    """``diffusers.AutoencoderKLWan`` with our decoder's tensors and no encoder, in the memory format that it loads."""
    return _lend_wan(ours, config, ("encoder", "quant_conv"))


def diffusers_wan_encoder(ours: nn.Module, config: WanVaeConfig) -> nn.Module:
    """``diffusers.AutoencoderKLWan`` with our encoder's tensors and no decoder, in the memory format that it loads."""
    return _lend_wan(ours, config, ("decoder", "post_quant_conv"))


def _lend_wan(ours: nn.Module, config: WanVaeConfig, absent: Sequence[str]) -> nn.Module:
    _diffusers("AutoencoderKLWan")
    from vgen.components.wan_diffusers_vae import build_vae

    with torch.device("meta"):
        peer = build_vae(config)
    tensors = {name: tensor.contiguous() for name, tensor in ours.state_dict().items()}
    kept = {name for name in peer.state_dict() if not name.startswith(tuple(f"{one}." for one in absent))}
    peer.load_state_dict({name: tensors[name] for name in kept}, assign=True, strict=False)
    for name in absent:
        setattr(peer, name, nn.Identity())
    return peer.eval().requires_grad_(False)


def _strides(blocks: Sequence[DecoderBlock | EncoderBlock]) -> tuple[str, ...]:
    return tuple(_STRIDES[block.kind.split("_")[1]] for block in blocks)


def _diffusers(name: str) -> Any:
    try:
        import diffusers
    except ImportError:
        raise ConfigurationError(
            "bench.peers=[diffusers] needs diffusers, which is not installed; "
            "pip install 'vgen[test]' or use bench.peers=[]"
        ) from None
    return getattr(diffusers, name)


def _lend(ours: nn.Module, peer: nn.Module, component: str) -> nn.Module:
    tensors, layout = ours.state_dict(), keys.DIFFUSERS[component]
    lent = {}
    for name in peer.state_dict():
        prefix = owners(name, {component: layout})[component]
        lent[name] = tensors[rename(name, layout, prefix)]
    peer.load_state_dict(lent, assign=True)
    return peer.eval().requires_grad_(False)
