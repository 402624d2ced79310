"""Guidance over 2, 3 and 4 ranks gives the latents of one rank, bit for bit, for LTX-2 and Wan."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.ranks import run_ranks
from vgen.diffusion.guidance import Guidance
from vgen.diffusion.wan_guidance import StepPlan
from vgen.models.ltx2 import geometry as ltx2_geometry
from vgen.models.ltx2.config import TransformerConfig
from vgen.models.ltx2.transformer import LTX2Transformer
from vgen.models.wan import geometry as wan_geometry
from vgen.models.wan.config import WanTransformerConfig
from vgen.models.wan.transformer import WanTransformer
from vgen.parallel.guidance import Outputs, assign_passes, build_run_passes, exchange
from vgen.parallel.mesh import build_mesh
from vgen.parallel.plans import ParallelPlan
from vgen.residency import Residency
from vgen.stages import denoise as ltx2_denoise
from vgen.stages import wan_denoise
from vgen.stages.latents import Latents
from vgen.stages.passes import plan_passes
from vgen.stages.run_passes import RunPasses, run_serially
from vgen.stages.text import Context
from vgen.stages.wan_condition import WanInputs

LTX2 = TransformerConfig(
    num_layers=2, num_attention_heads=2, attention_head_dim=32, audio_attention_head_dim=16, in_channels=8,
    out_channels=8, audio_in_channels=6, audio_out_channels=6, caption_channels=12, norm_eps=1e-6, rope_theta=10000.0,
    rope_max_pos=(20.0, 2048.0, 2048.0), audio_rope_max_pos=20.0, rope_float64=True, timestep_scale_multiplier=1000,
    av_timestep_scale_multiplier=1000,
)  # fmt: skip
WAN = WanTransformerConfig(
    num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, text_dim=12, freq_dim=32, ffn_dim=40,
    num_layers=2,
)  # fmt: skip
LTX2_GEOMETRY = {
    audio: ltx2_geometry.Geometry(latent_frames=3, latent_height=2, latent_width=3, fps=24.0, audio_tokens=audio)
    for audio in (0, 7)
}
WAN_GEOMETRY = wan_geometry.Geometry(latent_frames=3, latent_height=4, latent_width=6)
SIGMAS = torch.tensor([1.0, 0.8, 0.55, 0.2, 0.0])


@dataclass(frozen=True)
class Case:
    """``passes``: of each step."""

    passes: tuple[int, ...]
    video: Guidance
    audio: Guidance | None
    dtype: torch.dtype = torch.float32


_FOUR = (3.0, 1.5, 2.0, 0.7)
LTX2_CASES = {
    "none": Case((1, 1, 1, 1), Guidance(), Guidance()),
    "cfg": Case((2, 2, 2, 2), Guidance(3.0, rescale_scale=0.7), Guidance(7.0, rescale_scale=0.7)),
    "cfg_bf16": Case((2, 2, 2, 2), Guidance(3.0, rescale_scale=0.7), Guidance(7.0, rescale_scale=0.7), torch.bfloat16),
    "video_only": Case((2, 2, 2, 2), Guidance(3.0, rescale_scale=0.7), None),
    "stg": Case((3, 3, 3, 3), Guidance(3.0, 1.5, rescale_scale=0.7, stg_blocks=(1,)), Guidance(7.0)),
    "all": Case((4, 4, 4, 4), Guidance(*_FOUR, stg_blocks=(0,)), Guidance(7.0, 1.0, 3.0, 0.7, stg_blocks=(1,))),
    "all_bf16": Case((4, 4, 4, 4), Guidance(*_FOUR, stg_blocks=(0,)), Guidance(7.0), torch.bfloat16),
    "skip_audio": Case((4, 4, 4, 4), Guidance(*_FOUR, stg_blocks=(0,)), Guidance(7.0, rescale_scale=0.7, skip_step=1)),
    "skip_both": Case((3, 0, 3, 0), Guidance(3.0, 1.5, skip_step=1, stg_blocks=(1,)), Guidance(7.0, skip_step=1)),
}  # fmt: skip
WAN_SCALES = {"cfg": (5.0, 5.0, 5.0), "none": (1.0, 1.0, 1.0), "second_expert_without": (4.0, 4.0, 1.0)}


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def build(make: Callable[[], nn.Module]) -> Any:
    """Random weights of which every part of the model's output depends."""
    with torch.device("meta"):
        model = make()
    model.to_empty(device="cpu").requires_grad_(False).eval()
    generator = seeded(0)
    for parameter in model.parameters():
        spread = 0.3 if parameter.ndim == 1 else parameter[0].numel() ** -0.5
        parameter.copy_(spread * torch.randn(parameter.shape, generator=generator))
    return model


