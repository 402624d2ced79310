"""What the files given to a request hold, and whether it can use them: known from headers, before a process starts.

Torch-free, since the Hydra parent asks.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from vgen.typed import ConfigurationError

# 23.976 stands for 24000/1001; at this distance a clip of 10 s is off by a twentieth of a frame.
_SAME_FPS = 0.005
_IMAGE_FORMATS = "give a PNG, JPEG or WebP image"


@dataclass(frozen=True)
class VideoInfo:
    """``num_frames`` as the index says or, without one, as many packets as there are."""

    num_frames: int
    height: int
    width: int
    fps: Fraction


@dataclass(frozen=True)
class AudioInfo:
    """``seconds`` is None where the file does not tell."""

    sample_rate: int
    channels: int
    seconds: float | None


def probe_image(path: str | Path) -> tuple[int, int]:
    """Height and width as the image is seen, upright. Raises ConfigurationError for what is no image."""
    with open_image(path) as image:
        width, height = image.size
        # EXIF orientations 5 to 8 lie on their side.
        return (width, height) if image.getexif().get(0x0112, 1) >= 5 else (height, width)


def probe_video(path: str | Path) -> VideoInfo:
    """Raises ConfigurationError for a file that cannot be read or has no video."""
    with open_media(path) as container:
        stream = find_video(path, container)
        if not stream.average_rate:
            raise ConfigurationError(f"{path} tells no frame rate; give a video file such as an mp4")
        num_frames = stream.frames or sum(packet.size > 0 for packet in container.demux(stream))
        return VideoInfo(num_frames, stream.codec_context.height, stream.codec_context.width, stream.average_rate)


def probe_audio(path: str | Path) -> AudioInfo | None:
    """None for a file without sound. Raises ConfigurationError for one that cannot be read."""
    with open_media(path) as container:
        if not container.streams.audio:
            return None
        stream = container.streams.audio[0]
        seconds = float(stream.duration * stream.time_base) if stream.duration else None
        return AudioInfo(stream.rate, stream.channels, seconds)


def has_sound(path: Path) -> bool:
    """Whether the file has sound to decode: a stream alone may be empty. Raises as ``probe_audio``."""
    with open_media(path) as container:
        if not container.streams.audio:
            return False
        return any(packet.size > 0 for packet in container.demux(container.streams.audio[0]))


def validate_video(path: str | Path, num_frames: int, fps: float) -> None:
    """Raises ConfigurationError unless ``path`` is a clip of ``num_frames`` or more at ``fps``.

    The frames of another rate would be played too fast or too slow: the official code refuses them as well.
    """
    info = probe_video(path)
    if abs(info.fps - fps) >= _SAME_FPS:
        raise ConfigurationError(
            f"{path} has {float(info.fps):g} frames per second and the request fps={fps:g}: they must be equal, so "
            f"convert the clip or set request.fps"
        )
    if info.num_frames < num_frames:
        raise too_short(path, info.num_frames, num_frames)


def validate_images(frames: Sequence[int], strengths: Sequence[float], num_frames: int) -> None:
    """Raises ConfigurationError where conditioning images do not fit a video of ``num_frames``.

    ``frames`` are the pixel frames that the images are put at, counted from 0.
    """
    for i, (frame, strength) in enumerate(zip(frames, strengths, strict=True)):
        if not 0 <= frame < num_frames:
            raise ConfigurationError(
                f"image {i} is put at frame {frame} of {num_frames}: frames count from 0, so give 0 to {num_frames - 1}"
            )
        if not 0 <= strength <= 1:
            raise ConfigurationError(f"image {i} has strength={strength}: give 0 (no hold) to 1 (kept as it is)")
        earlier = frames.index(frame)
        if earlier < i:
            raise ConfigurationError(
                f"images {earlier} and {i} are both put at frame {frame}: a frame takes one image, so move or drop one"
            )


def too_short(path: str | Path, found: int, num_frames: int) -> ConfigurationError:
    """The error for a clip of ``found`` frames, fewer than the ``num_frames`` of the request."""
    fits = f" or set request.num_frames to {(found - 1) // 8 * 8 + 1} or less" if found else ""
    return ConfigurationError(
        f"{path} has {found} frames and the request num_frames={num_frames}: the clip must be as long, so give a "
        f"longer one{fits}"
    )


@contextlib.contextmanager
def open_image(path: str | Path) -> Iterator[Any]:
    """The PIL image at ``path``, its header read; raises ConfigurationError also for pixels that cannot be read.

    Pillow, since a photo's orientation (EXIF) and colour profile are beyond PyAV.
    """
    from PIL import Image

    try:
        with Image.open(path) as image:
            if image.mode.startswith(("I", "F")):
                # Pillow would cut these off at 255: nearly all white.
                raise ConfigurationError(f"{path} is greyscale of more than 8 bits; save it as 8-bit or as RGB")
            yield image
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:  # SyntaxError: a broken PNG chunk
        raise ConfigurationError(f"{path} cannot be read as an image ({_reason(error)}); {_IMAGE_FORMATS}") from error


@contextlib.contextmanager
def open_media(path: str | Path) -> Iterator[Any]:
    """The PyAV container at ``path``; raises ConfigurationError also for packets that cannot be decoded."""
    import av

    try:
        with av.open(str(path)) as container:
            yield container
    except av.FFmpegError as error:
        raise ConfigurationError(
            f"{path} cannot be read ({_reason(error)}); give a whole video or audio file"
        ) from error


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def find_video(path: str | Path, container: Any) -> Any:
    """The first video stream that is no cover picture."""
    from av.stream import Disposition

    for stream in container.streams.video:
        if not stream.disposition & Disposition.attached_pic:
            return stream
    raise ConfigurationError(f"{path} has no video; give a video file such as an mp4")
