"""``task=generate``: this rank's share of the prompts, each to its own files."""

from typing import Any

from vgen import planning, transforms
from vgen.metrics.timer import StageTimer
from vgen.pipelines import pipeline_of
from vgen.requests import Request
from vgen.tasks.samples import NullSink, SampleWriter
from vgen.tasks.types import RankResult, TaskContext


def run(context: TaskContext) -> RankResult:
    """Requests ``data_rank, data_rank + data_size, …``: which rank makes one changes nothing about it."""
    job, device, result = context.job, context.device, RankResult()
    mine = job.requests[context.data_rank :: context.data_size]
    timer = StageTimer(device)
    plan = planning.plan_run(job, job.requests, device, transforms.components_of(job))
    with timer("load"):
        components = transforms.build_components(job, device, plan.decode, mine, timer)
    pipeline = pipeline_of(job)
    passes = dict.fromkeys(
        name for request in job.requests for name in pipeline.pass_names(request, job.config.sampler)
    )
    result.active = {**plan.active(), "passes": list(passes)}
    _warm_up(context, components, mine[:1], timer)
    result.add_once(timer)
    for request in mine:
        _run_request(context, components, request, result)
    return result


def _warm_up(context: TaskContext, components: Any, requests: tuple[Request, ...], timer: StageTimer) -> None:
    for _ in range(context.job.config.bench.warmup):
        for request in requests:
            with timer("warmup"):
                pipeline_of(context.job).generate(components, request, context.job.config.sampler, NullSink())


def _run_request(context: TaskContext, components: Any, request: Request, result: RankResult) -> None:
    config = context.job.config
    for repeat in range(config.bench.repeats):
        timer = StageTimer(context.device)
        sink = SampleWriter(request, context.job.out_dir, config.output)
        pipeline_of(context.job).generate(components, request, config.sampler, sink, timer)
        result.add_request(timer)
        if repeat == 0:
            result.outputs.append(sink.row())
