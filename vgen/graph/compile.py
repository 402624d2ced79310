"""torch.compile of a transformer in place, so that its blocks, which are alike, are compiled once.

Compiled code is of static shapes: another number of tokens is another compilation. It must not capture graphs of its
own (``reduce-overhead``, ``max-autotune``), which would lie inside ours. Replayed or called, it is the same kernels, so
capture changes no bit of it; compilation itself does.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vgen.config import GraphConfig
from vgen.models.plan import Plan

RECOMPILE_LIMIT = 128
"""Variants of one block's code: shapes, perturbations, streams that are there, ways of giving timesteps. Dynamo's own
limit of 8 is reached by two resolutions, and what is beyond it runs eagerly, which only a line of its log says."""


def compile_blocks(transformer: nn.Module, plan: Plan, config: GraphConfig) -> None:
    """Compile each block of ``plan.blocks``, or all of ``transformer``, in place; modes without it change nothing.

    Names of parameters stay as they are. Nothing is compiled before the first call. Sets Dynamo's limit of variants for
    the whole process: blocks share their code, and their variants count together.
    """
    if config.mode not in ("compile", "compile_cuda"):
        return
    limits: Any = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, RECOMPILE_LIMIT)
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, 8 * RECOMPILE_LIMIT)
    parts = [transformer]
    if config.compile_scope == "block":
        parts = list(transformer.get_submodule(plan.blocks).children())
    for part in parts:
        part.compile(mode=config.compile_mode, dynamic=False)


@dataclass
class CompileReport:
    """What was compiled meanwhile. ``graphs``: pieces of code, each once for all blocks that share it."""

    graphs: int = 0
    seconds: float = 0.0


@contextmanager
def compile_report() -> Iterator[CompileReport]:
    """Count the compilations of the body; the report is complete when it ends."""
    report, graphs, seconds = CompileReport(), _graphs(), _seconds()
    yield report
    report.graphs, report.seconds = _graphs() - graphs, _seconds() - seconds


# Where Dynamo's module, whose import takes seconds, is not there yet, nothing has been compiled.


def _graphs() -> int:
    utils: Any = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else int(utils.counters["stats"]["unique_graphs"])


def _seconds() -> float:
    utils: Any = sys.modules.get("torch._dynamo.utils")
    return 0.0 if utils is None else float(sum(utils.compilation_time_metrics.get("_compile.compile_inner", ())))
