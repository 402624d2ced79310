"""What the ``.jsonl`` of a stage says: the losses of its steps, and what was measured when it ended."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path

from vgen.config import TrainStages
from vgen.typed import ConfigurationError

STAGES = tuple(field.name for field in fields(TrainStages))

Row = Mapping[str, float]

_NO_PARTS = ("step", "time_s", "gradient")


@dataclass(frozen=True)
class History:
    """``losses``: rows of ``step``, ``time_s`` and losses, by rising step. ``measured``: the last numbers by name."""

    losses: Sequence[Row]
    measured: Row

    @property
    def parts(self) -> tuple[str, ...]:
        """``loss``, which is minimised, and what it is made of."""
        return tuple(name for name in self.losses[-1] if name not in _NO_PARTS)

    @property
    def seconds(self) -> float:
        """All steps at the usual time of one: pauses between runs do not count."""
        pace = [(b["time_s"] - a["time_s"]) / (b["step"] - a["step"]) for a, b in pairwise(self.losses)]
        return statistics.median(pace) * self.losses[-1]["step"] if pace else 0.0


def read_histories(folder: Path) -> dict[str, History]:
    """The stages that were trained in ``folder``, in order.

    Raises:
        ConfigurationError: there is none, or a line is no row.
    """
    paths = {stage: folder / f"{stage}.jsonl" for stage in STAGES}
    histories = {stage: read_history(path) for stage, path in paths.items() if path.is_file()}
    if not histories:
        raise ConfigurationError(f"{folder} has no {STAGES[0]}.jsonl or other stage's; give a train.folder")
    return histories


def read_history(path: Path) -> History:
    losses: list[Row] = []
    measured: list[Row] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
            _append(losses if "loss" in row else measured, row)
        except (ValueError, KeyError, TypeError):
            raise ConfigurationError(f"line {number} of {path} is no row with a step; remove it") from None
    if not losses:
        raise ConfigurationError(f"{path} has no losses; train that stage first")
    numbers = {name: value for row in measured for name, value in row.items() if name not in _NO_PARTS}
    return History(losses, numbers)


def _append(rows: list[Row], row: Row) -> None:
    """A run that went on from an earlier step, or began anew, takes the place of what came after it."""
    while rows and rows[-1]["step"] >= row["step"]:
        rows.pop()
    rows.append(row)
