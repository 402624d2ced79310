"""``task=generate``: this replica's share of the prompts, each to its own files, which its first rank writes."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any

import torch

from vgen import planning, transforms
from vgen.components.ranks import denoises, graph_report
from vgen.families import family_of
from vgen.graph.compile import compile_report
from vgen.graph.pool import GraphPool
from vgen.memory import Decode
from vgen.metrics.drift import DriftProbe, StepProfiler, drift_record, gather_marks, skews_ms
from vgen.metrics.timer import StageTimer, Timer, null_timer
from vgen.pipelines import pipeline_of
from vgen.pipelines.types import Sink
from vgen.requests import Request
from vgen.tasks.samples import NullSink, SampleWriter
from vgen.tasks.types import RankResult, TaskContext

PROFILED_STEPS = 3


def run(context: TaskContext) -> RankResult:
    """Requests ``data_rank, data_rank + data_size, …``: which ranks make one changes nothing about it."""
    job, device, result = context.job, context.device, RankResult()
    mine = job.requests[context.data_rank :: context.data_size]
    timer = StageTimer(device)
    plan = planning.plan_run(job, job.requests, device, transforms.components_of(job))
    with timer("load"):
        replica = _Replica(context, plan.decode, mine, timer)
    family = family_of(job.config)
    passes = dict.fromkeys(name for request in job.requests for name in family.pass_names(request, job.config))
    result.active = {**plan.active(), "passes": list(passes)}
    with compile_report() as compiled:
        for request in mine[:1] * job.config.bench.warmup:
            with timer("warmup"):
                replica.request(request, NullSink(), null_timer)
        if job.config.bench.warmup:
            replica.end_warm_up()
        result.add_once(timer)
        for request in mine:
            _repeat_request(context, replica, request, result)
    result.add_compilation(compiled)
    result.add_graphs(replica.graph_report())
    if job.config.measure.drift:
        steps = len(result.request_timings[0]["denoise_steps"])
        result.drift = _measure_drift(context, replica, mine[0], steps)
    return result


class _Replica:
    """The model, as far as this rank has a part in it."""

    def __init__(self, context: TaskContext, decode: Decode, requests: tuple[Request, ...], timer: StageTimer) -> None:
        job, pipeline = context.job, pipeline_of(context.job)
        self._mesh = context.mesh
        self._graph_pool: GraphPool | None = None
        self._run: Callable[[Request, Sink, Timer], None]
        if denoises(context.mesh):
            components = transforms.build_components(job, context.device, decode, requests, timer, context.mesh)
            self._graph_pool = components.graph_pool
            self._run = lambda request, sink, timer: pipeline.generate(
                components, request, job.config.sampler, sink, timer
            )
        else:
            self._run = partial(pipeline.follow, transforms.build_follower(job, context.device, decode, context.mesh))

    def request(self, request: Request, sink: Sink, timer: Timer) -> None:
        """This rank's part of one request. The others may still load, or write the last one: that may take long."""
        self._mesh.wait_for_replica()
        self._run(request, sink, timer)

    def end_warm_up(self) -> None:
        """Calls that are not captured by now are what ``graph.strict`` and ``graph.on_miss`` are about."""
        for graphs in self._graph_pool.owners if self._graph_pool is not None else ():
            graphs.seal()

    def graph_report(self) -> dict[str, Any]:
        return graph_report(self._graph_pool)


class _StepMarks:
    """A timer that marks the ends of steps, and measures nothing else."""

    def __init__(self, probe: DriftProbe) -> None:
        self._probe = probe

    def __call__(self, stage: str) -> AbstractContextManager[None]:  # noqa: ARG002
        return nullcontext()

    def step(self) -> None:
        self._probe.arrive()


class _EnoughStepsError(Exception):
    """All steps that were to be profiled are done."""


class _ProfiledSteps:
    """A timer that profiles steps after the first one and ends the request behind the last of them."""

    def __init__(self, profiler: StepProfiler, num_steps: int) -> None:
        self._profiler = profiler
        self._left = num_steps

    def __call__(self, stage: str) -> AbstractContextManager[None]:  # noqa: ARG002
        return nullcontext()

    def step(self) -> None:
        if not self._left:
            raise _EnoughStepsError
        self._left -= 1
        self._profiler.begin()


def _measure_drift(context: TaskContext, replica: _Replica, request: Request, num_steps: int) -> dict[str, Any]:
    """``request``, which has ``num_steps``, once more, to nowhere: what the ranks of this replica noted; and on a GPU a
    few steps of it under the profiler, by themselves since it slows the host: what this rank did."""
    group = context.mesh.replica
    probe = DriftProbe(context.device, group)
    context.mesh.wait_for_replica()
    probe.start()
    replica.request(request, NullSink(), _StepMarks(probe))
    skews = skews_ms(gather_marks(probe.stop(), group))
    profiled = min(PROFILED_STEPS, num_steps - 1)
    if profiled < 1 or not _can_profile(context.device):
        return drift_record(skews, None)
    profiler = StepProfiler(context.device)
    with suppress(_EnoughStepsError):
        replica.request(request, NullSink(), _ProfiledSteps(profiler, profiled))
    return drift_record(skews, profiler.stop())


def _can_profile(device: torch.device) -> bool:
    return device.type == "cuda"


def _repeat_request(context: TaskContext, replica: _Replica, request: Request, result: RankResult) -> None:
    config = context.job.config
    for repeat in range(config.bench.repeats):
        timer = StageTimer(context.device)
        writer = SampleWriter(request, context.job.out_dir, config.output) if context.is_first else None
        replica.request(request, writer or NullSink(), timer)
        result.add_request(timer)
        if writer is not None and repeat == 0:
            result.outputs.append(writer.row())
            result.add_fallbacks(writer.fallbacks)
