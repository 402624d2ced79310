"""Random weights for Wan: sane activations at full depth, and the parameters that stay in fp32."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vgen.models.wan import image_encoder, text
from vgen.models.wan.config import VAE_2_1, VAE_2_2, WanTransformerConfig
from vgen.models.wan.encoder_configs import CLIP_VIT_H14, UMT5_XXL
from vgen.models.wan.geometry import Geometry
from vgen.models.wan.plan import keeps_float32
from vgen.models.wan.transformer import Stream, WanTransformer
from vgen.models.wan.vae import VideoDecoder, VideoEncoder
from vgen.random_weights import fill_random

GEOMETRY = Geometry(latent_frames=2, latent_height=4, latent_width=4)
TINY = WanTransformerConfig(
    num_attention_heads=4,
    attention_head_dim=16,
    in_channels=16,
    out_channels=16,
    text_dim=64,
    freq_dim=256,
    ffn_dim=192,
    num_layers=30,
)
MIDDLE = dataclasses.replace(
    TINY, num_attention_heads=8, attention_head_dim=32, text_dim=512, ffn_dim=704, num_layers=40
)
TRANSFORMERS = {
    "tiny": dataclasses.replace(TINY, num_layers=2),
    "tiny, full depth": TINY,
    "middle": MIDDLE,
    "i2v of A14B": dataclasses.replace(TINY, in_channels=36),
    "ti2v": dataclasses.replace(TINY, in_channels=48, out_channels=48),
    "flf2v of 2.1": dataclasses.replace(
        MIDDLE, in_channels=36, image_dim=128, added_kv_proj_dim=256, pos_embed_seq_len=10, num_layers=8
    ),
}
VAES = {
    "2.1, tiny": dataclasses.replace(VAE_2_1, base_dim=4),
    "2.1, middle": dataclasses.replace(VAE_2_1, base_dim=32),
    "2.2, tiny": dataclasses.replace(VAE_2_2, base_dim=8, decoder_base_dim=16),
    "2.2, middle": dataclasses.replace(VAE_2_2, base_dim=24, decoder_base_dim=32),
}


def filled(build: Callable[[], nn.Module], name: str, **options: Any) -> Any:
    with torch.device("meta"):
        module = build()
    fill_random(module, **{"seed": 0, "device": "cpu", "dtype": torch.float32, "prefix": name, **options})
    return module.eval()


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def watch(modules: Mapping[str, nn.Module]) -> dict[str, float]:
    """Where the deviation of each module's last output will be; NaN if a value is not finite."""
    found: dict[str, float] = {}

    def record(name: str, _: nn.Module, __: object, out: Any) -> None:
        out = out[0] if isinstance(out, tuple) else out
        found[name] = out.float().std().item()

    for name, module in modules.items():
        module.register_forward_hook(partial(record, name))
    return found


def check(deviations: Iterable[float], low: float, high: float) -> None:
    assert all(low < deviation < high for deviation in deviations)


@pytest.mark.parametrize("name", TRANSFORMERS)
@torch.no_grad()
def test_transformer_activations(name: str) -> None:
    """Measured: 0.94 to 2.6 after the blocks and 0.8 to 1.3 at the end, at three timesteps."""
    config = TRANSFORMERS[name]
    model = filled(partial(WanTransformer, config), "transformer")
    deviations = watch({str(index): block for index, block in enumerate(model.blocks)})
    context = torch.zeros(1, 64, config.text_dim)
    context[:, :20] = draw(1, 20, config.text_dim)
    image = None if config.image_dim is None else draw(1, 10, config.image_dim)
    for timestep in (999.0, 500.0, 20.0):
        latents = draw(1, GEOMETRY.video_tokens, 4 * config.in_channels)
        stream = Stream(latents, torch.tensor([timestep]), context, image)
        out = model(stream, model.rope_tables(GEOMETRY, "cpu"))
        assert len(deviations) == config.num_layers
        check(deviations.values(), 0.5, 5)
        check([out.std().item()], 0.5, 2)


