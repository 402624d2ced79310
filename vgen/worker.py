"""One rank's life, top to bottom: join, build, run its share, gather, record.

Started as ``python -m vgen.worker <job.json>`` by ``launchers.supervisor``, or by torchrun.
"""

import dataclasses
import logging
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import LightningEnvironment

from launchers.rank import die_with_parent, error_file, write_error
from vgen import config, record, tracking, transforms
from vgen.components.ranks import ALONE
from vgen.job import Job, read_job
from vgen.metrics.environment import collect_environment
from vgen.metrics.timer import reduce_max, stage_of, timings_record
from vgen.parallel.mesh import Mesh, build_mesh
from vgen.parallel.watch import start_watch
from vgen.tasks import bench_decode, bench_encode, bench_step, decode, generate, score, train_tiny
from vgen.tasks import plan as plan_task
from vgen.tasks.types import RankResult, TaskContext
from vgen.typed import ConfigurationError

log = logging.getLogger("vgen.worker")

COMPILE_TIMEOUT_S = 300.0
"""How far apart ranks may be that compile in the middle of a stage."""

TASKS = {
    "generate": generate.run,
    "preflight": generate.run,
    "decode": decode.run,
    "bench_decode": bench_decode.run,
    "bench_encode": bench_encode.run,
    "bench_step": bench_step.run,
    "train_tiny": train_tiny.run,
    "score": score.run,
    "plan": plan_task.run,
}


