"""Judges a clip of the tiny world by its frames and its sound alone: which shape, colour, motion and tone it has.

The shape is what is bright: every colour's brightest channel is far above every background's. Whatever is measured
is an average over the clip, so that blur, noise and compression hardly change it.

Shapes: F frames, H, W pixels, C channels of sound, S samples.
"""

import colorsys
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vgen.tiny.grammar import COLOURS, HARMONICS, LOUDNESSES, MOTIONS, PITCHES_HZ

Array = NDArray[np.float32]

LEAST_CONTRAST = 0.2
"""Of the shape over its background, in brightness; below, there is no shape."""

AREAS = (0.005, 0.25)
"""Least and largest part of the frame that can be one of our shapes."""

LEAST_FOUND = 0.8
"""Part of the frames in which the shape must be found."""

LEAST_INSIDE = 0.75
"""Part of what is bright that must lie in one place."""

CUT = 0.15
"""Cover below this counts as none, and above 1 - this as all: noise and patterns vanish, the area stays."""

LEAST_TRAVEL = 0.15
"""Way over the whole clip, as a part of the shorter side; the dataset's is 0.38 to 0.5."""

LARGEST_WANDER = 0.05
"""Root mean square distance from an even motion, as a part of the shorter side."""

LARGEST_SPREAD = 0.26
"""Second moment over squared area: circle 0.159, square 0.167, triangle 0.192; a long or torn region has more."""

LARGEST_STRETCH = 0.3
"""|sum of z^2| over the second moment: 0 for circle, square and triangle, 0.3 for an ellipse 1.36 as long as wide.

Long ellipses and rectangles have the other moments of a square or a circle.
"""

TRIANGLE_MOMENT = 0.0675
"""|sum of z^3| over area^2.5 of an equilateral triangle, z = x + iy from the centroid; 0 for circle and square."""

SQUARE_MOMENT = 1 / 60
"""|sum of z^4| over area^3 of a square; 0 for circle and triangle."""

LEAST_MOMENT = 0.4
"""Of a triangle or square, as a part of the ideal: blur rounds corners (0.46 is left after 2 pixels at 64)."""

LEAST_SATURATION = 0.35
"""Below, a colour is white."""

PITCH_TOLERANCE = 0.06
"""A semitone."""

SAME_FREQUENCY = 0.03
"""Part of a tone's frequency by which it may be off after encoders, decoders and vocoder."""

LEAST_TONE = 0.3
"""Part of the sound's energy that must be at its peak frequency."""


@dataclass(frozen=True)
class Picture:
    """What the frames show. ``colour``, ``motion`` and ``shape`` are None where there is nothing of the kind."""

    colour: str | None = None
    motion: str | None = None
    shape: str | None = None
    rgb: tuple[float, float, float] | None = None
    """Median over the frames of the shape's mean colour, 0..1."""
    hue_deg: float | None = None
    saturation: float | None = None
    travel: tuple[float, float] | None = None
    """Way over the clip by regression, x right and y down, as a part of the shorter side."""
    angle_deg: float | None = None
    """Of the way: 0 right, 90 down."""
    wander: float | None = None
    """Root mean square distance of the centroids from the regression, as a part of the shorter side."""
    area: float | None = None
    """Part of the frame."""
    spread: float | None = None
    stretch: float | None = None
    """How far the shape is longer in one direction than across: 0 for ours, 1 for a line."""
    triangle: float | None = None
    """Threefold moment: 1 for a triangle, 0 for the others."""
    square: float | None = None
    """Fourfold moment: 1 for a square, 0 for the others."""


@dataclass(frozen=True)
class Sound:
    """What is heard. ``pitch`` is None without a clear tone of the table, ``loudness`` in silence."""

    pitch: str | None = None
    loudness: str | None = None
    frequency_hz: float | None = None
    tone: float = 0.0
    """Part of the energy that is at the peak frequency."""
    peak: float = 0.0
    """Amplitude as in the table of loudnesses: that of one of our tones with this energy."""


@dataclass(frozen=True)
class Score:
    """Whether a clip shows what was asked. None: not asked, or there was no sound to look at."""

    shape: bool | None
    colour: bool | None
    motion: bool | None
    pitch: bool | None
    loudness: bool | None
    picture: Picture
    sound: Sound | None

    @property
    def passed(self) -> bool:
        """All that was asked is there."""
        return False not in (self.shape, self.colour, self.motion, self.pitch, self.loudness)


