"""Frames, sound and latents as files: writing them, and reading back what was written.

F frames, H height, W width, C latent channels. Frames are uint8 [F, H, W, 3]; a waveform is float [2, samples] in
[-1, 1].
"""

import contextlib
import hashlib
import itertools
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from av.video.reformatter import ColorRange, Colorspace
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vgen.record import OutputError, atomic_file, writing

__all__ = [
    "Audio",
    "CodecSettings",
    "FrameCheck",
    "MediaInfo",
    "OutputError",
    "check_mp4",
    "exact_fps",
    "load_latents",
    "read_mp4",
    "save_frames",
    "save_latents",
    "sha256_file",
    "to_uint8",
    "write_mp4",
]

Audio = tuple[Tensor | np.ndarray, int]
"""A waveform [2, samples] in [-1, 1] and its sample rate in Hz."""

# Frames that go to the encoder at once, and how many such pieces may wait: this bounds what lies in host memory.
_PIECE = 16
_WAITING = 2
_AAC_BLOCK = 1024
# H.273: 1 is BT.709, for primaries, transfer and matrix alike.
_BT709 = 1


@dataclass(frozen=True)
class CodecSettings:
    """`threads` is fixed, not the machine's core count: the bytes depend on it, and equal frames give equal files."""

    codec: str = "libx264"
    crf: int = 18
    preset: str = "medium"
    audio_codec: str = "aac"
    audio_bitrate: int = 192_000
    threads: int = 8


@dataclass(frozen=True)
class MediaInfo:
    """What decoding a whole mp4 gave. Seconds of audio are what a player plays: whole AAC blocks hold a little more."""

    path: Path
    num_frames: int
    height: int
    width: int
    fps: Fraction
    has_audio: bool
    audio_seconds: float
    video_seconds: float
    sample_rate: int | None

    def output_fields(self) -> dict[str, Any]:
        """The fields that an entry of the record's `outputs` holds."""
        sound = {"has_audio": self.has_audio, "audio_seconds": self.audio_seconds}
        return {
            "num_frames": self.num_frames,
            "height": self.height,
            "width": self.width,
            "fps": float(self.fps),
        } | sound


# ---------------------------------------------------------------- mp4


def exact_fps(fps: float | Fraction) -> Fraction:
    """`fps` as the fraction that is meant: 24 -> 24, 12.5 -> 25/2, 23.976 -> 24000/1001, 29.97 -> 30000/1001."""
    if not 0 < fps < 1001:
        raise ValueError(f"fps={fps} is no frame rate: give one above 0 and below 1001")
    given = Fraction(fps)
    ntsc = Fraction(round(given * 1001 / 1000) * 1000, 1001)
    if given.denominator > 1 and abs(given - ntsc) < Fraction(1, 200):
        return ntsc
    return given.limit_denominator(1001)


def write_mp4(
    path: Path,
    frames: Iterable[Tensor | np.ndarray],
    *,
    fps: float | Fraction,
    audio: Audio | Callable[[], Audio | None] | None = None,
    codec: CodecSettings = CodecSettings(),
) -> None:
    """Encode uint8 groups [f, H, W, 3], in the order they come, and their sound into one mp4 at `path`.

    Groups are asked for one after another and encoded in a second thread, so the device decodes the next group while
    the last one is encoded. `audio` may be a function; it is called after the last group. The sound is cut or filled
    with silence to the video's length. The file appears whole or not at all.

    Raises OutputError for a disk that is full or not writable, wrong shapes, odd sizes or no frame; whatever `frames`
    and `audio` raise passes unchanged.
    """
    rate = exact_fps(fps)
    pieces = _pieces(path, frames)
    first = next(pieces, None)
    if first is None:
        raise OutputError(f"{path} would hold 0 frames: an mp4 needs at least 1, so check the decoder")
    with atomic_file(path) as temporary:
        # faststart: the index comes first, so that a browser (W&B) plays before it has all bytes.
        container = av.open(str(temporary), "w", format="mp4", options={"movflags": "+faststart"})
        with contextlib.ExitStack() as stack:
            stack.callback(_close_quietly, container)
            with _encoding(path, codec.codec):
                stream = _add_video(container, first, rate, codec)
            packets, num_frames = _encode_video(path, stream, itertools.chain([first], pieces), rate)
            sound = audio() if callable(audio) else audio
            if sound is not None:
                packets += _encode_audio(path, container, sound, rate, num_frames, codec)
            with writing(path):
                # The muxer interleaves only as far as it looks ahead, so give it both streams in time order.
                for packet in sorted(packets, key=lambda packet: packet.dts * packet.time_base):
                    container.mux(packet)
                container.close()


