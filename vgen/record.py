"""The record of one job, and the whole-or-nothing way in which every file of a job's folder is written.

Torch-free: the Hydra parent, the supervisor and the ranks all write records. `record.json` has the same keys whatever
happened; what a job did not do or does not know is null. It is first written as failed and interrupted, and replaced
when the job ends: so also a job that was killed with no time to speak leaves a true record.
"""

import contextlib
import dataclasses
import errno
import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

SCHEMA = 1
STATUSES = ("ok", "failed", "skipped")
STAGES = (
    "load",
    "compile",
    "capture",
    "warmup",
    "text_encode",
    "encode_video",
    "encode_audio",
    "denoise",
    "upsample",
    "decode_video",
    "decode_audio",
    "write",
    "total",
)
# What says where results go or how a job is started, and nothing about what is computed.
_NOT_IN_CELL = frozenset({"output", "logger", "debug", "launcher", "hydra"})


class OutputError(OSError):
    """Something that leaves a run is wrong or could not be written; the message is one sentence with the fix."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence)
        self.strerror = sentence


# ---------------------------------------------------------------- keys


def _active_template() -> dict[str, Any]:
    parallel = "world_size data_size cfg_size ulysses_size vae_size vae_strategy vae_split vae_reason tiles"
    return {
        **dict.fromkeys([*parallel.split(), "attention", "compiled", "cuda_graphs", "graph_gib", "decode_fallbacks"]),
        "quant": dict.fromkeys(("mode", "layers", "bytes", "backend")),
        "vae_backend": None,
        "vae_dtype": None,
        "offload": None,
        "passes": None,
        "checkpoint": dict.fromkeys(("id", "revision", "kind", "version", "layout")),
        "weights": None,
    }


def _timings_template() -> dict[str, Any]:
    return {**dict.fromkeys(STAGES), "denoise_steps": None, "cold": None, "warm": None}


def _memory_template() -> dict[str, Any]:
    return dict.fromkeys(("per_rank", "per_stage"))


def environment_template() -> dict[str, Any]:
    """All keys of `environment`, holding null; `metrics.environment` fills it."""
    versions = "python torch cuda cudnn nccl transformers diffusers lightning hydra vgen"
    return {
        "versions": dict.fromkeys(versions.split()),
        "git": dict.fromkeys(("commit", "dirty")),
        "gpu": dict.fromkeys(("name", "count")),
        "driver": None,
        "clocks_mhz": dict.fromkeys(("sm", "sm_max", "memory")),
        "cpu": dict.fromkeys(("name", "cores")),
        "host_load": None,
    }


def _filled(name: str, template: dict[str, Any], given: Mapping[str, Any] | None) -> dict[str, Any]:
    """`template` with the values of `given` (nested alike); a key that the template lacks is a ValueError."""
    filled = dict(template)
    for key, value in (given or {}).items():
        if key not in template:
            raise ValueError(f"{name}.{key} is no key of a record: use one of {', '.join(template)}")
        nested = isinstance(template[key], dict) and isinstance(value, Mapping)
        filled[key] = _filled(f"{name}.{key}", template[key], value) if nested else value
    return filled


def error_entry(kind: str, message: str, rank: int | None = None, stage: str | None = None) -> dict[str, Any]:
    """The record's `error`: the kind (an exception's class name), its sentence, and where it happened."""
    return {"kind": kind, "message": message, "rank": rank, "stage": stage}


def output_entry(
    path: str,
    *,
    seed: int | None,
    prompt: str | None,
    sha256: str | None = None,
    num_frames: int | None = None,
    height: int | None = None,
    width: int | None = None,
    fps: float | None = None,
    has_audio: bool | None = None,
    audio_seconds: float | None = None,
) -> dict[str, Any]:
    """One entry of the record's `outputs`; `path` is relative to the job's folder, sizes are what was read back."""
    media = {"num_frames": num_frames, "height": height, "width": width, "fps": fps}
    sound = {"has_audio": has_audio, "audio_seconds": audio_seconds}
    return {"path": path, "sha256": sha256, **media, **sound, "seed": seed, "prompt": prompt}


def build_record(
    *,
    config: Mapping[str, Any],
    status: str = "failed",
    error: Mapping[str, Any] | None = None,
    active: Mapping[str, Any] | None = None,
    timings_s: Mapping[str, Any] | None = None,
    memory_gib: Mapping[str, Any] | None = None,
    outputs: Sequence[Mapping[str, Any]] = (),
    quality: Mapping[str, Any] | None = None,
    certificate: str | None = None,
    environment: Mapping[str, Any] | None = None,
    drift: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A record with every key of the schema; what is not given is null.

    `drift` is `{"skew_ms": {"steps": [...], "median": ..., "max": ...}}`, between the first and the last rank, and on
    GPUs `idle_share` and `launches` alike, of the first rank.
    `memory_gib` is `{"per_rank": [peak of each rank], "per_stage": {stage: peak over ranks}}`. Raises ValueError for
    a key that the schema does not know and for a status other than `ok`, `failed`, `skipped`.
    """
    if status not in STATUSES:
        raise ValueError(f"status={status!r} is no status of a record: use one of {', '.join(STATUSES)}")
    return {
        "schema": SCHEMA,
        "status": status,
        "error": dict(error) if error is not None else None,
        "task": _task_name(config),
        "config": dict(config),
        "cell": cell_hash(config),
        "active": _filled("active", _active_template(), active),
        "timings_s": _filled("timings_s", _timings_template(), timings_s),
        "memory_gib": _filled("memory_gib", _memory_template(), memory_gib),
        "outputs": [dict(entry) for entry in outputs],
        "quality": quality,
        "certificate": certificate,
        "environment": _filled("environment", environment_template(), environment),
        "drift": dict(drift) if drift is not None else None,
    }


