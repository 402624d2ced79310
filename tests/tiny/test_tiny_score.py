"""The scoring code: right on rendered scenes however blurred or compressed, and never right on anything else."""

import dataclasses
import io

import av
import numpy as np
import pytest

from vgen.tiny.grammar import (
    BACKGROUNDS,
    COLOURS,
    LOUDNESSES,
    MOTIONS,
    PITCHES_HZ,
    SHAPES,
    Scene,
    captions,
    parse,
    sample_scene,
)
from vgen.tiny.render import render, render_sound, render_video
from vgen.tiny.score import Score, measure_picture, measure_sound, score

RATE = 16000
PICTURE = ("shape", "colour", "motion")
SOUND = ("pitch", "loudness")


def scene(**changes) -> Scene:
    return dataclasses.replace(
        Scene("circle", "red", "right", "grey", "high", "loud", 0.22, 0.4, (0.5, 0.5), 0.5, 0.3, 0.1), **changes
    )


def draw(one: Scene, num_frames: int = 17, side: int = 96) -> np.ndarray:
    """Frames [F, H, W, 3] in 0..1."""
    return (render_video([one], num_frames, side, side)[0].permute(1, 2, 3, 0).numpy() + 1) / 2


def to_bytes(frames: np.ndarray) -> np.ndarray:
    return (np.clip(frames, 0, 1) * 255).round().astype(np.uint8)


def play(one: Scene, sample_rate: int = RATE) -> np.ndarray:
    return render_sound([one], round(17 / 24 * sample_rate), sample_rate)[0].numpy()


def expected(one: Scene) -> dict[str, str]:
    return {name: getattr(one, name) for name in (*PICTURE, *SOUND, "background")}


def judged(one: Scene, frames: np.ndarray, waveform: np.ndarray | None = None) -> Score:
    return score(to_bytes(frames), waveform, RATE, expected(one))


def none_right(result: Score) -> bool:
    return not any(getattr(result, name) for name in PICTURE)


def blurred(frames: np.ndarray, sigma: float = 1.0) -> np.ndarray:
    reach = np.arange(-4, 5)
    kernel = np.exp(-(reach**2) / (2 * sigma**2))
    for axis in (1, 2):
        padding = [(0, 0)] * 4
        padding[axis] = (4, 4)
        padded = np.pad(frames, padding, mode="edge")
        length = frames.shape[axis]
        parts = [weight * padded.take(range(i, i + length), axis=axis) for i, weight in enumerate(kernel)]
        frames = sum(parts) / kernel.sum()
    return frames


def noisy(frames: np.ndarray, sigma: float = 0.05) -> np.ndarray:
    return frames + np.random.default_rng(0).normal(0, sigma, frames.shape)


def compressed(frames: np.ndarray, crf: int = 23) -> np.ndarray:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as out:
        stream = out.add_stream("libx264", rate=24, options={"crf": str(crf)})
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        for frame in to_bytes(frames):
            out.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        out.mux(stream.encode())
    file.seek(0)
    with av.open(file) as back:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in back.decode(video=0)]) / 255


CHANGES = {
    "none": lambda frames: frames,
    "blur": blurred,
    "noise": noisy,
    "h264": compressed,
    "brighter": lambda frames: frames * 1.08,
    "darker": lambda frames: frames * 0.92,
}


@pytest.mark.parametrize(("num_frames", "side", "count"), [(17, 64, 60), (33, 64, 20), (17, 128, 20)])
def test_rendered_scenes_score_fully(num_frames, side, count) -> None:
    scenes = [sample_scene(11, index, ("train", "heldout")[index % 2]) for index in range(count)]
    clips = render(scenes, num_frames, side, side, 24, RATE)
    for one, video, waveform in zip(scenes, clips.video, clips.waveform, strict=True):
        frames = (video.permute(1, 2, 3, 0).numpy() + 1) / 2
        result = judged(one, frames, waveform.numpy())
        assert result.passed, (one, result)
        assert None not in (result.shape, result.colour, result.motion, result.pitch, result.loudness)


@pytest.mark.parametrize("change", CHANGES)
def test_scoring_hardly_depends_on_the_quality(change) -> None:
    scenes = [sample_scene(12, index, "train") for index in range(25)]
    results = [judged(one, CHANGES[change](draw(one, side=64))) for one in scenes]
    assert all(result.passed for result in results), [
        pair for pair in zip(scenes, results, strict=True) if not pair[1].passed
    ]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("background", BACKGROUNDS)
