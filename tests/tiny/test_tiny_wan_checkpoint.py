"""The trained Wan inside the package: its files, and the same picture in diffusers."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.pipelines.test_ltx2_pipeline import make_job
from tests.tiny.test_tiny_wan import Sink, diffusers_transformer
from vgen import transforms
from vgen.checkpoint_paths import WEIGHTS
from vgen.models.wan.config import WanArchitecture, architecture
from vgen.pipelines import wan

FOLDER = WEIGHTS / "wan_tiny"
FILES = sorted(FOLDER.rglob("*.safetensors"))
LARGEST = 20_000_000
LEAST_DB = 40
CPU = torch.device("cpu")


def test_the_folder_is_small_enough() -> None:
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) <= LARGEST


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parent.name)
def test_weights_are_bf16_and_finite(path: Path) -> None:
    tensors = load_file(path)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert all(tensor.isfinite().all() for tensor in tensors.values())


def test_statistics_are_measured_ones() -> None:
    config = json.loads((FOLDER / "vae" / "config.json").read_text())
    assert len(set(config["latents_mean"])) == len(set(config["latents_std"])) == 48
    assert min(config["latents_std"]) > 0


def test_the_card_states_the_licence() -> None:
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert re.search(r"licen[cs]e\W.*apache-2\.0", card, re.IGNORECASE)


def test_random_weights_have_the_architecture_of_the_checkpoint(tmp_path: Path) -> None:
    job = make_job(tmp_path, "model=wan_tiny")
    assert job.config.model.architecture is not None
    configured, loaded = architecture(job.config.model.architecture), job.architecture
    assert configured.transformer == loaded.transformer
    assert {**vars(configured.vae), **_statistics(loaded)} == vars(loaded.vae)
    assert loaded.transformer.num_attention_heads % 4 == 0


def _statistics(loaded: WanArchitecture) -> dict[str, Any]:
    return {"latents_mean": loaded.vae.latents_mean, "latents_std": loaded.vae.latents_std}


def decibels(ours: Tensor, other: Tensor) -> float:
    """Peak signal-to-noise ratio of frames in -1..1."""
    return 10 * math.log10(4 / float((ours - other).square().mean()))


def test_diffusers_makes_the_same_picture(tmp_path: Path) -> None:
    """As a user runs it, but for the sigmas, which are those of diffusers."""
    from diffusers import WanPipeline

    job = make_job(tmp_path, "model=wan_tiny", "sampler.schedule=diffusers", "request.prompt=a blue square moves up")
    request, sampler, sink = job.requests[0], job.config.sampler, Sink()
    wan.generate(transforms.build_components(job, CPU), request, sampler, sink)  # type: ignore[arg-type]
    theirs = WanPipeline.from_pretrained(
        FOLDER, transformer=diffusers_transformer(FOLDER), dtype=torch.float32, local_files_only=True
    )
    theirs.set_progress_bar_config(disable=True)
    geometry = wan.latent_geometry(request, job.architecture)
    (frames,) = theirs(
        prompt=request.prompt,
        negative_prompt=request.negative_prompt,
        height=request.height,
        width=request.width,
        num_frames=request.num_frames,
        num_inference_steps=sampler.steps,
        guidance_scale=sampler.guidance_scale,  # type: ignore[union-attr]
        max_sequence_length=job.config.model.text_encoder.max_length,
        latents=wan.make_noise(geometry, job.architecture, seed=request.seed, device=CPU),
        output_type="pt",
        return_dict=False,
    )
    other = 2 * frames.transpose(1, 2) - 1
    assert decibels(sink.frames.clamp(-1, 1), other) >= LEAST_DB
    # The other prompt's picture is not that near.
    assert decibels(sink.frames.clamp(-1, 1), other.flip(-1)) < LEAST_DB / 2
