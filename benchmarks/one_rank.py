"""What one of several ranks has to do, measured on one device, with nobody at the other end.

    python -m benchmarks.one_rank --ranks 2,4,8 --out DIR model=ltx2 model.weights=random task=bench_decode

Runs a benchmark task as the first rank of each number of ranks, in a process group with nobody else (torch's fake
backend) whose exchanges return at once what the rank itself sent: packing, copies and the rank's own share of the work
are there, messages and waiting are not. The values are of the usual size, since a GPU multiplies zeros faster, but
garbage, and are not compared. The first rank has the longest band and the frames of all, so the ratio to one rank
bounds what that many ranks can reach: ``DIR/one_rank.md``, from ``DIR/<ranks>/bench.json``. With ``--every-rank`` the
others are measured too, one after another (``DIR/<ranks>/rank<N>``): the slowest counts, and the table says by how much
it is above their mean.

``bench_decode`` and ``bench_encode`` spread the VAE, ``bench_step`` the tokens.
"""

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from torch import Tensor
from torch.distributed import ProcessGroup

from vgen import app, config
from vgen.job import Job, plan_job
from vgen.loading import exact_fp32
from vgen.parallel import collectives
from vgen.parallel.mesh import Mesh
from vgen.requests import build_requests
from vgen.tasks import bench_decode, bench_encode, bench_step
from vgen.tasks.types import TaskContext
from vgen.typed import ConfigurationError
from vgen.validate import validate

TASKS = {"bench_step": bench_step.run, "bench_decode": bench_decode.run, "bench_encode": bench_encode.run}
SPREADS = {"bench_step": "ulysses_size", "bench_decode": "vae_size", "bench_encode": "vae_size"}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.one_rank", description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", default="2,4,8", help="numbers of ranks, with commas")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--every-rank", action="store_true", help="measure all ranks, not the first alone")
    options, overrides = parser.parse_known_args(arguments)
    counts = [int(one) for one in options.ranks.split(",")]
    for ranks in counts:
        for rank in range(ranks if options.every_rank else 1):
            measure(ranks, folder_of(options.out, ranks, rank), overrides, rank)
    table = make_table(options.out, counts)
    (options.out / "one_rank.md").write_text(table)
    sys.stdout.write(table)
    return 0


def folder_of(out: Path, ranks: int, rank: int = 0) -> Path:
    return out / str(ranks) / (f"rank{rank}" if rank else "")


class _Alone(TaskContext):
    """Writes its rows whichever rank it is."""

    @property
    def is_first(self) -> bool:
        return True


