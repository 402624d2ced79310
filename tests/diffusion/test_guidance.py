"""Guidance against its formula in float64."""

import pytest
import torch

from vgen.diffusion.guidance import Guidance, apply_guidance, needs_uncond


@pytest.mark.parametrize("rescale", [0.0, 0.7, 1.0])
def test_formula(rescale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    cond, uncond = (torch.randn(1, 50, 16, generator=generator, dtype=torch.float64) for _ in range(2))
    expected = cond + 2 * (cond - uncond)
    expected = expected * (rescale * cond.std() / expected.std() + 1 - rescale)
    ours = apply_guidance(cond.float(), uncond.float(), Guidance(3.0, rescale))
    torch.testing.assert_close(ours.double(), expected, rtol=1e-6, atol=1e-6)


def test_full_rescale_keeps_the_standard_deviation() -> None:
    generator = torch.Generator().manual_seed(1)
    cond, uncond = (torch.randn(1, 50, 16, generator=generator) for _ in range(2))
    guided = apply_guidance(cond, uncond, Guidance(7.0, 1.0))
    torch.testing.assert_close(guided.std(), cond.std())


def test_scale_one_returns_cond_untouched_and_asks_for_no_pass() -> None:
    cond = torch.randn(1, 4, 4)
    assert apply_guidance(cond, None, Guidance(1.0, 0.7)) is cond
    assert not needs_uncond(Guidance(1.0, 0.7), Guidance(1.0))
    assert needs_uncond(Guidance(1.0), Guidance(7.0))
