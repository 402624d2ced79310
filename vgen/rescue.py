"""A run whose decode ran out of GPU memory over ranks: its latents decoded in processes of their own. Needs no torch.

One rank tries again where it is (``stages.decode``). Ranks cannot: the others are in the middle of an exchange. So the
job ends, and its latents, which are on disk, are decoded by new ranks that hold no transformer.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from vgen.families import ltx2, wan
from vgen.job import Job
from vgen.memory import DecodeAttempt, decode_ladder
from vgen.parallel.tiles import TileSettings
from vgen.typed import ConfigurationError
from vgen.validate import validate

STAGES = ("decode_video", "write")
"""In which frames are decoded, as they are asked for."""


@dataclass(frozen=True)
class Attempt:
    """``name``: what is different, for the console and the record; ``job``: ``task=decode`` of the run's latents, in
    the run's folder."""

    name: str
    job: Job


def attempts(job: Job, kind: str | None, stage: str | None) -> tuple[Attempt, ...]:
    """Decodes of the same quality as ``job``'s, each to be tried where the one before ran out of memory as well.

    The same one without the transformer in memory; in bands over all ranks of a replica, where it is exact and more of
    them are there; with shorter chunks; smaller tiles only where tiles were asked for. None where an error of ``kind``
    in ``stage`` is another matter, or a request has no latents yet.
    """
    if job.config.task.name != "generate" or kind != "OutOfMemoryError" or stage not in STAGES:
        return ()
    if not all(_has_latents(job, request.index) for request in job.requests):
        return ()
    alone = _decode_job(job)
    tried = [Attempt("latents decoded by themselves", alone)]
    ranks = job.plan.replica_size
    if ranks > job.plan.vae_size and job.config.parallel.vae_strategy in ("auto", "whole", "halo"):
        tried.append(Attempt(f"parallel.vae_size={ranks} parallel.vae_strategy=halo", _in_bands(alone, ranks)))
    # A single rank goes down this ladder by itself.
    if tried[-1].job.plan.vae_size > 1:
        tried += _smaller(tried[-1].job)
    return tuple(attempt for attempt in tried if _is_legal(attempt.job))


def _has_latents(job: Job, index: int) -> bool:
    """Of this run, not of an earlier one in the same folder."""
    path = job.out_dir / f"latents_{index}.safetensors"
    return path.is_file() and path.stat().st_mtime_ns >= job.path.stat().st_mtime_ns


def _decode_job(job: Job) -> Job:
    parallel = replace(job.config.parallel, cfg_size=1, ulysses_size=1, vae_size=job.plan.vae_size)
    task = replace(job.config.task, name="decode", latents=str(job.out_dir))
    graph = replace(job.config.graph, mode="eager")
    return replace(job, config=replace(job.config, parallel=parallel, task=task, graph=graph))


def _in_bands(job: Job, ranks: int) -> Job:
    parallel = replace(job.config.parallel, vae_size=ranks, vae_strategy="halo")
    return replace(job, config=replace(job.config, parallel=parallel))


def _smaller(job: Job) -> Iterator[Attempt]:
    vae, strategy = job.config.model.vae, job.config.parallel.vae_strategy
    longest, chunk = 1, None
    if chunked := job.config.model.family == "wan" and vae.backend == "native":
        compression, chunk = job.architecture.vae.scale_factor_temporal, vae.chunk
        longest = max((request.num_frames - 1) // compression + 1 for request in job.requests)
    attempt = DecodeAttempt("whole" if strategy == "auto" else strategy, chunk, _tiles(job))
    for rung in decode_ladder(attempt, longest, chunked=chunked):
        changed = replace(vae, tile_size=rung.tiles.tile_size, chunk=rung.chunk if chunked else vae.chunk)
        config = replace(job.config, model=replace(job.config.model, vae=changed))
        yield Attempt(rung.settings, replace(job, config=config))


def _tiles(job: Job) -> TileSettings:
    if job.config.model.family == "wan":
        return wan.tile_settings(job.config, job.architecture)
    return ltx2.tile_settings(job.config)


def _is_legal(job: Job) -> bool:
    try:
        validate(job.config, job.requests, job.architecture, None, job.checkpoint)
    except ConfigurationError:
        return False
    return True
