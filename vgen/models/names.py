"""Checkpoint names as data: where a component lies in a file, and what its tensors are called; needs no torch.

Matching whole path segments rather than substrings makes the tables independent of their order.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Layout:
    """Where one component's tensors are, and what they are called there.

    ``prefixes`` maps the start of a name in the file (or a whole name) to its start in our module; the longest match
    over all components of a file decides whose the tensor is (see ``owners``). ``segments`` maps one or several whole
    path segments to ours.
    """

    prefixes: Mapping[str, str]
    segments: Mapping[str, str] = field(default_factory=dict)


def owners(name: str, layouts: Mapping[str, Layout]) -> dict[str, str]:
    """The components that own the tensor ``name``, each with the prefix that matches: the longest of all.

    One component, or none, or the encoder and the decoder that share the statistics of a VAE.
    """
    prefixes = {prefix for layout in layouts.values() for prefix in layout.prefixes if name.startswith(prefix)}
    if not prefixes:
        return {}
    longest = max(prefixes, key=len)
    return {component: longest for component, layout in layouts.items() if longest in layout.prefixes}


def rename(name: str, layout: Layout, prefix: str) -> str:
    """Our module's name for the tensor ``name`` that starts with ``prefix`` of ``layout``."""
    rest = name[len(prefix) :]
    if layout.segments:
        # Longest first, so that "up_blocks.0.upsamplers.0" is not taken for "up_blocks.0"; one pass, so that a
        # replacement is never replaced again.
        choices = "|".join(re.escape(key) for key in sorted(layout.segments, key=len, reverse=True))
        rest = re.sub(rf"(?<![^.])(?:{choices})(?![^.])", lambda match: layout.segments[match.group()], rest)
    return layout.prefixes[prefix] + rest
