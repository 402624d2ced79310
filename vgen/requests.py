"""The videos one job is asked for: one from the command line, or one for each line of a prompts file."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vgen import typed
from vgen.config import ImageConfig, RequestConfig
from vgen.typed import ConfigurationError


@dataclass(frozen=True)
class Request:
    """One video. ``index`` names its files, whichever rank makes it; all paths are absolute."""

    index: int
    prompt: str
    negative_prompt: str
    images: tuple[ImageConfig, ...]
    image_crf: int
    video: str | None
    noise_level: float
    audio: Literal["generate", "copy", "none"]
    sound: str | None
    seed: int
    height: int
    width: int
    num_frames: int
    fps: float

    @property
    def has_audio(self) -> bool:
        """Whether the model sees an audio stream and the file gets a sound."""
        return self.audio != "none"

    @property
    def sound_source(self) -> str | None:
        """The file whose sound is kept or started from, if any."""
        return (self.sound or self.video) if self.has_audio else None


_OVERRIDABLE = tuple(field.name for field in dataclasses.fields(RequestConfig) if field.name != "prompts_file")


def build_requests(config: RequestConfig) -> tuple[Request, ...]:
    """The requests of a job, in file order.

    Raises:
        ConfigurationError: the prompts file is missing, empty, or has a line that does not fit.
    """
    base = {name: getattr(config, name) for name in _OVERRIDABLE}
    if config.prompts_file is None:
        return (_request(0, base),)
    path = Path(config.prompts_file)
    try:
        # Only line feeds separate prompts: str.splitlines() would also cut at characters that a prompt may hold.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"request.prompts_file={config.prompts_file} cannot be read ({error}); give a UTF-8 text or JSONL file"
        ) from None
    overrides = [
        _parse_line(path, number, line.rstrip("\r")) for number, line in enumerate(lines, start=1) if line.strip()
    ]
    if not overrides:
        raise ConfigurationError(f"request.prompts_file={config.prompts_file} has no prompt; give one per line")
    return tuple(_request(index, {**base, **override}) for index, override in enumerate(overrides))


def _request(index: int, values: Mapping[str, Any]) -> Request:
    plain = {**values, "images": [dataclasses.asdict(image) if isinstance(image, ImageConfig) else image
                                  for image in values["images"]]}  # fmt: skip
    config: RequestConfig = typed.build(RequestConfig, {**plain, "prompts_file": None}, path="request")
    images = tuple(dataclasses.replace(image, path=_absolute(image.path)) for image in config.images)
    if config.image is not None:
        images = (ImageConfig(path=_absolute(config.image)), *images)
    fields = {name: getattr(config, name) for name in _OVERRIDABLE if name != "image"}
    fields |= {name: None if fields[name] is None else _absolute(fields[name]) for name in ("video", "sound")}
    return Request(index=index, **{**fields, "images": images})


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def from_mapping(data: Mapping[str, Any]) -> Request:
    """The request that ``dataclasses.asdict`` took apart, as it comes back from JSON."""
    request: Request = typed.build(Request, data)
    return request


def _parse_line(path: Path, number: int, line: str) -> Mapping[str, Any]:
    if path.suffix not in (".jsonl", ".ndjson"):
        return {"prompt": line}
    where = f"request.prompts_file={path} line {number}"
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigurationError(f'{where} is not JSON ({error}); write {{"prompt": "…"}}') from None
    if not isinstance(entry, dict) or "prompt" not in entry:
        raise ConfigurationError(f'{where} has no prompt; write {{"prompt": "…"}}')
    unknown = [key for key in entry if key not in _OVERRIDABLE]
    if unknown:
        raise ConfigurationError(f"{where} sets '{unknown[0]}'; a line may set: {', '.join(_OVERRIDABLE)}")
    return entry
