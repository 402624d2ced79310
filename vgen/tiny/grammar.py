"""The scenes of the tiny world: what each one shows, its captions, and what a caption fixes."""

import math
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from string import Formatter
from types import MappingProxyType
from typing import Literal

Split = Literal["train", "seen", "heldout"]

SHAPES = ("circle", "square", "triangle")

COLOURS: Mapping[str, tuple[float, float, float]] = MappingProxyType(
    {
        "red": (0.95, 0.08, 0.08),
        "orange": (1.00, 0.50, 0.00),
        "yellow": (0.95, 0.95, 0.08),
        "green": (0.08, 0.88, 0.08),
        "cyan": (0.08, 0.92, 0.92),
        "blue": (0.10, 0.10, 1.00),
        "magenta": (0.95, 0.08, 0.95),
        "white": (0.96, 0.96, 0.96),
    }
)
"""RGB in 0..1. The brightest channel is at least 0.88, that of a background at most 0.45."""

_DIAGONAL = math.sqrt(0.5)
MOTIONS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "right": (1.0, 0.0),
        "down right": (_DIAGONAL, _DIAGONAL),
        "down": (0.0, 1.0),
        "down left": (-_DIAGONAL, _DIAGONAL),
        "left": (-1.0, 0.0),
        "up left": (-_DIAGONAL, -_DIAGONAL),
        "up": (0.0, -1.0),
        "up right": (_DIAGONAL, -_DIAGONAL),
    }
)
"""Unit vectors, x to the right and y down."""

BACKGROUNDS = ("black", "grey", "striped", "checked", "cloudy")

PITCHES_HZ: Mapping[str, float] = MappingProxyType({"low": 300.0, "middle": 600.0, "high": 1400.0})

LOUDNESSES: Mapping[str, float] = MappingProxyType({"soft": 0.15, "loud": 0.6})
"""Largest absolute sample, of 1."""

HARMONICS = (1.0, 0.25, 0.1)
"""Parts of a tone's fundamental and its multiples: a vocoder learns a tone with overtones sooner than a bare sine."""

_HELD_OUT_TURNS: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {"circle": (2, 6), "square": (1, 5), "triangle": (4,)}
)


def _is_held_out(colour: str, shape: str, motion: str) -> bool:
    # A Latin square: of a (colour, motion) at most one shape is held out, of a (colour, shape) at most two motions,
    # of a (shape, motion) at most two colours. So every pair is left in training.
    turn = list(MOTIONS).index(motion) - list(COLOURS).index(colour)
    return turn % len(MOTIONS) in _HELD_OUT_TURNS[shape]


COMBINATIONS = tuple(product(COLOURS, SHAPES, MOTIONS))
"""All (colour, shape, motion)."""

HELD_OUT = frozenset(combination for combination in COMBINATIONS if _is_held_out(*combination))
"""The (colour, shape, motion) that training never shows: 40 of 192."""


@dataclass(frozen=True)
class Scene:
    """One clip. Lengths are parts of the frame's shorter side; the fields from ``size`` on are in no caption."""

    shape: str
    colour: str
    motion: str
    background: str
    pitch: str
    loudness: str
    size: float
    """Diameter of the circle; the other shapes have the same area."""
    travel: float
    """Way of the centre from the first frame to the last."""
    place: tuple[float, float]
    """Where the clip starts, x and y, within the room that keeps the shape inside the frame: 0..1."""
    shade: float
    """Brightness of the background within its range: 0..1."""
    texture: float
    """Direction, tint and position of the background's pattern: 0..1."""
    phase: float
    """Of the tone, in turns: 0..1."""


SIZES = (0.17, 0.28)
TRAVELS = (0.38, 0.5)


def sample_scene(seed: int, index: int, split: Split) -> Scene:
    """Scene ``index`` of a split; the same for the same arguments, everywhere.

    ``train`` draws its combination freely. ``seen`` (combinations of training, other scenes) and ``heldout`` go
    through theirs in a shuffled order, so that a short test has many.
    """
    draw = random.Random(f"{seed}/{split}/{index}")
    order = _combinations(seed, split)
    colour, shape, motion = draw.choice(order) if split == "train" else order[index % len(order)]
    return Scene(
        shape=shape,
        colour=colour,
        motion=motion,
        background=draw.choice(BACKGROUNDS),
        pitch=draw.choice(list(PITCHES_HZ)),
        loudness=draw.choice(list(LOUDNESSES)),
        size=draw.uniform(*SIZES),
        travel=draw.uniform(*TRAVELS),
        place=(draw.random(), draw.random()),
        shade=draw.random(),
        texture=draw.random(),
        phase=draw.random(),
    )


@cache
def _combinations(seed: int, split: Split) -> tuple[tuple[str, str, str], ...]:
    held_out = split == "heldout"
    order = [combination for combination in COMBINATIONS if (combination in HELD_OUT) == held_out]
    random.Random(f"{seed}/{split}").shuffle(order)
    return tuple(order)


