"""Faults that would otherwise end as a grey video: NaN and infinity, by name."""

import torch
from torch import Tensor


class NumericsError(RuntimeError):
    """Latents or a waveform hold NaN or infinity."""


def check_finite(name: str, tensor: Tensor | None, when: str) -> None:
    """Raises NumericsError where ``tensor`` is not finite. Waits for the device: call it once or twice a run."""
    if tensor is None or bool(torch.isfinite(tensor).all()):
        return
    bad = int((~torch.isfinite(tensor)).sum())
    raise NumericsError(
        f"{bad} of {tensor.numel()} values of {name} are NaN or infinite {when}; "
        f"run with quant=fp32 to see whether precision is the cause, and check the checkpoint"
    )
