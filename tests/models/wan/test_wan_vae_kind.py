import re
from dataclasses import replace

import pytest
import torch

from vgen.models.wan.config import VAE_2_1, VAE_2_2, WanVaeConfig
from vgen.models.wan.vae import VideoDecoder, VideoEncoder
from vgen.models.wan.vae_kind import vae_kind, validate_vae_kind

TINY = {"wan2.1": replace(VAE_2_1, base_dim=4), "wan2.2": replace(VAE_2_2, base_dim=8, decoder_base_dim=8)}


def shapes_of(config: WanVaeConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        state = {**VideoEncoder(config).state_dict(), **VideoDecoder(config).state_dict()}
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


ORIGINAL = {
    "wan2.1": {"conv2.weight": (16, 16, 1, 1, 1), "decoder.upsamples.3.resample.1.weight": (8, 16, 3, 3)},
    "wan2.2": {"conv2.weight": (48, 48, 1, 1, 1), "decoder.upsamples.0.upsamples.3.resample.1.weight": (32, 32, 3, 3)},
}


@pytest.mark.parametrize("kind", ["wan2.1", "wan2.2"])
def test_recognises_either_layout_at_any_width(kind: str) -> None:
    shapes = shapes_of(TINY[kind])
    decoder = {name: shape for name, shape in shapes.items() if not name.startswith(("encoder.", "quant_conv."))}
    for tensors in (shapes, decoder, ORIGINAL[kind]):
        assert vae_kind(tensors) == kind
        validate_vae_kind(tensors, TINY[kind], "vae")


def test_recognises_others() -> None:
    assert vae_kind({"decoder.per_channel_statistics.mean-of-means": (128,)}) == "ltx2"
    assert vae_kind({"latents_mean": (128,), "decoder.conv_in.conv.weight": (1024, 128, 3, 3, 3)}) == "ltx2"
    assert vae_kind({"decoder.conv_in.weight": (512, 4, 3, 3)}) == "unknown"


@pytest.mark.parametrize(
    ("config", "shapes", "message"),
    [
        (
            TINY["wan2.2"],
            shapes_of(TINY["wan2.1"]),
            "x.pth holds the video VAE of Wan 2.1 with 16 latent channels; this model needs that of Wan 2.2 with 48: "
            "use the VAE that came with the model",
        ),
        (TINY["wan2.1"], shapes_of(TINY["wan2.2"]), "the video VAE of Wan 2.2 with 48 latent channels; this model"),
        (
            TINY["wan2.1"],
            shapes_of(replace(TINY["wan2.1"], z_dim=4)),
            "Wan 2.1 with 4 latent channels; this model needs that of Wan 2.1 with 16",
        ),
        (TINY["wan2.1"], {"latents_mean": (128,)}, "x.pth holds the video VAE of LTX-2; this model"),
        (TINY["wan2.1"], {}, "x.pth holds the video VAE of an unknown model; this model"),
    ],
)
def test_refuses_another_vae_by_name(config: WanVaeConfig, shapes: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        validate_vae_kind(shapes, config, "x.pth")
