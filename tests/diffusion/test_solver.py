"""Velocity, clean sample and Euler steps against closed forms."""

import pytest
import torch

from vgen.diffusion.solver import step_euler, to_velocity, to_x0


def test_velocity_and_x0_are_inverse_for_every_shape_of_sigma() -> None:
    generator = torch.Generator().manual_seed(0)
    sample, velocity = (torch.randn(2, 3, 3, generator=generator) for _ in range(2))  # T == C: axes must not mix
    for sigma in (0.3, torch.tensor(0.3), torch.tensor([0.3, 0.7]), torch.rand(2, 3, generator=generator) + 0.1):
        x0 = to_x0(sample, sigma, velocity)
        torch.testing.assert_close(to_velocity(sample, sigma, x0), velocity, rtol=0, atol=2e-6)


def test_per_token_sigma_scales_tokens_not_channels() -> None:
    sample, velocity = torch.zeros(1, 3, 3), torch.ones(1, 3, 3)
    x0 = to_x0(sample, torch.tensor([[0.1, 0.2, 0.3]]), velocity)
    torch.testing.assert_close(x0[0, :, 0], torch.tensor([-0.1, -0.2, -0.3]))
    torch.testing.assert_close(x0[0, 0], torch.full((3,), -0.1))


def test_zero_host_sigma_is_refused_and_a_tensor_is_not_looked_at() -> None:
    sample = torch.zeros(1, 2, 2)
    for zero in (0, 0.0):
        with pytest.raises(ValueError, match="sigma=0"):
            to_velocity(sample, zero, sample)
    # A meta tensor has no value to look at: this would raise if the code read it.
    assert to_velocity(sample.to("meta"), torch.zeros(1, device="meta"), sample.to("meta")).shape == (1, 2, 2)


def test_shape_that_does_not_lead_the_sample_is_refused() -> None:
    with pytest.raises(ValueError, match="does not lead"):
        to_x0(torch.zeros(2, 5, 4), torch.ones(2, 4), torch.zeros(2, 5, 4))


def test_euler_is_exact_on_a_straight_path() -> None:
    generator = torch.Generator().manual_seed(1)
    x0, noise = (torch.randn(1, 4, 8, generator=generator, dtype=torch.float32) for _ in range(2))
    x = noise
    sigmas = torch.tensor([1.0, 0.8, 0.35, 0.1, 0.0])
    for i in range(4):
        x = step_euler(x, x0, sigmas[i], sigmas[i + 1])
        expected = (1 - sigmas[i + 1]) * x0 + sigmas[i + 1] * noise
        torch.testing.assert_close(x, expected, rtol=0, atol=1e-6)


def test_bf16_rounds_the_velocity_before_the_step() -> None:
    generator = torch.Generator().manual_seed(2)
    x, x0 = (torch.randn(1, 64, 8, generator=generator).bfloat16() for _ in range(2))
    sigma, sigma_next = torch.tensor(0.7), torch.tensor(0.4)
    velocity = ((x.float() - x0.float()) / 0.7).bfloat16()
    expected = (x.float() + velocity.float() * (sigma_next - sigma)).bfloat16()
    assert torch.equal(step_euler(x, x0, sigma, sigma_next), expected)
