"""Peak memory of this process, on the device and on the host, in GiB."""

import resource
import sys
from pathlib import Path

import torch

GIB = 2**30


def peak_device_gib(device: torch.device) -> float | None:
    """Most memory that tensors held on a CUDA device since the last reset; None on other devices."""
    return torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else None


def reset_peak_device(device: torch.device) -> None:
    """Start a new peak from what is held now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_host_gib() -> float:
    """Most resident memory of this process since it started."""
    try:
        # getrusage also counts what the parent held when it forked this process; VmHWM is of this program alone.
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024 / GIB
    except (OSError, IndexError, ValueError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak * (1 if sys.platform == "darwin" else 1024) / GIB
