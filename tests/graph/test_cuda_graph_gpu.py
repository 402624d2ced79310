"""Replays on a GPU against the same code called directly: to the last bit, without waiting, without creeping memory."""

import dataclasses
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.parallel.test_ulysses import (
    KEYFRAMES,
    LTX2_2_0,
    LTX2_2_3,
    STG,
    WAN_I2V,
    WAN_T2V,
    WAN_TI2V,
    LTX2Case,
    WanCase,
    build,
)
from vgen.config import GraphConfig
from vgen.graph.apply import apply_graph, graphs_of
from vgen.graph.backend import CudaBackend
from vgen.graph.cuda_graph import CudaGraphs
from vgen.graph.pool import GraphPool
from vgen.graph.tree import map_tensors
from vgen.models.ltx2.perturbation import Perturbation

pytestmark = [
    pytest.mark.gpu,
    # Said once by torch of the mode that these tests set.
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]

CUDA = torch.device("cuda")
MIB = 2**20
CONFIG = GraphConfig(
    mode="cuda",
    compile_mode="default",
    compile_scope="block",
    scope="transformer",
    warmup=2,
    max_graphs=4,
    strict=False,
    on_miss="capture",
)
# Heads that the fast kernels take.
V2_0, V2_3 = (
    dataclasses.replace(config, num_attention_heads=4, attention_head_dim=64, audio_attention_head_dim=32)
    for config in (LTX2_2_0, LTX2_2_3)
)
T2V, I2V, TI2V = (
    dataclasses.replace(config, num_attention_heads=4, attention_head_dim=64, ffn_dim=512)
    for config in (WAN_T2V, WAN_I2V, WAN_TI2V)
)
I2V = dataclasses.replace(I2V, added_kv_proj_dim=256)
ISOLATED = (Perturbation(skip_audio_to_video="all", skip_video_to_audio="all"),) * 2
ALIKE = (Perturbation(skip_video_self=(1,), skip_audio_self=(1,)),) * 2

CASES: dict[str, LTX2Case | WanCase] = {
    "LTX-2.0": LTX2Case(V2_0, prepared=True),
    "LTX-2.0, STG": LTX2Case(V2_0, prepared=True, perturbations=ALIKE),
    "LTX-2.0, STG of one sample": LTX2Case(V2_0, prepared=True, perturbations=STG),
    "LTX-2.0, modalities isolated": LTX2Case(V2_0, prepared=True, perturbations=ISOLATED),
    "LTX-2.0, video only": LTX2Case(V2_0, prepared=True, audio=False),
    "LTX-2.0, audio only": LTX2Case(V2_0, prepared=True, enabled=False),
    "LTX-2.0, no video": LTX2Case(V2_0, prepared=True, video=False),
    "LTX-2.0, image to video": LTX2Case(V2_0, geometry=KEYFRAMES, prepared=True, timesteps="rows"),
    "LTX-2.0, text not prepared": LTX2Case(V2_0),
    "LTX-2.3": LTX2Case(V2_3),
    "LTX-2.3, image to video, STG": LTX2Case(V2_3, timesteps="rows", perturbations=STG),
    "Wan T2V": WanCase(T2V, prepared=True),
    "Wan 2.1 I2V": WanCase(I2V, prepared=True),
    "Wan 2.1 I2V, text not prepared": WanCase(I2V),
    "Wan A14B I2V": WanCase(dataclasses.replace(T2V, in_channels=36), prepared=True),
    "Wan TI2V": WanCase(TI2V, prepared=True, timesteps="rows"),
}
COMPILED = ("LTX-2.0, STG of one sample", "LTX-2.3, image to video, STG", "Wan 2.1 I2V", "Wan TI2V")


@pytest.fixture(autouse=True)
def waiting_is_allowed_again() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch.cuda.set_sync_debug_mode("default")
    gc.collect()
    torch.cuda.empty_cache()


def model_of(case: LTX2Case | WanCase) -> nn.Module:
    model: nn.Module = build(case.config, torch.bfloat16).to(CUDA)
    return model


