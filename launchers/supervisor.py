"""Starts the rank processes of one job on this machine, watches them, and leaves none behind.

Files in the job's folder: `ranks/rank<N>.log` (all that rank N writes) and, from a rank that fails,
`ranks/rank<N>.error.json` (see `launchers.rank.write_error`). N is the global rank. A rank that keeps one has
`ranks/rank<N>.at` (see `launchers.notes`).

A rank inherits no terminal. Where the console is one, global rank 0 gets VGEN_TERMINAL=1, COLUMNS, LINES, and a pipe
to it (`launchers.rank.console_stream`) that bypasses its log: progress bars reach the screen untouched by what
libraries print, and no control codes reach the log.
"""

import contextlib
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, BinaryIO, cast

from launchers.environment import NodeLayout, free_port, node_layout, rank_environment
from launchers.failure import Ending, RankFailure, first_failure, read_error
from launchers.guard import Guard
from launchers.notes import note_file, read_note
from launchers.output import RankOutput, Show
from launchers.rank import die_with_parent, error_file

log = logging.getLogger(__name__)

__all__ = ["JobFailed", "JobInterrupted", "RankFailure", "die_with_parent", "run_ranks"]

POLL_S = 0.1
SETTLE_S = 0.3  # for the last words of a failing rank, and for the ranks that fail together with it
REAP_S = 10.0  # a process can outlive SIGKILL for a while, inside a driver call

_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class JobFailed(Exception):  # noqa: N818
    """A rank failed; all others were ended. The text is one sentence."""

    def __init__(self, failure: RankFailure) -> None:
        super().__init__(failure)
        self.failure = failure

    def __str__(self) -> str:
        return str(self.failure)


class JobInterrupted(Exception):  # noqa: N818
    """A signal asked for the end of the job; all ranks were ended. `exit_code` is the shell's for that signal."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal_number)
        self.signal_number = signal_number
        self.exit_code = 128 + signal_number

    def __str__(self) -> str:
        return f"The job was ended by {signal.Signals(self.signal_number).name} and all its ranks were stopped."


def run_ranks(
    command: Sequence[str],
    *,
    world_size: int,
    out_dir: Path,
    environ: Mapping[str, str] | None = None,
    layout: NodeLayout | None = None,
    grace_s: float = 5.0,
    console: BinaryIO | bool = True,
    echo: bool = True,
    on_line: Callable[[int, str], None] | None = None,
) -> None:
    """Runs `command` as `world_size` ranks on this machine and returns when all of them have exited with 0.

    SIGINT, SIGTERM and SIGHUP end the job if this is the main thread (a second one cuts the grace short); elsewhere
    they are left to the program. If this process is killed, the ranks and their process groups are killed too.

    Args:
        command: program and arguments, the same for each rank; a worker calls `die_with_parent` first.
        world_size: ranks on this machine.
        out_dir: the job's folder; created.
        environ: what the ranks' environment is built from; the process's own by default. Never changed.
        layout: this machine among several; read from `environ` by default.
        grace_s: seconds between SIGTERM and SIGKILL, and for a rank that reported an error to exit by itself.
        console: where global rank 0 shows itself: a binary stream, True for stderr, False for nowhere.
        echo: copy what global rank 0 prints to the console too, tracebacks included; else only its progress.
        on_line: called with global rank and text for each line printed, from one thread per rank.

    Raises:
        ValueError: no rank asked for, or a layout that cannot be read.
        OSError: the folder cannot be written or the command cannot be started.
        JobFailed: a rank failed, with the one that failed first.
        JobInterrupted: a signal ended the job.
    """
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}, but a job needs at least one rank: ask for 1 or more")
    environ = dict(os.environ if environ is None else environ)
    layout = node_layout(environ) if layout is None else layout
    show = Show(_console_stream(console), echo, on_line)
    environments = _environments(environ, world_size, layout)
    _prepare_folder(out_dir / "ranks", alone=layout.num_nodes == 1)
    with _Signals() as signals:
        failure = _supervise(command, environments, out_dir, show, signals, grace_s)
    # Only now, with the old handlers back and nothing left to clean up. An interrupt wins: a sweep has to stop too.
    if signals.last is not None:
        raise JobInterrupted(signals.last) from (None if failure is None else JobFailed(failure))
    if failure is not None:
        raise JobFailed(failure)


class _Signals:
    """Notes the signals that end a job instead of raising at once, which could break a clean-up half-way."""

    def __init__(self) -> None:
        self.last: int | None = None
        self.count = 0
        self._old: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "_Signals":
        if threading.current_thread() is threading.main_thread():
            for number in _ENDING_SIGNALS:
                # None is a handler from outside Python that could not be put back; an ignored signal (nohup) stays so.
                if signal.getsignal(number) not in (None, signal.SIG_IGN):
                    self._old[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.last = number
        self.count += 1


class _Rank:
    """One rank's process and process group.

    The process is not reaped before `reap`: as long as it is a zombie its number stays taken, so that a signal to the
    group cannot hit a stranger.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], out_dir: Path, show: Show) -> None:
        self.number = int(environ["RANK"])
        self.error_file = error_file(out_dir, self.number)
        self.note_file = note_file(out_dir, self.number)
        self.output = RankOutput(self.number, out_dir / "ranks" / f"rank{self.number}.log", show)
        self.ended = False
        self.status: int | None = None
        self._seen_at = math.inf
        self._terminated_at = math.inf
        self._killed = False
        try:
            self.process = subprocess.Popen(
                command,
                env={**environ, **self.output.variables},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                start_new_session=True,
                pass_fds=self.output.child_fds,
            )
        except BaseException:
            self.output.close()
            raise

    def attach_output(self) -> None:
        self.output.attach(cast(BinaryIO, self.process.stdout))

    def poll(self) -> bool:
        """True once the process has ended; its exit code, or minus its signal, is in `status` then."""
        if self.ended:
            return True
        try:
            info = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # somebody else waited for it, or SIGCHLD is ignored
            self.ended = True
        else:
            if info is None:
                return False
            self.ended = True
            self.status = info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
        self._seen_at = time.time()
        return True

    def failed(self) -> bool:
        return self.poll() and self.status != 0

    def terminate(self) -> None:
        if not self.poll():
            self._terminated_at = time.time()
        self._signal_group(signal.SIGTERM)

    def kill(self) -> None:
        self._killed = not self.poll()
        self._signal_group(signal.SIGKILL)

    def reap(self) -> None:
        try:
            self.process.wait(REAP_S)
        except subprocess.TimeoutExpired:
            log.error("rank %d (process %d) has not died of SIGKILL yet", self.number, self.process.pid)
        if not self.ended:
            self.ended, self.status, self._seen_at = True, self.process.returncode, time.time()
        self.output.finish()

    def ending(self) -> Ending:
        # The end of the output is noticed at once, the end of the process at the next look.
        ended_at = self._seen_at
        if self.output.ended_at is not None:
            ended_at = max(self.output.ended_at, ended_at - POLL_S - SETTLE_S)
        return Ending(
            rank=self.number,
            status=self.status,
            ended_at=ended_at,
            log=self.output.log.path,
            tail=self.output.log.tail(),
            error=read_error(self.error_file),
            terminated_at=self._terminated_at,
            killed=self._killed,
        )

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


