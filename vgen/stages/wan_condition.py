"""A request's images as Wan's variants take them: held first frames, channels of their own, tokens of CLIP.

B batch (1), C latent channels, T latent frames, h, w latent height and width, S video tokens, L image tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from vgen import media_in
from vgen.models.wan.conditioning import HeldFrames, hold_first_frames, image_channels, place_images
from vgen.models.wan.config import WanArchitecture
from vgen.models.wan.image_encoder import encode_images, prepare_images
from vgen.models.wan.vae import normalize_latents
from vgen.requests import Request

EncodeVideo = Callable[[Tensor], Tensor]
"""Frames ``[1, 3, F, H, W]`` in [-1, 1] to the VAE's own latents ``[1, C, T, h, w]``."""


@dataclass(frozen=True)
class WanEncoders:
    """``image_encoder``: of 2.1's image-to-video, with its image size in pixels; None elsewhere."""

    encode_video: EncodeVideo
    image_encoder: nn.Module | None = None
    image_size: int = 224


@dataclass(frozen=True, eq=False)
class WanInputs:
    """What a request brings besides text. ``held``: TI2V. ``channels`` ``[1, 4 + C, T, h, w]`` fp32 and ``tokens``
    ``[1, L, D]``: image-to-video."""

    held: HeldFrames | None = None
    channels: Tensor | None = None
    tokens: Tensor | None = None


@torch.no_grad()
def encode_inputs(
    encoders: WanEncoders, request: Request, architecture: WanArchitecture, device: torch.device
) -> WanInputs:
    """The request's images, each fitted to its size as ``media_in.load_image`` does; latents in fp32.

    The official code fits an image otherwise: its variants differ, and some change the video's size.
    """
    images = {
        image.frame: media_in.load_image(Path(image.path), request.height, request.width, request.image_crf)[
            :, :, 0
        ].to(device)
        for image in sorted(request.images, key=lambda image: image.frame)
    }
    vae = architecture.vae
    if architecture.kind == "ti2v":
        latents = encoders.encode_video(images[0].unsqueeze(2)).float()
        latent_frames = (request.num_frames - 1) // vae.scale_factor_temporal + 1
        return WanInputs(held=hold_first_frames(normalize_latents(latents, vae), latent_frames))
    latents = encoders.encode_video(place_images(images, request.num_frames)).float()
    channels = image_channels(normalize_latents(latents, vae), images, request.num_frames)
    tokens = None
    if encoders.image_encoder is not None:
        prepared = prepare_images(torch.cat(list(images.values())), encoders.image_size)
        dtype = next(encoders.image_encoder.parameters()).dtype
        # The tokens of a first and a last image are one row.
        tokens = encode_images(encoders.image_encoder, prepared.to(dtype)).flatten(0, 1).unsqueeze(0)
    return WanInputs(channels=channels, tokens=tokens)
