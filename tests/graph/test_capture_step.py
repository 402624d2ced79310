"""A whole step as one graph, guidance and solver included, gives the latents of the same step called directly."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.graph.tape import TapeBackend
from tests.parallel.test_guidance_parallel import LTX2, WAN, WAN_GEOMETRY, build, seeded
from vgen.config import GraphConfig
from vgen.diffusion.flow_match import build_flow_schedule
from vgen.diffusion.guidance import Guidance
from vgen.diffusion.wan_guidance import GuidanceScales, plan_steps
from vgen.graph.apply import capture_step
from vgen.graph.backend import Backend, CudaBackend
from vgen.graph.cuda_graph import CudaGraphs, GraphStats
from vgen.graph.pool import GraphPool
from vgen.graph.tree import map_tensors
from vgen.models.ltx2.geometry import Geometry
from vgen.models.ltx2.transformer import LTX2Transformer
from vgen.models.wan.conditioning import hold_first_frames
from vgen.models.wan.transformer import WanTransformer
from vgen.residency import Residency
from vgen.stages import denoise as ltx2_denoise
from vgen.stages import wan_denoise
from vgen.stages.condition import EncodedImage, condition_images
from vgen.stages.latents import Latents
from vgen.stages.passes import plan_passes
from vgen.stages.run_passes import run_serially
from vgen.stages.text import Context
from vgen.stages.wan_condition import WanInputs

CONFIG = GraphConfig("cuda", "default", "block", "step", 1, 8, False, "capture")
SIGMAS = torch.tensor([1.0, 0.8, 0.55, 0.4, 0.2, 0.0])
# Heads that the fast kernels take.
LTX2_STEP = dataclasses.replace(LTX2, num_attention_heads=2, attention_head_dim=64, audio_attention_head_dim=32)
WAN_STEP = dataclasses.replace(WAN, num_attention_heads=2, attention_head_dim=64, ffn_dim=256)


@dataclass(frozen=True)
class LTX2Case:
    """``graphs``: of the request's steps, ``skip_step`` making more than one kind."""

    video: Guidance
    audio: Guidance | None
    graphs: int = 1
    image: bool = False
    sound_given: bool = False


ALL = Guidance(3.0, 1.5, 2.0, 0.7, stg_blocks=(1,))
LTX2_CASES = {
    "plain": LTX2Case(Guidance(), Guidance()),
    "all passes, rescaled": LTX2Case(ALL, dataclasses.replace(ALL, cfg_scale=7.0)),
    "video only": LTX2Case(ALL, None),
    "an image held": LTX2Case(ALL, Guidance(7.0), image=True),
    "the sound given": LTX2Case(ALL, Guidance(), sound_given=True),
    # The first step has no last one; then steps with and without the sound take turns.
    "the sound skipped": LTX2Case(ALL, Guidance(7.0, skip_step=1), graphs=2),
    "both skipped": LTX2Case(dataclasses.replace(ALL, skip_step=1), Guidance(7.0, skip_step=2), graphs=4),
}  # fmt: skip


@dataclass(frozen=True)
class WanCase:
    """``graphs``: UniPC has a longer history in each of its first three steps; each expert has its own."""

    solver: Any = "unipc"
    guidance: Any = 5.0
    boundary: float | None = None
    held: bool = False
    channels: bool = False
    graphs: tuple[int, ...] = (3,)


WAN_CASES = {
    "guided": WanCase(),
    "Euler": WanCase(solver="euler"),
    "no guidance": WanCase(guidance=1.0),
    "a frame held": WanCase(held=True),
    "channels of an image": WanCase(channels=True),
    # Of five timesteps the first two are the first expert's.
    "two experts": WanCase(guidance=GuidanceScales(high_noise=4.0, low_noise=3.0), boundary=0.85, graphs=(2, 1)),
}


