"""The video VAE: its loss, and its latents' statistics.

The modules that run work in place and have no gradients. What trains is a twin with the same weights, called as
diffusers' VAEs are, whose buffers ``latents_mean`` and ``latents_std`` [C] are the statistics.

Shapes: B clips, C channels, F frames, H, W pixels.
"""

from typing import Any

import torch
from torch import Tensor

from vgen.config import TrainConfig
from vgen.tiny.training.data import from_bytes, scenes_of, size_of, video_of, video_table
from vgen.tiny.training.loop import Batch, Objective

FIRST_LOG_VARIANCE = -6.0
"""Of the latents' noise at the start: with more, they say nothing before the decoder has learned to listen, and stay
so. The same is why the KL term weighs so little."""

STATISTICS_BATCHES = 8

L2_WEIGHT, L1_WEIGHT, EDGE_WEIGHT = 4.0, 0.1, 0.1
"""Squares first: the shape is small and far off its background; plain differences learn the background's pattern."""


def video_objective(
    vae: Any, compression: tuple[int, int, int], kl_weight: float, config: TrainConfig, device: torch.device
) -> Objective:
    """``compression``: frames, rows and columns of pixels that make a latent."""
    count = config.stages.video_vae.batch_size
    tables = {size: video_table(config, size, device) for size in dict.fromkeys(config.sizes)}

    def draw(step: int, generator: torch.Generator) -> Batch:
        size = size_of(config, step)
        table = tables[size]
        clips = torch.randint(len(table), (count,), generator=generator, device=device)
        time, height, width = compression
        latent = (size.num_frames - 1) // time + 1, size.height // height, size.width // width
        noise = torch.randn(count, len(vae.latents_mean), *latent, generator=generator, device=device)
        return {"video": table[clips], "noise": noise}

    def losses(batch: Batch) -> dict[str, Tensor]:
        video, noise = from_bytes(batch["video"]), batch["noise"]
        posterior = vae.encode(video, return_dict=False)[0]
        mean, log_variance = posterior.mean.float(), posterior.logvar.float()
        decoded = vae.decode(mean + noise * (log_variance / 2).exp(), return_dict=False)[0].float()
        kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
        error = decoded - video
        l2, l1, edges = error.square().mean(), error.abs().mean(), edge_loss(error)
        loss = L2_WEIGHT * l2 + L1_WEIGHT * l1 + EDGE_WEIGHT * edges + kl_weight * kl
        return {"loss": loss, "l2": l2, "l1": l1, "edges": edges, "kl": kl}

    return Objective(draw, losses)


def edge_loss(error: Tensor) -> Tensor:
    """Mean difference between neighbours in time, height and width of an error [B, 3, F, H, W]."""
    return torch.stack([error.diff(dim=dim).abs().mean() for dim in (2, 3, 4) if error.shape[dim] > 1]).mean()


@torch.no_grad()
def encode_means(vae: Any, video: Tensor) -> Tensor:
    """Latents [B, C, F, H, W] before they are normalized."""
    means: Tensor = vae.encode(video, return_dict=False)[0].mean
    return means.float()


@torch.no_grad()
def measure_statistics(vae: Any, config: TrainConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each latent channel [C], over clips of the first size."""
    batch = config.stages.video_vae.batch_size
    latents = torch.cat(
        [
            encode_means(vae, video_of(scenes_of(config, index * batch, batch), config.sizes[0], device))
            for index in range(STATISTICS_BATCHES)
        ]
    )
    return latents.mean(dim=(0, 2, 3, 4)), latents.std(dim=(0, 2, 3, 4)).clamp(min=1e-4)


@torch.no_grad()
def round_trip(vae: Any, video: Tensor) -> tuple[Tensor, Tensor]:
    """``video`` [B, 3, F, H, W] in -1..1, encoded and decoded, and the peak signal-to-noise ratios [B] in decibels."""
    decoded = vae.decode(encode_means(vae, video), return_dict=False)[0].float().clamp(-1, 1)
    error = ((decoded - video) / 2).square().mean(dim=(1, 2, 3, 4))
    return decoded, -10 * error.clamp(min=1e-10).log10()


def peak_ratio(vae: Any, config: TrainConfig, device: torch.device) -> dict[str, float]:
    """Decibels of the round trip on 24 held-out clips of the first size: their mean, and the worst."""
    clips = (video_of(scenes_of(config, first, 8, "heldout"), config.sizes[0], device) for first in (0, 8, 16))
    values = torch.cat([round_trip(vae, video)[1] for video in clips])
    return {"psnr": float(values.mean()), "worst_psnr": float(values.min())}
