"""Nested values seen as their tensors: the same containers again, with other tensors in them."""

import copy
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from vgen.graph.key import field_names

Path = tuple[str | int, ...]
"""Names and indices that lead to a tensor."""


def map_tensors(value: Any, function: Callable[[Path, Tensor], Any], path: Path = ()) -> Any:
    """``value`` with each tensor replaced by what ``function`` makes of it; what has no tensors stays the same object.

    Containers are those that ``graph_key`` walks, in the same order. A mapping that is no dict comes back read-only.
    """
    if isinstance(value, Tensor):
        return function(path, value)
    kind: Any = type(value)
    names = field_names(kind)
    if names is not None:
        return _map_dataclass(value, names, function, path)
    if isinstance(value, tuple | list):
        items = [map_tensors(item, function, (*path, index)) for index, item in enumerate(value)]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return kind(*items) if hasattr(value, "_fields") else kind(items)
    if isinstance(value, Mapping):
        mapped = {name: map_tensors(item, function, (*path, name)) for name, item in value.items()}
        if not isinstance(value, dict):
            return MappingProxyType(mapped)
        same_kind = copy.copy(value)
        same_kind.update(mapped)
        return same_kind
    return value


def _map_dataclass(value: Any, names: tuple[str, ...], function: Callable[[Path, Tensor], Any], path: Path) -> Any:
    fields = {name: map_tensors(getattr(value, name), function, (*path, name)) for name in names}
    if all(new is getattr(value, name) for name, new in fields.items()):
        return value
    # Not dataclasses.replace: it calls __init__, which some fields are no part of.
    changed = copy.copy(value)
    for name, new in fields.items():
        object.__setattr__(changed, name, new)
    return changed
