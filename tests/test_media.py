"""mp4, latents and frames: what is written is what was asked for, whole or not at all."""

import shutil
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch

from vgen import media
from vgen.media import CodecSettings, FrameCheck, OutputError, check_mp4, exact_fps, read_mp4, to_uint8, write_mp4
from vgen.record import write_json_atomic

FAST = CodecSettings(preset="ultrafast")


def moving_frames(num_frames: int, height: int = 64, width: int = 96, seed: int = 0) -> torch.Tensor:
    """Smooth random frames [F, H, W, 3] that H.264 keeps well."""
    noise = torch.rand(1, 3, num_frames // 4 + 2, 4, 6, generator=torch.Generator().manual_seed(seed))
    smooth = torch.nn.functional.interpolate(noise, (num_frames, height, width), mode="trilinear")
    return (smooth[0].permute(1, 2, 3, 0) * 255).to(torch.uint8)


def tone(seconds: float, sample_rate: int, start: float = 0.0) -> torch.Tensor:
    """[2, samples]: 440 Hz left and 880 Hz right from `start` on, silence before."""
    t = torch.arange(round(seconds * sample_rate)) / sample_rate
    waves = torch.stack([torch.sin(2 * torch.pi * 440 * t), torch.sin(2 * torch.pi * 880 * t)])
    return 0.5 * waves * (t >= start)


def decoded_luma(path: Path) -> np.ndarray:
    """Y planes [F, H, W] as they are in the file."""
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray()[: frame.height] for frame in container.decode(video=0)])


def decoded_sound(path: Path) -> np.ndarray:
    """[2, samples] in whole AAC blocks, whatever the index says."""
    with av.open(str(path)) as container:
        return np.concatenate([frame.to_ndarray() for frame in container.decode(audio=0)], axis=1)


def only_file(folder: Path) -> str:
    (path,) = folder.iterdir()
    return path.name


# ---------------------------------------------------------------- mp4


@pytest.mark.parametrize(
    ("given", "exact"),
    [
        (24, Fraction(24)),
        (25.0, Fraction(25)),
        (30.0, Fraction(30)),
        (12.5, Fraction(25, 2)),
        (23.976, Fraction(24000, 1001)),
        (23.98, Fraction(24000, 1001)),
        (29.97, Fraction(30000, 1001)),
        (59.94, Fraction(60000, 1001)),
        (Fraction(24000, 1001), Fraction(24000, 1001)),
        (24000 / 1001, Fraction(24000, 1001)),
    ],
)
def test_fps_is_the_fraction_that_is_meant(given: float, exact: Fraction) -> None:
    assert exact_fps(given) == exact


@pytest.mark.parametrize("fps", [0, -24, float("nan"), float("inf"), 5000])
def test_impossible_fps_is_refused(fps: float) -> None:
    with pytest.raises(ValueError, match=f"fps={fps}"):
        exact_fps(fps)


@pytest.mark.parametrize("fps", [24, 25.0, 30, 23.976, 12.5])
@pytest.mark.parametrize("num_frames", [1, 17])
def test_count_size_and_fps_come_back(tmp_path: Path, fps: float, num_frames: int) -> None:
    path = tmp_path / "a.mp4"
    write_mp4(path, moving_frames(num_frames).split(5), fps=fps, codec=FAST)
    info = read_mp4(path)
    assert (info.num_frames, info.height, info.width, info.fps) == (num_frames, 64, 96, exact_fps(fps))
    assert (info.has_audio, info.audio_seconds, info.sample_rate) == (False, 0.0, None)
    assert info.video_seconds == float(num_frames / exact_fps(fps))
    check_mp4(info, {"num_frames": num_frames, "height": 64, "width": 96, "fps": fps, "has_audio": False})
    assert only_file(tmp_path) == "a.mp4"


def test_pixels_and_their_order_come_back(tmp_path: Path) -> None:
    frames = moving_frames(40)
    write_mp4(tmp_path / "a.mp4", [frames[:3], frames[3:39].numpy(), frames[39:]], fps=24, codec=CodecSettings(crf=1))
    back = decoded_luma(tmp_path / "a.mp4").astype(float)
    wanted = 16 + 219 / 255 * (frames.numpy() @ np.array([0.2126, 0.7152, 0.0722]))
    # distance[i, j] of the frame read back at i from the original j; the outermost originals are equal to neighbours.
    distance = np.abs(back[:, None] - wanted[None]).mean(axis=(2, 3))[2:-2, 2:-2]
    assert (distance.argmin(axis=1) == np.arange(36)).all()
    assert distance.diagonal().max() < 0.5, "rounding alone costs 0.25"


