"""Environment variables of a rank, from the place where its job runs: this machine, or one SLURM task per node."""

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

LOCALHOST = "127.0.0.1"

# What an outer launcher left behind: Fabric, torch and MPI would take it for theirs.
_FOREIGN_PREFIXES = ("SLURM_", "PMI", "TORCHELASTIC_")
_STALE_NAMES = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "NODE_RANK",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_NAME",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "VGEN_PARENT_PID",
        "VGEN_TERMINAL",
        "VGEN_CONSOLE_FD",
    }
)

# NCCL's watchdog sleeps four times this before it ends a rank whose collective timed out, for flight records to be
# written: torch's 15 s would make a minute of it, after the timeout (getDumpTimeout in torch's ProcessGroupNCCL.cpp).
_DUMP_WAIT, _DUMP_WAIT_MS = "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", 500
_DUMP_WAIT_NAMES = (_DUMP_WAIT, "TORCH_FR_WAIT_TIMEOUT_DUMP_MILSEC")  # the second is newer torch's

# Job ids map into a range below the kernel's ephemeral ports (from 32768), where no outgoing connection sits.
_FIRST_JOB_PORT, _JOB_PORTS = 20000, 12000

_FIRST_ENTRY = re.compile(r"(?:[^,\[\]\s]|\[[^\[\]]+\])+")
_BRACKET = re.compile(r"\[([^\],-]+)[^\]]*\]")


@dataclass(frozen=True)
class NodeLayout:
    """This machine's place in a job. `master_port` is None where a port that is free now will do (one node)."""

    node_rank: int = 0
    num_nodes: int = 1
    master_addr: str = LOCALHOST
    master_port: int | None = None


def free_port() -> int:
    """A TCP port that no socket of this machine holds now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def first_host(node_list: str) -> str:
    """First host of a SLURM node list: `gpu[03-05,9],login1` gives `gpu03`.

    Raises:
        ValueError: the list is empty or its brackets do not match.
    """
    entry = _FIRST_ENTRY.match(node_list)
    if entry is None or node_list[entry.end() : entry.end() + 1] not in ("", ","):
        raise ValueError(f"node list {node_list!r} cannot be read: it must look like 'gpu[03-05,9],login1'")
    return _BRACKET.sub(r"\1", entry.group())


def node_layout(environ: Mapping[str, str]) -> NodeLayout:
    """The place of this process among the nodes of its job, from SLURM's variables or, without a SLURM task, local.

    One SLURM task per node is expected. A step's own variables count before those of its allocation.

    Raises:
        ValueError: several tasks per node, or a variable that several nodes need is missing.
    """
    if "SLURM_NODEID" not in environ:
        return NodeLayout()  # no SLURM, or the shell of an allocation: variables are there, but no task
    _require_one_task_per_node(environ)
    num_nodes = int(_first_set(environ, "SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES") or 1)
    if num_nodes == 1:
        return NodeLayout()  # a free port is safer than one from the job id: an allocation can hold several jobs
    node_list = _first_set(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    job_id = _first_set(environ, "SLURM_JOB_ID", "SLURM_JOBID")
    if node_list is None or job_id is None:
        raise ValueError(
            f"SLURM gave {num_nodes} nodes but SLURM_JOB_NODELIST or SLURM_JOB_ID is not set: start the job with srun"
        )
    port = _FIRST_JOB_PORT + int(job_id) % _JOB_PORTS
    return NodeLayout(int(environ["SLURM_NODEID"]), num_nodes, first_host(node_list), port)


def rank_environment(
    base: Mapping[str, str],
    *,
    local_rank: int,
    local_world_size: int,
    node_rank: int,
    num_nodes: int,
    master_addr: str,
    master_port: int,
) -> dict[str, str]:
    """Environment of one rank: `base` without an outer launcher's variables, plus this job's own.

    CUDA_VISIBLE_DEVICES and NCCL_* stay as they are; OMP_NUM_THREADS is this rank's share of the cores unless set, and
    NCCL's watchdog ends a rank at once unless it is told how long to wait.
    """
    kept = {
        name: value
        for name, value in base.items()
        if not name.startswith(_FOREIGN_PREFIXES) and name not in _STALE_NAMES
    }
    if not kept.get("OMP_NUM_THREADS"):
        kept["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // local_world_size))
    if not any(kept.get(name) for name in _DUMP_WAIT_NAMES):
        kept[_DUMP_WAIT] = str(_DUMP_WAIT_MS)
    return kept | {
        "RANK": str(node_rank * local_world_size + local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(num_nodes * local_world_size),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "NODE_RANK": str(node_rank),
        "GROUP_RANK": str(node_rank),
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": str(master_port),
        "PYTHONUNBUFFERED": "1",
    }


def _first_set(environ: Mapping[str, str], *names: str) -> str | None:
    return next((environ[name] for name in names if environ.get(name)), None)


def _require_one_task_per_node(environ: Mapping[str, str]) -> None:
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"):  # the first looks like 2(x3),1
        counts = [int(count) for count in re.findall(r"(?:^|,)(\d+)", environ.get(name, ""))]
        if counts and max(counts) > 1:
            raise ValueError(
                f"{name}={environ[name]}: vgen needs one SLURM task per node, because it starts the ranks itself; "
                "ask for --ntasks-per-node=1"
            )
