"""LTX-2's video VAE over the ranks of a group: each has one band of the image and swaps the lines at its edges.

Exact: what a rank computes is what one rank alone computes there, up to the order of the sums inside a kernel. A band
has all its frames, and everything but the 3x3x3 convolutions stays within the cell of a latent: the norm within a
pixel, depth to space and back within the cell. So each convolution needs one line of each neighbour, and pads as the
model does where the image ends. Bands may be uneven, down to one line of latents.

The module has its own borders except while an adapter runs. Every rank of the group makes the same calls with the same
arguments: latents and frames going in are the whole ones.

Shapes: B batch, C channels, F frames, H, W height and width, in pixels for frames and in latents for latents.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor, nn

from vgen.models.ltx2.config import VIDEO_COMPRESSION
from vgen.models.ltx2.video_encoder import VideoEncoder, validate_frames
from vgen.models.ltx2.video_vae import BorderedConv3d, FillBorder, VideoDecoder, reflect_border, validate_latent_size
from vgen.models.memory_format import memory_format_of
from vgen.parallel.halo import HaloShare, cut_latents, exchange_lines, gather_bands


class HaloDecoder(HaloShare[VideoDecoder]):
    """``VideoDecoder`` over ranks."""

    first_only = True

    def __call__(self, latents: Tensor) -> Tensor | None:
        """As ``VideoDecoder`` of the whole ``latents`` [B, C, F, H, W]: frames [B, 3, 8(F-1)+1, 32H, 32W].

        Raises:
            ValueError: there are fewer lines than ranks, and as ``VideoDecoder``.
        """
        validate_latent_size(self.config, latents.shape[-2], latents.shape[-1])
        cut = cut_latents(latents.shape, self.axis, self.group)
        own = cut.own(latents, 1, self.group)
        with halo_borders(self.half, cut.dim, self.group):
            frames = self.half.decode_any_size(own)
        lines = frames.shape[cut.dim] // own.shape[cut.dim]
        places = [(lines * start, lines * stop) for start, stop in cut.bands]
        memory_format = memory_format_of(self.half.conv_out.conv.weight)
        return gather_bands(frames, places, cut.dim, self.group, self.to_first_only, memory_format)


class HaloEncoder(HaloShare[VideoEncoder]):
    """``VideoEncoder`` over ranks; frames are cut where latents begin."""

    first_only = False

    def __call__(self, frames: Tensor) -> Tensor | None:
        """As ``VideoEncoder`` of the whole ``frames`` [B, 3, F, H, W]: latents [B, C, (F-1)/8 + 1, H/32, W/32].

        Raises:
            ValueError: there are fewer lines of latents than ranks, and as ``VideoEncoder``.
        """
        validate_frames(self.config, *frames.shape[2:])
        _, height, width = VIDEO_COMPRESSION
        B, C, F, H, W = frames.shape
        cut = cut_latents((B, C, F, H // height, W // width), self.axis, self.group)
        lines = VIDEO_COMPRESSION[cut.dim - 2]
        with halo_borders(self.half, cut.dim, self.group):
            latents = self.half.encode_any_size(cut.own(frames, lines, self.group))
        memory_format = memory_format_of(self.half.conv_out.conv.weight)
        return gather_bands(latents, cut.bands, cut.dim, self.group, self.to_first_only, memory_format)


@contextmanager
def halo_borders(module: nn.Module, dim: int, group: dist.ProcessGroup) -> Iterator[None]:
    """Within it the convolutions of ``module`` read their borders along ``dim`` from the neighbouring ranks."""
    own = {conv: conv.fill_border for conv in module.modules() if isinstance(conv, BorderedConv3d)}
    try:
        for conv, border in own.items():
            conv.fill_border = halo_border(border, dim, group)
        yield
    finally:
        for conv, border in own.items():
            conv.fill_border = border


def halo_border(own: FillBorder, dim: int, group: dist.ProcessGroup) -> FillBorder:
    """``own`` where the image ends, and the neighbours' lines where another rank's band begins.

    Lines go with their borders along time and along the other axis, which ``own`` has filled, so that corners are right
    after one message to and one from each neighbour.
    """
    reflects = own is reflect_border

    def fill(padded: Tensor, before: int, after: int) -> None:
        own(padded, before, after)
        end = padded.shape[dim] - 1
        first, last = padded.narrow(dim, 0, 1), padded.narrow(dim, end, 1)
        from_previous, from_next = exchange_lines(padded.narrow(dim, 1, 1), padded.narrow(dim, end - 1, 1), group)
        if from_previous is not None:
            first.copy_(from_previous)
        if from_next is not None:
            last.copy_(from_next)
        if reflects and end == 2:
            # A band of one line reflects its neighbour's line, which was not there when ``own`` reflected.
            if from_previous is None:
                first.copy_(last)
            elif from_next is None:
                last.copy_(first)

    return fill
