"""Wan by the command itself: ranks, files, record, decode from saved latents, benchmarks."""

import json
from pathlib import Path

import torch
from PIL import Image
from safetensors.torch import load_file

from tests import tiny_wan
from tests.test_end_to_end import one_sentence, read, run

SMALL = ("model=wan_tiny", "quant=fp32", "request.height=64", "request.width=64", "request.num_frames=5")
RANDOM = (*SMALL, "model.weights=random")


def test_results_do_not_depend_on_the_ranks_and_decode_makes_them_again(tmp_path: Path) -> None:
    Image.new("RGB", (64, 64), "red").save(tmp_path / "red.png")
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "a circle"}, {"prompt": "a square", "seed": 7, "image": str(tmp_path / "red.png")}]
    prompts.write_text("\n".join(json.dumps(row) for row in rows))
    save = "output.save=[mp4,latents,frames]"
    for size in (1, 2):
        result = run(
            tmp_path / str(size), *RANDOM, f"request.prompts_file={prompts}", f"parallel.data_size={size}", save
        )
        assert result.returncode == 0, result.stderr
    one, two = (read(tmp_path / str(size)) for size in (1, 2))
    assert one["outputs"] == two["outputs"]
    assert [(row["num_frames"], row["has_audio"]) for row in one["outputs"]] == [(5, False)] * 2
    for name in ("latents_0", "latents_1", "frames_0", "frames_1"):
        first, second = (load_file(tmp_path / str(size) / f"{name}.safetensors") for size in (1, 2))
        assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)
    active = one["active"]
    assert active["passes"] == ["cond", "uncond"]
    assert active["vae_backend"] == "native" and active["checkpoint"]["kind"] == "ti2v"
    assert active["checkpoint"]["version"] == "2.2" and one["timings_s"]["encode_video"] > 0

    again = run(tmp_path / "again", *RANDOM, "task=decode", f"task.latents={tmp_path / '1'}", save)
    assert again.returncode == 0, again.stderr
    for row, made in zip(one["outputs"], read(tmp_path / "again")["outputs"], strict=True):
        assert row["sha256"] == made["sha256"]


def test_a_checkpoint_of_the_other_layout_needs_its_pickles_allowed(tmp_path: Path) -> None:
    folder = tiny_wan.save_original(tmp_path / "original", "ti2v")
    refused = run(tmp_path / "job", "model=wan", f"model.checkpoint={folder}")
    assert refused.returncode == 1
    assert "model.allow_pickle=true" in one_sentence(refused)
    assert not (tmp_path / "job" / "ranks").exists()


def test_a_folder_of_another_variant_is_named(tmp_path: Path) -> None:
    folder = tiny_wan.save_diffusers(tmp_path / "folder", "t2v_2_1")
    refused = run(tmp_path / "job", "model=wan", f"model.checkpoint={folder}")
    assert refused.returncode == 1
    assert f"{folder} is Wan 2.1 t2v and model=wan has the defaults of 2.2 ti2v" in one_sentence(refused)


def test_the_benchmarks_agree_with_diffusers(tmp_path: Path) -> None:
    for task, rows in (("bench_step", 3), ("bench_decode", 4), ("bench_encode", 4)):
        result = run(
            tmp_path / task, *RANDOM, f"task={task}", "bench.peers=[diffusers]", "bench.repeats=1", "bench.warmup=0"
        )
        assert result.returncode == 0, result.stderr
        table = json.loads((tmp_path / task / "bench.json").read_text())["rows"]
        assert len(table) == rows
        assert table[-1]["name"].startswith("diffusers")
        assert table[-1]["relative_error"] <= 1e-5
