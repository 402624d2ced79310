"""What the LTX-2 transformer is tested against: diffusers with shared weights, and the maths again in plain functions.

diffusers parts from the official code where a stream's timestep is not its sigma, where only one stream is perturbed
and where one is not enabled. ``by_hand`` covers those: one sample after another, in float64, from names and rows of the
checkpoint, sharing nothing with the code under test but its position tables.
"""

import dataclasses
from typing import Any

import torch
from diffusers import LTX2VideoTransformer3DModel
from torch import Tensor, nn

from vgen.models.ltx2.config import TransformerConfig
from vgen.models.ltx2.geometry import Geometry
from vgen.models.ltx2.perturbation import Perturbation
from vgen.models.ltx2.rope import RopeTables
from vgen.models.ltx2.transformer import LTX2Transformer, Stream

GEOMETRY = Geometry(latent_frames=3, latent_height=2, latent_width=3, fps=24.0, audio_tokens=7)
TEXT_TOKENS = 5
BATCH = 2
TOLERANCE = 2e-6
"""Largest error allowed, as a part of the largest value."""

SIGMA = torch.tensor([0.9, 0.421875])
OTHER_SIGMA = torch.tensor([0.3, 0.725])

_FULL_SIZE = TransformerConfig(
    num_layers=48,
    num_attention_heads=32,
    attention_head_dim=128,
    audio_attention_head_dim=64,
    in_channels=128,
    out_channels=128,
    audio_in_channels=128,
    audio_out_channels=128,
    caption_channels=3840,
    norm_eps=1e-6,
    rope_theta=10000.0,
    rope_max_pos=(20.0, 2048.0, 2048.0),
    audio_rope_max_pos=20.0,
    rope_float64=True,
    timestep_scale_multiplier=1000,
    av_timestep_scale_multiplier=1000,
)
RENAMED = {
    "proj_in": "patchify_proj",
    "audio_proj_in": "audio_patchify_proj",
    "time_embed": "adaln_single",
    "audio_time_embed": "audio_adaln_single",
    "prompt_adaln": "prompt_adaln_single",
    "audio_prompt_adaln": "audio_prompt_adaln_single",
    "av_cross_attn_video_scale_shift": "av_ca_video_scale_shift_adaln_single",
    "av_cross_attn_audio_scale_shift": "av_ca_audio_scale_shift_adaln_single",
    "av_cross_attn_video_a2v_gate": "av_ca_a2v_gate_adaln_single",
    "av_cross_attn_audio_v2a_gate": "av_ca_v2a_gate_adaln_single",
    "video_a2v_cross_attn_scale_shift_table": "scale_shift_table_a2v_ca_video",
    "audio_a2v_cross_attn_scale_shift_table": "scale_shift_table_a2v_ca_audio",
    "norm_q": "q_norm",
    "norm_k": "k_norm",
}


def full_size(version: str = "2.0") -> TransformerConfig:
    if version == "2.0":
        return _FULL_SIZE
    return dataclasses.replace(_FULL_SIZE, gated_attention=True, cross_attention_adaln=True, caption_projection=False)


def tiny_config(version: str = "2.0", num_heads: int = 2, **changes: Any) -> TransformerConfig:
    tiny = dataclasses.replace(
        full_size(version),
        num_layers=2,
        num_attention_heads=num_heads,
        attention_head_dim=32,
        audio_attention_head_dim=16,
        in_channels=8,
        out_channels=6,
        audio_in_channels=10,
        audio_out_channels=4,
        caption_channels=48,
    )
    return dataclasses.replace(tiny, **changes)


def diffusers_twin(config: TransformerConfig) -> LTX2VideoTransformer3DModel:
    return LTX2VideoTransformer3DModel(
        in_channels=config.in_channels,
        out_channels=config.out_channels,
        num_attention_heads=config.num_attention_heads,
        attention_head_dim=config.attention_head_dim,
        cross_attention_dim=config.width,
        gated_attn=config.gated_attention,
        cross_attn_mod=config.cross_attention_adaln,
        audio_in_channels=config.audio_in_channels,
        audio_out_channels=config.audio_out_channels,
        audio_num_attention_heads=config.num_attention_heads,
        audio_attention_head_dim=config.audio_attention_head_dim,
        audio_cross_attention_dim=config.audio_width,
        audio_gated_attn=config.gated_attention,
        audio_cross_attn_mod=config.cross_attention_adaln,
        num_layers=config.num_layers,
        norm_eps=config.norm_eps,
        caption_channels=config.caption_channels,
        rope_theta=config.rope_theta,
        rope_double_precision=config.rope_float64,
        rope_type="split",
        timestep_scale_multiplier=config.timestep_scale_multiplier,
        cross_attn_timestep_scale_multiplier=config.av_timestep_scale_multiplier,
        use_prompt_embeddings=config.caption_projection,
        # Of LTX-2.3's config only: a 2.0 model of diffusers ignores spatio-temporal guidance.
        perturbed_attn=config.gated_attention,
    ).eval()


