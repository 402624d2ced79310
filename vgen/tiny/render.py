"""Draws scenes of the tiny world as video and sound, in batches, on any device.

Nothing is random here: the scene holds every number that was drawn.

Shapes: B scenes, F frames, H, W pixels, S samples, P half-planes of a polygon.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vgen.tiny.grammar import BACKGROUNDS, COLOURS, HARMONICS, LOUDNESSES, MOTIONS, PITCHES_HZ, SHAPES, Scene

Device = torch.device | str

FADE_S = 0.02

_LEVELS = {
    "black": (0.03, 0.08),
    "grey": (0.25, 0.38),
    "striped": (0.22, 0.28),
    "checked": (0.22, 0.28),
    "cloudy": (0.22, 0.28),
}
"""Mean brightness of a background at shade 0 and 1."""

_CONTRAST = 0.12
"""How far a pattern goes above and below the mean brightness."""

_TINT = 0.1
"""How far a background's channels go from its brightness, as a part of it."""

_PERIOD = 0.3
"""Length of a stripe pair, and the scale of the other patterns, as a part of the shorter side."""

_WAVES = 6
_GOLDEN = (math.sqrt(5) - 1) / 2


class Clips(NamedTuple):
    """Video [B, 3, F, H, W] in -1..1 and waveform [B, 2, S] in -1..1, both float32."""

    video: Tensor
    waveform: Tensor


def render(
    scenes: Sequence[Scene],
    num_frames: int,
    height: int,
    width: int,
    fps: float,
    sample_rate: int = 16000,
    device: Device = "cpu",
) -> Clips:
    """Video and sound of the scenes, equally long."""
    samples = round(num_frames / fps * sample_rate)
    return Clips(
        render_video(scenes, num_frames, height, width, device), render_sound(scenes, samples, sample_rate, device)
    )


def render_video(scenes: Sequence[Scene], num_frames: int, height: int, width: int, device: Device = "cpu") -> Tensor:
    """Video [B, 3, F, H, W] in -1..1: shapes in even motion before still backgrounds, always inside the frame."""
    background_B3HW = _backgrounds(scenes, height, width, device)
    colours_B3 = _column([COLOURS[scene.colour] for scene in scenes], device)
    cover_BFHW = _cover(scenes, num_frames, height, width, device)
    # In -1..1 from the start, so that only one pass goes over the whole video.
    start_B31HW = background_B3HW[:, :, None] * 2 - 1
    return torch.lerp(start_B31HW, colours_B3[:, :, None, None, None] * 2 - 1, cover_BFHW[:, None])


def render_sound(scenes: Sequence[Scene], samples: int, sample_rate: int, device: Device = "cpu") -> Tensor:
    """Waveform [B, 2, S] in -1..1: the scene's tone, faded at both ends, the same on both sides."""
    # Turns in float64 and only their fraction in float32: after a second, float32 turns would be audibly rough. On the
    # CPU, since not every device has float64.
    time_S = torch.arange(samples, dtype=torch.float64) / sample_rate
    turns = {pitch: (hertz * time_S).frac().float() for pitch, hertz in PITCHES_HZ.items()}
    turns_BS = torch.stack([turns[scene.pitch] for scene in scenes]).to(device)
    turns_BS += _column([scene.phase for scene in scenes], device)[:, None]
    tone_BS = torch.zeros_like(turns_BS)
    for multiple, part in enumerate(HARMONICS, start=1):
        tone_BS += part / sum(HARMONICS) * torch.sin(2 * math.pi * multiple * turns_BS)
    loudness_B1 = _column([LOUDNESSES[scene.loudness] for scene in scenes], device)[:, None]
    to_end_S = torch.minimum(time_S, time_S.flip(0)).float().to(device)
    tone_BS = tone_BS * loudness_B1 * (to_end_S / FADE_S).clamp(max=1)
    return tone_BS[:, None].repeat(1, 2, 1)


