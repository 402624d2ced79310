"""Which video VAE a checkpoint holds, told by the names and shapes of its tensors, for messages; needs no torch."""

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

from vgen.models.wan.config import WanVaeConfig

VaeKind: TypeAlias = Literal["wan2.1", "wan2.2", "ltx2", "unknown"]

LABELS: dict[VaeKind, str] = {
    "wan2.1": "Wan 2.1",
    "wan2.2": "Wan 2.2",
    "ltx2": "LTX-2",
    "unknown": "an unknown model",
}

_FROM_LATENTS = ("post_quant_conv.weight", "conv2.weight")
"""The decoder's first convolution, in the diffusers and in the original layout."""

_UPSAMPLERS: dict[str, VaeKind] = {
    "decoder.up_blocks.0.upsamplers.0.resample.1.weight": "wan2.1",
    "decoder.upsamples.3.resample.1.weight": "wan2.1",
    "decoder.up_blocks.0.upsampler.resample.1.weight": "wan2.2",
    "decoder.upsamples.0.upsamples.3.resample.1.weight": "wan2.2",
}
"""What first upsamples: 2.2 nests it in its level, 2.1 does not; of any width. The first of each is diffusers' name."""


def vae_kind(shapes: Mapping[str, Sequence[int]]) -> VaeKind:
    """The kind of the VAE with tensors of these ``shapes``, in the diffusers or the original layout, of any width."""
    for name, kind in _UPSAMPLERS.items():
        if name in shapes:
            return kind
    if any("per_channel_statistics." in name or name in ("latents_mean", "latents_std") for name in shapes):
        return "ltx2"
    return "unknown"


def validate_vae_kind(shapes: Mapping[str, Sequence[int]], config: WanVaeConfig, source: str) -> None:
    """Refuse a checkpoint whose VAE is not the one that ``config`` describes; ``source`` names its file or folder.

    Raises:
        ValueError: another kind, or another number of latent channels.
    """
    kind = vae_kind(shapes)
    wanted: VaeKind = "wan2.2" if config.is_residual else "wan2.1"
    channels = next((shapes[name][0] for name in _FROM_LATENTS if name in shapes), None)
    if kind == wanted and channels == config.z_dim:
        return
    latents = "" if channels is None else f" with {channels} latent channels"
    raise ValueError(
        f"{source} holds the video VAE of {LABELS[kind]}{latents}; this model needs that of {LABELS[wanted]} with "
        f"{config.z_dim}: use the VAE that came with the model"
    )
