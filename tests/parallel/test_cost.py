"""The cost model against what BENCHMARKS.md and torch's FLOP counter say, and against numbers worked out by hand."""

import random
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from torch.utils.flop_counter import FlopCounterMode

from tests.architectures import architecture
from vgen import app
from vgen.models.ltx2.geometry import Geometry
from vgen.models.ltx2.transformer import LTX2Transformer, Stream
from vgen.models.wan import config as wan_config
from vgen.models.wan.geometry import Geometry as WanGeometry
from vgen.models.wan.transformer import Stream as WanStream
from vgen.models.wan.transformer import WanTransformer
from vgen.parallel.cost import (
    H200,
    MIB,
    Decode,
    Message,
    Op,
    Part,
    Sizes,
    Tokens,
    Workload,
    calibrate,
    decode_parts,
    ltx2_decode,
    ltx2_pass,
    predict_plan,
    sent_bytes,
    step_parts,
    wan_decode,
    wan_pass,
)
from vgen.parallel.halo import choose_axis
from vgen.parallel.plans import ParallelPlan
from vgen.parallel.tiles import TileSettings

LTX2_TOKENS = Tokens(15360, 1024, 126)
WITHIN = 0.1
"""Of measured figures, all with the same constants."""


@cache
def wan(model: str) -> wan_config.WanArchitecture:
    with initialize_config_dir(app.conf_dir(), version_base="1.3"):
        sizes: Any = OmegaConf.to_container(compose("config", [f"model={model}"]).model.architecture, resolve=True)
    return wan_config.architecture(sizes)


def ltx2_workload(model: str = "ltx2", **changes: Any) -> Workload:
    """121 x 768 x 1280 with all guidance."""
    sizes = architecture(model)
    workload = Workload(
        pass_parts=lambda ranks: ltx2_pass(sizes.transformer, LTX2_TOKENS, ranks),
        velocity_bytes=2 * (15360 + 126) * 128,
        passes=4,
        steps=40,
        prompts=1,
        layers=lambda size: ltx2_decode(sizes.video_decoder, size),
        chunks=1,
        latents=(16, 24, 40),
        clip_bytes=2 * 3 * 121 * 768 * 1280,
        axis="auto",
        tiles=TileSettings(),
    )
    return replace(workload, **changes)


def wan_workload(model: str, tokens: int, latents: Sizes, **changes: Any) -> Workload:
    sizes = wan(model)
    space = sizes.vae.scale_factor_spatial
    frames, height, width = latents
    workload = Workload(
        pass_parts=lambda ranks: wan_pass(sizes.transformer, Tokens(tokens, 512), ranks),
        velocity_bytes=4 * sizes.vae.z_dim * frames * height * width,
        passes=2,
        steps=50,
        prompts=1,
        layers=lambda size: wan_decode(sizes.vae, size),
        chunks=frames,
        latents=latents,
        clip_bytes=2 * 3 * (4 * frames - 3) * height * width * space**2,
        axis="auto",
        tiles=TileSettings(512, 64, None, 0, (4, space, space)),
    )
    return replace(workload, **changes)


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "ltx2": ltx2_workload,
    "ltx2_3": lambda: ltx2_workload("ltx2_3"),
    "wan": lambda: wan_workload("wan", 27280, (31, 44, 80)),
    "wan 81 frames": lambda: wan_workload("wan", 18480, (21, 44, 80)),
    "wan22_a14b_t2v": lambda: wan_workload("wan22_a14b_t2v", 75600, (21, 90, 160)),
    "wan21_t2v_1_3b": lambda: wan_workload("wan21_t2v_1_3b", 32760, (21, 60, 104)),
}


def pass_ms(model: str, graph: bool = False) -> float:
    return 1000 * H200.seconds(WORKLOADS[model]().pass_parts(1), 0.0 if graph else H200.dispatch_s)


def decode_ms(workload: Workload, decode: Decode, ranks: int = 1) -> float:
    return 1000 * predict_plan(ParallelPlan(vae_size=ranks), workload, decode).decode_s


