"""What a rank process calls itself: its tie to the supervisor, its way to the console, its last words."""

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import TextIO

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent() -> None:
    """Ties this process to its supervisor's life; to be called before any slow import. Does nothing without one.

    Only this process is tied. Its own children die with it through the supervisor or its guard, as long as they
    stay in its process group; one that opens a session of its own (W&B's service does) must watch its parent itself.
    """
    parent = int(os.environ.get("VGEN_PARENT_PID") or 0)
    if not parent:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    # The parent may have died before the call above. Another living parent is a wrapper (a profiler) around the rank.
    if os.getppid() != parent and not _exists(parent):
        os._exit(1)


def console_stream() -> TextIO | None:
    """Stream to the user's terminal, for progress on global rank 0; None where nothing is to be shown.

    Under a supervisor it bypasses the rank's log and its `isatty` is false: the width is in COLUMNS, and rich wants
    `force_terminal=True`. Without one (torchrun, a debugger) it is stderr.
    """
    number = os.environ.get("VGEN_CONSOLE_FD")
    if number is not None:
        os.set_inheritable(int(number), False)  # a child that outlives the rank must not hold the pipe
        return os.fdopen(int(number), "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
    supervised = "VGEN_PARENT_PID" in os.environ
    alone = not supervised and os.environ.get("RANK", "0") == "0" and sys.stderr.isatty()
    return sys.stderr if alone else None


def error_file(out_dir: Path, rank: int) -> Path:
    """Where a rank leaves the JSON object kind, message, stage, traceback, time (unix seconds) when it fails."""
    return out_dir / "ranks" / f"rank{rank}.error.json"


def write_error(out_dir: Path, error: BaseException, stage: str | None) -> None:
    """Leaves the error of this rank for the supervisor, which blames the rank whose error is the oldest.

    To be called as soon as the error is caught, SystemExit included: the clean-up of one rank makes others fail. On a
    full disk nothing is written; the supervisor then reads the end of what the rank printed.
    """
    content = {
        "kind": type(error).__name__,
        "message": str(error),
        "stage": stage,
        "traceback": "".join(traceback.format_exception(error)),
        "time": time.time(),
    }
    target = error_file(out_dir, int(os.environ.get("RANK", "0")))
    part = target.with_suffix(".part")
    with contextlib.suppress(OSError):
        part.write_text(json.dumps(content), encoding="utf-8")
        part.replace(target)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