def _close_quietly(container: Any) -> None:
    """Free the file also after a failure, whose own error is the one to show; closing twice does nothing."""
    with contextlib.suppress(Exception):
        container.close()


def _pieces(path: Path, groups: Iterable[Tensor | np.ndarray]) -> Iterator[np.ndarray]:
    """The groups as host arrays of at most `_PIECE` frames; raises OutputError for frames that do not fit together."""
    size: tuple[int, ...] | None = None
    for group in groups:
        if group.ndim != 4 or group.shape[3] != 3 or str(group.dtype).rpartition(".")[2] != "uint8":
            found = f"{group.dtype} {tuple(group.shape)}"
            raise OutputError(f"{path} got frames of {found}: an mp4 takes uint8 [frames, height, width, 3]")
        height, width = group.shape[1:3]
        size = size or (height, width)
        if (height, width) != size or height % 2 or width % 2:
            raise OutputError(
                f"{path} got frames of {height}x{width}: H.264 takes one even size for all, here {size[0]}x{size[1]}"
            )
        for start in range(0, len(group), _PIECE):
            piece = group[start : start + _PIECE]
            yield piece.cpu().numpy() if isinstance(piece, Tensor) else piece


def _add_video(container: Any, frames: np.ndarray, rate: Fraction, codec: CodecSettings) -> Any:
    options = {"crf": str(codec.crf), "preset": codec.preset}
    if codec.codec == "libx264":
        # Its AVX-512 code (as of build 165) gives other bytes from call to call at widths that 128 does not divide.
        options["x264-params"] = "cpu-independent=1"
    stream = container.add_stream(codec.codec, rate=rate, options=options)
    stream.height, stream.width = frames.shape[1:3]
    stream.pix_fmt = "yuv420p"
    context = stream.codec_context
    context.time_base = 1 / rate
    # PyAV's default, SLICE, makes x264 cut each frame into slices: larger files.
    context.thread_type = "FRAME"
    context.thread_count = codec.threads
    context.colorspace = context.color_primaries = context.color_trc = _BT709
    context.color_range = ColorRange.MPEG
    return stream


@contextlib.contextmanager
def _encoding(path: Path, codec: str) -> Iterator[None]:
    try:
        yield
    except av.FFmpegError as error:
        raise OutputError(
            f"{path} could not be encoded with {codec} ({error.strerror}): check the codec settings in output"
        ) from error


def _encode_video(path: Path, stream: Any, pieces: Iterator[np.ndarray], rate: Fraction) -> tuple[list[Any], int]:
    """Encode in a second thread with a bounded queue; returns the packets (small) and the number of frames."""
    packets: list[Any] = []
    waiting: deque[Future[list[Any]]] = deque()
    num_frames = 0

    def take_oldest() -> None:
        with _encoding(path, stream.codec_context.name):
            packets.extend(waiting.popleft().result())

    with ThreadPoolExecutor(1, thread_name_prefix="encoder") as pool:
        try:
            for piece in pieces:
                waiting.append(pool.submit(_encode_piece, stream, piece, num_frames, rate))
                num_frames += len(piece)
                if len(waiting) > _WAITING:
                    take_oldest()
            waiting.append(pool.submit(stream.encode, None))
            while waiting:
                take_oldest()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return packets, num_frames


def _encode_piece(stream: Any, piece: np.ndarray, first_index: int, rate: Fraction) -> list[Any]:
    packets: list[Any] = []
    for index, pixels in enumerate(piece, start=first_index):
        rgb = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
        # Without a target colour space swscale uses BT.601, whatever the stream says it is.
        frame = rgb.reformat(format="yuv420p", dst_colorspace=Colorspace.ITU709, dst_color_range=ColorRange.MPEG)
        frame.pts, frame.time_base = index, 1 / rate
        packets += stream.encode(frame)
    return packets


