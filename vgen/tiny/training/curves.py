"""``python -m vgen.tiny.training.curves FOLDER… OUT.svg``: the losses of trainings, a panel for each stage."""

import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from vgen.tiny.training.history import STAGES, History, Row, read_histories
from vgen.typed import ConfigurationError

SMOOTH_POINTS = 50
RAW_POINTS = 120

_STYLES = ("solid", "dashed", "dotted", "dashdot")
_COLUMNS = 2


def draw_curves(runs: Sequence[Mapping[str, History]], path: Path) -> None:
    """Write the SVG of ``runs``, stages by name each: a colour for each part of a loss, a style of line for each run.

    Faint: the loss of single steps. The same runs give the same bytes.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigurationError("curves need matplotlib, which is not installed; pip install 'vgen[train]'") from None
    stages = [stage for stage in STAGES if any(stage in run for run in runs)]
    rows = -(-len(stages) // _COLUMNS)
    # Letters as letters, not as outlines; names in the file that do not change.
    style = {"svg.fonttype": "none", "svg.hashsalt": "losses", "font.size": 9, "font.sans-serif": ["DejaVu Sans"]}
    with rc_context(style):
        figure = Figure(figsize=(9, 2.6 * rows + 0.3), layout="constrained")
        for number, stage in enumerate(stages, start=1):
            axes = figure.add_subplot(rows, _COLUMNS, number)
            axes.set_title(stage, fontsize=10)
            axes.set_xlabel("step")
            _draw_stage(axes, [run.get(stage) for run in runs])
        if len(runs) > 1:
            names = [f"run {number + 1}: {_style(number)}" for number in range(len(runs))]
            figure.suptitle("      ".join(names), fontsize=9)
        drawn = StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    path.parent.mkdir(parents=True, exist_ok=True)
    # Places to a hundredth of a point: a third of the file is further digits.
    path.write_text(re.sub(r"(\.\d\d)\d+", r"\1", drawn.getvalue()), encoding="utf-8")


def _draw_stage(axes: Any, histories: Sequence[History | None]) -> None:
    known: list[str] = []
    for number, history in enumerate(histories):
        if history is None:
            continue
        for part in history.parts:
            first = part not in known
            known.extend([part] * first)
            colour = f"C{known.index(part)}"
            if part == "loss":
                raw = history.losses[:: -(-len(history.losses) // RAW_POINTS)]
                axes.plot(*_points(raw, part), color=colour, alpha=0.25, linewidth=0.6)
            smooth = _points(smoothed(history.losses, part), part)
            label = part if first else None
            axes.plot(*smooth, linestyle=_style(number), color=colour, linewidth=1.2, label=label)
    if all(row[part] > 0 for one in histories if one for part in one.parts for row in one.losses):
        axes.set_yscale("log")
    axes.grid(alpha=0.3, linewidth=0.5)
    axes.legend(fontsize=8, frameon=False, ncols=2)


def _style(number: int) -> str:
    return _STYLES[number % len(_STYLES)]


def _points(rows: Sequence[Row], part: str) -> tuple[list[float], list[float]]:
    return [row["step"] for row in rows], [row[part] for row in rows]


def smoothed(rows: Sequence[Row], part: str) -> list[Row]:
    """Means of ``step`` and ``part`` over equal parts of the rows, at most ``SMOOTH_POINTS``."""
    length = -(-len(rows) // SMOOTH_POINTS)
    groups = [rows[start : start + length] for start in range(0, len(rows), length)]
    return [{name: statistics.fmean(row[name] for row in group) for name in ("step", part)} for group in groups]


def main() -> None:
    if len(sys.argv) < 3 or not sys.argv[-1].endswith(".svg"):
        sys.exit("usage: python -m vgen.tiny.training.curves FOLDER [FOLDER …] OUT.svg")
    *folders, out = map(Path, sys.argv[1:])
    try:
        draw_curves([read_histories(folder) for folder in folders], out)
    except ConfigurationError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
