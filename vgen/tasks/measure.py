"""Timing of one callable on one device: the first call apart, then the median of warm ones."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch

GIB = 2**30


@dataclass(frozen=True)
class Measurement:
    """Milliseconds; ``peak_gib`` is the most memory torch held during the warm runs (None on the CPU)."""

    name: str
    first_ms: float
    median_ms: float
    runs_ms: tuple[float, ...]
    peak_gib: float | None

    @classmethod
    def of_runs(cls, name: str, first_ms: float, runs_ms: Sequence[float], peak_gib: float | None) -> Self:
        return cls(name, first_ms, statistics.median(runs_ms), tuple(runs_ms), peak_gib)


def measure(
    name: str,
    call: Callable[[], object],
    device: torch.device,
    *,
    warmup: int,
    repeats: int,
    before: Callable[[torch.device], None] = lambda _: None,
) -> Measurement:
    """Run ``call`` once (first), ``warmup`` times more, then ``repeats`` times one by one, each after ``before``."""
    before(device)
    first = _time(call, device)
    for _ in range(warmup):
        call()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    runs = []
    for _ in range(repeats):
        before(device)
        runs.append(_time(call, device))
    peak = torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else None
    return Measurement.of_runs(name, first, runs, peak)


def _time(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e3


def relative_error(ours: torch.Tensor, other: torch.Tensor) -> float:
    """Root mean square of the difference over that of ``other``, in float64 sums of float32 chunks."""
    square_error = square_other = 0.0
    for mine, theirs in zip(ours.flatten().split(2**26), other.flatten().split(2**26), strict=True):
        difference = mine.float() - theirs.float()
        square_error += float(difference.square().sum(dtype=torch.float64))
        square_other += float(theirs.float().square().sum(dtype=torch.float64))
    return (square_error / max(square_other, 1e-300)) ** 0.5
