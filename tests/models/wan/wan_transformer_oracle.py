"""What the Wan transformer is tested against: diffusers with shared weights, and the official maths in plain functions.

diffusers keeps its tokens and most of its embeddings in the model's dtype. ``by_hand`` is the official code under
autocast: float64 throughout, rounded to the dtype of the layers where autocast rounds. It works on one sample at a time
from the names of the checkpoint and shares nothing with the code under test, the positions included.
"""

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import WanTransformer3DModel
from torch import Tensor, nn

from vgen.models.wan.config import Residual, WanTransformerConfig
from vgen.models.wan.geometry import Geometry
from vgen.models.wan.patches import patchify, unpatchify
from vgen.models.wan.plan import keeps_float32
from vgen.models.wan.transformer import Stream, WanTransformer

GEOMETRY = Geometry(latent_frames=3, latent_height=4, latent_width=6)
BATCH = 2
TOLERANCE = 2e-6
"""Largest error allowed, as a part of the largest value."""

TIMESTEP = torch.tensor([999, 421])

TINY = WanTransformerConfig(
    num_attention_heads=2,
    # Pairs of frames, height and width: 4, 2, 2; an equal split would hide an exchanged axis.
    attention_head_dim=16,
    in_channels=16,
    out_channels=16,
    text_dim=24,
    freq_dim=256,
    ffn_dim=40,
    num_layers=2,
    rope_max_seq_len=32,
)
VARIANTS = {
    "t2v": TINY,
    "i2v_a14b": dataclasses.replace(TINY, in_channels=36),
    "ti2v": dataclasses.replace(TINY, in_channels=48, out_channels=48),
    "i2v_2_1": dataclasses.replace(TINY, in_channels=36, image_dim=8, added_kv_proj_dim=32),
    "flf2v": dataclasses.replace(TINY, in_channels=36, image_dim=8, added_kv_proj_dim=32, pos_embed_seq_len=10),
}
TEXT_TOKENS = 512
"""diffusers has this number written into its split of text from image tokens."""


def randomise(module: nn.Module, seed: int = 0) -> None:
    """No parameter keeps a value of 0 or 1 that could hide a missing gain, bias or table."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name and name.endswith("weight"):
            parameter.data = 1 + 0.3 * noise
        elif name.endswith("weight"):
            parameter.data = noise / parameter[0].numel() ** 0.5
        else:
            parameter.data = 0.3 * noise


def build(config: WanTransformerConfig, residual: Residual = "fp32", dtype: torch.dtype = torch.float32) -> Any:
    with torch.device("meta"):
        model = WanTransformer(config, residual)
    model.to_empty(device="cpu")
    randomise(model)
    for name, parameter in model.named_parameters():
        if not keeps_float32(name, residual):
            parameter.data = parameter.data.to(dtype)
    return model.requires_grad_(False).eval()


def diffusers_twin(model: WanTransformer, dtype: torch.dtype = torch.float32) -> WanTransformer3DModel:
    """diffusers with the parameters of ``model``, in ``dtype`` as ``from_pretrained(torch_dtype=dtype)`` leaves it."""
    twin = WanTransformer3DModel(**dataclasses.asdict(model.config)).eval()
    twin.load_state_dict(model.state_dict())
    for name, parameter in twin.named_parameters():
        if set(twin._keep_in_fp32_modules).isdisjoint(name.split(".")):
            parameter.data = parameter.data.to(dtype)
    return twin.requires_grad_(False)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What diffusers takes: latents [B, C, F, H, W], timesteps [B] or per token, text and image tokens."""

    latents: Tensor
    timestep: Tensor
    text: Tensor
    image: Tensor | None

    def to(self, dtype: torch.dtype) -> "Inputs":
        image = None if self.image is None else self.image.to(dtype)
        return Inputs(self.latents.to(dtype), self.timestep, self.text.to(dtype), image)

    def item(self, index: int) -> "Inputs":
        one = slice(index, index + 1)
        image = None if self.image is None else self.image[one]
        return Inputs(self.latents[one], self.timestep[one], self.text[one], image)


