"""One component from its file, or random: built on the meta device, filled on the device that computes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from vgen import checkpoint, random_weights
from vgen.checkpoint import TensorSource
from vgen.job import Job
from vgen.memory import VISITING
from vgen.progress import progress
from vgen.residency import Residency

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

CONVOLVES = ("video_encoder", "audio_encoder", "video_decoder", "audio_decoder", "vocoder")
"""Components that consist of convolutions."""


def component_dtype(job: Job, component: str, device: torch.device) -> torch.dtype:
    """The dtype of a component's weights and of what it computes: the configuration's, but for VAEs on the CPU.

    torch has no fast bf16 convolution for most CPUs: the encoder of the tiny model takes 69 s there and 0.6 s in fp32.
    """
    convolves = component in CONVOLVES
    return torch.float32 if convolves and device.type == "cpu" else DTYPES[job.config.quant.mode]


def load(
    job: Job,
    component: str,
    device: torch.device,
    build: Callable[[], nn.Module],
    source: TensorSource | None,
    keep_float32: Callable[[str], bool] | None = None,
) -> nn.Module:
    """The component that ``build`` makes, with the tensors of ``source`` or, without one, random ones.

    ``keep_float32``: which parameters stay in fp32 whatever the precision of the rest.
    """
    dtype = component_dtype(job, component, device)
    with torch.device("meta"):
        module = build()
    module.requires_grad_(False).eval()
    if source is None:
        seed = job.config.model.weights_seed
        random_weights.fill_random(
            module, seed=seed, device=device, dtype=dtype, prefix=component, keep_float32=keep_float32
        )
        return module
    with source, progress(f"load {component}", source.total_bytes, unit="bytes") as bar:
        checkpoint.load_module(
            module, source, device=device, dtype=dtype, progress=bar.advance, keep_float32=keep_float32
        )
    return module


def place(job: Job, residency: Residency | None, name: str, module: nn.Module) -> None:
    """Keep ``module`` on the device or park it in host memory, as ``model.offload`` says."""
    if residency is not None:
        (residency.park if name in VISITING[job.config.model.offload] else residency.keep)(name, module)


@contextmanager
def exact_fp32(enabled: bool) -> Iterator[None]:
    """fp32 means fp32: no TF32 in matrix products and convolutions while it lasts."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    if enabled:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
