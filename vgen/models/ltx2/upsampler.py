"""LTX-2 latent upsamplers: a convolutional network that enlarges video latents in space, in time or in both.

Shapes: B batch, C channels of the level at hand, F latent frames, H height, W width (of latents).
Source: Lightricks/LTX-2 at 400fd31, ``model/upsampler/*.py``. Each upsampler is a file of its own, and its names carry
no prefix.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vgen.models.ltx2.config import UpsamplerConfig
from vgen.models.ltx2.video_vae import PerChannelStatistics

NORM_GROUPS = 32

RATIONAL_SCALES = {2.0: (2, 1), 1.5: (3, 2)}
"""Scale -> (enlarged by, then reduced by)."""

BINOMIAL = (1, 4, 6, 4, 1)


class ResBlock(nn.Module):
    """x = SiLU(x + norm(conv(SiLU(norm(conv(x))))))."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = _same_conv3d(channels, channels)
        self.norm1 = nn.GroupNorm(NORM_GROUPS, channels)
        self.conv2 = _same_conv3d(channels, channels)
        self.norm2 = nn.GroupNorm(NORM_GROUPS, channels)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, F, H, W] -> [B, C, F, H, W]."""
        hidden = F.silu(self.norm1(self.conv1(x)))
        return F.silu(x + self.norm2(self.conv2(hidden)))


def _same_conv3d(in_channels: int, out_channels: int) -> nn.Conv3d:
    return nn.Conv3d(in_channels, out_channels, kernel_size=3, padding=1)


class BlurDown(nn.Module):
    """Keep every ``stride``-th row and column of a 5x5 binomial blur with zeros around; stride 1 does not blur."""

    kernel: Tensor

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = stride
        row = torch.tensor(BINOMIAL, dtype=torch.float32)
        # In the files, also where a stride of 1 leaves it unread. Whole 256ths, so exact in bf16.
        self.register_buffer("kernel", (torch.outer(row, row) / row.sum() ** 2)[None, None])

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H / stride, W / stride], rounded up."""
        if self.stride == 1:
            return x
        channels = x.shape[1]
        kernel = self.kernel.expand(channels, -1, -1, -1)
        return F.conv2d(x, kernel, stride=self.stride, padding=len(BINOMIAL) // 2, groups=channels)


class RationalResampler(nn.Module):
    """Enlarge each frame by a whole number with a convolution and a pixel shuffle, then reduce it by a blur."""

    def __init__(self, channels: int, scale: float) -> None:
        super().__init__()
        up, down = RATIONAL_SCALES[scale]
        self.conv = nn.Conv2d(channels, up**2 * channels, kernel_size=3, padding=1)
        self.pixel_shuffle = nn.PixelShuffle(up)
        self.blur_down = BlurDown(down)

    def forward(self, frames: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, scale * H, scale * W], rounded up."""
        out: Tensor = self.blur_down(self.pixel_shuffle(self.conv(frames)))
        return out


class PixelShuffle3d(nn.Module):
    """Channels to cells of ``time`` x ``space`` x ``space``, the channel being the slowest and width the fastest."""

    def __init__(self, time: int, space: int) -> None:
        super().__init__()
        self.cell = (time, space, space)

    def forward(self, x: Tensor) -> Tensor:
        """[B, (C t s s), F, H, W] -> [B, C, tF, sH, sW]."""
        cells = x.unflatten(1, (-1, *self.cell)).permute(0, 1, 5, 2, 6, 3, 7, 4)
        return cells.flatten(6, 7).flatten(4, 5).flatten(2, 3)


class LatentUpsampler(nn.Module):
    """The upsampler as built from its config; 497.9 M parameters for the released spatial x2.

    Raises:
        ValueError: the config enlarges nothing, has a scale that is not built or channels that do not fill the groups.
    """

    def __init__(self, config: UpsamplerConfig) -> None:
        super().__init__()
        _validate_config(config)
        width = config.mid_channels
        self.config = config
        self.initial_conv = _same_conv3d(config.in_channels, width)
        self.initial_norm = nn.GroupNorm(NORM_GROUPS, width)
        self.res_blocks = nn.ModuleList(ResBlock(width) for _ in range(config.num_blocks_per_stage))
        self.upsampler = _build_upsampler(config)
        self.post_upsample_res_blocks = nn.ModuleList(ResBlock(width) for _ in range(config.num_blocks_per_stage))
        self.final_conv = _same_conv3d(width, config.in_channels)

    def forward(self, latents: Tensor) -> Tensor:
        """Enlarge un-normalized latents [B, C, F, H, W] to [B, C, F', H', W'], in their dtype.

        F' is 2F - 1 with ``temporal``, else F; H' and W' are ``spatial_scale`` times as large, rounded up, with
        ``spatial``. Computes in the dtype of the weights.

        Raises:
            ValueError: the latents have another number of axes or channels.
        """
        channels = self.config.in_channels
        if latents.ndim != 5 or latents.shape[1] != channels:
            raise ValueError(
                f"latents of shape {tuple(latents.shape)} do not fit this upsampler; "
                f"give [batch, {channels}, frames, height, width]"
            )
        x = latents.to(self.initial_conv.weight.dtype)
        x = F.silu(self.initial_norm(self.initial_conv(x)))
        for block in self.res_blocks:
            x = block(x)
        x = self._upsample(x)
        for block in self.post_upsample_res_blocks:
            x = block(x)
        return self.final_conv(x).to(latents.dtype)

    def _upsample(self, x: Tensor) -> Tensor:
        if self.config.temporal:
            # The first latent frame stands for one frame of pixels, so only one of its two halves is kept.
            return self.upsampler(x)[:, :, 1:]
        frames = self.upsampler(x.transpose(1, 2).flatten(0, 1))
        return frames.unflatten(0, (x.shape[0], -1)).transpose(1, 2)


def upsample_normalized(upsampler: LatentUpsampler, latents: Tensor, statistics: PerChannelStatistics) -> Tensor:
    """Enlarge latents as the transformer has them, normalized by the video VAE's ``statistics``; shapes as above."""
    return statistics.normalize(upsampler(statistics(latents)))


def _build_upsampler(config: UpsamplerConfig) -> nn.Module:
    """The middle module: over [B, C, F, H, W] with ``temporal``, else over single frames [B, C, H, W]."""
    width = config.mid_channels
    if config.temporal:
        space = 2 if config.spatial else 1
        return nn.Sequential(_same_conv3d(width, 2 * space**2 * width), PixelShuffle3d(2, space))
    if config.rational:
        return RationalResampler(width, config.spatial_scale)
    return nn.Sequential(nn.Conv2d(width, 4 * width, kernel_size=3, padding=1), nn.PixelShuffle(2))


def _validate_config(config: UpsamplerConfig) -> None:
    if not (config.spatial or config.temporal):
        raise ValueError("the upsampler's config has spatial=False and temporal=False; set one or both to True")
    if config.mid_channels % NORM_GROUPS:
        raise ValueError(
            f"the upsampler's config has mid_channels={config.mid_channels}; its norms have {NORM_GROUPS} groups: "
            f"use a multiple of {NORM_GROUPS}"
        )
    if not config.spatial:
        return
    # The official code ignores the scale without the rational resampler and doubles: here that is said.
    scales = tuple(RATIONAL_SCALES) if config.rational and not config.temporal else (2.0,)
    if config.spatial_scale not in scales:
        raise ValueError(
            f"the upsampler's config has spatial_scale={config.spatial_scale} with rational={config.rational} and "
            f"temporal={config.temporal}, which enlarges by {' or '.join(map(str, scales))} only: use such a scale"
        )
