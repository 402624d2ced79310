"""LTX-2 video VAE decoder: normalized latents to frames, in one memory format from entry to exit.

Shapes: B batch, C channels of the level at hand, F frames, H height, W width (latents at the input, pixels at the
output). Inference only: residual blocks add to their input in place, and nothing here is differentiable.

The memory format of every activation is that of the weights. With ``decoder.to(memory_format=channels_last_3d)`` the
latents are converted once and no convolution converts anything afterwards. Of the 563 ms that the official decoder
takes for 121x768x1280 on an H200, such conversions are 54 and ``padding_mode="reflect"`` is 155; here the norm writes
straight into one bordered buffer and only the border itself is copied.

Source: Lightricks/LTX-2 at 400fd31, ``model/video_vae/{conv_video_decoder,resnet,sampling,convolution}.py``.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vgen.models.ltx2.config import DecoderBlock, VideoDecoderConfig
from vgen.models.memory_format import memory_format_of, space_cells, write_into

NORM_EPS = 1e-8

FillBorder: TypeAlias = Callable[[Tensor, int, int], None]
"""Writes the border of ``padded`` [B, C, before+F+after, H+2, W+2] from its interior; called with both frame counts."""


def reflect_border(padded: Tensor, before: int, after: int) -> None:
    """Reflect along height and width, repeat the first and last frame along time; needs H, W >= 2."""
    frames = padded[:, :, before : padded.shape[2] - after]
    rows = frames[..., 1:-1, :]
    rows[..., 0].copy_(rows[..., 2])
    rows[..., -1].copy_(rows[..., -3])
    frames[..., 0, :].copy_(frames[..., 2, :])
    frames[..., -1, :].copy_(frames[..., -3, :])
    _repeat_edge_frames(padded, before, after)


def zero_border(padded: Tensor, before: int, after: int) -> None:
    """Zeros along height and width, repeat the first and last frame along time."""
    frames = padded[:, :, before : padded.shape[2] - after]
    for edge in (frames[..., 0], frames[..., -1], frames[..., 0, :], frames[..., -1, :]):
        edge.zero_()
    _repeat_edge_frames(padded, before, after)


def _repeat_edge_frames(padded: Tensor, before: int, after: int) -> None:
    first, last = before, padded.shape[2] - after - 1
    padded[:, :, :first].copy_(padded[:, :, first : first + 1])
    padded[:, :, last + 1 :].copy_(padded[:, :, last : last + 1])


BORDERS: dict[str, FillBorder] = {"reflect": reflect_border, "zeros": zero_border}
"""Spatial padding mode of a checkpoint to how its convolutions fill their border."""


def _write_pixel_norm(x: Tensor, out: Tensor) -> None:
    """``out`` = x / sqrt(mean of x² over the channels + 1e-8), both [B, C, F, H, W].

    ``vector_norm`` squares and sums in fp32 in one read; ``x.square().mean()`` would write the squares out first.
    """
    norm = torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
    scale = norm.square_().div_(x.shape[1]).add_(NORM_EPS).rsqrt_()
    write_into(out, torch.mul, x, scale.to(x.dtype))


class BorderedConv3d(nn.Module):
    """3x3x3 convolution over a bordered copy of its input; with ``normalize``, of SiLU(pixel norm(input)).

    ``time_border``: frames of border before and behind; (1, 1) is the decoder's, (2, 0) a causal convolution.
    ``fill_border`` is the seam for another border: a halo exchange replaces this attribute and nothing else.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        padding_mode: str,
        *,
        normalize: bool = False,
        time_border: tuple[int, int] = (1, 1),
    ) -> None:
        super().__init__()
        self.conv = nn.Conv3d(in_channels, out_channels, kernel_size=3)
        self.normalize = normalize
        self.time_border = time_border
        self.fill_border: FillBorder = BORDERS[padding_mode]

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, F, H, W] -> [B, C', F + sum(time_border) - 2, H, W]."""
        out: Tensor = self.conv(self.bordered(x))
        return out

    def bordered(self, x: Tensor) -> Tensor:
        """The convolution's input [B, C, F+2, H+2, W+2], a new tensor in the memory format and dtype of the weights.

        ``x`` may keep its channels in several dims, [B, *C, F, H, W]; without ``normalize`` it may have any dtype. So
        one copy patchifies, converts and borders.
        """
        B, *channels, frames, H, W = x.shape
        before, after = self.time_border
        padded = torch.empty(
            (B, self.conv.in_channels, before + frames + after, H + 2, W + 2),
            dtype=self.conv.weight.dtype,
            device=x.device,
            memory_format=memory_format_of(self.conv.weight),
        )
        inner = padded[:, :, before : before + frames, 1:-1, 1:-1]
        if not self.normalize:
            inner.unflatten(1, channels).copy_(x)
            self.fill_border(padded, before, after)
            return padded
        _write_pixel_norm(x, out=inner)
        self.fill_border(padded, before, after)
        # After the border: SiLU commutes with repeating, reflecting and zeros, and runs over one dense buffer.
        return F.silu(padded, inplace=True)


class ResBlock(nn.Module):
    """x += conv(SiLU(norm(conv(SiLU(norm(x)))))), in place."""

    def __init__(self, channels: int, padding_mode: str, time_border: tuple[int, int] = (1, 1)) -> None:
        super().__init__()
        self.conv1 = BorderedConv3d(channels, channels, padding_mode, normalize=True, time_border=time_border)
        self.conv2 = BorderedConv3d(channels, channels, padding_mode, normalize=True, time_border=time_border)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, F, H, W], returned itself after the addition."""
        hidden = self.conv1(x)
        bordered = self.conv2.bordered(hidden)
        # Two steps instead of self.conv2(hidden), which would keep hidden alive through the convolution.
        del hidden
        return x.add_(self.conv2.conv(bordered))


class ResStage(nn.Module):
    """``num_layers`` residual blocks; changes its input in place."""

    def __init__(
        self, channels: int, num_layers: int, padding_mode: str, time_border: tuple[int, int] = (1, 1)
    ) -> None:
        super().__init__()
        self.res_blocks = nn.ModuleList(ResBlock(channels, padding_mode, time_border) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, F, H, W], returned itself."""
        for block in self.res_blocks:
            x = block(x)
        return x


