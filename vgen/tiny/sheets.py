"""Contact sheets: first, middle and last frame of many clips, with what was asked below.

Shapes: F frames, H, W pixels.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

COLUMNS = 4
MOST_CLIPS = 16

_HEIGHT = 128
_GAP = 4
_FONT_SIZE = 13
_LINES = 3
_LINE_HEIGHT = 16
_INK, _FAILED = (20, 20, 20), (200, 0, 0)


@dataclass(frozen=True)
class Entry:
    """``frames`` uint8 [F, H, W, 3]; ``failed`` names what the clip does not show, though it was asked."""

    frames: NDArray[np.uint8]
    caption: str
    failed: tuple[str, ...] = ()


def pick_frames(frames: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """First, middle and last of [F, H, W, 3]."""
    return frames[[0, len(frames) // 2, -1]]


def contact_sheet(entries: Sequence[Entry]) -> Image.Image:
    """One picture of the first 16 clips, all of one size; failed ones have a red frame and say what is missing."""
    cells = [_cell(entry) for entry in entries[:MOST_CLIPS]]
    width, height = cells[0].size
    rows = -(-len(cells) // COLUMNS)
    sheet = Image.new("RGB", (min(len(cells), COLUMNS) * width, rows * height), "white")
    for place, cell in enumerate(cells):
        sheet.paste(cell, (place % COLUMNS * width, place // COLUMNS * height))
    return sheet


def _cell(entry: Entry) -> Image.Image:
    pictures = [scaled(frame, _HEIGHT) for frame in entry.frames]
    step = pictures[0].width + _GAP
    size = (len(pictures) * step + 3 * _GAP, _HEIGHT + _LINES * _LINE_HEIGHT + 5 * _GAP)
    cell = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(cell)
    colour = _FAILED if entry.failed else _INK
    if entry.failed:
        draw.rectangle((_GAP, _GAP, size[0] - 2 * _GAP, _HEIGHT + 3 * _GAP - 1), fill=_FAILED)
    for place, picture in enumerate(pictures):
        cell.paste(picture, (2 * _GAP + place * step, 2 * _GAP))
    note = f"{entry.caption} (not the {', '.join(entry.failed)})" if entry.failed else entry.caption
    write_lines(draw, (2 * _GAP, _HEIGHT + 3 * _GAP), note, size[0] - 4 * _GAP, colour=colour)
    return cell


def scaled(frame: NDArray[np.uint8], height: int) -> Image.Image:
    """A frame [H, W, 3] at another height, its aspect kept."""
    picture = Image.fromarray(frame)
    if picture.height == height:
        return picture
    return picture.resize((round(picture.width * height / picture.height), height), Image.Resampling.LANCZOS)


def write_lines(
    draw: Any, place: tuple[int, int], text: str, width: int, most: int = _LINES, colour: tuple[int, int, int] = _INK
) -> None:
    """``text`` in at most ``most`` lines of about ``width`` pixels, from ``place``, the left upper corner, on."""
    lines = textwrap.wrap(text, max(8, width // ((_FONT_SIZE + 1) // 2)), max_lines=most, placeholder=" …")
    font = ImageFont.load_default(_FONT_SIZE)
    for number, line in enumerate(lines):
        draw.text((place[0], place[1] + number * _LINE_HEIGHT), line, fill=colour, font=font)
