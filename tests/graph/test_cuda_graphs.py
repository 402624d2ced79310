"""Capture, replay, eviction, staleness and misses, on a tape that has the dangers of a CUDA graph."""

import gc
import inspect
import weakref
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.graph.tape import TapeBackend
from vgen.graph.cuda_graph import CudaGraphs, GraphStats
from vgen.graph.errors import GraphError
from vgen.graph.pool import GraphPool


@dataclass(frozen=True, eq=False)
class Stream:
    latents: Tensor
    sigma: Tensor
    context: tuple[Tensor, ...]
    enabled: bool = True


class Model(nn.Module):
    """``None`` for a stream that is not there, as the real one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("shift", torch.randn(3))

    def forward(self, video: Stream | None, audio: Stream | None = None, scale: float = 1.0) -> tuple[Any, ...]:
        return self.one(video, scale), self.one(audio, scale)

    def one(self, stream: Stream | None, scale: float) -> Tensor | None:
        if stream is None:
            return None
        x = stream.latents * stream.sigma + sum(stream.context)
        return self.linear(x) * scale + self.shift if stream.enabled else x


def stream(tokens: int = 4, **changes: Any) -> Stream:
    one = Stream(torch.randn(2, tokens, 3), torch.rand(1), (torch.randn(3), torch.randn(3)))
    return replace(one, **changes)


def build(**settings: Any) -> tuple[Model, CudaGraphs, TapeBackend]:
    torch.manual_seed(0)
    model, backend = Model().requires_grad_(False), TapeBackend()
    settings = {"weights": model, "constants": ("context",), **settings}
    graphs = CudaGraphs(model, GraphPool(backend), signature=inspect.signature(model.forward), **settings)
    return model, graphs, backend


def same(actual: Any, expected: Any) -> bool:
    pairs = zip(actual, expected, strict=True)
    return all(torch.equal(a, b) if isinstance(b, Tensor) else a is b for a, b in pairs)


def counts(graphs: CudaGraphs) -> tuple[int, int, int]:
    stats = graphs.stats()
    return stats.captures, stats.replays, stats.eager_calls


CALLS = {
    "both": lambda: (stream(), stream(5)),
    "video only": lambda: (stream(), None),
    "audio only": lambda: (None, stream()),
    "video not enabled": lambda: (stream(enabled=False), stream(5)),
    "another scale": lambda: (stream(), stream(5), 2.0),
    "other strides": lambda: (stream(latents=torch.randn(2, 3, 4).mT), stream(5)),
}


def test_replays_what_was_captured_with_new_values() -> None:
    model, graphs, backend = build(warmup=3)
    for turn in range(4):
        for name, make in CALLS.items():
            arguments = make()
            assert same(graphs(*arguments), model(*arguments)), (turn, name)
    assert counts(graphs) == (len(CALLS), 3 * len(CALLS), 0)
    assert backend.runs == 4 * len(CALLS)


def test_an_argument_by_name_or_left_out_is_the_same_call() -> None:
    _, graphs, _ = build()
    one, other = stream(), stream()
    graphs(one, other)
    graphs(one, audio=other)
    graphs(video=one, scale=1.0, audio=other)
    assert counts(graphs) == (1, 2, 0)


def test_results_of_two_passes_live_side_by_side() -> None:
    model, graphs, _ = build()
    cond, uncond = stream(), stream()
    results = [graphs(cond, None), graphs(uncond, None), graphs(cond, None)]
    for result, arguments in zip(results, (cond, uncond, cond), strict=True):
        assert same(result, model(arguments, None))


def test_without_copies_the_next_replay_overwrites_the_result() -> None:
    model, graphs, _ = build(clone_outputs=False)
    first, second = stream(), stream()
    graphs(first, None)
    kept, _ = graphs(first, None)
    version = kept._version
    (result, _) = graphs(second, None)
    assert result is kept
    assert same((kept, None), model(second, None))
    assert kept._version > version


def test_inputs_are_not_written_to_and_results_are_no_part_of_them() -> None:
    _, graphs, _ = build()
    one = stream(enabled=False)
    before = one.latents.clone()
    result, _ = graphs(one, None)
    expected = result.clone()
    result.add_(1)
    assert torch.equal(one.latents, before)
    assert torch.equal(graphs(one, None)[0], expected)


def test_texts_in_turn_and_a_text_that_is_changed() -> None:
    model, graphs, _ = build()
    texts = [(torch.randn(3), torch.randn(3)) for _ in range(2)]
    for turn in range(6):
        one = stream(context=texts[turn % 2])
        assert same(graphs(one, None), model(one, None)), turn
        if turn == 3:
            texts[0][1].add_(1)
    assert counts(graphs) == (1, 5, 0)


def test_a_recording_alone_would_not_follow() -> None:
    """The tape has the danger that the class is there to avoid."""
    model, _, backend = build()
    one = stream()
    captured = backend.capture(lambda: model(one, None), 1, 0)
    expected = model(one, None)
    model.linear.weight.data = torch.randn(3, 3)
    captured.recording.replay()
    assert same(captured.outputs, expected)
    assert not same(captured.outputs, model(one, None))


SWAPS = {
    "values": lambda model: setattr(model.linear.weight, "data", torch.randn(3, 3)),
    "parameter": lambda model: setattr(model.linear, "weight", nn.Parameter(torch.randn(3, 3), requires_grad=False)),
    "buffer": lambda model: setattr(model, "shift", torch.randn(3)),
    "module": lambda model: setattr(model, "linear", nn.Linear(3, 3).requires_grad_(False)),
    "bias gone": lambda model: model.linear.register_parameter("bias", None),
}


@pytest.mark.parametrize("name", SWAPS)
def test_swapped_weights_are_captured_anew(name: str) -> None:
    model, graphs, backend = build()
    one = stream()
    graphs(one, None)
    SWAPS[name](model)
    assert same(graphs(one, None), model(one, None))
    assert same(graphs(one, None), model(one, None))
    assert counts(graphs) == (2, 1, 0)
    assert graphs.stats().stale == 1
    assert len(graphs) == 1
    assert not backend.tapes[0].steps


def test_weights_changed_in_place_are_read_by_the_graph() -> None:
    model, graphs, _ = build()
    one = stream()
    graphs(one, None)
    model.linear.weight.mul_(2)
    assert same(graphs(one, None), model(one, None))
    assert counts(graphs) == (1, 1, 0)


def test_swapped_weights_are_refused_where_nothing_new_may_be_captured() -> None:
    model, graphs, _ = build(strict=True)
    one = stream()
    graphs(one, None)
    graphs.seal()
    graphs(one, None)
    model.linear.weight.data = torch.randn(3, 3)
    with pytest.raises(GraphError, match=r"weights have moved since, and graph\.strict=true allows no"):
        graphs(one, None)


def test_two_sets_of_weights_keep_a_graph_each() -> None:
    """As with an adapter that is merged in one of two resident copies."""
    merged = [False]
    model, graphs, _ = build(state=lambda: merged[0])
    sets = [model.linear.weight.data, torch.randn(3, 3)]
    for turn in range(6):
        merged[0] = bool(turn % 2)
        model.linear.weight.data = sets[turn % 2]
        one = stream()
        assert same(graphs(one, None), model(one, None)), turn
    assert counts(graphs) == (2, 4, 0)


def test_three_shapes_in_turn_of_which_two_are_kept() -> None:
    model, graphs, backend = build(max_graphs=2)
    for turn in range(9):
        one = stream(3 + turn % 3)
        assert same(graphs(one, None), model(one, None)), turn
        assert len(graphs) <= 2
        assert sum(bool(tape.steps) for tape in backend.tapes) <= 2
    stats = graphs.stats()
    assert (stats.captures, stats.replays, stats.evictions, stats.stale) == (9, 0, 7, 0)
    assert stats.graph_bytes == (TapeBackend.GRAPH_BYTES,) * 2


def test_the_graph_used_longest_ago_goes() -> None:
    _, graphs, _ = build(max_graphs=2)
    for tokens in (3, 4, 3, 5, 3):
        graphs(stream(tokens), None)
    assert counts(graphs) == (3, 2, 0)
    graphs(stream(4), None)
    assert counts(graphs) == (4, 2, 0)


def test_eviction_frees_buffers_and_outputs() -> None:
    _, graphs, backend = build(max_graphs=1)
    graphs(stream(100), None)
    outputs = weakref.ref(backend.tapes[0])
    first = graphs.stats().input_bytes
    backend.tapes.clear()
    backend.pools.clear()
    graphs(stream(1), None)
    gc.collect()
    assert outputs() is None
    assert graphs.stats().input_bytes == first - 99 * 2 * 3 * 4
    assert backend.trims == 1


def test_clear_forgets_everything() -> None:
    _, graphs, backend = build()
    for tokens in (3, 4):
        graphs(stream(tokens), None)
    assert graphs.stats().pool_bytes == 2 * TapeBackend.GRAPH_BYTES
    graphs.clear()
    stats = graphs.stats()
    assert len(graphs) == 0
    assert (stats.graph_bytes, stats.pool_bytes, stats.input_bytes) == ((), 0, 0)
    graphs(stream(), None)
    assert counts(graphs) == (3, 0, 0)
    # A pool that all graphs have left is not named again.
    assert backend.pools == [0, 0, 1]


def test_two_models_share_a_pool() -> None:
    model, backend = Model().requires_grad_(False), TapeBackend()
    pool = GraphPool(backend)
    experts = [CudaGraphs(model.forward, pool) for _ in range(2)]
    for expert in experts:
        expert(stream(), None)
    experts[0].clear()
    experts[0](stream(), None)
    assert backend.pools == [0, 0, 0]
    for expert in experts:
        expert.clear()
    assert pool.num_bytes == 0
    experts[1](stream(), None)
    assert backend.pools[-1] == 1


def test_strict_refuses_what_the_warm_up_did_not_see() -> None:
    model, graphs, backend = build(strict=True)
    one = stream()
    graphs(one, None)
    graphs.seal()
    assert same(graphs(one, None), model(one, None))
    runs = backend.runs
    with pytest.raises(GraphError, match=r"call 3 has key [0-9a-f]{8}, .* graph\.strict=true allows no other; warm up"):
        graphs(stream(5), None)
    assert backend.runs == runs
    assert counts(graphs) == (1, 1, 0)


@pytest.mark.parametrize(("on_miss", "expected"), [("capture", (2, 2, 0)), ("eager", (1, 1, 2))])
def test_a_miss_after_the_warm_up(
    on_miss: Any, expected: tuple[int, int, int], caplog: pytest.LogCaptureFixture
) -> None:
    model, graphs, _ = build(on_miss=on_miss)
    graphs(stream(), None)
    graphs.seal()
    for tokens in (5, 4, 5):
        one = stream(tokens)
        assert same(graphs(one, None), model(one, None))
    assert counts(graphs) == expected
    assert len(caplog.records) == (1 if on_miss == "capture" else 2)
    assert f"was not captured during the warm-up: {on_miss}" in caplog.records[0].getMessage()


def test_inside_another_capture_the_function_is_called() -> None:
    model, graphs, backend = build()
    one = stream()
    backend.capturing = True
    assert same(graphs(one, None), model(one, None))
    assert counts(graphs) == (0, 0, 0)


def test_a_call_that_writes_to_its_inputs_is_refused() -> None:
    graphs = CudaGraphs(lambda x: x.add_(1), GraphPool(TapeBackend()))
    with pytest.raises(GraphError, match="writes to its inputs"):
        graphs(torch.zeros(2))
    assert len(graphs) == 0


@pytest.mark.parametrize("setting", ["warmup", "max_graphs"])
def test_counts_below_one_are_refused(setting: str) -> None:
    with pytest.raises(ValueError, match=rf"graph\.{setting}=0 is below 1; use graph\.{setting}=1 or more"):
        build(**{setting: 0})


def test_a_failed_capture_leaves_nothing() -> None:
    model, backend = Model().requires_grad_(False), TapeBackend()
    graphs = CudaGraphs(model.forward, GraphPool(backend))
    with pytest.raises(RuntimeError):
        graphs(stream(sigma=torch.zeros(7)), None)
    assert len(graphs) == 0
    assert graphs.stats().input_bytes == 0
    one = stream()
    assert same(graphs(one, None), model(one, None))


def test_stats_before_any_call() -> None:
    _, graphs, _ = build()
    assert graphs.stats() == GraphStats(0, 0, 0, 0, 0, 0.0, (), 0, 0)
