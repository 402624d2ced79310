"""Images, clips and sound in: known pixels and tones, and diffusers' condition pipeline as oracle."""

import logging
import struct
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import av
import numpy as np
import pytest
import torch
from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2ConditionPipeline, LTX2VideoCondition
from PIL import Image, ImageCms

from vgen import media_in
from vgen.media import CodecSettings, write_mp4
from vgen.media_in import load_audio, load_image, load_video
from vgen.typed import ConfigurationError

RED, GREEN, BLUE, GREY = (200, 30, 40), (20, 190, 60), (40, 50, 210), (128, 120, 110)


def smooth(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Smooth random pixels, uint8 [h, w, 3]."""
    noise = torch.rand(1, 3, 5, 7, generator=torch.Generator().manual_seed(seed))
    image = torch.nn.functional.interpolate(noise, (height, width), mode="bilinear")[0].permute(1, 2, 0)
    return (image * 255).to(torch.uint8).numpy()


def save(path: Path, pixels: np.ndarray, **options: object) -> Path:
    Image.fromarray(pixels).save(path, **options)
    return path


def scaled(pixels: np.ndarray) -> torch.Tensor:
    """What pixels [h, w, 3] are as a clip of one frame."""
    return (torch.from_numpy(pixels.copy()).permute(2, 0, 1).float() / 127.5 - 1)[None, :, None]


# ---------------------------------------------------------------- images


@pytest.mark.parametrize("suffix", ["png", "webp", "bmp"])
def test_known_colours_come_back(tmp_path: Path, suffix: str) -> None:
    pixels = np.array([[RED, GREEN, BLUE], [(0, 0, 0), (255, 255, 255), GREY]], dtype=np.uint8)
    options = {"lossless": True} if suffix == "webp" else {}
    image = load_image(save(tmp_path / f"a.{suffix}", pixels, **options), 2, 3, crf=0)
    assert image.shape == (1, 3, 1, 2, 3)
    assert image.dtype == torch.float32
    assert torch.equal(image, scaled(pixels))
    assert (image.min(), image.max()) == (-1, 1)


UPRIGHT = np.array([[RED, GREEN, BLUE], [GREY, (0, 0, 0), (9, 8, 7)]], dtype=np.uint8)


@pytest.mark.parametrize(
    ("orientation", "stored"),
    [
        # EXIF 2.3: where the stored image's first row and first column are seen.
        (1, UPRIGHT),  # top, left
        (2, UPRIGHT[:, ::-1]),  # top, right
        (3, UPRIGHT[::-1, ::-1]),  # bottom, right
        (4, UPRIGHT[::-1]),  # bottom, left
        (5, UPRIGHT.transpose(1, 0, 2)),  # left, top
        (6, UPRIGHT[::-1].transpose(1, 0, 2)[::-1, ::-1]),  # right, top
        (7, UPRIGHT[::-1, ::-1].transpose(1, 0, 2)),  # right, bottom
        (8, UPRIGHT[:, ::-1].transpose(1, 0, 2)[::-1, ::-1]),  # left, bottom
    ],
)
def test_every_exif_orientation_is_turned_upright(tmp_path: Path, orientation: int, stored: np.ndarray) -> None:
    if orientation == 6:  # its first row is the right column, read from the top
        assert (stored[0] == UPRIGHT[:, -1]).all()
    if orientation == 8:  # its first row is the left column, read from the bottom
        assert (stored[0] == UPRIGHT[::-1, 0]).all()
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = save(tmp_path / "a.png", np.ascontiguousarray(stored), exif=exif)
    assert torch.equal(load_image(path, 2, 3, crf=0), scaled(UPRIGHT))


def test_transparency_grey_and_palettes_become_rgb(tmp_path: Path) -> None:
    opaque = smooth(4, 6)
    alpha = np.full((4, 6, 1), 40, dtype=np.uint8)
    rgba = load_image(save(tmp_path / "rgba.png", np.concatenate([opaque, alpha], axis=2)), 4, 6, crf=0)
    assert torch.equal(rgba, scaled(opaque))
    grey = load_image(save(tmp_path / "la.png", np.concatenate([opaque[..., :1], alpha], axis=2)), 4, 6, crf=0)
    assert torch.equal(grey, scaled(opaque[..., :1].repeat(3, axis=2)))
    palette = Image.new("P", (6, 4), 1)
    palette.putpalette([0, 0, 0, *RED])
    palette.save(tmp_path / "p.png")
    wanted = np.broadcast_to(np.array(RED, dtype=np.uint8), (4, 6, 3))
    assert torch.equal(load_image(tmp_path / "p.png", 4, 6, crf=0), scaled(wanted))


def test_a_colour_profile_is_converted_to_srgb(tmp_path: Path) -> None:
    # An sRGB profile whose red and green primaries have changed places: what it calls red is seen as green.
    profile = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    red, green = profile.index(b"rXYZ"), profile.index(b"gXYZ")
    profile[red : red + 4], profile[green : green + 4] = b"gXYZ", b"rXYZ"
    pixels = np.full((4, 4, 3), (250, 20, 30), dtype=np.uint8)
    image = load_image(save(tmp_path / "a.png", pixels, icc_profile=bytes(profile)), 4, 4, crf=0)
    seen = ((image + 1) * 127.5)[0, :, 0, 0, 0]
    assert seen.tolist() == pytest.approx([20, 250, 30], abs=2)


def test_a_broken_colour_profile_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = save(tmp_path / "a.png", UPRIGHT, icc_profile=b"no profile")
    with caplog.at_level(logging.WARNING):
        assert torch.equal(load_image(path, 2, 3, crf=0), scaled(UPRIGHT))
    assert "a.png: its colour profile cannot be used" in caplog.text


def test_a_broken_image_is_refused(tmp_path: Path) -> None:
    data = save(tmp_path / "a.png", smooth(64, 64)).read_bytes()
    (tmp_path / "b.png").write_bytes(data[: len(data) // 2])
    with pytest.raises(ConfigurationError, match=r"b\.png cannot be read as an image"):
        load_image(tmp_path / "b.png", 64, 64, crf=0)


def bilinear(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """Cover and center crop in float64, sample by sample, in [-1, 1]."""
    h, w, _ = pixels.shape
    scale = max(height / h, width / w)
    new_h, new_w = int(np.ceil(h * scale)), int(np.ceil(w * scale))
    out = np.empty((height, width, 3))
    for y in range(height):
        for x in range(width):
            source_y = min(max((y + (new_h - height) // 2 + 0.5) * h / new_h - 0.5, 0), h - 1)
            source_x = min(max((x + (new_w - width) // 2 + 0.5) * w / new_w - 0.5, 0), w - 1)
            top, left = int(source_y), int(source_x)
            below, right = min(top + 1, h - 1), min(left + 1, w - 1)
            down, along = source_y - top, source_x - left
            upper = pixels[top, left] * (1 - along) + pixels[top, right] * along
            lower = pixels[below, left] * (1 - along) + pixels[below, right] * along
            out[y, x] = upper * (1 - down) + lower * down
    return out / 127.5 - 1


@pytest.mark.parametrize(("height", "width"), [(32, 64), (64, 32), (13, 11), (40, 41), (20, 30)])
def test_an_image_covers_the_size_and_is_cropped_around_its_center(tmp_path: Path, height: int, width: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    image = load_image(save(tmp_path / "a.png", pixels), height, width, crf=0)
    wanted = bilinear(pixels, height, width).transpose(2, 0, 1)[None, :, None]
    np.testing.assert_allclose(image.numpy(), wanted, rtol=0, atol=2e-5)


def diffusers_image(path: Path, height: int, width: int, crf: int) -> torch.Tensor:
    pipeline = SimpleNamespace(
        vae_temporal_compression_ratio=8,
        vae=SimpleNamespace(dtype=torch.float32),
        trim_conditioning_sequence=lambda start, length, total: length,
    )
    condition = LTX2VideoCondition(frames=Image.open(path), index=0, strength=1.0, crf=crf)
    frames, *_ = LTX2ConditionPipeline.preprocess_conditions(pipeline, [condition], height, width, 9, "cpu")
    return frames[0]


@pytest.mark.parametrize("crf", [0, 18, 33])
@pytest.mark.parametrize(("h", "w", "height", "width"), [(64, 128, 64, 96), (65, 129, 96, 64), (33, 130, 32, 128)])
def test_an_image_equals_diffusers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crf: int, h: int, w: int, height: int, width: int
) -> None:
    """Bit for bit once x264 may choose by the CPU as it does there; images of few rows, which no thread cuts."""
    monkeypatch.setattr(media_in, "_X264", {"preset": "veryfast"})
    path = save(tmp_path / "a.png", smooth(h, w))
    assert torch.equal(load_image(path, height, width, crf), diffusers_image(path, height, width, crf))


def test_compression_is_that_of_its_crf_and_the_same_each_time(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).normal(smooth(130, 200), 12).clip(0, 255).astype(np.uint8)
    path = save(tmp_path / "a.png", pixels)
    plain = load_image(path, 130, 200, crf=0)
    assert torch.equal(plain, scaled(pixels))
    lost, left = [], []
    for crf in (5, 18, 33, 45):
        image = load_image(path, 130, 200, crf)
        assert torch.equal(image, load_image(path, 130, 200, crf))
        lost.append((image - plain).abs().mean().item())
        left.append((image - scaled(smooth(130, 200))).abs().mean().item())
    assert lost == sorted(lost), "the more is lost"
    assert left == sorted(left, reverse=True), "and it is noise"
    assert lost[2] > 1.2 * lost[0], "which 33 takes away where 5 does not"


def test_compression_crops_to_even_sizes_and_leaves_tiny_images(tmp_path: Path) -> None:
    pixels = smooth(33, 65)
    path = save(tmp_path / "a.png", pixels)
    even = save(tmp_path / "even.png", pixels[:32, :64])
    assert torch.equal(load_image(path, 32, 64, crf=33), load_image(even, 32, 64, crf=33))
    row = save(tmp_path / "row.png", pixels[:1])
    assert torch.equal(load_image(row, 1, 65, crf=33), scaled(pixels[:1]))


# ---------------------------------------------------------------- clips


def write_clip(path: Path, frames: np.ndarray, fps: float = 24, **more: object) -> Path:
    write_mp4(path, [torch.from_numpy(frames)], fps=fps, codec=CodecSettings(crf=1, preset="ultrafast"), **more)
    return path


def colour_frames(height: int = 32, width: int = 64) -> np.ndarray:
    return np.stack([np.full((height, width, 3), colour, dtype=np.uint8) for colour in (RED, GREEN, BLUE, GREY)])


@pytest.mark.parametrize("num_frames", [1, 3, 4])
def test_the_first_frames_of_a_clip_come_back(tmp_path: Path, num_frames: int) -> None:
    clip = load_video(write_clip(tmp_path / "a.mp4", colour_frames()), num_frames, 32, 64, 24)
    assert clip.shape == (1, 3, num_frames, 32, 64)
    assert clip.dtype == torch.float32
    wanted = torch.tensor([RED, GREEN, BLUE, GREY][:num_frames]).T / 127.5 - 1
    # 2 of 255 levels: the file is BT.709 in 8 bits. Read as BT.601 the colours would be 10 to 30 levels off.
    assert (clip[0] - wanted[:, :, None, None]).abs().max() < 2.5 / 127.5


@pytest.mark.parametrize(("height", "width"), [(64, 32), (24, 96)])
def test_a_clip_is_fitted_like_an_image(tmp_path: Path, height: int, width: int) -> None:
    path = write_clip(tmp_path / "a.mp4", np.stack([smooth(32, 64, seed) for seed in range(5)]))
    clip = load_video(path, 5, height, width, 24)
    with av.open(str(path)) as container:
        for i, frame in enumerate(container.decode(video=0)):
            image = load_image(save(tmp_path / "a.png", frame.to_ndarray(format="rgb24")), height, width, crf=0)
            assert torch.equal(clip[:, :, i : i + 1], image)


def turn(path: Path, matrix: tuple[int, ...]) -> None:
    """Write the first two rows of a display matrix into the header of the mp4's track."""
    data = bytearray(path.read_bytes())
    start = data.index(b"tkhd") + 4 + 40  # version, flags, times, id, duration, layer, group, volume: 40 bytes
    identity = struct.pack(">9i", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
    assert data[start : start + 36] == identity
    a, b, c, d = (value << 16 for value in matrix)
    data[start : start + 20] = struct.pack(">5i", a, b, 0, c, d)
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("matrix", "quarter_turns_left"), [((0, 1, -1, 0), -1), ((0, -1, 1, 0), 1), ((-1, 0, 0, -1), 2)]
)
def test_a_turned_clip_is_upright(tmp_path: Path, matrix: tuple[int, ...], quarter_turns_left: int) -> None:
    """(0, 1, -1, 0) sends x to down and y to left: a quarter turn clockwise, as phones write for portrait."""
    frames = np.stack([smooth(32, 64, seed) for seed in range(3)])
    path = write_clip(tmp_path / "a.mp4", frames)
    height, width = (32, 64) if quarter_turns_left == 2 else (64, 32)
    lying = load_video(path, 3, 32, 64, 24)
    turn(path, matrix)
    assert torch.equal(load_video(path, 3, height, width, 24), torch.rot90(lying, quarter_turns_left, (3, 4)))


def test_clips_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "a.mp4", colour_frames())
    with pytest.raises(ConfigurationError, match=r"has 24 frames per second .* fps=25"):
        load_video(path, 1, 32, 64, 25)
    with pytest.raises(ConfigurationError, match=r"has 4 frames .* num_frames=5"):
        load_video(path, 5, 32, 64, 24)
    write_sound(tmp_path / "a.wav", tone(0.1, 16000, 440)[None], 16000, "mono")
    with pytest.raises(ConfigurationError, match=r"a\.wav has no video"):
        load_video(tmp_path / "a.wav", 1, 32, 64, 24)


