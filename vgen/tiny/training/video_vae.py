"""The video VAE: diffusers' differentiable twin of our encoder and decoder, its loss, and its latents' statistics.

Ours run in place and have no gradients; the twin has the same weights under diffusers' names.

Shapes: B clips, C channels, F frames, H, W pixels.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vgen.config import ClipSize, TrainConfig
from vgen.models.ltx2.config import LTX2Config
from vgen.tiny.training.data import scenes_of, size_of, video_of
from vgen.tiny.training.loop import LossOf

STRIDES = {"all": "spatiotemporal", "time": "temporal", "space": "spatial"}
"""Middle of a block's kind to diffusers' word for the axes that it halves or doubles."""

KL_WEIGHT = 1e-4
"""Latents with some noise in them: what the transformer makes is never exact either."""

EDGE_WEIGHT = 0.5
COARSE_WEIGHT = 0.5
"""Of the picture halved and quartered: colours and places, which a sum over pixels hardly sees in a small shape."""


def build_video_vae(architecture: LTX2Config) -> nn.Module:
    """``diffusers.AutoencoderKLLTX2Video`` as ``architecture`` says, with its own initial weights."""
    from diffusers import AutoencoderKLLTX2Video

    encoder, decoder = architecture.video_encoder, architecture.video_decoder
    downs = [block for block in encoder.blocks if block.kind != "res_x"]
    ups = [block for block in decoder.blocks if block.kind != "res_x"]
    vae: nn.Module = AutoencoderKLLTX2Video(
        in_channels=encoder.in_channels,
        out_channels=decoder.out_channels,
        latent_channels=encoder.latent_channels,
        block_out_channels=_widths(encoder.latent_channels, [block.multiplier for block in downs]),
        down_block_types=("LTX2VideoDownBlock3D",) * len(downs),
        layers_per_block=tuple(block.num_layers for block in encoder.blocks if block.kind == "res_x"),
        spatio_temporal_scaling=(True,) * len(downs),
        downsample_type=tuple(STRIDES[block.kind.split("_")[1]] for block in downs),
        # From the output side, the types excepted.
        decoder_block_out_channels=_widths(decoder.base_channels, [block.multiplier for block in reversed(ups)]),
        decoder_layers_per_block=tuple(b.num_layers for b in reversed(decoder.blocks) if b.kind == "res_x"),
        decoder_spatio_temporal_scaling=(True,) * len(ups),
        decoder_inject_noise=(False,) * (len(ups) + 1),
        upsample_type=tuple(STRIDES[block.kind.split("_")[1]] for block in ups),
        upsample_residual=tuple(block.residual for block in reversed(ups)),
        upsample_factor=tuple(block.multiplier for block in reversed(ups)),
        patch_size=encoder.patch_size,
        encoder_causal=True,
        decoder_causal=decoder.causal,
        encoder_spatial_padding_mode=encoder.spatial_padding_mode,
        decoder_spatial_padding_mode=decoder.spatial_padding_mode,
    )
    return vae


def _widths(first: int, multipliers: list[int]) -> tuple[int, ...]:
    widths, width = [], first
    for multiplier in multipliers:
        width *= multiplier
        widths.append(width)
    return tuple(widths)


def video_loss(vae: Any, config: TrainConfig, device: torch.device) -> LossOf:
    batch = config.stages.video_vae.batch_size

    def loss_of(step: int, generator: torch.Generator) -> dict[str, Tensor]:
        video = video_of(scenes_of(config, step * batch, batch), size_of(config, step), device)
        posterior = vae.encode(video, return_dict=False)[0]
        mean, log_variance = posterior.mean.float(), posterior.logvar.float()
        noise = torch.randn(mean.shape, generator=generator, device=device)
        decoded = vae.decode(mean + noise * (log_variance / 2).exp(), return_dict=False)[0].float()
        kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
        l1, edges, coarse = (decoded - video).abs().mean(), edge_loss(decoded, video), coarse_loss(decoded, video)
        loss = l1 + EDGE_WEIGHT * edges + COARSE_WEIGHT * coarse + KL_WEIGHT * kl
        return {"loss": loss, "l1": l1, "edges": edges, "coarse": coarse, "kl": kl}

    return loss_of


def edge_loss(decoded: Tensor, video: Tensor) -> Tensor:
    """Mean difference of the differences between neighbours in time, height and width; both [B, 3, F, H, W]."""
    error = decoded - video
    return torch.stack([error.diff(dim=dim).abs().mean() for dim in (2, 3, 4) if error.shape[dim] > 1]).mean()


def coarse_loss(decoded: Tensor, video: Tensor) -> Tensor:
    """Mean difference of the pictures halved and quartered."""
    error = (decoded - video).transpose(1, 2).flatten(0, 1)
    return torch.stack([F.avg_pool2d(error, cell).abs().mean() for cell in (2, 4)]).mean()


@torch.no_grad()
def encode_means(vae: Any, video: Tensor) -> Tensor:
    """Latents [B, C, F, H, W] before they are normalized."""
    means: Tensor = vae.encode(video, return_dict=False)[0].mean
    return means.float()


@torch.no_grad()
def measure_statistics(vae: Any, config: TrainConfig, device: torch.device, batches: int = 8) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each latent channel [C], over clips of the first size."""
    batch = config.stages.video_vae.batch_size
    latents = torch.cat(
        [
            encode_means(vae, video_of(scenes_of(config, index * batch, batch), config.sizes[0], device))
            for index in range(batches)
        ]
    )
    return latents.mean(dim=(0, 2, 3, 4)), latents.std(dim=(0, 2, 3, 4)).clamp(min=1e-4)


@torch.no_grad()
def peak_ratio(
    vae: Any, config: TrainConfig, size: ClipSize, device: torch.device, count: int = 24
) -> dict[str, float]:
    """Decibels of the round trip on held-out clips: their mean, and the worst."""
    decibels = []
    for first in range(0, count, 8):
        video = video_of(scenes_of(config, first, min(8, count - first), "heldout"), size, device)
        decoded = vae.decode(encode_means(vae, video), return_dict=False)[0].float().clamp(-1, 1)
        error = ((decoded - video) / 2).square().mean(dim=(1, 2, 3, 4))
        decibels.append(-10 * error.clamp(min=1e-10).log10())
    values = torch.cat(decibels)
    return {"psnr": float(values.mean()), "worst_psnr": float(values.min())}
