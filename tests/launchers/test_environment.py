"""Variables of a rank, SLURM's node layout, and the command lines of the ready scripts."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from launchers.environment import NodeLayout, first_host, free_port, node_layout, rank_environment

SCRIPTS = Path(__file__).resolve().parents[2] / "launchers"
OUTER = {
    "SLURM_NTASKS": "4",
    "SLURM_JOB_ID": "7",
    "PMI_RANK": "3",
    "PMIX_NAMESPACE": "x",
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "9",
    "WORLD_SIZE": "99",
    "GROUP_WORLD_SIZE": "9",
    "ROLE_RANK": "9",
    "MASTER_ADDR": "elsewhere",
    "VGEN_TERMINAL": "1",
    "VGEN_CONSOLE_FD": "9",
    "VGEN_PARENT_PID": "1",
}
TWO_NODES = {
    "SLURM_NODEID": "1",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "gpu[03-05,9]",
    "SLURM_JOB_ID": "123456",
    "SLURM_NTASKS_PER_NODE": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}


def environment(base: dict[str, str]) -> dict[str, str]:
    return rank_environment(
        base, local_rank=2, local_world_size=4, node_rank=1, num_nodes=3, master_addr="gpu03", master_port=20001
    )


def test_rank_environment_replaces_the_outer_launcher() -> None:
    kept = {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "4,5", "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "3"}
    base = OUTER | kept
    before = dict(base)
    assert environment(base) == kept | {
        "RANK": "6",
        "LOCAL_RANK": "2",
        "WORLD_SIZE": "12",
        "LOCAL_WORLD_SIZE": "4",
        "NODE_RANK": "1",
        "GROUP_RANK": "1",
        "MASTER_ADDR": "gpu03",
        "MASTER_PORT": "20001",
        "PYTHONUNBUFFERED": "1",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "500",
    }
    assert base == before


@pytest.mark.parametrize("name", ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "TORCH_FR_WAIT_TIMEOUT_DUMP_MILSEC"])
def test_the_wait_of_the_watchdog_can_be_set(name: str) -> None:
    found = environment({name: "9000"})
    assert {key: value for key, value in found.items() if key.endswith("DUMP_MILSEC")} == {name: "9000"}


@pytest.mark.parametrize(("cores", "threads"), [(2, "1"), (9, "2"), (32, "8")])
def test_threads_share_the_cores_of_this_process(cores: int, threads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert environment({})["OMP_NUM_THREADS"] == threads
    assert environment({"OMP_NUM_THREADS": ""})["OMP_NUM_THREADS"] == threads


@pytest.mark.parametrize(
    ("node_list", "host"),
    [
        ("gpu03", "gpu03"),
        ("gpu03,gpu04", "gpu03"),
        ("gpu[03-05,9]", "gpu03"),
        ("gpu[9,03-05],login1", "gpu9"),
        ("a-b[007]", "a-b007"),
        ("rack[2-3]-node[01-16,20].cluster,x", "rack2-node01.cluster"),
    ],
)
def test_first_host(node_list: str, host: str) -> None:
    assert first_host(node_list) == host


@pytest.mark.parametrize("node_list", ["", "gpu[03-05", "gpu03]", "[]", ",gpu03"])
def test_first_host_refuses_what_it_cannot_read(node_list: str) -> None:
    with pytest.raises(ValueError, match="must look like"):
        first_host(node_list)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_JOB_ID": "5", "SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": "8"},  # the shell of an allocation
        {"SLURM_JOB_ID": "5", "SLURM_NODEID": "0", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "gpu03"},
        TWO_NODES | {"SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "1"},  # a step on one node of two
    ],
)
def test_one_node_is_local(environ: dict[str, str]) -> None:
    assert node_layout(environ) == NodeLayout(0, 1, "127.0.0.1", None)


def test_layout_of_several_nodes() -> None:
    assert node_layout(TWO_NODES) == NodeLayout(1, 2, "gpu03", 20000 + 123456 % 12000)
    assert node_layout(TWO_NODES | {"SLURM_STEP_NODELIST": "gpu[04,9]"}).master_addr == "gpu04"


@pytest.mark.parametrize(
    "tasks", [{"SLURM_NTASKS_PER_NODE": "8"}, {"SLURM_STEP_TASKS_PER_NODE": "1,2(x3)"}, {"SLURM_NTASKS_PER_NODE": "2"}]
)
def test_several_tasks_per_node_are_refused(tasks: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"one SLURM task per node.*--ntasks-per-node=1"):
        node_layout(TWO_NODES | tasks)


@pytest.mark.parametrize("missing", ["SLURM_JOB_NODELIST", "SLURM_JOB_ID"])
def test_a_missing_slurm_variable_is_named(missing: str) -> None:
    with pytest.raises(ValueError, match=missing):
        node_layout({name: value for name, value in TWO_NODES.items() if name != missing})


def test_free_port_can_be_bound() -> None:
    port = free_port()
    assert 1024 < port < 65536
    with socket.create_server(("127.0.0.1", port)):
        pass


def stand_in(path: Path) -> Path:
    """A program that prints its arguments as JSON."""
    path.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    path.chmod(0o755)
    return path


def run_script(name: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(SCRIPTS / name), *arguments]
    return subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, check=False)


def test_torchrun_script_runs_the_worker(tmp_path: Path) -> None:
    job = tmp_path / "a job.json"
    job.touch()
    python = str(stand_in(tmp_path / "python"))
    head, tail = ["-m", "torch.distributed.run", "--nproc-per-node=8"], ["--module", "vgen.worker", str(job)]
    assert json.loads(run_script("torchrun.sh", str(job), "8", PYTHON=python).stdout) == [*head, "--standalone", *tail]
    several = run_script("torchrun.sh", str(job), "8", "--nnodes=2", "--node-rank=1", PYTHON=python)
    assert json.loads(several.stdout) == [*head, "--nnodes=2", "--node-rank=1", *tail]


@pytest.mark.parametrize("arguments", [(), ("missing.json", "8"), (__file__, "0"), (__file__,)])
def test_torchrun_script_says_how_to_use_it(arguments: tuple[str, ...]) -> None:
    result = run_script("torchrun.sh", *arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("usage: ")


def test_slurm_script_starts_one_task_per_node(tmp_path: Path) -> None:
    srun = stand_in(tmp_path / "srun")
    prompt = 'request.prompt="a, b = {c}"'
    result = run_script(
        "slurm.sbatch",
        "parallel=pvs8",
        prompt,
        PATH=f"{srun.parent}:{os.environ['PATH']}",
        SLURM_JOB_ID="12",
        SLURM_CPUS_PER_TASK="6",
        PYTHON="python",
    )
    task, run = ["--ntasks-per-node=1", "--kill-on-bad-exit=1", "--cpus-per-task=6"], ["python", "-m", "vgen.run"]
    assert json.loads(result.stdout) == [*task, *run, "hydra.run.dir=outputs/slurm/12", "parallel=pvs8", prompt]
