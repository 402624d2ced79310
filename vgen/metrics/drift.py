"""How far ranks drift apart within a run, how long each device has nothing to do, and how often the host starts work.

Drift is read from the devices' own clocks. Each rank marks the moments at which its device arrives at a step, between
two barriers that all devices leave together: what the clocks show there says by how much they are apart and by how much
faster one runs than another, and is taken out. Neither the host's clock nor its delays are in the result.

Idle time and launches come from CUPTI by way of torch's profiler, which slows the host down: measure them in a pass of
their own.

Shapes: P ranks, n steps.
"""

import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Interval = tuple[float, float]
"""Start and end, in one unit and of one clock."""

STEP = "vgen.step"
"""Name of the range that a profiler of steps puts around each."""

LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cuGraphLaunch", "cudaMemcpy", "cudaMemset")
"""Beginnings of the names of calls by which a host gives a device work: kernels, whole graphs, copies and fills."""


@dataclass(frozen=True)
class Marks:
    """What one rank's device noted, in ms since the first barrier: arrivals at the n steps, and the second barrier."""

    arrivals_ms: tuple[float, ...]
    span_ms: float


@dataclass(frozen=True)
class Activity:
    """``idle_shares``: of each step the part of its time, up to the next step's start, in which the device did nothing.
    ``launches``: calls that the host made for each step."""

    idle_shares: tuple[float, ...]
    launches: tuple[int, ...]


class DriftProbe:
    """Marks of one rank: ``start`` once, ``arrive`` at every step, ``stop`` once; all ranks of ``group`` alike.

    Nothing waits between ``start`` and ``stop``. Without a group the marks are of one rank and show no drift. On a CPU
    the marks are those of the host's clock.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None) -> None:
        self._device = device
        self._group = group
        self._marks: list[Any] = []

    def start(self) -> None:
        self._marks = [self._meet()]

    def arrive(self) -> None:
        """Mark the moment at which the device has done all that it was given until now."""
        self._marks.append(self._mark())

    def stop(self) -> Marks:
        """Read the marks.

        Raises:
            ValueError: ``start`` was not called.
        """
        if not self._marks:
            raise ValueError("a drift probe was stopped before it was started; call start before the first step")
        first, *arrivals = self._marks
        last = self._meet()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._marks = []
        return Marks(tuple(_milliseconds(first, one) for one in arrivals), _milliseconds(first, last))

    def _meet(self) -> Any:
        """A mark as all devices leave a barrier."""
        if self._device.type == "cuda":
            # So that no device has other work before the barrier.
            torch.cuda.synchronize(self._device)
        if self._group is not None:
            # Twice: the first one waits for the hosts, the second one for nothing but itself.
            for _ in range(2):
                dist.all_reduce(torch.zeros(1, device=self._device), group=self._group)
        return self._mark()

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def _milliseconds(first: Any, last: Any) -> float:
    return float(first.elapsed_time(last)) if isinstance(first, torch.cuda.Event) else 1000 * (last - first)


def gather_marks(marks: Marks, group: dist.ProcessGroup | None) -> list[Marks]:
    """Those of all ranks of ``group``, on every rank."""
    if group is None:
        return [marks]
    gathered: list[Any] = [None] * group.size()
    dist.all_gather_object(gathered, marks, group=group)
    return gathered


def skews_ms(ranks: Sequence[Marks]) -> tuple[float, ...]:
    """Of each step the time between the first rank's arrival and the last one's, in ms of the first rank's clock.

    Raises:
        ValueError: the ranks marked different numbers of steps, or a span is not positive.
    """
    counts = [len(marks.arrivals_ms) for marks in ranks]
    if len(set(counts)) > 1:
        raise ValueError(f"the ranks marked {counts} steps; mark the same steps on every rank")
    if any(marks.span_ms <= 0 for marks in ranks):
        raise ValueError(f"the spans are {[marks.span_ms for marks in ranks]} ms; stop the probe after it was started")
    reference = ranks[0].span_ms
    scaled = [[one * reference / marks.span_ms for one in marks.arrivals_ms] for marks in ranks]
    return tuple(max(arrivals) - min(arrivals) for arrivals in zip(*scaled, strict=True))


class StepProfiler:
    """Profiles steps one after another: ``begin`` where each begins, ``stop`` where the last one ends.

    From the first ``begin`` on the device is waited for twice, there and in ``stop``.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities, acc_events=True)
        self._range: Any = None

    def begin(self) -> None:
        if self._range is None:
            self._wait()
            self._profiler.start()
        else:
            self._range.__exit__(None, None, None)
        self._range = torch.profiler.record_function(STEP)
        self._range.__enter__()

    def stop(self) -> Activity:
        """What host and device did in the steps.

        Raises:
            ValueError: no step was begun.
        """
        if self._range is None:
            raise ValueError("a profiler of steps was stopped before a step was begun")
        self._range.__exit__(None, None, None)
        self._range = None
        self._wait()
        self._profiler.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            self._profiler.export_chrome_trace(str(path))
            trace = json.loads(path.read_text())
        return activity(trace["traceEvents"])

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def profile_steps(step: Callable[[], Any], num_steps: int, device: torch.device) -> Activity:
    """Run ``step`` ``num_steps`` times under the profiler, warmed up before, and say what host and device did.

    Raises:
        ValueError: ``device`` is no CUDA device.
    """
    if device.type != "cuda":
        raise ValueError(f"idle time and launches are those of a CUDA device and this one is {device.type}")
    profiler = StepProfiler(device)
    for _ in range(num_steps):
        profiler.begin()
        step()
    return profiler.stop()


