"""What the cost model predicts of runs, for an H200; a process of its own, since the architecture's numbers need torch.

``python -m benchmarks.predictions < runs.json``, where runs.json has for each name the settings of a run; JSON of the
seconds of each comes back.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, cast

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from vgen import app
from vgen.config import from_mapping
from vgen.job import Job, plan_job
from vgen.parallel.cost import Decode, Workload, predict_plan
from vgen.parallel.plans import ParallelPlan
from vgen.requests import build_requests
from vgen.tasks.plan import workload_of


def main() -> None:
    runs = json.load(sys.stdin)
    with initialize_config_dir(app.conf_dir(), version_base="1.3"):
        found = {name: predict(settings) for name, settings in runs.items()}
    json.dump(found, sys.stdout)


def predict(settings: Sequence[str]) -> dict[str, float]:
    """Seconds of every way to decode over ``parallel.vae_size`` ranks, for ``task=bench_decode``; else of a step, as
    ``steps``, and of a request without its text and its load, as ``run``.

    Hydra has to be initialized.
    """
    job = _job(settings)
    workload = workload_of(job)
    if job.config.task.name == "bench_decode":
        return _ways(workload, job.plan.vae_size)
    strategy: Decode = "whole" if job.plan.vae_size == 1 else "halo"
    cost = predict_plan(job.plan, workload, strategy)
    return {"steps": cost.step_s, "run": cost.denoise_s + cost.decode_s}


def _job(settings: Sequence[str]) -> Job:
    data = OmegaConf.to_container(compose("config", list(settings)), resolve=True)
    config = from_mapping(cast("dict[str, object]", data))
    return plan_job(config, build_requests(config.request), Path(), num_gpus=0, sweep=None)


def _ways(workload: Workload, ranks: int) -> dict[str, float]:
    def seconds(decode: Decode, ranks: int, axis: Literal["height", "width"] = "height") -> float:
        return predict_plan(ParallelPlan(vae_size=ranks), replace(workload, axis=axis), decode).decode_s

    alone = {"whole": seconds("whole", 1), "tiles": seconds("tile", 1)}
    if ranks == 1:
        return alone
    return alone | {
        "halo by height": seconds("halo", ranks, "height"),
        "halo by width": seconds("halo", ranks, "width"),
        "tile": seconds("tile", ranks),
        "tile_balanced": seconds("tile_balanced", ranks),
    }


if __name__ == "__main__":
    main()
