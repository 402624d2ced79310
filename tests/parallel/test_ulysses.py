"""Ulysses over groups of 2, 3 and 4 ranks against the same model on one rank."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ranks import run_ranks
from vgen.models.attention import sdpa
from vgen.models.ltx2.config import TransformerConfig
from vgen.models.ltx2.geometry import Geometry as LTX2Geometry
from vgen.models.ltx2.perturbation import Perturbation
from vgen.models.ltx2.plan import PLAN as LTX2_PLAN
from vgen.models.ltx2.transformer import LTX2Transformer
from vgen.models.ltx2.transformer import Stream as LTX2Stream
from vgen.models.plan import Plan
from vgen.models.wan.config import WanTransformerConfig
from vgen.models.wan.geometry import Geometry as WanGeometry
from vgen.models.wan.plan import PLAN as WAN_PLAN
from vgen.models.wan.transformer import Stream as WanStream
from vgen.models.wan.transformer import WanTransformer
from vgen.parallel.ulysses import _Ulysses, apply_ulysses

HEADS, LAYERS, BATCH, TEXT_TOKENS = 12, 2, 2, 5
SIZES = (2, 3, 4)
BOUNDS = {torch.float32: 1e-6, torch.float64: 1e-14}
"""Largest error allowed, as a part of the largest value: matrices of other sizes are summed in another order. The
largest found were 5.2e-7 and 6e-16."""

SIGMA = torch.tensor([0.9, 0.421875])

LTX2_GRID = LTX2Geometry(latent_frames=3, latent_height=2, latent_width=3, fps=24.0, audio_tokens=7)  # 18 tokens
WAN_GRID = WanGeometry(latent_frames=3, latent_height=4, latent_width=6)  # 18 tokens

LTX2_2_0 = TransformerConfig(
    num_layers=LAYERS,
    num_attention_heads=HEADS,
    attention_head_dim=8,
    audio_attention_head_dim=4,
    in_channels=8,
    out_channels=6,
    audio_in_channels=10,
    audio_out_channels=4,
    caption_channels=48,
    norm_eps=1e-6,
    rope_theta=10000.0,
    rope_max_pos=(20.0, 2048.0, 2048.0),
    audio_rope_max_pos=20.0,
    rope_float64=True,
    timestep_scale_multiplier=1000,
    av_timestep_scale_multiplier=1000,
)
LTX2_2_3 = dataclasses.replace(LTX2_2_0, gated_attention=True, cross_attention_adaln=True, caption_projection=False)

WAN_T2V = WanTransformerConfig(
    num_attention_heads=HEADS,
    attention_head_dim=16,
    in_channels=16,
    out_channels=16,
    text_dim=24,
    freq_dim=256,
    ffn_dim=40,
    num_layers=LAYERS,
    rope_max_seq_len=32,
)
WAN_TI2V = dataclasses.replace(WAN_T2V, in_channels=48, out_channels=48)
WAN_I2V = dataclasses.replace(WAN_T2V, in_channels=36, image_dim=8, added_kv_proj_dim=HEADS * 16)


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def build(config: Any, dtype: torch.dtype) -> Any:
    return copy.deepcopy(built(config, dtype))


@cache
def built(config: Any, dtype: torch.dtype) -> Any:
    """No parameter keeps a value of 0 or 1 that could hide a missing gain, bias or table."""
    with torch.device("meta"):
        model = LTX2Transformer(config) if isinstance(config, TransformerConfig) else WanTransformer(config)
    model.to_empty(device="cpu")
    for seed, (name, parameter) in enumerate(model.named_parameters()):
        values = noise(seed, *parameter.shape)
        if name.endswith("weight"):
            values = 1 + 0.3 * values if "norm" in name else values / parameter[0].numel() ** 0.5
        else:
            values = 0.3 * values
        parameter.data = values
    return model.to(dtype).requires_grad_(False).eval()


@dataclass(frozen=True)
class LTX2Case:
    """``timesteps``: one per sample, one per token, or rows of three levels."""

    config: TransformerConfig = LTX2_2_0
    geometry: LTX2Geometry = LTX2_GRID
    video: bool = True
    audio: bool = True
    timesteps: str = "sample"
    enabled: bool = True
    prepared: bool = False
    perturbations: tuple[Perturbation, ...] = ()
    plan: Plan = LTX2_PLAN

    def inputs(self, model: LTX2Transformer, dtype: torch.dtype, seed: int = 0) -> tuple[Any, ...]:
        def stream(kind: Any, tokens: int, channels: int, width: int, timestep: Tensor, rows: Tensor | None) -> Any:
            wide = self.config.caption_channels if self.config.caption_projection else width
            latents = noise(seed + tokens, BATCH, tokens, channels).to(dtype)
            text: Any = noise(seed + wide, BATCH, TEXT_TOKENS, wide).to(dtype)
            text = model.prepare_text(text, kind) if self.prepared else text
            enabled = self.enabled or kind == "audio"
            return LTX2Stream(latents, timestep, SIGMA, text, rows, enabled)

        config, tokens = self.config, self.geometry.video_tokens
        timestep, rows = timesteps(self.timesteps, SIGMA, tokens)
        video = stream("video", tokens, config.in_channels, config.width, timestep, rows) if self.video else None
        sound = self.geometry.audio_tokens
        audio = stream("audio", sound, config.audio_in_channels, config.audio_width, SIGMA, None)
        rope = model.rope_tables(self.geometry, "cpu", dtype)
        return video, audio if self.audio else None, rope, self.perturbations

    def collectives(self) -> Counter[str]:
        """Of one forward: two per self-attention that runs, two per attention to the video, one at the end."""
        if not self.video:
            return Counter()
        skipped = sum(all(block in one.skip_video_self for one in self.perturbations) for block in range(LAYERS))
        own = LAYERS - skipped if self.perturbations else LAYERS
        own, other = own if self.enabled else 0, LAYERS if self.audio else 0
        return Counter(all_to_all=2 * own + other, all_gather=other + 1)


@dataclass(frozen=True)
class WanCase:
    config: WanTransformerConfig = WAN_T2V
    geometry: WanGeometry = WAN_GRID
    timesteps: str = "sample"
    prepared: bool = False
    plan: Plan = WAN_PLAN

    def inputs(self, model: WanTransformer, dtype: torch.dtype, seed: int = 0) -> tuple[Any, ...]:
        config, tokens = self.config, self.geometry.video_tokens
        timestep, rows = timesteps(self.timesteps, 1000 * SIGMA, tokens)
        image = None if config.image_dim is None else noise(seed + 2, BATCH, 7, config.image_dim).to(dtype)
        context: Any = noise(seed + 1, BATCH, TEXT_TOKENS, config.text_dim).to(dtype)
        if self.prepared:
            context, image = model.prepare_text(context, image), None
        latents = noise(seed, BATCH, tokens, config.in_channels * 4).to(dtype)
        return WanStream(latents, timestep, context, image, rows), model.rope_tables(self.geometry, "cpu")

    def collectives(self) -> Counter[str]:
        return Counter(all_to_all=2 * LAYERS, all_gather=1)


def timesteps(kind: str, sigma: Tensor, tokens: int) -> tuple[Tensor, Tensor | None]:
    rows = torch.randint(3, (BATCH, tokens), generator=torch.Generator().manual_seed(3))
    levels = sigma[:, None] * torch.tensor([0.0, 0.3, 1.0])
    return {"sample": (sigma, None), "token": (levels.gather(1, rows), None), "rows": (levels, rows)}[kind]


STG = (Perturbation(skip_video_self=(0, 1), skip_audio_to_video="all"), Perturbation(skip_video_self=(1,)))
KEYFRAMES = dataclasses.replace(LTX2_GRID, keyframes=(8,))  # 24 tokens
STILL = LTX2Geometry(latent_frames=1, latent_height=5, latent_width=7, fps=24.0, audio_tokens=0)  # 35 tokens
FEW = LTX2Geometry(latent_frames=1, latent_height=1, latent_width=2, fps=24.0, audio_tokens=5)  # 2 tokens

CASES: dict[str, LTX2Case | WanCase] = {
    "LTX-2.0": LTX2Case(),
    "LTX-2.0, no audio, prepared text": LTX2Case(audio=False, prepared=True),
    "LTX-2.0, no video": LTX2Case(video=False),
    "LTX-2.0, video not enabled": LTX2Case(enabled=False),
    "LTX-2.0, fewer tokens than ranks": LTX2Case(geometry=FEW),
    "LTX-2.0, keyframes and rows": LTX2Case(geometry=KEYFRAMES, timesteps="rows"),
    "LTX-2.0, one latent frame": LTX2Case(geometry=STILL, audio=False),
    "LTX-2.3": LTX2Case(LTX2_2_3),
    "LTX-2.3, timestep per token": LTX2Case(LTX2_2_3, timesteps="token"),
    "LTX-2.3, rows and perturbations": LTX2Case(LTX2_2_3, timesteps="rows", perturbations=STG),
    "Wan 2.1 T2V": WanCase(),
    "Wan 2.1 T2V, one latent frame": WanCase(geometry=WanGeometry(1, 10, 14), prepared=True),  # 35 tokens
    "Wan 2.1 I2V": WanCase(WAN_I2V),
    "Wan 2.1 I2V, prepared text": WanCase(WAN_I2V, prepared=True),
    "Wan 2.2 TI2V, rows": WanCase(WAN_TI2V, timesteps="rows"),
    "Wan 2.2 TI2V, timestep per token": WanCase(WAN_TI2V, timesteps="token"),
}


OPERATORS = {"alltoall_base_": "all_to_all", "_allgather_base_": "all_gather"}


class Collectives(TorchDispatchMode):
    """Counts what reaches the process groups."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::")
            self.counts[OPERATORS.get(name, name)] += 1
        return func(*args, **(kwargs or {}))


