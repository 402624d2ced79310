"""The headline script: which rows it makes, what it makes again, what it leaves out, and the table it writes."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from benchmarks import headline
from benchmarks.headline import Plan, make_rows, run_row
from benchmarks.predictions import predict
from benchmarks.rows import GOALS, NATIVE_OF, PUBLISHED, ROWS, WAYS, Row, chosen, way_of
from benchmarks.table import Made, NotRun, Table, drift_ms, output_class, seconds_of
from vgen import app, record
from vgen.config import from_mapping
from vgen.families import family_of
from vgen.job import plan_of
from vgen.requests import build_requests
from vgen.validate import validate

BY_NAME = {row.name: row for row in ROWS}
HALO, TILE = "vgen halo by width, 8 ranks", "vgen tile, 8 ranks"
DECODES = {"vgen whole": 400.0, "vgen 27 tiles": 800.0, HALO: 50.0, TILE: 100.0}


@pytest.fixture(scope="module", autouse=True)
def hydra() -> Iterator[None]:
    with initialize_config_dir(app.conf_dir(), version_base="1.3"):
        yield


# ---------------------------------------------------------------- rows


def composed(overrides: Sequence[str], gpus: int) -> tuple[int, str]:
    """Ranks and graph mode of a run, checked as the command does before it starts them."""
    data: Any = OmegaConf.to_container(compose("config", list(overrides)), resolve=True)
    config = from_mapping(data)
    requests = build_requests(config.request)
    validate(config, requests, family_of(config).architecture_of(config, None), gpus)
    assert config.model.weights == "random"
    return plan_of(config, requests).world_size, config.graph.mode


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_row_and_its_dry_run_is_a_legal_run_of_its_gpus(row: Row) -> None:
    mode = "eager" if not row.compiles else "compile" if row.name == "ltx2_steps_compile" else "compile_cuda"
    assert composed(row.overrides(tiny=False, device="cuda"), row.gpus) == (row.gpus, mode)
    assert composed(row.overrides(tiny=True, device="cpu"), 0) == (row.gpus, "eager")


def test_what_is_said_of_rows_is_said_of_rows_that_exist() -> None:
    assert len(BY_NAME) == len(ROWS)
    assert {row.baseline for row in ROWS} - {None} <= BY_NAME.keys()
    assert {*NATIVE_OF, *NATIVE_OF.values()} <= BY_NAME.keys()
    for name, way in (*GOALS, *PUBLISHED):
        assert way in (WAYS if BY_NAME[name].kind == "decode" else (BY_NAME[name].kind,)), (name, way)


def test_rows_are_chosen_by_name_or_pattern_in_their_own_order() -> None:
    names = [row.name for row in chosen(["wan_decode_4", "ltx2_run_*", "ltx2_decode_8"])]
    assert names == ["ltx2_decode_8", "wan_decode_4", "ltx2_run_vae8", "ltx2_run_vae1"]
    with pytest.raises(ValueError, match="'ltx2_decode_3' is no row; use some of ltx2_decode_8, "):
        chosen(["ltx2_decode_3"])


@pytest.mark.parametrize(
    ("line", "way"),
    [
        ("vgen whole", "whole"), ("vgen, chunk 1", "whole"), ("vgen 27 tiles", "tiles"),
        ("vgen halo by width, 8 ranks", "halo by width"), ("vgen tile_balanced, 2 ranks", "tile_balanced"),
        ("vgen tile, 2 ranks", "tile"), ("vgen, chunk 2", None), ("diffusers whole", None),
    ],
)  # fmt: skip
def test_lines_of_a_bench_are_recognised(line: str, way: str | None) -> None:
    assert way_of(line) == way


def test_the_cost_model_knows_the_ways_and_the_runs() -> None:
    decode = predict(BY_NAME["ltx2_decode_8"].overrides(tiny=False, device="cuda"))
    assert set(decode) == set(WAYS)
    assert 5 < decode["whole"] / decode["halo by width"] < 8
    alone, over = (predict(BY_NAME[f"ltx2_run_vae{n}"].overrides(tiny=False, device="cuda")) for n in (1, 8))
    assert alone["steps"] == over["steps"] and 0.2 < alone["run"] - over["run"] < 0.4


# ---------------------------------------------------------------- what is run


def bench_of(times: Mapping[str, float], errors: Mapping[str, float] = {}) -> dict[str, Any]:
    lines = [
        {"name": name, "median_ms": ms, "peak_gib": 4.0, "relative_error": errors.get(name)}
        for name, ms in times.items()
    ]
    return {"rows": lines}


def ended(status: str = "ok", **known: Any) -> dict[str, Any]:
    return record.build_record(config={"task": {"name": "x"}}, status=status, **known)


class FakeRuns:
    """In place of processes: writes what a run leaves. ``fails``: rows whose run says that it failed; ``slow``: rows
    past their limit; ``cost_s``: what a run takes of a clock that only runs advance."""

    def __init__(self, *, fails: Sequence[str] = (), slow: Sequence[str] = (), cost_s: float = 0.0) -> None:
        self.fails, self.slow, self.cost_s = fails, slow, cost_s
        self.made: list[str] = []
        self.clock = 0.0

    def __call__(self, command: Sequence[str], console: Path, _limit_s: float) -> int | None:
        folder = console.parent
        assert command[-1] == f"hydra.run.dir={folder}" and not (folder / "record.json").exists()
        self.made.append(folder.name)
        self.clock += self.cost_s
        console.write_text("some words\nthe last word\n\n")
        if folder.name in self.slow:
            return None
        failed = folder.name in self.fails
        error = record.error_entry("Boom", "it broke; mend it") if failed else None
        record.write_json_atomic(folder / "record.json", ended("failed" if failed else "ok", error=error))
        record.write_json_atomic(folder / "bench.json", bench_of(DECODES))
        return 1 if failed else 0


def plan_of_rows(out: Path, *patterns: str, gpus: int = 8) -> Plan:
    return Plan(out, gpus, tuple(chosen(patterns)))


def test_rows_are_made_in_order_and_only_once(tmp_path: Path) -> None:
    plan, runs = plan_of_rows(tmp_path, "ltx2_decode_*"), FakeRuns()
    why = make_rows(plan, runs, 1e9, now=lambda: runs.clock)
    assert runs.made == ["ltx2_decode_8", "ltx2_decode_4", "ltx2_decode_2", "ltx2_decode_1"]
    assert not why.keys() & set(runs.made) and why["wan_decode_4"] == "not asked for (--rows)"
    again = FakeRuns()
    assert make_rows(plan, again, 1e9, now=lambda: 0.0) == why and again.made == []
    # Those that are there stay in the table of a call that asks for others.
    other = FakeRuns()
    make_rows(plan_of_rows(tmp_path, "wan_decode_1"), other, 1e9, now=lambda: 0.0)
    assert other.made == ["wan_decode_1"] and "| `ltx2_decode_8` | whole |" in (tmp_path / "headline.md").read_text()


def break_command(folder: Path) -> None:
    (folder / "row.json").write_text(json.dumps({"overrides": ["experiment=another"]}))


def break_record(folder: Path) -> None:
    record.write_json_atomic(folder / "record.json", ended("failed"))


def break_bench(folder: Path) -> None:
    (folder / "bench.json").write_text('{"rows": [')


def remove_record(folder: Path) -> None:
    (folder / "record.json").unlink()


@pytest.mark.parametrize("damage", [break_command, break_record, break_bench, remove_record])
def test_what_is_not_whole_or_not_of_the_same_command_is_made_again(
    damage: Callable[[Path], None], tmp_path: Path
) -> None:
    plan = plan_of_rows(tmp_path, "ltx2_decode_1", "ltx2_decode_2")
    make_rows(plan, FakeRuns(), 1e9)
    damage(tmp_path / "ltx2_decode_2")
    again = FakeRuns()
    make_rows(plan, again, 1e9)
    assert again.made == ["ltx2_decode_2"]


def test_a_failing_row_stops_no_other_and_is_tried_again(tmp_path: Path) -> None:
    plan, runs = plan_of_rows(tmp_path, "ltx2_decode_*"), FakeRuns(fails=["ltx2_decode_8"], slow=["ltx2_decode_4"])
    why = make_rows(plan, runs, 100.0, now=lambda: runs.clock)
    assert len(runs.made) == 4 and why["ltx2_decode_8"] == "failed: it broke; mend it"
    assert why["ltx2_decode_4"] == "ended after the 100 s that were left: make the same call again"
    assert "- `ltx2_decode_8`: failed: it broke; mend it" in (tmp_path / "headline.md").read_text()
    again = FakeRuns()
    make_rows(plan, again, 1e9)
    assert again.made == ["ltx2_decode_8", "ltx2_decode_4"]


def test_a_row_without_a_record_is_told_by_its_last_line(tmp_path: Path) -> None:
    def silent(command: Sequence[str], console: Path, limit_s: float) -> int:
        console.write_text("starts\nvgen: no such setting\n\n")
        return 2

    why = make_rows(plan_of_rows(tmp_path, "ltx2_decode_1"), silent, 1e9)
    assert why["ltx2_decode_1"] == "failed: vgen: no such setting"


def test_a_row_that_takes_longer_than_is_left_is_not_begun(tmp_path: Path) -> None:
    sizes = {name: BY_NAME[name].estimate_s for name in ("ltx2_decode_8", "wan_decode_4", "ltx2_decode_1")}
    assert sizes["ltx2_decode_1"] < sizes["ltx2_decode_8"] < sizes["wan_decode_4"]
    runs = FakeRuns(cost_s=70.0)
    # After the first there is time for the smallest only.
    deadline = 70.0 + sizes["ltx2_decode_1"] + 1
    why = make_rows(plan_of_rows(tmp_path, *sizes), runs, deadline, now=lambda: runs.clock)
    assert runs.made == ["ltx2_decode_8", "ltx2_decode_1"]
    assert why["wan_decode_4"] == "takes about 90 s and 41 s were left: make the same call again"


def test_rows_of_more_gpus_than_there_are_are_not_run(tmp_path: Path) -> None:
    plan, runs = Plan(tmp_path, 2, ROWS), FakeRuns()
    why = make_rows(plan, runs, 1e9)
    assert runs.made == ["ltx2_decode_2", "wan_decode_2", "ltx2_decode_1", "wan_decode_1"]
    assert why["wan_decode_4"] == "needs 4 GPUs, 2 used"


def test_the_table_is_there_after_each_row(tmp_path: Path) -> None:
    runs, seen = FakeRuns(), []

    def watch(command: Sequence[str], console: Path, limit_s: float) -> int | None:
        seen.append((tmp_path / "headline.md").read_text())
        return runs(command, console, limit_s)

    make_rows(plan_of_rows(tmp_path, "ltx2_decode_8", "ltx2_decode_1"), watch, 1e9)
    assert "| `ltx2" not in seen[0] and "`ltx2_decode_1`: waits for its turn" in seen[1]
    assert "| `ltx2_decode_8` | whole | 1 | 400.0 ms |" in seen[1]


def test_wrong_arguments_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = [("--rows", "nothing"), ("--minutes", "0"), ("--gpus", "-1")]
    for flag, value in wrong:
        with pytest.raises(SystemExit, match="2"):
            headline.main(["--out", str(tmp_path), "--device", "cpu", flag, value])
        assert flag in capsys.readouterr().err.splitlines()[-1]


def test_the_parent_of_the_rows_needs_no_torch() -> None:
    code = "import sys, benchmarks.headline; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=headline.ROOT, check=False).returncode == 0


def test_a_process_past_its_limit_is_ended_with_its_children(tmp_path: Path) -> None:
    code = "import os, subprocess; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"
    started = time.monotonic()
    assert run_row([sys.executable, "-c", code], tmp_path / "console.log", 3.0) is None
    child = int((tmp_path / "console.log").read_text())
    while Path(f"/proc/{child}/stat").exists() and " Z " not in Path(f"/proc/{child}/stat").read_text():
        assert time.monotonic() - started < 30, "the child lives"
        time.sleep(0.05)
    assert run_row([sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "console.log", 60.0) == 3


# ---------------------------------------------------------------- the table


def lines_of(text: str, row: str) -> dict[str, dict[str, str]]:
    """By way, the cells of ``row`` by column."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    table = [[cell.strip() for cell in cells] for cells in lines]
    assert len({len(cells) for cells in table}) == 1
    named = [dict(zip(table[0], cells, strict=True)) for cells in table[2:]]
    return {cells["way"]: cells for cells in named if cells["row"] == f"`{row}`"}