def make_inputs(config: WanTransformerConfig, timestep: Tensor = TIMESTEP, geometry: Geometry = GEOMETRY) -> Inputs:
    generator = torch.Generator().manual_seed(7)
    sizes = (geometry.latent_frames, geometry.latent_height, geometry.latent_width)
    image_tokens = config.pos_embed_seq_len or 5
    return Inputs(
        latents=torch.randn(len(timestep), config.in_channels, *sizes, generator=generator),
        timestep=timestep,
        text=torch.randn(len(timestep), TEXT_TOKENS, config.text_dim, generator=generator),
        image=None
        if config.image_dim is None
        else torch.randn(len(timestep), image_tokens, config.image_dim, generator=generator),
    )


def make_stream(inputs: Inputs, geometry: Geometry = GEOMETRY) -> Stream:
    return Stream(patchify(inputs.latents, geometry), inputs.timestep, inputs.text, inputs.image)


def run_ours(model: WanTransformer, stream: Stream, geometry: Geometry = GEOMETRY) -> Tensor:
    with torch.no_grad():
        return unpatchify(model(stream, model.rope_tables(geometry, "cpu")), geometry)


def run_diffusers(model: WanTransformer3DModel, inputs: Inputs) -> Tensor:
    image = inputs.image
    if model.config.pos_embed_seq_len is not None:
        assert image is not None
        # Two images of a sample are two rows of a batch there.
        image = image.unflatten(1, (2, -1)).flatten(0, 1)
    with torch.no_grad():
        out: Tensor = model(inputs.latents, inputs.timestep, inputs.text, image).sample
    return out