def count(model: nn.Module) -> list[int]:
    """The calls of ``model``, counted in the list's only number."""
    calls = [0]

    def add(*_: Any) -> None:
        calls[0] += 1

    model.register_forward_pre_hook(add)
    return calls


def denoise_ltx2(case: Case, run_passes: RunPasses) -> tuple[list[Tensor], int]:
    """The latents after each step, video and audio, and how often the transformer ran."""
    model = build(lambda: LTX2Transformer(LTX2)).to(case.dtype)
    generator, calls = seeded(1), count(model)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(1, *sizes, generator=generator).to(case.dtype)

    geometry = LTX2_GEOMETRY[7 if case.audio else 0]
    latents = Latents(draw(geometry.video_tokens, 8), draw(7, 6) if case.audio else None)
    conditioning = ltx2_denoise.Conditioning(
        geometry, plan_passes(case.video, case.audio),
        {"positive": Context(draw(5, 12), draw(5, 12)), "negative": Context(draw(5, 12), draw(5, 12))},
        case.video, case.audio or Guidance(),
    )  # fmt: skip
    predict = ltx2_denoise.build_serial_step(model, conditioning, run_passes)
    steps: list[Tensor] = []
    ltx2_denoise.denoise(
        predict, latents, SIGMAS, lambda _, after: steps.extend([after.video, *([after.audio] if case.audio else [])])
    )
    return steps, calls[0]


def denoise_wan(plans: tuple[StepPlan, ...], run_passes: RunPasses) -> tuple[list[Tensor], int]:
    model = build(lambda: WanTransformer(WAN))
    generator, calls = seeded(1), count(model)
    texts = [torch.randn(1, 6, 12, generator=generator) for _ in range(2)]
    noise = torch.randn(1, 4, 3, 4, 6, generator=generator)
    conditioning = wan_denoise.WanConditioning(WAN_GEOMETRY, texts[0], texts[1], WanInputs())
    residency = Residency(torch.device("cpu"), {"transformer": model, "transformer_2": model}, {})
    steps: list[Tensor] = []
    wan_denoise.denoise(
        lambda _, told: wan_denoise.build_serial_step(model, told, run_passes),
        conditioning, noise, plans, residency, lambda _, after: steps.append(after),
    )  # fmt: skip
    return steps, calls[0]


def passes_of(case: Case | tuple[StepPlan, ...]) -> tuple[int, ...]:
    return case.passes if isinstance(case, Case) else tuple(1 if plan.guidance == 1 else 2 for plan in case)


def run_cases(
    layouts: list[ParallelPlan], cases: Mapping[str, Case | tuple[StepPlan, ...]]
) -> tuple[dict[str, list[Tensor]], dict[tuple[int, str], tuple[int, int, list[Tensor]]]]:
    """Serial latents of each case; and by layout and case this rank's place, its calls and its latents."""
    meshes = [build_mesh(layout, dist.get_world_size()) for layout in layouts]
    serial, spread = {}, {}
    for name, case in cases.items():
        run: Any = denoise_ltx2 if isinstance(case, Case) else denoise_wan
        serial[name], calls = run(case, run_serially)
        assert calls == sum(passes_of(case))
        for index, mesh in enumerate(meshes):
            assert mesh.cfg is not None and mesh.cfg_rank is not None
            if any(1 < passes < layouts[index].cfg_size for passes in passes_of(case)):
                continue
            latents, calls = run(case, build_run_passes(mesh.cfg))
            spread[index, name] = (mesh.cfg_rank, calls, latents)
    _check_exchange()
    return serial, spread


