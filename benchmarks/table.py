"""The headline table as Markdown, from the folders of the rows; torch-free.

A row's folder has what the run wrote, ``record.json`` and, of a decode, ``bench.json``.
"""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.rows import GOALS, LATE_STEPS, NATIVE_OF, PUBLISHED, Row, way_of
from vgen import record

EQUAL_UP_TO = 3e-2
"""Relative error (root mean squares) that counts as rounding: between two bf16 decodes in the same order of operations
with other algorithms it is 0.4 to 1.7 % (BENCHMARKS.md)."""

COLUMNS = (
    "row", "way", "GPUs", "ours", "× baseline", "GiB, worst rank", "output", "published", "predicted, H200", "goal",
    "met",
)  # fmt: skip
NOTHING = "—"


@dataclass(frozen=True)
class NotRun:
    """A row without figures, and why."""

    row: Row
    reason: str


@dataclass(frozen=True)
class Made:
    """A row whose run ended well."""

    row: Row
    record: Mapping[str, Any]
    bench: Mapping[str, Any] | None = None


@dataclass
class Table:
    """``predictions``: seconds by row and way, where the cost model has any. ``dry``: tiny sizes or a CPU, of which no
    goal is judged."""

    made: list[Made]
    not_run: list[NotRun]
    predictions: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    dry: bool = False

    def markdown(self) -> str:
        parts = [self._head(), *_machines(self.made)]
        if self.made:
            parts.append(_table(COLUMNS, [cells for made in self.made for cells in self._lines(made)]))
        if self.not_run:
            parts.append(_reasons(self.not_run))
        return "\n\n".join(parts) + "\n"

    def _head(self) -> str:
        note = "Each row is one run of `python -m vgen.run`, with random weights; times are medians of warm runs."
        if self.dry:
            note += " **Dry run**: tiny sizes or a CPU. It shows that the rows run and says nothing of speed."
        return f"# Headline rows\n\n`python -m benchmarks.headline`\n\n{note}"

    def _lines(self, made: Made) -> Iterator[tuple[str, ...]]:
        if made.bench is not None:
            yield from self._decodes(made)
        else:
            yield self._run(made)

    # ------------------------------------------------------------ decodes

    def _decodes(self, made: Made) -> Iterator[tuple[str, ...]]:
        lines = _by_way(made)
        for way, line in lines.items():
            goal = GOALS.get((made.row.name, way))
            error = line["relative_error"]
            met, need = NOTHING, NOTHING
            if goal is not None:
                need = f"≥ {goal.least} × {goal.way}"
                base = lines.get(goal.way)
                # A fast decode of another clip is none; tiles are an approximation by what they are.
                equal = way in ("tile", "tile_balanced") or (error is not None and error <= EQUAL_UP_TO)
                fast = base is not None and _ratio(base, line) >= goal.least
                met = self._judged(fast and equal)
            alone = way in ("whole", "tiles")
            yield self._cells(
                made.row, way, str(1 if alone else made.row.gpus), f"{line['median_ms']:.1f} ms",
                self._decode_ratios(made, way, lines), _gib(line["peak_gib"]), output_class(way, error), need, met,
            )  # fmt: skip

    def _decode_ratios(self, made: Made, way: str, lines: Mapping[str, Mapping[str, Any]]) -> str:
        line = lines[way]
        bases = [name for name in ("whole", "tiles") if name in lines and name != way]
        if way not in ("tile", "tile_balanced"):
            bases = [name for name in bases if name == "whole"]
        said = [f"{_ratio(lines[name], line):.2f} × {name}" for name in bases]
        native = next((one for one in self.made if one.row.name == NATIVE_OF.get(made.row.name)), None)
        ours = None if native is None else _by_way(native).get(way)
        if ours is not None:
            said.append(f"{_ratio(line, ours):.2f} × is the native one")
        return ", ".join(said) or "1"

    # ------------------------------------------------------------ runs

    def _run(self, made: Made) -> tuple[str, ...]:
        row, seconds = made.row, seconds_of(made)
        base = next((one for one in self.made if one.row.name == row.baseline), None)
        before = None if base is None else seconds_of(base)
        ratio = f"no {row.baseline} yet" if row.baseline else "1"
        if seconds is not None and before is not None:
            ratio = f"{before / seconds:.2f} × {row.baseline} ({_difference(row, before, seconds)})"
        peaks = [peak for peak in made.record["memory_gib"]["per_rank"] or () if peak]
        return self._cells(
            row, {"run": "whole run", "steps": "a step"}[row.kind], str(row.gpus), _duration(row, seconds), ratio,
            _gib(max(peaks, default=None)), self._output(made, base), NOTHING, NOTHING,
        )  # fmt: skip

    def _output(self, made: Made, base: Made | None) -> str:
        said = []
        if base is not None:
            same = _hashes(made.record) == _hashes(base.record)
            said.append(f"latents of {base.row.name}: {'equal bits' if same else 'not the same bits'}")
        if made.row.kind == "steps":
            drift = drift_ms(made.record)
            said.append("drift not measured" if drift is None else f"drift {drift:.3g} ms")
        if made.row.compiles:
            active = made.record["active"]
            compiled = "compiled" if active["compiled"] else "not compiled"
            said.append(f"ran {compiled}, {active['cuda_graphs'] or 0} CUDA graph(s)")
        return "; ".join(said) or "reference"

    # ------------------------------------------------------------ all

    def _cells(self, row: Row, way: str, *cells: str) -> tuple[str, ...]:
        key = way if row.kind == "decode" else row.kind
        gpus, ours, ratio, peak, output, goal, met = cells
        found = self.predictions.get(row.name, {}).get(key)
        predicted = NOTHING if found is None else _duration(row, found)
        published = PUBLISHED.get((row.name, key), NOTHING)
        return (f"`{row.name}`", way, gpus, ours, ratio, peak, output, published, predicted, goal, met)

    def _judged(self, met: bool) -> str:
        return "dry run" if self.dry else "**yes**" if met else "no"


