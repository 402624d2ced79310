"""The videos one job is asked for: one from the command line, or one for each line of a prompts file."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vgen import typed
from vgen.config import RequestConfig
from vgen.typed import ConfigurationError


@dataclass(frozen=True)
class Request:
    """One video. ``index`` names its files, whichever rank makes it."""

    index: int
    prompt: str
    negative_prompt: str
    seed: int
    height: int
    width: int
    num_frames: int
    fps: float
    audio: bool


_OVERRIDABLE = tuple(field.name for field in dataclasses.fields(Request) if field.name != "index")


def build_requests(config: RequestConfig) -> tuple[Request, ...]:
    """The requests of a job, in file order.

    Raises:
        ConfigurationError: the prompts file is missing, empty, or has a line that does not fit.
    """
    base = {name: getattr(config, name) for name in _OVERRIDABLE}
    if config.prompts_file is None:
        return (Request(index=0, **base),)
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
    return tuple(typed.build(Request, {"index": i, **base, **override}) for i, override in enumerate(overrides))


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
