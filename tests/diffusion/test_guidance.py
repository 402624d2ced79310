"""Guidance against its formula in float64, every combination of passes."""

import itertools

import pytest
import torch

from vgen.diffusion.guidance import MOD, PTB, UNCOND, Guidance, apply_guidance


def samples(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    names = ("cond", UNCOND, PTB, MOD)
    return {name: torch.randn(2, 50, 16, generator=generator, dtype=torch.float64) for name in names}


@pytest.mark.parametrize("rescale", [0.0, 0.7, 1.0])
@pytest.mark.parametrize(("cfg", "stg", "mod"), list(itertools.product((1.0, 3.0), (0.0, 1.5), (1.0, 2.5))))
def test_formula(cfg: float, stg: float, mod: float, rescale: float) -> None:
    x = samples(0)
    expected = x["cond"] + (cfg - 1) * (x["cond"] - x[UNCOND]) + stg * (x["cond"] - x[PTB])
    expected = expected + (mod - 1) * (x["cond"] - x[MOD])
    expected = expected * (rescale * x["cond"].std() / expected.std() + 1 - rescale)
    guidance = Guidance(cfg, stg, mod, rescale)
    given = {name: x[name].float() for name in guidance.weights()}  # others are not read
    ours = apply_guidance(x["cond"].float(), given, guidance)
    torch.testing.assert_close(ours.double(), expected, rtol=2e-6, atol=2e-6)


def test_full_rescale_keeps_the_standard_deviation() -> None:
    x = {name: value.float() for name, value in samples(1).items()}
    guided = apply_guidance(x["cond"], x, Guidance(7.0, 1.0, 3.0, rescale_scale=1.0))
    torch.testing.assert_close(guided.std(), x["cond"].std())


def test_neutral_scales_return_cond_untouched() -> None:
    cond = torch.randn(1, 4, 4)
    assert apply_guidance(cond, {}, Guidance(rescale_scale=0.7)) is cond
    assert Guidance().weights() == {}


def test_result_keeps_the_dtype_and_rounds_once() -> None:
    x = {name: value.bfloat16() for name, value in samples(2).items()}
    guidance = Guidance(3.0, 1.0, 3.0, 0.7)
    guided = apply_guidance(x["cond"], x, guidance)
    exact = apply_guidance(x["cond"].float(), {name: value.float() for name, value in x.items()}, guidance)
    assert guided.dtype == torch.bfloat16
    assert torch.equal(guided, exact.bfloat16())


@pytest.mark.parametrize(("skip_step", "computed"), [(0, [0, 1, 2, 3, 4, 5]), (1, [0, 2, 4]), (2, [0, 3]), (9, [0])])
def test_skipped_steps(skip_step: int, computed: list[int]) -> None:
    guidance = Guidance(skip_step=skip_step)
    assert [step for step in range(6) if not guidance.skips(step)] == computed