def measure(ranks: int, out_dir: Path, overrides: Sequence[str], rank: int = 0) -> None:
    """The task of ``overrides`` as ``rank`` of ``ranks`` ranks; leaves ``bench.json`` in ``out_dir``.

    Raises:
        ConfigurationError: the plan cannot run, or there is no way to spread the task.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    job = make_job(out_dir, ranks, overrides)
    device = torch.device(job.device)
    with FakeRanks(ranks, rank) as mesh_of, exact_fp32(job.config.quant.mode == "fp32"):
        TASKS[job.config.task.name](_Alone(job, device, mesh_of(job)))
    if device.type == "cuda":
        torch.cuda.empty_cache()


def make_job(out_dir: Path, ranks: int, overrides: Sequence[str]) -> Job:
    with initialize_config_dir(app.conf_dir(), version_base="1.3"):
        composed: Any = OmegaConf.to_container(compose("config", ["logger=none", *overrides]), resolve=True)
    settings = config.from_mapping(composed)
    if settings.task.name not in TASKS:
        raise ConfigurationError(f"task={settings.task.name} is no benchmark of parts; use one of: {', '.join(TASKS)}")
    alone = dataclasses.replace(settings.parallel, data_size=1, cfg_size=1, ulysses_size=1, vae_size=1)
    spread: Any = {SPREADS[settings.task.name]: ranks}
    settings = dataclasses.replace(settings, parallel=dataclasses.replace(alone, **spread))
    num_gpus = None if torch.cuda.is_available() else 0
    job = plan_job(settings, build_requests(settings.request), out_dir, num_gpus=num_gpus, sweep=None)
    validate(job.config, job.requests, job.architecture, num_gpus, job.checkpoint)
    return job


class FakeRanks:
    """Within it this process is number ``rank`` of ``ranks`` ranks; the others do not exist."""

    def __init__(self, ranks: int, rank: int = 0) -> None:
        self._ranks, self._rank = ranks, rank
        self._real: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> "FakeRanks":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        for module, name, echo in ECHOES:
            self._real.append((module, name, getattr(module, name)))
            setattr(module, name, echo)
        dist.init_process_group("fake", store=FakeStore(), rank=self._rank, world_size=self._ranks)
        return self

    def __call__(self, job: Job) -> Mesh:
        group = dist.group.WORLD
        assert isinstance(group, ProcessGroup)
        spread = {"ulysses": group} if job.plan.ulysses_size > 1 else {"vae": group}
        return Mesh(
            0, 0, self._rank, self._rank, **{name: spread.get(name) for name in ("cfg", "ulysses", "vae", "replica")}
        )

    def __exit__(self, *_: object) -> None:
        dist.destroy_process_group()
        while self._real:
            setattr(*self._real.pop())


def _echo_all_to_all(received: Tensor, sent: Tensor, group: ProcessGroup) -> None:  # noqa: ARG001
    received.copy_(sent)


def _echo_into_one(gathered: Tensor, own: Tensor, group: ProcessGroup) -> None:  # noqa: ARG001
    gathered.unflatten(0, (-1, own.shape[0])).copy_(own)


def _echo_all_gather(gathered: Sequence[Tensor], own: Tensor, group: ProcessGroup) -> None:  # noqa: ARG001
    for one in gathered:
        one.copy_(own)


def _echo_lines(ops: Sequence[dist.P2POp]) -> list[dist.Work]:
    """Of messages to and from neighbours; what has another shape than all that is sent stays as it is."""
    sent = {op.tensor.shape: op.tensor for op in ops if op.op is dist.isend}
    for op in ops:
        if op.op is dist.irecv and op.tensor.shape in sent:
            op.tensor.copy_(sent[op.tensor.shape])
    return []


ECHOES: tuple[tuple[Any, str, Any], ...] = (
    (dist, "all_to_all_single", _echo_all_to_all),
    (collectives, "_all_gather", _echo_into_one),
    (dist, "all_gather", _echo_all_gather),
    (dist, "batch_isend_irecv", _echo_lines),
)
"""Every exchange of ``vgen.parallel`` that brings something, but for sums, which leave a rank its own."""


def make_table(out: Path, counts: Sequence[int]) -> str:
    """Markdown: each row's time as the slowest measured rank, how many times faster than one rank alone, tiles than
    tiles, and by how much it is above the mean of all ranks, where all were measured."""
    lines = [
        "| ranks | | median ms of a rank | × one rank alone | peak GiB | above the mean |",
        "|---|---|---|---|---|---|",
    ]
    for ranks in counts:
        measured = [rows for rank in range(ranks) if (rows := read_rows(folder_of(out, ranks, rank)))]
        whole, tiles = measured[0][0], next((row for row in measured[0] if row["name"].endswith(" tiles")), None)
        for index, row in enumerate(measured[0]):
            spread = "ranks" in row["name"] or "Ulysses" in row["name"]
            if not spread and row not in (whole, tiles):
                continue
            times = [rows[index]["median_ms"] for rows in measured] if spread else [row["median_ms"]]
            alone = tiles if tiles is not None and "tile" in row["name"] else whole
            peaks = [rows[index]["peak_gib"] for rows in measured if rows[index]["peak_gib"] is not None]
            peak = f"{max(peaks):.1f}" if peaks else ""
            above = f"{max(times) / statistics.mean(times) - 1:.1%}" if len(times) == ranks else ""
            ratio = alone["median_ms"] / max(times)
            lines.append(f"| {ranks} | {row['name']} | {max(times):.1f} | {ratio:.2f} | {peak} | {above} |")
    return "\n".join(lines) + "\n"


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """Empty where this rank was not measured."""
    path = folder / "bench.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if path.is_file() else []
    return rows


if __name__ == "__main__":
    sys.exit(main())
