"""Images that a video is held to: which tokens, how firmly, and the noise they start with.

B batch (1), F latent frames, T video tokens, C channels, h and w latent height and width, R distinct levels.
Source: Lightricks/LTX-2 at 400fd31, ``conditioning/types/{latent_cond,keyframe_cond}.py``, ``components/noisers.py``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vgen.models.ltx2.geometry import Geometry


@dataclass(frozen=True, eq=False)
class EncodedImage:
    """``latents`` ``[1, C, 1, h, w]``, normalized, at pixel frame ``frame``; ``strength`` 1 keeps it as it is."""

    latents: Tensor
    frame: int
    strength: float


@dataclass(frozen=True, eq=False)
class Conditions:
    """What the tokens of one request's video start from and are held to.

    ``start`` ``[1, T, C]``: the clip, else 0. ``clean`` ``[1, T, C]``: the image where there is one, else ``start``.
    ``mask`` fp32 ``[1, T]``: the part of a step's sigma that a token has, 1 where nothing holds it and 1 - strength at
    an image. ``levels`` fp32 ``[R]`` are the distinct values of ``mask``, ``rows`` int64 ``[1, T]`` says which of them
    each token has.
    """

    start: Tensor
    clean: Tensor
    mask: Tensor
    levels: Tensor
    rows: Tensor


def condition_images(geometry: Geometry, images: Sequence[EncodedImage], clip: Tensor | None = None) -> Conditions:
    """Hold a video to ``images``; ``clip`` ``[1, F*h*w, C]`` is what it starts from, in tokens.

    Frame 0 is encoded alone, so its image replaces the first latent frame. Any other pixel frame shares its latent
    with seven more, so its image gets tokens of its own, at its time: those of ``geometry.keyframes``.

    The official code rounds the mask of those tokens to the model's dtype; here it is fp32 like the rest.

    Raises:
        ValueError: images or a clip that do not fit ``geometry``.
    """
    keyframes = tuple(image.frame for image in images if image.frame != 0)
    if keyframes != geometry.keyframes:
        raise ValueError(f"the images at {keyframes} have places for {geometry.keyframes}: the two must be equal")
    size = geometry.frame_tokens
    start = _start(geometry, images[0].latents, clip)
    clean = start.clone()
    amounts = [1.0] * (geometry.latent_frames + len(keyframes))
    for image in images:
        place = geometry.latent_frames + keyframes.index(image.frame) if image.frame else 0
        clean[:, place * size : (place + 1) * size] = _pack(geometry, image)
        amounts[place] = 1.0 - image.strength
    # Known on the host from the strengths: torch.unique on a device would wait for it.
    distinct = sorted(set(amounts))
    rows = torch.tensor([[distinct.index(amount) for amount in amounts]]).repeat_interleave(size, dim=1)
    levels = torch.tensor(distinct, dtype=torch.float32)
    device = clean.device
    return Conditions(start, clean, levels[rows].to(device), levels.to(device), rows.to(device))


def _start(geometry: Geometry, latents: Tensor, clip: Tensor | None) -> Tensor:
    """``[1, T, C]``: the clip, then zeros for the keyframes."""
    start = latents.new_zeros(1, geometry.video_tokens, latents.shape[1])
    if clip is None:
        return start
    if clip.shape != (1, geometry.grid_tokens, latents.shape[1]):
        raise ValueError(
            f"the clip has latents of {tuple(clip.shape)}: the video takes [1, {geometry.grid_tokens}, "
            f"{latents.shape[1]}], so give one of the request's size"
        )
    start[:, : geometry.grid_tokens] = clip
    return start


def _pack(geometry: Geometry, image: EncodedImage) -> Tensor:
    """``[1, C, 1, h, w]`` as tokens ``[1, h*w, C]``."""
    latents = image.latents
    if (latents.shape[0], *latents.shape[2:]) != (1, 1, geometry.latent_height, geometry.latent_width):
        raise ValueError(
            f"the image at frame {image.frame} has latents of {tuple(latents.shape)}: the video takes "
            f"[1, C, 1, {geometry.latent_height}, {geometry.latent_width}], so fit it to the request's size"
        )
    return latents.flatten(2).transpose(1, 2)


def noised(conditions: Conditions, noise: Tensor, noise_scale: float) -> Tensor:
    """The latents that denoising starts from, ``[1, T, C]`` in the dtype of ``noise`` ``[1, T, C]``.

    ``noise_scale`` is the first sigma; 1 forgets the clip. In fp32, rounded once.
    """
    latents = torch.lerp(conditions.start.float(), noise.float(), noise_scale)
    return torch.lerp(conditions.clean.float(), latents, conditions.mask[..., None]).to(noise.dtype)


def blend(x0: Tensor, conditions: Conditions) -> Tensor:
    """``x0`` ``[1, T, C]`` as far as the mask lets it differ from the clean tokens; fp32, then its dtype again."""
    mask = conditions.mask[..., None]
    return (x0.float() * mask + conditions.clean.float() * (1 - mask)).to(x0.dtype)
