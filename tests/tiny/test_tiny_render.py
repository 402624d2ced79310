"""The renderer: shapes of the right size, place, colour and way; tones of the right pitch and strength."""

import dataclasses
import math

import pytest
import torch

from vgen.tiny.grammar import (
    BACKGROUNDS,
    COLOURS,
    LOUDNESSES,
    MOTIONS,
    PITCHES_HZ,
    SHAPES,
    SIZES,
    TRAVELS,
    Scene,
    sample_scene,
)
from vgen.tiny.render import FADE_S, render, render_sound, render_video

SIDE = 96


def scene(**changes) -> Scene:
    return dataclasses.replace(
        Scene("circle", "red", "right", "black", "high", "loud", 0.25, 0.5, (0.5, 0.5), 0.5, 0.3, 0.1), **changes
    )


def cover(video: torch.Tensor) -> torch.Tensor:
    """Red's share of each pixel [F, H, W] of one red scene on a black background."""
    low, high = video[0].min(), video[0].max()
    return (video[0] - low) / (high - low)


def centres(cover_FHW: torch.Tensor) -> torch.Tensor:
    """Centroids [F, 2], x and y, in pixels from the frame's corner."""
    weights = cover_FHW / cover_FHW.sum((1, 2), keepdim=True)
    x = torch.arange(cover_FHW.shape[2]) + 0.5
    y = torch.arange(cover_FHW.shape[1]) + 0.5
    return torch.stack([(weights * x).sum((1, 2)), (weights * y[:, None]).sum((1, 2))], dim=1)


def test_shapes_types_and_range() -> None:
    scenes = [sample_scene(0, index, "train") for index in range(6)]
    clips = render(scenes, num_frames=17, height=64, width=96, fps=24, sample_rate=24000)
    assert clips.video.shape == (6, 3, 17, 64, 96)
    assert clips.waveform.shape == (6, 2, 17000)
    assert clips.video.dtype == clips.waveform.dtype == torch.float32
    assert clips.video.min() >= -1
    assert clips.video.max() <= 1