def relative_error(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape
    return float((actual.double() - expected.double()).abs().max() / expected.double().abs().max())


def by_hand(model: WanTransformer, inputs: Inputs, low: torch.dtype = torch.float64) -> Tensor:
    """Velocities [B, C, F, H, W] in float64; ``low``: what autocast rounds to."""
    weights = {name: tensor.double() for name, tensor in model.state_dict().items()}
    return torch.stack([_Sample(model.config, weights, low).velocity(inputs, i) for i in range(len(inputs.latents))])


class _Sample:
    def __init__(self, config: WanTransformerConfig, weights: dict[str, Tensor], low: torch.dtype) -> None:
        self.config, self.weights, self.low_dtype = config, weights, low

    def velocity(self, inputs: Inputs, index: int) -> Tensor:
        latents = inputs.latents[index].double()
        _, frames, height, width = latents.shape
        grid = (frames, height // 2, width // 2)
        patches = torch.stack(
            [
                latents[:, f, 2 * h : 2 * h + 2, 2 * w : 2 * w + 2].flatten()
                for f in range(grid[0])
                for h in range(grid[1])
                for w in range(grid[2])
            ]
        )
        self.turns = self.positions(grid)
        x = self.linear("patch_embedding", patches)
        embedded, rows = self.time(inputs.timestep[index].expand(len(x)))
        at = "condition_embedder.text_embedder."
        text = self.low(F.gelu(self.linear(at + "linear_1", inputs.text[index].double()), approximate="tanh"))
        text = self.linear(at + "linear_2", text)
        image = None if inputs.image is None else self.image(inputs.image[index].double())
        for block in range(self.config.num_layers):
            x = self.block(f"blocks.{block}.", x, rows, text, image)
        shift, scale = (row + embedded for row in self.weights["scale_shift_table"][0])
        out = self.linear("proj_out", norm(x) * (1 + scale) + shift, low=False)
        tokens = out.view(*grid, 2, 2, -1)
        velocity = torch.empty(self.config.out_channels, frames, height, width, dtype=torch.float64)
        for row in range(2):
            for column in range(2):
                velocity[:, :, row::2, column::2] = tokens[..., row, column, :].permute(3, 0, 1, 2)
        return velocity

    def block(self, at: str, x: Tensor, rows: Tensor, text: Tensor, image: Tensor | None) -> Tensor:
        shift, scale, gate, ff_shift, ff_scale, ff_gate = (
            rows + self.weights[f"{at}scale_shift_table"][0].flatten()
        ).chunk(6, dim=-1)
        y = norm(x) * (1 + scale) + shift
        x = x + gate * self.attention(f"{at}attn1", y, y)
        y = x
        if self.config.cross_attn_norm:
            y = norm(x) * self.weights[f"{at}norm2.weight"] + self.weights[f"{at}norm2.bias"]
        x = x + self.attention(f"{at}attn2", y, text, image)
        hidden = self.linear(f"{at}ffn.net.0.proj", norm(x) * (1 + ff_scale) + ff_shift)
        return x + ff_gate * self.linear(f"{at}ffn.net.2", self.low(F.gelu(hidden, approximate="tanh")))

    def attention(self, name: str, x: Tensor, context: Tensor, image: Tensor | None = None) -> Tensor:
        own = name.endswith("attn1")
        q = self.heads(rms(self.linear(f"{name}.to_q", x)) * self.weights[f"{name}.norm_q.weight"])
        k = self.heads(rms(self.linear(f"{name}.to_k", context)) * self.weights[f"{name}.norm_k.weight"])
        if own:
            q, k = (torch.view_as_real(torch.view_as_complex(t) * self.turns) for t in (q, k))
        out = self.attend(q, k, self.heads(self.linear(f"{name}.to_v", context)))
        if image is not None:
            k = rms(self.linear(f"{name}.add_k_proj", image)) * self.weights[f"{name}.norm_added_k.weight"]
            out = out + self.attend(q, self.heads(k), self.heads(self.linear(f"{name}.add_v_proj", image)))
        return self.linear(f"{name}.to_out.0", out)

    def heads(self, x: Tensor) -> Tensor:
        """[T, N, H/2, 2]."""
        return x.view(len(x), self.config.num_attention_heads, -1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (self.low(t.flatten(2)) for t in (q, k, v))
        scores = torch.einsum("snh,lnh->nsl", q, k) / q.shape[-1] ** 0.5
        return self.low(torch.einsum("nsl,lnh->snh", scores.softmax(-1), v)).flatten(1)

    def positions(self, grid: tuple[int, int, int]) -> Tensor:
        """Complex turns [S, 1, H/2]."""
        pairs = self.config.attention_head_dim // 2
        third = self.config.attention_head_dim // 6
        tokens = [
            torch.cat(
                [
                    torch.tensor([10000.0 ** (-i / count) * at for i in range(count)], dtype=torch.float64)
                    for at, count in zip(place, (pairs - 2 * third, third, third), strict=True)
                ]
            )
            for place in ((f, h, w) for f in range(grid[0]) for h in range(grid[1]) for w in range(grid[2]))
        ]
        angles = torch.stack(tokens)[:, None]
        return torch.polar(torch.ones_like(angles), angles)

    def time(self, timestep: Tensor) -> tuple[Tensor, Tensor]:
        half = self.config.freq_dim // 2
        angles = timestep.double()[:, None] * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        at = "condition_embedder.time_embedder."
        hidden = F.silu(self.linear(at + "linear_1", torch.cat([angles.cos(), angles.sin()], 1), low=False))
        embedded = self.linear(at + "linear_2", hidden, low=False)
        return embedded, self.linear("condition_embedder.time_proj", F.silu(embedded), low=False)

    def image(self, tokens: Tensor) -> Tensor:
        at = "condition_embedder.image_embedder."
        if self.config.pos_embed_seq_len is not None:
            tokens = tokens + self.weights[at + "pos_embed"][0]
        x = norm(tokens, 1e-5) * self.weights[at + "norm1.weight"] + self.weights[at + "norm1.bias"]
        x = self.linear(at + "ff.net.2", self.low(F.gelu(self.linear(at + "ff.net.0.proj", x))))
        return norm(x, 1e-5) * self.weights[at + "norm2.weight"] + self.weights[at + "norm2.bias"]

    def linear(self, name: str, x: Tensor, low: bool = True) -> Tensor:
        weight, bias = self.weights[f"{name}.weight"].flatten(1), self.weights[f"{name}.bias"]
        if not low:
            return x @ weight.T + bias
        return self.low(self.low(x) @ self.low(weight).T + self.low(bias))

    def low(self, x: Tensor) -> Tensor:
        return x.to(self.low_dtype).double()


def norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()


def rms(x: Tensor, eps: float = 1e-6) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
