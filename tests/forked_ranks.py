"""The ranks of a job from one process that has imported everything, where starting each by itself takes too long.

``python -m tests.forked_ranks JOB_JSON WORLD_SIZE``. What the supervisor does about failures is not in it: if one rank
fails, all end.
"""

import os
import signal
import socket
import sys
import traceback
from pathlib import Path

from launchers.rank import die_with_parent
from vgen.job import read_job
from vgen.worker import run_rank


def main() -> int:
    path, world_size = Path(sys.argv[1]), int(sys.argv[2])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), NODE_RANK="0", VGEN_PARENT_PID=str(os.getpid()))
    os.environ.update(WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
    ranks = {_fork(path, rank) for rank in range(world_size)}
    while ranks:
        ended, status = os.wait()
        ranks.remove(ended)
        if status:
            for rank in ranks:
                os.kill(rank, signal.SIGKILL)
            return 1
    return 0


def _fork(path: Path, rank: int) -> int:
    child = os.fork()
    if child:
        return child
    try:
        die_with_parent()
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        run_rank(read_job(path))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    # No destructors: they are the first process's.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
