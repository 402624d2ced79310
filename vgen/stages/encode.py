"""Images, clips and sound to latents."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from vgen import media_in, media_probe
from vgen.models.ltx2.audio_encoder import AudioEncoder, fit_latents
from vgen.models.ltx2.geometry import Geometry
from vgen.models.ltx2.mel import log_mel
from vgen.requests import Request
from vgen.stages.condition import EncodedImage
from vgen.stages.decode import Sound
from vgen.stages.latents import pack_audio, pack_video
from vgen.typed import ConfigurationError

notice = logging.getLogger("vgen.notice")

USUAL_SAMPLE_RATE = 48000


EncodeVideo = Callable[[Tensor], Tensor]
"""Frames ``[1, 3, F, H, W]`` in [-1, 1] to latents ``[1, C, f, h, w]``."""


@dataclass(frozen=True)
class Encoders:
    video: EncodeVideo
    audio: AudioEncoder


def encode_images(
    encoder: EncodeVideo, request: Request, device: torch.device, dtype: torch.dtype
) -> tuple[EncodedImage, ...]:
    """The request's images in their order, each encoded as a clip of one frame."""
    encoded = []
    for image in request.images:
        pixels = media_in.load_image(Path(image.path), request.height, request.width, request.image_crf)
        encoded.append(EncodedImage(_encode(encoder, pixels, device, dtype), image.frame, image.strength))
    return tuple(encoded)


def encode_clip(encoder: EncodeVideo, request: Request, device: torch.device, dtype: torch.dtype) -> Tensor | None:
    """``request.video`` as latents in token layout, ``[1, F*H*W, C]``; None without one.

    Encoded whole, which is exact. (The official code encodes in tiles of 768 pixels and 80 frames.)
    """
    if request.video is None:
        return None
    pixels = media_in.load_video(Path(request.video), request.num_frames, request.height, request.width, request.fps)
    return pack_video(_encode(encoder, pixels, device, dtype))


def _encode(encoder: EncodeVideo, pixels: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    with torch.no_grad():
        latents = encoder(pixels.to(device))
    return latents.to(dtype)


AAC_SAMPLE_RATES = (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000, 64000, 88200, 96000)


def kept_sound(request: Request) -> Sound | None:
    """The sound that ``request.audio=copy`` puts into the file, at its own rate where AAC has that one.

    Raises:
        ConfigurationError: see ``load_sound``.
    """
    if request.audio != "copy" or request.sound_source is None:
        return None
    info = media_probe.probe_audio(Path(request.sound_source))
    if info is None or info.sample_rate in AAC_SAMPLE_RATES:
        return load_sound(request)
    notice.warning(
        "%s has %d samples per second, which AAC does not: it is resampled to %d",
        request.sound_source,
        info.sample_rate,
        USUAL_SAMPLE_RATE,
    )
    return load_sound(request, USUAL_SAMPLE_RATE)


def load_sound(request: Request, sample_rate: int | None = None) -> Sound | None:
    """The request's sound (None without one), as long as the video: the rest is cut off, what is missing is silent.

    ``sample_rate`` None keeps the file's own. (The official code fills with zero latents, which are no silence.)
    """
    if request.sound_source is None:
        return None
    seconds = request.num_frames / request.fps
    loaded = media_in.load_audio(Path(request.sound_source), seconds, sample_rate)
    if loaded is None:
        raise ConfigurationError(
            f"{request.sound_source} has no sound; use request.sound=<file with sound> or request.audio=none"
        )
    waveform, rate = loaded
    return Sound(F.pad(waveform, (0, round(seconds * rate) - waveform.shape[1])), rate)


def encode_sound(
    encoder: AudioEncoder, request: Request, geometry: Geometry, device: torch.device, dtype: torch.dtype
) -> Tensor | None:
    """The request's sound as latents in token layout, ``[1, T, C*M]``; None without one."""
    config = encoder.config
    sound = load_sound(request, config.sample_rate)
    if sound is None:
        return None
    # A spectrogram reflects its ends, for which the sound of a single frame can be too short.
    shortest = config.n_fft // 2 + 1
    waveform = F.pad(sound.waveform, (0, max(0, shortest - sound.waveform.shape[1])))
    with torch.no_grad():
        latents = encoder(log_mel(waveform[None].to(device), config)).to(dtype)
    return pack_audio(fit_latents(latents, geometry.audio_tokens))