def randomise(module: nn.Module, seed: int = 0) -> None:
    """No parameter keeps a value of 0 or 1 that could hide a missing gain, bias or table."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 2 and "table" not in name:
            parameter.data = noise / parameter.shape[1] ** 0.5
        elif "norm" in name:
            parameter.data = 1 + 0.3 * noise
        else:
            parameter.data = 0.3 * noise


def build(config: TransformerConfig, dtype: torch.dtype = torch.float32) -> LTX2Transformer:
    with torch.device("meta"):
        model = LTX2Transformer(config)
    model.to_empty(device="cpu")
    randomise(model)
    return model.to(dtype).requires_grad_(False).eval()


def build_pair(config: TransformerConfig) -> tuple[LTX2Transformer, LTX2VideoTransformer3DModel]:
    ours, theirs = build(config), diffusers_twin(config)
    state = ours.state_dict()
    names = {name: ".".join(RENAMED.get(part, part) for part in name.split(".")) for name in theirs.state_dict()}
    assert sorted(names.values()) == sorted(state)
    theirs.load_state_dict({name: state[ours_name] for name, ours_name in names.items()})
    return ours, theirs.requires_grad_(False)


def make_streams(
    config: TransformerConfig,
    video_timestep: Tensor,
    audio_timestep: Tensor,
    video_sigma: Tensor | None = None,
    audio_sigma: Tensor | None = None,
    geometry: Geometry = GEOMETRY,
) -> tuple[Stream, Stream]:
    generator = torch.Generator().manual_seed(7)

    def stream(tokens: int, channels: int, width: int, timestep: Tensor, sigma: Tensor | None) -> Stream:
        batch = len(timestep)
        context_width = config.caption_channels if config.caption_projection else width
        return Stream(
            latents=torch.randn(batch, tokens, channels, generator=generator),
            timestep=timestep,
            sigma=timestep.reshape(batch, -1).amax(1) if sigma is None else sigma,
            context=torch.randn(batch, TEXT_TOKENS, context_width, generator=generator),
        )

    return (
        stream(geometry.video_tokens, config.in_channels, config.width, video_timestep, video_sigma),
        stream(geometry.audio_tokens, config.audio_in_channels, config.audio_width, audio_timestep, audio_sigma),
    )


def per_token(sigma: Tensor, tokens: int, seed: int) -> Tensor:
    """Timesteps as image conditioning makes them: sigma times a mask between 0 and 1, some tokens clean."""
    mask = torch.rand(len(sigma), tokens, generator=torch.Generator().manual_seed(seed))
    mask[:, ::4] = 0.0
    return sigma[:, None] * mask


def item(stream: Stream, index: int) -> Stream:
    """The stream of one sample of the batch."""
    tensors = {
        field.name: value[index : index + 1]
        for field in dataclasses.fields(Stream)
        if isinstance(value := getattr(stream, field.name), Tensor)
    }
    return dataclasses.replace(stream, **tensors)


def run_ours(
    model: LTX2Transformer,
    video: Stream | None,
    audio: Stream | None,
    perturbations: tuple[Perturbation, ...] = (),
    geometry: Geometry = GEOMETRY,
) -> tuple[Any, Any]:
    stream = video or audio
    assert stream is not None
    rope = model.rope_tables(geometry, "cpu", stream.latents.dtype)
    with torch.no_grad():
        return model(video, audio, rope, perturbations)


def run_diffusers(model: LTX2VideoTransformer3DModel, video: Stream, audio: Stream, **options: Any) -> tuple[Any, Any]:
    with torch.no_grad():
        out = model(
            hidden_states=video.latents,
            audio_hidden_states=audio.latents,
            encoder_hidden_states=video.context,
            audio_encoder_hidden_states=audio.context,
            timestep=video.timestep * 1000,
            audio_timestep=audio.timestep * 1000,
            sigma=video.sigma * 1000,
            audio_sigma=audio.sigma * 1000,
            num_frames=GEOMETRY.latent_frames,
            height=GEOMETRY.latent_height,
            width=GEOMETRY.latent_width,
            fps=GEOMETRY.fps,
            audio_num_frames=GEOMETRY.audio_tokens,
            **options,
        )
    return out.sample, out.audio_sample


def relative_error(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape
    return float((actual - expected).abs().max() / expected.abs().max())


def by_hand(
    model: LTX2Transformer,
    video: Stream | None,
    audio: Stream | None,
    perturbations: tuple[Perturbation, ...] = (),
    geometry: Geometry = GEOMETRY,
) -> tuple[Any, Any]:
    """Velocities of both streams, fp64; timesteps are [B] or per token, contexts tensors."""
    stream = video or audio
    assert stream is not None
    samples = [
        _Sample(
            model,
            None if video is None else item(video, index),
            None if audio is None else item(audio, index),
            model.rope_tables(geometry, "cpu", torch.float32),
            perturbations[index] if perturbations else Perturbation(),
        ).velocities()
        for index in range(len(stream.latents))
    ]
    return tuple(None if out[0] is None else torch.stack(out) for out in zip(*samples, strict=True))


class _Sample:
    """One sample: [T, D] tokens, and a prefix of names per modality."""

    def __init__(
        self,
        model: LTX2Transformer,
        video: Stream | None,
        audio: Stream | None,
        rope: RopeTables,
        perturbation: Perturbation,
    ) -> None:
        self.config = model.config
        self.weights = {name: tensor.double() for name, tensor in model.state_dict().items()}
        self.streams = {"": video, "audio_": audio}
        self.ropes = {"": rope.video, "audio_": rope.audio}
        self.cross_ropes = {"": rope.video_cross, "audio_": rope.audio_cross}
        self.skipped = dataclasses.asdict(perturbation)

    def velocities(self) -> tuple[Tensor | None, Tensor | None]:
        tokens: dict[str, Tensor | None] = {}
        for kind, stream in self.streams.items():
            tokens[kind] = None if stream is None else self.linear(f"{kind}patchify_proj", stream.latents[0].double())
        for index in range(self.config.num_layers):
            tokens = self.block(f"transformer_blocks.{index}.", index, tokens)
        return self.head("", tokens[""]), self.head("audio_", tokens["audio_"])

    def block(self, at: str, index: int, tokens: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
        tokens = dict(tokens)
        running = [kind for kind, stream in self.streams.items() if stream is not None and stream.enabled]
        for kind in running:
            x, table = tokens[kind], self.weights[f"{at}{kind}scale_shift_table"]
            assert x is not None
            rows = self.timestep_rows(f"{kind}adaln_single", kind, table)
            bypass = self.skips("skip_video_self" if kind == "" else "skip_audio_self", index)
            x_in = rms(x) * (1 + rows[1]) + rows[0]
            x = x + rows[2] * self.attention(f"{at}{kind}attn1", x_in, x_in, self.ropes[kind], self.ropes[kind], bypass)
            tokens[kind] = x + self.text(at, kind, rms(x), rows)
        before = dict(tokens)
        for kind, other, name, skip, first in (
            ("", "audio_", "audio_to_video_attn", "skip_audio_to_video", 0),
            ("audio_", "", "video_to_audio_attn", "skip_video_to_audio", 2),
        ):
            x = before[kind]
            if kind in running and before[other] is not None and not self.skips(skip, index):
                assert x is not None
                gate = self.cross_gate(at, kind, other)
                out = self.attention(
                    f"{at}{name}",
                    self.cross_tokens(at, kind, before, first),
                    self.cross_tokens(at, other, before, first),
                    self.cross_ropes[kind],
                    self.cross_ropes[other],
                )
                tokens[kind] = x + gate * out
        for kind in running:
            x, table = tokens[kind], self.weights[f"{at}{kind}scale_shift_table"]
            assert x is not None
            rows = self.timestep_rows(f"{kind}adaln_single", kind, table)
            inner = self.linear(f"{at}{kind}ff.net.0.proj", rms(x) * (1 + rows[4]) + rows[3])
            inner = nn.functional.gelu(inner, approximate="tanh")
            tokens[kind] = x + rows[5] * self.linear(f"{at}{kind}ff.net.2", inner)
        return tokens

    def text(self, at: str, kind: str, normed: Tensor, rows: list[Tensor]) -> Tensor:
        stream = self.streams[kind]
        assert stream is not None
        assert isinstance(stream.context, Tensor)
        text = stream.context[0].double()
        if self.config.caption_projection:
            hidden = self.linear(f"{kind}caption_projection.linear_1", text)
            text = self.linear(f"{kind}caption_projection.linear_2", nn.functional.gelu(hidden, approximate="tanh"))
        if not self.config.cross_attention_adaln:
            return self.attention(f"{at}{kind}attn2", normed, text)
        prompt = self.adaln(f"{kind}prompt_adaln_single", stream.sigma)[0][0]
        shift, scale = self.weights[f"{at}{kind}prompt_scale_shift_table"] + prompt.view(2, -1)
        return rows[8] * self.attention(
            f"{at}{kind}attn2", normed * (1 + rows[7]) + rows[6], text * (1 + scale) + shift
        )

    def cross_tokens(self, at: str, kind: str, tokens: dict[str, Tensor | None], first: int) -> Tensor:
        modality, x = ("audio" if kind else "video"), tokens[kind]
        assert x is not None
        table = self.weights[f"{at}scale_shift_table_a2v_ca_{modality}"][:4]
        rows = self.timestep_rows(f"av_ca_{modality}_scale_shift_adaln_single", kind, table)
        return rms(x) * (1 + rows[first]) + rows[first + 1]

    def cross_gate(self, at: str, kind: str, other: str) -> Tensor:
        stream = self.streams[other]
        assert stream is not None
        modality, direction = ("audio", "v2a") if kind else ("video", "a2v")
        factor = self.config.av_timestep_scale_multiplier / self.config.timestep_scale_multiplier
        gate = self.adaln(f"av_ca_{direction}_gate_adaln_single", stream.sigma * factor)[0][0]
        return self.weights[f"{at}scale_shift_table_a2v_ca_{modality}"][4] + gate

    def head(self, kind: str, x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        centred = x - x.mean(-1, keepdim=True)
        normed = centred / (centred.square().mean(-1, keepdim=True) + self.config.norm_eps).sqrt()
        embedded = self.adaln(f"{kind}adaln_single", self.timesteps(kind))[1]
        shift, scale = (row + embedded for row in self.weights[f"{kind}scale_shift_table"])
        return self.linear(f"{kind}proj_out", normed * (1 + scale) + shift)

    def attention(
        self,
        name: str,
        x: Tensor,
        context: Tensor,
        rope: tuple[Tensor, Tensor] | None = None,
        context_rope: tuple[Tensor, Tensor] | None = None,
        bypass: bool = False,
    ) -> Tensor:
        heads = self.config.num_attention_heads
        q, k, v = (
            self.linear(f"{name}.to_{part}", source) for part, source in (("q", x), ("k", context), ("v", context))
        )
        q, k = (rms(t) * self.weights[f"{name}.{part}_norm.weight"] for part, t in (("q", q), ("k", k)))
        q, k, v = (t.view(len(t), heads, -1) for t in (q, k, v))
        if rope is not None and context_rope is not None:
            q, k = turned(q, rope), turned(k, context_rope)
        out = v
        if not bypass:
            scores = torch.einsum("snh,lnh->nsl", q, k) / q.shape[-1] ** 0.5
            out = torch.einsum("nsl,lnh->snh", scores.softmax(-1), v)
        if self.config.gated_attention:
            out = out * (2 / (1 + (-self.linear(f"{name}.to_gate_logits", x)).exp()))[..., None]
        return self.linear(f"{name}.to_out.0", out.flatten(1))

    def timesteps(self, kind: str) -> Tensor:
        stream = self.streams[kind]
        assert stream is not None
        return stream.timestep[0].expand(stream.latents.shape[1])

    def timestep_rows(self, name: str, kind: str, table: Tensor) -> list[Tensor]:
        """One [T, D] per row of ``table``."""
        modulation = self.adaln(name, self.timesteps(kind))[0].view(-1, *table.shape)
        return [modulation[:, row] + table[row] for row in range(len(table))]

    def adaln(self, name: str, sigma: Tensor) -> tuple[Tensor, Tensor]:
        exponents = -torch.log(torch.tensor(10000.0)) * torch.arange(128) / 128
        # In fp32 by definition: an angle reaches 1000, where fp32 and fp64 are 6e-5 apart.
        angles = (sigma * self.config.timestep_scale_multiplier)[:, None] * exponents.exp()
        hidden = self.linear(
            f"{name}.emb.timestep_embedder.linear_1", torch.cat([angles.cos(), angles.sin()], 1).double()
        )
        embedded = self.linear(f"{name}.emb.timestep_embedder.linear_2", nn.functional.silu(hidden))
        return self.linear(f"{name}.linear", nn.functional.silu(embedded)), embedded

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def skips(self, name: str, index: int) -> bool:
        return self.skipped[name] == "all" or index in self.skipped[name]


def rms(x: Tensor, eps: float = 1e-6) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def turned(x_TNH: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = (table[0].transpose(0, 1).double() for table in rope)
    first, second = x_TNH.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
