"""Two ranks with NCCL: collectives in CUDA graphs, guidance over ranks, and shared decodes and encodes, on GPUs."""

import dataclasses
import gc
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.graph import test_capture_step as steps
from tests.graph.test_cuda_graph_gpu import CASES, CONFIG, direct, inputs, model_of, same
from tests.parallel import test_halo_ltx2, test_halo_wan
from tests.parallel.test_guidance_parallel import build
from tests.ranks import run_ranks
from vgen.graph.agreement import Agreement
from vgen.graph.apply import apply_graph, capture_step, graphs_of, release_calls
from vgen.graph.backend import CudaBackend
from vgen.graph.pool import GraphPool
from vgen.models.ltx2.transformer import LTX2Transformer
from vgen.models.wan.transformer import WanTransformer
from vgen.parallel.guidance import build_run_passes
from vgen.parallel.tile_parallel import decode_tiles_parallel, encode_tiles_parallel
from vgen.parallel.tiles import TileSettings, decode_tiled, encode_tiled, plan_tiles
from vgen.parallel.ulysses import apply_ulysses
from vgen.parallel.vae import from_vae
from vgen.stages import denoise as ltx2_denoise
from vgen.stages import wan_denoise
from vgen.stages.run_passes import run_serially

pytestmark = pytest.mark.multigpu

CUDA = torch.device("cuda")
RANKS = 2
MIB = 2**20
REPLAYS = 200
CAPTURED = (
    "LTX-2.0", "LTX-2.0, STG of one sample", "LTX-2.0, modalities isolated", "LTX-2.0, video only",
    "LTX-2.0, image to video", "LTX-2.3, image to video, STG", "Wan T2V", "Wan 2.1 I2V", "Wan A14B I2V", "Wan TI2V",
)  # fmt: skip
COMPILED = ("LTX-2.3, image to video, STG", "Wan TI2V")
LTX2_GUIDED = ("all passes, rescaled", "video only", "the sound skipped")
WAN_GUIDED = ("guided", "a frame held")
HALO_LTX2 = [
    test_halo_ltx2.Case(half, version, padding, (1, 3, 5, 4), axis, (0, 1), channels_last=True)
    for half in ("decoder", "encoder")
    for version, padding, axis in (("2.0", "reflect", "height"), ("2.3", "zeros", "width"))
]
HALO_WAN = [
    test_halo_wan.Case(way, kind, axis, (5, 4), frames=3, channels_last=True)
    for way in ("decode", "encode")
    for kind, axis in (("2.1", "height"), ("2.2", "width"))
]


def ulysses(name: str, mode: Any) -> dict[str, Any]:
    """A captured pass over both ranks against the same code called directly, and against one rank."""
    case = CASES[name]
    model, group = model_of(case), dist.group.WORLD
    calls = [inputs(case, seed) for seed in (0, 1, 7)]
    alone = direct(model, calls[0])
    apply_ulysses(model, case.plan, group)
    config = dataclasses.replace(CONFIG, mode=mode)
    apply_graph(model, case.plan, config, CUDA, agreement=Agreement(range(RANKS)))
    graphs = graphs_of(model)
    assert graphs is not None
    function: Any = graphs.function
    with torch.no_grad():
        expected = [function(*arguments) for arguments in calls]
    equal = [same(model(*calls[index]), expected[index]) for index in (0, 1, 2, 1, 0, 0, 2)]
    stats = graphs.stats()
    graphs.clear()  # a communicator waits for the graphs that it is in before it can be destroyed
    return {
        "equal": all(equal),
        "differ": not same(expected[0], expected[1]),
        "counts": (stats.captures, stats.replays),
        "error": largest_error(expected[0], alone),
    }


def largest_error(actual: Any, expected: Any) -> float:
    pairs = zip(as_list(actual), as_list(expected), strict=True)
    return max(((a - b).float().abs().max() / b.float().abs().max()).item() for a, b in pairs)


def as_list(output: Any) -> list[Tensor]:
    return [output] if isinstance(output, Tensor) else [part for part in output if part is not None]


def many_replays(name: str) -> dict[str, Any]:
    """Growth of memory in bytes, and whether the last result is that of the direct call."""
    case = CASES[name]
    model, calls = model_of(case), [inputs(case, seed) for seed in (0, 1)]
    apply_ulysses(model, case.plan, dist.group.WORLD)
    apply_graph(model, case.plan, CONFIG, CUDA, agreement=Agreement(range(RANKS)))
    expected = [direct(model, arguments) for arguments in calls]
    for arguments in calls:
        model(*arguments)
    torch.cuda.synchronize()
    dist.barrier()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]
    for turn in range(REPLAYS):
        result = model(*calls[turn % 2])
    torch.cuda.synchronize()
    dist.barrier()
    equal = same(result, expected[1])
    del result
    grown = torch.cuda.memory_allocated() - before[0], torch.cuda.memory_reserved() - before[1]
    found = {"equal": equal, "grown": (*grown, before[2] - torch.cuda.mem_get_info()[0])}
    release_calls(model)
    return found