def score(frames: NDArray[np.uint8], waveform: Array | None, sample_rate: int, expected: Mapping[str, str]) -> Score:
    """Compare a clip, frames uint8 [F, H, W, 3] and waveform [C, S] in -1..1, with ``grammar.parse`` of its caption.

    A background is not judged.
    """
    picture = measure_picture(frames)
    sound = None if waveform is None else measure_sound(waveform, sample_rate)

    def judge(name: str, seen: Picture | Sound | None) -> bool | None:
        if seen is None or name not in expected:
            return None
        return bool(getattr(seen, name) == expected[name])

    return Score(
        shape=judge("shape", picture),
        colour=judge("colour", picture),
        motion=judge("motion", picture),
        pitch=judge("pitch", sound),
        loudness=judge("loudness", sound),
        picture=picture,
        sound=sound,
    )


def measure_picture(frames: NDArray[np.uint8]) -> Picture:
    """The one moving shape of frames uint8 [F, H, W, 3].

    Without a bright region in one place in nearly all frames the record is empty. Where the region stands still, jumps
    or is torn, the record has the measurements but no colour, motion or shape: it is none of ours.
    """
    video: Array = frames.astype(np.float32) / np.float32(255)
    red, green, blue = np.moveaxis(video, -1, 0)
    cover = _cover(np.maximum(np.maximum(red, green), blue))
    regions = [] if cover is None else _regions(video, cover)
    if len(regions) < max(3, LEAST_FOUND * len(frames)):
        return Picture()
    side = min(video.shape[1:3])
    travel, wander = _track(regions, len(frames), side)
    angle = math.degrees(math.atan2(travel[1], travel[0]))
    rgb = np.median([region.rgb for region in regions], axis=0)
    hue, saturation = _hue(rgb)
    area = float(np.mean([region.area for region in regions]))
    # Sums before magnitudes: what is by chance in single frames cancels.
    spread, stretch, triangle, square = (
        float(abs(np.mean([region.moments[order] for region in regions])) / area**power / unit)
        for order, power, unit in ((0, 2.0, 1.0), (2, 2.0, 1.0), (3, 2.5, TRIANGLE_MOMENT), (4, 3.0, SQUARE_MOMENT))
    )
    stretch /= spread
    moves = math.hypot(*travel) >= LEAST_TRAVEL and wander <= LARGEST_WANDER
    ours = moves and spread <= LARGEST_SPREAD and stretch <= LARGEST_STRETCH
    return Picture(
        colour=_colour(hue, saturation) if ours else None,
        motion=_motion(travel) if ours else None,
        shape=_shape(triangle, square) if ours else None,
        rgb=(float(rgb[0]), float(rgb[1]), float(rgb[2])),
        hue_deg=hue,
        saturation=saturation,
        travel=travel,
        angle_deg=angle,
        wander=wander,
        area=area / (video.shape[1] * video.shape[2]),
        spread=spread,
        stretch=stretch,
        triangle=triangle,
        square=square,
    )


def measure_sound(waveform: Array, sample_rate: int) -> Sound:
    """The tone of a waveform [C, S] in -1..1: its peak frequency, to a fraction of a bin, and its strength."""
    # Without the fades.
    margin = waveform.shape[-1] // 20
    middle = waveform[:, margin : waveform.shape[-1] - margin].astype(np.float64)
    middle = middle - middle.mean(axis=-1, keepdims=True)
    energy = float(np.mean(middle**2))
    peak = math.sqrt(energy / _TONE_ENERGY)
    if peak < _SILENCE:
        return Sound(peak=peak)
    window = np.hanning(middle.shape[-1])
    length = 4 * middle.shape[-1]
    power = (np.abs(np.fft.rfft(middle * window, length)) ** 2).sum(axis=0)
    hertz = sample_rate / length
    place = 1 + int(np.argmax(power[1:-1]))
    left, top, right = np.log(power[place - 1 : place + 2] + 1e-20)
    curve = left - 2 * top + right
    frequency = (place + (0.5 * (left - right) / curve if curve < 0 else 0.0)) * hertz
    # Hann's main lobe reaches 2 bins of the unpadded transform to each side: 8 of these.
    tone = float(power[max(0, place - 8) : place + 9].sum() / power.sum())
    pitch = _pitch(frequency) if tone >= LEAST_TONE else None
    return Sound(pitch=pitch, loudness=_loudness(peak), frequency_hz=float(frequency), tone=tone, peak=peak)


def frequency_error(found_hz: float | None, true_hz: float) -> float:
    """As a part of ``true_hz``; 1 for silence, which has no frequency."""
    return 1.0 if found_hz is None else abs(found_hz / true_hz - 1)


_TONE_ENERGY = 0.5 * sum(part**2 for part in HARMONICS) / sum(HARMONICS) ** 2
"""Mean square of a tone of amplitude 1."""

_SILENCE = min(LOUDNESSES.values()) / 4