def inputs(case: LTX2Case | WanCase, seed: int = 0) -> tuple[Any, ...]:
    """Latents, text and noise levels of ``seed``, on the GPU."""
    made: Any = case.inputs(build(case.config, torch.bfloat16), torch.bfloat16, seed)
    *streams, last, perturbations = (*made, ()) if isinstance(case, WanCase) else made
    level = 1 / (1 + seed)

    def at_level(stream: Any) -> Any:
        if stream is None:
            return None
        changes = {"timestep": stream.timestep * level}
        if hasattr(stream, "sigma"):
            changes["sigma"] = stream.sigma * level
        return dataclasses.replace(stream, **changes)

    arguments = (*map(at_level, streams), last, *([] if isinstance(case, WanCase) else [perturbations]))
    moved: tuple[Any, ...] = map_tensors(arguments, lambda _, tensor: tensor.to(CUDA))
    return moved


@torch.no_grad()
def direct(model: nn.Module, arguments: tuple[Any, ...]) -> Any:
    """The call that the graph captures, hooks and compiled blocks included."""
    return model._call_impl(*arguments)


def same(actual: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor):
        return torch.equal(actual, expected)
    pairs = zip(actual, expected, strict=True)
    return all(torch.equal(a, b) if isinstance(b, Tensor) else a is b for a, b in pairs)


def forbid_waiting_while_capturing(model: nn.Module) -> list[bool]:
    """From the entry of the captured call to its end; returns a list that fills as captures pass."""
    captured: list[bool] = []

    def enter(*_: Any) -> None:
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.set_sync_debug_mode("error")

    def leave(*_: Any) -> None:
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.set_sync_debug_mode("default")
            captured.append(True)

    model.register_forward_pre_hook(enter)
    model.register_forward_hook(leave)
    return captured


def check(model: nn.Module, case: LTX2Case | WanCase) -> None:
    """Alternate texts and noise levels, both of which the first call did not have."""
    calls = [inputs(case, seed) for seed in (0, 1, 7)]
    expected = [direct(model, arguments) for arguments in calls]
    assert not same(expected[0], expected[1])
    for index in (0, 1, 2, 1, 0, 0, 2):
        assert same(model(*calls[index]), expected[index]), index
    graphs = graphs_of(model)
    assert graphs is not None
    assert (graphs.stats().captures, graphs.stats().replays) == (1, 6)
    assert graphs.stats().pool_bytes > 0


@pytest.mark.parametrize("name", CASES)
def test_replay_is_direct(name: str) -> None:
    case = CASES[name]
    model = model_of(case)
    captured = forbid_waiting_while_capturing(model)
    apply_graph(model, case.plan, CONFIG, CUDA)
    check(model, case)
    assert captured == [True]


@pytest.mark.parametrize("name", COMPILED)
def test_replay_of_compiled_blocks_is_direct(name: str) -> None:
    case = CASES[name]
    model = model_of(case)
    captured = forbid_waiting_while_capturing(model)
    apply_graph(model, case.plan, dataclasses.replace(CONFIG, mode="compile_cuda"), CUDA)
    check(model, case)
    assert captured == [True]


@pytest.mark.parametrize("name", ["LTX-2.0, STG of one sample", "LTX-2.3, image to video, STG", "Wan TI2V"])
def test_a_call_does_not_wait_for_the_device(name: str) -> None:
    """A direct one the second time, when its tables are there, and a replay with a new text."""
    case = CASES[name]
    model, first, second = model_of(case), inputs(case), inputs(case, 1)
    apply_graph(model, case.plan, CONFIG, CUDA)
    direct(model, first)
    model(*first)
    torch.cuda.set_sync_debug_mode("error")
    direct(model, second)
    model(*second)


def geometries(case: LTX2Case | WanCase) -> list[LTX2Case | WanCase]:
    return [
        dataclasses.replace(case, geometry=dataclasses.replace(case.geometry, latent_frames=frames))
        for frames in (2, 3, 5)
    ]


@pytest.mark.parametrize("name", ["LTX-2.0", "Wan 2.1 I2V"])
def test_three_shapes_in_turn_of_which_two_are_kept(name: str) -> None:
    model = model_of(CASES[name])
    apply_graph(model, CASES[name].plan, dataclasses.replace(CONFIG, max_graphs=2), CUDA)
    graphs = graphs_of(model)
    assert graphs is not None
    calls = [inputs(case, 1) for case in geometries(CASES[name])]
    expected = [direct(model, arguments) for arguments in calls]
    held = []
    for _ in range(6):
        for arguments, result in zip(calls, expected, strict=True):
            assert same(model(*arguments), result)
        gc.collect()
        held.append((torch.cuda.memory_allocated(), graphs.stats().pool_bytes))
    assert graphs.stats().evictions == 3 * 6 - 2
    assert len(graphs) == 2
    assert held[-1][0] - held[1][0] <= MIB
    assert held[-1][1] <= max(pool for _, pool in held[:3])