def activity(events: Iterable[Mapping[str, Any]]) -> Activity:
    """What the events of a trace in Chrome's format say of the ranges ``STEP`` in it.

    A step's work on the device is found by its range there, which the profiler derives from what was launched inside
    the range of the host. Where it did not, all steps together are one.
    """
    timed = [event for event in events if "dur" in event]
    kernels = _intervals(timed, ("kernel", "gpu_memcpy", "gpu_memset"))
    on_host = sorted(_intervals(timed, ("user_annotation",), STEP))
    starts = sorted(start for start, _ in _intervals(timed, ("gpu_user_annotation",), STEP))
    launched = [
        float(event["ts"])
        for event in timed
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and event["name"].startswith(LAUNCHES)
    ]
    launches = tuple(sum(start <= one <= end for one in launched) for start, end in on_host)
    if not kernels:
        return Activity((1.0,) * len(on_host), launches)
    first, last = min(kernels)[0], max(end for _, end in kernels)
    if len(starts) != len(on_host):
        starts = [first]
    windows = list(itertools.pairwise([*starts, last]))
    return Activity(tuple(idle_share(kernels, window) for window in windows), launches)


def _intervals(events: Iterable[Mapping[str, Any]], kinds: Sequence[str], name: str | None = None) -> list[Interval]:
    return [
        (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        for event in events
        if event.get("cat") in kinds and name in (None, event["name"])
    ]


def idle_share(busy: Iterable[Interval], window: Interval) -> float:
    """The part of ``window`` that no interval of ``busy`` covers; those may overlap, as kernels of two streams do."""
    start, end = window
    if end <= start:
        return 0.0
    idle, covered = 0.0, start
    for begin, finish in sorted(busy):
        if begin >= end:
            break
        idle += max(0.0, begin - covered)
        covered = max(covered, finish)
    return (idle + max(0.0, end - covered)) / (end - start)


def drift_record(skews: Sequence[float], work: Activity | None) -> dict[str, Any]:
    """Plain values for the record of a run: every step, and the median and the largest of them."""
    record: dict[str, Any] = {"skew_ms": _summary(skews)}
    if work is not None:
        record |= {"idle_share": _summary(work.idle_shares), "launches": _summary(work.launches)}
    return record


def _summary(values: Sequence[float]) -> dict[str, Any]:
    if not values:
        return {"steps": [], "median": None, "max": None}
    return {"steps": list(values), "median": statistics.median(values), "max": max(values)}