def run(model: nn.Module, inputs: tuple[Any, ...]) -> list[Tensor]:
    with torch.no_grad():
        output = model(*inputs)
    return [one for one in (output if isinstance(output, tuple) else (output,)) if one is not None]


@dataclass(frozen=True)
class Result:
    """``error``: the largest, as a part of the largest value. ``outputs``: of the parallel model."""

    error: float
    collectives: Counter[str]
    outputs: list[Tensor]
    poisoned: list[Tensor]
    """The outputs again where the rows that fill up are NaN."""


def largest_error(actual: list[Tensor], expected: list[Tensor]) -> float:
    assert [one.shape for one in actual] == [one.shape for one in expected]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(actual, expected, strict=True))


@cache
def on_one_rank(case: LTX2Case | WanCase, dtype: torch.dtype) -> list[Tensor]:
    model = built(case.config, dtype)
    return run(model, case.inputs(model, dtype))


def compare(case: LTX2Case | WanCase, dtype: torch.dtype, group: dist.ProcessGroup) -> Result:
    expected, model = on_one_rank(case, dtype), build(case.config, dtype)
    apply_ulysses(model, case.plan, group)
    inputs = case.inputs(model, dtype)
    with Collectives() as collectives:
        outputs = run(model, inputs)
    part = _Ulysses._part
    try:
        _Ulysses._part = with_nan(part)  # type: ignore[method-assign]
        poisoned = run(model, inputs)
    finally:
        _Ulysses._part = part  # type: ignore[method-assign]
    return Result(largest_error(outputs, expected), collectives.counts, outputs, poisoned)


