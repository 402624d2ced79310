"""One job as the ranks get it: ``job.json``, everything resolved, so that no rank asks Hydra, a hub or a clock."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vgen import checkpoint_files, config, record, requests
from vgen.checkpoint_files import Checkpoint, TextEncoderFiles
from vgen.config import Config
from vgen.models.ltx2.config import LTX2Config
from vgen.models.ltx2.config_diffusers import from_diffusers
from vgen.models.ltx2.config_official import from_official
from vgen.requests import Request
from vgen.typed import ConfigurationError


@dataclass(frozen=True)
class Job:
    """``checkpoint`` and ``text_encoder`` are None with random weights."""

    config: Config
    requests: tuple[Request, ...]
    checkpoint: Checkpoint | None
    text_encoder: TextEncoderFiles | None
    architecture: LTX2Config
    device: str
    out_dir: Path
    sweep: str | None

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


def plan_job(
    settings: Config, requests: tuple[Request, ...], out_dir: Path, *, num_gpus: int | None, sweep: str | None
) -> Job:
    """Find the checkpoint files (from the hub where asked), read their headers, choose the device.

    Raises:
        ConfigurationError, CheckpointError, ConfigError: what is missing or does not fit, before anything is loaded.
    """
    checkpoint, text_encoder = _find_files(settings)
    device = settings.device if settings.device != "auto" else ("cpu" if num_gpus == 0 else "cuda")
    return Job(
        config=settings,
        requests=requests,
        checkpoint=checkpoint,
        text_encoder=text_encoder,
        architecture=architecture_of(settings, checkpoint),
        device=device,
        out_dir=out_dir,
        sweep=sweep,
    )


def read_job(path: Path) -> Job:
    """The job that :meth:`Job.write` wrote."""
    data: dict[str, Any] = json.loads(path.read_text())
    settings = config.from_mapping(data["config"])
    checkpoint = Checkpoint.from_mapping(data["checkpoint"]) if data["checkpoint"] else None
    return Job(
        config=settings,
        requests=tuple(requests.from_mapping(request) for request in data["requests"]),
        checkpoint=checkpoint,
        text_encoder=TextEncoderFiles.from_mapping(data["text_encoder"]) if data["text_encoder"] else None,
        architecture=architecture_of(settings, checkpoint),
        device=data["device"],
        out_dir=Path(data["out_dir"]),
        sweep=data["sweep"],
    )


def architecture_of(settings: Config, checkpoint: Checkpoint | None) -> LTX2Config:
    if checkpoint is None:
        assert settings.model.architecture is not None
        return from_official(settings.model.architecture)
    return from_official(checkpoint.config) if checkpoint.layout == "official" else from_diffusers(checkpoint.config)


def _find_files(settings: Config) -> tuple[Checkpoint | None, TextEncoderFiles | None]:
    model = settings.model
    if model.weights == "random":
        if model.architecture is None or model.text_encoder.architecture is None:
            raise ConfigurationError(
                f"model={model.name} has no sizes for model.weights=random; set model.architecture and "
                f"model.text_encoder.architecture"
            )
        return None, None
    if model.checkpoint is None:
        raise ConfigurationError(
            "model.checkpoint is not set, and model.weights=load needs one; "
            "give model.checkpoint=<path or hub id> or model.weights=random"
        )
    checkpoint = checkpoint_files.resolve(model.checkpoint, model.revision)
    if not settings.task.generates:
        return checkpoint, None
    return checkpoint, checkpoint_files.resolve_text_encoder(
        model.text_encoder.checkpoint, model.text_encoder.revision, checkpoint
    )
