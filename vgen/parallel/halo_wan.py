"""Wan's VAEs over the ranks of a group: each decodes or encodes one band of the image and swaps the lines at its edges.

Exact: what a rank computes is what one rank alone computes there, up to the order of the sums inside a kernel. Every
convolution with a border reads its neighbours' lines instead of zeros; the attention of the middle gathers keys and
values and keeps its own queries; everything else sees single pixels. The frames that go from chunk to chunk have their
border with them, so no line is sent twice.

The module has its own borders and attention except while an adapter runs. Every rank of the group makes the same calls
with the same arguments: latents and frames going in are the whole ones.

Shapes: B batch, C channels, F frames, H, W height and width, in pixels for frames and in latents for latents. T, S: the
config's scale factors along time (4) and space (8 or 16).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vgen.models.attention import Attend
from vgen.models.memory_format import memory_format_of
from vgen.models.wan.vae import VideoDecoder, VideoEncoder, chunk_length, validate_frames
from vgen.models.wan.vae_blocks import CausalConv3d, FillBorder, FrameAttention, FrameConv
from vgen.models.wan.vae_levels import most_decoder_frames, most_encoder_frames
from vgen.parallel.halo import Cut, HaloShare, cut_latents, exchange_lines, gather_bands, gather_parts
from vgen.parallel.watch import collective


class HaloDecoder(HaloShare[VideoDecoder]):
    """``VideoDecoder`` over ranks."""

    first_only = True

    def __call__(self, latents: Tensor, chunk: int | None = 1) -> Tensor | None:
        """As ``VideoDecoder``: all frames [B, 3, T(F-1) + 1, SH, SW]; raises as ``decode`` does."""
        frames: Tensor | None = None
        start = 0
        for part in self.decode(latents, chunk):
            if part is None:
                continue
            if frames is None:
                size = list(part.shape)
                size[2] = self.config.scale_factor_temporal * (latents.shape[2] - 1) + 1
                frames = torch.empty(size, dtype=part.dtype, device=part.device, memory_format=self._memory_format)
            frames[:, :, start : start + part.shape[2]].copy_(part)
            start += part.shape[2]
        return frames

    def decode(self, latents: Tensor, chunk: int | None = 1) -> Iterator[Tensor | None]:
        """As ``VideoDecoder.decode`` of the whole ``latents`` [B, z_dim, F, H, W].

        ``chunk``: None, or more than the longest band allows, means as many as that does. A rank that gets no frames
        has to take all parts, too: it works as they are asked for.

        Raises:
            ValueError: there are fewer lines than ranks, and as ``VideoDecoder.decode``.
        """
        cut = cut_latents(latents.shape, self.axis, self.group)
        longest = cut.longest(latents.shape)
        chunk = chunk_length(chunk, most_decoder_frames(self.config, longest), "decode", longest)
        parts = self.half.decode(cut.own(latents, 1, self.group), chunk)
        return gather_parts(parts, partial(halo_seams, self.half, cut, self.group), cut, self, self._memory_format)

    @property
    def _memory_format(self) -> torch.memory_format:
        return memory_format_of(self.half.decoder.conv_in.weight)


class HaloEncoder(HaloShare[VideoEncoder]):
    """``VideoEncoder`` over ranks; frames are cut where latents begin."""

    first_only = False

    def __call__(self, frames: Tensor, chunk: int | None = 1) -> Tensor | None:
        """As ``VideoEncoder`` of the whole ``frames`` [B, 3, F, H, W]: latents [B, z_dim, (F-1)/T + 1, H/S, W/S].

        ``chunk``: as in ``HaloDecoder.decode``, and frames are cut where latents begin.

        Raises:
            ValueError: there are fewer lines of latents than ranks, and as ``VideoEncoder``.
        """
        B, _, num_frames, height, width = frames.shape
        validate_frames(self.config, num_frames, height, width)
        time, space = self.config.scale_factor_temporal, self.config.scale_factor_spatial
        shape = (B, self.config.z_dim, (num_frames - 1) // time + 1, height // space, width // space)
        cut = cut_latents(shape, self.axis, self.group)
        longest = cut.longest(shape)
        chunk = chunk_length(chunk, most_encoder_frames(self.config, longest), "encode", longest)
        with halo_seams(self.half, cut, self.group):
            latents = self.half(cut.own(frames, space, self.group), chunk)
        memory_format = memory_format_of(self.half.encoder.conv_in.weight)
        return gather_bands(latents, cut.bands, cut.dim, self.group, self.to_first_only, memory_format)


@contextmanager
def halo_seams(half: nn.Module, cut: Cut, group: dist.ProcessGroup) -> Iterator[None]:
    """Within it the convolutions and attentions of ``half`` see the other ranks' bands of ``cut``."""
    own: list[tuple[nn.Module, str, Callable[..., Any]]] = []
    fill_border = halo_border(cut.dim, group)
    try:
        for module in half.modules():
            if isinstance(module, CausalConv3d | FrameConv):
                own.append((module, "fill_border", module.fill_border))
                module.fill_border = fill_border
            elif isinstance(module, FrameAttention):
                own.append((module, "attend", module.attend))
                module.attend = gathering(module.attend, cut, group)
        yield
    finally:
        for seam in own:
            setattr(*seam)


def halo_border(dim: int, group: dist.ProcessGroup) -> FillBorder:
    """The neighbours' lines along ``dim``, and zeros along the other axis and where the image ends."""

    def fill(bordered: Tensor, before: int, after: int) -> None:
        other, end = 7 - dim, bordered.shape[dim] - after
        # First, so that the corners of what is sent are zeros.
        bordered.narrow(other, 0, before).zero_()
        bordered.narrow(other, bordered.shape[other] - after, after).zero_()
        first = bordered.narrow(dim, before, after) if after else None
        last = bordered.narrow(dim, end - before, before) if before else None
        from_previous, from_next = exchange_lines(first, last, group)
        for start, size, lines in ((0, before, from_previous), (end, after, from_next)):
            edge = bordered.narrow(dim, start, size)
            if lines is None:
                edge.zero_()
            else:
                edge.copy_(lines)

    return fill


def gathering(attend: Attend, cut: Cut, group: dist.ProcessGroup) -> Attend:
    """``attend`` to all ranks' keys and values, which come rank by rank: their order does not matter to a sum."""
    counts = [stop - start for start, stop in cut.bands]

    def gather(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        pixels = k.shape[2] // counts[dist.get_rank(group)]
        k, v = gather_tokens(torch.stack((k, v)), [pixels * count for count in counts], group)
        return attend(q, k, v, mask)

    return gather


def gather_tokens(x: Tensor, tokens: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """All ranks' ``x`` [..., L, D] in one [..., sum of tokens, D]; ``tokens`` are their Ls. One collective."""
    longest = max(tokens)
    padded = x.contiguous()
    if x.shape[-2] < longest:
        padded = x.new_empty((*x.shape[:-2], longest, x.shape[-1]))
        padded[..., : x.shape[-2], :] = x
    gathered = [torch.empty_like(padded) for _ in tokens]
    with collective("halo: keys and values", group):
        dist.all_gather(gathered, padded, group=group)
    return torch.cat([part[..., :count, :] for part, count in zip(gathered, tokens, strict=True)], dim=-2)
