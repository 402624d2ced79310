"""The environment is found where it is and null where it is not."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from vgen.metrics import environment
from vgen.metrics.environment import collect_environment
from vgen.record import build_record, environment_template

SMI = """#!/bin/sh
echo "$@" > "$0.arguments"
echo "NVIDIA H200, 570.86.15, 1830, 1980, 3201"
echo "NVIDIA H200, 570.86.15, [N/A], 1980, 3201"
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all of PATH but for the system's own programs."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def put(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def test_it_has_all_keys_and_what_this_process_runs_on() -> None:
    found = collect_environment()
    template = environment_template()
    assert found.keys() == template.keys()
    for name in ("versions", "git", "gpu", "clocks_mhz", "cpu"):
        assert found[name].keys() == template[name].keys()
    assert found["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["cuda"] == torch.version.cuda
    assert found["versions"]["vgen"] == "0.1.0"
    assert found["cpu"]["cores"] == os.cpu_count()
    assert len(found["host_load"]) == 3
    build_record(config={}, environment=found)


def test_it_imports_no_torch() -> None:
    code = """
        import sys
        from vgen.metrics.environment import collect_environment
        found = collect_environment()
        print("torch" in sys.modules, found["versions"]["torch"] is not None)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_gpus_come_from_nvidia_smi(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(programs / "nvidia-smi", SMI)
    found = collect_environment()
    assert found["gpu"] == {"name": "NVIDIA H200", "count": 2}
    assert found["driver"] == "570.86.15"
    assert found["clocks_mhz"] == {"sm": [1830, None], "sm_max": [1980, 1980], "memory": [3201, 3201]}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3")
    collect_environment()
    assert "--id=1,3" in (programs / "nvidia-smi.arguments").read_text()


@pytest.mark.parametrize("text", ["#!/bin/sh\nexit 9\n", "#!/bin/sh\necho nonsense\n", "#!/bin/sh\nsleep 20\n", None])
def test_a_broken_or_missing_nvidia_smi_is_null(
    programs: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    monkeypatch.setattr(environment, "_GPU_LIMIT_S", 0.3)
    if text is None:
        monkeypatch.setenv("PATH", str(programs))
    else:
        put(programs / "nvidia-smi", text)
    started = time.perf_counter()
    found = collect_environment()
    assert time.perf_counter() - started < 2.0
    assert found["gpu"] == {"name": None, "count": None}
    assert found["driver"] is None


def test_a_hidden_gpu_is_not_asked_for(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(programs / "nvidia-smi", SMI)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert collect_environment()["gpu"]["count"] is None


def test_git_is_of_the_checkout_that_tracks_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@t"]
    tracked, installed = tmp_path / "tracked.py", tmp_path / "installed.py"
    assert environment._git(tracked) == {}, "no repository"
    subprocess.run([*git, "init", "-q"], check=True)
    tracked.write_text("1")
    (tmp_path / ".gitignore").write_text("installed.py\n")
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "one"], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert environment._git(tracked) == {"commit": commit, "dirty": False}
    installed.write_text("2")
    assert environment._git(installed) == {}, "beside someone's project, not part of it"
    tracked.write_text("3")
    assert environment._git(tracked) == {"commit": commit, "dirty": True}
