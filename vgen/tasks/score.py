"""``task=score``: how often the model does what captions of the tiny world say, judged by frames and sound alone.

Shapes: F frames, H, W pixels, C channels of sound, S samples.
"""

import dataclasses
import logging
import math
import random
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vgen import media, planning, transforms
from vgen.config import Config, ImageConfig
from vgen.families import family_of
from vgen.job import Job
from vgen.metrics.timer import StageTimer
from vgen.models.ltx2.mel import log_mel
from vgen.pipelines import pipeline_of
from vgen.pipelines.types import Components
from vgen.pipelines.wan import WanComponents
from vgen.progress import progress
from vgen.record import atomic_file, write_json_atomic
from vgen.requests import Request, build_requests
from vgen.stages.decode import Sound, decode_audio
from vgen.tasks.types import RankResult, TaskContext
from vgen.tiny.grammar import PITCHES_HZ, Scene, Split, caption, captions, parse, sample_scene
from vgen.tiny.render import render, render_sound, render_video
from vgen.tiny.score import SAME_FREQUENCY, Score, frequency_error, measure_sound, score
from vgen.tiny.sheets import MOST_CLIPS, Entry, contact_sheet, pick_frames

notice = logging.getLogger("vgen.notice")

Frames = NDArray[np.uint8]
Part = Literal["seen", "held_out", "image"]

SPLITS: Mapping[Part, Split] = {"seen": "seen", "held_out": "heldout", "image": "seen"}
ATTRIBUTES = ("shape", "colour", "motion", "pitch", "loudness")

SAMPLE_RATE = 16000
"""Of rendered sound."""

EQUAL_DB = 100.0
"""PSNR of equal pictures."""


@dataclass(frozen=True)
class Case:
    """One prompt, and the scene that it words."""

    part: Part
    number: int
    scene: Scene
    request: Request


@dataclass(frozen=True)
class Outcome:
    """``own``: of the scene's rendered clip, which shows what was asked; a judge that denies it errs.

    ``psnr_db``: of the first frame against the image that was given. ``frames``: uint8 [3, H, W, 3] for the sheet.
    """

    case: Case
    score: Score
    own: Score
    psnr_db: float | None
    frames: Frames | None


@dataclass(frozen=True)
class RoundTrip:
    """A held-out clip through the VAEs and the vocoder; ``found_hz`` is None for silence, ``frequency_hz`` for a model
    without sound."""

    number: int
    psnr_db: float
    frequency_hz: float | None
    found_hz: float | None


class ClipSink:
    """Keeps a clip in memory: ``frames`` uint8 [F, H, W, 3] and ``sound``."""

    frames: Frames
    sound: Sound | None

    def save_latents(self, video: Tensor, audio: Tensor | None) -> None:
        """Keeps none."""

    def write(self, frames: Iterator[Tensor], sound: Sound | None) -> None:
        self.frames = torch.cat([media.to_uint8(group).cpu() for group in frames]).numpy()
        self.sound = sound

    def note_fallback(self, name: str) -> None:
        """Nobody asks."""


def run(context: TaskContext) -> RankResult:
    """Cases ``data_rank, data_rank + data_size, …`` through the pipeline; rank 0 writes what came of all of them."""
    with tempfile.TemporaryDirectory() as folder:
        cases = build_cases(context.job.config, Path(folder))
        result, outcomes, trips = _run_share(context, cases)
    everything = _gather((outcomes, trips))
    if context.data_rank == 0:
        outcomes = [one for theirs, _ in everything for one in theirs]
        trips = [one for _, theirs in everything for one in theirs]
        _write(context, sorted(outcomes, key=_number), sorted(trips, key=lambda one: one.number))
    return result


def build_cases(config: Config, folder: Path) -> list[Case]:
    """All prompts of the job, the same on every rank; ``folder`` is where the images to start from will be."""
    request, cases = config.request, list[Case]()
    for part, split in SPLITS.items():
        for number in range(getattr(config.score, part)):
            scene = sample_scene(request.seed, number, split)
            asked = dataclasses.replace(
                request,
                prompt=_wording(scene, part, number, request.seed),
                image=str(folder / f"{number}.png") if part == "image" else None,
                seed=request.seed + len(cases),
            )
            made = dataclasses.replace(build_requests(asked)[0], index=len(cases))
            cases.append(Case(part, number, scene, made))
    return cases


def _wording(scene: Scene, part: Part, number: int, seed: int) -> str:
    """Any of the grammar, but every other one names the pitch, and with an image each names all there is."""
    draw = random.Random(f"{seed}/{part}/{number}")
    if part == "image":
        return max(draw.sample(captions(scene), len(captions(scene))), key=lambda text: len(parse(text)))
    if number % 2 == 0:
        return draw.choice([text for text in captions(scene) if "pitch" in parse(text)])
    return caption(scene, draw)


def planned_requests(job: Job, cases: Sequence[Case]) -> tuple[Request, ...]:
    """Those of ``cases``, and for round trips one that needs what they need: it starts from a clip, with its sound
    where the model has one."""
    requests = tuple(case.request for case in cases)
    if not job.config.score.round_trips:
        return requests
    if job.config.model.family == "wan":
        clip = dataclasses.replace(job.requests[0], images=(ImageConfig("a rendered frame"),))
    else:
        clip = dataclasses.replace(job.requests[0], video="a rendered clip", noise_level=0.5)
    return (*requests, clip)