def test_every_shape_and_colour_before_every_background(shape, colour, background) -> None:
    picture = measure_picture(
        to_bytes(draw(scene(shape=shape, colour=colour, background=background, size=0.18), 9, 64))
    )
    assert (picture.shape, picture.colour, picture.motion) == (shape, colour, "right")


def test_a_slightly_coloured_white_is_white() -> None:
    frames = draw(scene(colour="white", background="black"))
    assert measure_picture(to_bytes(frames * [1, 0.85, 0.8])).colour == "white"
    assert measure_picture(to_bytes(frames * [1, 0.5, 0.5])).colour == "red"


@pytest.mark.parametrize("motion", MOTIONS)
def test_motions_and_what_they_measure(motion) -> None:
    picture = measure_picture(to_bytes(draw(scene(motion=motion))))
    assert picture.motion == motion
    assert picture.travel == pytest.approx([0.4 * part for part in MOTIONS[motion]], abs=0.01)
    assert picture.wander < 0.002
    assert picture.area == pytest.approx(np.pi / 4 * 0.22**2, rel=0.05)


@pytest.mark.parametrize(
    "wrong",
    [
        {"colour": "orange"},
        {"colour": "magenta"},
        {"colour": "white"},
        {"shape": "square"},
        {"shape": "triangle"},
        {"motion": "left"},
        {"motion": "up right"},
        {"motion": "down right"},
    ],
)
def test_only_what_is_wrong_fails_in_the_picture(wrong) -> None:
    result = judged(scene(), draw(scene(**wrong)))
    assert {name: getattr(result, name) for name in PICTURE} == {name: name not in wrong for name in PICTURE}
    assert not result.passed


@pytest.mark.parametrize("wrong", [{"pitch": "low"}, {"pitch": "middle"}, {"loudness": "soft"}])
def test_only_what_is_wrong_fails_in_the_sound(wrong) -> None:
    result = judged(scene(), draw(scene()), play(scene(**wrong)))
    assert {name: getattr(result, name) for name in SOUND} == {name: name not in wrong for name in SOUND}
    assert not result.passed


def test_a_still_clip_shows_nothing() -> None:
    frames = draw(scene())
    assert none_right(judged(scene(), np.repeat(frames[:1], 17, axis=0)))
    assert none_right(judged(scene(), draw(scene(travel=0.1))))


def test_frames_out_of_order_show_nothing() -> None:
    order = np.random.default_rng(1).permutation(17)
    assert none_right(judged(scene(), draw(scene())[order]))


def test_a_jump_back_is_no_motion_either_way() -> None:
    picture = measure_picture(to_bytes(np.roll(draw(scene(travel=0.5)), 8, axis=0)))
    assert picture.travel[0] < -0.2  # a regression alone would say left
    assert picture.motion is None


def test_going_back_and_forth_is_no_motion() -> None:
    frames = draw(scene(travel=0.5))
    assert none_right(judged(scene(), np.concatenate([frames, frames[::-1]])))


@pytest.mark.parametrize("kind", ["uniform", "normal", "grey", "black", "white"])
def test_noise_and_empty_frames_show_nothing(kind) -> None:
    random = np.random.default_rng(2)
    size = (17, 64, 64, 3)
    frames = {
        "uniform": random.random(size),
        "normal": random.normal(0.5, 0.3, size),
        "grey": np.full(size, 0.5),
        "black": np.zeros(size),
        "white": np.ones(size),
    }[kind]
    for one in (scene(shape=shape, colour=colour) for shape in SHAPES for colour in COLOURS):
        assert none_right(judged(one, frames))


@pytest.mark.parametrize("background", BACKGROUNDS)
def test_a_background_alone_shows_nothing(background) -> None:
    frames = draw(scene(background=background, place=(0.5, 0.0)))
    empty = np.repeat(np.repeat(frames[:1, -30:], 2, axis=1), 17, axis=0)
    assert measure_picture(to_bytes(empty)).shape is None


def test_two_shapes_or_a_long_one_are_none() -> None:
    one = draw(scene(place=(0.5, 0.0)))
    other = draw(scene(place=(0.5, 1.0)))
    assert none_right(judged(scene(), np.maximum(one, other)))
    larger = draw(scene(place=(0.5, 1.0), size=0.28))
    assert none_right(judged(scene(), np.maximum(one, larger)))
    assert none_right(judged(scene(), np.repeat(one[:, :40], 3, axis=1)))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_that_is_much_longer_than_wide_is_none(shape) -> None:
    one = scene(shape=shape, background="black")
    frames = draw(one)
    middle = frames[:, 24:72]
    assert judged(one, frames).passed
    for longer in (np.repeat(frames, 2, axis=2), np.repeat(middle, 2, axis=1)):
        assert none_right(judged(one, longer))