def _column(values: Sequence[object], device: Device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype).to(device)


class _Outline(NamedTuple):
    """A shape of area pi/4, centred on 0: ``normals`` of its half-planes, their distance, and how far it reaches."""

    normals: tuple[tuple[float, float], ...]
    inner: float
    left: float
    right: float
    up: float
    down: float


def _outline(shape: str) -> _Outline:
    if shape == "circle":
        return _Outline(((0.0, 0.0),) * 4, 0.5, 0.5, 0.5, 0.5, 0.5)
    if shape == "square":
        half = math.sqrt(math.pi) / 4
        return _Outline(((1, 0), (-1, 0), (0, 1), (0, -1)), half, half, half, half, half)
    if shape == "triangle":
        inner = math.sqrt(math.pi / 4 / (3 * math.sqrt(3)))
        slant = (math.sqrt(3) / 2, -0.5)
        normals = ((0.0, 1.0), slant, (-slant[0], slant[1]), (0.0, 1.0))
        return _Outline(normals, inner, math.sqrt(3) * inner, math.sqrt(3) * inner, 2 * inner, inner)
    raise ValueError(f"there is no shape {shape!r}; use one of {', '.join(SHAPES)}")


def _cover(scenes: Sequence[Scene], num_frames: int, height: int, width: int, device: Device) -> Tensor:
    """How much of each pixel the shape covers [B, F, H, W] in 0..1, from its signed distance in pixels."""
    x_BFW, y_BFH = _offsets(scenes, num_frames, height, width, device)
    x_BF1W, y_BFH1 = x_BFW[:, :, None, :], y_BFH[:, :, :, None]
    normals_B42 = _column([_outline(scene.shape).normals for scene in scenes], device)
    side = min(height, width)
    inner_B111 = _column([_outline(scene.shape).inner * scene.size * side for scene in scenes], device).view(
        -1, 1, 1, 1
    )
    # A circle has zero normals, a polygon's distance is the largest of its half-planes'.
    distance_BFHW = torch.zeros((), device=device)
    for nx_B, ny_B in normals_B42.permute(1, 2, 0):
        plane_BFHW = x_BF1W * nx_B.view(-1, 1, 1, 1) + y_BFH1 * ny_B.view(-1, 1, 1, 1)
        distance_BFHW = torch.maximum(distance_BFHW, plane_BFHW)
    round_B = torch.tensor([scene.shape == "circle" for scene in scenes]).to(device)
    radius_BFHW = (x_BF1W.square() + y_BFH1.square()).sqrt_()
    distance_BFHW = torch.where(round_B.view(-1, 1, 1, 1), radius_BFHW, distance_BFHW)
    return (inner_B111 + 0.5 - distance_BFHW).clamp_(0, 1)


def _offsets(
    scenes: Sequence[Scene], num_frames: int, height: int, width: int, device: Device
) -> tuple[Tensor, Tensor]:
    """Pixel centres relative to the shape's centre, in pixels: x [B, F, W] and y [B, F, H]."""
    x_B2, y_B2 = (
        torch.tensor([_ends(scene, height, width)[axis] for scene in scenes], dtype=torch.float64) for axis in (0, 1)
    )
    time_F = torch.linspace(0, 1, num_frames, dtype=torch.float64)

    def relative(ends_B2: Tensor, length: int) -> Tensor:
        centre_BF = torch.lerp(ends_B2[:, :1], ends_B2[:, 1:], time_F)
        pixels = torch.arange(length, dtype=torch.float64) + 0.5
        return (pixels - centre_BF[:, :, None]).float().to(device)

    return relative(x_B2, width), relative(y_B2, height)


