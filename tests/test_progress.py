"""Progress reaches the supervisor's console pipe and nothing else."""

import os
import re
import subprocess
import sys
import textwrap

import pytest

SCRIPT = textwrap.dedent(
    """
    import sys, threading, time
    from vgen.progress import progress

    with progress("load", 2 * 2**30, unit="bytes") as bar:
        bar.advance(2**30)
        bar.advance(2**30)
    with progress("denoise", 4) as steps, progress("write", 8, unit="frames") as frames:
        for _ in range(4):
            steps.advance()
            frames.advance(2)
    with progress("decode", None) as bar:
        bar.advance()
    try:
        with progress("denoise", 4):
            raise KeyError("inside")
    except KeyError:
        pass
    deadline = time.monotonic() + 5
    while threading.active_count() > 1 and time.monotonic() < deadline:
        time.sleep(0.02)
    print("rich" in sys.modules, threading.active_count())
    """
)


def run_supervised(close_early: bool = False) -> tuple[str, str]:
    """What a rank under a supervisor with a terminal of 72 columns writes to the console, and to its own stdout."""
    read_end, write_end = os.pipe()
    environ = {**os.environ, "VGEN_PARENT_PID": str(os.getpid()), "VGEN_TERMINAL": "1", "COLUMNS": "72"}
    command = [sys.executable, "-W", "error", "-c", SCRIPT]
    if close_early:
        os.close(read_end)
    with subprocess.Popen(
        command,
        env=environ | {"VGEN_CONSOLE_FD": str(write_end)},
        pass_fds=(write_end,),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        os.close(write_end)
        console = b""
        if not close_early:
            with os.fdopen(read_end, "rb") as pipe:
                console = pipe.read()
        output, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console.decode()), output


def test_bars_reach_the_console_and_not_the_log() -> None:
    console, output = run_supervised()
    assert re.search(r"load .*2\.00/2\.00 .*GiB/s", console)
    assert re.search(r"denoise .*4/4 .*it/s", console)
    assert re.search(r"write .*8/8", console)
    assert "decode" in console
    assert max(len(line) for line in re.split(r"[\r\n]", console)) <= 72
    assert output == "True 1\n", "no bar, and no thread left"


def test_a_terminal_that_goes_away_ends_nothing() -> None:
    assert run_supervised(close_early=True)[1] == "True 1\n"


@pytest.mark.parametrize("supervised", [True, False])
def test_without_a_terminal_there_is_silence(supervised: bool) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("VGEN_")}
    if supervised:
        environ["VGEN_PARENT_PID"] = str(os.getpid())
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environ, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("False 1\n", "")
