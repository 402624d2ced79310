"""Compilation and capture on real models: what stays, what is shared, and that capture changes no bit of either."""

import dataclasses
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.graph.tape import RerunBackend, TapeBackend
from tests.parallel.test_ulysses import CASES, STG, LTX2Case, WanCase, build, largest_error, run
from vgen.config import GraphConfig
from vgen.graph.apply import apply_graph, capture_calls, graphs_of, release_calls
from vgen.graph.compile import compile_blocks, compile_report
from vgen.graph.pool import GraphPool
from vgen.models.ltx2.perturbation import Perturbation

EAGER = GraphConfig(
    mode="eager",
    compile_mode="default",
    compile_scope="block",
    scope="transformer",
    warmup=1,
    max_graphs=8,
    strict=False,
    on_miss="capture",
)
COMPILE = dataclasses.replace(EAGER, mode="compile")
CPU = torch.device("cpu")
SKIPPING = Perturbation(skip_video_self=(1, 2))
ISOLATED = Perturbation(skip_audio_to_video="all", skip_video_to_audio="all")


def case(name: str, layers: int = 2, **changes: Any) -> LTX2Case | WanCase:
    found = CASES[name]
    config: Any = found.config
    return dataclasses.replace(found, config=dataclasses.replace(config, num_layers=layers), **changes)


CAPTURED = {
    "LTX-2.0": case("LTX-2.0"),
    "LTX-2.0, perturbed": case("LTX-2.0", perturbations=STG),
    "LTX-2.0, isolated": case("LTX-2.0", perturbations=(ISOLATED, ISOLATED), prepared=True),
    "LTX-2.0, no audio": case("LTX-2.0, no audio, prepared text"),
    "LTX-2.0, no video": case("LTX-2.0, no video"),
    "LTX-2.0, video not enabled": case("LTX-2.0, video not enabled"),
    "LTX-2.3, rows": case("LTX-2.3, rows and perturbations"),
    "Wan T2V": case("Wan 2.1 T2V"),
    "Wan I2V": case("Wan 2.1 I2V"),
    "Wan I2V, prepared": case("Wan 2.1 I2V, prepared text"),
    "Wan TI2V, rows": case("Wan 2.2 TI2V, rows"),
}


@pytest.mark.parametrize("name", CAPTURED)
def test_captured_is_direct(name: str) -> None:
    one = CAPTURED[name]
    model = build(one.config, torch.float32)
    inputs = [one.inputs(model, torch.float32, seed) for seed in (0, 70, 0)]
    expected = [run(model, arguments) for arguments in inputs]
    capture_calls(model, EAGER, GraphPool(TapeBackend()))
    for arguments, outputs in zip(inputs, expected, strict=True):
        assert all(map(torch.equal, run(model, arguments), outputs))
    graphs = graphs_of(model)
    assert graphs is not None
    assert (graphs.stats().captures, graphs.stats().replays) == (1, 2)


def test_hooks_are_captured_and_names_stay() -> None:
    one = CAPTURED["Wan T2V"]
    model = build(one.config, torch.float32)
    names, calls = list(model.state_dict()), []
    model.register_forward_hook(lambda module, arguments, output: calls.append(1) or output + 1)
    expected = run(model, one.inputs(model, torch.float32))
    capture_calls(model, EAGER, GraphPool(TapeBackend()))
    calls.clear()
    for _ in range(3):
        assert all(map(torch.equal, run(model, one.inputs(model, torch.float32)), expected))
    assert len(calls) == EAGER.warmup + 1
    assert list(model.state_dict()) == names
    assert type(model).__name__ == "WanTransformer"


def test_prepared_text_is_held_once_for_all_passes() -> None:
    """Passes differ in text and perturbation; the second perturbation finds the text in place."""
    one = case("LTX-2.0", prepared=True)
    model = build(one.config, torch.float32)
    capture_calls(model, EAGER, GraphPool(TapeBackend()))
    graphs = graphs_of(model)
    assert graphs is not None
    video, audio, rope, _ = one.inputs(model, torch.float32)
    run(model, (video, audio, rope, ()))
    before = graphs.stats().input_bytes
    run(model, (video, audio, rope, (ISOLATED, ISOLATED)))
    assert graphs.stats().captures == 2
    assert graphs.stats().input_bytes == before


def test_off_is_untouched() -> None:
    one = CAPTURED["LTX-2.0"]
    model = build(one.config, torch.float32)
    apply_graph(model, one.plan, EAGER, CPU)
    assert all(part._compiled_call_impl is None for part in model.modules())
    assert graphs_of(model) is None


@pytest.mark.parametrize("mode", ["cuda", "compile_cuda"])
def test_graphs_need_cuda(mode: Any) -> None:
    one = CAPTURED["LTX-2.0"]
    model = build(one.config, torch.float32)
    with pytest.raises(ValueError, match=rf"graph.mode={mode} captures CUDA graphs and this run is on cpu: use device"):
        apply_graph(model, one.plan, dataclasses.replace(EAGER, mode=mode), CPU)
    assert all(part._compiled_call_impl is None for part in model.modules())


