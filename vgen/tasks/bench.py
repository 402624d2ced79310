"""Rows of a benchmark task: what ranks time, alone or together, and the table ``bench.json`` and ``bench.txt``."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vgen import record
from vgen.components.ranks import VaeShare, agreement_of_calls, agreement_of_steps, denoises, passes_over
from vgen.config import GraphConfig
from vgen.graph.apply import capture_calls, capture_step, graphs_of, release_calls
from vgen.graph.backend import CudaBackend
from vgen.graph.compile import compile_blocks
from vgen.graph.cuda_graph import CudaGraphs
from vgen.graph.pool import GraphPool
from vgen.memory import Decode
from vgen.metrics.drift import profile_steps
from vgen.models.plan import Plan
from vgen.parallel.tiles import TileSettings
from vgen.parallel.ulysses import apply_ulysses
from vgen.tasks.measure import Measurement, measure, relative_error
from vgen.tasks.types import TaskContext

PROFILED_STEPS = 3

Output = Tensor | Sequence[Tensor] | None
"""What a row computes; None on a rank that gets none of it."""


class Bench:
    """The rows of one task. ``bench.warmup`` and ``bench.repeats`` hold for each.

    All ranks of a job make the same rows. The first row's output is what the others are compared with. To be written
    at the end, by ``write``.
    """

    def __init__(self, context: TaskContext) -> None:
        self._context = context
        self._rows: list[Measurement] = []
        self._errors: dict[str, float] = {}
        self._reference: tuple[Tensor, ...] | None = None

    def row(
        self,
        name: str,
        call: Callable[[], object],
        output: Callable[[], Output] | None = None,
        *,
        together: bool = False,
        like_reference: Callable[[Tensor], Tensor] = lambda x: x,
    ) -> None:
        """Time ``call`` on the first rank, or on all of them ``together``, of which the slowest counts.

        Args:
            output: what ``call`` computes, to compare; by default what it returns.
            like_reference: the reference as this row has it, where it clamps for example.
        """
        context, bench = self._context, self._context.job.config.bench
        if together or context.is_first:
            meet = _meet if together else _go_on
            row = measure(name, call, context.device, warmup=bench.warmup, repeats=bench.repeats, before=meet)
            made = _on_host((output or call)())  # type: ignore[arg-type]
            if together:
                row = _slowest(row, context.device)
            self._rows.append(row)
            if self._reference is None:
                self._reference = made
            elif made is not None:
                pairs = zip(made, self._reference, strict=True)
                self._errors[name] = max(relative_error(like_reference(other), ours) for ours, other in pairs)
        _meet(context.device)

    def rows_over_ranks(
        self,
        ways: Iterable[tuple[str, VaeShare]],
        build: Callable[[VaeShare], tuple[Callable[[], object], Callable[[], Output]]],
    ) -> None:
        """A row for each of ``shares``: what to time and its output, by ``build``; ranks without a part wait."""
        for name, share in ways:
            takes_part = self._context.mesh.vae_rank is not None
            call, output = build(share) if takes_part else (_nothing, _nothing)
            self.row(name, call, output, together=True)

    @property
    def rows(self) -> Sequence[Measurement]:
        """So far, on this rank."""
        return self._rows

    def write(self, **facts: Any) -> None:
        """On the first rank, with ``facts`` beside the rows; ratios are of medians over diffusers' or the first row."""
        if not self._context.is_first:
            return
        out_dir, rows = self._context.job.out_dir, self._rows
        base = next((row for row in rows if row.name.startswith("diffusers")), rows[0])
        table = [
            {
                **dataclasses.asdict(row),
                "speed_ratio": base.median_ms / row.median_ms,
                "relative_error": self._errors.get(row.name),
            }
            for row in rows
        ]
        whole = {"rows": table, "baseline": base.name, "error_against": rows[0].name, **facts}
        record.write_json_atomic(out_dir / "bench.json", whole)
        (out_dir / "bench.txt").write_text(_table(table, base.name))  # the parent shows it