@pytest.mark.gpu
def test_another_device_draws_and_plays_the_same() -> None:
    scenes = [sample_scene(0, index, "train") for index in range(24)]
    theirs = render(scenes, 5, 64, 96, 24, device="cuda")
    assert theirs.video.is_cuda
    assert theirs.waveform.is_cuda
    for ours, other in zip(render(scenes, 5, 64, 96, 24), theirs, strict=True):
        torch.testing.assert_close(other.cpu(), ours, atol=1e-4, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", SIZES)
def test_all_shapes_have_the_area_of_the_circle(shape, size) -> None:
    covered = cover(render_video([scene(shape=shape, size=size)], 3, SIDE, SIDE)[0]).sum((1, 2))
    assert covered == pytest.approx(math.pi / 4 * (size * SIDE) ** 2, rel=0.03)


@pytest.mark.parametrize("shape", SHAPES)
def test_outlines(shape) -> None:
    """Width of the covered rows at a quarter and three quarters of the height, as a part of the whole width."""
    covered = cover(render_video([scene(shape=shape, size=0.28)], 2, 256, 256)[0])[0] > 0.5
    rows = covered.sum(1)[covered.any(1)].float()
    parts = [float(rows[round(len(rows) * part)] / rows.max()) for part in (0.25, 0.75)]
    wanted = {"circle": [0.87, 0.87], "square": [1, 1], "triangle": [0.25, 0.75]}[shape]
    height = len(rows) / float(rows.max())
    assert parts == pytest.approx(wanted, abs=0.04)
    assert height == pytest.approx(math.sqrt(3) / 2 if shape == "triangle" else 1, abs=0.03)


@pytest.mark.parametrize("motion", MOTIONS)
@pytest.mark.parametrize(("height", "width"), [(64, 64), (64, 128), (128, 96)])
def test_the_centre_moves_evenly_as_far_as_the_scene_says(motion, height, width) -> None:
    video = render_video([scene(motion=motion, travel=0.42)], 17, height, width)[0]
    steps = centres(cover(video)).diff(dim=0)
    way = torch.tensor(MOTIONS[motion]) * 0.42 * min(height, width)
    torch.testing.assert_close(steps, (way / 16).expand(16, 2), atol=0.02, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("motion", MOTIONS)
@pytest.mark.parametrize("place", [(0.0, 0.0), (1.0, 1.0), (0.0, 1.0)])
def test_a_shape_at_its_largest_stays_inside_and_uses_the_room(shape, motion, place) -> None:
    largest = scene(shape=shape, motion=motion, place=place, size=SIZES[1], travel=TRAVELS[1])
    covered = cover(render_video([largest], 9, SIDE, SIDE)[0])
    areas = covered.sum((1, 2))
    assert areas == pytest.approx(float(areas.mean()), rel=0.01)
    touched = covered.amax(0) > 0.05
    edge = touched[:, :3].any() if place[0] == 0 else touched[:, -3:].any()
    assert edge
    assert touched[:3].any() if place[1] == 0 else touched[-3:].any()


@pytest.mark.parametrize("colour", COLOURS)
def test_colours(colour) -> None:
    one = scene(colour=colour, place=(0.0, 0.5), size=0.28, travel=0.4)
    video = render_video([one], 3, SIDE, SIDE)[0]
    middle = video[:, 0, 48, int(0.14 * SIDE)]
    assert ((middle + 1) / 2).tolist() == pytest.approx(COLOURS[colour], abs=1e-5)


def test_the_edge_is_smooth() -> None:
    covered = cover(render_video([scene()], 2, SIDE, SIDE)[0])[0]
    partly = ((covered > 0.05) & (covered < 0.95)).sum()
    assert 0.5 < partly / (math.pi * 0.25 * SIDE) < 1.6


@pytest.mark.parametrize("background", BACKGROUNDS)
def test_backgrounds_are_dark_pale_and_still(background) -> None:
    scenes = [
        scene(background=background, shade=shade, texture=texture, colour="white")
        for shade in (0.0, 1.0)
        for texture in torch.linspace(0, 1, 24).tolist()
    ]
    video = (render_video(scenes, 2, 64, 64) + 1) / 2
    empty = video[:, :, :, :8]  # above a white shape in the middle
    assert empty.max() <= 0.46
    assert empty.min() >= 0
    assert ((empty.amax(1) - empty.amin(1)) / empty.amax(1)).max() < 0.3
    assert torch.equal(empty[:, :, 0], empty[:, :, 1])
    contrast = (empty.amax((3, 4)) - empty.amin((3, 4))).amax(1)
    textured = background in ("striped", "checked", "cloudy")
    assert (contrast > 0.1).all() if textured else (contrast < 1e-6).all()


def test_the_texture_changes_the_pattern() -> None:
    for background in ("striped", "checked", "cloudy"):
        one, other = render_video([scene(background=background, texture=t) for t in (0.2, 0.7)], 2, 64, 64)
        assert (one - other).abs().max() > 0.1


def test_a_scene_looks_the_same_in_every_batch() -> None:
    scenes = [sample_scene(2, index, "train") for index in range(5)]
    together = render(scenes, 5, 64, 64, 24)
    for index, one in enumerate(scenes):
        alone = render([one], 5, 64, 64, 24)
        assert torch.equal(alone.video[0], together.video[index])
        assert torch.equal(alone.waveform[0], together.waveform[index])


@pytest.mark.parametrize("pitch", PITCHES_HZ)
@pytest.mark.parametrize("sample_rate", [16000, 24000])
def test_the_tone_has_its_pitch(pitch, sample_rate) -> None:
    waveform = render_sound([scene(pitch=pitch)], sample_rate, sample_rate)[0, 0]  # one second: 1 Hz per bin
    spectrum = torch.fft.rfft(waveform.double()).abs()
    assert int(spectrum.argmax()) == PITCHES_HZ[pitch]
    overtone = spectrum[int(2 * PITCHES_HZ[pitch])] / spectrum.max()
    assert float(overtone) == pytest.approx(0.25, abs=0.01)


@pytest.mark.parametrize("loudness", LOUDNESSES)
def test_the_tone_has_its_strength_and_fades(loudness) -> None:
    waveform = render_sound([scene(loudness=loudness, phase=0.25)], 12000, 16000)[0]
    assert torch.equal(waveform[0], waveform[1])
    assert 0.7 * LOUDNESSES[loudness] < float(waveform.abs().max()) <= LOUDNESSES[loudness] < 0.8
    assert waveform[:, 0].abs().max() == waveform[:, -1].abs().max() == 0
    half = round(FADE_S / 2 * 16000)
    loud = waveform[0].abs()
    assert float(loud[:half].max()) < 0.55 * LOUDNESSES[loudness]
    assert float(loud[-half:].max()) < 0.55 * LOUDNESSES[loudness]


def test_the_phase_moves_the_tone() -> None:
    tone = render_sound([scene(phase=0.4)], 8000, 16000)[0, 0]
    turns = PITCHES_HZ["high"] * torch.arange(8000).double() / 16000 + 0.4
    wanted = sum(part * torch.sin(2 * math.pi * k * turns) for k, part in ((1, 1.0), (2, 0.25), (3, 0.1)))
    torch.testing.assert_close(tone[1000:7000], (0.6 / 1.35 * wanted).float()[1000:7000], atol=1e-5, rtol=0)