def _cover(bright: Array) -> Array | None:
    """How much of each pixel is shape, 0..1, by brightness [F, H, W]; None without a clear contrast."""
    # Our smallest shape has 2 % of the frame.
    low, high = np.median(bright), np.percentile(bright, 99)
    if high - low < LEAST_CONTRAST:
        return None
    free = bright < (low + high) / 2
    seen = free.sum(axis=0)
    # Where the shape never leaves, the background is taken to be as elsewhere.
    background = np.where(seen > 0, (bright * free).sum(axis=0) / np.maximum(seen, 1), low)
    cover = (bright - background) / np.maximum(high - background, LEAST_CONTRAST)
    clipped: Array = np.clip((cover - CUT) / (1 - 2 * CUT), 0, 1, dtype=np.float32)
    return clipped


@dataclass(frozen=True)
class _Region:
    """The bright region of one frame, in pixels; ``moments[n]`` is the sum of z^n, of |z|^2 for 0."""

    frame: int
    centre: complex
    area: float
    moments: dict[int, complex]
    rgb: NDArray[np.float64]


def _regions(video: Array, cover: Array) -> list[_Region]:
    found = (_region(frame, video[frame], cover[frame]) for frame in range(len(video)))
    return [region for region in found if region is not None]


def _region(frame: int, picture: Array, cover: Array) -> _Region | None:
    total = float(cover.sum())
    if not AREAS[0] * cover.size <= total <= AREAS[1] * cover.size:
        return None
    # The median is hardly moved by a few bright pixels elsewhere; then the mean of what is near it. A triangle's corner
    # is 0.88 from its centroid, if its area is 1.
    column, row = _median(cover.sum(axis=0)), _median(cover.sum(axis=1))
    reach = 1.15 * math.sqrt(total)
    window = _around(row, 1.5 * reach), _around(column, 1.5 * reach)
    rows, columns = np.arange(cover.shape[0])[window[0]], np.arange(cover.shape[1])[window[1]]
    place = columns[None, :] + 1j * rows[:, None]
    centre = complex(column, row)
    for _ in range(2):
        near = np.where(np.abs(place - centre) < reach, cover[window], 0)
        area = float(near.sum())
        if area < LEAST_INSIDE * total:
            return None
        centre = complex((near * place).sum() / area)
    z = place - centre
    powers = {0: z * z.conj(), 2: z * z, 3: z * z * z, 4: (z * z) * (z * z)}
    moments = {n: complex((near * power).sum()) for n, power in powers.items()}
    core = near >= min(0.99, float(near.max()))
    return _Region(frame, centre, area, moments, picture[window][core].mean(axis=0, dtype=np.float64))


def _around(middle: int, reach: float) -> slice:
    return slice(max(0, math.floor(middle - reach)), math.ceil(middle + reach) + 1)


def _median(weights: Array) -> int:
    return int(np.searchsorted(np.cumsum(weights), weights.sum() / 2))


def _track(regions: list[_Region], num_frames: int, side: int) -> tuple[tuple[float, float], float]:
    """Way over the whole clip and the distance from an even motion, as parts of ``side``."""
    times = np.array([region.frame for region in regions]) / max(1, num_frames - 1)
    centres = np.array([region.centre for region in regions]) / side
    times = times - times.mean()
    way = (times * centres).sum() / (times**2).sum()
    wander = math.sqrt(float(np.mean(np.abs(centres - centres.mean() - way * times) ** 2)))
    return (float(way.real), float(way.imag)), wander


def _hue(rgb: NDArray[np.float64]) -> tuple[float, float]:
    """Hue in degrees and saturation."""
    hue, saturation, _ = colorsys.rgb_to_hsv(*(float(channel) for channel in rgb))
    return hue * 360, saturation


def _colour(hue_deg: float, saturation: float) -> str:
    if saturation < LEAST_SATURATION:
        return "white"
    hues = {name: _hue(np.array(rgb))[0] for name, rgb in COLOURS.items() if name != "white"}
    return min(hues, key=lambda name: abs((hue_deg - hues[name] + 180) % 360 - 180))


def _motion(travel: tuple[float, float]) -> str:
    return max(MOTIONS, key=lambda name: travel[0] * MOTIONS[name][0] + travel[1] * MOTIONS[name][1])


def _shape(triangle: float, square: float) -> str:
    if max(triangle, square) < LEAST_MOMENT:
        return "circle"
    return "triangle" if triangle > square else "square"


def _pitch(frequency_hz: float) -> str | None:
    pitch = min(PITCHES_HZ, key=lambda name: abs(math.log(frequency_hz / PITCHES_HZ[name])))
    return pitch if abs(frequency_hz / PITCHES_HZ[pitch] - 1) <= PITCH_TOLERANCE else None


def _loudness(peak: float) -> str:
    return min(LOUDNESSES, key=lambda name: abs(math.log(peak / LOUDNESSES[name])))
