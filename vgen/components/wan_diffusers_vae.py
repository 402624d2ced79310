"""diffusers' ``AutoencoderKLWan`` behind the interface of ``vgen.models.wan.vae``, for runs that ask for it by name.

It works one latent frame at a time, and keeps the frames between chunks on the module. Two things differ from ours: it
clamps frames to -1 to 1, and a decode gives the whole clip at once, whose parts it has copied once more for each chunk.

Shapes: B batch, F frames, H, W height and width, in pixels for frames and in latents for latents. T, S: the config's
scale factors along time (4) and space (8 or 16).
"""

from collections.abc import Iterator

import torch
from diffusers import AutoencoderKLWan
from torch import Tensor, nn

from vgen.models.wan.config import WanVaeConfig
from vgen.models.wan.vae import validate_frames


class DiffusersVideoEncoder(nn.Module):
    """Frames to the means of latents; tensors and their names are those of ``VideoEncoder``."""

    def __init__(self, config: WanVaeConfig) -> None:
        super().__init__()
        self.config = config
        vae = build_vae(config)
        del vae.decoder, vae.post_quant_conv
        self.encoder, self.quant_conv = vae.encoder, vae.quant_conv
        self._encode = vae.encode  # a bound method: as a child the VAE would prefix the names of all tensors

    @torch.no_grad()
    def forward(self, frames: Tensor, chunk: int | None = 1) -> Tensor:
        """Encode frames [B, 3, F, H, W], -1 to 1, to latents [B, z_dim, (F-1)/T + 1, H/S, W/S].

        ``chunk``: 1 or None. Computes in the dtype of the weights, which the latents have.

        Raises:
            ValueError: another chunk, F is not ``Tk + 1``, or H or W is not a multiple of S.
        """
        _validate_chunk(chunk)
        validate_frames(self.config, *frames.shape[2:])
        latents: Tensor = self._encode(frames.to(self.quant_conv.weight.dtype)).latent_dist.mode()
        return latents


class DiffusersVideoDecoder(nn.Module):
    """Latents to frames; tensors and their names are those of ``VideoDecoder``."""

    def __init__(self, config: WanVaeConfig) -> None:
        super().__init__()
        self.config = config
        vae = build_vae(config)
        del vae.encoder, vae.quant_conv
        self.decoder, self.post_quant_conv = vae.decoder, vae.post_quant_conv
        self._decode = vae.decode  # see DiffusersVideoEncoder

    @torch.no_grad()
    def forward(self, latents: Tensor, chunk: int | None = 1) -> Tensor:
        """Decode latents [B, z_dim, F, H, W] to frames [B, 3, T(F-1) + 1, SH, SW], clamped to -1 to 1.

        ``chunk``: 1 or None. Computes in the dtype of the weights; the frames have the dtype of the latents.

        Raises:
            ValueError: another chunk.
        """
        _validate_chunk(chunk)
        frames: Tensor = self._decode(latents.to(self.post_quant_conv.weight.dtype)).sample
        return frames.to(latents.dtype)

    def decode(self, latents: Tensor, chunk: int | None = 1) -> Iterator[Tensor]:
        """The frames of ``forward`` as one part, decoded when it is asked for; raises as ``forward`` does, at once."""
        _validate_chunk(chunk)
        return map(self.forward, (latents,))


def build_vae(config: WanVaeConfig) -> AutoencoderKLWan:
    """All of it, on the default device."""
    values = dict(vars(config))
    values["temperal_downsample"] = list(values.pop("temporal_downsample"))
    values["dim_mult"] = list(values["dim_mult"])
    return AutoencoderKLWan(**values).eval()


def _validate_chunk(chunk: int | None) -> None:
    if chunk not in (1, None):
        raise ValueError(
            f"chunk={chunk}, but diffusers' VAE works one latent frame at a time: use 1 or null, or vgen's own VAE"
        )
