"""The Hydra parent: composes, checks, starts the ranks of each job, and settles the exit code. Never imports torch."""

import dataclasses
import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, OverrideParseException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launchers.devices import count_gpus
from launchers.environment import node_layout
from launchers.supervisor import JobFailed, JobInterrupted, run_ranks
from vgen import arguments, preflight, record, rescue, typed
from vgen.config import Config, from_mapping, to_mapping
from vgen.families import family_of
from vgen.job import Job, plan_job
from vgen.requests import build_requests
from vgen.typed import ConfigurationError
from vgen.validate import validate

log = logging.getLogger("vgen")

NOTICE = "vgen: "
"""How a line begins that a rank wants on the console."""

_failed_jobs: list[Path] = []


def conf_dir() -> str:
    """The configuration folder: beside the packages in a checkout, inside ``vgen`` in an installed wheel."""
    package = Path(__file__).resolve().parent
    checkout = package.parent / "conf"
    return str(checkout if (checkout / "config.yaml").is_file() else package / "conf")


def main(entry: Callable[[], object]) -> None:
    """Run the command line and exit: 0 only if all that was asked for is done."""
    sys.argv[1:] = arguments.prepare(sys.argv[1:])
    logging.raiseExceptions = False  # a log on a full disk must not cover the error that filled it
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors reach us as exceptions and are told in one sentence below
    try:
        entry()
    except (HydraException, OmegaConfBaseException, ConfigurationError, OSError) as error:
        say_error(explain(error))
        sys.exit(2)
    except KeyboardInterrupt:
        say_error("interrupted")
        sys.exit(130)
    sys.exit(1 if _failed_jobs else 0)


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def say_error(text: str) -> None:
    sys.stderr.write(f"vgen: {text}\n")
    sys.stderr.flush()


def explain(error: BaseException) -> str:
    """One sentence for an error of composing the configuration or of the output folder."""
    text = str(error)
    if isinstance(error, OSError) and error.filename:
        return f"the output folder {error.filename} cannot be written ({error.strerror}); set hydra.run.dir=<folder>"
    if match := re.search(r"Could not override '([^']+)'", text):
        return typed.unknown_setting(Config, match[1])
    if match := re.search(
        r"Could not find '(?:.*/)?([^'/]+)/([^'/]+)'.*?Available options in '[^']*':\s*(.*)", text, re.DOTALL
    ):
        listing = match[3].split("Config search path")[0]
        options = ", ".join(line.strip() for line in listing.split("\n") if line.strip())
        return f"{match[1]}={match[2]} is not an option; use one of: {options}"
    if match := re.search(r"Interpolation key 'model\.(sampler_defaults\.[^']+)' not found", text):
        return (
            f"this sampler is not for this model, which has no {match[1]}; leave sampler= out, or use default with "
            f"LTX-2 and unipc or euler with Wan"
        )
    if match := re.search(r"Ambiguous value for argument '([^']*)'", text):
        return (
            f"the argument {match[1]} has a comma; quote the text ('key=\"a,b\"'), use [a,b] for a list, or -m to sweep"
        )
    if isinstance(error, OverrideParseException):
        what = error.override
        return f"the argument {what} cannot be read; put text with spaces or signs in inner quotes: 'key=\"…\"'"
    return " ".join(line.strip() for line in text.split("\n") if line.strip())


def run_job(composed: DictConfig) -> float | None:
    """Run one job of this command line; returns its seconds (None where it failed), for optimising sweepers."""
    out_dir = Path(HydraConfig.get().runtime.output_dir)
    started = time.monotonic()
    config: Config | None = None
    data: dict[str, Any] = {}
    try:
        data = _resolve(composed)
        config = from_mapping(data)
        if _is_done(config, out_dir):
            say(f"{out_dir}: done before, skipped")
            return _metric(record.read_record(out_dir / "record.json"))
        job = _prepare(config, out_dir)
        _announce(job)
        if config.launcher.dry_run:
            say(f"{job.path} is written; start it with launchers/torchrun.sh")
            return None
        record.start_record(out_dir / "record.json", config=to_mapping(config))
        try:
            _run(job)
        except JobFailed as error:
            _rescue(job, error, started)
        return _report(out_dir)
    except JobInterrupted as error:
        _fail(out_dir, data, config, started, kind="Interrupted", message=str(error))
        raise SystemExit(error.exit_code) from None
    except JobFailed as error:
        failure = error.failure
        _fail(
            out_dir, data, config, started, kind=failure.kind or "RankFailed", message=failure.message or str(error),
            rank=failure.rank, stage=failure.stage, trace=failure.traceback,
        )  # fmt: skip
    except (ValueError, OmegaConfBaseException, OSError) as error:
        _fail(out_dir, data, config, started, kind=type(error).__name__, message=explain(error), stage="validate")
    return None


