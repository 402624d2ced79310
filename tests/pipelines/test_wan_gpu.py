"""Wan on a GPU: the picture of the CPU, and the same bits wherever the weights wait."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests import tiny_wan
from tests.pipelines.test_ltx2_pipeline import ListSink, make_job
from tests.pipelines.test_wan_pipeline import wan_job
from vgen import transforms
from vgen.components import wan as built
from vgen.job import Job
from vgen.loading import exact_fp32
from vgen.pipelines import wan

CUDA = torch.device("cuda")
LEAST_DB = 30

pytestmark = pytest.mark.gpu


def generate(job: Job, device: torch.device) -> ListSink:
    sink = ListSink()
    with exact_fp32(job.config.quant.mode == "fp32"):
        components = transforms.build_components(job, device)
        wan.generate(components, job.requests[0], job.config.sampler, sink)  # type: ignore[arg-type]
    return sink


def decibels(ours: Tensor, other: Tensor) -> float:
    error = float((ours.float().cpu() - other.float().cpu()).square().mean())
    return 10 * math.log10(4 / error) if error else math.inf


@pytest.mark.parametrize("quant", ["fp32", "bf16"])
def test_the_trained_model_makes_the_picture_of_the_cpu(quant: str, tmp_path: Path) -> None:
    here = generate(make_job(tmp_path, "model=wan_tiny", "quant=fp32"), torch.device("cpu"))
    there = generate(make_job(tmp_path, "model=wan_tiny", f"quant={quant}"), CUDA)
    assert decibels(there.frames.clamp(-1, 1), here.frames.clamp(-1, 1)) >= (60 if quant == "fp32" else LEAST_DB)


@pytest.mark.parametrize("offload", ["expert", "stages", "text_encoder"])
def test_offload_changes_no_bit(offload: str, tmp_path: Path) -> None:
    folder = tiny_wan.save_diffusers(tmp_path / "folder", "t2v_a14b")
    usual = generate(wan_job(tmp_path, folder, "t2v_a14b", "quant=bf16"), CUDA)
    other = generate(wan_job(tmp_path, folder, "t2v_a14b", "quant=bf16", f"model.offload={offload}"), CUDA)
    assert torch.equal(usual.video, other.video)
    assert torch.equal(usual.frames, other.frames)


@pytest.mark.parametrize("variant", ["ti2v", "t2v_2_1"])
def test_chunks_agree(variant: str, tmp_path: Path) -> None:
    """In fp32; cuDNN may take another algorithm for another length, so not to the last bit."""
    folder = tiny_wan.save_diffusers(tmp_path / "folder", variant)
    job = wan_job(tmp_path, folder, variant)
    module = built.build_video_decoder(job, CUDA)
    latents = torch.randn(1, job.architecture.vae.z_dim, 9, 8, 12, device=CUDA)
    with torch.no_grad(), exact_fp32(True):
        one, *others = (module(latents, chunk) for chunk in (1, 2, 4, None))
    for other in others:
        assert float((other - one).abs().max() / one.abs().max()) <= 1e-5