STRIDES: dict[str, tuple[int, int]] = {"compress_all": (2, 2), "compress_time": (2, 1), "compress_space": (1, 2)}
"""Block of the decoder to its strides along time and along both height and width."""


class DepthToSpaceUpsample(nn.Module):
    """Convolution, then each group of channels becomes a cell of ``strides``; with 2 along time, frame 0 is dropped.

    With ``residual`` the input itself, rearranged alike and repeated along the channels, is added.
    """

    def __init__(
        self, in_channels: int, strides: tuple[int, int], multiplier: int, residual: bool, padding_mode: str
    ) -> None:
        super().__init__()
        self.time, self.space = strides
        self.residual = residual
        self.out_channels = in_channels // multiplier
        self.conv = BorderedConv3d(in_channels, self.time * self.space**2 * self.out_channels, padding_mode)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, F, H, W] -> [B, C / multiplier, time * (F - 1) + 1, space * H, space * W]."""
        B, C, frames, H, W = x.shape
        hidden = self.conv(x)
        upsampled = torch.empty(
            (B, self.out_channels, self.time * (frames - 1) + 1, self.space * H, self.space * W),
            dtype=x.dtype,
            device=x.device,
            memory_format=memory_format_of(self.conv.conv.weight),
        )
        # Channel k * (C / cell) + c takes shortcut channel c, whatever the repeat k.
        repeats = self.conv.conv.out_channels // C if self.residual else 1
        for phase in range(self.time):
            # With two phases the frame dropped is latent frame 0 at phase 0, so phase 1 owns the even output frames.
            start = self.time - 1 - phase
            cells = space_cells(upsampled[:, :, start :: self.time], self.space, repeats)
            source = self._cells(hidden, repeats)[:, :, :, start:, phase]
            if self.residual:
                write_into(cells, torch.add, source, self._cells(x, 1)[:, :, :, start:, phase])
            else:
                cells.copy_(source)
        return upsampled

    def _cells(self, x: Tensor, repeats: int) -> Tensor:
        """View [B, (repeats C' t s s), F, H, W] as [B, repeats, C', F, t, H, s, W, s] (time, height, width phase)."""
        cells = x.unflatten(1, (repeats, -1, self.time, self.space, self.space))
        return cells.permute(0, 1, 2, 6, 3, 7, 4, 8, 5)


class PerChannelStatistics(nn.Module):
    """Mean and standard deviation of the latents, per channel, under the checkpoint's own names."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("mean-of-means", torch.zeros(channels))
        self.register_buffer("std-of-means", torch.ones(channels))

    def forward(self, latents: Tensor) -> Tensor:
        """Undo the normalization of [B, C, F, H, W], in its dtype."""
        mean, std = self._of_dtype(latents.dtype)
        return latents * std + mean

    def normalize(self, latents: Tensor) -> Tensor:
        """[B, C, F, H, W] to mean 0 and standard deviation 1 over the training data, in its dtype."""
        mean, std = self._of_dtype(latents.dtype)
        return (latents - mean) / std

    def _of_dtype(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        mean, std = (self.get_buffer(name).to(dtype).view(-1, 1, 1, 1) for name in ("mean-of-means", "std-of-means"))
        return mean, std


class VideoDecoder(nn.Module):
    """The decoder as built from its config; 528.4 M parameters in LTX-2 2.0, 407.2 M in 2.3.

    No tensor reaches 2^31 elements at 121x768x1280 (largest: 0.98e9, the bordered input of the last level). At a bit
    more than twice that size one does, and cuDNN then fails with an error: decode such clips in tiles.

    Raises:
        ValueError: the config asks for a causal decoder, an unknown padding mode or an unknown block.
    """

    def __init__(self, config: VideoDecoderConfig) -> None:
        super().__init__()
        _validate_config(config)
        mode = config.spatial_padding_mode
        channels = config.base_channels
        for block in config.blocks:
            channels *= block.multiplier
        self.config = config
        self.per_channel_statistics = PerChannelStatistics(config.latent_channels)
        self.conv_in = BorderedConv3d(config.latent_channels, channels, mode)
        self.up_blocks = nn.ModuleList()
        for block in config.blocks:
            self.up_blocks.append(_build_block(block, channels, mode))
            channels //= block.multiplier
        self.conv_out = BorderedConv3d(channels, config.out_channels * config.patch_size**2, mode, normalize=True)

    @torch.no_grad()
    def forward(self, latents: Tensor) -> Tensor:
        """Decode normalized latents [B, C, F, H, W] to frames [B, 3, 8(F-1)+1, 32H, 32W], about -1 to 1.

        Computes in the dtype of the weights; the frames have the dtype of the latents and the memory format of the
        weights.

        Raises:
            ValueError: fewer latents along height or width than the padding mode needs (reflect: 2).
        """
        validate_latent_size(self.config, latents.shape[-2], latents.shape[-1])
        return self.decode_any_size(latents)

    @torch.no_grad()
    def decode_any_size(self, latents: Tensor) -> Tensor:
        """``forward`` without its check: for borders of another kind, which need no second line to reflect."""
        weight = self.conv_in.conv.weight
        x = latents.to(weight.dtype).contiguous(memory_format=memory_format_of(weight))
        x = self.conv_in(self.per_channel_statistics(x))
        for block in self.up_blocks:
            x = block(x)
        return self._unpatchify(self.conv_out(x)).to(latents.dtype)

    def _unpatchify(self, patches: Tensor) -> Tensor:
        """[B, (3 p p), F, H, W] -> [B, 3, F, pH, pW]; the width offset is the slower of the two patch axes."""
        B, _, num_frames, H, W = patches.shape
        p = self.config.patch_size
        frames = torch.empty(
            (B, self.config.out_channels, num_frames, p * H, p * W),
            dtype=patches.dtype,
            device=patches.device,
            memory_format=memory_format_of(self.conv_out.conv.weight),
        )
        cells = patches.unflatten(1, (1, -1, p, p)).permute(0, 1, 2, 5, 6, 4, 7, 3)
        space_cells(frames, p, 1).copy_(cells)
        return frames


def _build_block(block: DecoderBlock, channels: int, padding_mode: str) -> nn.Module:
    if block.kind == "res_x":
        return ResStage(channels, block.num_layers, padding_mode)
    return DepthToSpaceUpsample(channels, STRIDES[block.kind], block.multiplier, block.residual, padding_mode)


def _validate_config(config: VideoDecoderConfig) -> None:
    if config.causal:
        raise ValueError("the video decoder's config has causal=True; LTX-2 decoders are not causal: use causal=False")
    if config.spatial_padding_mode not in BORDERS:
        raise ValueError(
            f"the video decoder's config has spatial_padding_mode={config.spatial_padding_mode!r}; "
            f"this decoder pads by one of {', '.join(BORDERS)}"
        )
    for block in config.blocks:
        if block.kind not in ("res_x", *STRIDES):
            raise ValueError(
                f"the video decoder's config has a block {block.kind!r}; this decoder has res_x, {', '.join(STRIDES)}"
            )


def validate_latent_size(config: VideoDecoderConfig, latent_height: int, latent_width: int) -> None:
    """Refuse latents too small to pad.

    Raises:
        ValueError: fewer latents along height or width than ``config.min_latents_per_axis``.
    """
    least = config.min_latents_per_axis
    for axis, size in (("height", latent_height), ("width", latent_width)):
        if size < least:
            raise ValueError(
                f"the latents' {axis} is {size}; this decoder's {config.spatial_padding_mode} padding needs at least "
                f"{least} ({32 * least} pixels): use a larger {axis}"
            )
