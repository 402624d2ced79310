"""What image-to-video holds a video to: images in channels of their own (2.1, A14B) or clean first frames (TI2V-5B).

B batch, C latent channels, F pixel frames, T latent frames, H and W pixels, h and w latent height and width, K held
latent frames, L tokens. Source: Wan-Video/Wan2.2 at 42bf4cf (``image2video.py``, ``textimage2video.py``),
Wan-Video/Wan2.1 at 9737cba (``first_last_frame2video.py``).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

FRAMES_PER_LATENT = 4
"""Pixel frames of one latent frame; the first latent frame has pixel frame 0 alone."""


def place_images(images: Mapping[int, Tensor], num_frames: int) -> Tensor:
    """A clip ``[B, 3, F, H, W]`` of images ``[B, 3, H, W]`` (-1 to 1) at their pixel frames, grey (0) between them.

    The VAE has to encode all of it: it is causal, so an image also shows in the latent frames behind its own.

    Raises:
        ValueError: no image, an image outside the clip, or ``num_frames`` that is not 4k + 1.
    """
    _check(images, num_frames)
    first = next(iter(images.values()))
    clip = first.new_zeros(*first.shape[:2], num_frames, *first.shape[2:])
    for frame, image in images.items():
        clip[:, :, frame] = image
    return clip


def image_channels(latents: Tensor, frames: Iterable[int], num_frames: int) -> Tensor:
    """``[B, 4 + C, T, h, w]``: a mask, 1 at the images' pixel ``frames``, then the clip's normalized ``latents``.

    The transformer reads it behind the noisy latents. The mask's 4 channels are the pixel frames of a latent frame;
    pixel frame 0 has all 4 of the first one.

    Raises:
        ValueError: see :func:`place_images`; or ``latents`` ``[B, C, T, h, w]`` of another number of frames.
    """
    frames = tuple(frames)
    latent_frames = _check(frames, num_frames)
    if latents.shape[2] != latent_frames:
        raise ValueError(
            f"the images' clip has {latents.shape[2]} latent frames: {num_frames} frames have {latent_frames}, "
            "so encode the whole clip"
        )
    slots = torch.zeros(latent_frames * FRAMES_PER_LATENT)
    slots[[FRAMES_PER_LATENT - 1 + frame for frame in frames]] = 1
    if 0 in frames:
        slots[:FRAMES_PER_LATENT] = 1
    mask = slots.reshape(1, latent_frames, FRAMES_PER_LATENT, 1, 1).transpose(1, 2).to(latents)
    return torch.cat([mask.expand(latents.shape[0], -1, -1, *latents.shape[3:]), latents], dim=1)


def _check(frames: Iterable[int], num_frames: int) -> int:
    """The latent frames of ``num_frames``."""
    frames = sorted(frames)
    if num_frames < 1 or (num_frames - 1) % FRAMES_PER_LATENT:
        lower = max(num_frames - 1, 0) // FRAMES_PER_LATENT * FRAMES_PER_LATENT + 1
        raise ValueError(
            f"num_frames={num_frames} does not fit the VAE, which takes 1 and then fours; "
            f"use {lower} or {lower + FRAMES_PER_LATENT}"
        )
    if not frames or not 0 <= frames[0] <= frames[-1] < num_frames:
        raise ValueError(f"images at frames {frames}: give one or more, from 0 to {num_frames - 1}")
    return (num_frames - 1) // FRAMES_PER_LATENT + 1


@dataclass(frozen=True, eq=False)
class HeldFrames:
    """The first latent frames of a video as they should be.

    ``clean`` ``[B, C, K, h, w]``, normalized. ``levels`` fp32 ``[2]``: the parts of a step's timestep that held and
    other tokens have. ``rows`` int64 ``[1, L]``: which of the two each token has.
    """

    clean: Tensor
    levels: Tensor
    rows: Tensor


def hold_first_frames(clean: Tensor, latent_frames: int) -> HeldFrames:
    """Hold a video of ``latent_frames`` to the latents of an image (K = 1) or of a clip; tokens are 2 x 2 latents.

    Raises:
        ValueError: nothing or everything is held, or an odd latent height or width.
    """
    held, height, width = clean.shape[2:]
    if not 0 < held < latent_frames:
        raise ValueError(f"{held} of {latent_frames} latent frames are given: hold 1 to {latent_frames - 1}")
    if height % 2 or width % 2:
        raise ValueError(f"latents of {height} x {width} are not whole tokens of 2 x 2: use even latent sizes")
    rows = (torch.arange(latent_frames) >= held).long().repeat_interleave(height // 2 * (width // 2)).unsqueeze(0)
    return HeldFrames(clean, torch.tensor([0.0, 1.0], device=clean.device), rows.to(clean.device))


def hold(latents: Tensor, held: HeldFrames) -> Tensor:
    """``[B, C, T, h, w]`` with the held frames in place.

    Do it to what the transformer reads and to the result: solvers work on each element alone, so what they make of the
    held frames in between reaches nothing.
    """
    clean = held.clean.to(latents).expand(latents.shape[0], -1, -1, -1, -1)
    return torch.cat([clean, latents[:, :, clean.shape[2] :]], dim=2)
