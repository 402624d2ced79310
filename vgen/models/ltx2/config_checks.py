"""What both dialects of an LTX-2 config are checked for: required values, fixed values, the version; needs no torch."""

from collections.abc import Iterable, Mapping
from typing import Any

from vgen.models.errors import ConfigError
from vgen.models.ltx2.config import Version

_LTX2_5_SIGNS = {"ff_bias": False, "use_keyframes_abs_pos_embedding": True}
_PADDING_MODES = ("zeros", "reflect")


def section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    if not isinstance(section, Mapping):
        raise ConfigError(
            f"the checkpoint's config has no '{name}' section; LTX-2 needs transformer, vae, audio_vae and vocoder: "
            f"use an official LTX-2 file"
        )
    return section


def require(section: Mapping[str, Any], where: str, key: str) -> Any:
    if key not in section:
        raise ConfigError(
            f"the checkpoint's config lacks '{where}.{key}', which no tensor shape reveals; "
            f"use a file with complete metadata"
        )
    return section[key]


def check_fixed(section: Mapping[str, Any], where: str, fixed: Mapping[str, Any]) -> None:
    for key, value in fixed.items():
        if key in section and section[key] != value:
            raise ConfigError(
                f"the checkpoint's config has {where}.{key}={section[key]!r}; this LTX-2 code builds {value!r} only"
            )


def refuse_2_5(transformer: Mapping[str, Any]) -> None:
    for key, value in _LTX2_5_SIGNS.items():
        if transformer.get(key) == value:
            raise ConfigError(
                f"the checkpoint's config has transformer.{key}={value}, so it is LTX-2.5, which this version does "
                f"not run; use an LTX-2 2.0 or 2.3 checkpoint"
            )


def version_of(switches: Mapping[str, Any]) -> Version:
    """2.3 has all of ``switches`` on, 2.0 none."""
    on = [name for name, value in switches.items() if value]
    off = [name for name, value in switches.items() if not value]
    if on and off:
        raise ConfigError(
            f"the checkpoint's config mixes LTX-2 2.0 and 2.3: {', '.join(on)} as in 2.3, {', '.join(off)} as in 2.0; "
            f"use a file of one version"
        )
    return "2.3" if on else "2.0"


def padding_mode(mode: Any, where: str) -> str:
    if mode not in _PADDING_MODES:
        raise ConfigError(f"the checkpoint's config has {where}={mode!r}; LTX-2 pads by {' or '.join(_PADDING_MODES)}")
    return str(mode)


def max_pos(values: Any) -> tuple[float, float, float]:
    time, height, width = (float(value) for value in values)
    return time, height, width


def nested_tuple(values: Iterable[Iterable[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(value) for value in values)
