"""A rank without torch for the tests of the supervisor: `fake_worker.py FOLDER ACTION [RANK:ACTION ...]`."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from launchers.rank import console_stream, die_with_parent, error_file, write_error

RANK = int(os.environ["RANK"])
PADDING = "x" * 93


class SpoiltError(Exception):
    pass


def sleep_on() -> None:
    time.sleep(120)


def hang(folder: Path) -> None:
    mark(folder, "hangs")
    sleep_on()


def wait_for(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.01)


def dead(folder: Path, rank: int) -> bool:
    """True once that rank ran and is a zombie or gone."""
    try:
        number = int((folder / f"rank{rank}.pid").read_text())
    except (OSError, ValueError):
        return False
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def exit4_second(folder: Path) -> None:
    wait_for(lambda: dead(folder, 2))
    time.sleep(0.02)
    sys.exit(4)


def exit3_second(folder: Path) -> None:
    wait_for((folder / "polite0").exists)
    sys.exit(3)


def talk_second(folder: Path) -> None:
    wait_for(lambda: dead(folder, 1))
    time.sleep(0.1)
    print("last words")
    sleep_on()


def report_second(folder: Path) -> None:
    wait_for(lambda: error_file(folder, 1).exists())
    report_and_fail(folder)


def fail() -> None:
    raise SpoiltError(f"rank {RANK} = spoilt")


def report_and_fail(folder: Path) -> None:
    try:
        fail()
    except SpoiltError as error:
        write_error(folder, error, "denoise")
        raise


def report_and_hang(folder: Path) -> None:
    try:
        fail()
    except SpoiltError as error:
        write_error(folder, error, "decode")
    sleep_on()


def stubborn(folder: Path) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    mark(folder, "deaf")
    sleep_on()


def polite(folder: Path) -> None:
    """Uses the grace: what it writes takes longer than the other rank takes to fail."""

    def leave(*_: object) -> None:
        time.sleep(0.2)
        mark(folder, "goodbye")
        os._exit(0)

    signal.signal(signal.SIGTERM, leave)
    mark(folder, "polite")
    sleep_on()


def lose_peer(folder: Path) -> None:
    """What gloo does: raises as soon as the connection to rank 1 breaks."""
    with socket.create_server(("127.0.0.1", int(os.environ["MASTER_PORT"]))) as server:
        peer, _ = server.accept()
        with peer:
            try:
                received = peer.recv(1)
                raise ConnectionError(f"peer closed the connection: {received!r}")
            except OSError as error:
                write_error(folder, error, "denoise")
                raise


def meet_peer() -> socket.socket:
    while True:
        try:
            return socket.create_connection(("127.0.0.1", int(os.environ["MASTER_PORT"])))
        except ConnectionRefusedError:
            time.sleep(0.01)


def meet_then(end: Callable[[], None]) -> None:
    peer = meet_peer()
    end()
    peer.close()


def child(*, session: bool) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "120"], start_new_session=session)


def leave_child(folder: Path, *, session: bool) -> None:
    """Ends while a child of its own still holds the output."""
    (folder / f"child{RANK}.pid").write_text(str(child(session=session).pid))


def child_then_hang(folder: Path) -> None:
    leave_child(folder, session=False)
    mark(folder, "child")
    sleep_on()


def dump_environment(folder: Path) -> None:
    (folder / f"environment{RANK}.json").write_text(json.dumps(dict(os.environ)))


def show_progress(_folder: Path) -> None:
    print("\x1b[1mto stdout\x1b[0m", flush=True)
    stream = console_stream()
    if stream is not None:
        stream.write(" 10%\r 20%\r")
        stream.flush()


def talk(_folder: Path) -> None:
    print(f"out {RANK}")
    print(f"err {RANK}", file=sys.stderr)
    sys.stdout.write("no line end")


def flood(_folder: Path) -> None:
    for number in range(100_000):
        sys.stdout.write(f"{number:06d}{PADDING}\n")


def flood_and_exit(folder: Path) -> None:
    flood(folder)
    sys.exit(3)


def mark(folder: Path, name: str) -> None:
    (folder / f"{name}{RANK}").touch()


ACTIONS: dict[str, Callable[[Path], object]] = {
    "ok": lambda _: None,
    "hang": hang,
    "raise": lambda _: fail(),
    "report": report_and_fail,
    "report_second": report_second,
    "report_hang": report_and_hang,
    "damaged_report": lambda folder: (error_file(folder, RANK).write_text("{"), sys.exit(4)),
    "exit3": lambda _: sys.exit(3),
    "exit4_second": exit4_second,
    "kill9": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda _: os.kill(os.getpid(), signal.SIGSEGV),
    "stubborn": stubborn,
    "polite": polite,
    "talk_second": talk_second,
    "exit3_second": exit3_second,
    "lose_peer": lose_peer,
    "meet_exit3": lambda _: meet_then(lambda: sys.exit(3)),
    "meet_kill9": lambda _: meet_then(lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "child": lambda folder: leave_child(folder, session=False),
    "session_child": lambda folder: leave_child(folder, session=True),
    "child_hang": child_then_hang,
    "environment": dump_environment,
    "progress": show_progress,
    "talk": talk,
    "flood": flood,
    "flood_exit3": flood_and_exit,
}


def main() -> None:
    die_with_parent()
    folder = Path(sys.argv[1])
    (folder / f"rank{RANK}.pid").write_text(str(os.getpid()))
    own = dict(argument.split(":") for argument in sys.argv[3:])
    ACTIONS[own.get(str(RANK), sys.argv[2])](folder)


if __name__ == "__main__":
    main()
