"""Rotary position tables of LTX-2: where each token is, and the cosines and sines that follow.

Shapes: A position axes, T tokens, n frequencies per axis, N heads, H head dim.
Source: Lightricks/LTX-2 at 400fd31, ``model/transformer/rope.py``, ``components/patchifiers.py`` and
``conditioning/types/keyframe_cond.py``.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from vgen.models.attention import Rope
from vgen.models.ltx2.config import AUDIO_COMPRESSION, VIDEO_COMPRESSION
from vgen.models.ltx2.geometry import Geometry

MEL_HOP = 160
MEL_SAMPLE_RATE = 16000

Table = TypeVar("Table")


@dataclass(frozen=True, eq=False)
class RopeTables:
    """Tables of one geometry, each (cos, sin) of [1, N, T, H/2].

    ``video`` and ``audio`` serve self-attention; the ``cross`` ones know time only and put both streams on one axis of
    seconds for the attention between them.
    """

    video: Rope
    audio: Rope
    video_cross: Rope
    audio_cross: Rope


def video_positions(geometry: Geometry, device: torch.device) -> Tensor:
    """Midpoints of the video tokens in seconds and pixels, fp32 [3, T], tokens in order frame, height, width.

    The keyframes follow the latent frames as further ones: at the time of one pixel frame each, all over the grid.
    """
    sizes = (geometry.latent_frames, geometry.latent_height, geometry.latent_width)
    bounds = [
        torch.arange(size + 1, dtype=torch.float32, device=device) * pixels
        for size, pixels in zip(sizes, VIDEO_COMPRESSION, strict=True)
    ]
    bounds[0] = _causal(bounds[0], VIDEO_COMPRESSION[0]) / geometry.fps
    grid_times, rows, columns = (_midpoints(axis) for axis in bounds)
    times = torch.cat([grid_times, _keyframe_times(geometry, device)])
    return torch.stack(torch.meshgrid(times, rows, columns, indexing="ij")).flatten(1)


def _keyframe_times(geometry: Geometry, device: torch.device) -> Tensor:
    # A keyframe is no latent of the clip: it spans its own frame [i, i + 1), with no causal shift.
    starts = torch.tensor(geometry.keyframes, dtype=torch.float32, device=device)
    return (starts / geometry.fps + (starts + 1) / geometry.fps) / 2


def audio_positions(geometry: Geometry, device: torch.device) -> Tensor:
    """Midpoints of the audio tokens in seconds, fp32 [1, T]."""
    mel = torch.arange(geometry.audio_tokens + 1, dtype=torch.float32, device=device) * AUDIO_COMPRESSION
    return _midpoints(_causal(mel, AUDIO_COMPRESSION) * MEL_HOP / MEL_SAMPLE_RATE)[None]


def _causal(bounds: Tensor, stride: int) -> Tensor:
    # Both VAEs encode the first frame alone, so the first latent spans one frame and all others come that much earlier.
    return (bounds + 1 - stride).clamp(min=0)


def _midpoints(bounds: Tensor) -> Tensor:
    return (bounds[:-1] + bounds[1:]) / 2


def frequency_grid(count: int, theta: float, float64: bool) -> Tensor:
    """``theta**(k/(count-1)) * pi/2`` for k = 0..count-1, fp32 [count] on the CPU.

    The grid spans four decades; built in float64 it is right to the last fp32 bit, built in fp32 it drifts.
    """
    dtype = torch.float64 if float64 else torch.float32
    exponents = torch.linspace(0.0, 1.0, count, dtype=dtype, device="cpu")
    return (torch.pow(theta, exponents) * math.pi / 2).float()


def rope_table(
    positions_AT: Tensor,
    max_positions: Sequence[float],
    width: int,
    num_heads: int,
    theta: float,
    float64: bool,
    dtype: torch.dtype,
) -> Rope:
    """Cosines and sines of ``positions_AT`` (fp32), each [1, N, T, H/2] in ``dtype`` with N * H = ``width``.

    Angles are fp32: ``frequency * (2 * position / max_position - 1)``, axes fastest. Where 2 * A does not divide the
    width, the first pairs of head 0 turn by nothing. Memory order is T, N, H/2, that of the queries they meet.
    """
    axes = positions_AT.shape[0]
    grid = frequency_grid(width // (2 * axes), theta, float64).to(positions_AT.device)
    fractions = torch.stack([positions_AT[axis] / max_positions[axis] for axis in range(axes)], dim=-1)
    angles = ((fractions * 2 - 1).unsqueeze(1) * grid.unsqueeze(-1)).flatten(1)
    padding = (width // 2 - angles.shape[1], 0)

    def per_head(table: Tensor, identity: float) -> Tensor:
        padded = F.pad(table, padding, value=identity).to(dtype)
        return padded.unflatten(-1, (num_heads, -1)).transpose(0, 1).unsqueeze(0)

    return per_head(angles.cos(), 1.0), per_head(angles.sin(), 0.0)
