"""What files hold, told without torch, and the sentences for what a request cannot use."""

import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from vgen.media import CodecSettings, write_mp4
from vgen.media_probe import (
    AudioInfo,
    VideoInfo,
    find_video,
    probe_audio,
    probe_image,
    probe_video,
    validate_images,
    validate_video,
)
from vgen.typed import ConfigurationError

FAST = CodecSettings(preset="ultrafast")


def write_clip(path: Path, num_frames: int, fps: float = 24, sample_rate: int | None = None) -> Path:
    frames = torch.arange(num_frames, dtype=torch.uint8)[:, None, None, None].expand(-1, 32, 48, 3)
    audio = None if sample_rate is None else (torch.zeros(2, sample_rate), sample_rate)
    write_mp4(path, [frames], fps=fps, audio=audio, codec=FAST)
    return path


def test_a_clip_tells_frames_size_rate_and_sound(tmp_path: Path) -> None:
    loud = write_clip(tmp_path / "a.mp4", 24, sample_rate=44100)
    assert probe_video(loud) == VideoInfo(24, 32, 48, Fraction(24))
    assert probe_audio(loud) == AudioInfo(44100, 2, pytest.approx(1.0, abs=1e-3))
    assert probe_audio(write_clip(tmp_path / "b.mp4", 9)) is None


def test_frames_are_counted_where_no_index_tells(tmp_path: Path) -> None:
    import av

    with av.open(str(write_clip(tmp_path / "a.mp4", 11))) as source, av.open(str(tmp_path / "a.mkv"), "w") as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.size:
                packet.stream = stream
                target.mux(packet)
    with av.open(str(tmp_path / "a.mkv")) as container:
        assert container.streams.video[0].frames == 0
    assert probe_video(tmp_path / "a.mkv").num_frames == 11


@pytest.mark.parametrize(("orientation", "size"), [(1, (4, 6)), (3, (4, 6)), (4, (4, 6)), (5, (6, 4)), (8, (6, 4))])
def test_an_image_tells_its_size_upright(tmp_path: Path, orientation: int, size: tuple[int, int]) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.new("RGB", (6, 4)).save(tmp_path / "a.jpg", exif=exif)
    assert probe_image(tmp_path / "a.jpg") == size


def test_probing_needs_no_torch(tmp_path: Path) -> None:
    clip = write_clip(tmp_path / "a.mp4", 9)
    Image.new("RGB", (6, 4)).save(tmp_path / "a.png")
    code = (
        "import sys; from vgen import media_probe as m; assert not {'av', 'PIL'} & set(sys.modules); "
        "_, clip, image = sys.argv; m.validate_video(clip, 9, 24); m.probe_audio(clip); m.probe_image(image); "
        "sys.exit('torch' in sys.modules)"
    )
    root = Path(__file__).parent.parent
    command = [sys.executable, "-c", code, str(clip), str(tmp_path / "a.png")]
    assert subprocess.run(command, cwd=root, check=False).returncode == 0


def test_cover_pictures_are_no_video() -> None:
    cover, film = SimpleNamespace(disposition=1024), SimpleNamespace(disposition=1)
    assert find_video("a", SimpleNamespace(streams=SimpleNamespace(video=[cover, film]))) is film
    with pytest.raises(ConfigurationError, match=r"a\.mp3 has no video"):
        find_video("a.mp3", SimpleNamespace(streams=SimpleNamespace(video=[cover])))


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no picture, no film " * 50)
    for name in ("text", "missing", "."):
        path = tmp_path / name
        for probe in (probe_image, probe_video, probe_audio):
            with pytest.raises(ConfigurationError, match=r"cannot be read") as caught:
                probe(path)
            assert str(path) in str(caught.value)
            assert "\n" not in str(caught.value)
    with pytest.raises(ConfigurationError, match="cannot be read as an image"):
        probe_image(write_clip(tmp_path / "a.mp4", 1))


def test_grey_of_many_bits_is_refused(tmp_path: Path) -> None:
    Image.new("I;16", (6, 4), 300).save(tmp_path / "a.png")
    with pytest.raises(ConfigurationError, match="more than 8 bits"):
        probe_image(tmp_path / "a.png")


@pytest.mark.parametrize(("fps", "wanted"), [(24, 24.0), (23.976, 23.976), (23.976, 24000 / 1001), (29.97, 29.97)])
def test_a_clip_that_fits_passes(tmp_path: Path, fps: float, wanted: float) -> None:
    validate_video(write_clip(tmp_path / "a.mp4", 9, fps), 9, wanted)


@pytest.mark.parametrize(("fps", "wanted"), [(24, 23.976), (23.976, 24), (25, 24), (30, 29.97)])
def test_another_frame_rate_is_refused(tmp_path: Path, fps: float, wanted: float) -> None:
    clip = write_clip(tmp_path / "a.mp4", 9, fps)
    with pytest.raises(ConfigurationError, match=rf"a\.mp4 has {fps}\d* frames per second .* fps={wanted}"):
        validate_video(clip, 9, wanted)


def test_a_clip_that_is_too_short_is_refused(tmp_path: Path) -> None:
    clip = write_clip(tmp_path / "a.mp4", 16)
    with pytest.raises(ConfigurationError, match=r"has 16 frames .* num_frames=17: .*num_frames to 9 or less"):
        validate_video(clip, 17, 24)


def test_images_that_fit_pass() -> None:
    validate_images([], [], 9)
    validate_images([8, 0, 3], [0, 1, 0.5], 9)


@pytest.mark.parametrize(
    ("frames", "strengths", "sentence"),
    [
        ([0, 4, 0], [1, 1, 0.5], "images 0 and 2 are both put at frame 0"),
        ([0, 3, 3], [1, 1, 1], "images 1 and 2 are both put at frame 3"),
        ([9], [1], "image 0 is put at frame 9 of 9: frames count from 0, so give 0 to 8"),
        ([0, -1], [1, 1], "image 1 is put at frame -1 of 9"),
        ([0, 1], [1, 1.1], "image 1 has strength=1.1"),
        ([0], [-0.1], "image 0 has strength=-0.1"),
        ([0], [float("nan")], "image 0 has strength=nan"),
    ],
)
def test_images_that_do_not_fit_are_refused(frames: list[int], strengths: list[float], sentence: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        validate_images(frames, strengths, 9)
    assert str(caught.value).startswith(sentence)
