"""The life and death of rank processes, with workers that import no torch."""

import fcntl
import io
import json
import os
import pickle
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launchers.environment import NodeLayout
from launchers.failure import Ending, first_failure
from launchers.guard import Guard
from launchers.supervisor import JobFailed, JobInterrupted, RankFailure, run_ranks

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("fake_worker.py")
GRACE_S = 0.4


def command(folder: Path, *actions: str) -> list[str]:
    return [sys.executable, "-S", str(WORKER), str(folder), *actions]


def run(folder: Path, world_size: int, *actions: str, **options: Any) -> None:
    options = {"console": False, "grace_s": GRACE_S} | options
    run_ranks(command(folder, *actions), world_size=world_size, out_dir=folder, **options)


def failure(folder: Path, world_size: int, *actions: str, **options: Any) -> RankFailure:
    with pytest.raises(JobFailed) as caught:
        run(folder, world_size, *actions, **options)
    return caught.value.failure


def log_text(folder: Path, rank: int) -> str:
    return (folder / "ranks" / f"rank{rank}.log").read_text()


def pid(folder: Path, name: str) -> int:
    return int((folder / f"{name}.pid").read_text())


def state(number: int | str) -> tuple[str, int] | None:
    """State letter and parent of a process, None if there is none."""
    try:
        fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[1])


def alive(number: int) -> bool:
    found = state(number)
    return found is not None and found[0] not in "ZX"


