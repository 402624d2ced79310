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
        starts_from_it = self.audio == "generate" and self.video is not None and self.noise_level < 1
        return (self.sound or self.video) if self.audio == "copy" or starts_from_it else None


_OVERRIDABLE = tuple(field.name for field in dataclasses.fields(RequestConfig) if field.name != "prompts_file")


def build_requests(config: RequestConfig) -> tuple[Request, ...]:
    """The requests of a job, in file order.

    Raises:
        ConfigurationError: the prompts file is missing, empty, or has a line that does not fit.
    """
    base = {name: getattr(config, name) for name in _OVERRIDABLE}
    base["images"] = [dataclasses.asdict(image) for image in config.images]
    if config.prompts_file is None:
        return (_request(0, base),)
    path = Path(_absolute(config.prompts_file))
    try:
        # Only line feeds separate prompts: str.splitlines() would also cut at characters that a prompt may hold.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"request.prompts_file={config.prompts_file} cannot be read ({error}); give a UTF-8 text or JSONL file"
        ) from None
    filled = [(number, line.rstrip("\r")) for number, line in enumerate(lines, start=1) if line.strip()]
    if not filled:
        raise ConfigurationError(f"request.prompts_file={config.prompts_file} has no prompt; give one per line")
    is_json = path.suffix in (".jsonl", ".ndjson")
    requests = []
    for index, (number, line) in enumerate(filled):
        try:
            requests.append(_request(index, {**base, **(_parse_line(line) if is_json else {"prompt": line})}))
        except ConfigurationError as error:
            raise ConfigurationError(f"request.prompts_file={config.prompts_file} line {number}: {error}") from None
    return tuple(requests)


def _request(index: int, values: Mapping[str, Any]) -> Request:
    config: RequestConfig = typed.build(RequestConfig, {**values, "prompts_file": None}, path="request")
    images = tuple(dataclasses.replace(image, path=_absolute(image.path)) for image in config.images)
    if config.image is not None:
        images = (ImageConfig(path=_absolute(config.image)), *images)
    fields = {name: getattr(config, name) for name in _OVERRIDABLE if name != "image"}
    fields |= {name: None if fields[name] is None else _absolute(fields[name]) for name in ("video", "sound")}
    return Request(index=index, **{**fields, "images": images})


def _absolute(path: str) -> str:
    try:
        return str(Path(path).expanduser().absolute())
    except RuntimeError:  # "~name" of no user is a name like any other
        return str(Path(path).absolute())


def from_mapping(data: Mapping[str, Any]) -> Request:
    """The request that ``dataclasses.asdict`` took apart, as it comes back from JSON."""
    request: Request = typed.build(Request, data)
    return request


def _parse_line(line: str) -> Mapping[str, Any]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f'the line is not JSON ({error}); write {{"prompt": "…"}}') from None
    if not isinstance(entry, dict) or "prompt" not in entry:
        raise ConfigurationError('the line has no prompt; write {"prompt": "…"}')
    unknown = [key for key in entry if key not in _OVERRIDABLE]
    if unknown:
        raise ConfigurationError(f"the line sets '{unknown[0]}'; it may set: {', '.join(_OVERRIDABLE)}")
    return entry