def shares(
    context: TaskContext, settings: TileSettings, latent_sizes: tuple[int, int], strategies: Sequence[Decode]
) -> Iterator[tuple[str, VaeShare]]:
    """The ways over the ranks of the VAE that are to be timed, with the name of each; none where there is one rank.

    All of ``strategies``, ``halo`` along both sides, or the one that the configuration names. A side of
    ``latent_sizes`` (height, width) with fewer lines than ranks is left out.
    """
    job, ranks = context.job, context.job.plan.vae_size
    asked = job.config.parallel.vae_strategy
    if ranks == 1:
        return
    for strategy in strategies if asked == "auto" else [one for one in strategies if one == asked]:
        if strategy != "halo":
            yield f"vgen {strategy}, {ranks} ranks", VaeShare(job, context.mesh, strategy, settings)
            continue
        sides: tuple[Literal["height", "width"], ...] = ("height", "width")
        for side, lines in zip(sides, latent_sizes, strict=True):
            if lines >= ranks and job.config.parallel.vae_split in ("auto", side):
                parallel = dataclasses.replace(job.config.parallel, vae_split=side)
                cut = dataclasses.replace(job, config=dataclasses.replace(job.config, parallel=parallel))
                yield f"vgen halo by {side}, {ranks} ranks", VaeShare(cut, context.mesh, strategy, settings)


def rows_of_plan(
    rows: Bench, context: TaskContext, transformer: nn.Module, plan: Plan, forward: Callable[[], Output]
) -> None:
    """A pass over the ranks of Ulysses, and two passes over those of CFG beside two on one rank.

    ``forward`` runs ``transformer``, which afterwards stays spread.
    """
    mesh, sizes = context.mesh, context.job.plan

    def both() -> Output:
        outputs = passes_over(mesh)({name: lambda: _as_tuple(forward()) for name in ("cond", "uncond")})
        return [part for part in outputs["uncond"] if part is not None]

    if sizes.cfg_size > 1:
        rows.row("vgen, 2 passes", lambda: (forward(), forward()), forward)
    if sizes.ulysses_size > 1:
        apply_ulysses(transformer, plan, mesh.ulysses)
        rows.row(f"vgen, Ulysses {sizes.ulysses_size}", forward if denoises(mesh) else _nothing, together=True)
    if sizes.cfg_size > 1:
        over = f", Ulysses {sizes.ulysses_size}" if sizes.ulysses_size > 1 else ""
        rows.row(f"vgen, 2 passes, CFG 2{over}", both if denoises(mesh) else _nothing, together=True)


@dataclass(frozen=True)
class WholeStep:
    """``run``: a step as a function of its arguments alone; ``call``: what calls it, or graphs in its place, once."""

    run: Callable[..., Any]
    call: Callable[[Callable[..., Any]], Callable[[], Output]]


def rows_of_steps(
    rows: Bench,
    context: TaskContext,
    transformer: nn.Module,
    plan: Plan,
    run: Callable[..., Any],
    call: Callable[[Callable[..., Any]], Callable[[], Output]],
) -> dict[str, Any]:
    """Whole steps, eager ones and those of ``bench.graphs``, over the ranks; as ``rows_of_graphs``.

    ``run``: a step of ``transformer`` as a function of its arguments alone. ``call``: what calls it, or its graphs.
    """
    apply_ulysses(transformer, plan, context.mesh.ulysses)
    return rows_of_graphs(rows, context, transformer, plan, call(run), WholeStep(run, call))


def rows_of_graphs(
    rows: Bench,
    context: TaskContext,
    transformer: nn.Module,
    plan: Plan,
    forward: Callable[[], Output],
    step: WholeStep | None = None,
) -> dict[str, Any]:
    """A row for each mode of ``bench.graphs``; ``forward`` runs ``transformer``, which afterwards stays compiled.

    With ``step`` the rows are of whole steps, eager ones first, and a graph holds what ``graph.scope`` says.

    Returns, for the table, by row: ``break_even_steps``, after how many passes its first call has paid (None: never);
    ``equal_bits``, whether a replay has the bits of the same code run without capture; on a GPU the largest
    ``idle_share`` of a pass and its ``launches``.
    """
    config, device, runs = context.job.config, context.device, denoises(context.mesh)
    call = forward if runs else _nothing
    facts: dict[str, Any] = {"break_even_steps": {}, "equal_bits": {}, "idle_share": {}, "launches": {}}
    modes: list[Literal["eager", "compile", "cuda", "compile_cuda"]] = ["eager", *config.bench.graphs]
    for mode in modes if config.bench.graphs or step is not None else ():
        graph = dataclasses.replace(config.graph, mode=mode)
        name = f"vgen {mode}" if step is None else f"vgen step, {mode}"
        compile_blocks(transformer, plan, graph)
        graphs = _capture(context, transformer, graph, step)
        timed = call
        if step is not None and graphs is not None and graph.scope == "step":
            timed = step.call(graphs)
        if mode != "eager" or step is not None:
            rows.row(name, timed, together=True)
            if context.is_first and mode != "eager":
                facts["break_even_steps"][name] = _break_even(_eager(rows, context), rows.rows[-1])
        if device.type == "cuda" and runs:
            work = profile_steps(timed, PROFILED_STEPS, device)
            facts["idle_share"][name], facts["launches"][name] = max(work.idle_shares), max(work.launches)
        if graphs is not None:
            replayed = _on_host(timed())
            release_calls(transformer)
            graphs.clear()
            expected = _on_host(call())
            if replayed is not None and expected is not None:
                facts["equal_bits"][name] = all(map(torch.equal, replayed, expected))
    return facts if config.bench.graphs or step is not None else {}


