"""``task=plan``: every parallel plan of so many GPUs, what it is predicted to cost or why it cannot run, and which one
to take; needs neither GPU nor weights.
"""

import contextlib
import dataclasses
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from vgen import config, memory, planning, record, transforms
from vgen.config import SamplerConfig
from vgen.families import family_of
from vgen.families import ltx2 as ltx2_family
from vgen.families import wan as wan_family
from vgen.job import Job
from vgen.memory import GIB, Prediction
from vgen.models.ltx2.config import LTX2Config
from vgen.models.wan.config import WanArchitecture
from vgen.models.wan.encoder_configs import CLIP_VIT_H14
from vgen.parallel.cost import (
    H200,
    MEASURED_RANKS,
    MIB,
    Calibration,
    Decode,
    Machine,
    PlanCost,
    Tokens,
    Workload,
    calibrate,
    ltx2_decode,
    ltx2_pass,
    predict_plan,
    wan_decode,
    wan_pass,
)
from vgen.parallel.plans import SIZES, Limits, ParallelPlan, layout_reasons, legal_plans, reasons
from vgen.pipelines import wan as wan_pipeline
from vgen.requests import Request
from vgen.stages.latents import latent_geometry
from vgen.tasks.types import RankResult, TaskContext
from vgen.typed import ConfigurationError

SHOWN = 12
"""Ways of denoising in the table; ``plan.json`` has all plans."""

NEAR = 0.01
"""Plans whose times differ by less are taken as equally fast."""

TEXT_WIDTH = 150


def run(context: TaskContext) -> RankResult:
    """Write ``plan.json`` and ``plan.txt``, which the parent shows."""
    job = context.job
    explained = explain(job, num_gpus_of(job), read_records(job.config.task.records))
    record.write_json_atomic(job.out_dir / "plan.json", explained.to_mapping())
    (job.out_dir / "plan.txt").write_text(explained.to_text(), encoding="utf-8")
    return RankResult()


def num_gpus_of(job: Job) -> int:
    """``task.num_gpus``, or as many as the plan of ``parallel`` has.

    Raises:
        ConfigurationError: it is below 1.
    """
    asked = job.config.task.num_gpus
    if asked is not None and asked < 1:
        raise ConfigurationError(f"task.num_gpus={asked} has no GPU to plan for; give 1 or more")
    return asked or job.plan.world_size


def read_records(folder: str | None) -> list[dict[str, Any]]:
    """All readable ``record.json`` below ``folder``; none where it is None.

    Raises:
        ConfigurationError: there is no such folder.
    """
    if folder is None:
        return []
    if not Path(folder).is_dir():
        raise ConfigurationError(f"task.records={folder} is no folder; give one with earlier runs, or null")
    records = []
    for path in sorted(Path(folder).rglob("record.json")):
        with contextlib.suppress(OSError, ValueError):
            records.append(record.read_record(path))
    return records


# ---------------------------------------------------------------- the model and its request as numbers


def largest_request(job: Job) -> Request:
    return max(job.requests, key=lambda request: request.height * request.width * request.num_frames)


def workload_of(job: Job) -> Workload:
    """What the largest request of ``job`` asks of its model."""
    return {"ltx2": _ltx2_workload, "wan": _wan_workload}[job.config.model.family](job, largest_request(job))


def _ltx2_workload(job: Job, request: Request) -> Workload:
    architecture: LTX2Config = job.architecture
    geometry, sampler = latent_geometry(request), job.config.sampler
    assert isinstance(sampler, SamplerConfig)
    transformer = architecture.transformer
    tokens = Tokens(geometry.video_tokens, job.config.model.text_encoder.max_length, geometry.audio_tokens)
    velocity = tokens.video * transformer.out_channels + tokens.audio * transformer.audio_out_channels
    return Workload(
        pass_parts=partial(ltx2_pass, transformer, tokens),
        velocity_bytes=_value_bytes(job) * velocity,
        passes=len(ltx2_family.pass_names(request, job.config)),
        steps=len(sampler.sigmas) - 1 if sampler.sigmas else sampler.steps,
        prompts=len(job.requests),
        layers=partial(ltx2_decode, architecture.video_decoder),
        chunks=1,
        latents=(geometry.latent_frames, geometry.latent_height, geometry.latent_width),
        clip_bytes=_clip_bytes(job, request),
        axis=job.config.parallel.vae_split,
        tiles=ltx2_family.tile_settings(job.config),
        graph=_is_captured(job),
    )