def _run_share(context: TaskContext, cases: Sequence[Case]) -> tuple[RankResult, list[Outcome], list[RoundTrip]]:
    job, device, result = context.job, context.device, RankResult()
    request = job.requests[0]
    job = dataclasses.replace(job, requests=planned_requests(job, cases))
    mine = cases[context.data_rank :: context.data_size]
    trips = range(context.data_rank, job.config.score.round_trips, context.data_size)
    timer = StageTimer(device)
    plan = planning.plan_run(job, job.requests, device, transforms.components_of(job))
    with timer("load"):
        components = transforms.build_components(job, device, plan.decode, [case.request for case in mine], timer)
    result.add_once(timer)
    passes = family_of(job.config).pass_names(job.requests[0], job.config)
    result.active = {**plan.active(), "passes": passes}
    with progress("score", len(mine) + len(trips)) as bar:
        outcomes, made = [], []
        for case in mine:
            outcomes.append(_run_case(context, components, case, result))
            bar.advance()
        for number in trips:
            made.append(_run_round_trip(components, request, number))
            bar.advance()
    return result, outcomes, made


def _run_case(context: TaskContext, components: Components, case: Case, result: RankResult) -> Outcome:
    request, asked, sink, timer = case.request, parse(case.request.prompt), ClipSink(), StageTimer(context.device)
    clip = render([case.scene], request.num_frames, request.height, request.width, request.fps, SAMPLE_RATE)
    true = media.to_uint8(clip.video).numpy()
    if request.images:
        Image.fromarray(true[0]).save(request.images[0].path)
    pipeline_of(context.job).generate(components, request, context.job.config.sampler, sink, timer)
    result.add_request(timer)
    waveform, rate = (None, 0) if sink.sound is None else (sink.sound.waveform.numpy(), sink.sound.sample_rate)
    return Outcome(
        case,
        score(sink.frames, waveform, rate, asked),
        own=score(true, clip.waveform[0].numpy(), SAMPLE_RATE, asked),
        psnr_db=psnr_db(sink.frames[0], true[0]) if request.images else None,
        frames=pick_frames(sink.frames) if case.number < MOST_CLIPS else None,
    )


def _run_round_trip(components: Components | WanComponents, request: Request, number: int) -> RoundTrip:
    scene = sample_scene(request.seed, number, "heldout")
    video = render_video([scene], request.num_frames, request.height, request.width)
    if isinstance(components, WanComponents):
        return RoundTrip(number, _trip_wan(components, video), None, None)
    encoders, decoders, device = components.encoders, components.decoders, components.device
    assert encoders is not None and decoders is not None and decoders.audio is not None
    sound_config = encoders.audio.config
    samples = round(request.num_frames / request.fps * sound_config.sample_rate)
    waveform = render_sound([scene], samples, sound_config.sample_rate)
    with torch.no_grad():
        with components.residency.use("video_encoder", "audio_encoder"):
            latents = encoders.video(video.to(device)).to(components.dtype)
            audio_latents = encoders.audio(log_mel(waveform.to(device), sound_config)).to(components.dtype)
        with components.residency.use("video_decoder", "audio_decoder", "vocoder"):
            frames = [media.to_uint8(group).cpu() for group in decoders.decode_video(latents)]
            sound = decode_audio(decoders.audio, audio_latents)
    return RoundTrip(
        number,
        psnr_db(torch.cat(frames).numpy(), media.to_uint8(video).numpy()),
        PITCHES_HZ[scene.pitch],
        measure_sound(sound.waveform.numpy(), sound.sample_rate).frequency_hz,
    )


def _trip_wan(components: WanComponents, video: Tensor) -> float:
    """``video`` ``[1, 3, F, H, W]`` through the VAE: PSNR."""
    encoders, decoders = components.encoders, components.decoders
    assert encoders is not None and decoders is not None
    with torch.no_grad():
        with components.residency.use("video_encoder"):
            latents = encoders.encode_video(video.to(components.device)).float()
        with components.residency.use("video_decoder"):
            frames = [media.to_uint8(group).cpu() for group in decoders.decode_video(latents)]
    return psnr_db(torch.cat(frames).numpy(), media.to_uint8(video).numpy())


def psnr_db(ours: Frames, other: Frames) -> float:
    """Of uint8 pictures of one shape."""
    error = float(np.mean((ours.astype(np.float64) - other) ** 2))
    return min(EQUAL_DB, 10 * math.log10(255**2 / error)) if error else EQUAL_DB


def _gather(mine: Any) -> list[Any]:
    """Of all ranks, on all of them."""
    if not dist.is_initialized():
        return [mine]
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return gathered


def _number(outcome: Outcome) -> int:
    return outcome.case.request.index


# ---------------------------------------------------------------- what is written


