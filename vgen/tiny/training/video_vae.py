"""The video VAE: diffusers' differentiable twin of our encoder and decoder, its loss, and its latents' statistics.

Ours run in place and have no gradients; the twin has the same weights under diffusers' names.

Shapes: B clips, C channels, F frames, H, W pixels.
"""

from typing import Any

import torch
from torch import Tensor, nn

from vgen.config import TrainConfig
from vgen.models.ltx2.config import VIDEO_COMPRESSION, LTX2Config
from vgen.tiny.training.data import from_bytes, scenes_of, size_of, video_of, video_table
from vgen.tiny.training.loop import Batch, Objective

STRIDES = {"all": "spatiotemporal", "time": "temporal", "space": "spatial"}
"""Middle of a block's kind to diffusers' word for the axes that it halves or doubles."""

KL_WEIGHT = 1e-6
"""With more, the latents say nothing before the decoder has learned to listen, and stay so."""

FIRST_LOG_VARIANCE = -6.0
"""Of the latents' noise at the start, for the same reason."""

STATISTICS_BATCHES = 8

L2_WEIGHT, L1_WEIGHT, EDGE_WEIGHT = 4.0, 0.1, 0.1
"""Squares first: the shape is small and far off its background; plain differences learn the background's pattern."""


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
    _begin_simply(vae)
    return vae


@torch.no_grad()
def _begin_simply(vae: nn.Module) -> None:
    """Residual blocks that add nothing yet, and latents with little noise: what is left is nearly linear."""
    for name, parameter in vae.named_parameters():
        if ".conv2." in name:
            nn.init.zeros_(parameter)
    # The last channel is the logarithm of all others' variance.
    nn.init.constant_(vae.get_parameter("encoder.conv_out.conv.bias")[-1:], FIRST_LOG_VARIANCE)


def _widths(first: int, multipliers: list[int]) -> tuple[int, ...]:
    widths, width = [], first
    for multiplier in multipliers:
        width *= multiplier
        widths.append(width)
    return tuple(widths)


def video_objective(vae: Any, config: TrainConfig, device: torch.device) -> Objective:
    count = config.stages.video_vae.batch_size
    tables = {size: video_table(config, size, device) for size in dict.fromkeys(config.sizes)}

    def draw(step: int, generator: torch.Generator) -> Batch:
        size = size_of(config, step)
        table = tables[size]
        clips = torch.randint(len(table), (count,), generator=generator, device=device)
        time, height, width = VIDEO_COMPRESSION
        latent = (size.num_frames - 1) // time + 1, size.height // height, size.width // width
        noise = torch.randn(count, vae.config.latent_channels, *latent, generator=generator, device=device)
        return {"video": table[clips], "noise": noise}

    def losses(batch: Batch) -> dict[str, Tensor]:
        video, noise = from_bytes(batch["video"]), batch["noise"]
        posterior = vae.encode(video, return_dict=False)[0]
        mean, log_variance = posterior.mean.float(), posterior.logvar.float()
        decoded = vae.decode(mean + noise * (log_variance / 2).exp(), return_dict=False)[0].float()
        kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
        error = decoded - video
        l2, l1, edges = error.square().mean(), error.abs().mean(), edge_loss(error)
        loss = L2_WEIGHT * l2 + L1_WEIGHT * l1 + EDGE_WEIGHT * edges + KL_WEIGHT * kl
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
