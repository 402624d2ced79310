"""LTX-2 video VAE encoder: frames to normalized latents, in one memory format from entry to exit.

Shapes: B batch, C channels of the level at hand, F frames, H height, W width (pixels at the input, latents at the
output). Inference only: residual blocks add to their input in place, and nothing here is differentiable.

The convolutions are the decoder's with a causal border: two copies of the first frame in front, none behind. One copy
patchifies, converts and borders the frames, and a downsampling block that counts the first frame twice gets it from a
third copy in that border, so that nothing is concatenated.

Source: Lightricks/LTX-2 at 400fd31, ``model/video_vae/{video_vae,resnet,sampling,convolution,ops}.py``.
"""

from math import prod

import torch
from torch import Tensor, nn

from vgen.models.ltx2.config import VIDEO_COMPRESSION, EncoderBlock, VideoEncoderConfig
from vgen.models.ltx2.video_vae import BORDERS, STRIDES, BorderedConv3d, PerChannelStatistics, ResStage
from vgen.models.memory_format import memory_format_of, space_cells, write_into

CAUSAL = (2, 0)
"""Border along time: two copies of the first frame in front, none behind."""

_STRIDES = {f"{kind}_res": strides for kind, strides in STRIDES.items()}


class SpaceToDepthDownsample(nn.Module):
    """Convolution, then each cell of ``strides`` becomes channels, plus the input rearranged alike and averaged.

    With 2 along time the first frame counts twice, so that ``2k + 1`` frames make ``k + 1``.
    """

    def __init__(self, in_channels: int, strides: tuple[int, int], multiplier: int, padding_mode: str) -> None:
        super().__init__()
        self.time, self.space = strides
        self.phases = (self.time, self.space, self.space)
        self.out_channels = in_channels * multiplier
        before, after = CAUSAL
        self.conv = BorderedConv3d(
            in_channels,
            self.out_channels // prod(self.phases),
            padding_mode,
            time_border=(before + self.time - 1, after),
        )
        self.kept_phases = _kept_phases(self.phases, multiplier)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, F, H, W] -> [B, multiplier * C, (F - 1) / time + 1, H / space, W / space]."""
        B, _, frames, H, W = x.shape
        hidden = self.conv(x)
        downsampled = torch.empty(
            (B, self.out_channels, (frames - 1) // self.time + 1, H // self.space, W // self.space),
            dtype=x.dtype,
            device=x.device,
            memory_format=memory_format_of(self.conv.conv.weight),
        )
        first = x[:, :, :1].expand(-1, -1, self.time, -1, -1)
        self._write_shortcut(first, out=downsampled[:, :, :1])
        self._write_shortcut(x[:, :, 1:], out=downsampled[:, :, 1:])
        downsampled.unflatten(1, (-1, *self.phases)).add_(self._cells(hidden))
        return downsampled

    def _write_shortcut(self, x: Tensor, out: Tensor) -> None:
        """``out`` [B, (C kept), F/time, ...] = x [B, C, F, H, W] in cells, averaged over the phases not kept."""
        cells, out = self._cells(x), out.unflatten(1, (-1, *self.kept_phases))
        averaged = tuple(range(2 + len(self.kept_phases), 5))
        if averaged:
            write_into(out, torch.mean, cells, averaged)
        else:
            out.copy_(cells)

    def _cells(self, x: Tensor) -> Tensor:
        """View [B, C, (F t), (H s), (W s)] as [B, C, t, s, s, F, H, W] (time, height, width phase)."""
        cells = space_cells(x, self.space, 1).squeeze(1).unflatten(2, (-1, self.time))
        return cells.permute(0, 1, 3, 5, 7, 2, 4, 6)


def _kept_phases(phases: tuple[int, ...], multiplier: int) -> tuple[int, ...]:
    """The leading phases that stay channels of the shortcut, where the others are averaged away.

    Rearranged, the input has ``prod(phases)`` times its channels, the last phase fastest, and the shortcut has
    ``multiplier`` times: each group of channels that is averaged is all of the last phases.
    """
    return next(phases[:n] for n in (3, 2, 1, 0) if prod(phases[:n]) == multiplier)


class VideoEncoder(nn.Module):
    """The encoder as built from its config; 694.1 M parameters in LTX-2 2.0, 318.9 M in 2.3.

    No tensor reaches 2^31 elements at 121x768x1280 (largest: 0.98e9, the bordered input of the first level). At a bit
    more than twice that size one does, and cuDNN then fails with an error: encode such clips in tiles. Activations take
    5.4 GiB there in bf16: one of the first level, its norm within a border and a convolution's output.

    Raises:
        ValueError: the config asks for an unknown padding mode, an unknown block or another compression than LTX-2's.
    """

    def __init__(self, config: VideoEncoderConfig) -> None:
        super().__init__()
        _validate_config(config)
        mode = config.spatial_padding_mode
        channels = config.latent_channels
        self.config = config
        self.per_channel_statistics = PerChannelStatistics(config.latent_channels)
        self.conv_in = BorderedConv3d(config.in_channels * config.patch_size**2, channels, mode, time_border=CAUSAL)
        self.down_blocks = nn.ModuleList()
        for block in config.blocks:
            self.down_blocks.append(_build_block(block, channels, mode))
            channels *= block.multiplier
        # The last channel is the log variance of all of them.
        self.conv_out = BorderedConv3d(channels, config.latent_channels + 1, mode, normalize=True, time_border=CAUSAL)

    @torch.no_grad()
    def forward(self, frames: Tensor) -> Tensor:
        """Encode frames [B, 3, F, H, W], about -1 to 1, to normalized latents [B, C, (F-1)/8 + 1, H/32, W/32].

        The latents are the means, in the dtype and memory format of the weights, in which all is computed.

        Raises:
            ValueError: F is not ``8k + 1``, or H or W is not a multiple of 32 or too small to pad.
        """
        validate_frames(self.config, *frames.shape[2:])
        return self.encode_any_size(frames)

    @torch.no_grad()
    def encode_any_size(self, frames: Tensor) -> Tensor:
        """``forward`` without its check: for borders of another kind, which need no second line to reflect."""
        x = self.conv_in(self._patches(frames))
        for block in self.down_blocks:
            x = block(x)
        means = self.conv_out(x)[:, : self.config.latent_channels]
        return self.per_channel_statistics.normalize(means)

    def _patches(self, frames: Tensor) -> Tensor:
        """View [B, 3, F, (H p), (W p)] as [B, 3, p, p, F, H, W]; the width offset is the slower of the patch axes."""
        return space_cells(frames, self.config.patch_size, 1).squeeze(1).permute(0, 1, 6, 4, 2, 3, 5)


def _build_block(block: EncoderBlock, channels: int, padding_mode: str) -> nn.Module:
    if block.kind == "res_x":
        return ResStage(channels, block.num_layers, padding_mode, CAUSAL)
    return SpaceToDepthDownsample(channels, _STRIDES[block.kind], block.multiplier, padding_mode)


def _validate_config(config: VideoEncoderConfig) -> None:
    if config.spatial_padding_mode not in BORDERS:
        raise ValueError(
            f"the video encoder's config has spatial_padding_mode={config.spatial_padding_mode!r}; "
            f"this encoder pads by one of {', '.join(BORDERS)}"
        )
    time, space = 1, config.patch_size
    for block in config.blocks:
        if block.kind == "res_x":
            continue
        if block.kind not in _STRIDES:
            raise ValueError(
                f"the video encoder's config has a block {block.kind!r}; this encoder has res_x, {', '.join(_STRIDES)}"
            )
        strides = _STRIDES[block.kind]
        if block.multiplier not in (1, 2, 4, 8) or block.multiplier > strides[0] * strides[1] ** 2:
            raise ValueError(
                f"the video encoder's config has a block {block.kind!r} with multiplier={block.multiplier}; "
                f"use a power of 2 up to {strides[0] * strides[1] ** 2}, the pixels that become one"
            )
        time, space = time * strides[0], space * strides[1]
    if (time, space, space) != VIDEO_COMPRESSION:
        raise ValueError(
            f"the video encoder's config compresses by {time} along time and {space} along height and width; "
            f"LTX-2 encoders compress by {VIDEO_COMPRESSION[0]} and {VIDEO_COMPRESSION[1]}"
        )


def validate_frames(config: VideoEncoderConfig, num_frames: int, height: int, width: int) -> None:
    """Refuse clips that do not divide into latents, or too small to pad.

    Raises:
        ValueError: ``num_frames`` is not ``8k + 1``, or a side is not a multiple of 32, for reflection of at least 64.
    """
    time, *space = VIDEO_COMPRESSION
    if num_frames < 1 or (num_frames - 1) % time:
        fix = _nearest(num_frames - 1, time, least=0)
        raise ValueError(
            f"num_frames={num_frames} is not {time}k + 1: use {' or '.join(str(size + 1) for size in fix)}"
        )
    least = 2 if config.spatial_padding_mode == "reflect" else 1
    for name, size, step in zip(("height", "width"), (height, width), space, strict=True):
        if size < least * step or size % step:
            floor = f" of at least {least * step}" if size < least * step else ""
            fix = _nearest(size, step, least=least * step)
            raise ValueError(f"{name}={size} is not a multiple of {step}{floor}: use {' or '.join(map(str, fix))}")


def _nearest(size: int, step: int, least: int) -> tuple[int, ...]:
    """The multiples of ``step`` below and above ``size``, or ``least``."""
    below = size // step * step
    return (below, below + step) if below >= least else (least,)
