"""Stage times, steps and peaks against clocks that the test moves itself."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from vgen.metrics import timer as timer_module
from vgen.metrics.timer import StageTimer, null_timer, reduce_max, stage_of, summary, timings_record


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`clock(seconds)` lets time pass; nothing else does."""
    now = [100.0]
    monkeypatch.setattr(timer_module.time, "perf_counter", lambda: now[0])

    def advance(seconds: float) -> None:
        now[0] += seconds

    yield advance


def test_a_stage_owns_its_time_without_the_stages_inside(clock: Any) -> None:
    timer = StageTimer("cpu")
    clock(1)
    with timer("write"):
        clock(2)
        with timer("decode_video"):
            clock(4)
            with timer("decode_video"):
                clock(8)
        clock(16)
    with timer("write"):
        clock(32)
    clock(64)
    assert timer.timings() == {"write": 50.0, "decode_video": 12.0, "total": 127.0}
    assert timer.current is None


def test_a_stage_held_open_by_a_generator_may_end_late(clock: Any) -> None:
    timer = StageTimer("cpu")

    def groups() -> Iterator[int]:
        with timer("decode_video"):
            clock(1)
            yield 0

    held = groups()
    with timer("write"):
        next(held)
        clock(2)
        assert timer.current == "decode_video"
    assert timer.current == "decode_video"
    with timer("denoise"):
        held.close()
        assert timer.current == "denoise"
        clock(4)
    assert timer.current is None
    timings = timer.timings()
    assert timings["decode_video"] + timings.get("write", 0.0) == 3.0
    assert timings["denoise"] == 4.0
    assert timings["total"] == 7.0


def test_steps_are_from_mark_to_mark_of_their_own_stage(clock: Any) -> None:
    timer = StageTimer("cpu")
    timer.step()
    with timer("denoise"):
        for seconds in (1, 2):
            clock(seconds)
            timer.step()
    clock(100)
    with timer("denoise"):
        clock(4)
        timer.step()
        clock(8)
    timings = timer.timings()
    assert timings["denoise_steps"] == [1.0, 2.0, 4.0]
    assert timings["denoise"] == 15.0


def test_an_error_knows_its_innermost_stage(clock: Any) -> None:
    timer = StageTimer("cpu")
    with pytest.raises(KeyError) as caught, timer("write"), timer("decode_video"):
        clock(1)
        raise KeyError("x")
    assert stage_of(caught.value) == "decode_video"
    assert timer.current is None
    assert timer.timings() == {"decode_video": 1.0, "write": 0.0, "total": 1.0}
    with pytest.raises(RuntimeError) as wrapped:
        try:
            raise caught.value
        except KeyError as error:
            raise RuntimeError("later") from error
    assert stage_of(wrapped.value) == "decode_video"
    assert stage_of(ValueError("nowhere")) is None


