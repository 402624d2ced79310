"""Drift, idle time and launches from made-up clocks and traces, and the probe over two ranks that do not go in step."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from vgen.metrics.drift import (
    STEP,
    Activity,
    DriftProbe,
    Marks,
    activity,
    drift_record,
    gather_marks,
    idle_share,
    profile_steps,
    skews_ms,
)

CPU = torch.device("cpu")


def test_skew_is_last_minus_first() -> None:
    ranks = [Marks((10.0, 20.0, 30.0), 100.0), Marks((10.5, 20.0, 33.0), 100.0), Marks((9.0, 20.25, 31.0), 100.0)]

    assert skews_ms(ranks) == (1.5, 0.25, 3.0)


def test_a_clock_that_runs_faster_shows_no_skew() -> None:
    """All arrive together; the second device counts 1.25 ms for each ms, and saw the barriers so as well."""
    true = (8.0, 40.0, 72.0)
    ranks = [Marks(true, 80.0), Marks(tuple(1.25 * one for one in true), 100.0)]

    assert skews_ms(ranks) == pytest.approx((0.0, 0.0, 0.0), abs=1e-12)


def test_one_rank_has_no_skew() -> None:
    assert skews_ms([Marks((1.0, 5.0), 9.0)]) == (0.0, 0.0)


def test_ranks_that_marked_different_steps_are_refused() -> None:
    with pytest.raises(ValueError, match=r"the ranks marked \[1, 2\] steps; mark the same steps on every rank"):
        skews_ms([Marks((1.0,), 5.0), Marks((1.0, 2.0), 5.0)])


def test_a_span_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the spans are \[5.0, 0.0\] ms"):
        skews_ms([Marks((1.0,), 5.0), Marks((1.0,), 0.0)])


@pytest.mark.parametrize(
    ("busy", "expected"),
    [
        ([], 1.0),
        ([(0.0, 10.0)], 0.0),
        ([(-5.0, 20.0)], 0.0),
        ([(0.0, 4.0), (6.0, 10.0)], 0.2),
        ([(6.0, 10.0), (0.0, 4.0)], 0.2),
        ([(0.0, 8.0), (1.0, 2.0)], 0.2),  # the second stream's kernel lies inside
        ([(0.0, 5.0), (3.0, 9.0)], 0.1),
        ([(-3.0, -1.0), (12.0, 14.0)], 1.0),
        ([(2.0, 3.0)], 0.9),
    ],
)
def test_idle_share(busy: list[tuple[float, float]], expected: float) -> None:
    assert idle_share(busy, (0.0, 10.0)) == pytest.approx(expected)


def event(kind: str, name: str, start: float, duration: float) -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": duration}


def trace(on_device: bool = True) -> list[dict[str, Any]]:
    """Two steps of 10 and 12 us on the device, of which it works 9 and 6; the host is ahead of it."""
    events = [
        {"ph": "M", "name": "process_name"},
        event("user_annotation", STEP, 0, 5),
        event("cuda_runtime", "cudaLaunchKernel", 1, 1),
        event("cuda_driver", "cuLaunchKernelEx", 2, 1),
        event("cuda_runtime", "cudaMemsetAsync", 3, 1),
        event("cuda_runtime", "cudaStreamIsCapturing", 4, 1),
        event("user_annotation", STEP, 6, 5),
        event("user_annotation", "another", 6, 5),
        event("cuda_runtime", "cudaGraphLaunch", 7, 1),
        event("cuda_runtime", "cudaDeviceSynchronize", 12, 1),
        event("kernel", "gemm", 20, 5),
        event("kernel", "nccl", 22, 6),  # on another stream
        event("gpu_memset", "Memset", 29, 1),
        event("kernel", "gemm", 30, 4),
        event("gpu_memcpy", "Memcpy", 40, 2),
    ]
    if on_device:
        events += [event("gpu_user_annotation", STEP, 20, 10), event("gpu_user_annotation", STEP, 30, 12)]
    return events


def test_a_trace_by_step() -> None:
    found = activity(trace())

    assert found.idle_shares == pytest.approx((0.1, 0.5))
    assert found.launches == (3, 1)


def test_a_trace_without_ranges_on_the_device_is_one_step() -> None:
    found = activity(trace(on_device=False))

    assert found.idle_shares == pytest.approx((7 / 22,))
    assert found.launches == (3, 1)


def test_a_device_that_does_nothing_is_idle() -> None:
    assert activity([event("user_annotation", STEP, 0, 5)]) == Activity((1.0,), (0,))


def test_profiling_needs_a_device() -> None:
    with pytest.raises(ValueError, match="those of a CUDA device and this one is cpu"):
        profile_steps(lambda: None, 1, CPU)


def test_the_record_has_plain_values() -> None:
    assert drift_record((1.0, 3.0, 2.0), Activity((0.5,), (7,))) == {
        "skew_ms": {"steps": [1.0, 3.0, 2.0], "median": 2.0, "max": 3.0},
        "idle_share": {"steps": [0.5], "median": 0.5, "max": 0.5},
        "launches": {"steps": [7], "median": 7, "max": 7},
    }
    assert drift_record((), None) == {"skew_ms": {"steps": [], "median": None, "max": None}}


def test_a_probe_without_a_group() -> None:
    probe = DriftProbe(CPU, None)
    probe.start()
    time.sleep(0.01)
    probe.arrive()
    marks = probe.stop()
    assert 10 <= marks.arrivals_ms[0] <= marks.span_ms
    assert gather_marks(marks, None) == [marks]
    with pytest.raises(ValueError, match="stopped before it was started"):
        probe.stop()


LATE_S = 0.5


def out_of_step() -> tuple[float, ...]:
    """The second rank starts late, which is no drift, and is slow in the second step."""
    rank, group = dist.get_rank(), dist.group.WORLD
    probe = DriftProbe(CPU, group)
    time.sleep(rank * LATE_S)
    probe.start()
    for step in range(3):
        if step == 1:
            time.sleep(rank * LATE_S)
        probe.arrive()
        if step == 1:
            dist.barrier()
    return skews_ms(gather_marks(probe.stop(), group))


def test_two_ranks_out_of_step() -> None:
    ours, theirs = run_ranks(2, out_of_step)

    assert ours == theirs
    # Scaling to one span, and other work on this machine, leave some of it.
    assert ours[1] >= LATE_S * 1000 * 0.8
    assert max(ours[0], ours[2]) < LATE_S * 1000 / 2


@pytest.mark.gpu
def test_probe_and_profile_on_a_device() -> None:
    device, x = torch.device("cuda"), torch.randn(2048, 2048, device="cuda")
    probe = DriftProbe(device, None)
    probe.start()
    for _ in range(4):
        x = x @ x / 2048
        probe.arrive()
    marks = probe.stop()
    assert list(marks.arrivals_ms) == sorted(marks.arrivals_ms)
    assert marks.arrivals_ms[0] > 0 and marks.arrivals_ms[-1] <= marks.span_ms

    found = profile_steps(lambda: [x.sin() for _ in range(5)], 3, device)
    assert found.launches == (5, 5, 5)
    assert len(found.idle_shares) in (1, 3)
    assert all(0 <= share < 1 for share in found.idle_shares)
