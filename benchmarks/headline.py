"""``python -m benchmarks.headline --out DIR``: all headline rows that this machine's GPUs allow, and their table.

Each row is one ``python -m vgen.run`` in ``DIR/<row>``. After each row ``DIR/headline.md`` is written anew. A row that
ended well is not made again by the same command, so that a call which was cut short is simply made again; a row that
needs longer than is left of ``--minutes`` is not begun. Torch-free.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.rows import NATIVE_OF, ROWS, Row, chosen
from benchmarks.table import Made, NotRun, Table, read_made
from launchers.devices import count_gpus
from vgen import record

ROOT = Path(__file__).resolve().parent.parent
GRACE_S = 15.0
"""For a run that is ended: its own ranks get 5 s."""
PREDICTION_LIMIT_S = 60.0

RunRow = Callable[[Sequence[str], Path, float], int | None]
"""Runs a command with its console in a file, at most for so many seconds; the exit status, None past the limit."""


@dataclass(frozen=True)
class Plan:
    """What a call is to make. ``rows``: those asked for. ``device``: as the setting of ``vgen.run``."""

    out: Path
    gpus: int
    rows: tuple[Row, ...]
    tiny: bool = False
    device: str = "auto"

    def folder(self, row: Row) -> Path:
        return self.out / row.name

    def overrides(self, row: Row) -> tuple[str, ...]:
        return row.overrides(tiny=self.tiny, device=self.device)

    @property
    def is_dry(self) -> bool:
        return self.tiny or self.device == "cpu"


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every row that was asked for, and that the GPUs allow, is there; else 1."""
    options, plan = _parse(arguments)
    deadline = time.monotonic() + 60 * options.minutes
    predictions = {} if plan.is_dry else predict(plan)
    why = make_rows(plan, run_row, deadline, predictions)
    _say(f"{plan.out / 'headline.md'} is written")
    return 1 if any(row.name in why and row.gpus <= plan.gpus for row in plan.rows) else 0


def _parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, Plan]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.headline", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the rows and of headline.md")
    parser.add_argument("--gpus", type=int, help="GPUs to use (default: all; ranks with --device cpu: 8)")
    parser.add_argument("--minutes", type=float, default=9.0, help="limit of this call (default: 9)")
    parser.add_argument("--rows", default="*", help="names or patterns with commas (default: all)")
    parser.add_argument("--tiny", action="store_true", help="dry run: tiny models and sizes, no graphs")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    options = parser.parse_args(arguments)
    gpus = options.gpus or (8 if options.device == "cpu" else count_gpus())
    if not gpus or gpus < 1:
        parser.error("this machine shows no GPUs: give --gpus N, or --tiny --device cpu for a dry run")
    if options.minutes <= 0:
        parser.error(f"--minutes {options.minutes:g} leaves no time: give more than 0")
    try:
        rows = chosen(options.rows.split(","))
    except ValueError as error:
        parser.error(str(error))
    return options, Plan(options.out.resolve(), gpus, tuple(rows), options.tiny, options.device)


# ---------------------------------------------------------------- rows


def make_rows(
    plan: Plan,
    run: RunRow,
    deadline: float,
    predictions: Mapping[str, Mapping[str, float]] | None = None,
    now: Callable[[], float] = time.monotonic,
) -> dict[str, str]:
    """Make the rows of ``plan`` that are not there yet, one after another, until ``now() == deadline``.

    Returns why rows are not there, by name; rows that were not asked for are among them.
    """
    plan.out.mkdir(parents=True, exist_ok=True)
    asked = {row.name for row in plan.rows}
    why = {row.name: "not asked for (--rows)" for row in ROWS if row.name not in asked}
    waiting = "waits for its turn: the call was ended before"
    why |= {row.name: waiting for row in plan.rows}
    why |= {row.name: f"needs {row.gpus} GPUs, {plan.gpus} used" for row in plan.rows if row.gpus > plan.gpus}
    why = {row.name: why[row.name] for row in ROWS if row.name in why and not is_done(plan, row)}
    write_table(plan, why, predictions or {})
    for row in plan.rows:
        if row.gpus > plan.gpus or is_done(plan, row):
            continue
        left, needed = deadline - now(), _estimate(plan, row)
        if needed > left:
            why[row.name] = f"takes about {needed:.0f} s and {max(left, 0):.0f} s were left: make the same call again"
            _say(f"{row.name}: not run, {why[row.name]}")
        else:
            failure = make_row(plan, row, run, left)
            why.pop(row.name)
            if failure is not None:
                why[row.name] = failure
        write_table(plan, why, predictions or {})
    return why


