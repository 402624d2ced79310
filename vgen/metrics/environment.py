"""What a run ran on: versions, git, GPU, clocks, host load. Never fails, and is bounded in time."""

import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import vgen
from vgen.record import environment_template

_PACKAGES = {
    "torch": "torch",
    "transformers": "transformers",
    "diffusers": "diffusers",
    "lightning": "lightning",
    "hydra": "hydra-core",
}
_GPU_QUERY = ("name", "driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem")
_GIT_LIMIT_S = 2.0
# nvidia-smi takes seconds on a host of many GPUs without the persistence daemon.
_GPU_LIMIT_S = 5.0


def collect_environment() -> dict[str, Any]:
    """The record's `environment`; what cannot be found out is null.

    CUDA, cuDNN and NCCL versions are known only where torch is imported already, and are those torch was built with.
    """
    found = environment_template()
    found["versions"] |= {
        "python": platform.python_version(),
        "vgen": vgen.__version__,
        **_package_versions(),
        **_torch_versions(),
    }
    found["git"] |= _git(Path(__file__).resolve())
    found |= _gpu()
    found["cpu"] = {"name": _cpu_name(), "cores": os.cpu_count()}
    found["host_load"] = [round(load, 2) for load in os.getloadavg()] if hasattr(os, "getloadavg") else None
    return found


def _package_versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {}
    for name, distribution in _PACKAGES.items():
        try:
            versions[name] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _torch_versions() -> dict[str, str | None]:
    torch = sys.modules.get("torch")
    if torch is None or torch.version.cuda is None:
        return {}
    cudnn, nccl = torch.backends.cudnn.version(), None
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {"cuda": torch.version.cuda, "cudnn": str(cudnn) if cudnn else None, "nccl": nccl}


def _output(command: list[str], limit_s: float) -> str | None:
    """Standard output of `command`, or None if it is missing, fails or takes too long."""
    if shutil.which(command[0]) is None:
        return None
    # No optional locks: a record must not write into the user's repository.
    environ = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=limit_s, check=True, env=environ, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout


def _git(source: Path) -> dict[str, Any]:
    """Commit of the checkout that tracks `source`; a package installed beside someone's project is in none."""
    git = ["git", "-C", str(source.parent)]
    if _output([*git, "ls-files", "--error-unmatch", source.name], _GIT_LIMIT_S) is None:
        return {}
    commit = _output([*git, "rev-parse", "HEAD"], _GIT_LIMIT_S)
    status = _output([*git, "status", "--porcelain"], _GIT_LIMIT_S)
    return {"commit": commit.strip() if commit else None, "dirty": bool(status.strip()) if status is not None else None}


def _gpu() -> dict[str, Any]:
    """Name, count, driver and clocks of the GPUs that this process may use."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return {}
    text = _output(
        ["nvidia-smi", f"--query-gpu={','.join(_GPU_QUERY)}", "--format=csv,noheader,nounits", *_visible()],
        _GPU_LIMIT_S,
    )
    rows = [[field.strip() for field in line.split(",")] for line in (text or "").splitlines() if line.strip()]
    rows = [row for row in rows if len(row) == len(_GPU_QUERY)]
    if not rows:
        return {}
    names, drivers, sm, sm_max, memory = (list(column) for column in zip(*rows, strict=True))
    clocks = {"sm": sm, "sm_max": sm_max, "memory": memory}
    return {
        "gpu": {"name": names[0], "count": len(rows)},
        "driver": drivers[0],
        "clocks_mhz": {kind: [_number(value) for value in values] for kind, values in clocks.items()},
    }


def _visible() -> list[str]:
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [f"--id={devices}"] if devices else []


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # "[N/A]"
        return None


def _cpu_name() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else None