def _encode_audio(
    path: Path, container: Any, audio: Audio, rate: Fraction, num_frames: int, codec: CodecSettings
) -> list[Any]:
    """Add a stream with the sound, cut or filled with silence to the length of the video; returns its packets."""
    waveform, sample_rate = audio
    samples = torch.as_tensor(waveform).detach().float().cpu().clamp(-1, 1).numpy()
    if samples.ndim != 2 or samples.shape[0] != 2:
        raise OutputError(f"{path} got a waveform of {tuple(samples.shape)}: an mp4 takes [2, samples]")
    length = _audio_length(num_frames, rate, sample_rate)
    samples = np.ascontiguousarray(np.pad(samples, ((0, 0), (0, max(0, length - samples.shape[1]))))[:, :length])
    with _encoding(path, codec.audio_codec):
        stream = container.add_stream(codec.audio_codec, rate=sample_rate, layout="stereo")
        stream.bit_rate = codec.audio_bitrate
        frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout="stereo")
        frame.sample_rate, frame.pts, frame.time_base = sample_rate, 0, Fraction(1, sample_rate)
        return [*stream.encode(frame), *stream.encode(None)]


def _audio_length(num_frames: int, rate: Fraction, sample_rate: int) -> int:
    """Samples that last as long as the video.

    AAC comes in blocks, and readers that ignore the index play the silence that fills the last one. Where that would
    pass the end of the video by more than a frame (low sample rates), the block is left out.
    """
    exact = round(num_frames / rate * sample_rate)
    whole_blocks = -(-exact // _AAC_BLOCK) * _AAC_BLOCK
    if whole_blocks - exact <= sample_rate / rate or whole_blocks == _AAC_BLOCK:
        return exact
    return whole_blocks - _AAC_BLOCK


def read_mp4(path: Path) -> MediaInfo:
    """Decode all of `path` and count; raises OutputError where it does not decode to the end."""
    try:
        with av.open(str(path)) as container:
            return _count(Path(path), container)
    except (av.FFmpegError, IndexError) as error:
        raise OutputError(f"{path} cannot be read back ({error}): the file is not whole, so write it again") from error


def _count(path: Path, container: Any) -> MediaInfo:
    video = container.streams.video[0]
    audio = container.streams.audio[0] if container.streams.audio else None
    video.thread_type = "AUTO"
    num_frames = num_samples = 0
    sizes: set[tuple[int, int]] = set()
    for packet in container.demux([stream for stream in (video, audio) if stream is not None]):
        for frame in packet.decode():
            if isinstance(frame, av.VideoFrame):
                num_frames += 1
                sizes.add((frame.height, frame.width))
            else:
                num_samples += frame.samples
    if len(sizes) != 1:
        raise OutputError(f"{path} holds frames of {len(sizes)} sizes: one is right, so write it again")
    height, width = sizes.pop()
    rate = Fraction(video.average_rate)
    seconds = 0.0
    if audio is not None:
        declared = float(audio.duration * audio.time_base) if audio.duration else 0.0
        seconds = min(num_samples / audio.rate, declared)
    return MediaInfo(
        path=path,
        num_frames=num_frames,
        height=height,
        width=width,
        fps=rate,
        has_audio=audio is not None,
        audio_seconds=seconds,
        video_seconds=float(num_frames / rate),
        sample_rate=audio.rate if audio is not None else None,
    )


def check_mp4(info: MediaInfo, expected: Mapping[str, int | float | Fraction | bool]) -> None:
    """Compare what was read back with what was asked for, by field of MediaInfo (num_frames, height, width, fps, ...).

    Raises OutputError that names the first field which differs, or the sound if it does not end within one frame of
    the video.
    """
    for name, wanted in expected.items():
        found = getattr(info, name)
        if found != (exact_fps(wanted) if name == "fps" else wanted):
            raise OutputError(
                f"{info.path} has {name}={found}: {name}={wanted} was asked for, so the file is wrong; write it again"
            )
    if info.has_audio and abs(info.audio_seconds - info.video_seconds) > 1 / info.fps:
        raise OutputError(
            f"{info.path} has audio_seconds={info.audio_seconds:.3f} beside {info.video_seconds:.3f} s of video: "
            f"they must agree within one frame, so write it again"
        )


# ---------------------------------------------------------------- tensors


def to_uint8(frames: Tensor, frames_at_once: int = 8) -> Tensor:
    """Decoder output [1, 3, F, H, W] in [-1, 1] as uint8 [F, H, W, 3] on the same device.

    LTX-2's rounding: clamp((y + 1) / 2, 0, 1) * 255 in float32, then cut off, not rounded to nearest. Works on
    `frames_at_once` frames at a time, so its float32 copies stay small.
    """
    if frames.ndim != 5 or frames.shape[:2] != (1, 3):
        raise ValueError(f"frames are {tuple(frames.shape)}: to_uint8 takes one video [1, 3, F, H, W]")
    _, _, F, H, W = frames.shape
    pixels = torch.empty(F, H, W, 3, dtype=torch.uint8, device=frames.device)
    for start in range(0, F, frames_at_once):
        part = frames[0, :, start : start + frames_at_once].float()
        part = ((part + 1) / 2).clamp(0, 1) * 255
        pixels[start : start + frames_at_once] = part.permute(1, 2, 3, 0).to(torch.uint8)
    return pixels


class FrameCheck:
    """Running smallest and largest pixel of a video; they stay on the device until `finish`."""

    def __init__(self) -> None:
        self._lowest: Tensor | None = None
        self._highest: Tensor | None = None

    def update(self, frames: Tensor) -> None:
        """Take a group of uint8 frames, any shape."""
        lowest, highest = torch.aminmax(frames)
        self._lowest = lowest if self._lowest is None else torch.minimum(self._lowest, lowest)
        self._highest = highest if self._highest is None else torch.maximum(self._highest, highest)

    def finish(self) -> None:
        """Raises OutputError if all pixels of all frames were equal, or none came."""
        if self._lowest is None or self._highest is None:
            raise OutputError("the video has no frame: at least 1 is needed, so check the decoder")
        if torch.equal(self._lowest, self._highest):
            raise OutputError(
                f"the video is constant, every pixel is {int(self._lowest)}: a real one varies, so check the "
                f"checkpoint and the latents"
            )


_OS_ERROR = re.compile(r"\(os error (\d+)\)")


def _save_tensors(path: Path, tensors: dict[str, Tensor], metadata: Mapping[str, str]) -> None:
    on_host = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    with atomic_file(path) as temporary, writing(path):
        try:
            save_file(on_host, str(temporary), metadata=dict(metadata))
        except SafetensorError as error:
            # safetensors is the one writer here that hides the system's error number in its text.
            if found := _OS_ERROR.search(str(error)):
                raise OSError(int(found[1]), os.strerror(int(found[1]))) from error
            raise


def save_latents(path: Path, video: Tensor, audio: Tensor | None, metadata: Mapping[str, str]) -> None:
    """Write `video` [1, C, F, H, W] and `audio` [1, C, T, mel] with string metadata. Raises OutputError."""
    _save_tensors(path, {"video": video} | ({"audio": audio} if audio is not None else {}), metadata)


def load_latents(path: Path) -> tuple[Tensor, Tensor | None, dict[str, str]]:
    """Video, audio (or None) and metadata as `save_latents` wrote them. Raises OutputError if the file is not that."""
    try:
        with safe_open(str(path), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
            metadata = dict(file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise OutputError(f"{path} cannot be read ({error}): give the latents file of a finished denoise") from error
    if "video" not in tensors:
        raise OutputError(f"{path} has {sorted(tensors)}: latents need a tensor named video, so give a latents file")
    return tensors["video"], tensors.get("audio"), metadata


def save_frames(path: Path, frames: Tensor) -> None:
    """Write uint8 `frames` [F, H, W, 3] as they were before encoding. Raises OutputError."""
    _save_tensors(path, {"frames": frames}, {})


def sha256_file(path: Path) -> str:
    with Path(path).open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