def main() -> None:
    die_with_parent()
    path = Path(sys.argv[1])
    rank = int(os.environ.get("RANK", "0"))
    logging.basicConfig(level=logging.INFO, format=f"[%(asctime)s][rank {rank}][%(name)s][%(levelname)s] %(message)s")
    _show_notices()
    for chatty in ("lightning.fabric", "lightning.pytorch", "httpx"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    try:
        run_rank(read_job(path))
    except BaseException as error:
        # Written already if the job had begun; what this rank's end breaks in its peers must look younger.
        if not error_file(path.parent, rank).exists():
            write_error(path.parent, error, stage_of(error))
        traceback.print_exception(error)
        sys.stderr.flush()
        # A plain exit would wait for peers in the process group's destructors; the supervisor ends them.
        os._exit(1)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # everything is written, and no library's thread needs a farewell


def _show_notices() -> None:
    """Lines that the parent passes on to the user's console at once (``app.NOTICE``), whatever the log's level."""
    logger, handler = logging.getLogger("vgen.notice"), logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("vgen: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def run_inline(path: Path) -> None:
    """World size 1 in this process, for a debugger; errors pass through as they are."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", NODE_RANK="0")
    run_rank(read_job(path))


def run_rank(job: Job) -> None:
    """Raises whatever goes wrong, marked with the stage it went wrong in (``metrics.timer.stage_of``)."""
    started = time.perf_counter()
    fabric = _join(job)
    tracker = _open_tracker(job, fabric)
    context = TaskContext(
        job,
        fabric.device,
        _place(job, fabric),
        log=tracker.log,
        log_image=tracker.log_image,
    )
    try:
        with transforms.exact_fp32(job.config.quant.mode == "fp32"):
            results = _gather(fabric, TASKS[job.config.task.name](context))
        if fabric.global_rank == 0:
            done = _build_record(job, results, total_s=time.perf_counter() - started)
            record.write_json_atomic(job.out_dir / "record.json", done)
            _track(tracker, job, done)
    except BaseException as error:
        # First of all: closing the tracker takes time, and the supervisor blames the oldest note.
        write_error(job.out_dir, error, stage_of(error))
        tracker.finish(exit_code=1, limit_s=2.0)
        raise
    tracker.finish()
    fabric.barrier()


def _join(job: Job) -> Fabric:
    """The process group: gloo on the CPU, NCCL on GPUs."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    nodes = int(os.environ["WORLD_SIZE"]) // local
    if job.device == "cuda" and torch.cuda.device_count() < local:
        raise ConfigurationError(
            f"the plan has {local} ranks on this machine and torch sees {torch.cuda.device_count()} CUDA device(s); "
            f"use a plan of {max(1, torch.cuda.device_count())} (task=plan lists them) or device=cpu"
        )
    fabric = Fabric(
        accelerator="cuda" if job.device == "cuda" else "cpu",
        devices=local,
        num_nodes=nodes,
        strategy="ddp",
        plugins=[LightningEnvironment()],
    )
    fabric.launch()
    return fabric


def _place(job: Job, fabric: Fabric) -> Mesh:
    """This rank's place among the job's, which note from now on what they wait for."""
    if job.num_ranks == 1:
        return ALONE
    start_watch(job.out_dir)
    limit_s = job.config.launcher.collective_timeout_s
    if job.config.graph.compiles:
        limit_s = max(limit_s, COMPILE_TIMEOUT_S)
    return build_mesh(job.plan, fabric.world_size, timeout_s=limit_s)


def _open_tracker(job: Job, fabric: Fabric) -> tracking.Run:
    if fabric.global_rank != 0:
        return tracking.NullRun()
    return tracking.open_run(
        job.config.logger,
        out_dir=job.out_dir,
        config=config.to_mapping(job.config),
        name=job.out_dir.name,
        group=job.sweep,
        tags=job.config.logger.tags,
        job_type=job.config.task.name,
    )


def _track(tracker: tracking.Run, job: Job, done: dict[str, Any]) -> None:
    for step, seconds in enumerate(done["timings_s"]["denoise_steps"] or ()):
        tracker.log({"denoise_step_s": seconds}, step=step)
    for output in done["outputs"]:
        if output["path"].endswith(".mp4"):
            tracker.video(Path(output["path"]).stem, job.out_dir / output["path"], caption=output["prompt"])
    tracker.summary({key: done[key] for key in ("status", "cell", "active", "timings_s", "memory_gib", "environment")})


def _gather(fabric: Fabric, result: RankResult) -> list[RankResult]:
    gathered: list[Any] = [None] * fabric.world_size
    dist.all_gather_object(gathered, dataclasses.asdict(result))
    return [RankResult(**entry) for entry in gathered]


def _build_record(job: Job, results: list[RankResult], total_s: float) -> dict[str, Any]:
    outputs = sorted((row for result in results for row in result.outputs), key=lambda row: _number(row["path"]))
    timings = [timings_record(result.job_timings, result.request_timings) for result in results]
    return record.build_record(
        config=config.to_mapping(job.config),
        status="ok",
        active=_active(job, results[0].active),
        timings_s={**reduce_max(timings), "total": total_s},
        memory_gib={
            "per_rank": [result.peak_gib for result in results],
            "per_stage": reduce_max([result.memory_gib for result in results]),
        },
        outputs=outputs,
        environment=collect_environment(),
        drift=results[0].drift,
    )


def _number(file_name: str) -> int:
    """The request's number in ``sample_12.mp4``."""
    return int(Path(file_name).stem.rpartition("_")[2])


def _active(job: Job, ran: dict[str, Any]) -> dict[str, Any]:
    """What truly ran, as opposed to what was asked for; ``ran`` is what the task decided."""
    plan, model = job.plan, job.config.model
    # On the CPU there is nowhere else for a stage to wait.
    offload = "none" if job.device == "cpu" and model.offload in ("expert", "stages") else model.offload
    return {
        "world_size": plan.world_size,
        **dataclasses.asdict(plan),
        "compiled": job.config.graph.compiles,
        "cuda_graphs": 0,
        "graph_gib": 0.0,
        "quant": {"mode": job.config.quant.mode},
        "vae_backend": model.vae.backend,
        "vae_dtype": "fp32" if job.device == "cpu" else job.config.quant.mode,
        "offload": offload,
        "checkpoint": _checkpoint(job),
        "weights": model.weights,
        **ran,
    }


def _checkpoint(job: Job) -> dict[str, Any]:
    """``kind`` is what the files say of themselves, or what the configuration takes them for."""
    checkpoint = job.checkpoint
    kind = {"kind": job.config.model.kind, "version": job.architecture.version}
    if checkpoint is None:
        return kind
    kind["kind"] = checkpoint.kind or job.config.model.kind
    return {**kind, "id": checkpoint.id, "revision": checkpoint.revision, "layout": checkpoint.layout}


if __name__ == "__main__":
    main()
