"""Notes of a rank as another process reads them, and what of them does not fit or is damaged."""

import subprocess
import sys
from pathlib import Path

import pytest

from launchers import notes
from launchers.notes import BYTES, Arrivals, Note, NoteWriter, note_file, note_stage, read_note, start_notes

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rank0.at"


def test_a_note_is_read_as_it_was_written(path: Path) -> None:
    writer = NoteWriter(path)
    assert read_note(path) == Note()
    assert path.stat().st_size == BYTES
    writer.stage("denoise")
    cfg, ulysses = writer.group("cfg", (0, 2), 45.0), writer.group("ulysses", [2, 3], None)
    passes, queries = writer.name("passes"), writer.name("queries")
    writer.enter(cfg, passes)
    writer.leave(cfg)
    writer.enter(ulysses, queries)
    groups = {"cfg": Arrivals((0, 2), 45.0, "passes", 1), "ulysses": Arrivals((2, 3), None, "queries", 1)}
    assert read_note(path) == Note("denoise", "ulysses", "denoise", True, groups)
    writer.leave(ulysses)
    writer.stage("decode")
    assert read_note(path) == Note("decode", "ulysses", "denoise", False, groups)
    writer.enter(cfg, queries)
    writer.stage(None)
    groups["cfg"] = Arrivals((0, 2), 45.0, "queries", 2)
    assert read_note(path) == Note(None, "cfg", "decode", True, groups)
    assert (writer.name("passes"), writer.group("cfg", (0, 2), 45.0)) == (passes, cfg)


def test_what_does_not_fit_is_not_noted(path: Path) -> None:
    writer = NoteWriter(path)
    name = writer.name("first")
    numbers = [writer.group(str(number), range(8), 45.0) for number in range(80)]
    assert numbers == [*range(1, 63), *[0] * 18]
    writer.enter(numbers[61], name)
    found = read_note(path)
    assert found is not None
    assert (found.last, found.groups["61"].collective, found.groups["61"].count) == ("61", "first", 1)
    assert found.groups["60"].count == 0
    assert writer.name("x" * BYTES) == 0
    assert read_note(path) == found


@pytest.mark.parametrize("data", [b"", b"x" * 100, b"\xff" * BYTES, b"\0" * 512 + b"\2\0\0\0{}" + b"\0" * 100])
def test_a_damaged_note_is_none(path: Path, data: bytes) -> None:
    assert read_note(path) is None
    path.write_bytes(data)
    assert read_note(path) is None


def test_a_full_disk_means_no_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    assert start_notes(tmp_path, 0) is None


def test_a_note_outlives_its_process(tmp_path: Path) -> None:
    program = f"""
import os, signal
from pathlib import Path
from launchers.notes import note_stage, start_notes
note_stage("before")
start_notes(Path({str(tmp_path)!r}), 3)
note_stage("load")
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False)
    assert read_note(note_file(tmp_path, 3)) == Note("load")


def test_without_a_note_a_stage_is_nothing() -> None:
    assert notes._own is None
    note_stage("denoise")