def _wan_workload(job: Job, request: Request) -> Workload:
    architecture: WanArchitecture = job.architecture
    geometry, vae = wan_pipeline.latent_geometry(request, architecture), architecture.vae
    latents = (geometry.latent_frames, geometry.latent_height, geometry.latent_width)
    images = len(request.images) if architecture.transformer.image_dim else 0
    tokens = Tokens(
        geometry.video_tokens, job.config.model.text_encoder.max_length, image=images * _clip_tokens(architecture)
    )
    chunk = job.config.model.vae.chunk
    return Workload(
        pass_parts=partial(wan_pass, architecture.transformer, tokens),
        velocity_bytes=memory.FP32_BYTES * prod(latents) * vae.z_dim,
        passes=len(wan_family.pass_names(request, job.config)),
        steps=job.config.sampler.steps,
        prompts=len(job.requests),
        layers=lambda size: wan_decode(vae, size, chunk),
        chunks=-(-latents[0] // (chunk or latents[0])),
        latents=latents,
        clip_bytes=_clip_bytes(job, request),
        axis=job.config.parallel.vae_split,
        tiles=wan_family.tile_settings(job.config, architecture),
        graph=_is_captured(job),
    )


def _clip_tokens(architecture: WanArchitecture) -> int:
    sizes = {**CLIP_VIT_H14, **architecture.image_encoder}
    return int((sizes["image_size"] // sizes["patch_size"]) ** 2 + 1)


def _value_bytes(job: Job) -> int:
    return transforms.DTYPES[job.config.quant.mode].itemsize


def _clip_bytes(job: Job, request: Request) -> int:
    return 3 * request.num_frames * request.height * request.width * _value_bytes(job)


def _is_captured(job: Job) -> bool:
    return job.config.graph.mode in ("cuda", "compile_cuda")


# ---------------------------------------------------------------- plans


def all_plans(num_ranks: int) -> Iterator[ParallelPlan]:
    """Every combination of sizes that takes ``num_ranks`` ranks, legal or not."""
    divisors = [size for size in range(1, num_ranks + 1) if num_ranks % size == 0]
    for data, cfg in product(divisors, divisors):
        if num_ranks % (data * cfg) == 0:
            sizes = range(1, num_ranks + 1)
            yield from (ParallelPlan(data, cfg, num_ranks // (data * cfg), vae) for vae in sizes)
    denoising = product(range(1, num_ranks), repeat=2)
    yield from (ParallelPlan(1, cfg, ulysses, num_ranks) for cfg, ulysses in denoising if cfg * ulysses < num_ranks)


def refusals(plan: ParallelPlan, limits: Limits, strategy: str) -> tuple[str, ...]:
    """``plans.reasons``, and what ``parallel.vae_strategy`` does not allow."""
    sentences = reasons(plan, limits)
    if strategy == "whole" and plan.vae_size > 1:
        sentences += (f"parallel.vae_size={plan.vae_size} shares no decode with parallel.vae_strategy=whole; use 1",)
    return sentences


@dataclass(frozen=True)
class Refusal:
    """Plans that one rule of ``setting`` does not allow: its ``values`` in them, how many they are, and one of them."""

    setting: str
    values: tuple[int, ...]
    rule: str
    plans: int
    example: ParallelPlan

    @property
    def reason(self) -> str:
        return f"{self.setting}={','.join(map(str, self.values))} {self.rule}"


def count_refusals(num_ranks: int, limits: Limits, strategy: str) -> list[Refusal]:
    """The distinct reasons why plans of ``num_ranks`` ranks cannot run, those that rule out most first."""
    found: dict[tuple[str, str], Refusal] = {}
    for plan in all_plans(num_ranks):
        for sentence in refusals(plan, limits, strategy):
            # The fix after the semicolon names plans near this one; the table has them all.
            setting, _, rule = sentence.partition(";")[0].partition(" ")
            if layout_reasons(plan):
                rule = "is above the ranks of each of several replicas (cfg_size x ulysses_size)"
            name, _, value = setting.partition("=")
            known = found.get((name, rule)) or Refusal(name, (), rule, 0, plan)
            values = tuple(sorted({*known.values, int(value)}))
            found[name, rule] = replace(known, values=values, plans=known.plans + 1)
    return sorted(found.values(), key=lambda one: -one.plans)


def predict_memory(job: Job, plan: ParallelPlan, machine: Machine, weights: Mapping[str, int]) -> Prediction | str:
    """The worst rank's memory under ``plan``, or the sentence why the request cannot run so.

    ``weights``: bytes by component, the same under every plan.
    """
    sizes = dataclasses.asdict(plan)
    parallel = replace(job.config.parallel, **sizes, single_pass="refuse")
    planned = replace(job, config=replace(job.config, parallel=parallel))
    try:
        return planning.predict_run(planned, planned.requests, tuple(weights), machine.memory_bytes, weights)
    except ConfigurationError as error:
        return str(error)


def decode_of(strategy: str, plan: ParallelPlan, predicted: str) -> Decode:
    """How ``plan`` decodes, where memory asks for the decode ``predicted``."""
    if strategy in ("tile", "tile_balanced"):
        return "tile" if strategy == "tile" else "tile_balanced"
    if predicted in ("tile", "tile_balanced"):
        return "tile" if predicted == "tile" else "tile_balanced"
    return "halo" if plan.vae_size > 1 else "whole"


@dataclass(frozen=True)
class PlanRow:
    """``memory_gib`` and ``memory_stage``: of the worst rank; None where ``obstacle`` says why it cannot run."""

    cost: PlanCost
    memory_gib: float | None
    memory_stage: str | None
    fits: bool
    obstacle: str | None = None

    @property
    def plan(self) -> ParallelPlan:
        return self.cost.plan

    def to_mapping(self) -> dict[str, Any]:
        cost = self.cost
        return {
            **dataclasses.asdict(cost.plan),
            "decode": cost.decode,
            "step_s": cost.step_s,
            "denoise_s": cost.denoise_s,
            "decode_s": cost.decode_s,
            "total_s": cost.total_s,
            "step_mib": cost.step_bytes / MIB,
            "decode_mib": cost.decode_bytes / MIB,
            "memory_gib": self.memory_gib,
            "memory_stage": self.memory_stage,
            "fits": self.fits,
            "obstacle": self.obstacle,
            "extrapolated": cost.extrapolated,
        }


def _row(
    job: Job,
    workload: Workload,
    machine: Machine,
    calibration: Calibration,
    predicted: Callable[[ParallelPlan], Prediction | str],
    plan: ParallelPlan,
) -> PlanRow:
    found = predicted(replace(plan, data_size=1))  # a replica is like any other
    strategy = job.config.parallel.vae_strategy
    if isinstance(found, str):
        decode = decode_of(strategy, plan, "whole")
        return PlanRow(predict_plan(plan, workload, decode, machine, calibration), None, None, False, found)
    cost = predict_plan(plan, workload, decode_of(strategy, plan, found.decode), machine, calibration)
    return PlanRow(cost, found.peak / GIB, found.peak_stage, memory.fits(found.peak, machine.memory_bytes))


# ---------------------------------------------------------------- the whole answer


@dataclass(frozen=True)
class Explained:
    """``rows``: all legal plans, the fastest first. ``alone``: the plan of one rank, for comparison."""

    job: Job
    num_gpus: int
    workload: Workload
    limits: Limits
    machine: Machine
    calibration: Calibration
    rows: tuple[PlanRow, ...]
    alone: PlanRow
    refused: tuple[Refusal, ...]

    @property
    def recommended(self) -> PlanRow | None:
        """The fastest that fits; of those that are about as fast, the one with least memory; None if none fits."""
        fitting = [row for row in self.rows if row.fits]
        near = [row for row in fitting if row.cost.total_s <= (1 + NEAR) * fitting[0].cost.total_s]
        return min(near, key=lambda row: row.memory_gib or 0.0, default=None)

    def sentence(self) -> str:
        """What to take, and why."""
        best = self.recommended
        if best is None:
            return f"no plan of {self.num_gpus} GPU(s) fits into {self.machine.memory_bytes / GIB:.0f} GiB each"
        faster = self.alone.cost.total_s / best.cost.total_s
        others = [row for row in self.rows if row.fits and _denoising(row.plan) != _denoising(best.plan)]
        why = f"{faster:.2f} times as fast as one GPU"
        if others:
            more = others[0].cost.total_s / best.cost.total_s - 1
            why += f", and the next other way of denoising ({settings_of(others[0].plan)}) takes {more:.0%} longer"
        return f"take {settings_of(best.plan)}: predicted {best.cost.total_s:.1f} s, {why}"

    def basis(self) -> dict[str, str]:
        """Where the figures come from."""
        calibration, name = self.calibration, self.machine.name
        return {
            "step": _calibrated(calibration.step, calibration.step_records)
            or f"pure prediction from ceilings measured on one and two {name}s",
            "decode": _calibrated(calibration.decode, calibration.decode_records)
            or f"pure prediction from ceilings measured on one and two {name}s",
            "memory": "pure prediction from the sizes of tensors",
            "communication": f"bytes are counted; times are of messages measured between {MEASURED_RANKS} ranks, and "
            f"larger groups are assumed to be as fast for each rank",
        }

    def to_mapping(self) -> dict[str, Any]:
        request = largest_request(self.job)
        best = self.recommended
        return {
            "note": "all times, memory and messages are predictions; nothing was run",
            "model": self.job.config.model.name,
            "request": {name: getattr(request, name) for name in ("height", "width", "num_frames", "fps", "audio")},
            "prompts": self.workload.prompts,
            "video_tokens": self.limits.video_tokens,
            "passes": list(self.limits.passes),
            "steps": self.workload.steps,
            "graph": self.job.config.graph.mode,
            "num_gpus": self.num_gpus,
            "machine": {"name": self.machine.name, "memory_gib": self.machine.memory_bytes / GIB},
            "basis": self.basis(),
            "calibration": dataclasses.asdict(self.calibration),
            "asked": dataclasses.asdict(self.job.plan),
            "recommended": None if best is None else dataclasses.asdict(best.plan),
            "recommendation": self.sentence(),
            "one_gpu": self.alone.to_mapping(),
            "plans": [row.to_mapping() for row in self.rows],
            "illegal": [{**dataclasses.asdict(one), "reason": one.reason} for one in self.refused],
        }

    def to_text(self) -> str:
        """The table of the best plans as plain text, the reasons against others, and the recommendation."""
        # rich is imported only where something is shown.
        from rich.console import Console

        out = io.StringIO()
        console = Console(file=out, width=TEXT_WIDTH, force_terminal=False, highlight=False, emoji=False, markup=False)
        shown = self.shown()
        lines = [self._heading(), *([self._table(shown)] if shown else [])]
        counted = f"{len(self.rows)} legal plan(s), {len(shown)} shown, all in plan.json"
        lines.append(f"{counted}; > asked for, * recommended" if shown else counted)
        lines += [f"  {name}: {words}" for name, words in self.basis().items()]
        lines += [f"  not legal: {one.reason} ({one.plans} plan(s))" for one in self.refused]
        lines += [f"  cannot run: {text}" for text in dict.fromkeys(row.obstacle for row in self.rows) if text]
        for line in (*lines, self.sentence()):
            console.print(line, soft_wrap=isinstance(line, str))
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"

    def shown(self) -> list[PlanRow]:
        """Of each way of denoising the fastest decode, and the plan that was asked for."""
        best: dict[tuple[int, int, int], PlanRow] = {}
        for row in self.rows:
            best.setdefault(_denoising(row.plan), row)
        kept = [*best.values()][:SHOWN]
        return [row for row in self.rows if row in kept or row.plan == self.job.plan or row == self.recommended]

    def _heading(self) -> str:
        request, passes = largest_request(self.job), self.limits.passes
        return (
            f"{self.job.config.model.name}, {request.width}×{request.height}×{request.num_frames}: "
            f"{self.limits.video_tokens} video tokens, {len(passes)} pass(es) a step ({', '.join(passes)}), "
            f"{self.workload.steps} steps, {self.workload.prompts} prompt(s), {self.num_gpus} {self.machine.name}(s). "
            f"All figures are predictions."
        )

    def _table(self, rows: Sequence[PlanRow]) -> Any:
        from rich import box
        from rich.table import Table

        table = Table(box=box.SIMPLE, pad_edge=False)
        for name in ("", "data", "cfg", "ulysses", "vae", "decode"):
            table.add_column(name, no_wrap=True)
        for name in ("step s", "all steps s", "decode s", "total s", "GiB, worst rank", "MiB a step", "MiB a decode"):
            table.add_column(name, justify="right", no_wrap=True)
        for row in rows:
            table.add_row(*self._cells(row))
        return table

    def _cells(self, row: PlanRow) -> tuple[str, ...]:
        marks = (">" if row.plan == self.job.plan else "") + ("*" if row == self.recommended else "")
        cost, plan = row.cost, row.plan
        gib = "-" if row.memory_gib is None else f"{row.memory_gib:.1f}{'' if row.fits else ' too much'}"
        return (
            marks,
            *(str(getattr(plan, name)) for name in SIZES),
            cost.decode,
            f"{cost.step_s:.3f}",
            f"{cost.denoise_s:.1f}",
            f"{cost.decode_s:.2f}",
            f"{cost.total_s:.1f}",
            gib,
            f"{cost.step_bytes / MIB:.0f}",
            f"{cost.decode_bytes / MIB:.0f}",
        )


def _calibrated(factor: float, records: int) -> str:
    return f"prediction times {factor:.3f}, the median of measured / predicted of {records} run(s)" if records else ""


def _denoising(plan: ParallelPlan) -> tuple[int, int, int]:
    return plan.data_size, plan.cfg_size, plan.ulysses_size


def settings_of(plan: ParallelPlan) -> str:
    """``plan`` as settings of the command line, without those that are 1."""
    sizes = [f"parallel.{name}={getattr(plan, name)}" for name in SIZES if getattr(plan, name) != 1]
    return " ".join(sizes) or "parallel=pvs1"


def explain(job: Job, num_gpus: int, records: Sequence[Mapping[str, Any]] = (), machine: Machine = H200) -> Explained:
    """All that is known of the plans of ``num_gpus`` GPUs of ``machine``, its times corrected by ``records``."""
    workload, strategy = workload_of(job), job.config.parallel.vae_strategy
    limits = family_of(job.config).limits(job.config, job.requests, job.architecture)
    calibration = calibrate(records, workload, comparable(job), machine)
    weights = {name: transforms.component_bytes(job, name) for name in transforms.components_of(job)}
    predicted = cache(partial(predict_memory, job, machine=machine, weights=weights))
    row_of = partial(_row, job, workload, machine, calibration, predicted)
    legal = [plan for plan in legal_plans(num_gpus, limits) if not refusals(plan, limits, strategy)]
    rows = sorted(map(row_of, legal), key=lambda row: row.cost.total_s)
    refused = count_refusals(num_gpus, limits, strategy)
    alone = row_of(ParallelPlan())
    return Explained(
        job, num_gpus, workload, limits, machine, calibration, tuple(rows), alone, tuple(refused)
    )  # fmt: skip


def comparable(job: Job) -> dict[str, Any]:
    """The settings in which an earlier run has to agree, by their paths in its record."""
    settings, request = record.plain(config.to_mapping(job.config)), largest_request(job)
    same = {
        "config.model.name": settings["model"]["name"],
        "config.model.attention": settings["model"]["attention"],
        "config.quant.mode": settings["quant"]["mode"],
        "config.graph.mode": settings["graph"]["mode"],
        "config.request.images": settings["request"]["images"],
        "config.request.image": settings["request"]["image"],
    }
    return same | {
        f"config.request.{name}": getattr(request, name) for name in ("height", "width", "num_frames", "audio")
    }
