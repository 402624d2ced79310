"""The record: every key always, true at any moment, whole on disk."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from vgen import record
from vgen.record import (
    OutputError,
    build_record,
    cell_hash,
    error_entry,
    output_entry,
    read_record,
    start_record,
    write_failed,
    write_json_atomic,
)

CONFIG: dict[str, Any] = {
    "model": {"name": "ltx2_tiny"},
    "task": {"name": "generate"},
    "request": {"prompt": "a, b", "seed": 3, "fps": 24.0},
    "output": {"save": ["mp4"]},
    "logger": {"name": "wandb"},
    "launcher": {"grace_s": 5.0},
    "debug": False,
}
# The contract, written out once more: a key that is lost or renamed breaks those who read records.
KEYS = [
    "schema",
    "status",
    "error",
    "task",
    "config",
    "cell",
    "active",
    "timings_s",
    "memory_gib",
    "outputs",
    "quality",
    "certificate",
    "environment",
    "drift",
]
ACTIVE = [
    "world_size",
    "data_size",
    "cfg_size",
    "ulysses_size",
    "vae_size",
    "vae_strategy",
    "vae_split",
    "vae_reason",
    "tiles",
    "attention",
    "compiled",
    "cuda_graphs",
    "graph_gib",
    "decode_fallbacks",
    "quant",
    "vae_backend",
    "vae_dtype",
    "offload",
    "passes",
    "checkpoint",
    "weights",
]
TIMINGS = [
    "load",
    "compile",
    "capture",
    "warmup",
    "text_encode",
    "encode_video",
    "encode_audio",
    "denoise",
    "upsample",
    "decode_video",
    "decode_audio",
    "write",
    "total",
    "denoise_steps",
    "cold",
    "warm",
]
OUTPUT = ["path", "sha256", "num_frames", "height", "width", "fps", "has_audio", "audio_seconds", "seed", "prompt"]


def test_every_key_is_there_and_null_until_known() -> None:
    built = build_record(config=CONFIG)
    assert list(built) == KEYS
    assert list(built["active"]) == ACTIVE
    assert list(built["active"]["quant"]) == ["mode", "layers", "bytes", "backend"]
    assert list(built["active"]["checkpoint"]) == ["id", "revision", "kind", "version", "layout"]
    assert list(built["timings_s"]) == TIMINGS
    assert list(built["environment"]) == ["versions", "git", "gpu", "driver", "clocks_mhz", "cpu", "host_load"]
    assert (built["schema"], built["status"], built["task"], built["outputs"]) == (1, "failed", "generate", [])
    assert set(built["timings_s"].values()) == {None}
    assert build_record(config={})["task"] is None


def test_given_values_are_filled_in_beside_the_nulls() -> None:
    built = build_record(
        config=CONFIG,
        status="ok",
        active={"world_size": 2, "quant": {"mode": "bf16"}},
        timings_s={"denoise": 1.5, "denoise_steps": [1.0, 0.5], "cold": {"denoise": 1.5}},
        memory_gib={"per_rank": [1.0, 2.0]},
        outputs=[output_entry("sample_0.mp4", seed=3, prompt="a, b", num_frames=17)],
    )
    assert built["active"]["quant"] == {"mode": "bf16", "layers": None, "bytes": None, "backend": None}
    assert (built["active"]["world_size"], built["active"]["cfg_size"]) == (2, None)
    assert built["timings_s"]["cold"] == {"denoise": 1.5}
    assert built["timings_s"]["load"] is None
    assert built["memory_gib"] == {"per_rank": [1.0, 2.0], "per_stage": None}
    assert list(built["outputs"][0]) == OUTPUT
    assert build_record(config=CONFIG)["active"]["quant"]["mode"] is None, "templates are not shared"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"timings_s": {"denoising": 1.0}}, r"timings_s\.denoising"),
        ({"active": {"quant": {"modes": 1}}}, r"active\.quant\.modes"),
        ({"status": "done"}, "'done'"),
    ],
)
def test_a_key_or_status_out_of_the_schema_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        build_record(config=CONFIG, **wrong)


def test_the_cell_is_what_is_computed() -> None:
    base = cell_hash(CONFIG)
    assert len(base) == 16
    assert int(base, 16) >= 0
    for section, value in [("output", {"save": []}), ("logger", {"name": "none"}), ("launcher", {}), ("debug", True)]:
        assert cell_hash({**CONFIG, section: value}) == base
    assert cell_hash(dict(reversed(CONFIG.items()))) == base
    assert cell_hash({**CONFIG, "output": {}, "request": {"fps": 24.0, "seed": 3, "prompt": "a, b"}}) == base
    for section, value in [("request", {"prompt": "a, b", "seed": 4}), ("model", {"name": "ltx2"}), ("device", "cpu")]:
        assert cell_hash({**CONFIG, section: value}) != base


def test_the_cell_is_the_same_in_every_process() -> None:
    code = f"from vgen.record import cell_hash; print(cell_hash({CONFIG!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == cell_hash(CONFIG)


def test_json_holds_what_python_has_and_json_has_not(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    odd = {
        "nan": float("nan"),
        "inf": [float("inf"), 1.5],
        "path": Path("a/b"),
        "fps": Fraction(24000, 1001),
        3: (1, 2),
    }
    text = 'quotes " \\ newline \n, ü, 日本語, \udcff'
    write_json_atomic(path, {**odd, "text": text, "object": object})
    back = json.loads(path.read_text(encoding="utf-8"))
    assert back["nan"] is None
    assert back["inf"] == [None, 1.5]
    assert (back["path"], back["3"], back["fps"]) == ("a/b", [1, 2], 24000 / 1001)
    assert back["text"] == text
    assert "日本語" in path.read_text(encoding="utf-8"), "readable without a decoder"
    assert [entry.name for entry in tmp_path.iterdir()] == ["record.json"]


def test_a_failed_write_leaves_the_old_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record.json"
    write_json_atomic(path, {"old": 1})
    monkeypatch.setattr(record.os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OutputError, match=r"record\.json could not be written whole, its disk is full") as caught:
        write_json_atomic(path, {"new": 1})
    assert "\n" not in str(caught.value)
    assert json.loads(path.read_text()) == {"old": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["record.json"]


def test_a_folder_that_is_none_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"Not a directory.*set hydra\.run\.dir"):
        write_json_atomic(tmp_path / "file" / "record.json", {})


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_is_not_writable_is_one_sentence(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(OutputError, match="folder is not writable"):
            write_json_atomic(tmp_path / "record.json", {})
    finally:
        tmp_path.chmod(0o700)


@pytest.mark.parametrize("number", [13, 1, 30])
def test_no_permission_is_one_sentence(tmp_path: Path, number: int) -> None:
    with (
        pytest.raises(OutputError, match=r"its folder is not writable: set hydra\.run\.dir"),
        record.writing(tmp_path / "a"),
    ):
        raise OSError(number, os.strerror(number))


def test_kill_9_leaves_a_true_record(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    code = f"""
        import time
        from pathlib import Path
        from vgen.record import start_record
        start_record(Path({str(path)!r}), config={CONFIG!r}, active={{"world_size": 2}})
        print("started", flush=True)
        time.sleep(60)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        process.send_signal(signal.SIGKILL)
    left = read_record(path)
    assert (left["status"], left["error"]["kind"], left["active"]["world_size"]) == ("failed", "Interrupted", 2)
    assert left["cell"] == cell_hash(CONFIG)


