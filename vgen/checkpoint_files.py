"""Finds a checkpoint's files, on this machine or on the hub, down to each tensor's place in them; needs no torch.

``vgen://<path>`` is a file or folder of ``weights`` in this package, so that its name is the same on every machine.

Only safetensors files are read, and of those only the header here: 8 bytes of length (little endian), that many bytes
of JSON (``{name: {dtype, shape, data_offsets}, "__metadata__": {str: str}}``), then the tensors without gaps.
"""

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from vgen.checkpoint_kinds import (
    DIFFUSERS_TRANSFORMERS,
    FULL_MODEL,
    TRANSFORMER_PREFIX,
    Kind,
    incomplete,
    kind_of_file,
    kind_of_folder,
    quantization,
    recognise,
)
from vgen.models.ltx2.config import Version
from vgen.models.ltx2.config_diffusers import diffusers_version
from vgen.models.ltx2.config_official import official_version

LTX2_FOLDERS = ("transformer", "connectors", "vae", "audio_vae", "vocoder")
"""Folders of a diffusers LTX-2 checkpoint that are read; its text encoder is resolved on its own."""

UPSAMPLER_FOLDER = "latent_upsampler"

PACKAGED = "vgen://"
WEIGHTS = Path(str(resources.files("vgen"))) / "weights"

_DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
    "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
_PICKLE_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".pkl")
_PICKLE_STARTS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_MAX_HEADER_BYTES = 100_000_000
"""Limit of the safetensors library itself; a larger number means that the file is something else."""

_HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:/(?P<file>.+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


_Found = TypeVar("_Found")


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged, of another kind, or does not fit the module; the message says which."""


@dataclass(frozen=True)
class TensorInfo:
    """One tensor in a file: safetensors' name of its dtype, its shape and its bytes ``[start, end)`` in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Header:
    path: Path
    metadata: Mapping[str, str]
    tensors: Mapping[str, TensorInfo]


@dataclass(frozen=True)
class Checkpoint:
    """The files of one diffusion checkpoint.

    ``id`` is the path or hub id as it was asked for; ``revision`` the commit on the hub, None for a local path;
    ``path`` the official file or the diffusers folder. ``kind`` is None where the files do not tell (see
    ``checkpoint_kinds``). ``config`` is the official file's ``config`` JSON, or ``{folder: config.json}``; ``headers``
    has the same folders as keys (an official file: the one key ``""``).
    """

    layout: Literal["official", "diffusers"]
    kind: Kind | None
    id: str
    revision: str | None
    path: Path
    config: dict[str, Any]
    headers: Mapping[str, tuple[Header, ...]] = field(repr=False)

    @property
    def version(self) -> Version:
        """``2.0`` or ``2.3``, by the switches of the architecture.

        Raises:
            ConfigError: the switches are of neither.
        """
        return (official_version if self.layout == "official" else diffusers_version)(self.config)

    def to_mapping(self) -> dict[str, Any]:
        """What another process needs to read the same files: JSON values, no headers."""
        return {"layout": self.layout, "id": self.id, "revision": self.revision, "path": str(self.path)}

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> "Checkpoint":
        """The inverse of ``to_mapping``: reads the headers again, asks no hub."""
        return _from_path(mapping["id"], mapping["revision"], Path(mapping["path"]), LTX2_FOLDERS)


@dataclass(frozen=True)
class UpsamplerFiles:
    """A latent upsampler: an official file of its own, or a diffusers folder with ``config.json`` and weights."""

    layout: Literal["official", "diffusers"]
    id: str
    revision: str | None
    path: Path
    config: dict[str, Any]
    headers: tuple[Header, ...] = field(repr=False)

    def to_mapping(self) -> dict[str, Any]:
        """What another process needs to read the same files: JSON values, no headers."""
        return {"id": self.id, "revision": self.revision, "path": str(self.path)}

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> "UpsamplerFiles":
        """The inverse of ``to_mapping``: reads the headers again, asks no hub."""
        return _upsampler(mapping["id"], mapping["revision"], Path(mapping["path"]))


@dataclass(frozen=True)
class TextEncoderFiles:
    """A text encoder: the folder with its ``config.json`` and weights, and the folder with its ``tokenizer.json``."""

    id: str
    revision: str | None
    folder: Path
    tokenizer_folder: Path
    config: dict[str, Any]
    headers: tuple[Header, ...] = field(repr=False)

    def to_mapping(self) -> dict[str, Any]:
        """What another process needs to read the same files: JSON values, no headers."""
        folders = {"folder": str(self.folder), "tokenizer_folder": str(self.tokenizer_folder)}
        return {"id": self.id, "revision": self.revision, **folders}

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """The inverse of ``to_mapping``: reads the headers again, asks no hub."""
        folder = Path(mapping["folder"])
        config, headers = _read_json(folder / "config.json"), _weight_headers(folder)
        return cls(mapping["id"], mapping["revision"], folder, Path(mapping["tokenizer_folder"]), config, headers)


def read_header(path: Path) -> Header:
    """Read and check the header of the safetensors file ``path``; no tensor is read.

    Raises:
        CheckpointError: the file is missing, a pickle, not safetensors, truncated, empty or inconsistent.
    """
    _refuse_pickle(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= _MAX_HEADER_BYTES:
            raise CheckpointError(_not_safetensors(path))
        text = file.read(length)
    if not text.startswith(b"{"):
        raise CheckpointError(_not_safetensors(path))
    if len(text) < length:
        raise CheckpointError(_truncated(path, 8 + length, size))
    try:
        content = json.loads(text)
        metadata = content.pop("__metadata__", {})
        tensors = {name: _tensor_info(entry, 8 + length) for name, entry in content.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} has a damaged safetensors header ({error!r}); download it again") from error
    _check_layout(path, tensors, 8 + length, size)
    return Header(path, metadata, tensors)


def _refuse_pickle(path: Path) -> None:
    if not path.is_file():
        raise CheckpointError(f"there is no file {path}; check the path")
    with path.open("rb") as file:
        start = file.read(64)
    if path.suffix in _PICKLE_SUFFIXES or start.startswith(_PICKLE_STARTS):
        raise CheckpointError(
            f"{path} is a pickle file, which can run any code when it is read; use the .safetensors file of the model"
        )
    if start.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{path} is a Git LFS pointer, not the file itself; fetch it with 'git lfs pull'")


def _not_safetensors(path: Path) -> str:
    return f"{path} is not a safetensors file (it does not start with a header length); use a .safetensors file"


def _truncated(path: Path, expected: int, size: int) -> str:
    return f"{path} is truncated: its header says {expected} bytes, the file has {size}; download it again"


def _tensor_info(entry: Mapping[str, Any], data_start: int) -> TensorInfo:
    start, end = entry["data_offsets"]
    return TensorInfo(str(entry["dtype"]), tuple(map(int, entry["shape"])), data_start + start, data_start + end)


def _check_layout(path: Path, tensors: Mapping[str, TensorInfo], data_start: int, size: int) -> None:
    if not tensors:
        raise CheckpointError(f"{path} holds no tensors; use a checkpoint with weights")
    position = data_start
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if info.dtype not in _DTYPE_BITS:
            raise CheckpointError(f"{path} has the unknown dtype {info.dtype} for '{name}'; update vgen or the file")
        num_bytes = math.prod(info.shape) * _DTYPE_BITS[info.dtype] // 8
        if info.start != position or info.end - info.start != num_bytes:
            raise CheckpointError(
                f"{path} has a damaged header: '{name}' ({info.dtype} {list(info.shape)}) should fill "
                f"[{position}, {position + num_bytes}) and claims [{info.start}, {info.end}); download it again"
            )
        position = info.end
    if size < position:
        raise CheckpointError(_truncated(path, position, size))
    if size > position:
        raise CheckpointError(f"{path} has {size - position} bytes after its last tensor; download it again")


def resolve(id_or_path: str, revision: str | None = None, folders: Sequence[str] = LTX2_FOLDERS) -> Checkpoint:
    """Find a diffusion checkpoint; on the hub, download what the cache lacks.

    Args:
        id_or_path: an official file, a folder with one, a diffusers folder (each also as ``vgen://<path>``), or a hub
            id: ``org/name`` (the diffusers folders of that repo) or ``org/name/file.safetensors`` (an official file
            in it).
        revision: branch, tag or commit on the hub; None is the main branch, or what is cached without network.
        folders: folders that a diffusers checkpoint must have.

    Raises:
        CheckpointError: nothing is there, or it is no usable checkpoint; one sentence with the fix.
    """
    path = _local_path(id_or_path)
    if path.exists():
        _no_local_revision(id_or_path, revision)
        return _from_path(id_or_path, None, path, folders)
    repo, file = _hub_id(id_or_path)
    if file is None:
        patterns = ["model_index.json", "scheduler/*.json", *_folder_patterns(folders)]
        return _from_snapshot(
            repo, revision, patterns, lambda path: _from_path(id_or_path, _commit(path), path, folders)
        )
    if not file.endswith(".safetensors"):
        raise CheckpointError(f"'{file}' of {repo} is not a safetensors file; give org/name/file.safetensors")
    path = _hub_file(repo, file, revision)
    return _from_path(id_or_path, _commit(path), path, folders)


def resolve_text_encoder(
    id_or_path: str | None, revision: str | None = None, checkpoint: Checkpoint | None = None
) -> TextEncoderFiles:
    """Find a text encoder (Gemma-3): a local folder or a hub id, alone or inside a diffusers checkpoint.

    Args:
        id_or_path: None takes the one inside ``checkpoint``, which must be a diffusers checkpoint then.
        revision: branch, tag or commit on the hub.

    Raises:
        CheckpointError: nothing is there, or it is no text encoder; one sentence with the fix.
    """
    if id_or_path is None:
        id_or_path, revision = _inside(checkpoint)
    path = _local_path(id_or_path)
    if path.exists():
        _no_local_revision(id_or_path, revision)
        return _text_encoder(id_or_path, None, path)
    repo, file = _hub_id(id_or_path)
    if file is not None:
        raise CheckpointError(f"the text encoder '{id_or_path}' names one file; give the repository: '{repo}'")
    # The root pattern starts with "model" because an official LTX-2 repo has other large files beside it.
    root = ["config.json", "tokenizer*.json", "special_tokens_map.json", "model*.safetensors", "model*.index.json"]
    patterns = [*root, *_folder_patterns(("text_encoder", "tokenizer"))]
    asked = id_or_path
    return _from_snapshot(repo, revision, patterns, lambda path: _text_encoder(asked, _commit(path), path))


def resolve_upsampler(id_or_path: str, revision: str | None = None) -> UpsamplerFiles:
    """Find a latent upsampler.

    Args:
        id_or_path: an official file, a diffusers folder (of the upsampler, or with one in ``latent_upsampler``), or a
            hub id: ``org/name`` (that folder) or ``org/name/file.safetensors``.
        revision: branch, tag or commit on the hub.

    Raises:
        CheckpointError: nothing is there, or it is no latent upsampler; one sentence with the fix.
    """
    path = _local_path(id_or_path)
    if path.exists():
        _no_local_revision(id_or_path, revision)
        return _upsampler(id_or_path, None, path)
    repo, file = _hub_id(id_or_path)
    if file is None:
        patterns = _folder_patterns((UPSAMPLER_FOLDER,))
        return _from_snapshot(repo, revision, patterns, lambda path: _upsampler(id_or_path, _commit(path), path))
    path = _hub_file(repo, file, revision)
    return _upsampler(id_or_path, _commit(path), path)


def _upsampler(id_or_path: str, revision: str | None, path: Path) -> UpsamplerFiles:
    if path.is_file():
        header = read_header(path)
        _refuse_other_upsampler(header)
        return UpsamplerFiles("official", id_or_path, revision, path, _json_config(header), (header,))
    folder = path / UPSAMPLER_FOLDER if (path / UPSAMPLER_FOLDER).is_dir() else path
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{path} holds no {UPSAMPLER_FOLDER}/config.json; give an upsampler's .safetensors file or diffusers folder"
        )
    headers = _weight_headers(folder)
    for header in headers:
        _refuse_other_upsampler(header)
    return UpsamplerFiles("diffusers", id_or_path, revision, folder, _read_json(folder / "config.json"), headers)


def _refuse_other_upsampler(header: Header) -> None:
    if "post_upsample_res_blocks.0.conv1.weight" not in header.tensors:
        found = recognise(header.tensors, header.metadata)
        ltx2 = any(name.startswith(TRANSFORMER_PREFIX) for name in header.tensors)
        what = f"is {found[0]}" if found else "is an LTX-2 model" if ltx2 else "holds no latent upsampler"
        raise CheckpointError(
            f"{header.path} {what}, and an upsampler is asked for; "
            f"use a file like ltx-2-spatial-upscaler-x2-1.0.safetensors"
        )
    _refuse_quantized(header)


def _inside(checkpoint: Checkpoint | None) -> tuple[str, str | None]:
    """Id and revision of the text encoder that a diffusers checkpoint brings along: its own."""
    if checkpoint is None or checkpoint.layout != "diffusers":
        raise CheckpointError(
            "no text encoder is given, and an official LTX-2 file has none inside; "
            "give a Gemma-3 folder or hub id (google/gemma-3-12b-it-qat-q4_0-unquantized)"
        )
    return checkpoint.id, checkpoint.revision


def _local_path(id_or_path: str) -> Path:
    """Where ``id_or_path`` is on this machine, if it is here; what begins with ``vgen://`` has to be."""
    if not id_or_path.startswith(PACKAGED):
        return Path(id_or_path).expanduser()
    path = Path(os.path.normpath(WEIGHTS / id_or_path.removeprefix(PACKAGED)))
    if WEIGHTS not in path.parents:
        raise CheckpointError(
            f"'{id_or_path}' is outside of vgen's own weights; give a path inside them, such as "
            f"{PACKAGED}ltx2_tiny/ltx-2-tiny.safetensors, or a path without {PACKAGED}"
        )
    if not path.exists():
        raise CheckpointError(
            f"'{id_or_path}' is not in this installation of vgen, which has no {path}; correct the name or install "
            f"vgen again"
        )
    return path


def _folder_patterns(folders: Sequence[str]) -> list[str]:
    return [f"{folder}/*{end}" for folder in folders for end in (".json", ".safetensors")]


def _no_local_revision(id_or_path: str, revision: str | None) -> None:
    if revision is not None:
        raise CheckpointError(f"revision '{revision}' does not apply to the local path '{id_or_path}'; leave it out")


def _from_path(id_or_path: str, revision: str | None, path: Path, folders: Sequence[str]) -> Checkpoint:
    if path.is_file():
        header = read_header(path)
        config = _official_config(header)
        kind = kind_of_file(path.name, config)
        return Checkpoint("official", kind, id_or_path, revision, path, config, {"": (header,)})
    if (path / "model_index.json").exists() or (path / "transformer" / "config.json").exists():
        return _diffusers(id_or_path, revision, path, folders)
    return _from_path(id_or_path, revision, _only_official_file(path), folders)


def _only_official_file(folder: Path) -> Path:
    candidates = sorted(folder.glob("*.safetensors"))
    official = [path for path in candidates if _is_official(read_header(path))]
    if len(official) == 1:
        return official[0]
    if len(official) > 1:
        names = ", ".join(path.name for path in official)
        raise CheckpointError(f"{folder} holds {len(official)} official files ({names}); name one of them")
    hint = ""
    if (folder / "config.json").exists() and "gemma" in str(_read_json(folder / "config.json").get("model_type")):
        hint = "; it is a Gemma text encoder, which has its own setting"
    raise CheckpointError(
        f"{folder} holds neither a diffusers checkpoint (model_index.json) nor an official .safetensors file{hint}"
    )


def _is_official(header: Header) -> bool:
    """With a config and nothing else that is known by name, such as a latent upsampler or a LoRA."""
    return "config" in header.metadata and recognise(header.tensors, header.metadata) is None


def _official_config(header: Header) -> dict[str, Any]:
    """The ``config`` JSON of an official file; other files are refused by what they are."""
    found = recognise(header.tensors, header.metadata)
    if found is not None:
        raise CheckpointError(f"{header.path} is {found[0]}; {found[1]}")
    _refuse_quantized(header)
    found = incomplete(header.tensors)
    if found is not None:
        raise CheckpointError(f"{header.path} holds {found[0]}; {found[1]}")
    config = _json_config(header)
    if "transformer" not in config:
        sections = ", ".join(sorted(config)) or "no sections"
        raise CheckpointError(f"{header.path} describes {sections} but no transformer; {FULL_MODEL}")
    return config


def _json_config(header: Header) -> dict[str, Any]:
    if "config" not in header.metadata:
        raise CheckpointError(
            f"{header.path} has no 'config' in its metadata; use an official LTX-2 file (ltx-2-19b-dev.safetensors)"
        )
    try:
        config = json.loads(header.metadata["config"])
    except ValueError as error:
        raise CheckpointError(
            f"{header.path} has a 'config' in its metadata that is no JSON; download it again"
        ) from error
    if not isinstance(config, dict):
        raise CheckpointError(
            f"{header.path} has a {type(config).__name__} as 'config' in its metadata, not an object; download it again"
        )
    return config


def _refuse_quantized(header: Header) -> None:
    found = quantization({name: info.dtype for name, info in header.tensors.items()})
    if found is not None:
        raise CheckpointError(
            f"{header.path} is {found}; this version loads bf16, fp16 and fp32 files only: use the bf16 file"
        )


def _diffusers(id_or_path: str, revision: str | None, path: Path, folders: Sequence[str]) -> Checkpoint:
    _refuse_other_pipeline(path)
    missing = [folder for folder in folders if not (path / folder / "config.json").is_file()]
    if missing:
        raise CheckpointError(
            f"the diffusers checkpoint {path} lacks {', '.join(f'{folder}/config.json' for folder in missing)}; "
            f"LTX-2 needs the folders {', '.join(folders)}: download it completely"
        )
    config = {folder: _read_json(path / folder / "config.json") for folder in folders}
    headers = {folder: _weight_headers(path / folder) for folder in folders}
    for folder_headers in headers.values():
        for header in folder_headers:
            _refuse_quantized(header)
    scheduler = path / "scheduler" / "scheduler_config.json"
    name = re.sub(r".*/", "", id_or_path.rstrip("/"))
    kind = kind_of_folder(name, _read_json(scheduler) if scheduler.is_file() else {})
    return Checkpoint("diffusers", kind, id_or_path, revision, path, config, headers)


def _refuse_other_pipeline(path: Path) -> None:
    """Refuse the diffusers folder of another model by the class of its transformer."""
    config = path / "transformer" / "config.json"
    name = _read_json(config).get("_class_name") if config.is_file() else None
    if name in DIFFUSERS_TRANSFORMERS:
        raise CheckpointError(
            f"the diffusers checkpoint {path} is of {DIFFUSERS_TRANSFORMERS[name]} ({name}); "
            f"use one of LTX-2 (Lightricks/LTX-2 or diffusers/LTX-2.3-Diffusers)"
        )


def _text_encoder(id_or_path: str, revision: str | None, path: Path) -> TextEncoderFiles:
    nested = (path / "text_encoder" / "config.json").is_file()
    folder = path / "text_encoder" if nested else path
    tokenizer = next((place for place in (folder, path / "tokenizer") if (place / "tokenizer.json").is_file()), None)
    if not (folder / "config.json").is_file() or tokenizer is None:
        lacking = "tokenizer.json" if (folder / "config.json").is_file() else "config.json"
        raise CheckpointError(
            f"the text encoder '{id_or_path}' lacks {lacking} in {folder}; give a Gemma-3 folder or hub id with "
            f"config.json, tokenizer.json and .safetensors files"
        )
    headers = _weight_headers(folder)
    for header in headers:
        _refuse_quantized(header)
    return TextEncoderFiles(id_or_path, revision, folder, tokenizer, _read_json(folder / "config.json"), headers)


def _weight_headers(folder: Path) -> tuple[Header, ...]:
    """Headers of one model folder's weights: the files of its index, else its only safetensors file."""
    indices = sorted(folder.glob("*.safetensors.index.json"))
    if indices:
        names = sorted(set(_read_json(indices[0])["weight_map"].values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise CheckpointError(
                f"{folder} lacks {len(missing)} of {len(names)} files of {indices[0].name}, first {missing[0]}; "
                f"download it completely"
            )
        return tuple(read_header(folder / name) for name in names)
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return (read_header(files[0]),)
    if files:
        raise CheckpointError(f"{folder} has {len(files)} safetensors files and no index; keep the one to load")
    for path in sorted(folder.iterdir()):
        if path.suffix in _PICKLE_SUFFIXES:
            _refuse_pickle(path)
    raise CheckpointError(f"{folder} has no .safetensors file; download it completely")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is no readable JSON ({error}); download it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not a JSON object; download it again")
    return content


def _hub_id(id_or_path: str) -> tuple[str, str | None]:
    match = _HUB_ID.fullmatch(id_or_path)
    if match is None or id_or_path.startswith((".", "~", "/")):
        raise CheckpointError(
            f"'{id_or_path}' is no file or folder on this machine and no hub id (org/name or "
            f"org/name/file.safetensors); check the path"
        )
    return match["repo"], match["file"]


def _hub_file(repo: str, file: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repo, file, revision=revision))
    except Exception as error:
        raise _hub_error(f"{repo}/{file}", repo, revision, error) from error


def _from_snapshot(repo: str, revision: str | None, patterns: Sequence[str], read: Callable[[Path], _Found]) -> _Found:
    """``read`` the repository's files in the cache, downloading what it lacks."""
    if revision is not None and _COMMIT.fullmatch(revision):
        # A commit never changes, so what is complete in the cache needs no network; the client would ask all the same,
        # and without network wait for 23 s.
        try:
            return read(_snapshot(repo, revision, patterns, cached=True))
        except CheckpointError:
            pass
    return read(_snapshot(repo, revision, patterns))


def _snapshot(repo: str, revision: str | None, patterns: Sequence[str], cached: bool = False) -> Path:
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(repo, revision=revision, allow_patterns=list(patterns), local_files_only=cached)
    except Exception as error:
        raise _hub_error(repo, repo, revision, error) from error
    return Path(found)


def _hub_error(id_: str, repo: str, revision: str | None, error: Exception) -> CheckpointError:
    """One sentence for whatever the hub client raised; which exceptions escape differs between its versions."""
    from huggingface_hub import errors

    at = f" at revision '{revision}'" if revision else ""
    if isinstance(error, errors.GatedRepoError):
        why = f"its licence is not accepted: accept it on https://huggingface.co/{repo} and log in with 'hf auth login'"
    elif isinstance(error, errors.RepositoryNotFoundError):
        why = "the hub has no such repository, or it is private: check the name, or log in with 'hf auth login'"
    elif isinstance(error, errors.RevisionNotFoundError):
        why = "the hub has no such revision of it: use a branch, a tag or a full commit hash"
    elif isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        why = "the hub is out of reach (or HF_HUB_OFFLINE is set) and the cache lacks it: go online, or give a path"
    elif isinstance(error, errors.EntryNotFoundError):
        why = "the repository has no such file: check its name"
    else:
        first_line = str(error).strip().partition("\n")[0]
        why = f"the hub client failed ({type(error).__name__}: {first_line}): try again, or give a local path"
    return CheckpointError(f"'{id_}'{at} is not on this machine and cannot be fetched; {why}")


def _commit(path: Path) -> str | None:
    """The commit hash in a path of the hub's cache, ``…/snapshots/<commit>/…``."""
    for folder, commit in zip(path.parts, path.parts[1:], strict=False):
        if folder == "snapshots" and _COMMIT.fullmatch(commit):
            return commit
    return None
