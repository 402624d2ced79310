import dataclasses
import re

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


def random_vocoder(config: VocoderConfig) -> Vocoder:
    vocoder = Vocoder(config)
    generator = torch.Generator().manual_seed(0)
    for tensor in vocoder.parameters():
        fan_in = tensor[0].numel() if tensor.ndim > 1 else 4
        tensor.data = torch.randn(tensor.shape, generator=generator) / fan_in**0.5
    # Away from the flat ends of tanh, which would hide errors.
    vocoder.conv_post.weight.data.mul_(0.1)
    return vocoder.eval()


def diffusers_twin(vocoder: Vocoder) -> LTX2Vocoder:
    config = vocoder.config
    twin = LTX2Vocoder(
        in_channels=config.in_channels,
        hidden_channels=config.initial_channels,
        out_channels=config.out_channels,
        upsample_factors=list(config.upsample_rates),
        upsample_kernel_sizes=list(config.upsample_kernel_sizes),
        resnet_kernel_sizes=list(config.resblock_kernel_sizes),
        resnet_dilations=[list(dilations) for dilations in config.resblock_dilations],
    )
    names = {"ups": "upsamplers", "resblocks": "resnets", "conv_pre": "conv_in", "conv_post": "conv_out"}
    state = {re.sub(r"^\w+", lambda match: names[match[0]], name): v for name, v in vocoder.state_dict().items()}
    twin.load_state_dict(state)
    return twin.eval()


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("time", [1, 9])
@torch.no_grad()
def test_matches_diffusers(time: int) -> None:
    vocoder = random_vocoder(TINY)
    mel = torch.randn(2, 2, time, 8, generator=torch.Generator().manual_seed(1))
    twin = diffusers_twin(vocoder)
    waveform = vocoder(mel)
    expected = twin(mel)
    assert waveform.shape == (2, 2, 6 * time)
    assert 0.2 < expected.abs().max() < 0.95
    assert relative_error(waveform, expected) <= 2e-6
    mel = mel.double()
    assert relative_error(vocoder.double()(mel), twin.double()(mel)) < 1e-13


def test_full_size_has_the_official_tensors() -> None:
    with torch.device("meta"):
        vocoder = Vocoder(FULL)
        waveform = vocoder(torch.empty(1, 2, 501, 64))
    assert waveform.shape == (1, 2, 501 * 240)
    assert vocoder.samples_per_frame == 240
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


@torch.no_grad()
def test_waveform_has_the_dtype_of_the_mel() -> None:
    vocoder = random_vocoder(TINY).to(torch.bfloat16)
    assert vocoder(torch.randn(1, 2, 3, 8)).dtype == torch.float32


def test_refuses_kernels_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="upsamples by 3 with a kernel of 8"):
        Vocoder(dataclasses.replace(TINY, upsample_kernel_sizes=(8, 4)))
    with pytest.raises(ValueError, match="residual kernel of 4"):
        Vocoder(dataclasses.replace(TINY, resblock_kernel_sizes=(3, 4)))