def test_colours_are_bt709_by_value_and_by_tag(tmp_path: Path) -> None:
    red, green = torch.tensor([255, 0, 0]), torch.tensor([0, 255, 0])
    frames = torch.stack([red, green]).to(torch.uint8)[:, None, None].expand(2, 64, 64, 3)
    write_mp4(tmp_path / "a.mp4", [frames], fps=24, codec=CodecSettings(crf=1))
    with av.open(str(tmp_path / "a.mp4")) as container:
        context = container.streams.video[0].codec_context
        planes = [
            [part.mean() for part in np.split(frame.to_ndarray().ravel(), [64 * 64, 64 * 64 * 5 // 4])]
            for frame in container.decode(video=0)
        ]
        tags = (context.color_primaries, context.color_trc, context.colorspace, context.color_range)
    assert context.pix_fmt == "yuv420p"
    assert tags == (1, 1, 1, 1)
    # ITU-R BT.709, limited range: Y = 16 + 219 Y', Cb = 128 + 224 (B' - Y') / 1.8556, Cr = 128 + 224 (R' - Y') / 1.5748
    np.testing.assert_allclose(planes, [[62.6, 102.3, 240.0], [172.6, 41.7, 26.3]], atol=1.0)


def test_the_index_comes_first(tmp_path: Path) -> None:
    write_mp4(tmp_path / "a.mp4", [moving_frames(9)], fps=24, audio=(tone(0.4, 24000), 24000), codec=FAST)
    data = (tmp_path / "a.mp4").read_bytes()
    assert 0 < data.index(b"moov") < data.index(b"mdat")


def test_equal_frames_give_equal_files(tmp_path: Path) -> None:
    frames, audio = moving_frames(30), (tone(1.3, 24000), 24000)
    hashes = set()
    for group in (30, 7, 3, 1):
        write_mp4(tmp_path / "a.mp4", frames.split(group), fps=24, audio=audio)
        hashes.add(media.sha256_file(tmp_path / "a.mp4"))
    assert len(hashes) == 1


@pytest.mark.parametrize("seconds", [0.0, 0.3, 17 / 24, 5.0])
@pytest.mark.parametrize(("fps", "sample_rate"), [(24, 24000), (24, 16000), (30, 48000), (23.976, 24000)])
def test_sound_ends_with_the_video(tmp_path: Path, seconds: float, fps: float, sample_rate: int) -> None:
    path = tmp_path / "a.mp4"
    write_mp4(path, [moving_frames(17)], fps=fps, audio=(tone(seconds, sample_rate), sample_rate), codec=FAST)
    info = read_mp4(path)
    assert (info.has_audio, info.sample_rate, info.num_frames) == (True, sample_rate, 17)
    check_mp4(info, {"has_audio": True, "fps": fps})
    samples = decoded_sound(path)
    assert abs(samples.shape[1] / sample_rate - info.video_seconds) <= 1 / fps, "also for readers that ignore the index"


@pytest.mark.parametrize("num_frames", range(1, 60, 7))
@pytest.mark.parametrize(("fps", "sample_rate"), [(24, 24000), (24, 16000), (25, 24000), (30, 24000), (24, 48000)])
def test_sound_is_exact_or_ends_at_a_block_within_one_frame(num_frames: int, fps: int, sample_rate: int) -> None:
    exact = round(num_frames / fps * sample_rate)
    length = media._audio_length(num_frames, Fraction(fps), sample_rate)
    heard_at_most = -(-length // 1024) * 1024
    if num_frames / fps * sample_rate >= 1024:
        assert abs(heard_at_most - exact) <= sample_rate / fps
    assert length == exact or (length % 1024 == 0 and 0 < exact - length <= sample_rate / fps)


def test_sound_comes_back_in_place(tmp_path: Path) -> None:
    rate, start = 24000, 0.5
    write_mp4(tmp_path / "a.mp4", [moving_frames(41)], fps=24, audio=lambda: (tone(2.0, rate, start), rate), codec=FAST)
    samples = decoded_sound(tmp_path / "a.mp4")
    expected = tone(41 / 24, rate, start).numpy()
    found = samples[:, : expected.shape[1]]
    middle = slice(round(0.6 * rate), round(1.6 * rate))
    for channel in range(2):
        correlation = np.corrcoef(found[channel, middle], expected[channel, middle])[0, 1]
        assert correlation > 0.999, "an offset of one sample lowers the 880 Hz channel to 0.97"
    assert np.abs(found[:, : round(0.4 * rate)]).max() < 0.02
    assert abs(np.abs(found[:, middle]).max() - 0.5) < 0.05


def test_sound_may_come_late_or_not_at_all(tmp_path: Path) -> None:
    order: list[str] = []

    def frames() -> Iterator[torch.Tensor]:
        order.append("frames")
        yield moving_frames(9)

    def audio() -> media.Audio:
        order.append("audio")
        return tone(1, 24000), 24000

    write_mp4(tmp_path / "a.mp4", frames(), fps=24, audio=audio, codec=FAST)
    assert order == ["frames", "audio"]
    assert read_mp4(tmp_path / "a.mp4").has_audio
    write_mp4(tmp_path / "a.mp4", frames(), fps=24, audio=lambda: None, codec=FAST)
    assert not read_mp4(tmp_path / "a.mp4").has_audio


def test_encoding_runs_beside_the_decoder_and_holds_it_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first group is being encoded while later ones are made; a slow encoder stops the maker, not the memory."""
    given, first_encoding, may_go = [], threading.Event(), threading.Event()
    encode = media._encode_piece

    def slow_encode(*args: object) -> list[object]:
        first_encoding.set()
        assert may_go.wait(20)
        return encode(*args)  # type: ignore[arg-type]

    def frames() -> Iterator[torch.Tensor]:
        for index in range(12):
            given.append(index)
            yield moving_frames(2, seed=index)
            if index == 0:
                assert first_encoding.wait(20), "the next group is not asked for before the first is handed over"

    monkeypatch.setattr(media, "_encode_piece", slow_encode)
    writer = threading.Thread(target=write_mp4, args=(tmp_path / "a.mp4", frames()), kwargs={"fps": 24, "codec": FAST})
    writer.start()
    assert first_encoding.wait(20)
    writer.join(0.3)
    held_at = len(given)
    may_go.set()
    writer.join(20)
    assert 2 <= held_at <= media._WAITING + 2
    assert read_mp4(tmp_path / "a.mp4").num_frames == 24


def test_an_error_of_the_encoder_thread_surfaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> list[object]:
        raise RuntimeError("encoder broke")

    monkeypatch.setattr(media, "_encode_piece", fail)
    with pytest.raises(RuntimeError, match="encoder broke"):
        write_mp4(tmp_path / "a.mp4", moving_frames(64).split(1), fps=24, codec=FAST)
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_decoder_passes_and_leaves_the_old_file(tmp_path: Path) -> None:
    def frames() -> Iterator[torch.Tensor]:
        yield moving_frames(20)
        raise OSError(28, "not the disk of the mp4")

    (tmp_path / "a.mp4").write_text("before")
    with pytest.raises(OSError, match="not the disk") as caught:
        write_mp4(tmp_path / "a.mp4", frames(), fps=24, codec=FAST)
    assert not isinstance(caught.value, OutputError)
    assert only_file(tmp_path) == "a.mp4"
    assert (tmp_path / "a.mp4").read_text() == "before"


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([], "0 frames"),
        ([torch.zeros(2, 64, 64, 3)], "float32"),
        ([torch.zeros(2, 3, 64, 64, dtype=torch.uint8)], r"\(2, 3, 64, 64\)"),
        ([torch.zeros(2, 64, 63, 3, dtype=torch.uint8)], "64x63"),
        ([moving_frames(2), moving_frames(2, height=32)], "32x96"),
    ],
)
def test_frames_that_are_no_video_are_refused(tmp_path: Path, groups: list[torch.Tensor], said: str) -> None:
    with pytest.raises(OutputError, match=said):
        write_mp4(tmp_path / "a.mp4", groups, fps=24, codec=FAST)
    assert list(tmp_path.iterdir()) == []


def test_a_waveform_of_wrong_shape_and_a_wrong_preset_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"\(1, 9\)"):
        write_mp4(tmp_path / "a.mp4", [moving_frames(2)], fps=24, audio=(torch.zeros(1, 9), 24000), codec=FAST)
    with pytest.raises(OutputError, match="could not be encoded with libx264"):
        write_mp4(tmp_path / "a.mp4", [moving_frames(2)], fps=24, codec=CodecSettings(preset="fastest"))
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"none.a\.mp4 could not be written .*No such file"):
        write_mp4(tmp_path / "none" / "a.mp4", [moving_frames(2)], fps=24, codec=FAST)


def test_a_file_cut_short_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    write_mp4(path, [moving_frames(17)], fps=24, audio=(tone(1, 24000), 24000), codec=FAST)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(OutputError):
        check_mp4(read_mp4(path), {"num_frames": 17})


@pytest.mark.parametrize(
    ("field", "wrong"),
    [("num_frames", 18), ("height", 96), ("width", 64), ("fps", 25), ("has_audio", False), ("sample_rate", 48000)],
)
def test_a_wrong_field_is_named(tmp_path: Path, field: str, wrong: int) -> None:
    path = tmp_path / "a.mp4"
    write_mp4(path, [moving_frames(17)], fps=24, audio=(tone(1, 24000), 24000), codec=FAST)
    with pytest.raises(OutputError, match=rf"{field}=.*{field}={wrong} was asked for"):
        check_mp4(read_mp4(path), {field: wrong})


def test_sound_that_ends_early_is_named(tmp_path: Path) -> None:
    info = media.MediaInfo(tmp_path / "a.mp4", 17, 64, 96, Fraction(24), True, 17 / 24 - 1 / 23, 17 / 24, 24000)
    with pytest.raises(OutputError, match=r"audio_seconds=0\.665 beside 0\.708 s"):
        check_mp4(info, {"num_frames": 17})


# ---------------------------------------------------------------- full disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "vgen-test", str(folder)]
    mounted = shutil.which("mount") and subprocess.run(command, capture_output=True, check=False).returncode == 0
    if not mounted:
        pytest.skip("mounting a tmpfs needs root; the test of the file size limit covers the same path")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def noise_frames(num_frames: int) -> torch.Tensor:
    return torch.randint(
        0, 256, (num_frames, 128, 128, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )


def test_a_full_disk_is_one_sentence_and_leaves_room(small_disk: Path) -> None:
    with pytest.raises(OutputError, match=r"sample_0\.mp4 could not be written whole, its disk is full \(.*MiB free\)"):
        write_mp4(small_disk / "sample_0.mp4", [noise_frames(33)], fps=24, audio=(tone(2, 24000), 24000), codec=FAST)
    assert list(small_disk.iterdir()) == []
    write_json_atomic(small_disk / "record.json", {"why": "x" * 100_000})
    with pytest.raises(OutputError, match="disk is full"):
        write_json_atomic(small_disk / "record.json", {"why": "x" * 300_000})
    with pytest.raises(OutputError, match=r"latents_0\.safetensors could not be written whole, its disk is full"):
        media.save_latents(small_disk / "latents_0.safetensors", torch.rand(1, 8, 9, 64, 64), None, {})
    assert only_file(small_disk) == "record.json"
    assert b"x" * 100_000 in (small_disk / "record.json").read_bytes()


@pytest.mark.parametrize("kib_left", [1, 30, 90, 180])
def test_an_mp4_is_whole_or_an_error_wherever_the_disk_fills(small_disk: Path, kib_left: int) -> None:
    (small_disk / "other").write_bytes(b"0" * 1024 * (256 - kib_left))
    frames = noise_frames(9)  # about 120 KiB
    try:
        write_mp4(small_disk / "a.mp4", [frames], fps=24, codec=FAST)
    except OutputError:
        assert kib_left < 180
        assert only_file(small_disk) == "other"
    else:
        assert kib_left == 180
        assert read_mp4(small_disk / "a.mp4").num_frames == 9


def test_a_file_size_limit_is_one_sentence(tmp_path: Path) -> None:
    """The same path as a full disk, where no file system can be mounted."""
    code = f"""
        import resource, signal, torch
        from pathlib import Path
        from vgen import media
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
        folder = Path({str(tmp_path)!r})
        frames = torch.randint(0, 256, (9, 128, 128, 3), dtype=torch.uint8)
        writers = [
            lambda: media.write_mp4(folder / "a.mp4", [frames], fps=24),
            lambda: media.save_latents(folder / "a.safetensors", torch.rand(1, 8, 2, 64, 64), None, {{}}),
            lambda: media.save_frames(folder / "f.safetensors", frames),
        ]
        for write in writers:
            try:
                write()
                print("written")
            except media.OutputError as error:
                print(error)
        print([path.name for path in folder.iterdir()])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    said = [line for line in lines if line.endswith("it passes the limit for one file: raise it (ulimit -f)")]
    assert len(said) == 3, done.stdout
    assert lines[-1] == "[]"


# ---------------------------------------------------------------- tensors


def test_uint8_is_cut_off_not_rounded() -> None:
    values = torch.tensor([-2.0, -1.0, -0.996, -0.9922, 0.0, 0.1, 0.9999, 1.0, 3.0])
    expected = [0, 0, 0, 0, 127, 140, 254, 255, 255]  # nearest would give 0, 0, 1, 1, 128, 140, 255, 255, 255
    frames = values.view(1, 1, 1, 1, 9).expand(1, 3, 2, 2, 9)
    assert to_uint8(frames).shape == (2, 2, 9, 3)
    assert to_uint8(frames)[1, 1, :, 2].tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_uint8_matches_float32_arithmetic_whatever_the_groups(dtype: torch.dtype) -> None:
    frames = (torch.randn(1, 3, 11, 6, 10, generator=torch.Generator().manual_seed(2)) * 0.8).to(dtype)
    y = frames.float().numpy()
    wanted = (np.clip((y + np.float32(1)) / np.float32(2), 0, 1) * np.float32(255)).astype(np.uint8)
    wanted = wanted[0].transpose(1, 2, 3, 0)
    for at_once in (1, 4, 11, 50):
        assert np.array_equal(to_uint8(frames, at_once).numpy(), wanted)


def test_uint8_refuses_other_shapes() -> None:
    with pytest.raises(ValueError, match=r"\(2, 3, 1, 4, 4\)"):
        to_uint8(torch.zeros(2, 3, 1, 4, 4))


def test_a_constant_video_is_named() -> None:
    check = FrameCheck()
    for _ in range(3):
        check.update(torch.full((2, 4, 4, 3), 127, dtype=torch.uint8))
    with pytest.raises(OutputError, match="constant, every pixel is 127"):
        check.finish()
    check.update(torch.full((2, 4, 4, 3), 128, dtype=torch.uint8))
    check.finish()
    with pytest.raises(OutputError, match="no frame"):
        FrameCheck().finish()


@pytest.mark.parametrize("with_audio", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_latents_come_back_equal(tmp_path: Path, with_audio: bool, dtype: torch.dtype) -> None:
    path = tmp_path / "latents_0.safetensors"
    video = torch.randn(1, 4, 2, 6, 4).to(dtype).transpose(3, 4)
    audio = torch.randn(1, 8, 5, 16).to(dtype) if with_audio else None
    media.save_latents(path, video, audio, {"prompt": 'a, "b" = {ü}', "seed": "3"})
    back_video, back_audio, metadata = media.load_latents(path)
    assert back_video.dtype == dtype
    assert torch.equal(back_video, video)
    assert (back_audio is None) if audio is None else torch.equal(back_audio, audio)
    assert metadata == {"prompt": 'a, "b" = {ü}', "seed": "3"}
    assert only_file(tmp_path) == "latents_0.safetensors"


def test_files_that_are_no_latents_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    media.save_frames(path, moving_frames(2))
    with pytest.raises(OutputError, match=r"\['frames'\]: latents need a tensor named video"):
        media.load_latents(path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(OutputError, match="cannot be read"):
        media.load_latents(path)
    with pytest.raises(OutputError, match="cannot be read"):
        media.load_latents(tmp_path / "none.safetensors")


def test_frames_come_back_equal(tmp_path: Path) -> None:
    frames = moving_frames(3)
    media.save_frames(tmp_path / "frames_0.safetensors", frames)
    from safetensors.torch import load_file

    back = load_file(tmp_path / "frames_0.safetensors")
    assert list(back) == ["frames"]
    assert torch.equal(back["frames"], frames)


@pytest.mark.gpu
def test_pixels_and_check_on_a_gpu_equal_those_on_the_cpu() -> None:
    frames = torch.randn(1, 3, 9, 32, 32)
    pixels = to_uint8(frames.cuda())
    assert pixels.is_cuda
    assert torch.equal(pixels.cpu(), to_uint8(frames))
    check = FrameCheck()
    check.update(pixels)
    check.finish()
