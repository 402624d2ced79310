"""Reads the config of a latent upsampler, which is a file or folder of its own, in either dialect; needs no torch.

Source of names and defaults: Lightricks/LTX-2 at 400fd31 (``model/upsampler/model_configurator.py``),
huggingface/diffusers 0.42.1.
"""

from collections.abc import Mapping
from typing import Any

from vgen.models.errors import ConfigError
from vgen.models.ltx2.config import UpsamplerConfig
from vgen.models.ltx2.config_checks import (
    check_fixed,
)

_UPSAMPLER_SCALES = (1.5, 2.0)


def upsampler_from_official(config: Mapping[str, Any]) -> UpsamplerConfig:
    """Read the ``config`` JSON object of a latent upsampler's own file; what is left out, names and shapes reveal.

    Raises:
        ConfigError: the config is of something else, or of an upsampler that LTX-2 has not.
    """
    return _upsampler(config, scale="spatial_scale", rational="rational_resampler", default_rational=False)


def upsampler_from_diffusers(config: Mapping[str, Any]) -> UpsamplerConfig:
    """Read the ``config.json`` of a diffusers ``latent_upsampler`` folder; raises as ``upsampler_from_official``."""
    return _upsampler(config, scale="rational_spatial_scale", rational="use_rational_resampler", default_rational=True)


def _upsampler(config: Mapping[str, Any], *, scale: str, rational: str, default_rational: bool) -> UpsamplerConfig:
    if "mid_channels" not in config:
        raise ConfigError(
            "the config has no 'mid_channels', so it is no latent upsampler's; "
            "use a file like ltx-2-spatial-upscaler-x2-1.0.safetensors"
        )
    check_fixed(config, "upsampler", {"dims": 3})
    spatial, temporal = config.get("spatial_upsample", True), config.get("temporal_upsample", False)
    if not spatial and not temporal:
        raise ConfigError("the upsampler's config has neither spatial_upsample nor temporal_upsample; use another file")
    factor = float(config.get(scale, 2.0))
    if not temporal and factor not in _UPSAMPLER_SCALES:
        raise ConfigError(f"the upsampler's config has {scale}={factor}; LTX-2 has 1.5 and 2.0")
    return UpsamplerConfig(
        in_channels=config.get("in_channels", 128),
        mid_channels=config["mid_channels"],
        num_blocks_per_stage=config.get("num_blocks_per_stage", 4),
        spatial=spatial,
        temporal=temporal,
        # Where time is upsampled, neither value has a meaning, whatever the file says.
        spatial_scale=2.0 if temporal else factor,
        rational=not temporal and config.get(rational, default_rational),
    )