def _resolve(composed: DictConfig) -> dict[str, Any]:
    container = OmegaConf.to_container(composed, resolve=True)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def _is_done(config: Config, out_dir: Path) -> bool:
    """A sweep sent again into its own folder goes on where it stopped."""
    path = out_dir / "record.json"
    if _sweep_name() is None or config.launcher.dry_run or not path.is_file():
        return False
    earlier = record.read_record(path)
    return earlier["status"] == "ok" and earlier["cell"] == record.cell_hash(to_mapping(config))


def _prepare(config: Config, out_dir: Path) -> Job:
    num_gpus = count_gpus() if config.device != "cpu" else 0
    requests = build_requests(config.request)
    job = plan_job(config, requests, out_dir, num_gpus=num_gpus, sweep=_sweep_name())
    validate(config, requests, job.architecture, num_gpus, job.checkpoint)
    if config.task.name == "preflight":
        job = _shrink(job)
    job.write()
    return job


def _shrink(job: Job) -> Job:
    """The job of ``task=preflight``, small."""
    tiny = OmegaConf.to_container(
        OmegaConf.load(Path(conf_dir()) / "model" / f"{preflight.tiny_model(job.config)}.yaml")
    )
    assert isinstance(tiny, dict)
    config, requests = preflight.shrink(job.config, job.requests, job.plan, {str(k): v for k, v in tiny.items()})
    architecture = family_of(config).architecture_of(config, None)
    validate(config, requests, architecture, 0)
    return dataclasses.replace(job, config=config, requests=requests, architecture=architecture)


def _sweep_name() -> str | None:
    hydra = HydraConfig.get()
    return str(Path(hydra.sweep.dir)) if "MULTIRUN" in str(hydra.mode) else None


def _announce(job: Job) -> None:
    config = job.config
    ranks = job.num_ranks
    prompts = len(job.requests)
    weights = " with random weights" if config.model.weights == "random" else ""
    say(
        f"{config.task.name} · {config.model.name}{weights} · {config.quant.mode} · "
        f"{ranks} rank{'s' * (ranks > 1)} on {job.device} · {prompts} prompt{'s' * (prompts > 1)} · {job.out_dir}"
    )


def _run(job: Job) -> None:
    command = [sys.executable, "-m", "vgen.worker", str(job.path)]
    if job.config.launcher.inline:
        from vgen import worker  # the debugger's way in; this is the one place where the parent meets torch

        worker.run_inline(job.path)
        return
    environ = dict(os.environ)
    if job.device == "cpu" and job.config.launcher.cpu_threads is not None:
        environ["OMP_NUM_THREADS"] = str(job.config.launcher.cpu_threads)
    run_ranks(
        command,
        world_size=job.num_ranks,
        out_dir=job.out_dir,
        environ=environ,
        layout=node_layout(os.environ),
        grace_s=job.config.launcher.grace_s,
        echo=job.config.debug,
        on_line=None if job.config.debug else _pass_on,
    )


