"""The import arrows of CONTRIBUTING.md: run → app → launchers → worker → tasks → pipelines → stages → models."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TORCH_FREE = (
    "run", "app", "arguments", "typed", "config", "validate", "requests", "job", "record", "checkpoint_files",
    "checkpoint_kinds", "checkpoint_headers", "checkpoint_paths", "wan_files", "media_probe", "families.ltx2",
    "families.wan", "memory", "ltx2_memory", "wan_memory", "parallel.plans", "parallel.balance",
    "parallel.cost", "preflight", "rescue",
)  # fmt: skip

# Who may not import what: prefixes of module names.
FORBIDDEN = {
    "vgen.models": ("vgen.", "!vgen.models", "lightning", "hydra", "omegaconf", "wandb", "torch.distributed"),
    "vgen.models.ltx2": ("vgen.models.wan",),
    "vgen.models.wan": ("vgen.models.ltx2",),
    "vgen.diffusion": (
        "vgen.",
        "!vgen.diffusion",
        "lightning",
        "hydra",
        "omegaconf",
        "wandb",
        "torch.distributed",
        "transformers",
    ),
    "vgen.parallel": ("vgen.pipelines", "vgen.tasks", "vgen.stages", "vgen.worker", "vgen.app", "hydra", "omegaconf"),
    "vgen.graph": ("vgen.pipelines", "vgen.stages", "vgen.tasks", "vgen.worker", "vgen.app", "hydra", "omegaconf"),
    "vgen.metrics": ("vgen.pipelines", "vgen.tasks", "vgen.stages", "vgen.worker", "vgen.app", "hydra", "omegaconf"),
    "vgen.stages": (
        "vgen.pipelines",
        "vgen.tasks",
        "vgen.worker",
        "vgen.app",
        "vgen.transforms",
        "vgen.components",
        "hydra",
        "omegaconf",
        "lightning",
    ),
    "vgen.pipelines": (
        "vgen.tasks",
        "vgen.worker",
        "vgen.app",
        "vgen.transforms",
        "vgen.components",
        "hydra",
        "omegaconf",
        "lightning",
    ),
    "vgen.families": (
        "vgen.components",
        "vgen.stages",
        "vgen.pipelines",
        "vgen.tasks",
        "vgen.worker",
        "torch",
        "hydra",
    ),
    "vgen.components": ("vgen.tasks", "vgen.worker", "vgen.app", "vgen.transforms", "hydra", "omegaconf", "lightning"),
    "vgen.tasks": ("vgen.worker", "vgen.app", "hydra", "omegaconf", "lightning"),
    "vgen.worker": ("vgen.app", "vgen.run", "hydra", "omegaconf"),
    "launchers": ("vgen.", "torch", "hydra", "omegaconf", "lightning"),
}


def _sources() -> list[Path]:
    return sorted([*ROOT.glob("vgen/**/*.py"), *ROOT.glob("launchers/*.py")])


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _violations(module: str, imported: str) -> bool:
    for owner, rules in FORBIDDEN.items():
        if module != owner and not module.startswith(f"{owner}."):
            continue
        allowed = tuple(rule[1:] for rule in rules if rule.startswith("!"))
        denied = tuple(rule for rule in rules if not rule.startswith("!"))
        if imported.startswith(allowed or ("\0",)) or imported == "vgen":
            continue
        if any(imported == rule or imported.startswith(rule if rule.endswith(".") else f"{rule}.") for rule in denied):
            return True
    return False


@pytest.mark.parametrize("path", _sources(), ids=_module)
def test_imports_follow_the_arrows(path: Path) -> None:
    wrong = [name for name in _imports(path) if _violations(_module(path), name)]
    assert not wrong, f"{_module(path)} imports {wrong}"


def test_the_rules_catch_a_violation() -> None:
    assert _violations("vgen.models.ltx2.transformer", "vgen.parallel.tiles")
    assert _violations("vgen.models.ltx2.transformer", "torch.distributed")
    assert _violations("launchers.supervisor", "torch")
    assert not _violations("vgen.models.ltx2.transformer", "vgen.models.attention")
    assert not _violations("vgen.worker", "vgen.tasks.generate")


def test_the_hydra_parent_needs_no_torch() -> None:
    modules = ", ".join(f"vgen.{name}" for name in TORCH_FREE)
    code = f"import sys, launchers.supervisor, {modules}; sys.exit('torch' in sys.modules or 'wandb' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
