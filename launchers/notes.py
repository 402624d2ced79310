"""Where a rank is, in a small file that outlives it: its stage, and the collective it is in or came out of.

A rank writes with plain stores into shared memory, so that it costs no system call, and what it wrote is there for the
supervisor however the rank ends, SIGSTOP and SIGKILL included. The supervisor reads it when it has to report a failure.

The file: `_SLOTS` unsigned 32-bit numbers, then the names that they stand for, as JSON behind its length. Number 0 is
the stage, number 1 the last collective's group and whether the rank is still in it, number 2 the stage that one began
in; each group has two more, its last collective and how many it has come to. Names count from 1: 0 is none.
"""

import contextlib
import json
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BYTES = 16384
_SLOTS = 128
_NAMES_AT = 4 * _SLOTS
_MAX_GROUPS = (_SLOTS - 3) // 2
_LENGTH_BYTES = 4


@dataclass(frozen=True)
class Arrivals:
    """What a rank did in one group. `collective`: the last one it came to, its `count`-th there; none yet: None, 0.

    `ranks`: the group's, global. `timeout_s`: how long its members wait for each other; None if that is not known.
    """

    ranks: tuple[int, ...]
    timeout_s: float | None
    collective: str | None
    count: int


@dataclass(frozen=True)
class Note:
    """Where a rank is. `groups`: what it did in each, by the name that all members know; `last`: the latest of them.

    `last_stage`: the stage that it came to its last collective in. `inside`: it has not come out of that one, or an
    error took it out.
    """

    stage: str | None = None
    last: str | None = None
    last_stage: str | None = None
    inside: bool = False
    groups: Mapping[str, Arrivals] = field(default_factory=dict)


def note_file(out_dir: Path, rank: int) -> Path:
    return out_dir / "ranks" / f"rank{rank}.at"


class NoteWriter:
    """The note of this process. Names and groups beyond what the file holds are not noted; nothing here raises later.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, path: Path) -> None:
        with path.open("w+b") as file:
            # A hole in a file is a SIGBUS on a full disk.
            os.posix_fallocate(file.fileno(), 0, BYTES)
            self._map = mmap.mmap(file.fileno(), BYTES)
        self.slots = memoryview(self._map).cast("I")
        self._names: list[str] = []
        self._groups: dict[str, Mapping[str, Any]] = {}

    def stage(self, name: str | None) -> None:
        self.slots[0] = 0 if name is None else self.name(name)

    def name(self, name: str) -> int:
        """The number that stands for ``name``; 0 if there is no room for it."""
        if name not in self._names:
            self._names.append(name)
            if not self._write_names():
                self._names.pop()
                return 0
        return self._names.index(name) + 1

    def group(self, name: str, ranks: Sequence[int], timeout_s: float | None) -> int:
        """The number of a group; 0 if there is no room for it."""
        if name not in self._groups:
            self._groups[name] = {"ranks": list(ranks), "timeout_s": timeout_s}
            if len(self._groups) > _MAX_GROUPS or not self._write_names():
                del self._groups[name]
                return 0
        return list(self._groups).index(name) + 1

    def enter(self, group: int, name: int) -> None:
        """This rank comes to the collective ``name`` of ``group``, numbers of the methods above."""
        slots, at = self.slots, 2 * group + 1
        slots[2] = slots[0]
        slots[at] = name
        slots[at + 1] = (slots[at + 1] + 1) & 0xFFFFFFFF
        slots[1] = group << 1 | 1

    def leave(self, group: int) -> None:
        self.slots[1] = group << 1

    def _write_names(self) -> bool:
        text = json.dumps({"names": self._names, "groups": self._groups}).encode()
        start = _NAMES_AT + _LENGTH_BYTES
        if start + len(text) > BYTES:
            return False
        self._map[start : start + len(text)] = text
        self._map[_NAMES_AT:start] = len(text).to_bytes(_LENGTH_BYTES, "little")
        return True


_own: NoteWriter | None = None


def start_notes(out_dir: Path, rank: int) -> NoteWriter | None:
    """Begins the note of this process, which lasts as long as it; None where the disk has no room for it."""
    global _own
    with contextlib.suppress(OSError):
        path = note_file(out_dir, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        _own = NoteWriter(path)
    return _own


def note_stage(name: str | None) -> None:
    """Notes the stage that this process is in, None for none; nothing where it has no note."""
    if _own is not None:
        _own.stage(name)


def read_note(path: Path) -> Note | None:
    """The note of a rank as it is now; None if it has none or it is damaged."""
    try:
        data = path.read_bytes()
        if len(data) != BYTES:
            return None
        slots = memoryview(data[:_NAMES_AT]).cast("I")
        length = int.from_bytes(data[_NAMES_AT : _NAMES_AT + _LENGTH_BYTES], "little")
        if not length:
            return Note()
        start = _NAMES_AT + _LENGTH_BYTES
        content = json.loads(data[start : start + length])
        names: list[str | None] = [None, *content["names"]]
        groups = {
            group: Arrivals(
                tuple(known["ranks"]), known["timeout_s"], names[slots[2 * number + 1]], slots[2 * number + 2]
            )
            for number, (group, known) in enumerate(content["groups"].items(), start=1)
        }
        last = slots[1] >> 1
        return Note(names[slots[0]], [None, *groups][last], names[slots[2]], bool(slots[1] & 1), groups)
    except (OSError, ValueError, LookupError, TypeError):
        return None
