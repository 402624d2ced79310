"""The spatial upsampler: from the latents of a clip at half its size to those at its size.

Shapes: B clips, C channels, F, H, W latent frames, height and width.
"""

import torch
from torch import Tensor

from vgen.config import ClipSize, TrainConfig
from vgen.models.ltx2.config import LTX2Config, UpsamplerConfig
from vgen.models.ltx2.upsampler import LatentUpsampler, upsample_normalized
from vgen.models.ltx2.video_vae import PerChannelStatistics
from vgen.tiny.training.loop import Batch, Objective

BLOCKS = 2


def upsampler_config(architecture: LTX2Config, config: TrainConfig) -> UpsamplerConfig:
    """Twice as large in space, as the released one, at tiny width."""
    return UpsamplerConfig(
        in_channels=architecture.video_encoder.latent_channels,
        mid_channels=config.upsampler_channels,
        num_blocks_per_stage=BLOCKS,
        spatial=True,
        temporal=False,
        spatial_scale=2.0,
        rational=True,
    )


def official_upsampler_config(config: UpsamplerConfig) -> dict[str, object]:
    """The ``config`` of the official file's header."""
    return {
        "_class_name": "LatentUpsampler",
        "in_channels": config.in_channels,
        "mid_channels": config.mid_channels,
        "num_blocks_per_stage": config.num_blocks_per_stage,
        "dims": 3,
        "spatial_upsample": config.spatial,
        "temporal_upsample": config.temporal,
        "spatial_scale": config.spatial_scale,
        "rational_resampler": config.rational,
    }


def half_of(size: ClipSize) -> ClipSize:
    return ClipSize(size.num_frames, size.height // 2, size.width // 2)


def upsampler_objective(
    upsampler: LatentUpsampler, small: Tensor, large: Tensor, statistics: PerChannelStatistics, config: TrainConfig
) -> Objective:
    """``small`` and ``large``: normalized latents [B, C, F, H, W] of the same clips at both sizes."""
    count = config.stages.upsampler.batch_size

    def draw(step: int, generator: torch.Generator) -> Batch:  # noqa: ARG001
        clips = torch.randint(len(small), (count,), generator=generator, device=small.device)
        return {"small": small[clips], "large": large[clips]}

    def losses(batch: Batch) -> dict[str, Tensor]:
        made = upsample_normalized(upsampler, batch["small"], statistics).float()
        return {"loss": (made - batch["large"]).abs().mean()}

    return Objective(draw, losses)
