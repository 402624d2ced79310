"""Whether compilation and capture pay in a run, from what they cost and gained where that was measured. Needs no torch.

Measured on one H200 with torch 2.11 (BENCHMARKS.md); another machine has other figures, and a slower host gains more.
"""

from collections.abc import Collection
from dataclasses import dataclass

from vgen.config import GraphConfig

COMPILE_S = 8.5
"""To compile a transformer's blocks for one kind of call, nothing cached: 9.2 s (LTX-2), 8.2 s (Wan)."""

GAIN_MS_PER_TOKEN = 0.0034
"""By which compilation shortens a pass: 0.0034 (LTX-2 2.0) and 0.0034 (Wan 5B) between 1920 and 27280 tokens."""

CAPTURE_GAIN_MS = 1.0
"""By which capture shortens a pass: from 0.2 to 3 ms."""

CAPTURE_S = 0.3
"""To capture one kind of call, of a small clip; a large one has its warm-up passes besides."""


@dataclass(frozen=True)
class GraphWork:
    """What a transformer has to do in a run on one rank.

    ``kinds``: calls that are compiled and captured apart. ``passes``: all of them, over all steps and requests.
    ``tokens``: of the video in one pass on this rank.
    """

    kinds: int
    passes: int
    tokens: int


def cost_s(graph: GraphConfig, work: GraphWork) -> float:
    """Seconds before the first graph has been used."""
    cost = COMPILE_S * work.kinds if graph.compiles else 0.0
    return cost + (CAPTURE_S * work.kinds if graph.captures else 0.0)


def gain_s(graph: GraphConfig, work: GraphWork) -> float:
    """Seconds that each pass is shorter."""
    gain_ms = GAIN_MS_PER_TOKEN * work.tokens if graph.compiles else 0.0
    return (gain_ms + (CAPTURE_GAIN_MS if graph.captures else 0.0)) / 1000


def advice(graph: GraphConfig, work: GraphWork) -> str | None:
    """The sentence for the console where the mode costs more than it gains; None where it pays, or is off."""
    if graph.mode == "eager":
        return None
    cost, gain = cost_s(graph, work), gain_s(graph, work)
    if gain * work.passes >= cost:
        return None
    return (
        f"graph={graph.mode} will not pay here: about {cost:.0f} s to begin with and {1000 * gain:.0f} ms gained in "
        f"each of {work.passes} passes; it pays from {round(cost / gain)} on (as measured on one H200 with torch 2.11)"
    )


def kinds_of(passes: Collection[str]) -> int:
    """Kinds of calls among guidance passes: those that differ in their text alone are one."""
    return len({"plain" if name in ("cond", "uncond") else name for name in passes})