def with_nan(part: Any) -> Any:
    def poisoned(self: _Ulysses, x: Tensor, dim: int) -> Tensor:
        out: Tensor = part(self, x, dim)
        length = out.shape[dim]
        true = min(max(self.tokens - self.group.rank() * length, 0), length)
        if out.is_floating_point():
            out.narrow(dim, true, length - true).fill_(float("nan"))
        return out

    return poisoned


def all_cases(group: dist.ProcessGroup) -> dict[tuple[str, torch.dtype], Result]:
    dtypes: dict[type, tuple[torch.dtype, ...]] = {
        LTX2Case: (torch.float32, torch.float64),
        WanCase: (torch.float32,),  # has parts in fp32 whatever the dtype of the model
    }
    return {(name, dtype): compare(case, dtype, group) for name, case in CASES.items() for dtype in dtypes[type(case)]}


def shapes_of_attention(group: dist.ProcessGroup) -> list[tuple[torch.Size, ...]]:
    """What the kernels of the attentions to the video get where 18 tokens do not divide."""
    seen: list[tuple[torch.Size, ...]] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        seen.append((q.shape, k.shape, v.shape))
        return sdpa(q, k, v, mask)

    case, model = LTX2Case(), build(LTX2_2_0, torch.float32)
    for block in model.transformer_blocks:
        block.attn1.attend = block.video_to_audio_attn.attend = attend
    apply_ulysses(model, case.plan, group)
    run(model, case.inputs(model, torch.float32))
    return seen


def geometries_in_turn(group: dist.ProcessGroup, seed: int) -> float:
    plain, model = built(LTX2_2_0, torch.float32), build(LTX2_2_0, torch.float32)
    apply_ulysses(model, LTX2_PLAN, group)
    cases = [LTX2Case(), LTX2Case(geometry=KEYFRAMES, timesteps="rows"), LTX2Case(video=False), LTX2Case()]
    return max(
        largest_error(
            run(model, case.inputs(model, torch.float32, seed)), run(plain, case.inputs(plain, torch.float32, seed))
        )
        for case in cases
    )


def message(call: Callable[[], Any]) -> str:
    with pytest.raises(ValueError) as caught:
        call()
    return str(caught.value)


def refusals(group: dist.ProcessGroup) -> dict[str, str]:
    case, model = LTX2Case(), build(LTX2_2_0, torch.float32)
    apply_ulysses(model, LTX2_PLAN, group)
    video, audio, _, _ = case.inputs(model, torch.float32)
    # One token more in the tables makes parts of the same length.
    longer = LTX2Geometry(latent_frames=1, latent_height=1, latent_width=19, fps=24.0, audio_tokens=7)
    rope = model.rope_tables(longer, "cpu", torch.float32)
    six = build(dataclasses.replace(LTX2_2_0, num_attention_heads=6), torch.float32)
    q = torch.zeros(1, HEADS, 5, 8)
    return {
        "heads": message(lambda: apply_ulysses(six, LTX2_PLAN, group)),
        "tokens": message(lambda: model(video, audio, rope)),
        "mask": message(lambda: model.transformer_blocks[0].attn1.attend(q, q, q, torch.ones(5, 5))),
    }


