"""Which plans are legal, what the sentences about the others say, and the plans that conf/ has."""

import math
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from vgen import app
from vgen.parallel.plans import Limits, ParallelPlan, legal_plans, nearest, reasons, settle

WAN = Limits("wan21_t2v_1_3b", {"attn1": 12}, 32760, ("cond", "uncond"), 60, 104, halo_axis="width")
LTX2 = Limits("ltx2", {"attn1": 32, "audio_to_video_attn": 32}, 6144, ("cond", "uncond", "ptb", "mod"), 16, 24)
NAMED = {
    "pvs1": (1, 1, 1), "pvs2": (2, 1, 2), "pvs4": (2, 2, 4), "pvs8": (2, 4, 8), "cfg2": (2, 1, 1), "uly2": (1, 2, 1),
    "uly4": (1, 4, 1), "uly8": (1, 8, 1), "cfg2_uly2": (2, 2, 1), "cfg2_uly4": (2, 4, 1),
}  # fmt: skip
"""CFG, Ulysses and VAE size of each file in conf/parallel."""


def test_conf_has_the_named_plans_and_ltx2_can_run_them() -> None:
    assert {path.stem for path in Path(app.conf_dir(), "parallel").glob("*.yaml")} == set(NAMED)
    with initialize_config_dir(app.conf_dir(), version_base="1.3"):
        for name, (cfg_size, ulysses_size, vae_size) in NAMED.items():
            config = compose("config", [f"parallel={name}"]).parallel
            plan = ParallelPlan(config.data_size, config.cfg_size, config.ulysses_size, config.vae_size)
            assert plan == ParallelPlan(1, cfg_size, ulysses_size, vae_size)
            assert plan.world_size == int(name[3:] if name.startswith("pvs") else math.prod((cfg_size, ulysses_size)))
            assert (config.vae_strategy, config.vae_split) == ("auto", "auto")
            assert reasons(plan, LTX2) == ()


def test_it_needs_no_torch() -> None:
    code = "import sys, vgen.parallel.plans; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_world_is_what_denoises_or_what_decodes() -> None:
    assert ParallelPlan(2, 2, 3, 6).world_size == 12 and ParallelPlan(2, 2, 3, 6).replica_size == 6
    assert ParallelPlan(1, 2, 1, 5).world_size == 5 and ParallelPlan(1, 2, 1, 5).replica_size == 5


@pytest.mark.parametrize(
    ("plan", "changes", "sentence"),
    [
        (
            ParallelPlan(ulysses_size=8),
            {},
            "parallel.ulysses_size=8 does not divide the 12 heads of attn1 in wan21_t2v_1_3b; "
            "use 6 or 12, or for 8 ranks cfg_size=2 and ulysses_size=4",
        ),
        (
            ParallelPlan(ulysses_size=8),
            {"passes": ("cond",), "prompts": 2},
            "parallel.ulysses_size=8 does not divide the 12 heads of attn1 in wan21_t2v_1_3b; "
            "use 6 or 12, or for 8 ranks data_size=2, cfg_size=1 and ulysses_size=4",
        ),
        (
            ParallelPlan(data_size=2, ulysses_size=8),
            {"prompts": 4},
            "parallel.ulysses_size=8 does not divide the 12 heads of attn1 in wan21_t2v_1_3b; "
            "use 6 or 12, or for 16 ranks cfg_size=2 and ulysses_size=4",
        ),
        (
            ParallelPlan(ulysses_size=24),
            {"heads": {"attn1": 12, "attn2": 24}, "passes": ("cond",)},
            "parallel.ulysses_size=24 does not divide the 12 heads of attn1 in wan21_t2v_1_3b; use 12",
        ),
        (
            ParallelPlan(cfg_size=2),
            {"passes": ("cond",)},
            "parallel.cfg_size=2 is above the number of passes of a step (1: cond); "
            "use 1, or for 2 ranks cfg_size=1 and ulysses_size=2",
        ),
        (
            ParallelPlan(ulysses_size=6),
            {"video_tokens": 5},
            "parallel.ulysses_size=6 is above the number of video tokens (5); "
            "use 4, or for 6 ranks cfg_size=2 and ulysses_size=3",
        ),
        (ParallelPlan(data_size=3), {"prompts": 2}, "parallel.data_size=3 is above the number of prompts (2); use 2"),
        (
            ParallelPlan(vae_size=105),
            {},
            "parallel.vae_size=105 is above the 104 lines along width of 60 x 104 latents, which are split by lines; "
            "use 104",
        ),
        (
            ParallelPlan(data_size=2, vae_size=2),
            {"prompts": 2},
            "parallel.vae_size=2 is above the 1 rank(s) of each of the 2 replicas (cfg_size x ulysses_size); "
            "use 1, or parallel.data_size=1",
        ),
        (ParallelPlan(cfg_size=0), {}, "parallel.cfg_size=0 is not a number of ranks; give 1 or more"),
    ],
)
def test_a_reason_has_the_value_the_rule_and_what_to_use(
    plan: ParallelPlan, changes: dict[str, object], sentence: str
) -> None:
    assert reasons(plan, replace(WAN, **changes)) == (sentence,)  # type: ignore[arg-type]