def read_made(row: Row, folder: Path) -> Made:
    """Raises OSError or ValueError: a file is missing or is not what it should be."""
    bench = json.loads((folder / "bench.json").read_text()) if row.kind == "decode" else None
    return Made(row, record.read_record(folder / "record.json"), bench)


def output_class(way: str, error: float | None) -> str:
    """How the output of a way compares with the whole decode on one rank."""
    if way == "whole":
        return "reference"
    if error is None:
        return "not compared"
    if way.startswith("tile"):
        return f"tiles, an approximation ({error:.1e})"
    if error == 0:
        return "equal bits"
    return f"equal up to rounding ({error:.1e})" if error <= EQUAL_UP_TO else f"**another clip ({error:.1e})**"


def seconds_of(made: Made) -> float | None:
    """Of a warm request without its files, or of its late steps."""
    times = made.record["timings_s"]
    request = times["warm"] or times["cold"] or {}
    if made.row.kind == "run":
        total = request.get("total")
        return None if total is None else total - (request.get("write") or 0.0)
    steps = request.get("denoise_steps") or ()
    # Dry runs have few steps.
    late = steps[LATE_STEPS] or steps[-1:]
    return statistics.median(late) if late else None


def drift_ms(result: Mapping[str, Any]) -> float | None:
    """Median over the steps of how far the ranks are apart, by ``vgen.metrics.drift.drift_record``; None where the run
    did not measure it."""
    skew = (result.get("drift") or {}).get("skew_ms") or {}
    median: float | None = skew.get("median")
    return median


def _by_way(made: Made) -> dict[str, Mapping[str, Any]]:
    lines = (made.bench or {}).get("rows", ())
    named = ((way_of(line["name"]), line) for line in lines)
    return {way: line for way, line in named if way is not None}


def _ratio(base: Mapping[str, Any], line: Mapping[str, Any]) -> float:
    ratio: float = base["median_ms"] / line["median_ms"]
    return ratio


def _duration(row: Row, seconds: float | None) -> str:
    if seconds is None:
        return "not measured"
    return f"{seconds:.2f} s" if row.kind == "run" else f"{seconds * 1e3:.1f} ms"


def _difference(row: Row, before: float, after: float) -> str:
    change = after - before
    amount = f"{change:+.2f} s" if row.kind == "run" else f"{change * 1e3:+.1f} ms"
    return f"{amount}, {change / before:+.1%}".replace("-", "−")


def _gib(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}"


def _hashes(result: Mapping[str, Any]) -> list[str | None]:
    return [output["sha256"] for output in result["outputs"] if output["path"].endswith(".safetensors")]


def _machines(made: Sequence[Made]) -> list[str]:
    """One line for each machine and version that the rows ran on."""
    lines = dict.fromkeys(_machine(one.record["environment"]) for one in made)
    return ["\n".join(f"- {line}" for line in lines)] if lines else []


def _machine(environment: Mapping[str, Any]) -> str:
    gpu, cpu, git = environment["gpu"], environment["cpu"], environment["git"]
    where = f"{gpu['count']} × {gpu['name']}" if gpu["name"] else f"{cpu['name']}, {cpu['cores']} cores"
    known = {"driver": environment["driver"], **environment["versions"]}
    versions = ", ".join(f"{name} {version}" for name, version in known.items() if version is not None)
    commit = "" if git["commit"] is None else f", commit {git['commit'][:10]}{' with changes' if git['dirty'] else ''}"
    return f"{where}: {versions}{commit}"


def _reasons(not_run: Sequence[NotRun]) -> str:
    names: dict[str, list[str]] = {}
    for one in not_run:
        names.setdefault(one.reason, []).append(f"`{one.row.name}`")
    return "Not run:\n\n" + "\n".join(f"- {', '.join(found)}: {reason}" for reason, found in names.items())


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)