# ---------------------------------------------------------------- one GPU, as measured


@pytest.mark.parametrize(
    ("model", "measured_ms"),
    [("ltx2", 1082), ("ltx2_3", 1138), ("wan", 1018), ("wan22_a14b_t2v", 11945), ("wan21_t2v_1_3b", 594)],
)
def test_a_pass_takes_what_was_measured(model: str, measured_ms: float) -> None:
    assert pass_ms(model) == pytest.approx(measured_ms, rel=WITHIN)


@pytest.mark.parametrize(
    ("model", "measured_s"),
    [("ltx2", 4.18), ("ltx2_3", 4.37), ("wan", 2.04), ("wan22_a14b_t2v", 24.1), ("wan21_t2v_1_3b", 1.18)],
)
def test_a_guided_step_takes_what_was_measured(model: str, measured_s: float) -> None:
    assert predict_plan(ParallelPlan(), WORKLOADS[model](), "whole").step_s == pytest.approx(measured_s, rel=WITHIN)


@pytest.mark.parametrize(
    ("model", "decode", "measured_ms"),
    [
        ("ltx2", "whole", 354), ("ltx2", "tile", 714), ("ltx2_3", "whole", 595), ("ltx2_3", "tile", 1136),
        ("wan 81 frames", "whole", 2809), ("wan22_a14b_t2v", "whole", 2839),
    ],
)  # fmt: skip
def test_a_decode_takes_what_was_measured(model: str, decode: Decode, measured_ms: float) -> None:
    assert decode_ms(WORKLOADS[model](), decode) == pytest.approx(measured_ms, rel=WITHIN)


@pytest.mark.parametrize(
    ("op", "measured_tflops"),
    [
        (Op("gemm", 0, 1, 2 * 15360 * 4096**2, (2 * 15360 * 4096**2,)), 690),
        (Op("gemm", 0, 1, 2 * 27280 * 3072 * 14336, (2 * 27280 * 3072 * 14336,)), 762),
        (Op("gemm", 0, 1, 2 * 1920 * 4096**2, (2 * 1920 * 4096**2,)), 499),
        (Op("attention", 0, 1, 4 * 32 * 15360**2 * 128, (4 * 32 * 15360**2 * 128,)), 696),
        (Op("attention", 0, 1, 4 * 40 * 32760**2 * 128, (4 * 40 * 32760**2 * 128,)), 570),
        (Op("convolution", 0, 1, 54 * 512**2 * 31 * 48 * 80, (512, 512)), 705),
        (Op("convolution", 0, 1, 54 * 128 * 48 * 121 * 192 * 320, (128, 48)), 297),
        (Op("convolution", 0, 1, 54 * 160**2 * 81 * 352 * 640, (160, 160)), 357),
    ],
)
def test_the_kernels_run_at_the_measured_rates(op: Op, measured_tflops: float) -> None:
    assert op.flops / H200.seconds([Part((op,))]) / 1e12 == pytest.approx(measured_tflops, rel=0.1)


@pytest.mark.parametrize(
    ("message", "measured_ms"),
    [
        (Message("all_to_all", 8 * MIB), 0.055), (Message("all_to_all", 128 * MIB), 0.476),
        (Message("reduce", 256 * MIB), 0.886), (Message("reduce", 1024 * MIB), 3.25),
        (Message("send_recv", MIB), 0.075), (Message("send_recv", 64 * MIB), 0.273),
        (Message("send_recv", 40 * MIB), (0.088 + 0.273) / 2),
    ],
)  # fmt: skip
def test_messages_take_the_measured_times(message: Message, measured_ms: float) -> None:
    assert 1000 * H200.seconds([Part(messages=(message,))]) == pytest.approx(measured_ms, rel=0.01)
    twice = replace(message, times=2)
    assert H200.seconds([Part(messages=(twice,))]) == pytest.approx(2 * measured_ms / 1000, rel=0.01)