def ltx2_request(case: LTX2Case, seed: int, device: torch.device) -> tuple[ltx2_denoise.Conditioning, Latents, Tensor]:
    generator = seeded(seed)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(1, *sizes, generator=generator)

    audio_tokens = 0 if case.audio is None else 7
    geometry = Geometry(latent_frames=3, latent_height=2, latent_width=3, fps=24.0, audio_tokens=audio_tokens)
    conditions = None
    if case.image:
        conditions = condition_images(geometry, (EncodedImage(draw(8, 1, 2, 3), frame=0, strength=0.75),))
    conditioning = ltx2_denoise.Conditioning(
        geometry,
        plan_passes(case.video, case.audio, audio_is_given=case.sound_given),
        {"positive": Context(draw(5, 12), draw(5, 12)), "negative": Context(draw(5, 12), draw(5, 12))},
        case.video,
        case.audio or Guidance(),
        conditions,
        case.sound_given,
    )
    latents = Latents(draw(geometry.video_tokens, 8), draw(7, 6) if case.audio else None)
    moved: Any = map_tensors((conditioning, latents, SIGMAS), lambda _, tensor: tensor.to(device))
    return moved  # type: ignore[no-any-return]


def ltx2_latents(make_step: Callable[[Any], Any], request: Any) -> list[Tensor]:
    """After each step, video and audio."""
    conditioning, latents, sigmas = request
    steps: list[Tensor] = []

    def note(_: int, after: Latents) -> None:
        steps.extend(one.clone() for one in (after.video, after.audio) if one is not None)

    with torch.no_grad():
        ltx2_denoise.denoise(make_step(conditioning), latents, sigmas, note)
    return steps


def check_ltx2(case: LTX2Case, device: torch.device, backend: Backend) -> list[GraphStats]:
    model = build(lambda: LTX2Transformer(LTX2_STEP)).to(device)
    requests = [ltx2_request(case, seed, device) for seed in (1, 2)]
    expected = [ltx2_latents(partial(ltx2_denoise.build_serial_step, model), request) for request in requests]
    assert not torch.equal(expected[0][-1], expected[1][-1])
    run = partial(ltx2_denoise.run_step, model, run_serially)
    pool = GraphPool(backend)
    graphs = capture_step(run, model, CONFIG, pool)
    for turn in (0, 1, 0):
        made = ltx2_latents(partial(ltx2_denoise.build_step, graphs, model), requests[turn])
        assert all(map(torch.equal, made, expected[turn]))
        assert len(made) == len(expected[turn])
    stats = graphs.stats()
    assert (stats.captures, stats.replays) == (case.graphs, 3 * (len(SIGMAS) - 1) - case.graphs)
    return [stats]


def wan_request(case: WanCase, seed: int, device: torch.device) -> tuple[Any, ...]:
    generator = seeded(seed)
    texts = [torch.randn(1, 6, 12, generator=generator) for _ in range(2)]
    noise = torch.randn(1, 4, 3, 4, 6, generator=generator)
    image = torch.randn(1, 4, 1, 4, 6, generator=generator)
    inputs = WanInputs(
        held=hold_first_frames(image, 3) if case.held else None,
        channels=torch.randn(1, 4, 3, 4, 6, generator=generator) if case.channels else None,
    )
    negative = None if case.guidance == 1 else texts[1]
    conditioning = wan_denoise.WanConditioning(WAN_GEOMETRY, texts[0], negative, inputs)
    plans = plan_steps(build_flow_schedule(5, shift=3.0, solver=case.solver), case.guidance, case.boundary)
    moved: Any = map_tensors((conditioning, noise), lambda _, tensor: tensor.to(device))
    return (*moved, plans)


def wan_latents(models: dict[str, nn.Module], make_step: Callable[[Any, Any], Any], request: Any) -> list[Tensor]:
    conditioning, noise, plans = request
    residency = Residency(noise.device, models, {})
    steps: list[Tensor] = []
    with torch.no_grad():
        wan_denoise.denoise(
            make_step, conditioning, noise, plans, residency, lambda _, after: steps.append(after.clone())
        )
    return steps