def decode(name: str, times: Mapping[str, float], errors: Mapping[str, float]) -> Made:
    return Made(BY_NAME[name], ended(), bench_of(times, errors))


def test_a_decode_has_its_ratios_its_goal_and_what_was_published_and_predicted() -> None:
    errors = {HALO: 1e-2, TILE: 0.4, "vgen 27 tiles": 0.4}
    predictions = {"ltx2_decode_8": {"halo by width": 0.051}}
    lines = lines_of(Table([decode("ltx2_decode_8", DECODES, errors)], [], predictions).markdown(), "ltx2_decode_8")
    assert list(lines) == ["whole", "tiles", "halo by width", "tile"]
    assert lines["whole"]["GPUs"] == "1" and lines["whole"]["output"] == "reference"
    halo, tile = lines["halo by width"], lines["tile"]
    assert halo["ours"] == "50.0 ms" and halo["× baseline"] == "8.00 × whole" and halo["GPUs"] == "8"
    assert halo["GiB, worst rank"] == "4.00" and halo["output"] == "equal up to rounding (1.0e-02)"
    assert halo["predicted, H200"] == "51.0 ms" and (halo["goal"], halo["met"]) == ("≥ 7.2 × whole", "**yes**")
    assert tile["× baseline"] == "4.00 × whole, 8.00 × tiles"
    assert (tile["goal"], tile["met"]) == ("≥ 6.8 × tiles", "**yes**")
    assert tile["published"].startswith("6.74 ×") and tile["predicted, H200"] == "—"