def _write(context: TaskContext, outcomes: Sequence[Outcome], trips: Sequence[RoundTrip]) -> None:
    """``score.json``, ``score.txt`` and a contact sheet for each part."""
    out_dir = context.job.out_dir
    results = summarise(outcomes, trips)
    write_json_atomic(out_dir / "score.json", results)
    table = make_table(results)
    with atomic_file(out_dir / "score.txt") as temporary:
        temporary.write_text(f"{table}\n", encoding="utf-8")
    for line in table.split("\n"):
        notice.info("%s", line)
    for part in SPLITS:
        if entries := [_entry(one, one.frames) for one in outcomes if one.case.part == part and one.frames is not None]:
            sheet = contact_sheet(entries)
            with atomic_file(out_dir / f"{part}.png") as temporary:
                sheet.save(temporary, "PNG")
            context.log_image(f"score/{part}", sheet, 0)
    # All in the tracker's first row: the times of steps follow, from step 0 on.
    context.log(dict(_numbers("score", results)), 0)


def _entry(outcome: Outcome, frames: Frames) -> Entry:
    failed = tuple(name for name in ATTRIBUTES if getattr(outcome.score, name) is False)
    return Entry(frames, outcome.case.request.prompt, failed)


def summarise(outcomes: Sequence[Outcome], trips: Sequence[RoundTrip]) -> dict[str, Any]:
    """``seen``, ``held_out``, ``image``, ``dataset`` and ``round_trips``, those that ran; shares are parts of 1.

    An attribute's share is of the clips that were asked for it, None where there is none.
    """
    results: dict[str, Any] = {}
    for part in SPLITS:
        if chosen := [one for one in outcomes if one.case.part == part]:
            results[part] = {**_shares([one.score for one in chosen]), "clips": [_row(one) for one in chosen]}
            if part == "image":
                results[part]["first_frame_psnr_db"] = _spread(
                    [one.psnr_db for one in chosen if one.psnr_db is not None]
                )
    if outcomes:
        results["dataset"] = _shares([one.own for one in outcomes])
    if trips:
        results["round_trips"] = {
            "count": len(trips),
            "video_psnr_db": _spread([one.psnr_db for one in trips]),
            **_frequencies(trips),
            "clips": [dataclasses.asdict(one) for one in trips],
        }
    return results


def _frequencies(trips: Sequence[RoundTrip]) -> dict[str, Any]:
    """How far the sounds' frequencies are off; nothing for a model without sound."""
    errors = [frequency_error(one.found_hz, one.frequency_hz) for one in trips if one.frequency_hz is not None]
    if not errors:
        return {}
    return {
        "frequency_error": {"mean": statistics.fmean(errors), "worst": max(errors)},
        "frequency_kept": statistics.fmean(error <= SAME_FREQUENCY for error in errors),
    }


def _shares(scores: Sequence[Score]) -> dict[str, Any]:
    shares: dict[str, Any] = {"count": len(scores), "passed": statistics.fmean(one.passed for one in scores)}
    for name in ATTRIBUTES:
        judged = [getattr(one, name) for one in scores if getattr(one, name) is not None]
        shares[name] = statistics.fmean(judged) if judged else None
    return shares


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"mean": statistics.fmean(values), "worst": min(values)}


def _row(outcome: Outcome) -> dict[str, Any]:
    request, judged = outcome.case.request, outcome.score
    return {
        "prompt": request.prompt,
        "seed": request.seed,
        "asked": parse(request.prompt),
        "passed": judged.passed,
        **{name: getattr(judged, name) for name in ATTRIBUTES},
        "picture": dataclasses.asdict(judged.picture),
        "sound": None if judged.sound is None else dataclasses.asdict(judged.sound),
        "first_frame_psnr_db": outcome.psnr_db,
    }


def make_table(results: Mapping[str, Any]) -> str:
    """The shares of ``summarise`` in percent, and a line each for images and round trips."""
    columns = ("passed", *ATTRIBUTES)
    lines = [f"{'':10}{'clips':>7}" + "".join(f"{name:>10}" for name in columns)]
    for part in (*SPLITS, "dataset"):
        if part in results:
            shares = (results[part][name] for name in columns)
            lines.append(f"{part:10}{results[part]['count']:7}" + "".join(f"{_percent(share):>10}" for share in shares))
    if "image" in results:
        psnr = results["image"]["first_frame_psnr_db"]
        lines.append(f"image: first frame {psnr['mean']:.1f} dB, worst {psnr['worst']:.1f}")
    if trips := results.get("round_trips"):
        psnr = trips["video_psnr_db"]
        lines.append(f"{trips['count']} round trips: video {psnr['mean']:.1f} dB, worst {psnr['worst']:.1f}")
        if error := trips.get("frequency_error"):
            lines[-1] += (
                f"; peak frequency within {SAME_FREQUENCY:.0%}: {_percent(trips['frequency_kept'])}, off by "
                f"{error['mean']:.2%}, worst {error['worst']:.2%}"
            )
    return "\n".join(lines)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _numbers(path: str, value: Any) -> Iterator[tuple[str, float]]:
    """The numbers of nested mappings by path; no lists."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _numbers(f"{path}/{name}", item)
    elif isinstance(value, int | float):
        yield path, value