def test_small_messages_and_large_ones_go_on_in_straight_lines() -> None:
    seconds = [H200.seconds([Part(messages=(Message("all_to_all", size * MIB),))]) for size in (0, 8, 128, 248)]
    assert 0 < seconds[0] < seconds[1]
    assert seconds[3] - seconds[2] == pytest.approx(seconds[2] - seconds[1])


# ---------------------------------------------------------------- counted work


@pytest.mark.parametrize(
    ("layers", "tflop"),
    [
        (lambda: ltx2_decode(architecture("ltx2").video_decoder, (16, 24, 40)), 150.5),
        (lambda: wan_decode(wan_config.VAE_2_2, (21, 44, 80)), 1347.6),
        (lambda: wan_decode(wan_config.VAE_2_1, (21, 60, 104)), 275.4),
    ],
)
def test_the_decoders_work_is_what_torch_counted(layers: Callable[[], Any], tflop: float) -> None:
    assert sum(op.flops for layer in layers() for op in layer.ops) / 1e12 == pytest.approx(tflop, rel=0.003)


@pytest.mark.parametrize("model", ["ltx2", "ltx2_3"])
def test_the_work_of_an_ltx2_block_is_what_torch_counts(model: str) -> None:
    config, tokens = architecture(model).transformer, Tokens(60, 128, 7)

    def measured(layers: int) -> int:
        with torch.device("meta"):
            transformer = LTX2Transformer(replace(config, num_layers=layers))
        rope = transformer.rope_tables(Geometry(3, 4, 5, 24.0, 7), "meta", torch.float32)
        widths = (config.caption_channels,) * 2 if config.caption_projection else (config.width, config.audio_width)
        text = [torch.empty(1, tokens.text, width, device="meta") for width in widths]
        prepared = [transformer.prepare_text(one, kind) for one, kind in zip(text, ("video", "audio"), strict=True)]  # type: ignore[arg-type]
        latents = [torch.empty(1, count, config.in_channels, device="meta") for count in (tokens.video, tokens.audio)]
        sigma = torch.empty(1, device="meta")
        streams = [Stream(one, sigma, sigma, context) for one, context in zip(latents, prepared, strict=True)]
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            transformer(*streams, rope)
        return counter.get_total_flops()

    # What is outside the blocks, the timesteps' embeddings above all, is left out of the model.
    assert _block_flops(ltx2_pass(config, tokens)) == pytest.approx(measured(2) - measured(1), rel=0.002)


@pytest.mark.parametrize("model", ["wan", "wan21_i2v_14b_480p"])
def test_the_work_of_a_wan_block_is_what_torch_counts(model: str) -> None:
    config = wan(model).transformer
    images = 257 if config.image_dim else 0

    def measured(layers: int) -> int:
        with torch.device("meta"):
            transformer = WanTransformer(replace(config, num_layers=layers))
        rope = transformer.rope_tables(WanGeometry(3, 8, 10), "meta")
        image = torch.empty(1, images, config.image_dim, device="meta") if config.image_dim else None
        context = transformer.prepare_text(torch.empty(1, 512, config.text_dim, device="meta"), image)
        latents = torch.empty(1, 60, 4 * config.in_channels, device="meta")
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            transformer(WanStream(latents, torch.empty(1, device="meta"), context), rope)
        return counter.get_total_flops()

    predicted = _block_flops(wan_pass(config, Tokens(60, 512, image=images)))
    assert predicted == pytest.approx(measured(2) - measured(1), rel=1e-9)


def _block_flops(parts: tuple[Part, ...]) -> float:
    return sum(op.flops for op in parts[0].ops)


# ---------------------------------------------------------------- several ranks


def test_ulysses_splits_the_videos_work_and_not_the_audios() -> None:
    config = architecture("ltx2").transformer
    without = replace(LTX2_TOKENS, audio=0)
    whole, half = (_block_flops(ltx2_pass(config, without, ranks)) for ranks in (1, 2))
    assert half == pytest.approx(whole / 2)
    audio = _block_flops(ltx2_pass(config, replace(LTX2_TOKENS, video=0)))
    both = [_block_flops(ltx2_pass(config, LTX2_TOKENS, ranks)) for ranks in (1, 2)]
    assert both[1] - audio == pytest.approx((both[0] - audio) / 2, rel=1e-3)


