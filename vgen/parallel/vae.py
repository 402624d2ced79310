"""Which adapter shares a VAE's work among ranks, by the class of the VAE."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn

from vgen.models.ltx2 import video_encoder, video_vae
from vgen.models.wan import vae as wan
from vgen.parallel import halo_ltx2, halo_wan
from vgen.parallel.halo import Axis


def from_vae(vae: nn.Module, axis: Axis, group: dist.ProcessGroup | None, **options: Any) -> Any:
    """The decoder or encoder ``vae`` behind its own interface, shared by the ranks of ``group``; None: ``vae`` itself.

    The weights stay those of ``vae``, which by itself stays what it is. ``options``: those of the adapter.

    Raises:
        ValueError: there is no adapter for this class, or no such axis.
    """
    if group is None:
        return vae
    for kind in type(vae).__mro__:
        if qualified_name(kind) in ADAPTERS:
            return ADAPTERS[qualified_name(kind)](vae, axis, group, **options)
    known = ", ".join(sorted(ADAPTERS))
    raise ValueError(f"{qualified_name(type(vae))} cannot be shared among ranks: use one of {known}, or vae_size=1")


def qualified_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _diffusers_decoder(*args: Any, **options: Any) -> Any:
    from vgen.parallel.halo_diffusers import HaloDecoder

    return HaloDecoder(*args, **options)


def _diffusers_encoder(*args: Any, **options: Any) -> Any:
    from vgen.parallel.halo_diffusers import HaloEncoder

    return HaloEncoder(*args, **options)


ADAPTERS: dict[str, Callable[..., Any]] = {
    qualified_name(video_vae.VideoDecoder): halo_ltx2.HaloDecoder,
    qualified_name(video_encoder.VideoEncoder): halo_ltx2.HaloEncoder,
    qualified_name(wan.VideoDecoder): halo_wan.HaloDecoder,
    qualified_name(wan.VideoEncoder): halo_wan.HaloEncoder,
    # By name: importing these classes imports diffusers, which takes seconds and is not there for every run.
    "vgen.components.wan_diffusers_vae.DiffusersVideoDecoder": _diffusers_decoder,
    "vgen.components.wan_diffusers_vae.DiffusersVideoEncoder": _diffusers_encoder,
}
