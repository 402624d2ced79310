"""Channels and strides of the levels of a Wan VAE, and the largest tensor that its convolutions meet.

Sizes: H, W height and width in latents; a chunk is counted in latent frames.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from vgen.models.wan.config import WanVaeConfig

INT32_ELEMENTS = 2**31
"""A tensor of so many elements is beyond kernels that index with 32 bits."""

RES_KERNEL = (3, 3)
"""Extent along time and along both height and width of all convolutions but those that resample and the 1x1x1."""


@dataclass(frozen=True)
class Level:
    """Residual blocks ``in_channels`` -> ``channels``, then a resampling to ``resampled`` channels.

    ``time``, ``space``: factor of the resampling along time and along both height and width; 1 where there is none.
    """

    in_channels: int
    channels: int
    resampled: int
    time: int
    space: int

    @property
    def phases(self) -> tuple[int, int, int]:
        """Frames, rows and columns on the fine side that meet one value on the coarse side."""
        return self.time, self.space, self.space


def encoder_levels(config: WanVaeConfig) -> tuple[Level, ...]:
    """In order of execution; the last one does not resample."""
    widths = [config.base_dim * multiplier for multiplier in (1, *config.dim_mult)]
    factors = [(2 if time else 1, 2) for time in config.temporal_downsample] + [(1, 1)]
    return tuple(
        Level(before, width, width, time, space)
        for (before, width), (time, space) in zip(pairwise(widths), factors, strict=True)
    )


def decoder_levels(config: WanVaeConfig) -> tuple[Level, ...]:
    """In order of execution; the last one does not resample. Without shortcuts (2.1) resampling halves the channels."""
    base = config.decoder_base_dim or config.base_dim
    widths = [base * multiplier for multiplier in reversed(config.dim_mult)]
    factors = [(2 if time else 1, 2) for time in reversed(config.temporal_downsample)] + [(1, 1)]
    levels = []
    before = widths[0]
    for width, (time, space) in zip(widths, factors, strict=True):
        resampled = width if config.is_residual or space == 1 else width // 2
        levels.append(Level(before, width, resampled, time, space))
        before = resampled
    return tuple(levels)


def kept_phases(phases: tuple[int, int, int], fine: int, coarse: int) -> tuple[int, ...]:
    """The leading phases that are channels in a shortcut from ``fine`` channels to ``coarse`` or back.

    Raises:
        ValueError: no leading phases make up the difference.
    """
    for count in (3, 2, 1, 0):
        if fine * prod(phases[:count]) == coarse:
            return phases[:count]
    raise ValueError(
        f"a level of the Wan VAE has {fine} channels on its fine side and {coarse} on its coarse one; its shortcut by "
        f"{phases} needs one of {', '.join(str(fine * prod(phases[:count])) for count in range(4))}: check dim_mult"
    )


def largest_decoder_tensor(
    config: WanVaeConfig, chunk: int, latent_height: int, latent_width: int, batch: int = 1
) -> int:
    """Elements of the largest tensor that a convolution reads or writes in a later chunk; the first needs less."""
    frames, H, W = chunk, latent_height, latent_width
    levels = decoder_levels(config)
    sizes = list(_conv(config.z_dim, levels[0].in_channels, frames, H, W))
    for level in levels:
        sizes += _conv(max(level.in_channels, level.channels), level.channels, frames, H, W)
        if level.time > 1:
            sizes += _conv(level.channels, 2 * level.channels, frames, H, W, kernel=(3, 1))
            frames *= 2
        if level.space > 1:
            H, W = 2 * H, 2 * W
            sizes += _conv(level.channels, level.resampled, frames, H, W, kernel=(1, 3))
    sizes += _conv(levels[-1].channels, config.out_channels, frames, H, W)
    return batch * max(sizes)


def largest_encoder_tensor(
    config: WanVaeConfig, chunk: int, latent_height: int, latent_width: int, batch: int = 1
) -> int:
    """As ``largest_decoder_tensor``, for the encoder."""
    levels = encoder_levels(config)
    frames = chunk * config.scale_factor_temporal
    H, W = (size * config.scale_factor_spatial // (config.patch_size or 1) for size in (latent_height, latent_width))
    sizes = list(_conv(config.in_channels, levels[0].in_channels, frames, H, W))
    for level in levels:
        sizes += _conv(max(level.in_channels, level.channels), level.channels, frames, H, W)
        # What a resampling reads has a smaller border.
        frames, H, W = frames // level.time, H // level.space, W // level.space
    sizes += _conv(levels[-1].channels, 2 * config.z_dim, frames, H, W)
    return batch * max(sizes)


def _conv(
    in_channels: int, out_channels: int, frames: int, H: int, W: int, kernel: tuple[int, int] = RES_KERNEL
) -> Iterator[int]:
    """Elements of a convolution's input, with the frames before it and its border, and of its output."""
    time, space = kernel
    yield in_channels * (frames + time - 1) * (H + space - 1) * (W + space - 1)
    yield out_channels * frames * H * W


def most_decoder_frames(config: WanVaeConfig, shape: tuple[int, ...]) -> int:
    """How many latent frames of latents of ``shape`` [B, C, F, H, W] fit one chunk, all tensors below 2^31 elements."""
    return _most(largest_decoder_tensor, config, shape)


def most_encoder_frames(config: WanVaeConfig, shape: tuple[int, ...]) -> int:
    """As ``most_decoder_frames``, for the encoder; ``shape`` is that of the latents as well."""
    return _most(largest_encoder_tensor, config, shape)


def _most(largest: Callable[..., int], config: WanVaeConfig, shape: tuple[int, ...]) -> int:
    batch, _, frames, H, W = shape
    return bisect_left(range(1, frames + 1), INT32_ELEMENTS, key=lambda chunk: largest(config, chunk, H, W, batch))
