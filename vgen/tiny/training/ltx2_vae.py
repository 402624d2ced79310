"""LTX-2's video VAE with gradients: diffusers' module, whose weights are those of ours under diffusers' names."""

import torch
from torch import nn

from vgen.models.ltx2.config import LTX2Config
from vgen.tiny.training.video_vae import FIRST_LOG_VARIANCE

STRIDES = {"all": "spatiotemporal", "time": "temporal", "space": "spatial"}
"""Middle of a block's kind to diffusers' word for the axes that it halves or doubles."""


def build_video_vae(architecture: LTX2Config) -> nn.Module:
    """``diffusers.AutoencoderKLLTX2Video`` as ``architecture`` says, with its own initial weights."""
    from diffusers import AutoencoderKLLTX2Video

    encoder, decoder = architecture.video_encoder, architecture.video_decoder
    downs = [block for block in encoder.blocks if block.kind != "res_x"]
    ups = [block for block in decoder.blocks if block.kind != "res_x"]
    vae: nn.Module = AutoencoderKLLTX2Video(
        in_channels=encoder.in_channels,
        out_channels=decoder.out_channels,
        latent_channels=encoder.latent_channels,
        block_out_channels=_widths(encoder.latent_channels, [block.multiplier for block in downs]),
        down_block_types=("LTX2VideoDownBlock3D",) * len(downs),
        layers_per_block=tuple(block.num_layers for block in encoder.blocks if block.kind == "res_x"),
        spatio_temporal_scaling=(True,) * len(downs),
        downsample_type=tuple(STRIDES[block.kind.split("_")[1]] for block in downs),
        # From the output side, the types excepted.
        decoder_block_out_channels=_widths(decoder.base_channels, [block.multiplier for block in reversed(ups)]),
        decoder_layers_per_block=tuple(b.num_layers for b in reversed(decoder.blocks) if b.kind == "res_x"),
        decoder_spatio_temporal_scaling=(True,) * len(ups),
        decoder_inject_noise=(False,) * (len(ups) + 1),
        upsample_type=tuple(STRIDES[block.kind.split("_")[1]] for block in ups),
        upsample_residual=tuple(block.residual for block in reversed(ups)),
        upsample_factor=tuple(block.multiplier for block in reversed(ups)),
        patch_size=encoder.patch_size,
        encoder_causal=True,
        decoder_causal=decoder.causal,
        encoder_spatial_padding_mode=encoder.spatial_padding_mode,
        decoder_spatial_padding_mode=decoder.spatial_padding_mode,
    )
    _begin_simply(vae)
    return vae


@torch.no_grad()
def _begin_simply(vae: nn.Module) -> None:
    """Residual blocks that add nothing yet, and latents with little noise: what is left is nearly linear."""
    for name, parameter in vae.named_parameters():
        if ".conv2." in name:
            nn.init.zeros_(parameter)
    # The last channel is the logarithm of all others' variance.
    nn.init.constant_(vae.get_parameter("encoder.conv_out.conv.bias")[-1:], FIRST_LOG_VARIANCE)


def _widths(first: int, multipliers: list[int]) -> tuple[int, ...]:
    widths, width = [], first
    for multiplier in multipliers:
        width *= multiplier
        widths.append(width)
    return tuple(widths)