def processes_of(mark: bytes) -> list[int]:
    """Running processes that inherited the variable of a test, this one apart; guards and workers among them."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            inherited = mark in (folder / "environ").read_bytes()
        except OSError:
            continue
        if inherited and int(folder.name) != os.getpid() and alive(int(folder.name)):
            found.append(int(folder.name))
    return found


def wait_for(what: str, condition: Any, limit_s: float = 10.0) -> None:
    until = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until, f"waited {limit_s} s for {what}"
        time.sleep(0.01)


def own_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[bytes]:
    """No process, zombie, thread, open file, signal handler or variable stays behind any test."""
    monkeypatch.setenv("VGEN_TEST", str(tmp_path))
    mark = f"VGEN_TEST={tmp_path}".encode()
    environ, threads = own_variables(), threading.active_count()
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    files = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    yield mark
    wait_for("the end of all processes", lambda: not processes_of(mark), 3.0)
    zombies = [folder.name for folder in Path("/proc").glob("[0-9]*") if state(folder.name) == ("Z", os.getpid())]
    assert not zombies
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == files  # noqa: PTH208
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    assert own_variables() == environ


@pytest.mark.parametrize("world_size", [1, 3])
def test_all_ranks_run(tmp_path: Path, world_size: int) -> None:
    lines: list[tuple[int, str]] = []
    run(tmp_path, world_size, "talk", on_line=lambda rank, line: lines.append((rank, line)))
    for rank in range(world_size):
        assert log_text(tmp_path, rank) == f"out {rank}\nerr {rank}\nno line end"
        assert [line for number, line in lines if number == rank] == [f"out {rank}", f"err {rank}", "no line end"]
    assert len(list((tmp_path / "ranks").iterdir())) == world_size


def test_world_size_changes_between_two_jobs(tmp_path: Path) -> None:
    for world_size in (3, 1):
        run(tmp_path, world_size, "environment")
        for rank in range(world_size):
            found = json.loads((tmp_path / f"environment{rank}.json").read_text())
            assert (found["RANK"], found["WORLD_SIZE"]) == (str(rank), str(world_size))
    assert [log.name for log in (tmp_path / "ranks").iterdir()] == ["rank0.log"]  # nothing of the larger job


def test_environment_of_ranks(tmp_path: Path) -> None:
    outer = {"SLURM_JOB_ID": "5", "SLURM_NTASKS": "1", "TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "7", "OWN": "kept"}
    run(tmp_path, 2, "environment", environ=dict(os.environ) | outer)
    first, second = (json.loads((tmp_path / f"environment{rank}.json").read_text()) for rank in range(2))
    differing = {name for name in first | second if first.get(name) != second.get(name)}
    assert differing <= {"RANK", "LOCAL_RANK", "_"}
    assert second["LOCAL_RANK"] == "1"
    assert second["LOCAL_WORLD_SIZE"] == second["WORLD_SIZE"] == "2"
    assert second["MASTER_ADDR"] == "127.0.0.1"
    assert int(second["MASTER_PORT"]) > 1024
    assert second["VGEN_PARENT_PID"] == str(os.getpid())
    assert second["OWN"] == "kept"
    assert not [name for name in second if name.startswith(("SLURM_", "TORCHELASTIC_"))]
    assert "VGEN_TERMINAL" not in first


def test_second_node_numbers_its_ranks_globally(tmp_path: Path) -> None:
    console = io.BytesIO()
    layout = NodeLayout(node_rank=1, num_nodes=2, master_addr="gpu03", master_port=20001)
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks" / "rank0.log").write_text("of the other node")
    run(tmp_path, 2, "talk", layout=layout, console=console)
    assert log_text(tmp_path, 3).startswith("out 3\n")
    assert log_text(tmp_path, 0) == "of the other node"
    assert console.getvalue() == b""
    assert failure(tmp_path, 2, "ok", "3:raise", layout=layout).rank == 3


def test_rank_that_reports_its_error(tmp_path: Path) -> None:
    found = failure(tmp_path, 3, "hang", "2:report")
    assert (found.rank, found.kind, found.message, found.stage) == (2, "SpoiltError", "rank 2 = spoilt", "denoise")
    assert (found.exit_code, found.signal) == (1, None)
    assert found.traceback is not None
    assert found.traceback.startswith("Traceback")
    assert found.log == tmp_path / "ranks" / "rank2.log"
    assert found.log.read_text().count("Traceback") == 1
    assert str(found) == f"Rank 2 failed in stage denoise with SpoiltError: rank 2 = spoilt (log: {found.log})"


def test_rank_that_raises_without_a_report(tmp_path: Path) -> None:
    found = failure(tmp_path, 2, "hang", "1:raise")
    assert (found.rank, found.exit_code, found.stage) == (1, 1, None)
    assert found.kind is not None
    assert (found.kind.rpartition(".")[2], found.message) == ("SpoiltError", "rank 1 = spoilt")
    assert found.traceback == found.log.read_text().rstrip()


@pytest.mark.parametrize(
    ("action", "exit_code", "number", "kind", "message"),
    [
        ("exit3", 3, None, "RankExited", "exited with code 3"),
        ("kill9", None, signal.SIGKILL, "RankKilled", "was ended by SIGKILL, often the kernel's out-of-memory killer"),
        ("segfault", None, signal.SIGSEGV, "RankKilled", "was ended by SIGSEGV"),
    ],
)
def test_rank_that_ends_without_a_word(
    tmp_path: Path, action: str, exit_code: int | None, number: int | None, kind: str, message: str
) -> None:
    started = time.monotonic()
    found = failure(tmp_path, 3, "hang", f"1:{action}")
    assert time.monotonic() - started < 3.0
    assert (found.rank, found.exit_code, found.signal, found.kind) == (1, exit_code, number, kind)
    assert found.message == message
    assert found.traceback is None
    assert str(found) == f"Rank 1 {message} (log: {found.log})"
    assert not any(alive(pid(tmp_path, f"rank{rank}")) for rank in range(3))


@pytest.mark.parametrize("end", ["exit3", "kill9"])
def test_rank_that_loses_its_peer_is_not_blamed(tmp_path: Path, end: str) -> None:
    found = failure(tmp_path, 3, "hang", "0:lose_peer", f"1:meet_{end}")
    assert (tmp_path / "ranks" / "rank0.error.json").exists()
    assert found.rank == 1


def test_oldest_report_is_blamed(tmp_path: Path) -> None:
    assert failure(tmp_path, 3, "report_second", "1:report").rank == 1


def test_first_exit_of_one_poll_is_blamed(tmp_path: Path) -> None:
    assert failure(tmp_path, 3, "exit4_second", "2:exit3").rank == 2


def test_rank_that_hangs_after_its_report(tmp_path: Path) -> None:
    found = failure(tmp_path, 2, "hang", "1:report_hang")
    assert (found.rank, found.kind, found.stage) == (1, "SpoiltError", "decode")
    assert (found.exit_code, found.signal) == (None, None)


def test_damaged_report(tmp_path: Path) -> None:
    found = failure(tmp_path, 2, "ok", "1:damaged_report")
    assert (found.rank, found.exit_code) == (1, 4)


def test_report_of_an_earlier_try_does_not_count(tmp_path: Path) -> None:
    assert failure(tmp_path, 1, "report").kind == "SpoiltError"
    run(tmp_path, 1, "ok")


def test_deaf_rank_is_killed(tmp_path: Path) -> None:
    found = failure(tmp_path, 2, "stubborn", "1:exit3")
    assert found.rank == 1
    assert not alive(pid(tmp_path, "rank0"))


def test_rank_can_use_the_grace(tmp_path: Path) -> None:
    assert failure(tmp_path, 2, "polite", "1:exit3_second", grace_s=5.0).rank == 1
    assert (tmp_path / "goodbye0").exists()


def test_peers_have_a_moment_for_their_logs(tmp_path: Path) -> None:
    assert failure(tmp_path, 2, "talk_second", "1:exit3").rank == 1
    assert log_text(tmp_path, 0) == "last words\n"


def test_guard_spares_the_groups_of_a_supervisor_that_finished() -> None:
    with subprocess.Popen(["sleep", "120"], start_new_session=True) as process:
        with Guard() as guard:
            guard.watch(process.pid)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.2)
        process.kill()


LOG = Path("rank.log")
REPORT: dict[str, Any] = {"kind": "E", "message": "", "stage": None, "traceback": "t"}


@pytest.mark.parametrize(
    ("endings", "rank"),
    [
        # Killed from outside: still being taken apart when the supervisor ended the job.
        ([Ending(0, 1, 5.0, LOG, error=REPORT | {"time": 4.0}), Ending(1, -9, 6.0, LOG, terminated_at=5.3)], 1),
        # Killed by the supervisor, after SIGTERM did not help.
        (
            [
                Ending(0, -9, 9.0, LOG, terminated_at=5.3, killed=True),
                Ending(1, 1, 5.0, LOG, error=REPORT | {"time": 4.0}),
            ],
            1,
        ),
        # An error on the supervisor's SIGTERM.
        (
            [
                Ending(0, 1, 5.4, LOG, error=REPORT | {"time": 5.4}, terminated_at=5.3),
                Ending(1, 2, 5.0, LOG),
            ],
            1,
        ),
        # Aborted, because a peer that had reported was gone.
        ([Ending(0, -6, 5.0, LOG), Ending(1, 1, 4.9, LOG, error=REPORT | {"time": 4.9})], 1),
        # Aborted, and a peer reported it before the end was noticed.
        ([Ending(0, 1, 5.1, LOG, error=REPORT | {"time": 4.99}), Ending(1, -6, 5.0, LOG)], 1),
        # A slow exit, whose destructors made a peer report; a crash like it.
        ([Ending(0, 1, 5.1, LOG, error=REPORT | {"time": 4.3}), Ending(1, 3, 5.0, LOG)], 1),
        ([Ending(0, 1, 5.1, LOG, error=REPORT | {"time": 4.3}), Ending(1, -11, 5.0, LOG)], 1),
        # A lost exit status beside a rank that was ended by the supervisor.
        ([Ending(0, -15, 5.5, LOG, terminated_at=5.3), Ending(1, None, 5.0, LOG)], 1),
    ],
)
def test_blame(endings: list[Ending], rank: int) -> None:
    assert first_failure(endings).rank == rank


def test_nobody_to_blame() -> None:
    with pytest.raises(ValueError, match="none of the 2 ranks"):
        first_failure([Ending(0, 0, 1.0, LOG), Ending(1, -15, 2.0, LOG, terminated_at=1.5)])


def test_last_lines_stand_in_for_a_traceback() -> None:
    tail = "\n".join(f"line {number}" for number in range(40))
    found = first_failure([Ending(0, 3, 1.0, LOG, tail=tail)])
    assert found.traceback == "\n".join(f"line {number}" for number in range(25, 40))


def test_failure_can_be_pickled(tmp_path: Path) -> None:
    error = JobFailed(RankFailure(1, 3, None, tmp_path, None, "exited with code 3", "RankExited", None))
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.failure, str(copy)) == (error.failure, str(error))
    assert pickle.loads(pickle.dumps(JobInterrupted(signal.SIGTERM))).exit_code == 143


def test_large_output_is_complete(tmp_path: Path) -> None:
    assert failure(tmp_path, 2, "flood", "1:flood_exit3").exit_code == 3
    expected = "".join(f"{number:06d}{'x' * 93}\n" for number in range(100_000))
    assert log_text(tmp_path, 1) == expected  # 10 MB
    assert expected.startswith(log_text(tmp_path, 0))
    run(tmp_path, 1, "flood")
    assert log_text(tmp_path, 0) == expected


@pytest.mark.parametrize("action", ["child", "session_child"])
def test_child_that_holds_the_output(tmp_path: Path, action: str) -> None:
    started = time.monotonic()
    run(tmp_path, 2, "ok", f"1:{action}")
    assert time.monotonic() - started < 3.0
    child = pid(tmp_path, "child1")
    if action == "session_child":  # out of reach by its own choice: the worker's to end
        assert alive(child)
        os.kill(child, signal.SIGKILL)
    wait_for("the end of the child", lambda: not alive(child))


def test_child_of_a_failing_rank_ends_with_it(tmp_path: Path) -> None:
    assert failure(tmp_path, 2, "child_hang", "1:exit3").rank == 1
    wait_for("the end of the child", lambda: not alive(pid(tmp_path, "child0")))


def test_console_shows_what_rank_0_prints(tmp_path: Path) -> None:
    console = io.BytesIO()
    run(tmp_path, 2, "talk", console=console)
    assert console.getvalue() == b"out 0\nerr 0\nno line end"


def test_console_without_echo_stays_quiet(tmp_path: Path) -> None:
    console = io.BytesIO()
    run(tmp_path, 1, "progress", console=console, echo=False)
    assert console.getvalue() == b""
    assert log_text(tmp_path, 0) == "\x1b[1mto stdout\x1b[0m\n"


def test_console_is_stderr_by_default(tmp_path: Path) -> None:
    program = f"""
