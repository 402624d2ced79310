"""How many GPUs this machine shows, told without CUDA or torch."""

import os
import shutil
import subprocess
from collections.abc import Mapping


def count_gpus(environ: Mapping[str, str] = os.environ) -> int | None:
    """Visible NVIDIA GPUs; None where the driver's tool does not answer within 10 s."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([entry for entry in visible.split(",") if entry.strip() and entry.strip() != "-1"])
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return 0
    try:
        listing = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if listing.returncode != 0:
        return None
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
