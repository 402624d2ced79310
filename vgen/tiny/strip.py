"""The README's picture of what the tiny model makes: ``python -m vgen.tiny.strip OUT.png [RUN_FOLDER]``.

A row for each video of the run: five frames across its time, and the spectrum of its sound. Without a folder it makes
the run, of prompts that differ in everything a prompt can say; the last goes on from an image.
"""

import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from vgen import media, media_in
from vgen.tiny.grammar import PITCHES_HZ, captions, sample_scene
from vgen.tiny.render import render_video
from vgen.tiny.score import measure_sound
from vgen.tiny.sheets import scaled, write_lines

PROMPTS = (
    "a red circle moves right, high tone",
    "a cyan triangle moves down on a striped background, low tone",
    "the yellow square goes up and to the left with a loud middle tone",
    "a magenta circle slides down and right on a checked background, high tone",
)
FRAMES = 5

_HEIGHT, _GAP, _TEXT, _SPECTRUM = 96, 6, 170, 120
_HIGHEST_HZ = 2500
_COLOURS = 256
"""Of the palette: so it stays below 200 kB."""


def make_run(folder: Path) -> None:
    """Runs the product on ``PROMPTS`` and an image; ``folder`` becomes the run's."""
    # A combination that training never shows.
    scene = sample_scene(0, 7, "heldout")
    first = media.to_uint8(render_video([scene], 17, 128, 128)[:, :, :1]).numpy()[0]
    with tempfile.TemporaryDirectory() as temporary:
        image, prompts = Path(temporary, "first.png"), Path(temporary, "prompts.jsonl")
        Image.fromarray(first).save(image)
        wording = random.Random(0).choice([text for text in captions(scene) if scene.pitch in text])
        rows: list[dict[str, Any]] = [{"prompt": prompt} for prompt in PROMPTS]
        rows.append({"prompt": wording, "image": str(image)})
        prompts.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
        overrides = (f"hydra.run.dir={folder}", f"request.prompts_file={prompts}", "logger=none", "output.save=[mp4]")
        if code := subprocess.run([sys.executable, "-m", "vgen.run", *overrides], check=False).returncode:
            sys.exit(code)  # the run has said why


def strip_of(folder: Path) -> Image.Image:
    """The picture of the mp4s that the run in ``folder`` made."""
    outputs = json.loads((folder / "record.json").read_text(encoding="utf-8"))["outputs"]
    requests = json.loads((folder / "job.json").read_text(encoding="utf-8"))["requests"]
    rows = [_row(folder, output, request) for output, request in zip(outputs, requests, strict=True)]
    strip = Image.new("RGB", (max(row.width for row in rows), sum(row.height for row in rows) + _GAP), "white")
    top = _GAP
    for row in rows:
        strip.paste(row, (0, top))
        top += row.height
    return strip.quantize(_COLOURS, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)


def _row(folder: Path, output: Mapping[str, Any], request: Mapping[str, Any]) -> Image.Image:
    path, count = folder / output["path"], output["num_frames"]
    video = media.to_uint8(media_in.load_video(path, count, output["height"], output["width"], output["fps"])).numpy()
    pictures = [scaled(video[place], _HEIGHT) for place in np.linspace(0, count - 1, FRAMES).round().astype(int)]
    step = pictures[0].width + _GAP
    row = Image.new("RGB", (_TEXT + FRAMES * step + _SPECTRUM + 2 * _GAP, _HEIGHT + _GAP), "white")
    draw = ImageDraw.Draw(row)
    note = "; the first frame is given" if request["images"] else ""
    write_lines(draw, (_GAP, _GAP), f"{output['prompt'].rstrip('.')}{note}", _TEXT - 2 * _GAP, most=5)
    for place, picture in enumerate(pictures):
        row.paste(picture, (_TEXT + place * step, 0))
    if (sound := media_in.load_audio(path, count / output["fps"])) is not None:
        waveform, rate = sound
        _draw_sound(draw, waveform.numpy(), rate, _TEXT + FRAMES * step + _GAP)
    return row


def _draw_sound(draw: Any, waveform: NDArray[np.float32], sample_rate: int, left: int) -> None:
    """Its spectrum up to 2500 Hz, grey marks at the three pitches, and the peak in words."""
    bottom, scale = _HEIGHT - 4 * _GAP, _SPECTRUM / _HIGHEST_HZ
    for frequency in PITCHES_HZ.values():
        draw.line((left + frequency * scale, 0, left + frequency * scale, bottom), fill=(215, 215, 215))
    # The loudest of what falls on a column, as an amplitude.
    spectrum = np.abs(np.fft.rfft(waveform.mean(axis=0) * np.hanning(waveform.shape[1])))
    columns = (np.fft.rfftfreq(waveform.shape[1], 1 / sample_rate) * scale).astype(int)
    heights = [spectrum[columns == column].max(initial=0) for column in range(_SPECTRUM)]
    for column, height in enumerate(np.array(heights) / max(1e-9, *heights)):
        draw.line((left + column, bottom - height * (bottom - _GAP), left + column, bottom), fill=(40, 90, 200))
    peak = measure_sound(waveform, sample_rate).frequency_hz
    write_lines(draw, (left, bottom + _GAP // 2), "silence" if peak is None else f"peak {peak:.0f} Hz", _SPECTRUM)


def main() -> None:
    if not 2 <= len(sys.argv) <= 3:
        sys.exit("usage: python -m vgen.tiny.strip OUT.png [RUN_FOLDER]")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(sys.argv[2]) if len(sys.argv) == 3 else Path(temporary, "run")
        if len(sys.argv) == 2:
            make_run(folder)
        strip_of(folder).save(sys.argv[1], "PNG", optimize=True)


if __name__ == "__main__":
    main()