from pathlib import Path
from launchers.supervisor import run_ranks
run_ranks({command(tmp_path, "talk")}, world_size=2, out_dir=Path({str(tmp_path)!r}))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"", b"out 0\nerr 0\nno line end")


@pytest.mark.parametrize("echo", [True, False])
def test_progress_reaches_a_terminal_untouched(tmp_path: Path, echo: bool) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "wb") as console, os.fdopen(ours, "rb", buffering=0) as screen:
        os.set_blocking(ours, False)
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 77, 0, 0))
        run(tmp_path, 2, "progress", console=console, echo=echo)
        shown = screen.read() or b""
        run(tmp_path, 2, "environment", console=console)
    assert b" 10%\r 20%\r" in shown
    assert (b"to stdout" in shown) == echo
    assert log_text(tmp_path, 1) == ""
    first, second = (json.loads((tmp_path / f"environment{rank}.json").read_text()) for rank in range(2))
    assert (first["VGEN_TERMINAL"], first["COLUMNS"], first["LINES"]) == ("1", "77", "33")
    assert "VGEN_TERMINAL" not in second


class ClosedTerminal(io.BytesIO):
    def write(self, _data: Any) -> int:
        raise BrokenPipeError


def test_broken_console_and_callback_do_not_matter(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    calls = []

    def broken(_rank: int, line: str) -> None:
        calls.append(line)
        raise RuntimeError("spoilt")

    run(tmp_path, 1, "talk", console=ClosedTerminal(), on_line=broken)
    assert log_text(tmp_path, 0) == "out 0\nerr 0\nno line end"
    assert calls == ["out 0"]
    assert "on_line failed for rank 0" in caplog.text


def test_full_disk_does_not_stop_the_ranks(tmp_path: Path) -> None:
    """A limit on the size of files, for the supervisor alone, stands in for the disk."""
    script = f"""
import resource, sys
from pathlib import Path
from launchers.guard import Guard
from launchers.supervisor import JobFailed, run_ranks
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))
run_ranks({command(tmp_path, "flood")}, world_size=2, out_dir=Path({str(tmp_path)!r}), console=False)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "ranks" / "rank1.log").stat().st_size == 300_000
    assert "lacks 9700000 bytes" in done.stderr


def test_command_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        run_ranks(["/nonexistent/program"], world_size=2, out_dir=tmp_path, console=False)


def test_world_size_below_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="world_size is 0"):
        run(tmp_path, 0, "ok")


def test_runs_beside_the_main_thread(tmp_path: Path) -> None:
    found: list[BaseException] = []

    def job(folder: Path) -> None:
        folder.mkdir()
        try:
            run(folder, 2, "ok", "1:exit3")
        except JobFailed as error:
            found.append(error)

    threads = [threading.Thread(target=job, args=(tmp_path / str(number),)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [error.failure.rank for error in found if isinstance(error, JobFailed)] == [1, 1]


PARENT = """
import signal, sys
from pathlib import Path
from launchers.supervisor import JobInterrupted, run_ranks
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup too
before = signal.getsignal(signal.SIGTERM)
try:
    run_ranks({command}, world_size=2, out_dir=Path({folder!r}), grace_s={grace_s}, console=False)
except JobInterrupted as end:
    assert signal.getsignal(signal.SIGTERM) is before
    print(end)
    sys.exit(end.exit_code)
"""


def start_parent(folder: Path, *actions: str, grace_s: float = GRACE_S) -> "subprocess.Popen[str]":
    program = PARENT.format(command=command(folder, *actions), folder=str(folder), grace_s=grace_s)
    return subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_ends_the_job(tmp_path: Path, number: signal.Signals) -> None:
    with start_parent(tmp_path, "child_hang", "1:stubborn") as parent:
        wait_for("the ranks", lambda: (tmp_path / "child0").exists() and (tmp_path / "deaf1").exists())
        parent.send_signal(number)
        said, _ = parent.communicate(timeout=10)
    assert parent.returncode == 128 + number
    assert said == f"The job was ended by {number.name} and all its ranks were stopped.\n"
    assert not any(alive(pid(tmp_path, name)) for name in ("rank0", "rank1"))
    wait_for("the end of the child", lambda: not alive(pid(tmp_path, "child0")))


def test_second_signal_cuts_the_grace(tmp_path: Path) -> None:
    with start_parent(tmp_path, "stubborn", grace_s=60.0) as parent:
        wait_for("the ranks", lambda: all((tmp_path / f"deaf{rank}").exists() for rank in range(2)))
        parent.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert parent.poll() is None
        parent.send_signal(signal.SIGTERM)
        parent.communicate(timeout=10)
    assert parent.returncode == 128 + signal.SIGTERM


def test_killed_parent_leaves_nothing(tmp_path: Path, nothing_left: bytes) -> None:
    with start_parent(tmp_path, "child_hang", "1:stubborn") as parent:
        wait_for("the ranks", lambda: (tmp_path / "child0").exists() and (tmp_path / "deaf1").exists())
        assert len(processes_of(nothing_left)) == 5  # parent, guard, two ranks, a child
        parent.kill()
    wait_for("the end of all", lambda: not processes_of(nothing_left), 3.0)


@pytest.mark.parametrize("broken", ["guard", "tie"])
def test_guard_and_tie_work_alone(tmp_path: Path, nothing_left: bytes, broken: str) -> None:
    """Ranks die with a killed parent though the guard is dead, or though they never called `die_with_parent`."""
    worker = ["sleep", "120"] if broken == "tie" else command(tmp_path, "hang")
    program = PARENT.format(command=worker, folder=str(tmp_path), grace_s=1.0)
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT) as parent:
        if broken == "guard":
            wait_for("the ranks", lambda: all((tmp_path / f"hangs{rank}").exists() for rank in range(2)))
            guards = [n for n in processes_of(nothing_left) if b"guard.py" in Path(f"/proc/{n}/cmdline").read_bytes()]
            assert len(guards) == 1
            os.kill(guards[0], signal.SIGKILL)
        else:
            wait_for("the ranks", lambda: len(processes_of(nothing_left)) == 4)
            time.sleep(0.2)
        parent.kill()
    wait_for("the end of all", lambda: not processes_of(nothing_left), 3.0)


def test_rank_whose_parent_is_gone_already_ends(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    environ = os.environ | {"RANK": "0", "VGEN_PARENT_PID": str(gone.pid)}
    assert subprocess.run(command(tmp_path, "ok"), env=environ, check=False).returncode == 1
    environ["VGEN_PARENT_PID"] = str(os.getppid())  # a living one: this process stands for a wrapper
    assert subprocess.run(command(tmp_path, "ok"), env=environ, check=False).returncode == 0


def test_launchers_import_no_torch() -> None:
    program = "import sys, launchers.supervisor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0
