"""Which rank of a job failed first, and what it has to say."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGABRT, SIGKILL, Signals
from typing import Any, Literal

from launchers.notes import Arrivals, Note

# A rank without an error file is noticed when it is gone. Its peers may have seen its sockets close long before, in the
# destructors of libtorch or in the kernel, and have left error files about it.
NOTICE_S = 1.0
# libtorch aborts a rank whose peer is gone: an abort after a peer's error is a consequence. A peer's error can only be
# one of the abort if it comes at the same moment, since an abort runs no destructors.
ABORT_NOTICE_S = 0.05
LAST_LINES = 15

_TRACEBACK_HEADER = "Traceback (most recent call last):"
_EXCEPTION_LINE = re.compile(r"([A-Za-z_][\w.]*)(?:: (.*))?$")
_OWN_KINDS = ("RankExited", "RankKilled", "RankLost", "RankStalled")

# What a rank says whose peers did not come in time (gloo, the store below it), and one whose peers are gone.
_TIMED_OUT = re.compile(r"timed out", re.IGNORECASE)
_PEER_GONE = re.compile(r"closed by peer|reset by peer|broken pipe|ncclRemoteError|socket closed", re.IGNORECASE)
# NCCL's watchdog says this in the log and aborts the process.
_WATCHDOG = re.compile(r"watchdog caught collective operation timeout", re.IGNORECASE)

Cause = Literal["own", "timeout", "peer gone"]


@dataclass(frozen=True)
class RankFailure:
    """The rank that failed first.

    With an error file `kind`, `message`, `stage`, `traceback` are the file's. Without one, `traceback` is the Python
    traceback at the end of the log or else its last 15 lines, and `kind` the Python error's or one of RankExited,
    RankKilled, RankLost. RankStalled is one that did not come to `collective`, where others waited for it; of another,
    `collective` is the one that it was in. `exit_code` and `signal` are both None when the supervisor ended the rank,
    because it hung after reporting its error or stalled, and when its exit status got lost.
    """

    rank: int
    exit_code: int | None
    signal: int | None
    log: Path
    traceback: str | None
    message: str | None
    kind: str | None
    stage: str | None
    collective: str | None = None

    def __str__(self) -> str:
        message = " ".join((self.message or "").split())
        if self.kind in _OWN_KINDS:
            at = f" in stage {self.stage}" if self.stage and self.kind != "RankStalled" else ""
            return f"Rank {self.rank}{at} {message} (log: {self.log})"
        where = f" in stage {self.stage}" if self.stage else ""
        what = ": ".join(part for part in (self.kind or "an unknown error", message) if part)
        return f"Rank {self.rank} failed{where} with {what} (log: {self.log})"


@dataclass(frozen=True)
class Ending:
    """How one rank ended. `status` is its exit code, minus its signal, or None if unknown; times are unix seconds."""

    rank: int
    status: int | None
    ended_at: float
    log: Path
    tail: str = ""  # the end of the log
    error: Mapping[str, Any] | None = None  # the error file
    terminated_at: float = math.inf  # our SIGTERM, if the rank was running then
    killed: bool = False  # by our SIGKILL


def read_error(path: Path) -> dict[str, Any] | None:
    """The error file of a rank; `time` is the file's own if it does not say it, and all there is if it is damaged."""
    try:
        written_at, text = path.stat().st_mtime, path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    try:
        content = json.loads(text)
    except ValueError:
        content = None
    error = dict(content) if isinstance(content, dict) else {}
    if not isinstance(error.get("time"), int | float):
        error["time"] = written_at
    return error


