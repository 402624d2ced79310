"""What a task is given and what it gives back."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from vgen.components.ranks import ALONE, is_first
from vgen.graph.compile import CompileReport
from vgen.job import Job
from vgen.metrics.timer import StageTimer, reduce_max
from vgen.parallel.mesh import Mesh

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class TaskContext:
    """One rank's view of its job. ``mesh``: its place among the ranks."""

    job: Job
    device: torch.device
    mesh: Mesh = ALONE
    log: Callable[[Mapping[str, Any], int | None], None] = lambda *_: None
    """Numbers of one step, for the tracker."""
    log_image: Callable[[str, "Image", int | None], None] = lambda *_: None
    """A picture of one step, likewise."""

    @property
    def data_rank(self) -> int:
        """Which share of the prompts this rank's replica makes."""
        return self.mesh.data_rank

    @property
    def data_size(self) -> int:
        return self.job.plan.data_size

    @property
    def is_first(self) -> bool:
        """Whether this is the rank of its replica that has the frames and writes the files."""
        return is_first(self.mesh)


@dataclass
class RankResult:
    """One rank's part of the record; plain values only, since it travels between ranks."""

    outputs: list[dict[str, Any]] = field(default_factory=list)
    request_timings: list[dict[str, Any]] = field(default_factory=list)
    """Seconds by stage of each request this rank made, in order."""
    job_timings: dict[str, Any] = field(default_factory=dict)
    """Seconds of what runs once: load, warmup."""
    memory_gib: dict[str, float] = field(default_factory=dict)
    """Peak by stage."""
    peak_gib: float = 0.0
    active: dict[str, Any] = field(default_factory=dict)
    """What truly ran, where the configuration left a choice."""

    drift: dict[str, Any] | None = None
    """How far the ranks were apart at each step, where that was measured."""

    def add_memory(self, timer: StageTimer) -> None:
        self.memory_gib = reduce_max([self.memory_gib, timer.memory_gib()])
        self.peak_gib = max(self.peak_gib, timer.peak_gib())

    def add_once(self, timer: StageTimer) -> None:
        """Take what a timer saw of work that is no request."""
        self.job_timings.update({stage: seconds for stage, seconds in timer.timings().items() if stage != "total"})
        self.add_memory(timer)

    def add_graphs(self, report: Mapping[str, Any]) -> None:
        """What was captured: its seconds among the timings, the rest as what ran."""
        self.active.update({name: report[name] for name in ("cuda_graphs", "graph_gib")})
        if report["cuda_graphs"]:
            self.job_timings["capture"] = report["capture_s"]

    def add_compilation(self, report: CompileReport) -> None:
        """Its seconds, in whichever stage they were."""
        if report.graphs:
            self.job_timings["compile"] = report.seconds

    def add_fallbacks(self, names: Sequence[str]) -> None:
        """Decodes that ran out of memory and were made in another way."""
        if names:
            self.active["decode_fallbacks"] = [*self.active.get("decode_fallbacks", ()), *names]

    def add_request(self, timer: StageTimer) -> None:
        self.request_timings.append(timer.timings())
        self.add_memory(timer)
