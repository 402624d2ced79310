"""A rank with real collectives for the tests of failures: `watched_worker.py FOLDER SCENARIO`."""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from launchers.notes import note_stage
from launchers.rank import die_with_parent, write_error

die_with_parent()
RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from vgen.parallel.collectives import gather, heads_for_tokens  # noqa: E402
from vgen.parallel.guidance import exchange  # noqa: E402
from vgen.parallel.halo import exchange_lines  # noqa: E402
from vgen.parallel.mesh import Mesh, build_mesh  # noqa: E402
from vgen.parallel.plans import ParallelPlan  # noqa: E402
from vgen.parallel.watch import start_watch  # noqa: E402

TIMEOUT_S = 2.0
CULPRIT = 1


class SpoiltError(Exception):
    pass


def forever() -> None:
    time.sleep(600)


def spoil() -> None:
    raise SpoiltError("rank is spoilt")


def wait_for_others(folder: Path) -> None:
    """Until every other rank is about to enter its collective, and a moment more."""
    while len(list(folder.glob("waiting*"))) < WORLD_SIZE - 1:
        time.sleep(0.01)
    time.sleep(0.3)


def passes(mesh: Mesh) -> None:
    exchange({name: (torch.ones(2),) for name in "ab"}, [["a"], ["b"]], mesh.cfg)


def heads(mesh: Mesh) -> None:
    assert mesh.ulysses is not None
    heads_for_tokens([torch.ones(1, 4, 3, 2)] * 3, mesh.ulysses, "ulysses: queries, keys and values")


def gather_spoilt(mesh: Mesh) -> None:
    assert mesh.ulysses is not None
    gather(torch.ones(2, dtype=torch.uint16), 0, mesh.ulysses, "ulysses: velocity")  # which gloo does not know


def lines(mesh: Mesh) -> None:
    assert mesh.vae is not None
    x = torch.ones(1, 2, 1, 1, 4)
    exchange_lines(x, x, mesh.vae)


def steps(mesh: Mesh, folder: Path, culprit: Callable[[], object], last: Callable[[Mesh], None]) -> None:
    """Two steps that all ranks make; in the third one of them does something else."""
    note_stage("denoise")
    for step in range(3):
        if mesh.cfg is not None:
            passes(mesh)
        if step == 2:
            if RANK == CULPRIT:
                wait_for_others(folder)
                culprit()
            (folder / f"waiting{RANK}").touch()
        last(mesh)


def late(mesh: Mesh, _: Path) -> None:
    """Longer than the timeout, which is no failure between requests."""
    if RANK == CULPRIT:
        time.sleep(TIMEOUT_S + 0.5)
    mesh.wait_for_replica()
    heads(mesh)


def write_stage(name: str, then: Callable[[], object]) -> None:
    note_stage(name)
    then()


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


CFG2_ULYSSES2 = ParallelPlan(cfg_size=2, ulysses_size=2)
ULYSSES2 = ParallelPlan(ulysses_size=2)
HALO3 = ParallelPlan(vae_size=3)
SCENARIOS: dict[str, tuple[ParallelPlan, Callable[[Mesh, Path], None]]] = {
    "raise": (ULYSSES2, lambda mesh, folder: steps(mesh, folder, spoil, heads)),
    "raise_inside": (ULYSSES2, lambda mesh, folder: steps(mesh, folder, lambda: gather_spoilt(mesh), heads)),
    "exit": (ULYSSES2, lambda mesh, folder: steps(mesh, folder, lambda: os._exit(0), heads)),
    "kill": (ULYSSES2, lambda mesh, folder: steps(mesh, folder, lambda: os.kill(os.getpid(), signal.SIGKILL), heads)),
    "sleep": (CFG2_ULYSSES2, lambda mesh, folder: steps(mesh, folder, forever, heads)),
    "stop": (HALO3, lambda mesh, folder: steps(mesh, folder, lambda: write_stage("decode_video", stop), lines)),
    "late": (ULYSSES2, late),
}


def main() -> None:
    folder = Path(sys.argv[1])
    (folder / f"rank{RANK}.pid").write_text(str(os.getpid()))
    plan, scenario = SCENARIOS[sys.argv[2]]
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo")
        start_watch(folder)
        scenario(build_mesh(plan, WORLD_SIZE, timeout_s=TIMEOUT_S), folder)
    except BaseException as error:
        write_error(folder, error, "denoise")
        traceback.print_exception(error)
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
