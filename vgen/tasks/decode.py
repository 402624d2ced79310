"""``task=decode``: finish a run from the latents it saved."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vgen import media, planning, requests, transforms
from vgen.checkpoint_headers import read_header
from vgen.metrics.timer import StageTimer
from vgen.pipelines import pipeline_of
from vgen.requests import Request
from vgen.residency import Residency
from vgen.stages.encode import kept_sound
from vgen.tasks.samples import NullSink, SampleWriter
from vgen.tasks.types import RankResult, TaskContext
from vgen.typed import ConfigurationError


def run(context: TaskContext) -> RankResult:
    """Decode every latents file of ``task.latents`` (a file or a run's folder) into this job's folder."""
    job, device, result = context.job, context.device, RankResult()
    assert job.config.task.latents is not None
    files = find_latents(Path(job.config.task.latents))
    mine = files[context.data_rank :: context.data_size]
    timer = StageTimer(device)
    plan = planning.plan_run(job, [_request_of(path) for path in files], device, transforms.decoders_of(job))
    result.active = plan.active()
    if context.mesh.vae_rank is None:  # a plan may have ranks that only denoise
        for _ in mine:
            context.mesh.wait_for_replica()
        return result
    residency = Residency(device, {}, {})
    with timer("load"):
        decoders = transforms.build_decoders(job, device, residency, plan.decode, context.mesh)
    result.add_once(timer)
    for path in mine:
        context.mesh.wait_for_replica()
        timer = StageTimer(device)
        writer = _decode_file(context, decoders, residency, path, timer)
        result.add_request(timer)
        if writer is not None:
            result.outputs.append(writer.row())
            result.add_fallbacks(writer.fallbacks)
    return result


def _decode_file(
    context: TaskContext, decoders: Any, residency: Residency, path: Path, timer: StageTimer
) -> SampleWriter | None:
    """The writer of the files, on the rank that has one."""
    config = context.job.config
    video, audio, metadata = media.load_latents(path)
    request = _request_in(path, metadata)
    writer = SampleWriter(request, context.job.out_dir, config.output) if context.is_first else None
    if writer is not None:
        writer.save_latents(video, audio)
    dtype = transforms.latents_dtype(context.job)
    on_device = [None if latents is None else latents.to(context.device, dtype) for latents in (video, audio)]
    assert on_device[0] is not None
    pipeline_of(context.job).decode(
        decoders, on_device[0], on_device[1], writer or NullSink(), residency, timer, kept_sound(request)
    )
    return writer


def _request_of(path: Path) -> Request:
    return _request_in(path, read_header(path).metadata)


def _request_in(path: Path, metadata: Mapping[str, str]) -> Request:
    if "request" not in metadata:
        raise media.OutputError(f"{path} does not say what was asked for; give a latents file of this program")
    try:
        return requests.from_mapping(json.loads(metadata["request"]))
    except ConfigurationError as error:
        raise media.OutputError(f"{path} is of another version of this program ({error}); make it again") from error


def find_latents(path: Path) -> list[Path]:
    """Raises ConfigurationError where there is nothing to decode."""
    if path.is_file():
        return [path]
    files = sorted(path.glob("latents_*.safetensors"), key=lambda file: int(re.sub(r"\D", "", file.stem) or 0))
    if not files:
        raise ConfigurationError(f"task.latents={path} holds no latents_<i>.safetensors; give the folder of a run")
    return files