def _capture(
    context: TaskContext, transformer: nn.Module, graph: GraphConfig, step: WholeStep | None
) -> CudaGraphs | None:
    """The calls of ``transformer``, in place, or steps, as ``graph.scope`` says; None where the mode captures nothing.

    Steps exchange passes, so all ranks that denoise capture them together.
    """
    if not graph.captures or not denoises(context.mesh):
        return None
    pool = GraphPool(CudaBackend(context.device))
    if step is None or graph.scope == "transformer":
        capture_calls(transformer, graph, pool, agreement=agreement_of_calls(context.mesh))
        return graphs_of(transformer)
    return capture_step(step.run, transformer, graph, pool, agreement=agreement_of_steps(context.job, context.mesh))


def _eager(rows: Bench, context: TaskContext) -> Measurement:
    """One pass, or step, without graphs, over the ranks that a captured one is over."""
    spread = [row for row in rows.rows if row.name.startswith("vgen, Ulysses")]
    return spread[0] if spread and context.job.plan.ulysses_size > 1 else rows.rows[0]


def _break_even(eager: Measurement, other: Measurement) -> int | None:
    """Passes after which ``other`` has been faster in sum, its first call included; None where it never is."""
    gain = eager.median_ms - other.median_ms
    cost = other.first_ms - eager.first_ms
    return None if gain <= 0 else max(1, math.ceil(1 + cost / gain))


def _as_tuple(output: Output) -> tuple[Tensor | None, ...]:
    assert output is not None
    return (output,) if isinstance(output, Tensor) else tuple(output)


def _nothing() -> None:
    """A rank without a part."""


def timed_and_joined(parts: Callable[[], Iterable[Tensor]]) -> tuple[Callable[[], None], Callable[[], Tensor | None]]:
    """Of a decode in groups of frames: to take them one by one, and all of them on the host; None where none come."""

    def take() -> None:
        for _ in parts():
            pass

    def join() -> Tensor | None:
        groups = [group.cpu() for group in parts()]
        return torch.cat(groups, dim=2) if groups else None

    return take, join


def _table(rows: Sequence[dict[str, Any]], baseline: str) -> str:
    width = max(24, *(len(row["name"]) + 2 for row in rows))
    lines = [f"{'':{width}}{'first ms':>10}{'median ms':>11}{'peak GiB':>10}{'× ' + baseline:>20}{'rel. error':>12}"]
    for row in rows:
        peak = "" if row["peak_gib"] is None else f"{row['peak_gib']:.2f}"
        error = "" if row["relative_error"] is None else f"{row['relative_error']:.1e}"
        lines.append(
            f"{row['name']:{width}}{row['first_ms']:10.1f}{row['median_ms']:11.2f}{peak:>10}"
            f"{row['speed_ratio']:20.3f}{error:>12}"
        )
    return "\n".join(lines) + "\n"


def _on_host(output: Output) -> tuple[Tensor, ...] | None:
    if output is None:
        return None
    return tuple(part.cpu() for part in ((output,) if isinstance(output, Tensor) else output))


def _go_on(device: torch.device) -> None:
    """Waits for nobody."""


def _meet(device: torch.device) -> None:
    """Wait for all ranks of the job, so that nobody's time has the lateness of another in it."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(torch.zeros(1, device=device))
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _slowest(row: Measurement, device: torch.device) -> Measurement:
    """The longest of each run over all ranks, and the largest peak."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return row
    own = torch.tensor([row.first_ms, row.peak_gib or 0.0, *row.runs_ms], dtype=torch.float64, device=device)
    dist.all_reduce(own, dist.ReduceOp.MAX)
    first, peak, *runs = own.tolist()
    return Measurement.of_runs(row.name, first, runs, None if row.peak_gib is None else peak)
