"""Images, clips and sound of a request as tensors: decoded, fitted to its size, scaled to [-1, 1].

h, w are the file's height and width, H, W the request's; F frames.
Source: Lightricks/LTX-2 at 400fd31, ``ltx_pipelines/utils/media_io/decode.py`` and ``resize.py``; sound is resampled
by FFmpeg here, by torchaudio there.
"""

import io
import itertools
import logging
import math
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vgen.media_probe import find_video, open_image, open_media, too_short, validate_video

log = logging.getLogger(__name__)

# veryfast is the official preset. x264 chooses differently with the CPU and its cores; the official code lets it, here
# every rank and machine sees one picture.
_X264 = {"preset": "veryfast", "x264-params": "cpu-independent=1"}
_X264_THREADS = 1


def load_image(path: str | Path, height: int, width: int, crf: int) -> Tensor:
    """The image at ``path`` as a clip of one frame, float32 ``[1, 3, 1, H, W]``.

    Re-compressed as one frame of H.264 at ``crf`` before it is fitted, since the models were trained on compressed
    frames (LTX-2 2.0 and 2.3: 33); 0 leaves it as it is. Transparency is dropped, the colour below it shows.

    Raises:
        ConfigurationError: not an image that can be read.
    """
    pixels = _decode_image(path)
    if crf != 0 and min(pixels.shape[:2]) >= 2:
        pixels = _compress(pixels, crf)
    return _fit(pixels, height, width)[None, :, None]


def load_video(path: str | Path, num_frames: int, height: int, width: int, fps: float) -> Tensor:
    """The first ``num_frames`` frames of ``path``, in order whatever their times, float32 ``[1, 3, F, H, W]``.

    Raises:
        ConfigurationError: unreadable, without video, too short, or of another frame rate.
    """
    validate_video(path, num_frames, fps)
    frames = torch.empty(1, 3, num_frames, height, width)
    found = 0
    with open_media(path) as container:
        stream = find_video(path, container)
        stream.thread_type = "AUTO"
        for frame in itertools.islice(container.decode(stream), num_frames):
            frames[0, :, found] = _fit(_upright(frame), height, width)
            found += 1
    if found < num_frames:
        raise too_short(path, found, num_frames)
    return frames


def load_audio(path: str | Path, seconds: float, sample_rate: int | None = None) -> tuple[Tensor, int] | None:
    """The first ``seconds`` of sound, float32 ``[2, samples]``, and its sample rate in Hz; None for a file without.

    ``sample_rate`` None keeps the file's own. Shorter sound stays shorter. Mono is doubled; more than two channels are
    mixed down, which may pass 1. Sound that starts after the file's other streams is preceded by silence.

    Raises:
        ConfigurationError: the file cannot be read.
    """
    with open_media(path) as container:
        if not container.streams.audio:
            return None
        stream = container.streams.audio[0]
        rate = sample_rate or stream.rate
        blocks = _decode_audio(container, stream, rate, num_samples=round(seconds * rate))
    if not blocks:
        return None
    waveform = torch.from_numpy(np.concatenate(blocks, axis=1))[:, : round(seconds * rate)]
    return waveform.expand(2, -1).contiguous(), rate


def _decode_image(path: str | Path) -> np.ndarray:
    """Upright sRGB, uint8 ``[h, w, 3]``.

    The official code turns an image by its EXIF orientation but does not mirror it back; here it is as viewers show it.
    """
    from PIL import ImageOps

    with open_image(path) as source:
        profile = source.info.get("icc_profile")
        image = ImageOps.exif_transpose(source)
        opaque = {"RGBA": "RGB", "LA": "L"}.get(image.mode)
        image = image.convert(opaque) if opaque else image
        if profile:
            image = _to_srgb(path, image, profile)
        return np.array(image.convert("RGB"), dtype=np.uint8)


def _to_srgb(path: str | Path, image: Any, profile: bytes) -> Any:
    from PIL import ImageCms

    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        return ImageCms.profileToProfile(image, source, ImageCms.createProfile("sRGB"), outputMode="RGB")
    except (ImageCms.PyCMSError, OSError, ValueError) as error:
        log.warning("%s: its colour profile cannot be used (%s); its values are taken as sRGB", path, error)
        return image


def _compress(pixels: np.ndarray, crf: int) -> np.ndarray:
    """``pixels`` ``[h, w, 3]``, cropped to even sizes, as one frame of H.264 shows them."""
    height, width = (size // 2 * 2 for size in pixels.shape[:2])
    even = np.ascontiguousarray(pixels[:height, :width])
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream: Any = container.add_stream("libx264", rate=1, options={"crf": str(crf), **_X264})
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        stream.codec_context.thread_count = _X264_THREADS
        container.mux(stream.encode(av.VideoFrame.from_ndarray(even, format="rgb24").reformat(format="yuv420p")))
        container.mux(stream.encode())
    file.seek(0)
    with av.open(file) as container:
        return next(container.decode(video=0)).to_ndarray(format="rgb24")


def _upright(frame: Any) -> np.ndarray:
    """uint8 ``[h, w, 3]``, turned as the file says; the official code leaves a phone's portrait clip on its side."""
    return np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90)).copy()


def _fit(pixels: np.ndarray, height: int, width: int) -> Tensor:
    """uint8 ``[h, w, 3]`` scaled until it covers the size and cropped around its center, float32 ``[3, H, W]``."""
    source_height, source_width = pixels.shape[:2]
    scale = max(height / source_height, width / source_width)
    size = (math.ceil(source_height * scale), math.ceil(source_width * scale))
    image = torch.from_numpy(pixels).permute(2, 0, 1)[None].float()
    # Bilinear without a low-pass filter, also when it shrinks: as in training.
    image = F.interpolate(image, size=size, mode="bilinear", align_corners=False)[0]
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    return image[:, top : top + height, left : left + width] / 127.5 - 1.0


def _decode_audio(container: Any, stream: Any, rate: int, num_samples: int) -> list[np.ndarray]:
    """Blocks of float32 ``[1 or 2, samples]``, at least ``num_samples`` together unless the sound ends before."""
    # FFmpeg spreads one channel over two at 0.7 of its loudness, so mono stays mono here.
    resampler = av.AudioResampler("fltp", "mono" if stream.channels == 1 else "stereo", rate)
    blocks: list[np.ndarray] = []
    produced = 0
    for frame in itertools.chain(container.decode(stream), [None]):
        for block in resampler.resample(frame):
            samples = block.to_ndarray()
            if not blocks:
                silence = np.zeros((len(samples), round(_delay(container, frame) * rate)), samples.dtype)
                blocks.append(silence)
                produced += silence.shape[1]
            blocks.append(samples)
            produced += samples.shape[1]
        if produced >= num_samples:
            break
    return blocks


def _delay(container: Any, first: Any) -> float:
    """Seconds from the file's start to its first frame of sound."""
    if first is None or first.time is None or container.start_time is None:
        return 0.0
    return max(0.0, first.time - container.start_time / av.time_base)