def first_failure(endings: Sequence[Ending], notes: Mapping[int, Note] | None = None) -> RankFailure:
    """The failure that the others follow from. `notes`: where the ranks were when the first failure was seen, if known.

    1. A rank that somebody else killed with SIGKILL (the out-of-memory killer): no exception of a peer does that, but
       it makes peers raise, and they may leave an error file before the killed process is taken apart.
    2. Else the oldest failure: by the time in the error file, without one by the end of the rank less a margin. A rank
       that says in a collective that a peer is gone comes after those that say something else.
    3. If that one waited in vain in a collective, the rank that did not come there.

    A rank that the supervisor had to end counts only by its error file, and by its absence.

    Raises:
        ValueError: none of them failed.
    """
    notes = notes or {}
    suspects = [(blame, ending.rank, ending) for ending in endings if (blame := _blame(ending)) is not None]
    if not suspects:
        raise ValueError(f"none of the {len(endings)} ranks failed")
    first = _cause_of_all([ending for *_, ending in sorted(suspects, key=lambda suspect: suspect[:2])], notes)
    cause = _cause(first, notes)
    # An abort is NCCL's watchdog: its ranks are on CUDA.
    missing = None if cause == "own" else _find_missing(first.rank, notes, queues=first.error is None)
    absent = {ending.rank: ending for ending in endings}.get(missing.rank) if missing is not None else None
    if missing is None or absent is None:
        return _describe(first, notes.get(first.rank, Note()))
    return _describe_stalled(absent, missing, first if missing.waiting == first.rank else None, cause, notes)


def _cause_of_all(oldest_first: Sequence[Ending], notes: Mapping[int, Note]) -> Ending:
    """The oldest, unless that lost a peer and another one failed for a reason of its own, not asked to end by then."""
    first = oldest_first[0]
    if _cause(first, notes) != "peer gone":
        return first
    others = [other for other in oldest_first if other.error is None or other.error["time"] < other.terminated_at]
    return next((other for other in others if _cause(other, notes) == "own"), first)


def _cause(ending: Ending, notes: Mapping[int, Note]) -> Cause:
    """Why a rank failed. What it says counts only if it was in a collective then: files and downloads time out, too."""
    if ending.error is None and ending.status == -SIGABRT and _WATCHDOG.search(ending.tail):
        return "timeout"
    note = notes.get(ending.rank)
    if note is None or not note.inside or (ending.error is None and (ending.status or 0) < 0):
        return "own"
    words = str((_from_log(ending) if ending.error is None else ending.error).get("message") or "")
    if _TIMED_OUT.search(words):
        return "timeout"
    return "peer gone" if _PEER_GONE.search(words) else "own"


@dataclass(frozen=True)
class _Missing:
    """`rank` has not come to the last collective of `waiting` in `group`."""

    rank: int
    waiting: int
    group: str


def _find_missing(waiting: int, notes: Mapping[int, Note], *, queues: bool) -> _Missing | None:
    """Whom `waiting` waits for: one that waits for another in turn hands the question on; None if all have come.

    `queues`: a rank can wait for a collective that it only queued, outside of it.
    """
    found: _Missing | None = None
    seen: set[int] = set()
    while waiting not in seen:
        seen.add(waiting)
        later = next(_missing_of(waiting, notes), None)
        if later is None or later.rank in seen:
            break
        found, waiting = later, later.rank
        if not (queues or notes[waiting].inside):
            break
    return found


def _missing_of(waiting: int, notes: Mapping[int, Note]) -> Iterator[_Missing]:
    note = notes.get(waiting, Note())
    # On CUDA a rank that waits has queued its collective, and may have come out of it long ago.
    groups = {note.last: note.groups[note.last]} if note.inside and note.last is not None else note.groups
    for group, own in groups.items():
        for rank in own.ranks:
            if rank in notes and not _has_come(notes[rank].groups.get(group), own):
                yield _Missing(rank, waiting, group)


def _has_come(arrivals: Arrivals | None, awaited: Arrivals) -> bool:
    """Whether a rank with these `arrivals` in a group has come to the last collective of `awaited`."""
    if arrivals is None or arrivals.count < awaited.count:
        return False
    return arrivals.count > awaited.count or arrivals.collective == awaited.collective


def _blame(ending: Ending) -> tuple[int, float] | None:
    """Sort key, smallest first; None for a rank that did not fail by itself."""
    if ending.error is not None:
        return (1, float(ending.error["time"]))
    if ending.status == -SIGKILL and not ending.killed:
        return (0, ending.ended_at)
    if ending.status == 0 or ending.terminated_at < math.inf:
        return None
    return (1, ending.ended_at - (ABORT_NOTICE_S if ending.status == -SIGABRT else NOTICE_S))


