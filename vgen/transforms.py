"""The one place that builds a model and fixes the order of what is done to it.

load → LoRA → quantize → fuse → parallelize → compile → capture → guidance. A step that the configuration turns off
is not called, and the module stays the plain one. This version loads, parallelizes and guides.

What a family is built of is in ``vgen.components``; here is what tasks ask for, whatever the family.
"""

from collections.abc import Collection, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import nn

from vgen import memory
from vgen.components import ltx2, wan
from vgen.components.ranks import ALONE
from vgen.components.types import AttentionSizes
from vgen.job import Job
from vgen.loading import DTYPES, component_dtype, exact_fp32
from vgen.memory import Activations, Decode, Spread, weight_bytes
from vgen.metrics.timer import Timer, null_timer
from vgen.parallel.mesh import Mesh
from vgen.parallel.tiles import Tile
from vgen.requests import Request
from vgen.residency import Residency

__all__ = ["DTYPES", "component_dtype", "exact_fp32"]

FAMILIES: dict[str, ModuleType] = {"ltx2": ltx2, "wan": wan}


def _family(job: Job) -> ModuleType:
    return FAMILIES[job.config.model.family]


def components_of(job: Job) -> tuple[str, ...]:
    """What ``task=generate`` builds for the requests of ``job``."""
    names: tuple[str, ...] = _family(job).components_of(job)
    return names


def decoders_of(job: Job) -> tuple[str, ...]:
    """What ``task=decode`` builds."""
    names: tuple[str, ...] = _family(job).DECODERS
    return names


def build_components(
    job: Job,
    device: torch.device,
    decode: Decode = "whole",
    requests: Sequence[Request] | None = None,
    timer: Timer = null_timer,
    mesh: Mesh = ALONE,
) -> Any:
    """Everything a rank at ``mesh`` that denoises needs for ``requests`` (those of the job by default), as
    ``generate`` of the family's pipeline takes it.

    Each component that visits the device leaves it before the next one loads.
    """
    return _family(job).build_components(job, device, decode, requests, timer, mesh)


def build_follower(job: Job, device: torch.device, decode: Decode, mesh: Mesh) -> Any:
    """What a rank that only decodes needs, as ``follow`` of the family's pipeline takes it."""
    return _family(job).build_follower(job, device, decode, mesh)


def build_decoders(
    job: Job, device: torch.device, residency: Residency, decode: Decode = "whole", mesh: Mesh = ALONE
) -> Any:
    """What a rank at ``mesh`` needs for ``task=decode``, as ``decode`` of the family's pipeline takes it."""
    return _family(job).build_decoders(job, device, residency, decode, mesh)


def build_meta(job: Job, component: str) -> nn.Module:
    """A component without weights."""
    with torch.device("meta"):
        module: nn.Module = _family(job).MODULES[component](job)
    return module


def component_bytes(job: Job, component: str) -> int:
    """Bytes of a component's weights on a GPU."""
    keep_float32 = _family(job).keeps_float32(job, component)
    return weight_bytes(build_meta(job, component), DTYPES[job.config.quant.mode].itemsize, keep_float32)


def latents_dtype(job: Job) -> torch.dtype:
    """Of the latents that are decoded."""
    dtype: torch.dtype = _family(job).latents_dtype(job)
    return dtype


def text_config(job: Job) -> dict[str, Any]:
    """Sizes of the text encoder, in transformers' words."""
    sizes: dict[str, Any] = _family(job).text_config(job)
    return sizes


def plan_decode(job: Job, request: Request, decode: Decode = "tile") -> tuple[Tile, ...]:
    """The tiles of one request's decode, where it is in tiles."""
    tiles: tuple[Tile, ...] = _family(job).plan_decode(job, request, decode)
    return tiles


def attention_sizes(job: Job, request: Request) -> AttentionSizes:
    """Of the video's self-attention, the largest of all."""
    sizes: AttentionSizes = _family(job).attention_sizes(job, request)
    return sizes


def activations(job: Job, request: Request, components: Collection[str], spread: Spread = memory.ALONE) -> Activations:
    """Bytes of one request's work in each stage on a GPU of the rank with most to do."""
    work: Activations = _family(job).activations(job, request, components, spread)
    return work