def test_each_thing_that_is_wrong_has_a_sentence() -> None:
    told = reasons(ParallelPlan(2, 3, 8, 105), replace(WAN, prompts=1))
    assert [sentence.split("=")[0] for sentence in told] == ["parallel.vae_size"]
    told = reasons(ParallelPlan(2, 3, 8, 1), replace(WAN, prompts=1))
    assert [sentence.split("=")[0] for sentence in told] == [
        f"parallel.{name}" for name in ("data_size", "cfg_size", "ulysses_size")
    ]


def test_tiles_bound_no_number_of_ranks() -> None:
    assert reasons(ParallelPlan(vae_size=500), LTX2) == ()
    assert reasons(ParallelPlan(vae_size=17), replace(LTX2, halo_axis="height")) != ()
    assert reasons(ParallelPlan(vae_size=17), replace(LTX2, halo_axis="width")) == ()


@pytest.mark.parametrize(
    "limits",
    [WAN, LTX2, replace(WAN, prompts=3), replace(LTX2, prompts=8, halo_axis="height", latent_height=4, video_tokens=6)],
)
def test_legal_plans_are_all_those_without_a_reason(limits: Limits) -> None:
    for num_ranks in (1, 2, 5, 6, 8):
        everything = [ParallelPlan(*sizes) for sizes in product(range(1, num_ranks + 1), repeat=4)]
        expected = {one for one in everything if one.world_size == num_ranks and not reasons(one, limits)}
        plans = legal_plans(num_ranks, limits)
        assert set(plans) == expected and len(plans) == len(expected)


def test_the_first_legal_plan_has_all_ranks_at_work() -> None:
    for limits in (WAN, replace(LTX2, passes=("cond", "uncond"), prompts=4)):
        assert legal_plans(8, limits)[0] == ParallelPlan(1, 2, 4, 8)
    # 16 divides no way into 2 passes and the divisors of 12.
    first = legal_plans(16, WAN)[0]
    assert first == ParallelPlan(1, 2, 6, 16)


@pytest.mark.parametrize(
    ("plan", "changes", "expected"),
    [
        (ParallelPlan(1, 2, 4, 8), {}, ParallelPlan(1, 2, 4, 8)),
        (ParallelPlan(1, 1, 8, 1), {}, ParallelPlan(1, 2, 4, 1)),
        (ParallelPlan(1, 1, 8, 8), {"passes": ("cond",)}, ParallelPlan(1, 1, 6, 8)),
        (ParallelPlan(1, 1, 8, 1), {"passes": ("cond",), "latent_width": 4}, ParallelPlan(1, 1, 6, 1)),
        (ParallelPlan(1, 4, 2, 8), {}, ParallelPlan(1, 2, 4, 8)),
        (ParallelPlan(1, 1, 1, 8), {"latent_width": 4}, ParallelPlan(1, 2, 4, 4)),
        (ParallelPlan(4, 2, 1, 2), {"prompts": 2}, ParallelPlan(2, 2, 2, 2)),
        (ParallelPlan(0, 1, 8, 1), {"passes": ("cond",)}, ParallelPlan(1, 1, 6, 8)),
        (ParallelPlan(-1, 0, 1, 1), {}, ParallelPlan()),
        (ParallelPlan(1, 1, 5, 1), {}, ParallelPlan(1, 1, 4, 5)),
    ],
)
def test_the_nearest_legal_plan(plan: ParallelPlan, changes: dict[str, object], expected: ParallelPlan) -> None:
    limits = replace(WAN, **changes)  # type: ignore[arg-type]
    assert nearest(plan, limits) == expected
    assert reasons(expected, limits) == ()


def test_a_single_pass_gives_the_ranks_of_cfg_to_ulysses() -> None:
    for ranks in (2, 4, 8):
        plan = ParallelPlan(1, 2, ranks // 2, ranks)
        assert settle(plan, 1) == ParallelPlan(1, 1, ranks, ranks)
        assert settle(plan, 2) == settle(plan, 4) == plan
    assert settle(ParallelPlan(), 1) == ParallelPlan()
