"""Reads headers of safetensors files, one file's or a model folder's, and refuses what is damaged; needs no torch.

Of a file only the header is read: 8 bytes of length (little endian), that many bytes of JSON
(``{name: {dtype, shape, data_offsets}, "__metadata__": {str: str}}``), then the tensors without gaps.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vgen.checkpoint_kinds import quantization

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


def read_header(path: Path) -> Header:
    """Read and check the header of the safetensors file ``path``; no tensor is read.

    Raises:
        CheckpointError: the file is missing, a pickle, not safetensors, truncated, empty or inconsistent.
    """
    _refuse_pickle(path, _first_bytes(path))
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


def check_pickle(path: Path) -> Path:
    """``path``, if a pickle is there; nothing of it is unpickled.

    Raises:
        CheckpointError: the file is missing or something else.
    """
    if not _first_bytes(path).startswith(_PICKLE_STARTS):
        raise CheckpointError(f"{path} is not what torch.save writes, as its name says; download it again")
    return path


def _first_bytes(path: Path) -> bytes:
    if not path.is_file():
        raise CheckpointError(f"there is no file {path}; check the path")
    with path.open("rb") as file:
        start = file.read(64)
    if start.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{path} is a Git LFS pointer, not the file itself; fetch it with 'git lfs pull'")
    return start


def _refuse_pickle(path: Path, start: bytes) -> None:
    if path.suffix in _PICKLE_SUFFIXES or start.startswith(_PICKLE_STARTS):
        raise CheckpointError(
            f"{path} is a pickle file, which can run any code when it is read; use the .safetensors file of the model"
        )


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


def refuse_quantized(header: Header) -> None:
    """Raises CheckpointError: weights of the file are quantized."""
    found = quantization({name: info.dtype for name, info in header.tensors.items()})
    if found is not None:
        raise CheckpointError(
            f"{header.path} is {found}; this version loads bf16, fp16 and fp32 files only: use the bf16 file"
        )


def weight_headers(folder: Path, names: str = "*") -> tuple[Header, ...]:
    """Headers of one model folder's weights: the files of its index, else its only safetensors file.

    ``names``: how the names of weights begin, as a pattern, where the folder has other files too.

    Raises:
        CheckpointError: files are missing or damaged, or there are several and no index.
    """
    if not folder.is_dir():
        raise CheckpointError(f"there is no folder {folder} with weights; download it completely")
    indices = sorted(folder.glob(f"{names}.safetensors.index.json"))
    if indices:
        shards = sorted(set(read_json(indices[0])["weight_map"].values()))
        missing = [name for name in shards if not (folder / name).is_file()]
        if missing:
            raise CheckpointError(
                f"{folder} lacks {len(missing)} of {len(shards)} files of {indices[0].name}, first {missing[0]}; "
                f"download it completely"
            )
        return tuple(read_header(folder / name) for name in shards)
    files = sorted(folder.glob(f"{names}.safetensors"))
    if len(files) == 1:
        return (read_header(files[0]),)
    if files:
        raise CheckpointError(f"{folder} has {len(files)} safetensors files and no index; keep the one to load")
    for path in sorted(folder.glob(names)):
        if path.suffix in _PICKLE_SUFFIXES:
            _refuse_pickle(path, b"")
    raise CheckpointError(f"{folder} has no .safetensors file; download it completely")


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is no readable JSON ({error}); download it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not a JSON object; download it again")
    return content