def _check_exchange() -> None:
    """Streams of different shapes and dtypes, NaN and signed zeros, ranks with different numbers of passes."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    whole: dict[str, Outputs] = {
        f"pass{i}": (
            torch.tensor([[-0.0, float("nan"), i]], dtype=torch.float64),
            None,
            torch.tensor([i, i + 1]).half(),
        )
        for i in range(ranks + 1)
    }
    assignment = assign_passes(dict.fromkeys(whole, 1.0), ranks)
    assert list(map(len, assignment)) == [2, *[1] * (ranks - 1)]
    group = dist.group.WORLD
    for result in (
        exchange({name: whole[name] for name in assignment[rank]}, assignment, group),
        build_run_passes(group)({name: lambda name=name: whole[name] for name in whole}),  # type: ignore[misc]
    ):
        assert result.keys() == whole.keys()
        for name, streams in whole.items():
            for got, expected in zip(result[name], streams, strict=True):
                assert (got is None) == (expected is None)
                if got is not None and expected is not None:
                    assert got.is_contiguous() and got.dtype == expected.dtype
                    assert got.numpy().tobytes() == expected.numpy().tobytes()
    few = {f"pass{i}": (lambda: (None,)) for i in range(ranks - 1)}
    if len(few) > 1:
        with pytest.raises(
            ValueError, match=f"{ranks} ranks cannot share {ranks - 1} pass.*cfg_size={ranks - 1} or le"
        ):
            build_run_passes(group)(few)


def wan_plans() -> dict[str, tuple[StepPlan, ...]]:
    """Made here: building the schedule imports diffusers, which ranks need not."""
    from vgen.diffusion.flow_match import build_flow_schedule

    schedule = build_flow_schedule(3, shift=3.0)
    rows = list(zip(schedule.sigmas[:-1], schedule.timesteps, schedule.weights, strict=True))
    return {
        f"wan_{name}": tuple(
            StepPlan(sigma, timestep, "low_noise" if "expert" in name and index == 2 else "high_noise", scale, weights)
            for index, ((sigma, timestep, weights), scale) in enumerate(zip(rows, scales, strict=True))
        )
        for name, scales in WAN_SCALES.items()
    }


@pytest.mark.parametrize(
    "layouts",
    [
        [ParallelPlan(cfg_size=2)],
        [ParallelPlan(cfg_size=3)],
        [ParallelPlan(cfg_size=4), ParallelPlan(1, 2, 2, 4), ParallelPlan(data_size=2, cfg_size=2)],
    ],
    ids=["two", "three", "four"],
)
def test_latents_are_those_of_one_rank_to_the_last_bit(layouts: list[ParallelPlan]) -> None:
    cases: dict[str, Case | tuple[StepPlan, ...]] = {**LTX2_CASES, **wan_plans()}
    by_rank = run_ranks(layouts[0].world_size, run_cases, layouts, cases)
    serial = by_rank[0][0]
    for latents in serial.values():
        assert all(one.isfinite().all() for one in latents) and not torch.equal(latents[0], latents[-1])
    for rank, (_, spread) in enumerate(by_rank):
        assert len(spread) >= 5, "few cases were run"
        for (index, name), (cfg_rank, calls, latents) in spread.items():
            where = f"{name}, rank {rank}, {layouts[index]}"
            assert len(latents) == len(serial[name]), where
            assert all(torch.equal(one, two) for one, two in zip(latents, serial[name], strict=True)), where
            assert calls == sum(
                _share(passes, layouts[index].cfg_size, cfg_rank) for passes in passes_of(cases[name])
            ), where


def _share(passes: int, ranks: int, rank: int) -> int:
    """Passes of equal cost dealt out in turn; a single one is everybody's."""
    return 1 if passes == 1 else len(range(rank, passes, ranks))


def test_guidance_is_at_work_in_the_cases() -> None:
    """Equal latents would prove nothing if the passes did not matter."""
    made = {name: denoise_ltx2(case, run_serially)[0] for name, case in LTX2_CASES.items() if case.audio}
    for name in ("cfg", "stg", "all", "skip_audio"):
        assert not torch.allclose(made[name][-1], made["none"][-1], rtol=0.01)
        assert not torch.allclose(made[name][-2], made["none"][-2], rtol=0.01)


@pytest.mark.parametrize(
    ("costs", "ranks", "expected"),
    [
        ({"cond": 1, "uncond": 1}, 2, (("cond",), ("uncond",))),
        ({"cond": 1, "uncond": 1, "ptb": 1}, 2, (("cond", "ptb"), ("uncond",))),
        ({"cond": 1, "uncond": 1, "ptb": 1, "mod": 1}, 2, (("cond", "ptb"), ("uncond", "mod"))),
        ({"cond": 1, "uncond": 1, "ptb": 1, "mod": 1}, 3, (("cond", "mod"), ("uncond",), ("ptb",))),
        ({"cond": 1, "uncond": 1, "ptb": 1, "mod": 1}, 1, (("cond", "uncond", "ptb", "mod"),)),
        ({"cond": 1, "uncond": 1, "ptb": 3, "mod": 2}, 2, (("ptb", "uncond"), ("mod", "cond"))),
    ],
)
def test_the_longest_pass_goes_first_and_to_the_rank_with_least(
    costs: dict[str, float], ranks: int, expected: tuple[tuple[str, ...], ...]
) -> None:
    assert assign_passes(costs, ranks) == expected


def test_no_rank_is_without_a_pass() -> None:
    with pytest.raises(
        ValueError, match=r"3 ranks cannot share 2 pass\(es\) \(cond, uncond\); use parallel.cfg_size=2"
    ):
        assign_passes({"cond": 1, "uncond": 1}, 3)


def test_without_a_group_nothing_is_exchanged() -> None:
    outputs: dict[str, Outputs] = {"cond": (torch.zeros(1), None)}
    assert exchange(outputs, [["cond"]], None) is outputs