def _ends(scene: Scene, height: int, width: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """Where the centre starts and ends, in pixels: x, then y."""
    outline, side = _outline(scene.shape), min(height, width)
    size, (dx, dy) = scene.size * side, MOTIONS[scene.motion]
    dx, dy = dx * scene.travel * side, dy * scene.travel * side

    def ends(before: float, after: float, way: float, length: int, place: float) -> tuple[float, float]:
        lowest = before * size + max(0.0, -way)
        highest = length - after * size - max(0.0, way)
        start = lowest + place * (highest - lowest)
        return start, start + way

    x = ends(outline.left, outline.right, dx, width, scene.place[0])
    y = ends(outline.up, outline.down, dy, height, scene.place[1])
    return x, y


def _backgrounds(scenes: Sequence[Scene], height: int, width: int, device: Device) -> Tensor:
    """Backgrounds [B, 3, H, W] in 0..0.45, hardly coloured."""
    side = min(height, width)
    x_W = (torch.arange(width, dtype=torch.float32, device=device) + 0.5) / (side * _PERIOD)
    y_H1 = ((torch.arange(height, dtype=torch.float32, device=device) + 0.5) / (side * _PERIOD))[:, None]
    kind_B = _column([BACKGROUNDS.index(scene.background) for scene in scenes], device, torch.int64)
    texture_B11 = _column([scene.texture for scene in scenes], device)[:, None, None]
    patterns = {
        "striped": _stripes(x_W, y_H1, texture_B11),
        "checked": _checks(x_W, y_H1, texture_B11),
        "cloudy": _clouds(x_W, y_H1, texture_B11),
    }
    brightness_BHW = _column([_brightness(scene) for scene in scenes], device)[:, None, None].repeat(1, height, width)
    for name, pattern_BHW in patterns.items():
        shown_B11 = (kind_B == BACKGROUNDS.index(name))[:, None, None]
        brightness_BHW = brightness_BHW + shown_B11 * _CONTRAST * pattern_BHW
    third_3 = torch.arange(3, dtype=torch.float32, device=device) / 3
    tint_B3 = 1 + _TINT * torch.cos(2 * math.pi * (_other(texture_B11[:, 0], 5) + third_3))
    return brightness_BHW[:, None] * tint_B3[:, :, None, None]


def _brightness(scene: Scene) -> float:
    dark, light = _LEVELS[scene.background]
    return dark + scene.shade * (light - dark)


def _other(texture: Tensor, which: int) -> Tensor:
    """Another number in 0..1 from the texture's; a different one for each ``which``."""
    return (texture * (17 + 4 * which) + _GOLDEN * which).frac()


def _wave(x: Tensor, y: Tensor, angle: Tensor, phase: Tensor, frequency: float = 1.0) -> Tensor:
    """A sine over the plane; angle and phase in turns."""
    along = x * torch.cos(2 * math.pi * angle) + y * torch.sin(2 * math.pi * angle)
    return torch.sin(2 * math.pi * (along * frequency + phase))


def _edged(wave: Tensor) -> Tensor:
    """A sine with its slopes steepened: bands with soft edges of the same share of a period at any resolution."""
    return (wave * 3).clamp(-1, 1)


def _stripes(x_W: Tensor, y_H1: Tensor, texture_B11: Tensor) -> Tensor:
    return _edged(_wave(x_W, y_H1, texture_B11, _other(texture_B11, 1)))


def _checks(x_W: Tensor, y_H1: Tensor, texture_B11: Tensor) -> Tensor:
    still = torch.zeros_like(texture_B11)
    columns = _edged(_wave(x_W, y_H1, still, _other(texture_B11, 1)))
    rows = _edged(_wave(x_W, y_H1, still + 0.25, _other(texture_B11, 2)))
    return columns * rows


def _clouds(x_W: Tensor, y_H1: Tensor, texture_B11: Tensor) -> Tensor:
    waves = [
        _wave(x_W, y_H1, _other(texture_B11, 10 + i), _other(texture_B11, 20 + i), 0.4 + 0.6 * i / _WAVES)
        for i in range(_WAVES)
    ]
    # Six waves seldom add up; the clamp keeps the rare peak within the contrast.
    return (torch.stack(waves).sum(0) / 2).clamp(-1, 1)