def _task_name(config: Mapping[str, Any]) -> str | None:
    task = config.get("task")
    return task.get("name") if isinstance(task, Mapping) else None


def start_record(path: Path, *, config: Mapping[str, Any], **known: Any) -> None:
    """Write the record that holds if nothing more is ever written; `known` as in `build_record`."""
    message = "the job ended before it could say why: it was killed or lost its machine; the logs are in ranks/"
    interrupted = error_entry("Interrupted", message)
    write_json_atomic(path, build_record(config=config, status="failed", error=interrupted, **known))


def write_failed(path: Path, *, config: Mapping[str, Any], error: Mapping[str, Any], total_s: float) -> None:
    """Mark the job at `path` as failed, keeping what its record, if there is one, knows of it already."""
    try:
        earlier = read_record(path)
    except (OSError, ValueError):
        earlier = {}
    if earlier.get("cell") != cell_hash(config):  # left by another job in the same folder
        earlier = build_record(config=config)
    failed = {"status": "failed", "error": dict(error), "timings_s": earlier["timings_s"] | {"total": total_s}}
    write_json_atomic(path, earlier | failed)


def read_record(path: Path) -> dict[str, Any]:
    """The record at `path`; raises ValueError if it is no record of this schema."""
    record = json.loads(Path(path).read_text(encoding="utf-8"))
    found = record.get("schema") if isinstance(record, dict) else None
    if found != SCHEMA:
        raise ValueError(f"{path} has schema {found!r}: this version reads schema {SCHEMA}; make the record again")
    return record


def cell_hash(config: Mapping[str, Any]) -> str:
    """16 hex digits that name what is computed: the resolved config but for output, logger, debug and launcher.

    Paths (checkpoints, prompt files) count by name, not by content.
    """
    computed = {key: value for key, value in config.items() if key not in _NOT_IN_CELL}
    text = json.dumps(plain(computed), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# ---------------------------------------------------------------- whole or nothing


def plain(value: Any) -> Any:
    """`value` as JSON can hold it. A record is never lost to a value of an odd type: that one becomes its text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float | Fraction):
        return float(value) if math.isfinite(value) else None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain(dataclasses.asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value)


def _disk_error_sentence(path: Path, error: OSError) -> str:
    """What stopped the writing of `path`, the rule, and what to do."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = "its disk is full"
        with contextlib.suppress(OSError):
            free += f" ({shutil.disk_usage(path.parent).free / 2**20:.1f} MiB free)"
        return f"{path} could not be written whole, {free}: free some space or set hydra.run.dir to another disk"
    if error.errno == errno.EFBIG:
        return f"{path} could not be written whole, it passes the limit for one file: raise it (ulimit -f)"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{path} could not be written, its folder is not writable: set hydra.run.dir to one that is"
    reason = error.strerror or str(error)
    return f"{path} could not be written ({reason}): check its folder or set hydra.run.dir to another one"


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an error of the file system into one OutputError about `path`."""
    try:
        yield
    except OSError as error:
        if isinstance(error, OutputError):
            raise
        raise OutputError(_disk_error_sentence(Path(path), error)) from error


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Give a temporary name beside `path`; on success it is synced and renamed to `path`, on failure removed.

    An error while making, syncing or renaming it is an OutputError; what the body raises passes unchanged.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    with writing(path):
        temporary.write_bytes(b"")
    try:
        yield temporary
        with writing(path):
            # Some file systems find out only here that there was no room.
            with temporary.open("rb") as handle:
                os.fsync(handle.fileno())
            temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json_atomic(path: Path, value: Any) -> None:
    """Write `value` as JSON, whole or not at all; NaN and infinities become null. Raises OutputError."""
    text = json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False)
    with atomic_file(path) as temporary, writing(path):
        # Undecodable bytes of a command line are lone surrogates here; escaped they are valid JSON and come back equal.
        temporary.write_bytes((text + "\n").encode("utf-8", "backslashreplace"))
