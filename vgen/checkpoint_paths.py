"""Finds the files of an id on this machine or, downloading what the cache lacks, on the hub; needs no torch.

``vgen://<path>`` is a file or folder of ``weights`` in this package, so that its name is the same on every machine.
"""

import os
import re
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import TypeVar

from vgen.checkpoint_headers import CheckpointError

PACKAGED = "vgen://"
WEIGHTS = Path(str(resources.files("vgen"))) / "weights"

_HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:/(?P<file>.+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")

_Found = TypeVar("_Found")


def local_path(id_or_path: str) -> Path:
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


def folder_patterns(folders: Sequence[str]) -> list[str]:
    return [f"{folder}/*{end}" for folder in folders for end in (".json", ".safetensors")]


def no_local_revision(id_or_path: str, revision: str | None) -> None:
    if revision is not None:
        raise CheckpointError(f"revision '{revision}' does not apply to the local path '{id_or_path}'; leave it out")


def hub_id(id_or_path: str) -> tuple[str, str | None]:
    match = _HUB_ID.fullmatch(id_or_path)
    if match is None or id_or_path.startswith((".", "~", "/")):
        raise CheckpointError(
            f"'{id_or_path}' is no file or folder on this machine and no hub id (org/name or "
            f"org/name/file.safetensors); check the path"
        )
    return match["repo"], match["file"]


def hub_file(repo: str, file: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repo, file, revision=revision))
    except Exception as error:
        raise _hub_error(f"{repo}/{file}", repo, revision, error) from error


def from_snapshot(repo: str, revision: str | None, patterns: Sequence[str], read: Callable[[Path], _Found]) -> _Found:
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


def commit(path: Path) -> str | None:
    """The commit hash in a path of the hub's cache, ``…/snapshots/<commit>/…``."""
    for folder, commit in zip(path.parts, path.parts[1:], strict=False):
        if folder == "snapshots" and _COMMIT.fullmatch(commit):
            return commit
    return None
