"""Bands of one spatial axis over the ranks of a group: where they are cut, the lines neighbours swap, the whole again.

A band is the lines [start, stop) of one rank; rank i of the group has band i. Tensors travel dense, in the memory order
that they have: a channels-last tensor is sent and received as [B, F, H, W, C].

Shapes: B batch, C channels, F frames, H height, W width; ``dim`` is the one that is cut.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vgen.parallel.watch import collective

Band: TypeAlias = tuple[int, int]

Axis: TypeAlias = Literal["height", "width", "auto"]

DIMS = {"height": 3, "width": 4}


def validate_axis(axis: Axis) -> None:
    """Refuse other axes.

    Raises:
        ValueError: there is no such axis.
    """
    if axis not in (*DIMS, "auto"):
        raise ValueError(f"axis={axis!r} is no axis that a VAE is cut along: use height, width or auto")


def choose_axis(shape: Sequence[int], ranks: int) -> Literal["height", "width"]:
    """The axis to cut latents of ``shape`` [B, C, F, H, W] along: least work for the busiest rank, then least traffic.

    Lines are as long as the other axis, so cutting the longer one sends less; of a square, rows, which are contiguous
    in channels-last frames. An axis with fewer lines than ranks is taken only if the other one has fewer, too.
    """
    H, W = shape[3:5]
    by_height, by_width = (ranks > H, -(-H // ranks) * W, W), (ranks > W, H * -(-W // ranks), H)
    return "height" if by_height <= by_width else "width"


def bands(length: int, ranks: int, unit: int = 1) -> tuple[Band, ...]:
    """Cut ``length`` lines into one band for each rank, as even as possible, the longer ones first.

    ``unit``: the bands begin and end at multiples of it.

    Raises:
        ValueError: ``length`` is not a multiple of ``unit``, or has fewer units than there are ranks.
    """
    if length % unit:
        raise ValueError(f"{length} lines cannot be cut at multiples of {unit}: use a multiple of {unit}")
    units = length // unit
    if units < ranks:
        raise ValueError(
            f"{length} lines make {units} bands of at least {unit}, fewer than the {ranks} ranks that share them: "
            f"use at most {units} ranks, or cut the other axis"
        )
    short, longer = divmod(units, ranks)
    starts = [unit * (rank * short + min(rank, longer)) for rank in range(ranks + 1)]
    return tuple(pairwise(starts))


def exchange_lines(
    x_first: Tensor | None, x_last: Tensor | None, group: dist.ProcessGroup
) -> tuple[Tensor | None, Tensor | None]:
    """Give ``x_first`` to the previous rank and ``x_last`` to the next; what they gave, (from previous, from next).

    Any strided views with the channels in dim 1. What comes is a new tensor of the shape of what went the same way:
    from the previous rank one like ``x_last``, from the next one like ``x_first``. None on all ranks: nothing goes that
    way. None comes where there is no such rank.
    """
    rank = dist.get_rank(group)
    ops: list[dist.P2POp] = []
    from_previous = from_next = None
    if x_last is not None:
        from_previous = _pass_on(ops, x_last, rank - 1, rank + 1, group)
    if x_first is not None:
        from_next = _pass_on(ops, x_first, rank + 1, rank - 1, group)
    with collective("halo: lines", group):
        _wait(ops)
    return from_previous, from_next


def _pass_on(ops: list[dist.P2POp], lines: Tensor, source: int, target: int, group: dist.ProcessGroup) -> Tensor | None:
    """Add to ``ops`` that ``lines`` go to group rank ``target``, and lines like them come from ``source``."""
    # A tensor of one pixel is both: then the order is the same, too.
    channels_last = lines.stride(1) == 1
    ranks = range(dist.get_world_size(group))
    if target in ranks:
        ops.append(_p2p(dist.isend, _packed(lines, channels_last), target, group))
    if source not in ranks:
        return None
    received = _empty_packed(lines, lines.shape, channels_last)
    ops.append(_p2p(dist.irecv, received, source, group))
    return _unpacked(received, channels_last)


def gather_bands(
    local: Tensor,
    bands: Sequence[Band],
    dim: int,
    group: dist.ProcessGroup,
    to_first_only: bool,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> Tensor | None:
    """The whole of the bands ``local`` [B, C, ...], channels in dim 1, in one new tensor of ``memory_format``.

    On every rank, or with ``to_first_only`` on the group's first, and None on the others. ``bands`` are all ranks'
    places along ``dim``, which may be uneven; they and the other arguments are the same on all ranks. Beside the whole
    no more than two other bands are alive.
    """
    rank = dist.get_rank(group)
    channels_last = memory_format != torch.contiguous_format
    size = list(local.shape)
    size[dim] = bands[-1][1]
    whole = None
    if rank == 0 or not to_first_only:
        whole = torch.empty(size, dtype=local.dtype, device=local.device, memory_format=memory_format)
    # Once for all bands: a rank has no part in some of their messages, and the ranks count alike.
    with collective("halo: bands", group):
        for source, (start, stop) in enumerate(bands):
            size[dim] = stop - start
            if rank == source:
                packed = _packed(local, channels_last)
            elif whole is not None:
                packed = _empty_packed(local, size, channels_last)
            else:
                continue
            if not to_first_only:
                dist.broadcast(packed, dist.get_global_rank(group, source), group=group)
            elif source > 0:
                op = _p2p(dist.isend, packed, 0, group) if rank else _p2p(dist.irecv, packed, source, group)
                _wait([op])
            if whole is not None:
                whole.narrow(dim, start, stop - start).copy_(_unpacked(packed, channels_last))
    return whole


def _packed(x: Tensor, channels_last: bool) -> Tensor:
    """``x`` dense, its dims in memory order; a view where it already is."""
    return x.movedim(1, -1).contiguous() if channels_last else x.contiguous()


def _empty_packed(like: Tensor, size: Sequence[int], channels_last: bool) -> Tensor:
    """A buffer for ``_packed`` of a tensor of ``size``, of the dtype and on the device of ``like``."""
    batch, channels, *space = size
    return like.new_empty((batch, *space, channels) if channels_last else tuple(size))


def _unpacked(packed: Tensor, channels_last: bool) -> Tensor:
    return packed.movedim(-1, 1) if channels_last else packed


def _p2p(op: Callable[..., Any], tensor: Tensor, group_rank: int, group: dist.ProcessGroup) -> dist.P2POp:
    return dist.P2POp(op, tensor, dist.get_global_rank(group, group_rank), group)


def _wait(ops: list[dist.P2POp]) -> None:
    for request in dist.batch_isend_irecv(ops) if ops else ():
        request.wait()


Half = TypeVar("Half", bound=nn.Module)


class HaloShare(Generic[Half]):
    """A decoder or an encoder whose work is shared by the ranks of ``group``; the weights stay those of ``half``.

    ``axis``: which side is cut, ``auto`` by ``choose_axis``. ``to_first_only``: whether what comes out comes to the
    first rank of the group alone, and None to the others; by default so with frames, and not with latents.

    Raises:
        ValueError: there is no such axis.
    """

    first_only: bool

    def __init__(self, half: Half, axis: Axis, group: dist.ProcessGroup, *, to_first_only: bool | None = None) -> None:
        validate_axis(axis)
        self.half = half
        self.config: Any = half.config
        self.axis: Axis = axis
        self.group = group
        self.to_first_only = self.first_only if to_first_only is None else to_first_only


@dataclass(frozen=True)
class Cut:
    """Which dim of latents and frames is cut, and all ranks' bands of it in latents, the longest first."""

    dim: int
    bands: tuple[Band, ...]

    def own(self, x: Tensor, lines: int, group: dist.ProcessGroup) -> Tensor:
        """This rank's band, a view, of latents or frames with ``lines`` lines to each latent."""
        start, stop = self.bands[dist.get_rank(group)]
        return x.narrow(self.dim, lines * start, lines * (stop - start))

    def longest(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the first rank's band of latents of ``shape``."""
        return (*shape[: self.dim], self.bands[0][1], *shape[self.dim + 1 :])


def gather_parts(
    parts: Iterator[Tensor],
    seams: Callable[[], AbstractContextManager[None]],
    cut: Cut,
    share: HaloShare[Any],
    memory_format: torch.memory_format,
) -> Iterator[Tensor | None]:
    """Groups of frames that come from bands of ``cut``, each made within ``seams`` and gathered."""
    lines = share.config.scale_factor_spatial
    places = [(lines * start, lines * stop) for start, stop in cut.bands]
    while True:
        with seams():
            part = next(parts, None)
        if part is None:
            return
        yield gather_bands(part, places, cut.dim, share.group, share.to_first_only, memory_format)


def cut_latents(shape: Sequence[int], axis: Axis, group: dist.ProcessGroup) -> Cut:
    """The cut of latents of ``shape`` [B, C, F, H, W].

    Raises:
        ValueError: the axis has fewer latents than there are ranks.
    """
    ranks = dist.get_world_size(group)
    dim = DIMS[choose_axis(shape, ranks) if axis == "auto" else axis]
    return Cut(dim, bands(shape[dim], ranks))