def captured_guidance() -> dict[str, bool]:
    """Whole steps as graphs, their passes exchanged within, against one rank without graphs."""
    passes = build_run_passes(dist.group.WORLD)  # type: ignore[arg-type]
    found = {}
    for name in LTX2_GUIDED:
        ltx2 = build(lambda: LTX2Transformer(steps.LTX2_STEP)).to(CUDA)
        request: Any = steps.ltx2_request(steps.LTX2_CASES[name], 1, CUDA)
        run = partial(ltx2_denoise.run_step, ltx2)
        found[f"LTX-2, {name}"] = captured_is_serial(
            ltx2, lambda way, ltx2=ltx2, request=request: steps.ltx2_latents(
                partial(ltx2_denoise.build_step, way, ltx2), request
            ), partial(run, run_serially), partial(run, passes),
        )  # fmt: skip
    for name in WAN_GUIDED:
        wan = build(lambda: WanTransformer(steps.WAN_STEP)).to(CUDA)
        request = steps.wan_request(steps.WAN_CASES[name], 1, CUDA)
        run = partial(wan_denoise.run_step, wan)
        found[f"Wan, {name}"] = captured_is_serial(
            wan, lambda way, wan=wan, request=request: steps.wan_latents(
                {"transformer": wan}, lambda _, told: wan_denoise.build_step(way, wan, told), request
            ), partial(run, run_serially), partial(run, passes),
        )  # fmt: skip
    return found


def captured_is_serial(model: nn.Module, latents_of: Callable[[Any], list[Tensor]], serial: Any, spread: Any) -> bool:
    expected = latents_of(serial)
    pool = GraphPool(CudaBackend(CUDA))
    graphs = capture_step(spread, model, steps.CONFIG, pool, agreement=Agreement(range(RANKS)))
    found = [latents_of(graphs) for _ in range(2)]
    graphs.clear()
    return all(all(map(torch.equal, made, expected)) and len(made) == len(expected) for made in found)


def halo() -> dict[str, float | None]:
    """Relative errors in fp32 against the whole on one rank; None on a rank that gets no frames."""
    group, found = dist.group.WORLD, {}
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    for case in HALO_LTX2:
        half, x = test_halo_ltx2.build(case, torch.float32)
        found[str(case)] = halo_error(half, x, case.axis)
    for one in HALO_WAN:
        vae, x = test_halo_wan.build(one.way, one.kind, torch.float32, True), test_halo_wan.inputs(one)
        found[str(one)] = halo_error(vae, x.float(), one.axis)
    assert group is not None
    return found


def halo_error(vae: nn.Module, x: Tensor, axis: Any) -> float | None:
    vae, x = vae.to(CUDA), x.to(CUDA)
    with torch.no_grad():
        got = from_vae(vae, axis, dist.group.WORLD)(x)
        return None if got is None else largest_error(got, vae(x))


def tiles() -> list[float]:
    """Errors of tiles over ranks against the same tiles on one rank, in fp32: a decode, then an encode."""
    torch.backends.cudnn.allow_tf32 = False
    group = dist.group.WORLD
    settings = TileSettings(tile_size=128, tile_overlap=64, tile_frames=16, tile_frames_overlap=8)
    errors = []
    for half in ("decoder", "encoder"):
        case = test_halo_ltx2.Case(half, "2.0", "reflect", (1, 4, 6, 6), "height", (0, 1))
        vae, x = test_halo_ltx2.build(case, torch.float32)
        vae, x = vae.to(CUDA), x.to(CUDA)
        grid = plan_tiles(4, 6, 6, settings)
        with torch.no_grad():
            if half == "decoder":
                got = decode_tiles_parallel(vae, x, grid, group)
                expected = torch.cat(list(decode_tiled(vae, x, grid)), dim=2)
            else:
                got = encode_tiles_parallel(vae, x, grid, group)
                expected = encode_tiled(vae, x, grid)
        assert got is not None and len(grid) > 2
        errors.append(largest_error(got, expected))
    return errors


def everything() -> dict[str, Any]:
    """All that needs ranks, in one start of them."""
    torch._dynamo.reset()
    found: dict[str, Any] = {
        "captured": {name: ulysses(name, "cuda") for name in CAPTURED},
        "guidance": captured_guidance(),
        "halo": halo(),
        "tiles": tiles(),
    }
    gc.collect()
    torch.cuda.empty_cache()
    found["replays"] = {name: many_replays(name) for name in ("LTX-2.0", "Wan T2V")}
    found["compiled"] = {name: ulysses(name, "compile_cuda") for name in COMPILED}
    return found


@cache
def by_rank() -> list[dict[str, Any]]:
    return run_ranks(RANKS, everything, backend="nccl")


@pytest.mark.parametrize("name", CAPTURED)
def test_captured_collectives_of_ulysses_are_direct(name: str) -> None:
    for rank in by_rank():
        found = rank["captured"][name]
        assert found["equal"] and found["differ"]
        assert found["counts"] == (1, 6)
        # bf16: the exchange itself rounds nothing, other kernels for other numbers of heads do.
        assert found["error"] <= 2**-6


@pytest.mark.parametrize("name", COMPILED)
def test_captured_collectives_around_compiled_blocks_are_direct(name: str) -> None:
    for rank in by_rank():
        assert rank["compiled"][name]["equal"] and rank["compiled"][name]["differ"]


@pytest.mark.parametrize("name", ["LTX-2.0", "Wan T2V"])
def test_200_replays_of_collectives_keep_memory_and_results(name: str) -> None:
    for rank in by_rank():
        assert rank["replays"][name]["equal"]
        assert max(rank["replays"][name]["grown"]) <= MIB


def test_captured_guidance_over_ranks_is_that_of_one_rank() -> None:
    for rank in by_rank():
        assert rank["guidance"] == dict.fromkeys(rank["guidance"], True)
        assert len(rank["guidance"]) == len(LTX2_GUIDED) + len(WAN_GUIDED)


def test_bands_are_the_whole() -> None:
    first, second = (rank["halo"] for rank in by_rank())
    assert len(first) == len(HALO_LTX2) + len(HALO_WAN)
    assert max(first.values()) <= 1e-6
    for case in map(str, (*HALO_LTX2, *HALO_WAN)):
        assert (second[case] is None) or second[case] <= 1e-6


def test_tiles_over_ranks_are_those_of_one() -> None:
    assert max(max(rank["tiles"]) for rank in by_rank()) <= 1e-6