def test_with_whole_steps_captured_calls_of_the_transformer_are_not() -> None:
    one = CAPTURED["LTX-2.0"]
    model = build(one.config, torch.float32)
    config = dataclasses.replace(EAGER, mode="cuda", scope="step")
    apply_graph(model, one.plan, config, torch.device("cuda"), pool=GraphPool(TapeBackend()))
    assert all(part._compiled_call_impl is None for part in model.modules())


def test_released_calls_are_direct_again() -> None:
    one = CAPTURED["LTX-2.0"]
    model = build(one.config, torch.float32)
    pool = GraphPool(TapeBackend())
    capture_calls(model, EAGER, pool)
    arguments = one.inputs(model, torch.float32)
    expected = run(model, arguments)
    release_calls(model)
    assert graphs_of(model) is None
    assert model._compiled_call_impl is None
    assert pool.num_bytes == 0
    assert all(map(torch.equal, run(model, arguments), expected))
    release_calls(model)  # of nothing


def test_released_calls_are_compiled_as_before(quick_compiler: list[dict[str, Any]]) -> None:
    one = CAPTURED["LTX-2.0"]
    model = build(one.config, torch.float32)
    compile_blocks(model, one.plan, dataclasses.replace(COMPILE, compile_scope="transformer"))
    compiled = model._compiled_call_impl
    capture_calls(model, EAGER, GraphPool(RerunBackend()))
    release_calls(model)
    assert model._compiled_call_impl is compiled


@pytest.fixture
def quick_compiler(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Dynamo without Inductor, which takes a minute; returns what was asked of ``torch.compile``."""
    real, asked = torch.compile, []

    def compile_(function: Any, **settings: Any) -> Any:
        asked.append(settings)
        return real(function, backend="eager", **settings)

    # pytest's handler would have every traced operator formatted.
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "propagate", False)

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", compile_)
    return asked


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x


def outputs_of(model: nn.Module, one: LTX2Case | WanCase, seed: int = 0) -> list[Tensor]:
    return run(model, one.inputs(model, torch.float32, seed))


@pytest.mark.parametrize(
    ("one", "graphs"),
    [(case("LTX-2.0", 4, perturbations=(SKIPPING,) * 2), 2), (case("Wan 2.1 I2V, prepared text", 4), 1)],
    ids=["LTX-2.0, perturbed", "Wan I2V"],
)
def test_blocks_that_are_alike_are_compiled_once(
    one: LTX2Case | WanCase, graphs: int, quick_compiler: list[dict[str, Any]]
) -> None:
    """A block without self-attention is another kind."""
    model, plain = build(one.config, torch.float32), build(one.config, torch.float32)
    names = list(model.state_dict())
    compile_blocks(model, one.plan, COMPILE)
    with compile_report() as report:
        outputs = outputs_of(model, one)
    assert report.graphs == graphs
    assert report.seconds > 0
    assert largest_error(outputs, outputs_of(plain, one)) <= 1e-6
    assert list(model.state_dict()) == names
    assert quick_compiler == [{"mode": "default", "dynamic": False}] * 4
    with compile_report() as report:
        outputs_of(model, one, seed=9)
    assert (report.graphs, report.seconds) == (0, 0.0)


def test_more_variants_than_dynamo_allows_by_itself(quick_compiler: list[dict[str, Any]]) -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList(Square() for _ in range(2))
    compile_blocks(model, CAPTURED["Wan T2V"].plan, COMPILE)
    with compile_report() as report:
        for tokens in range(2, 14):
            for block in model.blocks:
                block(torch.zeros(tokens, 2))
    assert report.graphs == 12


def test_the_whole_transformer_is_one_piece(quick_compiler: list[dict[str, Any]]) -> None:
    one = case("Wan 2.1 T2V")
    model, plain = build(one.config, torch.float32), build(one.config, torch.float32)
    compile_blocks(model, one.plan, dataclasses.replace(COMPILE, compile_scope="transformer"))
    with compile_report() as report:
        outputs = outputs_of(model, one)
    assert report.graphs == 1
    assert largest_error(outputs, outputs_of(plain, one)) <= 1e-6


def test_a_compiled_model_is_captured_to_the_last_bit(quick_compiler: list[dict[str, Any]]) -> None:
    one = case("Wan 2.1 I2V, prepared text")
    model = build(one.config, torch.float32)
    compile_blocks(model, one.plan, COMPILE)
    expected = [outputs_of(model, one, seed) for seed in (0, 70)]
    # A tape of operators would turn the compiler off.
    capture_calls(model, EAGER, GraphPool(RerunBackend()))
    with compile_report() as report:
        for seed in (0, 1, 0):
            assert all(map(torch.equal, outputs_of(model, one, 70 * seed), expected[seed]))
    assert report.graphs == 0
