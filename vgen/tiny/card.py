"""``python -m vgen.tiny.card FOLDER --score SCORE.json``: the numbers of the model card in Markdown, from files."""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vgen.tiny.training.history import History, read_histories
from vgen.typed import ConfigurationError

SHARES = ("passed", "shape", "colour", "motion", "pitch", "loudness")


def training_table(histories: Mapping[str, History]) -> str:
    """A row for each stage: its steps, their time, the mean losses of its last twentieth, what was measured."""
    rows = []
    for stage, history in histories.items():
        last = history.losses[-max(1, len(history.losses) // 20) :]
        losses = {part: sum(row[part] for row in last) / len(last) for part in history.parts}
        steps, minutes = f"{history.losses[-1]['step']}", f"{history.seconds / 60:.1f}"
        rows.append((stage, steps, minutes, _list(losses), _list(history.measured)))
    return _table(("stage", "steps", "minutes", "losses at the end", "measured"), rows)


def score_tables(score: Mapping[str, Any]) -> str:
    """Shares of clips that show what was asked, then what has other units."""
    parts = [part for part, values in score.items() if "passed" in values]
    shares = [(part, f"{score[part]['count']}", *(_percent(score[part][name]) for name in SHARES)) for part in parts]
    named = [(part, name, value) for part, values in score.items() for name, value in _numbers("", values)]
    others = [
        (part, name, f"{value:.4g}")
        for part, name, value in named
        if part not in parts or name not in ("count", *SHARES)
    ]
    return f"{_table(('', 'clips', *SHARES), shares)}\n\n{_table(('', 'measured', 'value'), others)}"


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """The numbers in nested mappings with their names; those of single clips, which are in lists, excepted."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _numbers(f"{name} {key}".strip(), item)
    elif isinstance(value, int | float):
        yield name, value


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def _list(numbers: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in numbers.items()) or "–"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"


def _read_score(path: Path) -> dict[str, Any]:
    try:
        score = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        score = None
    if not isinstance(score, dict) or not all(isinstance(part, dict) for part in score.values()):
        raise ConfigurationError(f"{path} is not what task=score writes; give its score.json")
    return score


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m vgen.tiny.card", description="Tables of the model card.")
    parser.add_argument("folder", type=Path, help="the train.folder")
    parser.add_argument("--score", type=Path, help="what task=score wrote")
    given = parser.parse_args()
    try:
        tables = [training_table(read_histories(given.folder))]
        if given.score:
            tables.append(score_tables(_read_score(given.score)))
    except (ConfigurationError, OSError) as error:
        sys.exit(str(error))
    sys.stdout.write("\n\n".join(tables) + "\n")


if __name__ == "__main__":
    main()