def test_the_device_is_waited_for_at_borders_only(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[str] = []
    monkeypatch.setattr(StageTimer, "_wait", lambda self: waits.append("wait"))
    timer = StageTimer("cpu")
    with timer("denoise"):
        before = len(waits)
        for _ in range(5):
            timer.step()
        assert len(waits) == before
    assert len(waits) == 3, "one at the start, one at each border"


def test_real_time_is_seconds() -> None:
    timer = StageTimer("cpu")
    with timer("denoise"):
        time.sleep(0.05)
        timer.step()
    timings = timer.timings()
    assert 0.05 <= timings["denoise_steps"][0] <= timings["denoise"] <= timings["total"] < 1.0


def test_memory_on_a_cpu_is_of_the_process() -> None:
    timer = StageTimer("cpu")
    before = timer.peak_gib()
    with timer("load"):
        block = torch.ones(64 * 2**20 // 4)
    assert block.sum() == 2**24
    assert timer.memory_gib() == {}
    assert 0.05 < before <= timer.peak_gib() < 200


def test_peaks_are_of_a_stage_and_those_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is a fake that counts as CUDA does: a reset sets the peak to what is held now."""
    held, peak = [0.0], [0.0]

    def hold(gib: float) -> None:
        held[0] = gib
        peak[0] = max(peak[0], gib)

    monkeypatch.setattr(timer_module, "peak_device_gib", lambda device: peak[0])
    monkeypatch.setattr(timer_module, "reset_peak_device", lambda device: peak.__setitem__(0, held[0]))
    hold(50)
    hold(1)
    timer = StageTimer("cpu")
    with timer("load"):
        hold(10)
        hold(4)
    hold(20)
    hold(4)
    with timer("write"):
        with timer("decode_video"):
            hold(9)
            hold(5)
        hold(6)
    assert timer.memory_gib() == {"load": 10, "write": 9, "decode_video": 9}
    assert timer.peak_gib() == 20


def test_the_null_timer_does_nothing() -> None:
    with null_timer("denoise"), null_timer("denoise"):
        null_timer.step()
    assert not vars(null_timer)


# ---------------------------------------------------------------- putting timings together

REQUESTS = [
    {"denoise": 10.0, "denoise_steps": [6.0, 4.0], "total": 12.0},
    {"denoise": 4.0, "denoise_steps": [2.0, 2.0], "total": 5.0},
    {"denoise": 6.0, "denoise_steps": [3.0, 3.5], "total": 7.0},
    {"denoise": 5.0, "denoise_steps": [2.5, 1.0], "total": 6.0},
]


def test_the_first_request_is_cold_and_the_median_of_the_rest_warm() -> None:
    assert summary(REQUESTS) == {
        "cold": REQUESTS[0],
        "warm": {"denoise": 5.0, "denoise_steps": [2.5, 2.0], "total": 6.0},
    }
    assert summary(REQUESTS[:1]) == {"cold": REQUESTS[0], "warm": None}
    assert summary([]) == {"cold": None, "warm": None}


def test_the_slowest_rank_counts() -> None:
    ranks = [
        {"load": 3.0, "denoise_steps": [1.0, 2.0], "cold": {"denoise": 1.0}, "warm": None},
        {"load": 2.0, "denoise_steps": [2.0, 1.0, 0.5], "cold": {"denoise": 4.0}, "warm": {"denoise": 3.0}},
        {"capture": 1.0, "cold": None},
    ]
    assert reduce_max(ranks) == {
        "load": 3.0,
        "denoise_steps": [2.0, 2.0, 0.5],
        "cold": {"denoise": 4.0},
        "warm": {"denoise": 3.0},
        "capture": 1.0,
    }
    assert reduce_max([]) is None


def test_a_jobs_timings_are_sums_and_its_own_total() -> None:
    found = timings_record({"load": 1.0, "total": 40.0}, REQUESTS[:2])
    assert found == {
        "load": 1.0,
        "denoise": 14.0,
        "denoise_steps": [6.0, 4.0, 2.0, 2.0],
        "total": 40.0,
        "cold": REQUESTS[0],
        "warm": REQUESTS[1],
    }
    assert REQUESTS[0]["denoise_steps"] == [6.0, 4.0]


# ---------------------------------------------------------------- CUDA


@pytest.mark.gpu
def test_on_a_gpu_steps_and_stages_hold_the_devices_time() -> None:
    size = torch.ones(4096, 4096, device="cuda")

    def work() -> None:
        for _ in range(20):
            size @ size

    work()
    timer = StageTimer("cuda")
    with timer("denoise"):
        started = time.perf_counter()
        for _ in range(3):
            work()
            timer.step()
        enqueued = time.perf_counter() - started
    timings = timer.timings()
    assert len(timings["denoise_steps"]) == 3
    assert abs(sum(timings["denoise_steps"]) - timings["denoise"]) < 0.2 * timings["denoise"]
    assert enqueued < timings["denoise"]


@pytest.mark.gpu
def test_on_a_gpu_each_stage_has_its_peak() -> None:
    torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated() / 2**30
    timer = StageTimer("cuda")
    with timer("load"):
        kept = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    with timer("denoise"):
        torch.empty(2**29, dtype=torch.uint8, device="cuda")
    with timer("write"), contextlib.suppress(RuntimeError):
        pass
    peaks = {stage: peak - base for stage, peak in timer.memory_gib().items()}
    assert peaks["load"] == pytest.approx(0.25, abs=0.01)
    assert peaks["denoise"] == pytest.approx(0.75, abs=0.01)
    assert peaks["write"] == pytest.approx(0.25, abs=0.01)
    assert timer.peak_gib() - base == pytest.approx(0.75, abs=0.01)
    assert kept.numel() == 2**28
