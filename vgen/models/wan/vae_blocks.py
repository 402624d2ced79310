"""Parts of the Wan VAEs: causal convolutions that hand frames from chunk to chunk, resamplings and shortcuts.

Shapes: B batch, C channels of the level at hand, F frames of the chunk, H height, W width. Inference only: nothing here
is differentiable, and a block adds its input to its fresh output in place.

Every convolution reads a bordered buffer that its producer wrote: the border lines, and in front the frames that the
previous chunk left. Thus chunks of any length give the same video. In the first chunk zeros stand for those frames,
except where time is resampled: frame 0 passes such a level alone.

The memory format of every activation is that of the weights, see ``apply_channels_last``.
"""

from collections.abc import Callable, Iterable
from typing import TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vgen.models.attention import Attend, sdpa
from vgen.models.memory_format import memory_format_of, space_cells, write_into
from vgen.models.wan.vae_levels import Level, kept_phases

State: TypeAlias = tuple[Tensor, ...]
"""What a chunk leaves to the next: the last frames that each convolution along time read, with their border."""

FillBorder: TypeAlias = Callable[[Tensor, int, int], None]
"""Writes the border of ``bordered`` [B, C, F, before+H+after, before+W+after]; called with both numbers of lines."""

NORM_FLOOR = 1e-12


def zero_border(bordered: Tensor, before: int, after: int) -> None:
    for dim in (3, 4):
        bordered.narrow(dim, 0, before).zero_()
        bordered.narrow(dim, bordered.shape[dim] - after, after).zero_()


def apply_channels_last(module: nn.Module) -> None:
    """Store the weights of all convolutions channels-last, in place; all activations follow.

    ``module.to(memory_format=...)`` cannot: it refuses weights of two and three dimensions in one module.
    """
    for conv in module.modules():
        if isinstance(conv, nn.Conv3d):
            conv.weight.data = conv.weight.data.contiguous(memory_format=torch.channels_last_3d)
        elif isinstance(conv, nn.Conv2d):
            conv.weight.data = conv.weight.data.contiguous(memory_format=torch.channels_last)


class Carry:
    """The frames that go from chunk to chunk, taken and left by the convolutions in the order in which they run.

    Lives for one chunk: made from the state that the previous one left, None for the first; ``state`` is then the
    state that this one leaves.
    """

    def __init__(self, state: State | None) -> None:
        self.first = state is None
        self._taken = state or ()
        self._left: list[Tensor] = []

    def exchange(self, padded: Tensor, frames: int, first: Tensor | None) -> None:
        """Write the ``frames`` first frames of ``padded`` [B, C, frames+F, H, W], and leave its last ones.

        In the first chunk they are ``first`` [B, C, frames, H, W], or zeros where it is None.
        """
        before = padded[:, :, :frames]
        if not self.first:
            before.copy_(self._taken[len(self._left)])
        elif first is not None:
            before.copy_(first)
        else:
            before.zero_()
        self._left.append(padded[:, :, -frames:].clone())

    @property
    def state(self) -> State:
        return tuple(self._left)


class PixelNorm(nn.Module):
    """x / |x| * sqrt(C) * gamma over the channels of each pixel; ``gamma`` is [C, 1, ...] with ``dims`` ones."""

    def __init__(self, channels: int, dims: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(channels, *(1,) * dims))

    def write(self, x: Tensor, out: Tensor) -> None:
        """``out`` = norm of ``x``, both [B, C, F, H, W]; squares are summed in fp32."""
        norm = torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
        write_into(out, torch.div, x, norm.clamp_(min=NORM_FLOOR).to(x.dtype))
        out.mul_(self.gamma.view(-1, 1, 1, 1) * x.shape[1] ** 0.5)