def check_wan(case: WanCase, device: torch.device, backend: Backend) -> list[GraphStats]:
    config = dataclasses.replace(WAN_STEP, in_channels=8) if case.channels else WAN_STEP
    names = {"high_noise": "transformer", "low_noise": "transformer_2"}
    experts = {expert: build(lambda: WanTransformer(config)).to(device) for expert in names}
    for parameter in experts["low_noise"].parameters():
        parameter.mul_(0.9)
    models = {names[expert]: model for expert, model in experts.items()}
    requests = [wan_request(case, seed, device) for seed in (1, 2)]

    def directly(expert: str, conditioning: Any) -> Any:
        return wan_denoise.build_serial_step(experts[expert], conditioning)

    expected = [wan_latents(models, directly, request) for request in requests]
    assert not torch.equal(expected[0][-1], expected[1][-1])
    pool = GraphPool(backend)
    graphs: dict[str, CudaGraphs] = {
        expert: capture_step(partial(wan_denoise.run_step, model, run_serially), model, CONFIG, pool)
        for expert, model in experts.items()
    }

    def captured(expert: str, conditioning: Any) -> Any:
        return wan_denoise.build_step(graphs[expert], experts[expert], conditioning)

    for turn in (0, 1, 0):
        made = wan_latents(models, captured, requests[turn])
        assert all(map(torch.equal, made, expected[turn]))
        assert len(made) == len(expected[turn])
    stats = [graphs[expert].stats() for expert in list(names)[: len(case.graphs)]]
    assert tuple(one.captures for one in stats) == case.graphs
    assert sum(one.captures + one.replays for one in stats) == 3 * 5
    return stats


CASES: dict[str, LTX2Case | WanCase] = {
    **{f"LTX-2, {name}": case for name, case in LTX2_CASES.items()},
    **{f"Wan, {name}": case for name, case in WAN_CASES.items()},
}


def check(name: str, device: torch.device, backend: Backend) -> list[GraphStats]:
    """That captured steps give the latents of direct ones; what each transformer's graphs did."""
    case = CASES[name]
    if isinstance(case, LTX2Case):
        return check_ltx2(case, device, backend)
    return check_wan(case, device, backend)


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_the_one_called_directly(name: str) -> None:
    assert check(name, torch.device("cpu"), TapeBackend())


SPELL = """
import torch
from tests.graph import test_capture_step as steps
from vgen.graph.key import digest, graph_key
from functools import partial
from pathlib import Path

def noted(*arguments):
    print(digest(graph_key(arguments, {})).hex())
    raise StopIteration

cpu = torch.device("cpu")
for name, case in steps.LTX2_CASES.items():
    model = steps.build(lambda: steps.LTX2Transformer(steps.LTX2_STEP))
    try:
        steps.ltx2_latents(partial(steps.ltx2_denoise.build_step, noted, model), steps.ltx2_request(case, 1, cpu))
    except StopIteration:
        pass
model = steps.build(lambda: steps.WanTransformer(steps.WAN_STEP))
try:
    make = lambda _, told: steps.wan_denoise.build_step(noted, model, told)
    steps.wan_latents({"transformer": model}, make, steps.wan_request(steps.WAN_CASES["guided"], 1, cpu))
except StopIteration:
    pass
"""


def test_a_step_has_the_same_key_in_every_process() -> None:
    """Ranks compare keys: nothing in them may hang on the seed by which a process hashes strings."""
    told = []
    for seed in ("1", "2", "3"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[2])}
        done = subprocess.run(
            [sys.executable, "-c", SPELL], env=environment, capture_output=True, text=True, check=True
        )
        told.append(done.stdout.split())
    assert len(set(told[0])) == len(LTX2_CASES) + 1
    assert told[0] == told[1] == told[2]


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Waits for the device are errors while a graph is captured; a list that fills as captures pass."""
    captured: list[bool] = []
    real = CudaBackend.capture

    def capture(self: CudaBackend, run: Callable[[], Any], warmup: int, pool: Any) -> Any:
        def watched() -> Any:
            capturing = torch.cuda.is_current_stream_capturing()
            torch.cuda.set_sync_debug_mode("error" if capturing else "default")
            outputs = run()
            torch.cuda.set_sync_debug_mode("default")
            captured.extend([True] * capturing)
            return outputs

        return real(self, watched, warmup, pool)

    monkeypatch.setattr(CudaBackend, "capture", capture)
    yield captured
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("name", CASES)
def test_a_step_on_a_gpu_is_the_one_called_directly_and_waits_for_nothing(name: str, no_waiting: list[bool]) -> None:
    device = torch.device("cuda")
    stats = check(name, device, CudaBackend(device))
    assert len(no_waiting) == sum(one.captures for one in stats)
