"""What training must know of a model family, as data: its text, its VAE, its model, and how clips are made with it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from vgen.models.ltx2.config import VIDEO_COMPRESSION
from vgen.models.wan.patches import patchify
from vgen.stages.latents import pack_video, unpack_video
from vgen.tiny.tokenizer import GEMMA, UMT5, TextFormat
from vgen.tiny.training import ltx2, ltx2_vae, wan, wan_vae


@dataclass(frozen=True)
class Family:
    """``architecture`` and ``geometry`` are of the family's own types.

    ``compression`` of an architecture: frames, rows and columns of pixels that make a latent. ``kl_weight``: of the
    latents' mean KL term beside the pixels' mean errors, the more the fewer pixels a latent has. ``geometry`` of a
    clip's size and the compression. ``pack`` and ``unpack``: latents [B, C, F, H, W] to tokens and back.
    """

    text_format: TextFormat
    compression: Callable[[Any], tuple[int, int, int]]
    build_video_vae: Callable[[Any], nn.Module]
    kl_weight: float
    build_model: Callable[[dict[str, Any], Any], nn.Module]
    geometry: Callable[[Any, tuple[int, int, int]], Any]
    pack: Callable[[Tensor, Any], Tensor]
    unpack: Callable[[Tensor, Any], Tensor]
    generate: Callable[..., tuple[Tensor, Tensor | None]]


FAMILIES: Mapping[str, Family] = {
    "ltx2": Family(
        text_format=GEMMA,
        compression=lambda _: VIDEO_COMPRESSION,
        build_video_vae=ltx2_vae.build_video_vae,
        kl_weight=1e-6,
        build_model=ltx2.DiffusionModel,
        geometry=ltx2.geometry_of,
        pack=lambda latents, _: pack_video(latents),
        unpack=unpack_video,
        generate=ltx2.generate,
    ),
    "wan": Family(
        text_format=UMT5,
        compression=lambda architecture: wan_vae.compression(architecture.vae),
        build_video_vae=lambda architecture: wan_vae.WanVae(architecture.vae),
        kl_weight=1e-5,
        build_model=wan.DiffusionModel,
        geometry=wan.geometry_of,
        pack=patchify,
        unpack=wan.unpack,
        generate=wan.generate,
    ),
}
