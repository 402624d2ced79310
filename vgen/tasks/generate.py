"""``task=generate``: this replica's share of the prompts, each to its own files, which its first rank writes."""

from functools import partial
from typing import Protocol

from vgen import planning, transforms
from vgen.components.ranks import denoises
from vgen.families import family_of
from vgen.memory import Decode
from vgen.metrics.timer import StageTimer, Timer, null_timer
from vgen.pipelines import pipeline_of
from vgen.pipelines.types import Sink
from vgen.requests import Request
from vgen.tasks.samples import NullSink, SampleWriter
from vgen.tasks.types import RankResult, TaskContext


def run(context: TaskContext) -> RankResult:
    """Requests ``data_rank, data_rank + data_size, …``: which ranks make one changes nothing about it."""
    job, device, result = context.job, context.device, RankResult()
    mine = job.requests[context.data_rank :: context.data_size]
    timer = StageTimer(device)
    plan = planning.plan_run(job, job.requests, device, transforms.components_of(job))
    with timer("load"):
        run_request = _build(context, plan.decode, mine, timer)
    family = family_of(job.config)
    passes = dict.fromkeys(name for request in job.requests for name in family.pass_names(request, job.config))
    result.active = {**plan.active(), "passes": list(passes)}
    for request in mine[:1] * job.config.bench.warmup:
        with timer("warmup"):
            run_request(request, NullSink(), null_timer)
    result.add_once(timer)
    for request in mine:
        _repeat_request(context, run_request, request, result)
    return result


class RunRequest(Protocol):
    def __call__(self, request: Request, sink: Sink, timer: Timer, /) -> None:
        """This rank's part of one request."""


def _build(context: TaskContext, decode: Decode, requests: tuple[Request, ...], timer: StageTimer) -> RunRequest:
    """The model, as far as this rank has a part in it."""
    job, pipeline = context.job, pipeline_of(context.job)
    if not denoises(context.mesh):
        follower = transforms.build_follower(job, context.device, decode, context.mesh)
        return partial(pipeline.follow, follower)
    components = transforms.build_components(job, context.device, decode, requests, timer, context.mesh)
    return lambda request, sink, timer: pipeline.generate(components, request, job.config.sampler, sink, timer)


def _repeat_request(context: TaskContext, run_request: RunRequest, request: Request, result: RankResult) -> None:
    config = context.job.config
    for repeat in range(config.bench.repeats):
        timer = StageTimer(context.device)
        writer = SampleWriter(request, context.job.out_dir, config.output) if context.is_first else None
        run_request(request, writer or NullSink(), timer)
        result.add_request(timer)
        if writer is not None and repeat == 0:
            result.outputs.append(writer.row())
