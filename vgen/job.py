"""One job as the ranks get it: ``job.json``, everything resolved, so that no rank asks Hydra, a hub or a clock."""

import dataclasses
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from vgen import config, record, requests
from vgen.config import Config
from vgen.families import family_of
from vgen.parallel.plans import ParallelPlan, settle
from vgen.requests import Request
from vgen.typed import ConfigurationError


@dataclass(frozen=True)
class Job:
    """``checkpoint`` and ``text_encoder`` are None with random weights.

    With LTX-2 they are a ``Checkpoint`` and ``TextEncoderFiles``, and ``architecture`` is an ``LTX2Config``; with Wan
    the checkpoint is a ``WanCheckpoint`` with its text encoder inside, and ``architecture`` a ``WanArchitecture``.
    """

    config: Config
    requests: tuple[Request, ...]
    checkpoint: Any
    text_encoder: Any
    architecture: Any
    device: str
    out_dir: Path
    sweep: str | None

    @cached_property
    def plan(self) -> ParallelPlan:
        """The parallel plan that runs: the configuration's, settled for how many passes the requests need."""
        return plan_of(self.config, self.requests)

    @property
    def num_ranks(self) -> int:
        """Processes that run the job."""
        return 1 if self.config.task.name == "plan" else self.plan.world_size

    @property
    def path(self) -> Path:
        return self.out_dir / "job.json"

    def write(self) -> None:
        record.write_json_atomic(
            self.path,
            {
                "config": config.to_mapping(self.config),
                "requests": [dataclasses.asdict(request) for request in self.requests],
                "checkpoint": self.checkpoint.to_mapping() if self.checkpoint else None,
                "text_encoder": self.text_encoder.to_mapping() if self.text_encoder else None,
                "device": self.device,
                "out_dir": str(self.out_dir),
                "sweep": self.sweep,
            },
        )


def plan_of(settings: Config, requests: tuple[Request, ...]) -> ParallelPlan:
    """The parallel plan of ``settings``; with ``single_pass=ulysses`` as ``plans.settle`` has it."""
    parallel = settings.parallel
    plan = ParallelPlan(parallel.data_size, parallel.cfg_size, parallel.ulysses_size, parallel.vae_size)
    if parallel.single_pass == "refuse":
        return plan
    family = family_of(settings)
    return settle(plan, min(len(family.pass_names(request, settings)) for request in requests))


def plan_job(
    settings: Config, requests: tuple[Request, ...], out_dir: Path, *, num_gpus: int | None, sweep: str | None
) -> Job:
    """Find the checkpoint files (from the hub where asked), read their headers, choose the device.

    Raises:
        ConfigurationError, CheckpointError, ConfigError: what is missing or does not fit, before anything is loaded.
    """
    family = family_of(settings)
    if not settings.task.needs_weights:
        settings = dataclasses.replace(settings, model=dataclasses.replace(settings.model, weights="random"))
    if settings.model.weights == "load" and settings.model.checkpoint is None:
        raise ConfigurationError(
            "model.checkpoint is not set, and model.weights=load needs one; "
            "give model.checkpoint=<path or hub id> or model.weights=random"
        )
    checkpoint, text_encoder = family.find_files(settings)
    device = settings.device if settings.device != "auto" else ("cpu" if num_gpus == 0 else "cuda")
    if not settings.task.needs_weights:
        device = "cpu"
    return Job(
        config=settings,
        requests=requests,
        checkpoint=checkpoint,
        text_encoder=text_encoder,
        architecture=family.architecture_of(settings, checkpoint),
        device=device,
        out_dir=out_dir,
        sweep=sweep,
    )


def read_job(path: Path) -> Job:
    """The job that :meth:`Job.write` wrote."""
    data: dict[str, Any] = json.loads(path.read_text())
    settings = config.from_mapping(data["config"])
    family = family_of(settings)
    checkpoint, text_encoder = family.read_files(data["checkpoint"], data["text_encoder"])
    return Job(
        config=settings,
        requests=tuple(requests.from_mapping(request) for request in data["requests"]),
        checkpoint=checkpoint,
        text_encoder=text_encoder,
        architecture=family.architecture_of(settings, checkpoint),
        device=data["device"],
        out_dir=Path(data["out_dir"]),
        sweep=data["sweep"],
    )
