"""Latents to tokens and back: what the transformer reads and writes is one row of values per patch.

Shapes: B batch, C channels, F, H, W latents, S tokens in order frame, height, width, P latents per patch.
"""

from torch import Tensor

from vgen.models.wan.geometry import Geometry


def patchify(latents_BCFHW: Tensor, geometry: Geometry) -> Tensor:
    """The tokens of ``latents_BCFHW``, [B, S, C * P], channels slowest.

    Tokens of channels one after the other are their tokens side by side, so the latents of a condition can be made
    tokens once and appended to those of each step.
    """
    time, height, width = geometry.patch_size
    patches = latents_BCFHW.unflatten(4, (-1, width)).unflatten(3, (-1, height)).unflatten(2, (-1, time))
    return patches.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4).flatten(1, 3)


def unpatchify(velocity_BSP: Tensor, geometry: Geometry) -> Tensor:
    """The latents [B, C, F, H, W] of the transformer's output ``velocity_BSP`` [B, S, P * C], channels fastest."""
    patches = velocity_BSP.unflatten(2, (*geometry.patch_size, -1)).unflatten(1, geometry.grid)
    return patches.permute(0, 7, 1, 4, 2, 5, 3, 6).flatten(6).flatten(4, 5).flatten(2, 3)