def _rescue(job: Job, failed: JobFailed, started: float) -> None:
    """Finish a run that has its latents and had no memory to decode them; its record says how.

    Raises:
        JobFailed: that is not what went wrong, or nothing helped.
    """
    tried: list[str] = []
    failure = failed.failure
    if node_layout(os.environ).num_nodes > 1:  # each machine's parent sees its own ranks only
        raise failed
    for attempt in rescue.attempts(job, failure.kind, failure.stage):
        say(f"  the decode ran out of memory; its latents are kept, again with: {attempt.name}")
        log.warning("the decode ran out of memory; again with: %s\n%s", attempt.name, failure.traceback or "")
        tried.append(attempt.name)
        attempt.job.write()
        try:
            _run(attempt.job)
        except JobFailed as error:
            failure = error.failure
            if failure.kind != "OutOfMemoryError":
                raise
            continue
        finally:
            job.write()
        _join_record(job, tried, time.monotonic() - started)
        return
    if tried:
        say(f"  the latents are kept; finish with task=decode task.latents={job.out_dir} where there is more memory")
    raise JobFailed(failure)


def _join_record(job: Job, tried: Sequence[str], total_s: float) -> None:
    """What ``task=decode`` left, as the record of the run that it finished: times and memory are of the decode."""
    path = job.out_dir / "record.json"
    done = record.read_record(path)
    whole = record.build_record(config=to_mapping(job.config))
    sizes = {**dataclasses.asdict(job.plan), "vae_size": done["active"]["vae_size"], "world_size": job.num_ranks}
    active = {**done["active"], **sizes, "decode_fallbacks": [*tried, *(done["active"]["decode_fallbacks"] or ())]}
    own = {name: whole[name] for name in ("config", "cell", "task")}
    timings = {**done["timings_s"], "total": total_s}
    record.write_json_atomic(path, {**done, **own, "active": active, "timings_s": timings})


def _pass_on(rank: int, line: str) -> None:  # noqa: ARG001
    if line.startswith(NOTICE):
        say(f"  {line.removeprefix(NOTICE)}")


def _report(out_dir: Path) -> float | None:
    result = record.read_record(out_dir / "record.json")
    for output in result["outputs"] or ():
        say(f"  {_describe(out_dir, output)}")
    for name in ("bench.txt", "plan.txt"):
        if (table := out_dir / name).is_file():
            say(table.read_text(encoding="utf-8").rstrip())
    timings = result["timings_s"]
    say("  " + " · ".join(f"{name} {timings[name]:.2f} s" for name in record.STAGES if timings[name] is not None))
    return _metric(result)


def _describe(out_dir: Path, output: dict[str, Any]) -> str:
    sound = f", sound {output['audio_seconds']:.2f} s" if output["has_audio"] else ""
    size = f"{output['width']}×{output['height']} × {output['num_frames']} at {output['fps']:g} fps"
    return f"{out_dir / output['path']}: {size}{sound}"


def _metric(result: dict[str, Any]) -> float | None:
    total = result["timings_s"]["total"]
    return None if total is None else float(total)


def _fail(
    out_dir: Path,
    data: dict[str, Any],
    config: Config | None,
    started: float,
    *,
    kind: str,
    message: str,
    rank: int | None = None,
    stage: str | None = None,
    trace: str | None = None,
) -> None:
    """One sentence on the console, the traceback once in run.log, the record on disk."""
    _failed_jobs.append(out_dir)
    sentence = " ".join(message.split())
    where = f"rank {rank}{f' in {stage}' if stage else ''}: " if rank is not None else ""
    say_error(f"{where}{sentence}" + (f" (log: {out_dir / 'run.log'})" if rank is not None else ""))
    log.error("%s%s\n%s", where, sentence, (trace or "").strip())
    if trace and config is not None and config.debug:
        sys.stderr.write(f"{trace.rstrip()}\n")
    try:
        record.write_failed(
            out_dir / "record.json",
            config=to_mapping(config) if config else data,
            error=record.error_entry(kind, sentence, rank, stage),
            total_s=time.monotonic() - started,
        )
    except record.OutputError as error:
        say_error(str(error))


class SweepCallback(Callback):
    """Settles a sweep's exit code from the records, since its jobs may have run in other processes."""

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        folder = Path(config.hydra.sweep.dir)
        rows = [(path.parent, json.loads(path.read_text())) for path in sorted(folder.glob("*/record.json"))]
        if not rows:
            return
        failed = [path for path, row in rows if row["status"] != "ok"]
        _failed_jobs.extend(path for path in failed if path not in _failed_jobs)
        say(f"sweep: {len(rows) - len(failed)} of {len(rows)} jobs done, {folder}")