def _supervise(
    command: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    out_dir: Path,
    show: Show,
    signals: _Signals,
    grace_s: float,
) -> RankFailure | None:
    """The job from its first process to the end of its last."""
    ranks: list[_Rank] = []
    with Guard() as guard:
        try:
            for environ in environments:
                rank = _Rank(command, environ, out_dir, show)
                ranks.append(rank)
                guard.watch(rank.process.pid)
                rank.attach_output()
            failed = _watch(ranks, signals, grace_s)
            if failed:
                # Before anything is ended: a rank that stalled may wake up.
                notes = {rank.number: note for rank in ranks if (note := read_note(rank.note_file)) is not None}
                time.sleep(SETTLE_S)
        finally:
            _end(ranks, signals, grace_s)
    return first_failure([rank.ending() for rank in ranks], notes) if failed else None


def _watch(ranks: Sequence[_Rank], signals: _Signals, grace_s: float) -> bool:
    """Waits for the end of the job: True if a rank failed, False if all are done or a signal came."""
    give_up_at = math.inf
    while signals.last is None:
        failed = [rank for rank in ranks if rank.failed()]  # looks at all of them, for the order of their ends
        if failed:
            return True
        # A rank can hang in its clean-up, in a collective that its peers never enter.
        reported = any(rank.error_file.exists() for rank in ranks)
        if all(rank.ended for rank in ranks) or time.monotonic() > give_up_at:
            return reported
        if reported:
            give_up_at = min(give_up_at, time.monotonic() + grace_s)
        time.sleep(POLL_S)
    return False


def _end(ranks: Sequence[_Rank], signals: _Signals, grace_s: float) -> None:
    """Leaves no process of any rank's group: SIGTERM, a grace for the ranks, SIGKILL for all that is left."""
    give_up_at = time.monotonic() + grace_s
    signals_before = signals.count
    try:
        for rank in ranks:
            rank.terminate()
        while any(not rank.poll() for rank in ranks):
            if time.monotonic() > give_up_at or signals.count > signals_before:
                break
            time.sleep(POLL_S / 2)
    finally:
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.reap()
        for rank in ranks:
            rank.output.close()


def _environments(environ: Mapping[str, str], world_size: int, layout: NodeLayout) -> list[dict[str, str]]:
    port = free_port() if layout.master_port is None else layout.master_port
    return [
        rank_environment(
            environ,
            local_rank=local_rank,
            local_world_size=world_size,
            node_rank=layout.node_rank,
            num_nodes=layout.num_nodes,
            master_addr=layout.master_addr,
            master_port=port,
        )
        | {"VGEN_PARENT_PID": str(os.getpid())}
        for local_rank in range(world_size)
    ]


def _prepare_folder(folder: Path, *, alone: bool) -> None:
    """Makes the folder of the ranks and clears it of an earlier try's files, unless other nodes write there too."""
    folder.mkdir(parents=True, exist_ok=True)
    if alone:
        for old in [file for name in ("rank*.log", "rank*.error.json", "rank*.at") for file in folder.glob(name)]:
            old.unlink()


def _console_stream(console: BinaryIO | bool) -> BinaryIO | None:
    if isinstance(console, bool):
        return getattr(sys.stderr, "buffer", None) if console else None
    return console
