"""Predicted memory of Wan against what its modules allocate, counted on the CPU."""

import dataclasses

import pytest
import torch

from tests.test_memory import peak_of
from vgen import memory, wan_memory
from vgen.memory import Activations
from vgen.models.wan.config import VAE_2_1, VAE_2_2, Residual, WanTransformerConfig, WanVaeConfig
from vgen.models.wan.geometry import Geometry
from vgen.models.wan.plan import keeps_float32
from vgen.models.wan.transformer import Stream, WanTransformer
from vgen.models.wan.vae import VideoDecoder, VideoEncoder

TEXT_TOKENS = 32
LATENTS = (9, 8, 12)
VAES = {
    "2.1": dataclasses.replace(VAE_2_1, base_dim=8),
    "2.2": dataclasses.replace(VAE_2_2, base_dim=16, decoder_base_dim=16),
}


@pytest.mark.parametrize("residual", ["fp32", "model"])
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize(("dtype", "ffn_dim"), [(torch.float32, 512), (torch.bfloat16, 1024), (torch.bfloat16, 256)])
def test_denoising_is_what_the_transformer_allocates(
    dtype: torch.dtype, ffn_dim: int, held: bool, residual: Residual
) -> None:
    config = WanTransformerConfig(4, 32, 4, 4, text_dim=16, freq_dim=32, ffn_dim=ffn_dim, num_layers=2)
    geometry = Geometry(latent_frames=7, latent_height=20, latent_width=30)
    transformer, tokens = WanTransformer(config, residual), geometry.video_tokens
    for name, parameter in transformer.named_parameters():
        to = torch.float32 if keeps_float32(name, residual) else dtype
        parameter.data = torch.randn_like(parameter).mul_(0.1).to(to)
    transformer.requires_grad_(False).eval()
    timestep = torch.tensor([[0.0, 500.0]]) if held else torch.tensor([500.0])
    rows = (torch.arange(tokens) >= 150).long()[None] if held else None

    def step() -> None:
        rope = transformer.rope_tables(geometry, "cpu")
        context = transformer.prepare_text(torch.randn(1, TEXT_TOKENS, 16, dtype=dtype))
        transformer(Stream(torch.randn(1, tokens, 16, dtype=dtype), timestep, context, rows=rows), rope)

    predicted = wan_memory.denoise_bytes(config, geometry, TEXT_TOKENS, 1, dtype.itemsize, residual=residual, held=held)
    # Of the loop, which is not here.
    predicted -= 4 * tokens * (config.out_channels * wan_memory.SOLVER_TENSORS + config.in_channels) * 4
    assert peak_of(step) == pytest.approx(predicted, rel=0.05)


@pytest.mark.parametrize("vae", VAES.values(), ids=VAES)
@pytest.mark.parametrize("chunk", [1, 2, 4])
def test_a_decode_is_what_the_decoder_allocates(vae: WanVaeConfig, chunk: int) -> None:
    decoder = VideoDecoder(vae).requires_grad_(False).eval()
    latents = torch.randn(1, vae.z_dim, *LATENTS)

    def decode() -> None:
        for _ in decoder.decode(latents, chunk):
            pass

    predicted = wan_memory.decode_bytes(vae, LATENTS, chunk, 4) - memory.CONVOLUTION_WORKSPACE - 2 * latents.nbytes
    # Never much below: its state counts twice, old and new.
    assert 0.88 <= peak_of(decode) / predicted <= 1.02


@pytest.mark.parametrize("vae", VAES.values(), ids=VAES)
@pytest.mark.parametrize("chunk", [1, 2, 4])
def test_an_encode_is_what_the_encoder_allocates(vae: WanVaeConfig, chunk: int) -> None:
    encoder = VideoEncoder(vae).requires_grad_(False).eval()
    space = vae.scale_factor_spatial
    clip = torch.randn(1, 3, 33, *(size * space for size in LATENTS[1:]))
    predicted = wan_memory.encode_bytes(vae, LATENTS, chunk, 4) - memory.CONVOLUTION_WORKSPACE - 2 * clip.nbytes
    assert 0.84 <= peak_of(lambda: encoder(clip, chunk)) / predicted <= 1.0


WORK = Activations(10, 0, 0, 50, 20, 10, 0, 0, 0, 0)
WEIGHTS = {"text_encoder": 1000, "transformer": 3000, "transformer_2": 3000, "video_decoder": 100}


def test_experts_take_turns_where_they_visit() -> None:
    peaks = {
        offload: memory.predict(WEIGHTS, WORK, offload).stages["denoise"] - memory.CUBLAS_WORKSPACE
        for offload in ("none", "text_encoder", "expert", "stages")
    }
    assert peaks == {"none": 7150, "text_encoder": 6150, "expert": 4150, "stages": 3050}


def test_the_expert_is_offered_where_there_are_two() -> None:
    prediction = memory.predict(WEIGHTS, WORK)
    room = memory.CUBLAS_WORKSPACE + 4500
    with pytest.raises(ValueError, match=r"use model\.offload=expert "):
        memory.fit(prediction, room, margin=0)
    one = {name: size for name, size in WEIGHTS.items() if name != "transformer_2"}
    with pytest.raises(ValueError, match=r"use model\.offload=text_encoder "):
        memory.fit(memory.predict(one, WORK), memory.CUBLAS_WORKSPACE + 3500, margin=0)