@pytest.mark.parametrize("name", VAES)
@torch.no_grad()
def test_vae_activations(name: str) -> None:
    """Measured: 0.45 to 5.6 inside, 0.4 to 0.6 of latents and frames, which are meant to be within -1 and 1."""
    config = VAES[name]
    space = config.scale_factor_spatial
    decoder, encoder = (
        filled(partial(half, config), f"video_{word}")
        for half, word in ((VideoDecoder, "decoder"), (VideoEncoder, "encoder"))
    )
    parts = {"conv_in", "mid_block", "conv_out", *(f"{kind}_blocks.{i}" for kind in ("up", "down") for i in range(11))}
    modules = [*decoder.named_modules(), *encoder.named_modules()]
    deviations = watch({path: module for path, module in modules if path.partition(".")[2] in parts})
    frames = decoder(draw(1, config.z_dim, 3, 4, 4))
    latents = encoder(draw(1, 3, 9, 4 * space, 4 * space).clamp(-1, 1))
    assert len(deviations) == (14 if config.is_residual else 21)
    check(deviations.values(), 0.2, 10)
    check([frames.std().item(), latents.std().item()], 0.2, 1)


@torch.no_grad()
def test_encoder_activations() -> None:
    """Measured: 1.1 to 5 after UMT5's blocks and 1.0 at the end, 1.3 to 7 after CLIP's, at full depth."""
    sizes = {"vocab_size": 512, "d_model": 256, "d_ff": 640, "num_heads": 4}
    umt5 = filled(lambda: text.build_text_encoder({**UMT5_XXL, **sizes}), "text_encoder")
    deviations = watch({f"umt5 {index}": block for index, block in enumerate(umt5.block)})
    ids = torch.arange(64)[None]
    states = text.encode_text(umt5, ids, (ids < 40).long())
    check([states[:, :40].std().item()], 0.5, 2)

    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4, "image_size": 56}
    clip: Any = image_encoder.build_image_encoder({**CLIP_VIT_H14, **sizes})
    fill_random(clip, seed=0, device="cpu", dtype=torch.float32, prefix="image_encoder")
    of_clip = watch({f"clip {index}": layer for index, layer in enumerate(clip.encoder.layers)})
    image_encoder.encode_images(clip, image_encoder.prepare_images(draw(1, 3, 80, 60).clamp(-1, 1), 56))
    assert (len(deviations), len(of_clip)) == (24, 32)
    check([*deviations.values(), *of_clip.values()], 0.5, 15)


def test_gains_are_about_1() -> None:
    umt5 = {**UMT5_XXL, "vocab_size": 64, "d_model": 48, "d_ff": 80, "num_heads": 4, "num_layers": 2}
    modules = {
        "transformer": filled(partial(WanTransformer, TRANSFORMERS["flf2v of 2.1"]), "transformer"),
        "video_decoder": filled(partial(VideoDecoder, VAES["2.2, tiny"]), "video_decoder"),
        "text_encoder": filled(lambda: text.build_text_encoder(umt5), "text_encoder"),
    }
    for component, module in modules.items():
        gains = {
            name: parameter
            for name, parameter in module.named_parameters()
            if name.endswith("gamma") or ("norm" in name and name.endswith("weight"))
        }
        assert len(gains) == {"transformer": 8 * 6 + 2, "video_decoder": 30, "text_encoder": 5}[component]
        assert all(gain.min() > 0.8 and gain.max() < 1.2 for gain in gains.values())


def test_chosen_parameters_stay_in_fp32() -> None:
    def keep(name: str) -> bool:
        return keeps_float32(name, "fp32")

    build = partial(WanTransformer, TRANSFORMERS["tiny"])
    whole = filled(build, "transformer").state_dict()
    state = filled(build, "transformer", dtype=torch.bfloat16, keep_float32=keep).state_dict()
    kept = [name for name in state if keep(name)]
    assert 0 < len(kept) < len(state)
    for name, tensor in state.items():
        dtype = torch.float32 if name in kept else torch.bfloat16
        assert tensor.dtype == dtype, name
        assert tensor.equal(whole[name].to(dtype)), name