def test_the_bytes_of_ulysses_are_those_of_its_messages() -> None:
    config = architecture("ltx2").transformer
    rows, others = 3840, 3 / 4
    own = (3 + 1) * rows * config.width
    sound = 2 * rows * config.audio_width + 126 * config.audio_width
    expected = 2 * others * (48 * (own + sound) + 15360 * 128)
    assert sent_bytes(ltx2_pass(config, LTX2_TOKENS, 4)) == pytest.approx(expected)
    assert sent_bytes(ltx2_pass(config, LTX2_TOKENS, 1)) == 0
    wide = wan("wan").transformer
    expected = 2 * others * (30 * 4 * 6820 * 3072 + 27280 * 4 * 48)
    assert sent_bytes(wan_pass(wide, Tokens(27280, 512), 4)) == pytest.approx(expected)


def test_tokens_that_do_not_divide_are_filled_up() -> None:
    config = wan("wan21_t2v_1_3b").transformer
    gemm = next(op for op in wan_pass(config, Tokens(32761, 512), 4)[0].ops if op.kind == "gemm")
    assert gemm.flops == 4 * 2 * 8191 * 1536**2


def test_passes_are_run_in_turns() -> None:
    workload = ltx2_workload()
    seconds = [predict_plan(ParallelPlan(cfg_size=size), workload, "whole").step_s for size in (1, 2, 3, 4)]
    assert seconds[1] == pytest.approx(seconds[0] / 2, rel=1e-3)
    assert seconds[2] == pytest.approx(seconds[1], rel=1e-3)
    assert seconds[3] == pytest.approx(seconds[0] / 4, rel=1e-3)
    exchanged = sent_bytes(step_parts(ParallelPlan(cfg_size=3), workload))
    assert exchanged == 2 * 2 * workload.velocity_bytes  # two turns of two other ranks


def test_a_single_pass_is_exchanged_with_nobody() -> None:
    assert sent_bytes(step_parts(ParallelPlan(), ltx2_workload(passes=1))) == 0


def test_a_step_is_never_faster_than_its_launches_unless_captured() -> None:
    small = ltx2_workload(pass_parts=lambda ranks: ltx2_pass(architecture("ltx2").transformer, Tokens(60, 1024, 4)))
    eager, captured = (
        predict_plan(ParallelPlan(), replace(small, passes=1, graph=graph), "whole").step_s for graph in (False, True)
    )
    assert eager == pytest.approx(0.230, rel=0.02)  # diffusers at 1920 tokens
    assert captured < eager / 2
    large = [predict_plan(ParallelPlan(), ltx2_workload(graph=graph), "whole").step_s for graph in (False, True)]
    assert large[0] == large[1]


@pytest.mark.parametrize(("prompts", "data_size", "turns"), [(1, 1, 1), (5, 2, 3), (4, 4, 1)])
def test_replicas_share_the_prompts(prompts: int, data_size: int, turns: int) -> None:
    cost = predict_plan(ParallelPlan(data_size=data_size), ltx2_workload(prompts=prompts, steps=3), "whole")
    assert cost.denoise_s == pytest.approx(3 * cost.step_s)
    assert cost.total_s == pytest.approx(turns * (cost.denoise_s + cost.decode_s))


def test_what_lies_beyond_two_ranks_is_said_to_be_extrapolated() -> None:
    plans = [ParallelPlan(), ParallelPlan(2, 2, 2, 2), ParallelPlan(cfg_size=3), ParallelPlan(vae_size=3)]
    assert [predict_plan(plan, ltx2_workload(), "halo").extrapolated for plan in plans] == [False, False, True, True]


# ---------------------------------------------------------------- decodes over ranks


