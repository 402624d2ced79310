"""The key of a captured graph: all of a call's arguments that a recording cannot follow when they change.

A recording has shapes, strides and dtypes baked in, and everything that Python decided: scalars, enums, which arguments
are None, how they nest. The values inside tensors are no part of it.
"""

import dataclasses
import enum
import hashlib
from collections.abc import Hashable, Mapping
from functools import cache
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn

GraphKey = tuple[Hashable, ...]

_PLAIN = frozenset({NoneType, bool, int, str, bytes, complex, torch.dtype, torch.device, torch.layout})
"""Types whose equal values are the same to any code."""


def graph_key(args: tuple[Any, ...], kwargs: Mapping[str, Any], state: Any = ()) -> GraphKey:
    """The key of a call. ``state``: what else decides the work of a call, such as quantization, LoRA and topology.

    Tensors count by shape, dtype, device and strides; containers (dataclasses, tuples, lists, mappings) by type, names
    and order; scalars by type and value, so that 1, 1.0 and True differ.

    Raises:
        TypeError: something inside is none of these; the sentence says where.
    """
    key, _ = key_and_tensors(args, kwargs, state)
    return key


def key_and_tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any], state: Any = ()) -> tuple[GraphKey, list[Tensor]]:
    """``graph_key`` and the tensors of the arguments, in the order of ``map_tensors``: one walk per call, not two."""
    tensors: list[Tensor] = []
    parts = [(index, _named(f"argument {index}", value, tensors)) for index, value in enumerate(args)]
    named = [(name, _named(f"argument '{name}'", value, tensors)) for name, value in kwargs.items()]
    return (tuple(parts), tuple(named), _named("the state", state, [])), tensors


def digest(key: GraphKey) -> bytes:
    """32 bytes that are the same on every rank for the same key: of a device its type counts, not its number."""
    return hashlib.sha256(_spelled(key).encode()).digest()


def _named(where: str, value: Any, tensors: list[Tensor]) -> Hashable:
    try:
        return _part(value, tensors)
    except TypeError as error:
        raise TypeError(f"{where} of a captured call {error}") from None


def _part(value: Any, tensors: list[Tensor]) -> Hashable:
    kind: Any = type(value)
    if kind is Tensor or kind is nn.Parameter:
        return _tensor(value, tensors)
    if kind in _PLAIN:
        return kind, value
    if kind is float:
        return kind, value.hex()  # -0.0 equals 0.0, and nan nothing
    if kind is tuple or kind is list:
        return kind, tuple([_part(item, tensors) for item in value])
    names = field_names(kind)
    if names is not None:
        return kind, tuple([_part(getattr(value, name), tensors) for name in names])
    if isinstance(value, enum.Enum):
        return kind, value.name
    if isinstance(value, tuple | list):
        return kind, tuple([_part(item, tensors) for item in value])
    if isinstance(value, Mapping):
        return kind, tuple([(_part(name, tensors), _part(item, tensors)) for name, item in value.items()])
    raise TypeError(
        f"holds a {kind.__module__}.{kind.__qualname__}, which has no part in a graph's key; "
        f"give tensors, numbers, strings, enums and None, in dataclasses, tuples, lists and mappings"
    )


def _tensor(value: Tensor, tensors: list[Tensor]) -> Hashable:
    if value.layout is not torch.strided:
        raise TypeError(f"holds a tensor of layout {value.layout}, which has no strides; give a dense one")
    tensors.append(value)
    return Tensor, tuple(value.shape), value.dtype, value.device, value.stride()


@cache
def field_names(kind: Hashable) -> tuple[str, ...] | None:
    """The fields of a dataclass in their order; None for any other type."""
    if not dataclasses.is_dataclass(kind):
        return None
    return tuple(field.name for field in dataclasses.fields(kind))


def _spelled(part: Hashable) -> str:
    if isinstance(part, tuple):
        return f"({','.join(map(_spelled, part))})"
    if isinstance(part, type):
        return f"{part.__module__}.{part.__qualname__}"
    return part.type if isinstance(part, torch.device) else repr(part)
