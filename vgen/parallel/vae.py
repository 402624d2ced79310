"""Which adapter shares a VAE's work among ranks, by the class of the VAE."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn

from vgen.models.ltx2 import video_encoder, video_vae
from vgen.models.wan import vae as wan
from vgen.parallel import halo_ltx2, halo_wan
from vgen.parallel.halo import Axis

ADAPTERS: dict[type[nn.Module], Callable[..., Any]] = {
    video_vae.VideoDecoder: halo_ltx2.HaloDecoder,
    video_encoder.VideoEncoder: halo_ltx2.HaloEncoder,
    wan.VideoDecoder: halo_wan.HaloDecoder,
    wan.VideoEncoder: halo_wan.HaloEncoder,
}


def from_vae(vae: nn.Module, axis: Axis, group: dist.ProcessGroup | None, **options: Any) -> Any:
    """The decoder or encoder ``vae`` behind its own interface, shared by the ranks of ``group``; None: ``vae`` itself.

    The weights stay those of ``vae``, which by itself stays what it is. ``options``: those of the adapter. diffusers'
    VAEs have no seams, and no adapter.

    Raises:
        ValueError: there is no adapter for this class, or no such axis.
    """
    if group is None:
        return vae
    for kind in type(vae).__mro__:
        if kind in ADAPTERS:
            return ADAPTERS[kind](vae, axis, group, **options)
    known = ", ".join(sorted(f"{kind.__module__}.{kind.__qualname__}" for kind in ADAPTERS))
    found = f"{type(vae).__module__}.{type(vae).__qualname__}"
    raise ValueError(f"{found} cannot be shared among ranks: use one of {known}, or vae_size=1")
