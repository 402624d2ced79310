import copy
import gc
from dataclasses import replace

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import WanDecoder3d, WanEncoder3d
from torch import Tensor, nn

from vgen.components.wan_diffusers_vae import DiffusersVideoDecoder, DiffusersVideoEncoder
from vgen.models.wan.config import VAE_2_1, VAE_2_2
from vgen.models.wan.vae import VideoDecoder, VideoEncoder
from vgen.models.wan.vae_blocks import apply_channels_last

CONFIGS = {"2.1": replace(VAE_2_1, base_dim=4), "2.2": replace(VAE_2_2, base_dim=8, decoder_base_dim=4)}
RELEASES = {"2.1": VAE_2_1, "2.2": VAE_2_2}
KINDS = ("2.1", "2.2")
HALVES = {
    "encode": (VideoEncoder, DiffusersVideoEncoder),
    "decode": (VideoDecoder, DiffusersVideoDecoder),
}


def randomize(module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in module.named_parameters():
        if name.endswith("gamma"):
            tensor.data = 0.5 + torch.rand(tensor.shape, generator=generator)
        else:
            fan_in = tensor[0].numel() if tensor.ndim > 1 else 4
            tensor.data = torch.randn(tensor.shape, generator=generator) / fan_in**0.5
        if "conv_out" in name and isinstance(module, VideoDecoder):
            tensor.data *= 0.05  # frames well inside -1 to 1, where diffusers does not clamp


def pair(kind: str, half: str) -> tuple[nn.Module, nn.Module, Tensor]:
    """Ours, theirs built on the meta device and given the tensors of ours, and an input: 3 latent frames of 2x3."""
    config = CONFIGS[kind]
    native, foreign = HALVES[half]
    ours = native(config)
    randomize(ours, 0)
    with torch.device("meta"):
        theirs = foreign(config)
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()), assign=True)
    S = config.scale_factor_spatial
    shape = (2, 3, 9, 2 * S, 3 * S) if half == "encode" else (2, config.z_dim, 3, 2, 3)
    return ours, theirs, torch.randn(shape, generator=torch.Generator().manual_seed(1))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape
    return ((actual - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("half", ["encode", "decode"])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_ours_with_the_same_tensors(kind: str, half: str) -> None:
    ours, theirs, x = pair(kind, half)
    expected = ours(x)
    assert expected.abs().max() > 0.02
    assert half == "encode" or expected.abs().max() < 1
    for chunk in (1, None):
        actual = theirs(x, chunk)
        assert actual.dtype == torch.float32
        assert not actual.requires_grad
        assert relative_error(actual, expected) <= 2e-6  # measured: 6e-7, the order of fp32 sums


@pytest.mark.parametrize("kind", KINDS)
def test_decodes_to_one_part_when_asked(kind: str) -> None:
    _, theirs, latents = pair(kind, "decode")
    calls: list[int] = []
    theirs.decoder.register_forward_hook(lambda *_: calls.append(1))
    parts = theirs.decode(latents)
    assert not calls
    (frames,) = parts
    assert len(calls) == 3  # latent frames
    assert torch.equal(frames, theirs(latents))


def test_clamps_where_ours_does_not() -> None:
    ours, theirs, latents = pair("2.2", "decode")
    for half in (ours, theirs):
        half.decoder.conv_out.weight.data *= 100
    expected = ours(latents)
    assert expected.abs().max() > 2
    assert (theirs(latents) - expected.clamp(-1, 1)).abs().max() <= 1e-6 * expected.abs().max()


def alive(kind: type[nn.Module]) -> int:
    gc.collect()
    return sum(type(module) is kind for module in gc.get_objects())


@pytest.mark.parametrize("half", ["encode", "decode"])
@pytest.mark.parametrize("kind", KINDS)
def test_holds_its_own_half_only(kind: str, half: str) -> None:
    """By what is alive in memory, and by the names and shapes of the release."""
    other = WanDecoder3d if half == "encode" else WanEncoder3d
    before = alive(other)
    _, theirs, _ = pair(kind, half)
    assert alive(other) == before
    assert alive(type(getattr(theirs, f"{half}r"))) > 0
    with torch.device("meta"):
        native, foreign = (half_of(RELEASES[kind]).state_dict() for half_of in HALVES[half])
    assert {name: tensor.shape for name, tensor in foreign.items()} == {
        name: tensor.shape for name, tensor in native.items()
    }


@pytest.mark.parametrize("half", ["encode", "decode"])
def test_moves_and_copies_with_its_tensors(half: str) -> None:
    """The VAE that computes is no child: what is done to the module has to reach it all the same."""
    ours, theirs, x = pair("2.2", half)
    expected = theirs(x)
    twin = copy.deepcopy(theirs)
    for parameter in theirs.parameters():
        parameter.data.zero_()
    assert theirs(x).abs().max() == 0
    assert torch.equal(twin(x), expected)

    # bf16 weights: latents in theirs, frames in the dtype of the latents, as ours.
    for module in (twin, ours):
        module.bfloat16()
        apply_channels_last(module)
    assert twin(x).dtype == ours(x).dtype == (torch.bfloat16 if half == "encode" else torch.float32)
    assert relative_error(twin(x).float(), expected) > 1e-4
    assert relative_error(twin(x).float(), expected) < 0.1


@pytest.mark.parametrize("chunk", [0, 2])
def test_refuses_other_chunks(chunk: int) -> None:
    message = f"chunk={chunk}, but diffusers' VAE works one latent frame at a time: use 1 or null, or vgen's own VAE"
    for half in ("encode", "decode"):
        _, theirs, x = pair("2.1", half)
        with pytest.raises(ValueError, match=message):
            theirs(x, chunk)
    with pytest.raises(ValueError, match=message):
        theirs.decode(x, chunk)


def test_refuses_frames_that_diffusers_would_drop() -> None:
    _, theirs, frames = pair("2.1", "encode")
    with pytest.raises(ValueError, match=r"num_frames=8 is not 4k \+ 1: use 5 or 9"):
        theirs(frames[:, :, :8])