def everything() -> dict[Any, Any]:
    """All in one start of four ranks: groups of the first 2, 3 and 4 of them, and of the last 2 besides."""
    groups = {size: dist.new_group(list(range(size))) for size in SIZES}
    last_two = dist.new_group([2, 3])
    rank = dist.get_rank()
    pair = groups[2] if rank < 2 else last_two
    results: dict[Any, Any] = {size: all_cases(group) for size, group in groups.items() if rank < size}
    results["turns"] = geometries_in_turn(pair, seed=100 * (rank // 2))
    results["shapes"] = shapes_of_attention(groups[4])
    results["refusals"] = refusals(groups[4])
    return results


@pytest.fixture(scope="module")
def by_rank() -> list[dict[Any, Any]]:
    return run_ranks(4, everything)


@pytest.mark.parametrize("size", SIZES)
def test_equals_one_rank(by_rank: list[dict[Any, Any]], size: int) -> None:
    for result in by_rank[:size]:
        for (name, dtype), one in result[size].items():
            bound = BOUNDS[dtype] if one.collectives else 0
            assert one.error <= bound, (name, dtype, one.error)


@pytest.mark.parametrize("size", SIZES)
def test_every_rank_has_the_same_bits(by_rank: list[dict[Any, Any]], size: int) -> None:
    for result in by_rank[1:size]:
        for key, one in by_rank[0][size].items():
            assert all(map(torch.equal, one.outputs, result[size][key].outputs)), key


@pytest.mark.parametrize("size", SIZES)
def test_the_number_of_collectives(by_rank: list[dict[Any, Any]], size: int) -> None:
    for result in by_rank[:size]:
        for (name, _), one in result[size].items():
            assert one.collectives == CASES[name].collectives(), name


@pytest.mark.parametrize("size", SIZES)
def test_rows_that_fill_up_change_nothing(by_rank: list[dict[Any, Any]], size: int) -> None:
    for result in by_rank[:size]:
        for key, one in result[size].items():
            assert all(map(torch.equal, one.outputs, one.poisoned)), key


def test_kernels_see_all_true_tokens_of_some_heads(by_rank: list[dict[Any, Any]]) -> None:
    own = ((BATCH, 3, 20, 8), (BATCH, 3, 18, 8), (BATCH, 3, 18, 8))
    to_audio = ((BATCH, 3, 7, 4), (BATCH, 3, 18, 4), (BATCH, 3, 18, 4))

    assert [result["shapes"] for result in by_rank] == [[own, to_audio] * LAYERS] * 4


def test_groups_side_by_side_and_geometries_in_turn(by_rank: list[dict[Any, Any]]) -> None:
    assert max(result["turns"] for result in by_rank) <= BOUNDS[torch.float32]


def test_refusals(by_rank: list[dict[Any, Any]]) -> None:
    for result in by_rank:
        assert result["refusals"] == {
            "heads": "ulysses_size=4 does not divide the 6 heads of this model; use one of 1, 2, 3, 6",
            "tokens": "the video has 18 tokens and the position tables 19; "
            "build the tables from the geometry of these latents",
            "mask": "an attention that is spread over ranks got a mask of (5, 5), which would be of one rank's tokens "
            "only; use ulysses_size=1 where tokens are masked",
        }


def test_no_group_changes_nothing() -> None:
    model = build(LTX2_2_0, torch.float32)
    apply_ulysses(model, LTX2_PLAN, None)

    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert all(block.attn1.attend is sdpa for block in model.transformer_blocks)


def test_56700_tokens_on_8_ranks() -> None:
    """720x1280x117 of Wan 2.1 or so: 7087.5 tokens a rank, so the last one repeats four."""
    tokens = torch.arange(56700).unsqueeze(0)
    parts = []
    for rank in range(8):
        group: Any = SimpleNamespace(size=lambda: 8, rank=lambda rank=rank: rank)
        ulysses = _Ulysses(WAN_PLAN, inspect.signature(WanTransformer.forward), group)
        ulysses.tokens = 56700
        parts.append(ulysses._part(tokens, 1))
    assert [part.shape[1] for part in parts] == [7088] * 8
    assert torch.equal(torch.cat(parts, dim=1)[:, :56700], tokens)
    assert parts[-1][0, -4:].tolist() == [56699] * 4