@pytest.mark.parametrize(
    ("ms", "error", "met", "output"),
    [
        (55.0, 0.0, "**yes**", "equal bits"),
        (56.0, 0.0, "no", "equal bits"),
        (50.0, 0.1, "no", "**another clip (1.0e-01)**"),
        (50.0, None, "no", "not compared"),
    ],
)
def test_a_goal_is_met_by_speed_with_the_same_clip(ms: float, error: float | None, met: str, output: str) -> None:
    made = decode("ltx2_decode_8", {**DECODES, HALO: ms}, {} if error is None else {HALO: error})
    line = lines_of(Table([made], []).markdown(), "ltx2_decode_8")["halo by width"]
    assert (line["met"], line["output"]) == (met, output)
    assert lines_of(Table([made], [], dry=True).markdown(), "ltx2_decode_8")["halo by width"]["met"] == "dry run"


def test_the_native_halo_is_put_beside_that_of_diffusers() -> None:
    width = "vgen halo by width, 4 ranks"
    native = decode("wan_decode_4", {"vgen, chunk 1": 2800.0, "vgen, chunk 2": 2700.0, width: 700.0}, {width: 1e-2})
    other = decode("wan_decode_4_diffusers", {"vgen, chunk 1": 3900.0, width: 1050.0}, {width: 1e-2})
    text = Table([native, other], []).markdown()
    assert lines_of(text, "wan_decode_4")["halo by width"]["met"] == "**yes**"
    assert list(lines_of(text, "wan_decode_4")) == ["whole", "halo by width"]
    line = lines_of(text, "wan_decode_4_diffusers")["halo by width"]
    assert line["× baseline"] == "3.71 × whole, 1.50 × is the native one"