def test_a_clip_that_breaks_off_is_refused(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (9, 32, 64, 3), dtype=np.uint8)
    data = write_clip(tmp_path / "a.mp4", noise).read_bytes()
    (tmp_path / "b.mp4").write_bytes(data[: len(data) * 2 // 3])  # the index comes first and still says 9
    with pytest.raises(ConfigurationError, match=r"b\.mp4 (has \d frames|cannot be read)"):
        load_video(tmp_path / "b.mp4", 9, 32, 64, 24)


# ---------------------------------------------------------------- sound


def tone(seconds: float, sample_rate: int, hertz: float) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * sample_rate)) / sample_rate)


def write_sound(path: Path, samples: np.ndarray, sample_rate: int, layout: str, start: int = 0) -> Path:
    """`samples` [channels, n] as 32-bit float, from sample `start` of the file on."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("pcm_f32le", rate=sample_rate, layout=layout)
        packed = np.ascontiguousarray(samples.T.reshape(1, -1), dtype=np.float32)
        frame = av.AudioFrame.from_ndarray(packed, format="flt", layout=layout)
        frame.sample_rate, frame.pts, frame.time_base = sample_rate, start, Fraction(1, sample_rate)
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def test_sound_at_its_own_rate_is_untouched(tmp_path: Path) -> None:
    samples = np.stack([tone(1, 44100, 440), tone(1, 44100, 880)]).astype(np.float32)
    path = write_sound(tmp_path / "a.wav", samples, 44100, "stereo")
    for seconds, length in ((0.5, 22050), (1, 44100), (7, 44100)):
        waveform, rate = load_audio(path, seconds)
        assert rate == 44100
        assert torch.equal(waveform, torch.from_numpy(samples[:, :length]))


@pytest.mark.parametrize(("rate", "wanted"), [(48000, 16000), (44100, 16000), (16000, 16000), (16000, 24000)])
def test_sound_is_resampled_in_place(tmp_path: Path, rate: int, wanted: int) -> None:
    samples = np.stack([tone(1, rate, 440), tone(1, rate, 880)])
    waveform, found = load_audio(write_sound(tmp_path / "a.wav", samples, rate, "stereo"), 0.75, wanted)
    assert found == wanted
    assert waveform.shape == (2, wanted * 3 // 4)
    assert waveform.is_contiguous()
    exact = np.stack([tone(0.75, wanted, 440), tone(0.75, wanted, 880)])
    # The filter rings at the hard start. One sample late would be 0.09 off.
    np.testing.assert_allclose(waveform[:, 300:].numpy(), exact[:, 300:], atol=5e-4)


@pytest.mark.parametrize("wanted", [None, 16000])
def test_mono_is_doubled_at_full_loudness(tmp_path: Path, wanted: int | None) -> None:
    path = write_sound(tmp_path / "a.wav", tone(0.5, 48000, 440)[None], 48000, "mono")
    waveform, rate = load_audio(path, 0.5, wanted)
    assert waveform.shape == (2, rate // 2)
    assert torch.equal(waveform[0], waveform[1])
    np.testing.assert_allclose(waveform[0, 300:-300].numpy(), tone(0.5, rate, 440)[300:-300], atol=5e-4)


def test_many_channels_are_mixed_down(tmp_path: Path) -> None:
    channels = np.zeros((6, 4800))
    channels[0], channels[2] = tone(0.1, 48000, 440), tone(0.1, 48000, 880)  # front left and center
    waveform, _ = load_audio(write_sound(tmp_path / "a.wav", channels, 48000, "5.1"), 0.1)
    center = np.sqrt(0.5) * channels[2]  # ITU-R BS.775
    np.testing.assert_allclose(waveform.numpy(), [channels[0] + center, center], atol=1e-5)


def test_the_sound_of_a_clip_is_in_step_with_it(tmp_path: Path) -> None:
    audio = (torch.from_numpy(np.stack([tone(1, 48000, 440), tone(1, 48000, 880)])).float(), 48000)
    path = write_clip(tmp_path / "a.mp4", np.repeat(colour_frames(), 6, axis=0), audio=audio)
    waveform, rate = load_audio(path, 1)
    assert (rate, waveform.shape) == (48000, (2, 48000))
    # AAC keeps the tone to a sixth of it, but 1024 samples of its delay left in would turn it by 9.4 periods.
    np.testing.assert_allclose(waveform[:, 9600:24000].numpy(), audio[0][:, 9600:24000], atol=0.08)


def test_sound_that_starts_late_is_preceded_by_silence(tmp_path: Path) -> None:
    """Beside a picture from 0 on; a file of nothing but sound starts with it, whatever its clock says."""
    path = tmp_path / "a.mov"
    samples = tone(0.5, 8000, 440).astype(np.float32)[None]
    with av.open(str(path), "w") as container:
        video = container.add_stream("libx264", rate=10)
        sound = container.add_stream("pcm_f32le", rate=8000, layout="mono")
        video.height = video.width = 32
        frame = av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), format="rgb24")
        frame.pts = 0
        container.mux([*video.encode(frame), *video.encode(None)])
        block = av.AudioFrame.from_ndarray(samples, format="flt", layout="mono")
        block.sample_rate, block.pts, block.time_base = 8000, 2000, Fraction(1, 8000)
        container.mux([*sound.encode(block), *sound.encode(None)])
    waveform, _ = load_audio(path, 1)
    wanted = np.concatenate([np.zeros(2000, np.float32), samples[0]])
    np.testing.assert_allclose(waveform.numpy(), np.stack([wanted, wanted]), atol=1e-6)
    assert load_audio(path, 0.25)[0].abs().max() == 0
    alone = write_sound(tmp_path / "b.mkv", samples, 8000, "mono", start=2000)
    np.testing.assert_allclose(load_audio(alone, 1)[0][0].numpy(), samples[0], atol=1e-6)


def test_no_sound_is_none(tmp_path: Path) -> None:
    assert load_audio(write_clip(tmp_path / "a.mp4", colour_frames()), 1) is None


def test_a_file_of_neither_is_refused(tmp_path: Path) -> None:
    (tmp_path / "words").write_text("silence " * 99)
    with pytest.raises(ConfigurationError, match=r"words cannot be read"):
        load_audio(tmp_path / "words", 1)