_SUBJECTS = ("{article} {colour} {shape}", "{colour} {shape}", "the {colour} {shape}")
_VERBS = ("moves", "moving", "goes", "going", "is moving", "slides", "sliding", "that moves")
_TAILS = (
    "",
    ", {pitch} {tone}",
    " with a {pitch} {tone}",
    " on a {background} background",
    ", {loudness} {pitch} {tone}",
    " with a {loudness} {pitch} {tone} on a {background} background",
    ", {background} background",
    " on a {background} background, {pitch} {tone}",
    " with a {loudness} {pitch} {tone}",
    " on a {background} background with a {pitch} {tone}",
    ", {loudness} {tone}",
    " on a {background} background, {loudness} {pitch} {tone}",
    " and a {pitch} {tone}.",
    ", {pitch} {tone}, {background} background",
    " over a {background} background with a {loudness} {pitch} {tone}.",
    ".",
)
_TONES = ("tone", "sound")

_WAYS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "right": ("right", "to the right"),
        "down right": ("down and right", "down and to the right", "down right"),
        "down": ("down", "downwards"),
        "down left": ("down and left", "down and to the left", "down left"),
        "left": ("left", "to the left"),
        "up left": ("up and left", "up and to the left", "up left"),
        "up": ("up", "upwards"),
        "up right": ("up and right", "up and to the right", "up right"),
    }
)

_SYNONYMS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "black": ("black", "plain black"),
        "grey": ("grey", "gray", "plain grey"),
        "striped": ("striped",),
        "checked": ("checked",),
        "cloudy": ("cloudy",),
        "low": ("low",),
        "middle": ("middle", "medium"),
        "high": ("high",),
        "soft": ("soft", "quiet"),
        "loud": ("loud",),
    }
)


def caption(scene: Scene, draw: random.Random) -> str:
    """One wording of the scene, drawn from the whole grammar; it may leave out background, pitch and loudness."""
    pattern = f"{draw.choice(_SUBJECTS)} {draw.choice(_VERBS)} {{way}}{draw.choice(_TAILS)}"
    return _fill(pattern, {name: draw.choice(words) for name, words in _choices(scene).items()})


def captions(scene: Scene) -> tuple[str, ...]:
    """A wording of the scene for each combination of sound and background that a caption may name.

    The first is the plainest, "a red circle moves right"; the second adds the pitch.
    """
    wordings = []
    for index, tail in enumerate(_TAILS):
        # The first two keep the plainest words.
        turn = max(0, index - 1)
        pattern = f"{_SUBJECTS[turn % len(_SUBJECTS)]} {_VERBS[turn % len(_VERBS)]} {{way}}{tail}"
        wordings.append(_fill(pattern, {name: words[turn % len(words)] for name, words in _choices(scene).items()}))
    return tuple(wordings)


def _choices(scene: Scene) -> dict[str, tuple[str, ...]]:
    return {
        "article": ("an" if scene.colour[0] in "aeiou" else "a",),
        "colour": (scene.colour,),
        "shape": (scene.shape,),
        "way": _WAYS[scene.motion],
        "background": _SYNONYMS[scene.background],
        "pitch": _SYNONYMS[scene.pitch],
        "loudness": _SYNONYMS[scene.loudness],
        "tone": _TONES,
    }


def _fill(pattern: str, words: Mapping[str, str]) -> str:
    return pattern.format_map(words)


@cache
def vocabulary() -> tuple[str, ...]:
    """All words and marks of all captions, each once, always in the same order."""
    phrases = ("a", "an", *COLOURS, *SHAPES, *_VERBS, *_literals(), *_TONES)
    phrases = (*phrases, *(way for ways in _WAYS.values() for way in ways))
    phrases = (*phrases, *(word for words in _SYNONYMS.values() for word in words))
    return tuple(dict.fromkeys(part for phrase in phrases for part in split_words(phrase)))


def _literals() -> Iterator[str]:
    """The text between the gaps of subjects and tails."""
    for pattern in (*_SUBJECTS, *_TAILS):
        yield from (text for text, *_ in Formatter().parse(pattern))


def split_words(text: str) -> list[str]:
    """Words and marks of a text, in lower case."""
    return re.findall(r"\w+|[^\w\s]", text.lower())


_MEANINGS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        **{colour: ("colour", colour) for colour in COLOURS},
        **{shape: ("shape", shape) for shape in SHAPES},
        **{
            word: (attribute, value)
            for attribute, values in (("background", BACKGROUNDS), ("pitch", PITCHES_HZ), ("loudness", LOUDNESSES))
            for value in values
            for word in (phrase.split()[-1] for phrase in _SYNONYMS[value])
        },
        **{word: ("vertical", word.removesuffix("wards")) for word in ("up", "upwards", "down", "downwards")},
        **{word: ("horizontal", word) for word in ("left", "right")},
    }
)


def parse(caption: str) -> dict[str, str]:
    """What a caption fixes: some of shape, colour, motion, background, pitch and loudness; other words are skipped.

    Raises:
        ValueError: it names two values of one of them.
    """
    fixed: dict[str, str] = {}
    for word in split_words(caption):
        if word not in _MEANINGS:
            continue
        attribute, value = _MEANINGS[word]
        if fixed.setdefault(attribute, value) != value:
            raise ValueError(f"{caption!r} names both {fixed[attribute]!r} and {value!r}; keep one")
    motion = [fixed.pop(part) for part in ("vertical", "horizontal") if part in fixed]
    return {**fixed, "motion": " ".join(motion)} if motion else fixed