def whole_run(name: str, total: float, sha256: str = "a", **more: Any) -> Made:
    times = {"cold": {"total": 99.0, "write": 1.0}, "warm": {"total": total, "write": 1.0}}
    outputs = [record.output_entry("latents_0.safetensors", seed=0, prompt="", sha256=sha256)]
    return Made(BY_NAME[name], ended(timings_s=times, outputs=outputs, memory_gib={"per_rank": [60.5, 66.25]}, **more))


def test_a_whole_run_is_compared_with_its_baseline_row() -> None:
    one = whole_run("ltx2_run_vae1", 9.0)
    eight = whole_run("ltx2_run_vae8", 8.2, active={"cuda_graphs": 2, "compiled": True})
    line = lines_of(Table([eight, one], []).markdown(), "ltx2_run_vae8")["whole run"]
    assert line["ours"] == "7.20 s" and line["× baseline"] == "1.11 × ltx2_run_vae1 (−0.80 s, −10.0%)"
    assert line["output"] == "latents of ltx2_run_vae1: equal bits; ran compiled, 2 CUDA graph(s)"
    assert line["GiB, worst rank"] == "66.25" and line["published"].startswith("−0.80 s")
    other = whole_run("ltx2_run_vae1", 9.0, "b")
    line = lines_of(Table([eight, other], []).markdown(), "ltx2_run_vae8")["whole run"]
    assert line["output"].startswith("latents of ltx2_run_vae1: not the same bits")
    line = lines_of(Table([whole_run("ltx2_run_vae8", 8.2)], []).markdown(), "ltx2_run_vae8")["whole run"]
    assert line["× baseline"] == "no ltx2_run_vae1 yet" and line["output"] == "ran not compiled, 0 CUDA graph(s)"


