"""Wan's video VAE with gradients: whole clips at once through the modules that run.

Theirs go chunk by chunk, write in place and have no gradients. Of a whole clip the result is the same if every
convolution along time reads zeros before frame 0, but frame 0 passes the levels that resample time alone.

Shapes: B clips, C channels, F frames, H, W height and width, in pixels for clips and in latents for latents.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vgen.models.memory_format import space_cells
from vgen.models.wan.config import WanVaeConfig
from vgen.models.wan.vae import VideoDecoder, VideoEncoder
from vgen.models.wan.vae_blocks import (
    NORM_FLOOR,
    CausalConv3d,
    Downsample,
    FrameAttention,
    FrameConv,
    MidBlock,
    PixelNorm,
    ResBlock,
    Upsample,
    add_averaged,
    add_repeated,
)
from vgen.tiny.training.video_vae import FIRST_LOG_VARIANCE


class Posterior(NamedTuple):
    """[B, C, F, H, W] each."""

    mean: Tensor
    logvar: Tensor


class WanVae(nn.Module):
    """Called as diffusers' VAEs are, with the names of its ``AutoencoderKLWan``; frames are not clamped.

    ``latents_mean`` and ``latents_std`` are what is measured when its training ends, not those of ``config``.
    """

    latents_mean: Tensor
    latents_std: Tensor

    def __init__(self, config: WanVaeConfig) -> None:
        super().__init__()
        self.patch = config.patch_size or 1
        encoder, decoder = VideoEncoder(config), VideoDecoder(config)
        self.encoder: Any = encoder.encoder
        self.quant_conv = encoder.quant_conv
        self.post_quant_conv = decoder.post_quant_conv
        self.decoder: Any = decoder.decoder
        self.register_buffer("latents_mean", torch.zeros(config.z_dim))
        self.register_buffer("latents_std", torch.ones(config.z_dim))
        self._begin_simply()

    @torch.no_grad()
    def _begin_simply(self) -> None:
        """As the LTX-2 twin does: residual blocks that add nothing yet, and latents with little noise."""
        for name, parameter in self.named_parameters():
            if ".conv2." in name:
                nn.init.zeros_(parameter)
        assert self.quant_conv.bias is not None
        nn.init.constant_(self.quant_conv.bias.chunk(2)[1], FIRST_LOG_VARIANCE)

    def encode(self, video: Tensor, return_dict: bool = False) -> tuple[Posterior]:  # noqa: ARG002
        """Of clips [B, 3, F, H, W] in -1..1."""
        cells = space_cells(video, self.patch, 1).squeeze(1).permute(0, 1, 6, 4, 2, 3, 5)
        x = _convolved(self.encoder.conv_in, cells.flatten(1, 3))
        for block in self.encoder.down_blocks:
            x = _down(block, x)
        x = _convolved(self.encoder.conv_out, _activated(self.encoder.norm_out, _middle(self.encoder.mid_block, x)))
        mean, logvar = self.quant_conv(x).chunk(2, dim=1)
        return (Posterior(mean, logvar.clamp(-30, 20)),)  # as in diffusers, whose exp stays finite

    def decode(self, latents: Tensor, return_dict: bool = False) -> tuple[Tensor]:  # noqa: ARG002
        """Clips [B, 3, F, H, W], about -1..1, of the VAE's own latents."""
        x = _middle(self.decoder.mid_block, _convolved(self.decoder.conv_in, self.post_quant_conv(latents)))
        for block in self.decoder.up_blocks:
            x = _up(block, x)
        patches = _convolved(self.decoder.conv_out, _activated(self.decoder.norm_out, x))
        cells = patches.unflatten(1, (-1, self.patch, self.patch)).permute(0, 1, 4, 5, 3, 6, 2)
        return (cells.flatten(5, 6).flatten(3, 4),)


def compression(config: WanVaeConfig) -> tuple[int, int, int]:
    """Frames, rows and columns of pixels that make a latent."""
    return config.scale_factor_temporal, config.scale_factor_spatial, config.scale_factor_spatial


def _down(block: Any, x: Tensor) -> Tensor:
    out = x
    for resnet in block.resnets:
        out = _residual(resnet, out)
    if block.downsampler is not None:
        out = _halved(block.downsampler, out)
    add_averaged(out, x, block.level, first=True)
    return out


def _up(block: Any, x: Tensor) -> Tensor:
    out = x
    for resnet in block.resnets:
        out = _residual(resnet, out)
    if block.upsampler is not None:
        out = _doubled(block.upsampler, out)
        add_repeated(out, x, block.level, first=True)
    return out


def _middle(block: MidBlock, x: Tensor) -> Tensor:
    first, last = block.resnets
    (attention,) = block.attentions
    return _residual(last, _attended(attention, _residual(first, x)))


def _residual(block: ResBlock | Any, x: Tensor) -> Tensor:
    hidden = _convolved(block.conv1, _activated(block.norm1, x))
    hidden = _convolved(block.conv2, _activated(block.norm2, hidden))
    return hidden + (x if block.conv_shortcut is None else block.conv_shortcut(x))


def _attended(block: FrameAttention | Any, x: Tensor) -> Tensor:
    frames = _normed(block.norm, x).permute(0, 2, 3, 4, 1)
    tokens = frames.flatten(0, 1).flatten(1, 2).unsqueeze(1)
    q, k, v = F.linear(tokens, block.to_qkv.weight.flatten(1), block.to_qkv.bias).chunk(3, dim=-1)
    out = F.linear(block.attend(q, k, v, None), block.proj.weight.flatten(1), block.proj.bias)
    return x + out.view(frames.shape).permute(0, 4, 1, 2, 3)


def _halved(block: Downsample, x: Tensor) -> Tensor:
    x = _convolved_frames(block.resample["1"], x)
    if block.time_conv is None or x.shape[2] == 1:
        return x
    return torch.cat([x[:, :, :1], block.time_conv(x)], dim=2)


def _doubled(block: Upsample, x: Tensor) -> Tensor:
    if block.time_conv is not None and x.shape[2] > 1:
        phases = _convolved(block.time_conv, x[:, :, 1:]).chunk(2, dim=1)
        x = torch.cat([x[:, :, :1], torch.stack(phases, dim=3).flatten(2, 3)], dim=2)
    return _convolved_frames(block.resample["1"], x, enlarge=2)


def _convolved(conv: CausalConv3d | Any, x: Tensor) -> Tensor:
    out: Tensor = conv(F.pad(x, (*conv.border, *conv.border, conv.history, 0)))
    return out


def _convolved_frames(conv: FrameConv | Any, x: Tensor, enlarge: int = 1) -> Tensor:
    """Each frame, ``enlarge`` times as high and wide before."""
    frames = x.transpose(1, 2).flatten(0, 1)
    if enlarge > 1:
        frames = F.interpolate(frames, scale_factor=enlarge, mode="nearest")
    out = F.conv2d(F.pad(frames, (*conv.border, *conv.border)), conv.weight, conv.bias, conv.stride)
    return out.unflatten(0, (len(x), -1)).transpose(1, 2)


def _activated(norm: PixelNorm, x: Tensor) -> Tensor:
    return F.silu(_normed(norm, x))


def _normed(norm: PixelNorm, x: Tensor) -> Tensor:
    """In the dtype of ``x``; squares are summed in fp32."""
    squares = x.square().sum(dim=1, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
    gain = norm.gamma.view(-1, 1, 1, 1) * x.shape[1] ** 0.5
    return x * squares.clamp(min=NORM_FLOOR**2).rsqrt().to(x.dtype) * gain.to(x.dtype)