class CausalConv3d(nn.Conv3d):
    """Convolution whose frames see none that come later; called on what ``bordered`` returns.

    ``history``: how many frames in front of a chunk its outputs read. ``fill_border`` is the seam for another border:
    a halo exchange replaces this attribute and nothing else.
    """

    def __init__(
        self, in_channels: int, out_channels: int, time: int = 3, space: int = 3, time_stride: int = 1
    ) -> None:
        super().__init__(in_channels, out_channels, (time, space, space), stride=(time_stride, 1, 1))
        self.history = time - time_stride
        self.border = (space // 2, space // 2)
        self.fill_border: FillBorder = zero_border

    def bordered(self, x: Tensor, carry: Carry, norm: PixelNorm | None = None, first: Tensor | None = None) -> Tensor:
        """The input [B, C, history+F, H+2, W+2] (without the 2 where ``space`` is 1), or that of SiLU(norm(x)).

        A new tensor in the memory format and dtype of the weights. ``x`` [B, C, F, H, W] may keep its channels in
        several dims, and without ``norm`` have any dtype: one copy patchifies, converts and borders. ``first``: what
        the first chunk has in front, zeros where it is None.
        """
        B, *channels, frames, H, W = x.shape
        before, after = self.border
        padded = torch.empty(
            (B, self.in_channels, self.history + frames, before + H + after, before + W + after),
            dtype=self.weight.dtype,
            device=x.device,
            memory_format=memory_format_of(self.weight),
        )
        chunk = padded[:, :, self.history :]
        inner = chunk[..., before : before + H, before : before + W]
        if norm is None:
            inner.unflatten(1, channels).copy_(x)
        else:
            norm.write(x, out=inner)
        if before:
            self.fill_border(chunk, before, after)
        if norm is not None:
            # After the border, which may be another rank's norm, and over one dense buffer: SiLU(0) is 0.
            F.silu(chunk, inplace=True)
        carry.exchange(padded, self.history, first)
        return padded


class FrameConv(nn.Conv2d):
    """3x3 convolution of each frame, called on what ``empty`` returned once it is written and ``fill_border`` ran.

    ``border``: lines in front of and behind each axis. ``fill_border`` is the seam of ``CausalConv3d``.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int, border: tuple[int, int]) -> None:
        super().__init__(in_channels, out_channels, 3, stride=stride)
        self.border = border
        self.fill_border: FillBorder = zero_border

    def empty(self, x: Tensor, frames: int, H: int, W: int) -> tuple[Tensor, Tensor]:
        """A buffer [B, C, F, H + border, W + border] for frames like those of ``x``, and its inner [B, C, F, H, W]."""
        before, after = self.border
        channels_last = self.weight.is_contiguous(memory_format=torch.channels_last)
        folded = torch.empty(
            (x.shape[0] * frames, self.in_channels, before + H + after, before + W + after),
            dtype=x.dtype,
            device=x.device,
            memory_format=torch.channels_last if channels_last else torch.contiguous_format,
        )
        bordered = folded.unflatten(0, (x.shape[0], frames)).transpose(1, 2)
        return bordered, bordered[..., before : before + H, before : before + W]

    def forward(self, bordered: Tensor) -> Tensor:
        """[B, C, F, H + border, W + border] -> [B, C', F, H', W']."""
        B, _, frames, *_ = bordered.shape
        self.fill_border(bordered, *self.border)
        folded = super().forward(bordered.transpose(1, 2).flatten(0, 1))
        return folded.unflatten(0, (B, frames)).transpose(1, 2)


class ResBlock(nn.Module):
    """shortcut(x) + conv(SiLU(norm(conv(SiLU(norm(x)))))); the shortcut is a 1x1x1 convolution if channels change."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.norm1 = PixelNorm(in_channels, 3)
        self.conv1 = CausalConv3d(in_channels, out_channels)
        self.norm2 = PixelNorm(out_channels, 3)
        self.conv2 = CausalConv3d(out_channels, out_channels)
        self.conv_shortcut = nn.Conv3d(in_channels, out_channels, 1) if in_channels != out_channels else None

    def forward(self, x: Tensor, carry: Carry) -> Tensor:
        """[B, C, F, H, W] -> [B, C', F, H, W]."""
        hidden = self.conv1(self.conv1.bordered(x, carry, self.norm1))
        bordered = self.conv2.bordered(hidden, carry, self.norm2)
        # Two steps, because hidden would live through the convolution otherwise.
        del hidden
        out: Tensor = self.conv2(bordered)
        return out.add_(x if self.conv_shortcut is None else self.conv_shortcut(x))


class FrameAttention(nn.Module):
    """x + attention with one head of width C over all pixels of each frame.

    ``attend`` is the seam of ``vgen.models.attention``: a rank with some of the lines gathers keys and values there.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = PixelNorm(channels, 2)
        self.to_qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.proj = nn.Conv2d(channels, channels, 1)
        self.attend: Attend = sdpa

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, F, H, W], a new tensor."""
        normed = torch.empty_like(x)
        self.norm.write(x, out=normed)
        tokens = normed.permute(0, 2, 3, 4, 1).flatten(0, 1).flatten(1, 2).unsqueeze(1)
        q, k, v = F.linear(tokens, self.to_qkv.weight.flatten(1), self.to_qkv.bias).chunk(3, dim=-1)
        out = F.linear(self.attend(q, k, v, None), self.proj.weight.flatten(1), self.proj.bias)
        return x + out.view(*x.permute(0, 2, 3, 4, 1).shape).permute(0, 4, 1, 2, 3)


class MidBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.resnets = nn.ModuleList([ResBlock(channels, channels), ResBlock(channels, channels)])
        self.attentions = nn.ModuleList([FrameAttention(channels)])

    def forward(self, x: Tensor, carry: Carry) -> Tensor:
        """[B, C, F, H, W], a new tensor."""
        x = self.resnets[0](x, carry)
        x = self.attentions[0](x)
        out: Tensor = self.resnets[1](x, carry)
        return out


class Upsample(nn.Module):
    """Twice the rows and columns, of twice the frames where the level resamples time; frame 0 stays one frame."""

    def __init__(self, level: Level) -> None:
        super().__init__()
        self.time_conv = CausalConv3d(level.channels, 2 * level.channels, space=1) if level.time > 1 else None
        self.resample = nn.ModuleDict({"1": FrameConv(level.channels, level.resampled, stride=1, border=(1, 1))})

    def forward(self, x: Tensor, carry: Carry) -> Tensor:
        """[B, C, F, H, W] -> [B, C', F or 2F, 2H, 2W]; of the first chunk 2F - 1 frames."""
        alone = 1 if self.time_conv is not None and carry.first else 0
        head, phases = x[:, :, :alone], self._phases(x[:, :, alone:], carry)
        H, W = x.shape[3:]
        frames = alone + sum(phase.shape[2] for phase in phases)
        conv = cast(FrameConv, self.resample["1"])
        bordered, inner = conv.empty(x, frames, 2 * H, 2 * W)
        cells = space_cells(inner, 2, 1).squeeze(1)
        _repeat_into(cells[:, :, :alone], head)
        for index, phase in enumerate(phases):
            _repeat_into(cells[:, :, alone + index :: len(phases)], phase)
        del phases
        out: Tensor = conv(bordered)
        return out

    def _phases(self, x: Tensor, carry: Carry) -> tuple[Tensor, ...]:
        """Every frame of the result in turns, each part [B, C, F, H, W]; frame 0 is not among them."""
        if self.time_conv is None:
            return (x,)
        bordered = self.time_conv.bordered(x, carry)
        return self.time_conv(bordered).chunk(2, dim=1) if x.shape[2] else ()


def _repeat_into(cells: Tensor, x: Tensor) -> None:
    """Write every pixel of ``x`` [B, C, F, H, W] to its cell of ``cells`` [B, C, F, H, 2, W, 2]."""
    cells.copy_(x.unsqueeze(-1).unsqueeze(-3))


class Downsample(nn.Module):
    """Half the rows and columns, then half the frames where the level resamples time; frame 0 stays one frame."""

    def __init__(self, level: Level) -> None:
        super().__init__()
        self.resample = nn.ModuleDict({"1": FrameConv(level.channels, level.resampled, stride=2, border=(0, 1))})
        self.time_conv = (
            CausalConv3d(level.resampled, level.resampled, space=1, time_stride=2) if level.time > 1 else None
        )

    def forward(self, x: Tensor, carry: Carry) -> Tensor:
        """[B, C, F, H, W] -> [B, C, F or F/2, H/2, W/2]; the first chunk has 2k + 1 frames and makes k + 1."""
        conv = cast(FrameConv, self.resample["1"])
        bordered, inner = conv.empty(x, *x.shape[2:])
        inner.copy_(x)
        x = conv(bordered)
        if self.time_conv is None:
            return x
        if not carry.first:
            return self._halved(x, carry)
        head, tail = x[:, :, :1], self._halved(x[:, :, 1:], carry, x[:, :, :1])
        # Nothing beside it would cost the one frame its memory format.
        return torch.cat([head, tail], dim=2) if tail.shape[2] else head

    def _halved(self, x: Tensor, carry: Carry, first: Tensor | None = None) -> Tensor:
        assert self.time_conv is not None
        bordered = self.time_conv.bordered(x, carry, first=first)
        return self.time_conv(bordered) if x.shape[2] else x


def add_averaged(out: Tensor, x: Tensor, level: Level, first: bool) -> None:
    """Add to ``out`` [B, C', F', H', W'] the ``x`` [B, C, F, H, W] that the level resampled to it.

    Phases become channels as far as C' / C goes; the others are averaged. In the first chunk zeros stand for the frames
    before frame 0.
    """
    if first and level.time > 1:
        padded = F.pad(x[:, :, :1], (0, 0, 0, 0, level.time - 1, 0))
        add_averaged(out[:, :, :1], padded, level, first=False)
        out, x = out[:, :, 1:], x[:, :, 1:]
    kept = kept_phases(level.phases, fine=x.shape[1], coarse=out.shape[1])
    cells = _cells(x, level.phases)
    averaged = tuple(range(2 + len(kept), 5))
    if averaged:
        cells = cells.mean(averaged)
    out.unflatten(1, (-1, *kept)).add_(cells)


def add_repeated(out: Tensor, x: Tensor, level: Level, first: bool) -> None:
    """Add to ``out`` [B, C', F', H', W'] the ``x`` [B, C, F, H, W] that the level resampled to it.

    Channels become phases as far as C / C' goes and repeat along the others. In the first chunk frame 0 is only its
    last phase along time.
    """
    kept = kept_phases(level.phases, fine=out.shape[1], coarse=x.shape[1])
    cells = x.unflatten(1, (-1, *kept))
    cells = cells.view(*cells.shape[: 2 + len(kept)], *(1,) * (3 - len(kept)), *x.shape[2:])
    if first and level.time > 1:
        _cells(out[:, :, :1], (1, level.space, level.space)).add_(cells[:, :, -1:, ..., :1, :, :])
        out, cells = out[:, :, 1:], cells[..., 1:, :, :]
    _cells(out, level.phases).add_(cells)


def _cells(x: Tensor, phases: tuple[int, int, int]) -> Tensor:
    """View [B, C, (F t), (H s), (W s)] as [B, C, t, s, s, F, H, W] (time, height, width phase)."""
    time, space, _ = phases
    cells = space_cells(x, space, 1).squeeze(1).unflatten(2, (-1, time))
    return cells.permute(0, 1, 3, 5, 7, 2, 4, 6)


def run_blocks(blocks: Iterable[nn.Module], x: Tensor, carry: Carry) -> Tensor:
    for block in blocks:
        x = block(x, carry)
    return x
