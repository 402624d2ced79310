"""Puts a checkpoint's tensors onto a module that was built on the meta device, one tensor at a time.

Each tensor goes from the mapped file (safetensors, or a pickle of tensors) straight to its dtype and device, so a load
needs no host memory beyond the mapped file and the module itself. A module is complete or not loaded: every missing,
unexpected or misshapen name is an error before the first byte is read.
"""

import zipfile
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open
from torch import nn

from vgen.checkpoint_files import Checkpoint, TextEncoderFiles, UpsamplerFiles
from vgen.checkpoint_headers import CheckpointError, Header, TensorInfo
from vgen.models.gemma3 import CHECKPOINT_IGNORED, CHECKPOINT_PREFIXES
from vgen.models.ltx2 import keys
from vgen.models.names import Layout, owners, rename
from vgen.models.wan import image_encoder
from vgen.models.wan import keys as wan_keys
from vgen.wan_files import WanCheckpoint, check_vae

_NAMED = 4
"""Names given of each kind in an error; the rest is counted."""


@dataclass(frozen=True)
class _Place:
    """A tensor in a safetensors file: the name it has there, and where it lies."""

    path: Path
    name: str
    info: TensorInfo


class TensorSource:
    """Tensors of one component under our module's names, read when asked for.

    A place is in a safetensors file, which is mapped at its first read and stays so until ``close`` (or the end of the
    ``with`` block), or it is a tensor: a view of a pickle that is mapped already, and stays so as long as the source
    lives.
    """

    def __init__(self, places: Mapping[str, _Place | torch.Tensor]) -> None:
        self._places = dict(places)
        self._files: dict[Path, Any] = {}
        self._stack = ExitStack()

    @classmethod
    def of(cls, headers: Iterable[Header], name: Callable[[str], str | None]) -> Self:
        """All tensors of ``headers`` that ``name`` (name in the file to ours) does not turn into None.

        Raises:
            CheckpointError: two tensors get the same name.
        """
        places: dict[str, _Place] = {}
        for header in headers:
            for file_name, info in header.tensors.items():
                ours = name(file_name)
                if ours is None:
                    continue
                if ours in places:
                    raise CheckpointError(
                        f"'{places[ours].name}' and '{file_name}' of {header.path} are both '{ours}'; "
                        f"use a file that holds one model only"
                    )
                places[ours] = _Place(header.path, file_name, info)
        return cls(places)

    @classmethod
    def join(cls, sources: Mapping[str, "TensorSource"]) -> Self:
        """The tensors of several sources, each under the name of a child module."""
        return cls(
            {f"{child}.{name}": place for child, part in sources.items() for name, place in part._places.items()}
        )

    @property
    def names(self) -> list[str]:
        """Names in the order of their bytes in the files, which is the fast order to read them in."""

        def position(name: str) -> tuple[str, int]:
            place = self._places[name]
            if isinstance(place, torch.Tensor):
                return "", place.data_ptr()
            return str(place.path), place.info.start

        return sorted(self._places, key=position)

    def shape(self, name: str) -> tuple[int, ...]:
        place = self._places[name]
        return tuple(place.shape) if isinstance(place, torch.Tensor) else place.info.shape

    def num_bytes(self, name: str) -> int:
        place = self._places[name]
        return place.nbytes if isinstance(place, torch.Tensor) else place.info.end - place.info.start

    @property
    def total_bytes(self) -> int:
        return sum(self.num_bytes(name) for name in self._places)

    def read(self, name: str) -> torch.Tensor:
        """The tensor on the CPU in the dtype of the file: a view of the mapped file, so copy it before ``close``."""
        place = self._places[name]
        if isinstance(place, torch.Tensor):
            return place
        if place.path not in self._files:
            self._files[place.path] = self._stack.enter_context(safe_open(place.path, framework="pt", device="cpu"))
        tensor: torch.Tensor = self._files[place.path].get_tensor(place.name)
        return tensor

    def close(self) -> None:
        self._files.clear()
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"TensorSource({len(self._places)} tensors, {self.total_bytes} bytes)"


def component_source(checkpoint: Checkpoint, component: str) -> TensorSource:
    """Tensors of one LTX-2 component: one of ``keys.COMPONENTS``, or ``connectors`` for the whole text side.

    Raises:
        CheckpointError: the checkpoint holds tensors that belong to no component.
    """
    read = official_component if checkpoint.layout == "official" else diffusers_component
    if component == "connectors":
        return TensorSource.join({child: read(checkpoint, part) for child, part in keys.CONNECTORS.items()})
    return read(checkpoint, component)