@pytest.mark.parametrize("name", ["LTX-2.0", "Wan T2V"])
def test_200_replays_keep_memory_and_results(name: str) -> None:
    case = CASES[name]
    model, calls = model_of(case), [inputs(case, seed) for seed in (0, 1)]
    apply_graph(model, case.plan, CONFIG, CUDA)
    expected = [direct(model, arguments) for arguments in calls]
    model(*calls[0])
    model(*calls[1])
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]
    for turn in range(200):
        result = model(*calls[turn % 2])
    torch.cuda.synchronize()
    assert same(result, expected[1])
    del result
    assert torch.cuda.memory_allocated() - before[0] <= MIB
    assert torch.cuda.memory_reserved() - before[1] <= MIB
    assert before[2] - torch.cuda.mem_get_info()[0] <= MIB


def memory() -> tuple[int, int]:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def test_clear_gives_all_memory_back() -> None:
    case = CASES["LTX-2.0"]
    model, arguments = model_of(case), inputs(case)
    apply_graph(model, case.plan, CONFIG, CUDA)
    graphs = graphs_of(model)
    assert graphs is not None
    # The first capture also makes the workspaces of BLAS on its stream, which the process keeps.
    model(*arguments)
    graphs.clear()
    before = memory()
    model(*arguments)
    assert torch.cuda.memory_reserved() > before[1]
    graphs.clear()
    assert memory() == before
    assert same(model(*arguments), direct(model, arguments))


def test_an_evicted_graph_frees_its_memory() -> None:
    """A large graph makes room for a small one; both sizes are of one tensor."""
    graphs = CudaGraphs(lambda x: x * 2, GraphPool(CudaBackend(CUDA)), max_graphs=1)
    large, small = torch.ones(64 * MIB, device=CUDA), torch.ones(MIB, device=CUDA)
    graphs(large)
    with_large = torch.cuda.memory_reserved()
    graphs(small)
    assert with_large - torch.cuda.memory_reserved() >= 2 * (large.nbytes - small.nbytes) - 32 * MIB


def test_graphs_of_one_pool_use_the_same_memory_in_turn() -> None:
    graphs = CudaGraphs(lambda x, factor: ((x * factor).sin() + 1).sum(), GraphPool(CudaBackend(CUDA)))
    x = torch.ones(16 * MIB, device=CUDA)
    results = [graphs(x, factor) for factor in (1.0, 2.0, 3.0)]
    grown = graphs.stats().graph_bytes
    assert grown[0] >= x.nbytes
    assert sum(grown[1:]) <= 4 * MIB
    assert [graphs(x, factor).item() for factor in (1.0, 2.0, 3.0)] == [result.item() for result in results]


def test_swapped_weights_are_captured_anew() -> None:
    case = CASES["Wan T2V"]
    model: Any = model_of(case)
    apply_graph(model, case.plan, CONFIG, CUDA)
    arguments = inputs(case)
    before = model(*arguments)
    model.blocks[1].ffn.net[2].weight.data = torch.randn_like(model.blocks[1].ffn.net[2].weight)
    after = model(*arguments)
    assert not same(after, before)
    assert same(after, direct(model, arguments))
    graphs = graphs_of(model)
    assert graphs is not None
    assert (graphs.stats().captures, graphs.stats().stale) == (2, 1)


def test_two_experts_share_a_pool() -> None:
    case = CASES["Wan T2V"]
    pool, arguments = GraphPool(CudaBackend(CUDA)), inputs(case)
    experts: list[Any] = [model_of(case) for _ in range(2)]
    experts[1].proj_out.weight.data.mul_(2)
    for expert in experts:
        apply_graph(expert, case.plan, CONFIG, CUDA, pool=pool)
    for _ in range(2):
        results = [expert(*arguments) for expert in experts]
        assert all(map(same, results, [direct(expert, arguments) for expert in experts]))
    first = graphs_of(experts[0])
    assert first is not None
    first.clear()
    assert same(experts[1](*arguments), results[1])
