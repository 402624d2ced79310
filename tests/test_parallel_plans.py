"""Whole runs under parallel plans: real ranks, the task itself, its files; equal to those of one rank.

fp32 on the CPU with random checkpoints, so that nothing can hide: every rank loads, encodes, denoises and decodes.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from tests import tiny_wan
from tests.pipelines.test_ltx2_pipeline import official_job
from tests.pipelines.test_wan_pipeline import MODELS, wan_job
from tests.ranks import run_ranks
from vgen.job import Job
from vgen.parallel.mesh import build_mesh
from vgen.tasks import generate
from vgen.tasks.types import TaskContext

LARGEST_ERROR = 1e-5
"""Of the latents, over their largest value."""

LARGEST_PART = 1e-4
"""Of the frames' values: how many may be rounded to the neighbouring grey level."""

ALL_GUIDANCE = tuple(
    f"sampler.{stream}.{setting}"
    for stream in ("video", "audio")
    for setting in ("cfg_scale=3", "stg_scale=1", "modality_scale=3", "rescale_scale=0.7")
)
CFG = ("sampler.video.cfg_scale=3", "sampler.audio.cfg_scale=7", "sampler.video.rescale_scale=0.7")
TILES = ("model.vae.tile_size=64", "model.vae.tile_overlap=32")
THREE = (*CFG, "sampler.video.stg_scale=1")


@dataclasses.dataclass(frozen=True)
class Case:
    """``sizes``: cfg_size, ulysses_size, vae_size."""

    model: str
    sizes: tuple[int, int, int]
    overrides: tuple[str, ...] = ()
    image: bool = False

    @property
    def world_size(self) -> int:
        cfg, ulysses, vae = self.sizes
        return max(cfg * ulysses, vae)

    def job(self, folder: Path, checkpoints: Path, *, alone: bool) -> Job:
        cfg, ulysses, vae = (1, 1, 1) if alone else self.sizes
        plan = [f"parallel.cfg_size={cfg}", f"parallel.ulysses_size={ulysses}", f"parallel.vae_size={vae}"]
        image = [f"request.image={checkpoints / 'a.png'}"] if self.image else []
        own = [*self.overrides, *image, *plan, "output.save=[latents,frames]", "logger=none"]
        if self.model.startswith("ltx2"):
            return official_job(folder, *own, version="2.3" if self.model == "ltx2_3" else "2.0")
        return wan_job(folder, checkpoints / self.model, self.model, *own)


# 17 x 64 x 96 has 3 x 2 x 3 = 18 tokens and 2 x 3 latents; Wan's 9 x 64 x 96 has 3 x 4 x 6 = 72 (TI2V: 3 x 2 x 3).
CASES = (
    Case("ltx2", (2, 1, 1), CFG),
    Case("ltx2", (2, 1, 2), ALL_GUIDANCE),
    Case("ltx2", (1, 2, 2), THREE, image=True),
    Case("ltx2", (1, 2, 1), ("request.num_frames=1",)),
    Case("ltx2", (1, 2, 2), ("request.audio=none", *CFG)),
    Case("ltx2", (1, 1, 2), ("parallel.vae_strategy=tile", *TILES)),
    Case("ltx2_3", (2, 1, 2), (*ALL_GUIDANCE, "sampler.video.skip_step=1")),
    Case("t2v_2_1", (2, 1, 2)),
    Case("ti2v", (1, 2, 2), image=True),
    Case("i2v_2_1", (2, 1, 2), image=True),
    Case("t2v_a14b", (1, 2, 1), ("sampler.guidance_scale=1", "sampler.guidance_scale_2=1")),
    Case("ltx2", (3, 1, 1), THREE),
    Case("ltx2", (3, 1, 3), ALL_GUIDANCE),
    Case("ti2v", (1, 1, 3)),
    Case("ltx2", (4, 1, 2), ALL_GUIDANCE),
    Case("ltx2", (2, 2, 3), ALL_GUIDANCE, image=True),
    Case("ltx2", (1, 4, 1), ("request.num_frames=25", *CFG)),
    Case("t2v_2_1", (2, 2, 4)),
    Case("i2v_a14b", (1, 4, 4), image=True),
    Case(
        "t2v_2_1",
        (1, 1, 4),
        ("parallel.vae_strategy=tile_balanced", "model.vae.tile_size=64", "model.vae.tile_overlap=32"),
    ),
    Case("ltx2", (2, 4, 1), (*CFG, "request.height=128")),
    Case("ltx2", (4, 2, 4), (*ALL_GUIDANCE, "request.height=128"), image=True),
    Case("t2v_2_1", (2, 4, 8)),
    Case("i2v_2_1", (1, 4, 8), image=True),
)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    for variant in {case.model for case in CASES} & set(MODELS):
        tiny_wan.save_diffusers(folder / variant, variant)
    draw = np.random.default_rng(0)
    Image.fromarray(draw.integers(0, 256, (64, 96, 3), dtype=np.uint8)).save(folder / "a.png")
    return folder


def run_jobs(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """On one rank: its part of each job; what it says that ran."""
    results = []
    for job in jobs:
        world_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        results.append(generate.run(TaskContext(job, torch.device("cpu"), build_mesh(job.plan, world_size))).active)
    return results


def relative(ours: Tensor, other: Tensor) -> float:
    return float((ours.double() - other.double()).abs().max() / other.double().abs().max())


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_every_plan_makes_what_one_rank_makes(world_size: int, checkpoints: Path, tmp_path: Path) -> None:
    cases = [case for case in CASES if case.world_size == world_size]
    jobs: dict[bool, list[Job]] = {True: [], False: []}
    for alone, chosen in jobs.items():
        for number, case in enumerate(cases):
            folder = tmp_path / f"{number}_{alone}"
            folder.mkdir()
            chosen.append(case.job(folder, checkpoints, alone=alone))
    run_jobs(jobs[True])
    active = run_ranks(world_size, run_jobs, jobs[False])[0]
    for case, one, many, ran in zip(cases, jobs[True], jobs[False], active, strict=True):
        ours, other = (load_file(job.out_dir / "latents_0.safetensors") for job in (many, one))
        assert ours.keys() == other.keys()
        for name in ours:
            assert relative(ours[name], other[name]) <= LARGEST_ERROR, (case, name)
        frames, expected = (load_file(job.out_dir / "frames_0.safetensors")["frames"] for job in (many, one))
        assert ran["vae_strategy"] == _strategy(case), case
        assert frames.shape == expected.shape
        if ran["vae_strategy"] != "tile_balanced":  # whose grid is of the ranks
            differences = (frames.int() - expected.int()).abs()
            # Where a value lies between two grey levels, the last bit decides.
            assert int(differences.max()) <= 1 and float((differences > 0).float().mean()) <= LARGEST_PART, case


def _strategy(case: Case) -> str:
    named = [item.partition("=")[2] for item in case.overrides if item.startswith("parallel.vae_strategy")]
    return named[0] if named else ("halo" if case.sizes[2] > 1 else "whole")
