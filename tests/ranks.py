"""Several ranks on this machine for a test: processes, their results, and the first traceback."""

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

LIBRARIES = ["torch", "torch.distributed", "transformers", "diffusers", "vgen.tasks.generate"]
"""What ranks import, which takes ten seconds of a core; none of it starts a thread."""


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, backend: str = "gloo") -> list[Any]:
    """``function(*args)`` on each of ``world_size`` ranks of one group; what it returns, by rank.

    ``function`` has to be one that a new process can import, results and arguments such that pickle can carry them.
    With ``backend="nccl"`` a rank has a GPU, or shares one where there are fewer (see ``conftest.py``).
    Ranks are forked from a process that has imported the libraries: give one call many cases all the same.

    Raises:
        RuntimeError: a rank failed; with the traceback of the first one, since the others fail for want of it.
    """
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.set_forkserver_preload(LIBRARIES)
        try:
            mp.start_processes(
                _main,
                args=(world_size, folder, backend, function, args),
                nprocs=world_size,
                # Nothing that CUDA has touched can be forked.
                start_method="forkserver" if backend == "gloo" else "spawn",
            )
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            notes = sorted(Path(folder).glob("*.error"), key=lambda path: path.stat().st_mtime_ns)
            raise RuntimeError(notes[0].read_text() if notes else str(error)) from error
        return [torch.load(Path(folder, f"{rank}.pt"), weights_only=False) for rank in range(world_size)]


def _main(
    rank: int, world_size: int, folder: str, backend: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    if backend == "nccl":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    try:
        torch.save(function(*args), Path(folder, f"{rank}.pt"))
        dist.barrier()
    except BaseException:
        # Before the group goes, which the others notice.
        Path(folder, f"{rank}.error").write_text(traceback.format_exc())
        raise
    finally:
        dist.destroy_process_group()
