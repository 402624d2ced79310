"""Compilation and capture of a transformer as the configuration asks for them, in the one order that works."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from vgen.config import GraphConfig
from vgen.graph.agreement import Agreement
from vgen.graph.backend import CudaBackend
from vgen.graph.compile import compile_blocks
from vgen.graph.cuda_graph import CudaGraphs
from vgen.graph.pool import GraphPool
from vgen.models.plan import Plan

CONSTANTS = ("context", "rope", "perturbations")
"""Arguments and fields of both families that are made once per request, and written to by nobody."""


def apply_graph(
    transformer: nn.Module,
    plan: Plan,
    config: GraphConfig,
    device: torch.device,
    *,
    group: dist.ProcessGroup | None = None,
    state: Callable[[], Any] = tuple,
    pool: GraphPool | None = None,
) -> None:
    """Compile and capture the calls of ``transformer``, in place, hooks included; ``eager`` changes nothing.

    To be called last: what is registered on the transformer or swapped in it afterwards is not in its graphs.
    ``group``: the ranks that a call has collectives with. ``state``: asked at each call for what the arguments do not
    say, such as which adapter is merged. ``pool``: of a transformer that never runs at the same time as this one.

    Raises:
        ValueError: the mode or the scope cannot be had here.
    """
    if config.mode in ("cuda", "compile_cuda"):
        _check(config, device)
    compile_blocks(transformer, plan, config)
    if config.mode not in ("cuda", "compile_cuda"):
        return
    capture_calls(
        transformer,
        config,
        GraphPool(CudaBackend(device)) if pool is None else pool,
        state=state,
        agreement=None if group is None else Agreement(group),
    )


def capture_calls(
    transformer: nn.Module,
    config: GraphConfig,
    pool: GraphPool,
    *,
    state: Callable[[], Any] = tuple,
    agreement: Agreement | None = None,
) -> None:
    """Let calls of ``transformer`` go through a ``CudaGraphs``, in place; its methods and names stay.

    The attribute is the one by which ``nn.Module.compile`` takes over a call, hooks included.
    """
    compiled = transformer._compiled_call_impl
    whole_call = transformer._call_impl if compiled is None else compiled
    transformer._compiled_call_impl = CudaGraphs(
        whole_call,
        pool,
        signature=inspect.signature(transformer.forward),
        weights=transformer,
        state=state,
        constants=CONSTANTS,
        warmup=config.warmup,
        max_graphs=config.max_graphs,
        strict=config.strict,
        on_miss=config.on_miss,
        agreement=agreement,
    )


def graphs_of(transformer: nn.Module) -> CudaGraphs | None:
    """What captures the calls of ``transformer``, to seal, clear or report; None where nothing does."""
    graphs = transformer._compiled_call_impl
    return graphs if isinstance(graphs, CudaGraphs) else None


def _check(config: GraphConfig, device: torch.device) -> None:
    if device.type != "cuda":
        raise ValueError(
            f"graph.mode={config.mode} captures CUDA graphs and this run is on {device.type}: "
            f"use device=cuda, graph=compile or graph=eager"
        )
    if config.scope != "transformer":
        raise ValueError(f"graph.scope={config.scope} is not built; use graph.scope=transformer")