def test_a_halo_decode_takes_as_long_as_its_longest_band() -> None:
    workload = ltx2_workload(latents=(5, 34, 8), axis="height", clip_bytes=0)
    ranks = [decode_parts(ranks, workload, "halo", H200)[0] for ranks in (7, 8, 9)]
    band = list(workload.layers((5, 5, 8)))
    assert _work(ranks[0]) == _work(ranks[1])  # 5 rows at most either way
    assert _work(ranks[1]) == sum(op.flops for layer in band for op in layer.ops)
    assert _work(ranks[2]) < _work(ranks[1])


def test_one_message_for_each_convolution_and_chunk() -> None:
    ltx2, (parts,) = ltx2_workload(), decode_parts(2, ltx2_workload(), "halo", H200)
    convolutions = 2 + 4 * 5 * 2 + 3
    assert sum(message.times for part in parts[:-1] for message in part.messages) == convolutions
    assert sum(part.messages != () for part in parts[:-1]) == len(list(ltx2.layers(ltx2.latents)))
    wan_work = wan_workload("wan", 440, (3, 44, 80))
    (parts,) = decode_parts(2, wan_work, "halo", H200)
    bordered = 2 + 4 + 4 * 3 * 2 + 3  # both ends, the middle, the levels' blocks and their resamplings
    swapped = [message for part in parts[:-1] for message in part.messages if message.kind == "send_recv"]
    assert len(swapped) == bordered and {message.times for message in swapped} == {3}
    # The first convolution of the middle: 1024 channels of 3 frames of one line of 44 rows of latents.
    assert 3 * swapped[1].sent == 2 * 1024 * 3 * 44


def test_the_first_rank_gets_the_frames_of_the_others() -> None:
    workload = ltx2_workload()
    last = decode_parts(4, workload, "halo", H200)[0][-1]
    assert sent_bytes([last]) == pytest.approx(workload.clip_bytes * 3 / 4)


def test_halo_cuts_the_axis_that_the_decode_cuts() -> None:
    draw = random.Random(0)
    cases = [tuple(draw.randint(*span) for span in ((1, 4), (2, 40), (2, 40), (2, 12))) for _ in range(50)]
    for frames, height, width, ranks in [(2, 8, 8, 2), *cases]:
        axis = choose_axis((1, 128, frames, height, width), ranks)
        auto, chosen = (
            decode_parts(ranks, ltx2_workload(latents=(frames, height, width), axis=one), "halo", H200)
            for one in ("auto", axis)
        )
        assert auto == chosen


def test_bands_of_the_frames_attention_see_all_pixels() -> None:
    sizes = wan_workload("wan", 440, (3, 32, 80), axis="height")
    whole, half = (decode_parts(ranks, sizes, "halo", H200)[0] for ranks in (1, 2))
    assert _work(half, "attention") == pytest.approx(_work(whole, "attention") / 2)


def _work(parts: tuple[Part, ...], kind: str | None = None) -> float:
    return sum(op.flops for part in parts for op in part.ops if kind in (None, op.kind))


def test_tiles_are_shared_as_the_decode_shares_them() -> None:
    workload = ltx2_workload()
    alone = _work(decode_parts(1, workload, "tile", H200)[0])
    by_rank = decode_parts(4, workload, "tile", H200)
    assert sum(map(_work, by_rank)) == pytest.approx(alone)
    assert max(map(_work, by_rank)) < 0.3 * alone
    assert sent_bytes(by_rank[0]) == workload.clip_bytes
    idle = decode_parts(30, workload, "tile", H200)  # 27 tiles
    assert sorted(map(_work, idle))[:3] == [0, 0, 0]
    assert decode_ms(workload, "tile", 30) == decode_ms(workload, "tile", 27)


def test_balanced_tiles_are_no_slower_for_a_number_of_ranks_that_does_not_suit_the_others() -> None:
    workload = WORKLOADS["wan 81 frames"]()
    assert decode_ms(workload, "tile_balanced", 8) < 0.9 * decode_ms(workload, "tile", 8)


