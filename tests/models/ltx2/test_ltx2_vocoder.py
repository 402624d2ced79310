import dataclasses
import re
from typing import Literal

import pytest
import torch
from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder
from torch import Tensor

from vgen.models.ltx2.config import VocoderConfig
from vgen.models.ltx2.vocoder import Vocoder

FULL = VocoderConfig(
    in_channels=128,
    out_channels=2,
    initial_channels=1024,
    upsample_rates=(6, 5, 2, 2, 2),
    upsample_kernel_sizes=(16, 15, 8, 4, 4),
    resblock_kernel_sizes=(3, 7, 11),
    resblock_dilations=((1, 3, 5),) * 3,
    output_sample_rate=24000,
)
TINY = dataclasses.replace(
    FULL,
    in_channels=16,
    initial_channels=16,
    upsample_rates=(3, 2),
    upsample_kernel_sizes=(7, 4),
    resblock_kernel_sizes=(3, 5),
    resblock_dilations=((1, 3), (1, 2)),
)
TINY_SNAKE = dataclasses.replace(TINY, resblock="AMP1", final_activation="clamp", final_bias=False)
FULL_SNAKE = dataclasses.replace(
    FULL,
    initial_channels=1536,
    upsample_rates=(5, 2, 2, 2, 2, 2),
    upsample_kernel_sizes=(11, 4, 4, 4, 4, 4),
    output_sample_rate=16000,
    resblock="AMP1",
    final_activation="clamp",
    final_bias=False,
)
"""Of LTX-2.3, whose 16 kHz waveform a second generator extends."""


def random_vocoder(config: VocoderConfig) -> Vocoder:
    vocoder = Vocoder(config)
    generator = torch.Generator().manual_seed(0)
    for tensor in vocoder.parameters():
        fan_in = tensor[0].numel() if tensor.ndim > 1 else 4
        tensor.data = torch.randn(tensor.shape, generator=generator) / fan_in**0.5
    for low_pass in vocoder.buffers():
        # No longer symmetric, so that a flipped one shows.
        low_pass.add_(torch.randn(low_pass.shape, generator=generator), alpha=0.02)
    # Away from the flat ends of tanh, which would hide errors.
    vocoder.conv_post.weight.data.mul_(0.05 if config.resblock == "AMP1" else 0.1)
    return vocoder.eval()


def random_mel(time: int) -> Tensor:
    return torch.randn(2, 2, time, 8, generator=torch.Generator().manual_seed(1))


def diffusers_twin(vocoder: Vocoder) -> LTX2Vocoder:
    config = vocoder.config
    snake = config.resblock == "AMP1"
    twin = LTX2Vocoder(
        in_channels=config.in_channels,
        hidden_channels=config.initial_channels,
        out_channels=config.out_channels,
        upsample_factors=list(config.upsample_rates),
        upsample_kernel_sizes=list(config.upsample_kernel_sizes),
        resnet_kernel_sizes=list(config.resblock_kernel_sizes),
        resnet_dilations=[list(dilations) for dilations in config.resblock_dilations],
        act_fn="snakebeta" if snake else "leaky_relu",
        antialias=snake,
        final_act_fn=None if config.final_activation == "none" else config.final_activation,
        final_bias=config.final_bias,
    )
    twin.load_state_dict({_diffusers_name(name): tensor for name, tensor in vocoder.state_dict().items()})
    return twin.eval()


def _diffusers_name(name: str) -> str:
    names = {
        "ups": "upsamplers",
        "resblocks": "resnets",
        "conv_pre": "conv_in",
        "conv_post": "conv_out",
        "act_post": "act_out",
    }
    return re.sub(r"^\w+", lambda match: names[match[0]], name).replace("lowpass.", "")


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("config", [TINY, TINY_SNAKE])
@pytest.mark.parametrize("time", [1, 9])
@torch.no_grad()
def test_matches_diffusers(time: int, config: VocoderConfig) -> None:
    vocoder = random_vocoder(config)
    mel = random_mel(time)
    twin = diffusers_twin(vocoder)
    waveform = vocoder(mel)
    expected = twin(mel)
    assert waveform.shape == (2, 2, 6 * time)
    assert 0.2 < expected.abs().max() < 0.95
    assert relative_error(waveform, expected) <= 2e-6
    mel = mel.double()
    assert relative_error(vocoder.double()(mel), twin.double()(mel)) < 1e-13


@pytest.mark.parametrize("activation", ["tanh", "clamp", "none"])
@torch.no_grad()
def test_bounds_the_waveform_as_configured(activation: Literal["tanh", "clamp", "none"]) -> None:
    vocoder = random_vocoder(dataclasses.replace(TINY_SNAKE, final_activation=activation))
    vocoder.conv_post.weight.data.mul_(10)
    expected = diffusers_twin(vocoder)(random_mel(9))
    loudest = expected.abs().max()
    assert loudest > 2 if activation == "none" else 0.99 < loudest <= 1
    assert relative_error(vocoder(random_mel(9)), expected) <= 2e-6


def test_full_size_has_the_official_tensors() -> None:
    with torch.device("meta"):
        vocoder = Vocoder(FULL)
        waveform = vocoder(torch.empty(1, 2, 501, 64))
    assert waveform.shape == (1, 2, 501 * 240)
    assert vocoder.samples_per_frame == 240
    assert vocoder.output_sample_rate == 24000
    assert round(sum(parameter.numel() for parameter in vocoder.parameters()) / 1e5) == 556
    names = set(vocoder.state_dict())
    assert len(names) == 194
    assert names >= {
        "conv_pre.weight",
        "ups.4.bias",
        "resblocks.14.convs1.2.weight",
        "resblocks.0.convs2.0.bias",
        "conv_post.bias",
    }


def test_full_size_of_2_3_has_the_official_tensors() -> None:
    with torch.device("meta"):
        vocoder = Vocoder(FULL_SNAKE)
        waveform = vocoder(torch.empty(1, 2, 7, 64))
    assert waveform.shape == (1, 2, 7 * 160)
    assert vocoder.output_sample_rate == 16000
    names = set(vocoder.state_dict())
    assert len(names) == 667
    assert names >= {
        "ups.5.bias",
        "resblocks.17.convs2.2.weight",
        "resblocks.17.acts2.2.act.alpha",
        "resblocks.0.acts1.1.act.beta",
        "resblocks.0.acts1.0.upsample.filter",
        "resblocks.3.acts2.0.downsample.lowpass.filter",
        "act_post.downsample.lowpass.filter",
    }
    assert "conv_post.bias" not in names


@torch.no_grad()
def test_waveform_has_the_dtype_of_the_mel() -> None:
    vocoder = random_vocoder(TINY).to(torch.bfloat16)
    assert vocoder(torch.randn(1, 2, 3, 8)).dtype == torch.float32


@pytest.mark.parametrize("shape", [(1, 1, 3, 8), (1, 2, 3, 16), (1, 2, 0, 8), (2, 3, 8)])
def test_refuses_another_mel(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"the vocoder got .* 2 channels, 8 mel bins and at least one frame"):
        random_vocoder(TINY)(torch.zeros(shape))


def test_refuses_kernels_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="upsamples by 3 with a kernel of 8"):
        Vocoder(dataclasses.replace(TINY, upsample_kernel_sizes=(8, 4)))
    with pytest.raises(ValueError, match="residual kernel of 4"):
        Vocoder(dataclasses.replace(TINY, resblock_kernel_sizes=(3, 4)))
