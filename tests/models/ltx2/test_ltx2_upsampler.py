import dataclasses

import pytest
import torch
from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel
from torch import Tensor

from vgen.models.ltx2.config import UpsamplerConfig
from vgen.models.ltx2.upsampler import BlurDown, LatentUpsampler, PixelShuffle3d, upsample_normalized
from vgen.models.ltx2.video_vae import PerChannelStatistics

X2_RATIONAL = UpsamplerConfig(
    in_channels=6,
    mid_channels=64,  # two channels a group
    num_blocks_per_stage=2,
    spatial=True,
    temporal=False,
    spatial_scale=2.0,
    rational=True,
)
X2_PLAIN = dataclasses.replace(X2_RATIONAL, rational=False)
X1_5 = dataclasses.replace(X2_RATIONAL, spatial_scale=1.5)
TEMPORAL = dataclasses.replace(X2_PLAIN, spatial=False, temporal=True)
BOTH = dataclasses.replace(X2_PLAIN, temporal=True)
FULL = dataclasses.replace(X2_RATIONAL, in_channels=128, mid_channels=1024, num_blocks_per_stage=4)

# Config, then times, heights and widths of the output for latents of F x 5 x 4.
KINDS = {
    "x2_rational": (X2_RATIONAL, lambda frames: (frames, 10, 8)),
    "x2_plain": (X2_PLAIN, lambda frames: (frames, 10, 8)),
    "x1_5": (X1_5, lambda frames: (frames, 8, 6)),
    "temporal": (TEMPORAL, lambda frames: (2 * frames - 1, 5, 4)),
    "both": (BOTH, lambda frames: (2 * frames - 1, 10, 8)),
}


def random_upsampler(config: UpsamplerConfig) -> LatentUpsampler:
    """Random weights, gains and biases at a scale that keeps activations near 1; the blur is the file's own."""
    upsampler = LatentUpsampler(config)
    generator = torch.Generator().manual_seed(0)
    for name, tensor in upsampler.named_parameters():
        random = torch.randn(tensor.shape, generator=generator)
        fan_in = tensor[0].numel() if tensor.ndim > 1 else 4
        tensor.data = 1 + 0.3 * random if "norm" in name and name.endswith("weight") else random / fan_in**0.5
    return upsampler.eval()


def diffusers_twin(upsampler: LatentUpsampler) -> LTX2LatentUpsamplerModel:
    config = upsampler.config
    twin = LTX2LatentUpsamplerModel(
        in_channels=config.in_channels,
        mid_channels=config.mid_channels,
        num_blocks_per_stage=config.num_blocks_per_stage,
        spatial_upsample=config.spatial,
        temporal_upsample=config.temporal,
        rational_spatial_scale=config.spatial_scale,
        use_rational_resampler=config.rational,
    )
    twin.load_state_dict(upsampler.state_dict())  # the official names are diffusers' names: strict
    return twin.eval()