def official_component(checkpoint: Checkpoint, component: str) -> TensorSource:
    """Tensors of one of ``keys.COMPONENTS`` in an official file; raises as ``component_source``."""
    return _component(checkpoint.headers[""], component, keys.OFFICIAL, keys.OFFICIAL_IGNORED)


def diffusers_component(checkpoint: Checkpoint, component: str) -> TensorSource:
    """Tensors of one of ``keys.COMPONENTS`` in a diffusers folder; raises as ``component_source``."""
    folder = keys.DIFFUSERS_FOLDERS[component]
    layouts = {other: keys.DIFFUSERS[other] for other, place in keys.DIFFUSERS_FOLDERS.items() if place == folder}
    return _component(checkpoint.headers[folder], component, layouts, ())


def _component(
    headers: Iterable[Header], component: str, layouts: Mapping[str, Layout], ignored: tuple[str, ...]
) -> TensorSource:
    headers = tuple(headers)
    owned_by = {
        name: owners(name, layouts) for header in headers for name in header.tensors if not name.startswith(ignored)
    }
    strangers = [name for name, components in owned_by.items() if not components]
    if strangers:
        where = ", ".join(str(header.path) for header in headers[:1])
        raise CheckpointError(f"{where} holds {_list('unexpected', strangers)}; use a file of LTX-2 2.0 or 2.3")

    def name_in_module(name: str) -> str | None:
        prefix = owned_by.get(name, {}).get(component)
        return None if prefix is None else rename(name, layouts[component], prefix)

    return TensorSource.of(headers, name_in_module)


def upsampler_source(files: UpsamplerFiles) -> TensorSource:
    """Tensors of a latent upsampler, whose names are the same in both layouts and in our module."""
    return TensorSource.of(files.headers, lambda name: name)


def text_encoder_source(files: TextEncoderFiles) -> TensorSource:
    """Tensors of a Gemma-3 text model under ``Gemma3TextModel``'s names, whichever model class it was saved from."""

    def name_in_module(name: str) -> str | None:
        if name.startswith(CHECKPOINT_IGNORED):
            return None
        prefix = next((prefix for prefix in CHECKPOINT_PREFIXES if name.startswith(prefix)), "")
        return name[len(prefix) :]

    return TensorSource.of(files.headers, name_in_module)


def wan_source(checkpoint: WanCheckpoint, component: str) -> TensorSource:
    """Tensors of one Wan component: an encoder or a transformer by its name in ``checkpoint.files``, or one half of the
    VAE, ``video_encoder`` or ``video_decoder``.

    Raises:
        CheckpointError: the files hold tensors that belong to no component, or another VAE, or a pickle is damaged or
            holds anything but tensors.
    """
    part = "vae" if component in wan_keys.VAE_HALVES else component
    files = checkpoint.files[part]
    if isinstance(files, Path):
        return TensorSource(_pickled(checkpoint, part, component, files))
    names = [name for header in files for name in header.tensors]
    return TensorSource.of(files, _wan_names(checkpoint, part, component, names, files[0].path).get)


def _pickled(checkpoint: WanCheckpoint, part: str, component: str, path: Path) -> dict[str, torch.Tensor]:
    """Our names of the tensors in a pickle of the original layout, as views of the mapped file."""
    tensors = _read_pickle(path)
    if part == "vae":
        check_vae({name: tensor.shape for name, tensor in tensors.items()}, checkpoint.vae, path)
    if part == "image_encoder":
        try:
            return image_encoder.from_original(tensors)
        except image_encoder.ImageEncoderError as error:
            raise CheckpointError(f"{path}: {error}") from None
    names = _wan_names(checkpoint, part, component, tensors, path)
    return {ours: tensors[name] for name, ours in names.items()}


