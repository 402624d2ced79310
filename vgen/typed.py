"""Turns a plain mapping into a frozen dataclass, with one sentence for each thing that does not fit."""

import dataclasses
import difflib
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


class ConfigurationError(ValueError):
    """A configuration value that cannot be used: one sentence with the value, the rule and the fix."""


def build(cls: type, data: Any, path: str = "") -> Any:
    """Build ``cls`` (a dataclass) from ``data``, checking every key and type on the way.

    Raises:
        ConfigurationError: unknown or missing key, wrong type, or a value outside a ``Literal``.
    """
    if not isinstance(data, Mapping):
        raise ConfigurationError(f"{path or 'the configuration'}={data!r} is not a group of settings; give key: value")
    hints = get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]
    for key in data:
        if key not in names:
            raise ConfigurationError(_unknown(_join(path, str(key)), str(key), names))
    required = [field.name for field in dataclasses.fields(cls) if field.default is dataclasses.MISSING]
    given = [name for name in names if name in data and data[name] != "???"]
    missing = [name for name in required if name not in given]
    if missing:
        raise ConfigurationError(f"{_join(path, missing[0])} is not set; give {_join(path, missing[0])}=<value>")
    return cls(**{name: _convert(hints[name], data[name], _join(path, name)) for name in given})


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _unknown(full: str, key: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(key, names, n=1)
    hint = f"did you mean '{close[0]}'?" if close else f"known here: {', '.join(names)}"
    return f"'{full}' is not a setting; {hint}"


def _convert(hint: Any, value: Any, path: str) -> Any:
    origin = get_origin(hint)
    if dataclasses.is_dataclass(hint):
        return build(hint, value, path)  # type: ignore[arg-type]
    if origin in (Union, types.UnionType):
        return _convert_union(hint, value, path)
    if origin is Literal:
        if value not in get_args(hint):
            choices = ", ".join(str(choice) for choice in get_args(hint))
            raise ConfigurationError(f"{path}={value!r} is not a choice; use one of: {choices}")
        return value
    if origin is tuple:
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise ConfigurationError(f"{path}={value!r} is not a list; give {path}=[a,b]")
        return tuple(_convert(get_args(hint)[0], item, f"{path}[{i}]") for i, item in enumerate(value))
    if origin is dict or hint is dict:
        if not isinstance(value, Mapping):
            raise ConfigurationError(f"{path}={value!r} is not a group of settings; give key: value")
        return dict(value)
    return _convert_scalar(hint, value, path)


def _convert_union(hint: Any, value: Any, path: str) -> Any:
    options = [option for option in get_args(hint) if option is not type(None)]
    if value is None and len(options) < len(get_args(hint)):
        return None
    return _convert(_fitting(options, value), value, path)


def _fitting(options: Sequence[Any], value: Any) -> Any:
    """Of several records the one that knows most of ``value``'s keys."""
    if not isinstance(value, Mapping) or len(options) == 1:
        return options[0]
    names = {option: {field.name for field in dataclasses.fields(option)} for option in options}
    return max(options, key=lambda option: len(names[option] & value.keys()) - len(names[option] ^ value.keys()))


_SCALAR_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def _convert_scalar(hint: type, value: Any, path: str) -> Any:
    # bool is an int to Python, and text that looks like a number is one to YAML: both are settled here.
    if hint is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    raise ConfigurationError(f"{path}={value!r} is not {_SCALAR_NAMES[hint]}, and this setting takes nothing else")


def unknown_setting(cls: type, path: str) -> str:
    """The sentence for a setting ``a.b.c`` that ``cls`` and its nested records do not have."""
    current: Any = cls
    keys = path.lstrip("+~").split(".")
    for depth, key in enumerate(keys):
        hints = {name: hint for record in _records(current) for name, hint in get_type_hints(record).items()}
        if key not in hints:
            return _unknown(".".join(keys), key, list(hints)) if hints else f"'{path}' is not a setting"
        current = hints[key]
        if not _records(current) and depth < len(keys) - 1:
            return f"'{path}' is not a setting; '{'.'.join(keys[: depth + 1])}' has no parts"
    return f"'{path}' cannot be set here"


def _records(hint: Any) -> list[Any]:
    """The dataclasses that a value of type ``hint`` may be."""
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return [option for option in options if dataclasses.is_dataclass(option)]