def test_a_failure_keeps_what_the_record_knew(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    start_record(path, config=CONFIG, active={"world_size": 2}, timings_s={"load": 2.0})
    error = error_entry("RankFailed", "rank 1 got SIGKILL", rank=1, stage="denoise")
    write_failed(path, config=CONFIG, error=error, total_s=7.5)
    left = read_record(path)
    assert left["error"] == {"kind": "RankFailed", "message": "rank 1 got SIGKILL", "rank": 1, "stage": "denoise"}
    assert (left["timings_s"]["load"], left["timings_s"]["total"], left["active"]["world_size"]) == (2.0, 7.5, 2)
    assert list(left) == KEYS


@pytest.mark.parametrize("before", [None, "{", '{"schema": 0}', "[]"])
def test_a_failure_needs_no_record_before_it(tmp_path: Path, before: str | None) -> None:
    path = tmp_path / "record.json"
    if before is not None:
        path.write_text(before)
    write_failed(path, config=CONFIG, error=error_entry("ConfigurationError", "no"), total_s=0.1)
    assert read_record(path)["active"]["world_size"] is None


def test_a_failure_forgets_another_jobs_record(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    other = {**CONFIG, "model": {"name": "ltx2"}}
    write_json_atomic(path, build_record(config=other, status="ok", outputs=[output_entry("a.mp4", seed=1, prompt="")]))
    write_failed(path, config=CONFIG, error=error_entry("ConfigurationError", "no"), total_s=0.1)
    left = read_record(path)
    assert (left["outputs"], left["config"], left["cell"]) == ([], CONFIG, cell_hash(CONFIG))


def test_another_schema_is_named(tmp_path: Path) -> None:
    write_json_atomic(tmp_path / "record.json", {"schema": 99})
    with pytest.raises(ValueError, match="schema 99: this version reads schema 1"):
        read_record(tmp_path / "record.json")