def make_row(plan: Plan, row: Row, run: RunRow, limit_s: float) -> str | None:
    """Run ``row`` in its folder; why it failed, or None."""
    folder = plan.folder(row)
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("record.json", "bench.json"):
        (folder / name).unlink(missing_ok=True)
    record.write_json_atomic(folder / "row.json", {"overrides": plan.overrides(row)})
    command = [sys.executable, "-m", "vgen.run", *plan.overrides(row), f"hydra.run.dir={folder}"]
    _say(f"{row.name}: {' '.join(command[1:])}")
    started = time.monotonic()
    status = run(command, folder / "console.log", limit_s)
    failure = None if is_done(plan, row) else _failure(folder, status, limit_s)
    _say(f"{row.name}: {failure or 'done'} ({time.monotonic() - started:.0f} s)")
    return failure


def is_done(plan: Plan, row: Row) -> bool:
    """Whether the same command has made it, with everything that the table reads."""
    folder = plan.folder(row)
    try:
        made_by = json.loads((folder / "row.json").read_text())["overrides"]
        return made_by == list(plan.overrides(row)) and bool(read_made(row, folder).record["status"] == "ok")
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _estimate(plan: Plan, row: Row) -> float:
    # Of a dry run nearly all is the start of the ranks.
    return 15.0 + 3.0 * row.gpus if plan.tiny else row.estimate_s


def _failure(folder: Path, status: int | None, limit_s: float) -> str:
    if status is None:
        return f"ended after the {limit_s:.0f} s that were left: make the same call again"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return f"failed: {record.read_record(folder / 'record.json')['error']['message']}"
    with contextlib.suppress(OSError):
        lines = (folder / "console.log").read_text(errors="replace").split("\n")
        if last := next((line.strip() for line in reversed(lines) if line.strip()), None):
            return f"failed: {last}"
    return f"failed with exit status {status} and no word"


def run_row(command: Sequence[str], console: Path, limit_s: float) -> int | None:
    """``RunRow`` with a real process, in a session of its own, which is ended if this one is."""
    with console.open("w") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask it, which ends its ranks; then kill what is left of it."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sent)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)


# ---------------------------------------------------------------- the table


def write_table(plan: Plan, why: Mapping[str, str], predictions: Mapping[str, Mapping[str, float]]) -> None:
    """``headline.md``: the rows that are there, and ``why`` the others are not."""
    made: list[Made] = [read_made(row, plan.folder(row)) for row in ROWS if row.name not in why]
    not_run = [NotRun(row, why[row.name]) for row in ROWS if row.name in why]
    text = Table(made, not_run, predictions, plan.is_dry).markdown()
    with record.atomic_file(plan.out / "headline.md") as temporary:
        temporary.write_text(text, encoding="utf-8")


def predict(plan: Plan) -> dict[str, dict[str, float]]:
    """What the cost model says of every row of our own models; nothing where there is none or it does not know them."""
    runs = {row.name: plan.overrides(row) for row in ROWS if row.name not in NATIVE_OF}
    command = [sys.executable, "-m", "benchmarks.predictions"]
    try:
        done = subprocess.run(
            command, cwd=ROOT, input=json.dumps(runs), capture_output=True, text=True, timeout=PREDICTION_LIMIT_S
        )
        found: dict[str, dict[str, float]] = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        _say(f"no predictions: {error}")
        return {}
    return found


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    # As an exception it ends the run that is going on; by itself it would leave that run on the GPUs.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