def _read_pickle(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a pickle, mapped if it is a zip file, as all are that PyTorch 1.6 or later wrote."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # whatever damaged bytes lead to
        first_line = str(error).strip().partition("\n")[0]
        raise CheckpointError(
            f"{path} is damaged or holds more than tensors ({first_line}); download it again or use the -Diffusers "
            f"repository"
        ) from error
    if not isinstance(content, dict) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        raise CheckpointError(f"{path} holds no plain dict of tensors; download it again")
    return content


def _wan_names(
    checkpoint: WanCheckpoint, part: str, component: str, names: Collection[str], path: Path
) -> dict[str, str]:
    """Our name of each of a part's tensors that ``component`` has; ``path``: a file of them, for messages."""
    layout, ignored = _wan_layout(checkpoint, part, names)
    owned = {name: owners(name, {part: layout}) for name in names if not name.startswith(ignored)}
    ours = {name: rename(name, layout, found[part]) for name, found in owned.items() if found}
    halves = wan_keys.VAE_HALVES if part == "vae" else {component: ("",)}
    known = tuple(start for starts in halves.values() for start in starts)
    strangers = [name for name in owned if name not in ours or not ours[name].startswith(known)]
    if strangers:
        raise CheckpointError(f"{path} holds {_list('unexpected', strangers)}; use the {part} of a released Wan model")
    kept = halves[component]
    return {name: our for name, our in ours.items() if our.startswith(kept) and not wan_keys.unused(our)}


def _wan_layout(checkpoint: WanCheckpoint, part: str, names: Collection[str]) -> tuple[Layout, tuple[str, ...]]:
    """How the file of a part names our tensors, and starts of what else it holds."""
    if checkpoint.layout == "original":
        vae = "vae_2_2" if checkpoint.vae.is_residual else "vae_2_1"
        table = {"vae": vae, "transformer_2": "transformer"}.get(part, part)
        return wan_keys.ORIGINAL[table], ()
    ignored = wan_keys.TRANSFORMERS_IGNORED.get(part, ())
    if part == "text_encoder":
        ignored = wan_keys.text_encoder_ignored(names)
    return wan_keys.TRANSFORMERS.get(part, Layout({"": ""})), ignored


def load_module(
    module: nn.Module,
    source: TensorSource,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    keep_float32: Callable[[str], bool] | None = None,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Give ``module``, built on the meta device, the tensors of ``source``, in place.

    Floating-point tensors are cast to ``dtype``, others keep theirs; parameters need no gradient. Non-persistent
    buffers are moved to ``device`` as they are.

    Args:
        keep_float32: whether the floating-point tensor of this name becomes fp32 whatever ``dtype`` is; None is none.
        progress: called with the number of bytes read, after each tensor.

    Raises:
        CheckpointError: ``source`` and the module's parameters and persistent buffers differ in names or shapes
            (nothing is loaded then), or something is left on the meta device.
    """
    expected = module.state_dict(keep_vars=True)
    _check_match(type(module).__name__, expected, source)
    for name in source.names:
        to_dtype = torch.float32 if keep_float32 is not None and keep_float32(name) else dtype
        place_tensor(module, name, _to(source.read(name), torch.device(device), to_dtype))
        if progress is not None:
            progress(source.num_bytes(name))
    settle(module, torch.device(device))


def _check_match(module: str, expected: Mapping[str, torch.Tensor], source: TensorSource) -> None:
    names = set(source.names)
    missing = [name for name in expected if name not in names]
    unexpected = [name for name in source.names if name not in expected]
    misshapen = [
        f"{name} is {list(source.shape(name))} and should be {list(tensor.shape)}"
        for name, tensor in expected.items()
        if name in names and source.shape(name) != tuple(tensor.shape)
    ]
    parts = [
        _list(kind, entries)
        for kind, entries in (("missing", missing), ("unexpected", unexpected), ("misshapen", misshapen))
        if entries
    ]
    if parts:
        raise CheckpointError(
            f"the checkpoint does not fit {module}: {'; '.join(parts)}; use the checkpoint of this architecture"
        )


def _list(kind: str, entries: list[str]) -> str:
    named = ", ".join(entries[:_NAMED])
    more = f" and {len(entries) - _NAMED} more" if len(entries) > _NAMED else ""
    return f"{len(entries)} {kind} ({named}{more})"


def _to(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """A copy on ``device``. Across devices it is cast there, since PyTorch would cast into a host temporary first."""
    dtype = dtype if tensor.is_floating_point() else tensor.dtype
    on_device_dtype = dtype if device.type == "cpu" else tensor.dtype
    return torch.empty(tensor.shape, dtype=on_device_dtype, device=device).copy_(tensor).to(dtype)


def place_tensor(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Replace the parameter (gradient off) or buffer ``name`` of ``module`` by ``tensor``, in place."""
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    if leaf in owner._parameters:
        owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
    else:
        owner._buffers[leaf] = tensor


def settle(module: nn.Module, device: torch.device) -> None:
    """Move non-persistent buffers, which no checkpoint has, to ``device`` and check that nothing is left on meta.

    Raises:
        CheckpointError: parameters or buffers are on the meta device, by name.
    """
    for part in module.modules():
        for leaf in part._non_persistent_buffers_set:
            buffer = part._buffers[leaf]
            if buffer is not None and not buffer.is_meta:
                part._buffers[leaf] = buffer.to(device)
    tensors = (*module.named_parameters(), *module.named_buffers())
    on_meta = [name for name, tensor in tensors if tensor.is_meta]
    if on_meta:
        raise CheckpointError(f"{type(module).__name__} has {_list('tensors without values', on_meta)}; this is a bug")