def random_latents(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("frames", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_matches_diffusers(kind: str, frames: int) -> None:
    config, expected_size = KINDS[kind]
    upsampler = random_upsampler(config)
    latents = random_latents(2, 6, frames, 5, 4)
    expected = diffusers_twin(upsampler)(latents)
    upsampled = upsampler(latents)
    assert upsampled.shape == (2, 6, *expected_size(frames))
    assert relative_error(upsampled, expected) <= 1e-6


@torch.no_grad()
def test_a_file_may_bring_another_blur() -> None:
    """diffusers reads its kernel from the file as well, so a kernel that is not symmetric shows a swap of axes."""
    upsampler = random_upsampler(X1_5)
    assert isinstance(upsampler.upsampler.blur_down, BlurDown)
    upsampler.upsampler.blur_down.kernel.copy_(random_latents(1, 1, 5, 5))
    latents = random_latents(1, 6, 2, 4, 3)
    assert relative_error(upsampler(latents), diffusers_twin(upsampler)(latents)) <= 1e-6


def test_blur_of_one_pixel_is_the_binomial_kernel() -> None:
    pixel = torch.zeros(1, 2, 9, 9)
    pixel[0, 1, 4, 4] = 256
    blurred = BlurDown(2)(pixel)[0]
    assert blurred.shape == (2, 5, 5)
    # Rows 0, 2, 4, 6, 8 of the blur: 1, 6 and 1 of the binomials 1 4 6 4 1 around row 4.
    row = torch.tensor([0.0, 1, 6, 1, 0])
    assert torch.equal(blurred, torch.stack([torch.zeros(5, 5), torch.outer(row, row)]))
    assert torch.equal(BlurDown(1)(pixel), pixel)


def test_shuffle_moves_each_channel_to_its_own_place() -> None:
    channels = torch.arange(3 * 8).view(1, 24, 1, 1, 1)
    assert torch.equal(PixelShuffle3d(2, 2)(channels), torch.arange(24).view(1, 3, 2, 2, 2))
    assert torch.equal(PixelShuffle3d(2, 1)(channels), torch.arange(24).view(1, 12, 2, 1, 1))


@torch.no_grad()
def test_temporal_upsampler_drops_the_first_half_of_the_first_frame() -> None:
    """With one frame, what is left comes from the odd output channels of the convolution."""
    upsampler = random_upsampler(dataclasses.replace(TEMPORAL, num_blocks_per_stage=0))
    latents = random_latents(1, 6, 1, 4, 3)
    hidden = torch.nn.functional.silu(upsampler.initial_norm(upsampler.initial_conv(latents)))
    expected = upsampler.final_conv(upsampler.upsampler[0](hidden)[:, 1::2])
    torch.testing.assert_close(upsampler(latents), expected, rtol=0, atol=1e-6)


@torch.no_grad()
def test_normalized_latents_are_upsampled_in_the_vae_scale() -> None:
    upsampler = random_upsampler(X2_RATIONAL)
    statistics = PerChannelStatistics(6)
    mean, std = torch.linspace(-1, 2, 6), torch.linspace(0.5, 3, 6)
    statistics.load_state_dict({"mean-of-means": mean, "std-of-means": std})
    latents = random_latents(1, 6, 2, 3, 4)
    # Per channel and in float64, so that neither the axis nor the order of the two steps can go unseen.
    raw = torch.stack([latents[:, c].double() * std[c].double() + mean[c].double() for c in range(6)], dim=1)
    upsampled = diffusers_twin(upsampler).double()(raw)
    expected = torch.stack([(upsampled[:, c] - mean[c]) / std[c] for c in range(6)], dim=1)
    assert relative_error(upsample_normalized(upsampler, latents, statistics), expected) <= 1e-5


@pytest.mark.parametrize(
    ("config", "tensors", "names"),
    [
        (FULL, 73, {"upsampler.conv.weight", "upsampler.conv.bias", "upsampler.blur_down.kernel"}),
        (dataclasses.replace(FULL, rational=False), 72, {"upsampler.0.weight", "upsampler.0.bias"}),
    ],
    ids=["2.0", "2.3"],
)
def test_full_size_has_the_official_tensors(config: UpsamplerConfig, tensors: int, names: set[str]) -> None:
    with torch.device("meta"):
        upsampler = LatentUpsampler(config)
        upsampled = upsampler(torch.empty(1, 128, 16, 12, 20))
    assert upsampled.shape == (1, 128, 16, 24, 40)
    assert sum(parameter.numel() for parameter in upsampler.parameters()) == 497_867_904
    state = upsampler.state_dict()
    assert len(state) == tensors
    assert {name for name in state if name.startswith("upsampler.")} == names
    assert set(state) >= {
        "initial_conv.weight",
        "initial_norm.bias",
        "res_blocks.3.conv2.weight",
        "res_blocks.0.norm1.weight",
        "post_upsample_res_blocks.3.norm2.bias",
        "final_conv.bias",
    }


@torch.no_grad()
def test_output_has_the_dtype_of_the_latents() -> None:
    upsampler = random_upsampler(X1_5).to(torch.bfloat16)
    assert upsampler(random_latents(1, 6, 1, 2, 2)).dtype == torch.float32
    assert torch.equal(upsampler.upsampler.blur_down.kernel.float(), BlurDown(2).kernel)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mid_channels": 48}, r"mid_channels=48; its norms have 32 groups: use a multiple of 32"),
        ({"spatial": False}, "spatial=False and temporal=False"),
        ({"spatial_scale": 0.75}, r"spatial_scale=0\.75.*2\.0 or 1\.5 only"),
        ({"spatial_scale": 1.5, "rational": False}, r"spatial_scale=1\.5 with rational=False.*2\.0 only"),
        ({"spatial_scale": 1.5, "temporal": True}, r"spatial_scale=1\.5.*temporal=True.*2\.0 only"),
    ],
)
def test_refuses_configs_that_it_does_not_build(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LatentUpsampler(dataclasses.replace(X2_RATIONAL, **changes))


def test_temporal_upsampler_does_not_read_the_spatial_scale() -> None:
    LatentUpsampler(dataclasses.replace(TEMPORAL, spatial_scale=1.5))


@pytest.mark.parametrize("shape", [(1, 5, 1, 2, 2), (6, 1, 2, 2)])
def test_refuses_latents_that_do_not_fit(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"do not fit this upsampler; give \[batch, 6, frames, height, width\]"):
        LatentUpsampler(X2_PLAIN)(torch.zeros(shape))