def steps_run(name: str, late_s: float, **more: Any) -> Made:
    steps = [5.0] + [9.9] * 19 + [late_s] * 20
    return Made(BY_NAME[name], {**ended(timings_s={"cold": {"denoise_steps": steps}}), **more})


def test_steps_are_the_late_ones_with_their_drift_where_it_was_measured() -> None:
    graph, without = steps_run("ltx2_steps_compile_cuda", 0.3), steps_run("ltx2_steps_compile", 0.304)
    assert seconds_of(graph) == 0.3
    line = lines_of(Table([graph, without], []).markdown(), "ltx2_steps_compile_cuda")["a step"]
    assert line["ours"] == "300.0 ms" and line["× baseline"] == "1.01 × ltx2_steps_compile (−4.0 ms, −1.3%)"
    assert "drift not measured" in line["output"]
    measured = steps_run("ltx2_steps_compile_cuda", 0.3, drift={"skew_ms": {"median": 0.0213}})
    assert drift_ms(measured.record) == 0.0213
    assert "drift 0.0213 ms" in Table([measured], []).markdown()


def test_machine_versions_and_what_was_not_run_are_said_once() -> None:
    environment = {
        "gpu": {"name": "NVIDIA H200", "count": 8}, "driver": "580.1", "versions": {"torch": "2.11.0"},
        "git": {"commit": "0123456789abcdef", "dirty": False},
    }  # fmt: skip
    done, bench = ended(environment=environment), bench_of({"vgen whole": 1.0})
    made = [Made(BY_NAME[name], done, bench) for name in ("ltx2_decode_8", "ltx2_decode_4")]
    text = Table(made, [NotRun(BY_NAME[f"wan_decode_{n}"], "no time") for n in (2, 4)]).markdown()
    assert text.count("- 8 × NVIDIA H200: driver 580.1, torch 2.11.0, commit 0123456789\n") == 1
    assert text.endswith("Not run:\n\n- `wan_decode_2`, `wan_decode_4`: no time\n")
    assert "Dry run" not in text and "Dry run" in Table([], [], dry=True).markdown()


def test_tiles_are_called_an_approximation_whatever_their_error() -> None:
    assert output_class("tile", 0.0).startswith("tiles, an approximation")


# ---------------------------------------------------------------- real dry runs


def dry_run(out: Path, gpus: int, rows: str) -> str:
    arguments = ["--out", str(out), "--tiny", "--device", "cpu", "--gpus", str(gpus), "--rows", rows]
    assert headline.main(arguments) == 0, [path.read_text() for path in out.glob("*/console.log")]
    return (out / "headline.md").read_text()


def test_a_dry_run_on_two_ranks_makes_the_table(tmp_path: Path) -> None:
    text = dry_run(tmp_path, 2, "wan_decode_2")
    lines = lines_of(text, "wan_decode_2")
    assert list(lines) == ["whole", "halo by height", "halo by width", "tile", "tile_balanced"]
    assert "equal" in lines["halo by width"]["output"]
    made_at = (tmp_path / "wan_decode_2" / "record.json").stat().st_mtime_ns
    assert dry_run(tmp_path, 2, "wan_decode_2") == text
    assert (tmp_path / "wan_decode_2" / "record.json").stat().st_mtime_ns == made_at


def run_forked(command: Sequence[str], console: Path, limit_s: float) -> int | None:
    """``RunRow`` with the command's own job, whose eight ranks come from one process: each by itself takes ten seconds
    of a core to start."""
    status = run_row([*command, "launcher.dry_run=true"], console, limit_s)
    ranks = [sys.executable, "-m", "tests.forked_ranks", str(console.parent / "job.json"), "8"]
    return status or run_row(ranks, console, limit_s)


def test_a_dry_run_on_eight_ranks_gives_every_rank_a_line(tmp_path: Path) -> None:
    row = BY_NAME["ltx2_decode_8"]
    why = make_rows(Plan(tmp_path, 8, (row,), tiny=True, device="cpu"), run_forked, time.monotonic() + 300)
    assert row.name not in why, (tmp_path / row.name / "console.log").read_text()
    lines = lines_of((tmp_path / "headline.md").read_text(), row.name)
    for way in ("halo by height", "halo by width"):
        assert lines[way]["GPUs"] == "8" and "equal" in lines[way]["output"]
        assert lines[way]["met"] == "dry run"
    assert json.loads((tmp_path / row.name / "record.json").read_text())["active"]["world_size"] == 8