def test_more_ranks_decode_faster_and_less_than_proportionally() -> None:
    workload = ltx2_workload()
    alone = decode_ms(workload, "whole")
    gains = [alone / decode_ms(workload, "halo", ranks) / ranks for ranks in (1, 2, 4, 8)]
    assert gains[0] == 1 and gains == sorted(gains, reverse=True) and gains[-1] > 0.5


# ---------------------------------------------------------------- earlier runs


def record(step_s: float, decode_s: float, **changes: Any) -> dict[str, Any]:
    steps = [10 * step_s, 0.9 * step_s, step_s, 1.1 * step_s]
    cold = {"denoise_steps": steps, "decode_video": 3 * decode_s}
    sizes = {"data_size": 1, "cfg_size": 1, "ulysses_size": 1, "vae_size": 1}
    return {
        "status": "ok",
        "config": {"model": {"name": "ltx2"}, "request": {"height": 768}},
        "active": {**sizes, "vae_strategy": "whole", "passes": ["cond", "uncond", "ptb", "mod"]},
        "timings_s": {"cold": cold, "warm": {"denoise_steps": steps[1:], "decode_video": decode_s}},
        "environment": {"gpu": {"name": "NVIDIA H200"}},
        **changes,
    }


SAME = {"config.model.name": "ltx2", "config.request.height": 768}


def test_predictions_are_scaled_by_the_median_of_earlier_runs() -> None:
    workload = ltx2_workload()
    alone = predict_plan(ParallelPlan(), workload, "whole")
    runs = [record(factor * alone.step_s, 2 * factor * alone.decode_s) for factor in (1.0, 1.3, 1.1)]
    found = calibrate(runs, workload, SAME)
    assert found.step == pytest.approx(1.1) and found.decode == pytest.approx(2.2)
    assert (found.step_records, found.decode_records) == (3, 3)
    scaled = predict_plan(ParallelPlan(cfg_size=2, vae_size=2), workload, "halo", calibration=found)
    plain = predict_plan(ParallelPlan(cfg_size=2, vae_size=2), workload, "halo")
    assert scaled.step_s == pytest.approx(1.1 * plain.step_s)
    assert scaled.denoise_s == pytest.approx(40 * scaled.step_s)
    assert scaled.decode_s == pytest.approx(2.2 * plain.decode_s)


def test_a_record_is_compared_with_its_own_plan_and_passes() -> None:
    workload = ltx2_workload()
    plan = ParallelPlan(cfg_size=2, vae_size=2)
    cost = predict_plan(plan, replace(workload, passes=2), "halo")
    active = {"data_size": 1, "cfg_size": 2, "ulysses_size": 1, "vae_size": 2, "vae_strategy": "halo"}
    run = record(cost.step_s, cost.decode_s, active={**active, "passes": ["cond", "uncond"]})
    found = calibrate([run], workload, SAME)
    assert (found.step, found.decode) == (pytest.approx(1), pytest.approx(1))


def test_other_runs_do_not_count() -> None:
    others = [
        record(1, 1, status="failed"),
        record(1, 1, environment={"gpu": {"name": "NVIDIA H100"}}),
        record(1, 1, environment={"gpu": None}),
        record(1, 1, config={"model": {"name": "ltx2"}, "request": {"height": 512}}),
        record(1, 1, config={"model": {"name": "ltx2_3"}, "request": {"height": 768}}),
        record(1, 1, timings_s={"cold": None, "warm": None}),
    ]
    found = calibrate(others, ltx2_workload(), SAME)
    assert (found.step, found.decode, found.step_records, found.decode_records) == (1, 1, 0, 0)


def test_of_a_cold_run_only_the_later_steps_count() -> None:
    workload = ltx2_workload()
    alone = predict_plan(ParallelPlan(), workload, "whole")
    cold = record(alone.step_s, 1)["timings_s"]["cold"]
    found = calibrate([record(1, 1, timings_s={"cold": cold, "warm": None})], workload, SAME)
    assert found.step == pytest.approx(statistics.median([0.9, 1.0, 1.1]))
    assert found.decode_records == 0


def test_the_model_needs_no_torch() -> None:
    code = "import sys, vgen.parallel.cost; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
