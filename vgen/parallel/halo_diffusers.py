"""diffusers' ``AutoencoderKLWan`` over the ranks of a group: in bands, as ``halo_wan`` does it with our VAEs.

Exact as there, and by the same means: convolutions read their neighbours' lines, the attention of the middle gathers
keys and values, the frames that go from chunk to chunk keep the lines that came with them, so none is sent twice.

diffusers' modules have no seams. So, against our rule, the adapter replaces their ``forward``, each by one that calls
what it replaces or the convolution itself; and only while it runs. Hooks could do it too, at the price of one more copy
of every activation, alive during the convolution. Importing this module imports diffusers, which takes seconds.

Shapes: B batch, C channels, F frames, H, W height and width, in pixels for frames and in latents for latents. T, S: the
config's scale factors along time (4) and space (8 or 16).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from diffusers.models.autoencoders.autoencoder_kl_wan import WanAttentionBlock, WanCausalConv3d, WanResample
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vgen.components.wan_diffusers_vae import DiffusersVideoDecoder, DiffusersVideoEncoder
from vgen.models.attention import Attend, sdpa
from vgen.models.memory_format import memory_format_of
from vgen.models.wan.vae import validate_frames
from vgen.models.wan.vae_blocks import FillBorder, zero_border
from vgen.parallel.halo import Cut, HaloShare, cut_latents, gather_bands, gather_parts
from vgen.parallel.halo_wan import gathering, halo_border

Seam: TypeAlias = tuple[nn.Module, str, Any]
"""A module, the name of one of its attributes, and what stands there while an adapter runs."""


class HaloDecoder(HaloShare[DiffusersVideoDecoder]):
    """``DiffusersVideoDecoder`` over ranks."""

    first_only = True

    def __call__(self, latents: Tensor, chunk: int | None = 1) -> Tensor | None:
        """As ``DiffusersVideoDecoder``: all frames [B, 3, T(F-1) + 1, SH, SW]; raises as ``decode`` does."""
        (frames,) = self.decode(latents, chunk)
        return frames

    def decode(self, latents: Tensor, chunk: int | None = 1) -> Iterator[Tensor | None]:
        """As ``DiffusersVideoDecoder.decode`` of the whole ``latents`` [B, z_dim, F, H, W]: one part.

        A rank that gets no frames has to take it, too: it works when it is asked for.

        Raises:
            ValueError: there are fewer lines than ranks, and as ``DiffusersVideoDecoder.decode``.
        """
        cut = cut_latents(latents.shape, self.axis, self.group)
        parts = self.half.decode(cut.own(latents, 1, self.group), chunk)
        return gather_parts(
            parts,
            partial(halo_seams, self.half, cut, self.group),
            cut,
            self,
            memory_format_of(self.half.decoder.conv_in.weight),
        )


class HaloEncoder(HaloShare[DiffusersVideoEncoder]):
    """``DiffusersVideoEncoder`` over ranks; frames are cut where latents begin."""

    first_only = False

    def __call__(self, frames: Tensor, chunk: int | None = 1) -> Tensor | None:
        """As ``DiffusersVideoEncoder`` of the whole ``frames`` [B, 3, F, H, W]: latents [B, z_dim, ., H/S, W/S].

        Raises:
            ValueError: there are fewer lines of latents than ranks, and as ``DiffusersVideoEncoder``.
        """
        B, _, num_frames, height, width = frames.shape
        validate_frames(self.config, num_frames, height, width)
        time, space = self.config.scale_factor_temporal, self.config.scale_factor_spatial
        shape = (B, self.config.z_dim, (num_frames - 1) // time + 1, height // space, width // space)
        cut = cut_latents(shape, self.axis, self.group)
        with halo_seams(self.half, cut, self.group):
            latents = self.half(cut.own(frames, space, self.group), chunk)
        memory_format = memory_format_of(self.half.encoder.conv_in.weight)
        return gather_bands(latents, cut.bands, cut.dim, self.group, self.to_first_only, memory_format)


@contextmanager
def halo_seams(half: nn.Module, cut: Cut, group: dist.ProcessGroup) -> Iterator[None]:
    """Within it the convolutions and attentions of ``half`` see the other ranks' bands of ``cut``.

    For one clip: the lines kept for the next chunk are those of the chunk before.
    """
    with ExitStack() as replaced:
        for module in list(half.modules()):
            for seam in _seams(module, cut, group):
                replaced.enter_context(_replaced(*seam))
        yield


def _seams(module: nn.Module, cut: Cut, group: dist.ProcessGroup) -> Sequence[Seam]:
    fill_border = halo_border(cut.dim, group)
    if isinstance(module, WanCausalConv3d) and module.kernel_size[1] > 1:
        return [(module, "forward", _CausalForward(module, cut.dim, fill_border))]
    if isinstance(module, WanAttentionBlock):
        return [(module, "forward", _gathering_forward(module.forward, gathering(sdpa, cut, group)))]
    if isinstance(module, WanResample) and isinstance(module.resample, nn.Sequential):
        return _resample_seams(module.resample, fill_border)
    return []


def _resample_seams(resample: Iterable[Any], fill_border: FillBorder) -> Sequence[Seam]:
    """Of what comes before a convolution, and of that: the first makes the whole border, and the convolution none.

    Thus the frames without their border are gone by the time of the convolution.
    """
    before, conv = resample
    memory_format = memory_format_of(conv.weight.unsqueeze(2))
    if isinstance(before, nn.ZeroPad2d):
        first, last = before.padding[:2]
        return [(before, "forward", lambda x: _bordered_frames(x, first, last, fill_border, memory_format))]
    upsample: Callable[[Tensor], Tensor] = before.forward
    border = conv.kernel_size[0] // 2
    return [
        (before, "forward", lambda x: _bordered_frames(upsample(x), border, border, fill_border, memory_format)),
        (conv, "padding", (0, 0)),
    ]


@contextmanager
def _replaced(module: nn.Module, name: str, value: Any) -> Iterator[None]:
    """``module.name`` is ``value``; afterwards what it was, of the object or of its class."""
    was_own, own = name in vars(module), vars(module).get(name)
    setattr(module, name, value)
    try:
        yield
    finally:
        if was_own:
            setattr(module, name, own)
        else:
            delattr(module, name)


class _CausalForward:
    """``WanCausalConv3d.forward`` of a band; it keeps the border of the frames that diffusers keeps for the next chunk.

    ``dim``: which one is cut.
    """

    def __init__(self, conv: nn.Conv3d, dim: int, fill_border: FillBorder) -> None:
        self.conv = conv
        self.dim = dim
        self.fill_border = fill_border
        self.history, self.border = conv.kernel_size[0] - 1, conv.kernel_size[1] // 2
        self.kept_edges: tuple[Tensor, ...] = ()

    def __call__(self, x: Tensor, cache_x: Tensor | None = None) -> Tensor:
        """[B, C, F, H, W] and up to ``history`` frames before them, without border -> [B, C', F, H, W]."""
        memory_format = memory_format_of(self.conv.weight)
        bordered, inner = _empty_bordered(x, self.history, self.border, self.border, memory_format)
        past, present = bordered[:, :, : self.history], bordered[:, :, self.history :]
        inner[:, :, self.history :].copy_(x)
        self.fill_border(present, self.border, self.border)
        if cache_x is None:
            past.zero_()
        else:
            unknown = self.history - cache_x.shape[2]
            inner[:, :, :unknown].zero_()
            inner[:, :, unknown : self.history].copy_(cache_x)
            zero_border(past, self.border, self.border)
            for edge, kept in zip(self._edges(past), self.kept_edges, strict=True):
                edge.copy_(kept)
        self.kept_edges = tuple(edge.clone() for edge in self._edges(bordered[:, :, -self.history :]))
        return nn.Conv3d.forward(self.conv, bordered)

    def _edges(self, bordered: Tensor) -> tuple[Tensor, Tensor]:
        end = bordered.shape[self.dim] - self.border
        return bordered.narrow(self.dim, 0, self.border), bordered.narrow(self.dim, end, self.border)


def _bordered_frames(
    x: Tensor, before: int, after: int, fill_border: FillBorder, memory_format: torch.memory_format
) -> Tensor:
    """[BF, C, H, W] -> [BF, C, before+H+after, before+W+after]."""
    x = x.unsqueeze(2)
    bordered, inner = _empty_bordered(x, 0, before, after, memory_format)
    inner.copy_(x)
    fill_border(bordered, before, after)
    return bordered.squeeze(2)


def _empty_bordered(
    x: Tensor, history: int, before: int, after: int, memory_format: torch.memory_format
) -> tuple[Tensor, Tensor]:
    """A new tensor [B, C, history+F, before+H+after, before+W+after] for ``x`` [B, C, F, H, W]; and where no border is.

    ``memory_format``: that of the weights, the same on all ranks, which the lines are sent in. That of ``x`` may differ
    between them: one line of a band has several.
    """
    B, C, num_frames, H, W = x.shape
    size = (B, C, history + num_frames, before + H + after, before + W + after)
    bordered = torch.empty(size, dtype=x.dtype, device=x.device, memory_format=memory_format)
    return bordered, bordered[:, :, :, before : before + H, before : before + W]


def _gathering_forward(forward: Callable[[Tensor], Tensor], attend: Attend) -> Callable[[Tensor], Tensor]:
    """``forward`` of a ``WanAttentionBlock`` whose one call of torch's attention is ``attend``."""

    def gathered(x: Tensor) -> Tensor:
        with _AttendMode(attend) as mode:
            out = forward(x)
        if mode.calls != 1:
            raise RuntimeError(
                f"diffusers' attention block called scaled_dot_product_attention {mode.calls} times, but one call is "
                f"what the ranks share: use diffusers 0.42.1, or vae_size=1"
            )
        return out

    return gathered


class _AttendMode(TorchFunctionMode):
    """Within it torch's attention is ``attend``. For one block at a time: it slows down all of torch's functions."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.calls = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs or {})
        self.calls += 1
        q, k, v = args
        return self.attend(q, k, v, None)