def test_a_shape_that_is_missing_half_of_the_time_is_none() -> None:
    frames = draw(scene(background="black"))
    frames[1::2] = frames[0, 0, 0]
    assert none_right(judged(scene(background="black"), frames))


def test_small_specks_elsewhere_do_no_harm() -> None:
    frames = draw(scene())
    random = np.random.default_rng(3)
    for frame in frames:
        frame[random.integers(0, 96, 12), random.integers(0, 96, 12)] = 1
    assert judged(scene(), frames).passed


@pytest.mark.parametrize("sample_rate", [16000, 24000])
@pytest.mark.parametrize("pitch", PITCHES_HZ)
@pytest.mark.parametrize("loudness", LOUDNESSES)
def test_tones_are_measured_finely(sample_rate, pitch, loudness) -> None:
    sound = measure_sound(play(scene(pitch=pitch, loudness=loudness), sample_rate), sample_rate)
    assert (sound.pitch, sound.loudness) == (pitch, loudness)
    assert sound.frequency_hz == pytest.approx(PITCHES_HZ[pitch], rel=1e-4)
    assert sound.peak == pytest.approx(LOUDNESSES[loudness], rel=0.02)


@pytest.mark.parametrize("hertz", [523.25, 1000.3, 1765.9])
def test_the_peak_frequency_lies_between_bins_too(hertz) -> None:
    tone = 0.3 * np.sin(2 * np.pi * hertz * np.arange(8000) / RATE)
    assert measure_sound(tone[None].astype(np.float32), RATE).frequency_hz == pytest.approx(hertz, rel=2e-4)


@pytest.mark.parametrize("ratio", [0.9, 1.1])
def test_a_tone_off_pitch_is_none(ratio) -> None:
    time = np.arange(11333) / RATE
    tone = 0.4 * np.sin(2 * np.pi * PITCHES_HZ["high"] * ratio * time)[None].astype(np.float32)
    assert measure_sound(tone, RATE).pitch is None
    nearly = 0.4 * np.sin(2 * np.pi * PITCHES_HZ["high"] * 1.03 * time)[None].astype(np.float32)
    assert measure_sound(nearly, RATE).pitch == "high"


def test_silence_and_noise_are_no_tone() -> None:
    random = np.random.default_rng(4)
    silence = np.zeros((2, 11333), np.float32)
    for one in (scene(pitch=pitch, loudness=loudness) for pitch in PITCHES_HZ for loudness in LOUDNESSES):
        quiet = judged(one, draw(one, 3, 32), silence)
        assert (quiet.pitch, quiet.loudness) == (False, False)
        assert not judged(one, draw(one, 3, 32), silence + 0.5).pitch
        assert not judged(one, draw(one, 3, 32), random.normal(0, 0.3, silence.shape).astype(np.float32)).pitch


def test_an_offset_is_not_loud_and_a_whisper_is_silence() -> None:
    tone = play(scene(loudness="soft"))
    shifted = measure_sound(tone + np.float32(0.5), RATE)
    assert (shifted.pitch, shifted.loudness) == ("high", "soft")
    assert shifted.peak == pytest.approx(LOUDNESSES["soft"], rel=0.02)
    whisper = measure_sound(tone / 10, RATE)
    assert (whisper.pitch, whisper.loudness) == (None, None)


def test_a_tone_far_below_the_noise_is_none() -> None:
    noise = np.random.default_rng(6).normal(0, 0.4, (2, 11333))
    sound = measure_sound((play(scene(loudness="soft")) + noise).astype(np.float32), RATE)
    assert sound.frequency_hz == pytest.approx(PITCHES_HZ["high"], rel=0.01)
    assert sound.pitch is None


def test_a_tone_in_noise_on_sides_in_opposition_is_heard() -> None:
    tone = play(scene()) * np.array([[1], [-1]], np.float32) + 0.1
    noise = np.random.default_rng(5).normal(0, 0.1, tone.shape)
    assert judged(scene(), draw(scene()), (tone + noise).astype(np.float32)).passed


def test_only_what_was_asked_is_judged() -> None:
    asked = parse(captions(scene())[0])
    result = score(to_bytes(draw(scene())), play(scene(pitch="low")), RATE, asked)
    assert (result.pitch, result.loudness) == (None, None)
    assert result.passed
    silent = judged(scene(), draw(scene()))
    assert (silent.pitch, silent.sound) == (None, None)
    assert silent.passed
