"""Finds the files of an LTX-2 checkpoint, down to each tensor's place in them; needs no torch.

A checkpoint is an official file or a diffusers folder; its text encoder and its upsampler may lie elsewhere.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from vgen.checkpoint_headers import (
    CheckpointError,
    Header,
    read_header,
    read_json,
    refuse_quantized,
    weight_headers,
)
from vgen.checkpoint_kinds import (
    DIFFUSERS_TRANSFORMERS,
    FULL_MODEL,
    Kind,
    incomplete,
    kind_of_file,
    kind_of_folder,
    name_of,
    recognise,
)
from vgen.checkpoint_paths import (
    commit,
    folder_patterns,
    from_snapshot,
    hub_file,
    hub_id,
    local_path,
    no_local_revision,
)
from vgen.models.ltx2.config import Version
from vgen.models.ltx2.config_diffusers import diffusers_version
from vgen.models.ltx2.config_official import official_version

LTX2_FOLDERS = ("transformer", "connectors", "vae", "audio_vae", "vocoder")
"""Folders of a diffusers LTX-2 checkpoint that are read; its text encoder is resolved on its own."""

UPSAMPLER_FOLDER = "latent_upsampler"


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
        config, headers = read_json(folder / "config.json"), weight_headers(folder)
        return cls(mapping["id"], mapping["revision"], folder, Path(mapping["tokenizer_folder"]), config, headers)


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
    path = local_path(id_or_path)
    if path.exists():
        no_local_revision(id_or_path, revision)
        return _from_path(id_or_path, None, path, folders)
    repo, file = hub_id(id_or_path)
    if file is None:
        patterns = ["model_index.json", "scheduler/*.json", *folder_patterns(folders)]
        return from_snapshot(repo, revision, patterns, lambda path: _from_path(id_or_path, commit(path), path, folders))
    if not file.endswith(".safetensors"):
        raise CheckpointError(f"'{file}' of {repo} is not a safetensors file; give org/name/file.safetensors")
    path = hub_file(repo, file, revision)
    return _from_path(id_or_path, commit(path), path, folders)


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
    path = local_path(id_or_path)
    if path.exists():
        no_local_revision(id_or_path, revision)
        return _text_encoder(id_or_path, None, path)
    repo, file = hub_id(id_or_path)
    if file is not None:
        raise CheckpointError(f"the text encoder '{id_or_path}' names one file; give the repository: '{repo}'")
    # The root pattern starts with "model" because an official LTX-2 repo has other large files beside it.
    root = ["config.json", "tokenizer*.json", "special_tokens_map.json", "model*.safetensors", "model*.index.json"]
    patterns = [*root, *folder_patterns(("text_encoder", "tokenizer"))]
    asked = id_or_path
    return from_snapshot(repo, revision, patterns, lambda path: _text_encoder(asked, commit(path), path))


def resolve_upsampler(id_or_path: str, revision: str | None = None) -> UpsamplerFiles:
    """Find a latent upsampler.

    Args:
        id_or_path: an official file, a diffusers folder (of the upsampler, or with one in ``latent_upsampler``), or a
            hub id: ``org/name`` (that folder) or ``org/name/file.safetensors``.
        revision: branch, tag or commit on the hub.

    Raises:
        CheckpointError: nothing is there, or it is no latent upsampler; one sentence with the fix.
    """
    path = local_path(id_or_path)
    if path.exists():
        no_local_revision(id_or_path, revision)
        return _upsampler(id_or_path, None, path)
    repo, file = hub_id(id_or_path)
    if file is None:
        patterns = folder_patterns((UPSAMPLER_FOLDER,))
        return from_snapshot(repo, revision, patterns, lambda path: _upsampler(id_or_path, commit(path), path))
    path = hub_file(repo, file, revision)
    return _upsampler(id_or_path, commit(path), path)


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
    headers = weight_headers(folder)
    for header in headers:
        _refuse_other_upsampler(header)
    return UpsamplerFiles("diffusers", id_or_path, revision, folder, read_json(folder / "config.json"), headers)


def _refuse_other_upsampler(header: Header) -> None:
    if "post_upsample_res_blocks.0.conv1.weight" not in header.tensors:
        found = name_of(header.tensors, header.metadata)
        raise CheckpointError(
            f"{header.path} {f'is {found}' if found else 'holds no latent upsampler'}, and an upsampler is asked for; "
            f"use a file like ltx-2-spatial-upscaler-x2-1.0.safetensors"
        )
    refuse_quantized(header)


def _inside(checkpoint: Checkpoint | None) -> tuple[str, str | None]:
    """Id and revision of the text encoder that a diffusers checkpoint brings along: its own."""
    if checkpoint is None or checkpoint.layout != "diffusers":
        raise CheckpointError(
            "no text encoder is given, and an official LTX-2 file has none inside; "
            "give a Gemma-3 folder or hub id (google/gemma-3-12b-it-qat-q4_0-unquantized)"
        )
    return checkpoint.id, checkpoint.revision


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
    config = read_json(folder / "config.json") if (folder / "config.json").exists() else {}
    if "gemma" in str(config.get("model_type")):
        hint = "; it is a Gemma text encoder, which has its own setting"
    if config.get("_class_name") == "WanModel" or (folder / "high_noise_model").is_dir():
        hint = "; it is a Wan model of the original layout: use it with model=wan or another Wan option"
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
    refuse_quantized(header)
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


def _diffusers(id_or_path: str, revision: str | None, path: Path, folders: Sequence[str]) -> Checkpoint:
    _refuse_other_pipeline(path)
    missing = [folder for folder in folders if not (path / folder / "config.json").is_file()]
    if missing:
        raise CheckpointError(
            f"the diffusers checkpoint {path} lacks {', '.join(f'{folder}/config.json' for folder in missing)}; "
            f"LTX-2 needs the folders {', '.join(folders)}: download it completely"
        )
    config = {folder: read_json(path / folder / "config.json") for folder in folders}
    headers = {folder: weight_headers(path / folder) for folder in folders}
    for folder_headers in headers.values():
        for header in folder_headers:
            refuse_quantized(header)
    scheduler = path / "scheduler" / "scheduler_config.json"
    name = re.sub(r".*/", "", id_or_path.rstrip("/"))
    kind = kind_of_folder(name, read_json(scheduler) if scheduler.is_file() else {})
    return Checkpoint("diffusers", kind, id_or_path, revision, path, config, headers)


def _refuse_other_pipeline(path: Path) -> None:
    """Refuse the diffusers folder of another model by the class of its transformer."""
    config = path / "transformer" / "config.json"
    name = read_json(config).get("_class_name") if config.is_file() else None
    if name in DIFFUSERS_TRANSFORMERS and name != "LTX2VideoTransformer3DModel":
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
    headers = weight_headers(folder)
    for header in headers:
        refuse_quantized(header)
    return TextEncoderFiles(id_or_path, revision, folder, tokenizer, read_json(folder / "config.json"), headers)