def _describe(ending: Ending, note: Note) -> RankFailure:
    hung = ending.error is not None and ending.terminated_at < math.inf
    status = None if hung else ending.status
    words = ending.error if ending.error is not None else _from_log(ending)
    kind, message, stage, traceback = (
        None if words.get(name) is None else str(words[name]) for name in ("kind", "message", "stage", "traceback")
    )
    last = _last(note)
    if last is not None and kind in _OWN_KINDS:
        message = f"{message}, {'in' if note.inside else 'after'} {last}"
    elif last is not None and note.inside:
        message = f"in {last}: {message}" if message else f"in {last}"
    return RankFailure(
        rank=ending.rank,
        exit_code=status if status is not None and status >= 0 else None,
        signal=-status if status is not None and status < 0 else None,
        log=ending.log,
        traceback=traceback or _last_lines(ending),
        message=message,
        kind=kind,
        stage=stage or note.stage,
        collective=last if note.inside else None,
    )


def _describe_stalled(
    ending: Ending, missing: _Missing, waiting: Ending | None, cause: Cause, notes: Mapping[int, Note]
) -> RankFailure:
    """`ending`: of the rank that did not come; `waiting`: of the one that waited for it, if that has said so."""
    note, theirs = notes[missing.rank], notes[missing.waiting]
    arrivals = theirs.groups[missing.group]
    error = waiting.error if waiting is not None and waiting.error is not None else {}
    stage = error.get("stage") or theirs.last_stage
    awaited = f"'{arrivals.collective}' (no. {arrivals.count})"
    within = f" within {arrivals.timeout_s:g} s" if cause == "timeout" and arrivals.timeout_s is not None else ""
    last = _last(note)
    ended_by_itself = ending.status is not None and ending.terminated_at == math.inf
    where = f"it was {'still' if note.inside else 'last'} in {last}" if last else "it had been in no collective"
    where += f" of {note.last_stage}" if last and note.last_stage else ""
    if note.stage is not None and (last is None or note.stage != note.last_stage):
        where += f" and then in {note.stage}" if last else f" and was in {note.stage}"
    if ended_by_itself:
        where += ", and has ended"
    return RankFailure(
        rank=missing.rank,
        exit_code=ending.status if ended_by_itself else None,
        signal=None,
        log=ending.log,
        traceback=_last_lines(ending),
        message=f"did not come to {awaited}{f' in {stage}' if stage else ''}{within}; {where}",
        kind="RankStalled",
        stage=note.stage or stage,
        collective=awaited,
    )


def _last(note: Note) -> str | None:
    if note.last is None:
        return None
    arrivals = note.groups[note.last]
    return f"'{arrivals.collective}' (no. {arrivals.count})"


def _last_lines(ending: Ending) -> str | None:
    return "\n".join(ending.tail.splitlines()[-LAST_LINES:]) or None


def _from_log(ending: Ending) -> dict[str, str]:
    """What a rank without an error file died of: its last Python traceback, or its exit status."""
    status = ending.status
    if status is None:
        return {"kind": "RankLost", "message": "ended, but its exit status was taken by another part of the program"}
    if status < 0:
        hint = ", often the kernel's out-of-memory killer" if status == -SIGKILL else ""
        return {"kind": "RankKilled", "message": f"was ended by {_signal_name(-status)}{hint}"}
    _, header, block = ending.tail.rpartition(_TRACEBACK_HEADER)
    if status == 1 and header:  # 1 is Python's code for an exception that nobody caught
        for line in block.splitlines():
            if found := _EXCEPTION_LINE.match(line):
                return {"kind": found[1], "message": found[2] or "", "traceback": header + block}
    return {"kind": "RankExited", "message": f"exited with code {status}"}


def _signal_name(number: int) -> str:
    try:
        return Signals(number).name
    except ValueError:
        return f"signal {number}"
