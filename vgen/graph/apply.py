"""Compilation and capture of a transformer as the configuration asks for them, in the one order that works."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from vgen.config import GraphConfig
from vgen.graph.agreement import Agreement
from vgen.graph.backend import CudaBackend
from vgen.graph.compile import compile_blocks
from vgen.graph.cuda_graph import CudaGraphs
from vgen.graph.pool import GraphPool
from vgen.models.plan import Plan

CONSTANTS = ("context", "rope", "perturbations", "constants")
"""Arguments and fields of both families that are made once per request, and written to by nobody."""


def apply_graph(
    transformer: nn.Module,
    plan: Plan,
    config: GraphConfig,
    device: torch.device,
    *,
    agreement: Agreement | None = None,
    state: Callable[[], Any] = tuple,
    pool: GraphPool | None = None,
) -> None:
    """Compile and capture the calls of ``transformer``, in place, hooks included; ``eager`` changes nothing.

    To be called last: what is registered on the transformer or swapped in it afterwards is not in its graphs. With
    ``graph.scope=step`` its calls are not captured: see ``capture_step``. ``agreement``: with the ranks that a call has
    collectives with. ``state``: asked at each call for what the arguments do not say, such as which adapter is merged.
    ``pool``: of a transformer that never runs at the same time as this one.

    Raises:
        ValueError: the mode cannot be had here.
    """
    if config.captures and device.type != "cuda":
        raise ValueError(
            f"graph.mode={config.mode} captures CUDA graphs and this run is on {device.type}: "
            f"use device=cuda, graph=compile or graph=eager"
        )
    compile_blocks(transformer, plan, config)
    if config.captures and config.scope == "transformer":
        if pool is None:
            pool = GraphPool(CudaBackend(device))
        capture_calls(transformer, config, pool, state=state, agreement=agreement)


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
    call = transformer._call_impl if compiled is None else compiled
    graphs = _capture(call, transformer, config, pool, state, agreement, inspect.signature(transformer.forward))
    transformer._compiled_call_impl = graphs


def release_calls(transformer: nn.Module) -> None:
    """Undo ``capture_calls``: drop the graphs, their memory too, and call what they called; compiled blocks stay so."""
    graphs = graphs_of(transformer)
    if graphs is not None:
        graphs.clear()
        transformer._compiled_call_impl = None if graphs.function == transformer._call_impl else graphs.function


def capture_step(
    step: Callable[..., Any],
    transformer: nn.Module,
    config: GraphConfig,
    pool: GraphPool,
    *,
    state: Callable[[], Any] = tuple,
    agreement: Agreement | None = None,
) -> CudaGraphs:
    """``step``, which calls ``transformer`` and is a function of its arguments alone, as graphs: passes, guidance and
    solver in one replay. What no step changes is under its argument ``constants``."""
    return _capture(step, transformer, config, pool, state, agreement, inspect.signature(step))


def graphs_of(transformer: nn.Module) -> CudaGraphs | None:
    """What captures the calls of ``transformer``, to seal, clear or report; None where nothing does."""
    graphs = transformer._compiled_call_impl
    return graphs if isinstance(graphs, CudaGraphs) else None


def _capture(
    function: Callable[..., Any],
    transformer: nn.Module,
    config: GraphConfig,
    pool: GraphPool,
    state: Callable[[], Any],
    agreement: Agreement | None,
    signature: inspect.Signature,
) -> CudaGraphs:
    return CudaGraphs(
        function,
        pool,
        signature=signature,
        weights=transformer,
        state=state,
        constants=CONSTANTS,
        warmup=config.warmup,
        max_graphs=config.max_graphs,
        strict=config.strict,
        on_miss=config.on_miss,
        agreement=agreement,
    )
