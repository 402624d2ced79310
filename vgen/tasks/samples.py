"""One request's files: latents, mp4, frames, and the row of the record that describes them."""

import collections
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vgen import media, record
from vgen.config import OutputConfig
from vgen.progress import Bar, progress
from vgen.requests import Request
from vgen.stages.decode import Sound


class SampleWriter:
    """The sink of one request; ``row`` is its entry in ``record.json``'s ``outputs``, complete after ``write``."""

    def __init__(self, request: Request, out_dir: Path, output: OutputConfig) -> None:
        self._request = request
        self._out_dir = out_dir
        self._output = output
        self._row: dict[str, Any] | None = None
        self.fallbacks: list[str] = []
        """Ways of decoding that were come to since memory ran out."""

    def save_latents(self, video: Tensor, audio: Tensor | None) -> None:
        """Always written before decode, so that a run that dies there can be finished by ``task=decode``."""
        metadata = {"request": json.dumps(dataclasses.asdict(self._request))}
        media.save_latents(self._path("latents", "safetensors"), video, audio, metadata)

    def write(self, frames: Iterator[Tensor], sound: Sound | None) -> None:
        """Encode frames as they come; keep what ``output.save`` names; read the mp4 back.

        Raises:
            OutputError: disk, constant video, or a file that is not what was asked for.
        """
        with progress("decode, write", self._request.num_frames, unit="frames") as bar:
            self._write(frames, sound, bar)

    def _write(self, frames: Iterator[Tensor], sound: Sound | None, bar: Bar) -> None:
        check = media.FrameCheck()
        kept: list[Tensor] = []
        groups = self._to_host(frames, check, kept, bar)
        path, fields = self._path("latents", "safetensors"), self._asked_for(sound)
        if "mp4" in self._output.save:
            path, fields = self._path("sample", "mp4"), self._write_mp4(groups, sound)
        else:
            collections.deque(groups, maxlen=0)
        if "frames" in self._output.save:
            media.save_frames(self._path("frames", "safetensors"), torch.cat(kept))
            path = path if "mp4" in self._output.save else self._path("frames", "safetensors")
        check.finish()
        if "latents" not in self._output.save:
            self._path("latents", "safetensors").unlink()
        request = self._request
        self._row = record.output_entry(
            path.name, seed=request.seed, prompt=request.prompt, sha256=media.sha256_file(path), **fields
        )

    def note_fallback(self, name: str) -> None:
        self.fallbacks.append(name)

    def row(self) -> dict[str, Any]:
        assert self._row is not None
        return self._row

    def _to_host(
        self, frames: Iterator[Tensor], check: media.FrameCheck, kept: list[Tensor], bar: Bar
    ) -> Iterator[Tensor]:
        for group in frames:
            pixels = media.to_uint8(group)
            check.update(pixels)
            host = pixels.cpu()
            if "frames" in self._output.save:
                kept.append(host)
            yield host
            bar.advance(len(host))

    def _write_mp4(self, groups: Iterator[Tensor], sound: Sound | None) -> dict[str, Any]:
        path, request = self._path("sample", "mp4"), self._request
        codec = media.CodecSettings(
            crf=self._output.video_crf, preset=self._output.video_preset, audio_bitrate=self._output.audio_bitrate
        )
        audio = None if sound is None else (sound.waveform, sound.sample_rate)
        media.write_mp4(path, groups, fps=request.fps, audio=audio, codec=codec)
        info = media.read_mp4(path)
        asked_for = self._asked_for(sound)
        del asked_for["audio_seconds"]  # compared with the video's length instead
        media.check_mp4(info, asked_for)
        return info.output_fields()

    def _asked_for(self, sound: Sound | None) -> dict[str, Any]:
        request = self._request
        return {
            "num_frames": request.num_frames,
            "height": request.height,
            "width": request.width,
            "fps": request.fps,
            "has_audio": sound is not None,
            "audio_seconds": 0.0 if sound is None else sound.waveform.shape[-1] / sound.sample_rate,
        }

    def _path(self, kind: str, suffix: str) -> Path:
        return self._out_dir / f"{kind}_{self._request.index}.{suffix}"


class NullSink:
    """Decodes and drops: for warm-up."""

    def save_latents(self, video: Tensor, audio: Tensor | None) -> None:
        """Keeps nothing."""

    def write(self, frames: Iterator[Tensor], sound: Sound | None) -> None:  # noqa: ARG002
        for _ in frames:
            pass

    def note_fallback(self, name: str) -> None:
        """Nobody asks."""
