"""Ranks that capture together: real collectives under the tape, and every way of not agreeing, in seconds."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.graph.tape import TapeBackend
from tests.parallel import test_nccl_gpu
from tests.parallel.test_ulysses import CASES, build, run
from tests.ranks import run_ranks
from vgen.config import GraphConfig
from vgen.graph.agreement import Agreement
from vgen.graph.apply import capture_calls, graphs_of
from vgen.graph.cuda_graph import CudaGraphs
from vgen.graph.errors import GraphError
from vgen.graph.pool import GraphPool
from vgen.parallel.mesh import build_mesh
from vgen.parallel.plans import ParallelPlan
from vgen.parallel.ulysses import apply_ulysses

CONFIG = GraphConfig("cuda", "default", "block", "transformer", 1, 8, False, "capture")
TIMEOUT_S = 2.0
MODELS = ("LTX-2.3, rows and perturbations", "Wan 2.1 I2V, prepared text")


def captured_is_direct(name: str) -> dict[str, Any]:
    """Ulysses over both ranks: new values, and in between another call."""
    case, group = CASES[name], dist.group.WORLD
    model = build(case.config, torch.float32)
    apply_ulysses(model, case.plan, group)
    expected = [run(model, case.inputs(model, torch.float32, seed)) for seed in (0, 50)]
    capture_calls(model, CONFIG, GraphPool(TapeBackend()), agreement=Agreement(range(2)))
    seeds = (0, 50, 0)
    equal = []
    for seed in seeds:
        outputs = run(model, case.inputs(model, torch.float32, seed))
        equal.append(all(map(torch.equal, outputs, expected[seed // 50])))
    graphs = graphs_of(model)
    assert graphs is not None
    return {"equal": equal, "captures": graphs.stats().captures, "replays": graphs.stats().replays}


def outcome(*calls: Callable[[], Any]) -> tuple[str, float]:
    """The sentence of the first error, and the seconds until then."""
    started = time.monotonic()
    try:
        for call in calls:
            call()
    except GraphError as error:
        return str(error), time.monotonic() - started
    return "", time.monotonic() - started


def disagreements() -> dict[str, tuple[str, float]]:
    rank = dist.get_rank()

    def graphs(timeout_s: float = 30.0, **settings: Any) -> CudaGraphs:
        agreement = Agreement(range(2), timeout_s)
        return CudaGraphs(lambda x: x + 1, GraphPool(TapeBackend()), agreement=agreement, **settings)

    def call(target: CudaGraphs, tokens: int) -> Callable[[], Any]:
        return lambda: target(torch.zeros(tokens))

    results = {}
    one = graphs()
    results["key"] = outcome(call(one, 3), call(one, 4 + rank))
    one = graphs()
    results["call"] = outcome(call(one, 3), *[call(one, 3)] * rank, call(one, 4))
    one = graphs(on_miss="eager")
    call(one, 3)()
    if rank:
        one.seal()
    results["decision"] = outcome(call(one, 4))
    one = graphs(strict=True)
    call(one, 3)()
    one.seal()
    results["strict"] = outcome(call(one, 4))
    one = graphs(TIMEOUT_S)
    results["alone"] = outcome(call(one, 3), call(one, 3 + rank))
    dist.barrier()
    return results


def everything() -> dict[str, Any]:
    return {**{name: captured_is_direct(name) for name in MODELS}, "disagreements": disagreements()}


@pytest.fixture(scope="module")
def by_rank() -> list[dict[str, Any]]:
    return run_ranks(2, everything)


@pytest.mark.parametrize("name", MODELS)
def test_captured_collectives_give_the_same_bits(by_rank: list[dict[str, Any]], name: str) -> None:
    for result in by_rank:
        assert result[name] == {"equal": [True] * 3, "captures": 1, "replays": 2}


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("key", ("at call 2, key", "to capture")),
        ("call", ("rank 0 is at call 2", "rank 1 is at call 3")),
        ("decision", ("to capture, rank 1", "to eager;")),
    ],
)
def test_a_mismatch_raises_the_same_on_all_ranks(
    by_rank: list[dict[str, Any]], kind: str, told: tuple[str, ...]
) -> None:
    sentences = {result["disagreements"][kind][0] for result in by_rank}
    (sentence,) = sentences
    assert sentence.startswith("ranks would run a captured call differently: rank 0 is at call")
    assert all(part in sentence for part in told)
    assert max(result["disagreements"][kind][1] for result in by_rank) < 10


def test_all_ranks_refuse_alike(by_rank: list[dict[str, Any]]) -> None:
    (sentence,) = {result["disagreements"]["strict"][0] for result in by_rank}
    assert "graph.strict=true allows no other" in sentence


def test_a_rank_that_misses_alone_fails_in_time(by_rank: list[dict[str, Any]]) -> None:
    (hit, _), (missed, seconds) = (result["disagreements"]["alone"] for result in by_rank)
    assert hit == ""
    assert missed.startswith("a call of the captured transformer is new to rank 1 (call 2, to capture) and not all of")
    assert TIMEOUT_S <= seconds < TIMEOUT_S + 8


def captured_guidance() -> dict[str, bool]:
    test_nccl_gpu.CUDA = torch.device("cpu")
    test_nccl_gpu.CudaBackend = lambda _: TapeBackend()  # type: ignore[assignment,misc]
    return test_nccl_gpu.captured_guidance()


def test_captured_steps_exchange_their_passes() -> None:
    """Guidance over both ranks within the graph of a step gives the bits of one rank without graphs."""
    first, second = run_ranks(2, captured_guidance)
    assert first == second == dict.fromkeys(first, True)
    assert len(first) == 5


def agreements_of_a_plan() -> list[str]:
    """What each rank's agreements of a mesh come to, in which ranks are in different numbers of groups."""
    mesh = build_mesh(ParallelPlan(cfg_size=2, ulysses_size=2, vae_size=3), 4)
    assert mesh.ulysses is not None
    found = []
    for ranks in (dist.get_process_group_ranks(mesh.ulysses), range(4), dist.get_process_group_ranks(mesh.ulysses)):
        agreement = Agreement(ranks, 10.0)
        for call in (1, 2):
            agreement.check(call, bytes(32), "capture")
        found.append(outcome(lambda agreement=agreement: agreement.check(dist.get_rank(), bytes(32), "eager"))[0])
    return found


def test_ranks_of_several_groups_agree() -> None:
    for rank, found in enumerate(run_ranks(4, agreements_of_a_plan)):
        own = "rank 0 is at call 0, key 00000000, to eager, rank 1" if rank < 2 else "rank 2 is at call 2, key"
        assert own in found[0] and found[2] == found[0]
        assert all(f"rank {other} is at call {other}" in found[1] for other in range(4))
