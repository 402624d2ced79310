"""W&B: offline without a key or a server, online against a server on this machine, never in the way of a run."""

import gzip
import json
import logging
import os
import re
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from vgen import tracking
from vgen.tracking import NullRun, open_run

UNREACHABLE = "http://127.0.0.1:9"
FAKE_KEY = "0" * 40
IMAGE = Image.radial_gradient("L").resize((9, 7)).convert("RGB")


@dataclass(frozen=True)
class Settings:
    name: str = "wandb"
    project: str = "vgen-test"
    mode: str = "auto"


@pytest.fixture(autouse=True)
def clean_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No key, no settings of the machine, no way out to a network."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", UNREACHABLE)
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "no-settings"))
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture(scope="module")
def warm_wandb(tmp_path_factory: pytest.TempPathFactory) -> None:
    """W&B's import and its helper process, which a run starts beside its own work, are not the delay in question."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_ERROR_REPORTING", "false")
        patch.setenv("WANDB_SILENT", "true")
        open_run(Settings(), out_dir=tmp_path_factory.mktemp("warm"), config={}, name="warm").finish()


def records(path: Path) -> Iterator[Any]:
    """The records of a run's file: 32 KiB blocks of crc, length, kind (1 whole, 2 first, 3 middle, 4 last), data."""
    from wandb.proto import wandb_internal_pb2

    data, at, joined = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        if kind == 0:
            return
        joined += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(joined)
            joined = b""
            yield record


def items(updates: Any) -> dict[str, Any]:
    return {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in updates}


def stored(out_dir: Path, runs: str = "*run-*") -> dict[str, Any]:
    """What the one run in `out_dir` holds. Its helper process writes the end a little after `finish`."""
    (path,) = (out_dir / "wandb").glob(f"{runs}/*.wandb")
    deadline = time.monotonic() + 10
    while (found := parsed(path))["exit"] is None and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def parsed(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"history": [], "summary": {}, "exit": None, "folder": path.parent}
    for record in records(path):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            found["run"], found["config"] = record.run, items(record.run.config.update)
        elif kind == "history":
            found["history"].append(items(record.history.item))
        elif kind == "summary":
            found["summary"] |= items(record.summary.update)
        elif kind == "exit":
            found["exit"] = record.exit.exit_code
    return found


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    ours = [record for record in caplog.records if record.name == "vgen.tracking"]
    return [record.getMessage() for record in ours if record.levelno >= logging.WARNING]


def use_run(run: tracking.Run, out_dir: Path, exit_code: int = 0) -> bytes:
    video = out_dir / "sample_0.mp4"
    content = b"\0\0\0\x18ftypisom" + bytes(range(256)) * 400
    video.write_bytes(content)
    run.log({"step_s": 0.25}, step=0)
    run.log({"step_s": 0.125, "odd": float("nan")}, step=1)
    run.log_image("grid", IMAGE, step=7)
    run.video("sample_0", video, caption="a cat")
    run.summary({"timings_s": {"denoise": 1.5}, "memory_gib": [3.0, 4.0]})
    run.finish(exit_code=exit_code)
    return content


def test_an_offline_run_holds_all_that_was_given(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = {"model": {"name": "ltx2_tiny"}, "save": ("mp4", "latents"), "prompt": 'a, "b" = {c}\nd ü'}
    run = open_run(
        Settings(), out_dir=tmp_path, config=config, name="job 3", group="sweep-7", tags=["a", "b"], job_type="generate"
    )
    content = use_run(run, tmp_path, exit_code=3)
    run.finish(exit_code=0)
    found = stored(tmp_path)
    assert found["folder"].name.startswith("offline-run-")
    assert (found["run"].project, found["run"].run_group, found["run"].display_name) == (
        "vgen-test",
        "sweep-7",
        "job 3",
    )
    assert (found["run"].job_type, list(found["run"].tags)) == ("generate", ["a", "b"])
    assert found["config"]["model"] == {"name": "ltx2_tiny"}
    assert found["config"]["save"] == ["mp4", "latents"]
    assert found["config"]["prompt"] == config["prompt"]
    assert [row["step_s"] for row in found["history"] if "step_s" in row] == [0.25, 0.125]
    assert found["history"][1]["odd"] is None
    (video,) = [row for row in found["history"] if "sample_0.path" in row]
    assert (video["sample_0._type"], video["sample_0.caption"]) == ("video-file", "a cat")
    assert (found["folder"] / "files" / video["sample_0.path"]).read_bytes() == content
    (picture,) = [row for row in found["history"] if "grid.path" in row]
    assert (picture["grid._type"], picture["_step"]) == ("image-file", 7)
    with Image.open(found["folder"] / "files" / picture["grid.path"]) as image:
        assert (image.convert("RGB").tobytes(), image.size) == (IMAGE.tobytes(), (9, 7))
    assert found["summary"]["timings_s"] == {"denoise": 1.5}
    assert found["summary"]["memory_gib"] == [3.0, 4.0]
    assert found["exit"] == 3
    assert warnings_in(caplog) == [], "no key is no warning"


@pytest.mark.parametrize("mode", ["auto", "online"])
def test_an_unreachable_server_costs_no_time_and_one_sentence(
    warm_wandb: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", FAKE_KEY)
    started = time.perf_counter()
    run = open_run(Settings(mode=mode), out_dir=tmp_path, config={}, name="job")
    opened = time.perf_counter()
    content = use_run(run, tmp_path)
    assert opened - started < 0.2
    assert time.perf_counter() - started < 2.0
    found = stored(tmp_path)
    assert found["folder"].name.startswith("offline-run-")
    assert found["exit"] == 0
    assert content
    (warning,) = warnings_in(caplog)
    assert warning.startswith(f"W&B is offline ({UNREACHABLE} does not answer")
    assert f"wandb sync {tmp_path}" in warning


def test_a_server_that_takes_connections_and_never_answers_costs_no_time(
    warm_wandb: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("WANDB_API_KEY", FAKE_KEY)
        started = time.perf_counter()
        use_run(open_run(Settings(), out_dir=tmp_path, config={}, name="job"), tmp_path)
        assert time.perf_counter() - started < 2.0
    assert stored(tmp_path)["folder"].name.startswith("offline-run-")


def test_online_without_a_key_goes_offline_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    use_run(open_run(Settings(mode="online"), out_dir=tmp_path, config={}, name="job"), tmp_path)
    assert stored(tmp_path)["exit"] == 0
    (warning,) = warnings_in(caplog)
    assert "no key: set WANDB_API_KEY" in warning


# ---------------------------------------------------------------- a server on this machine


class FakeServer(ThreadingHTTPServer):
    """As much of W&B as a run needs; `deaf` stops it from answering anything but the probe."""

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), FakeHandler)
        self.deaf = False
        self.uploads: dict[str, bytes] = {}
        self.groups: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that leave are no news."""


class FakeHandler(BaseHTTPRequestHandler):
    server: FakeServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def _body(self) -> bytes:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

    def _reply(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self._reply({})

    def do_PUT(self) -> None:
        self.server.uploads[self.path] = self._body()
        self._reply({})

    def do_POST(self) -> None:
        body = self._body()
        if self.server.deaf:
            time.sleep(60)
        if self.path != "/graphql":
            self._reply({})
            return
        call = json.loads(body)
        variables, data = call["variables"], {}
        if "upsertBucket" in call["query"]:
            self.server.groups.append(variables.get("groupName"))
            project = {"id": "p", "name": variables["project"], "entity": {"id": "e", "name": "e"}}
            bucket = {"id": "b", "name": variables["name"], "displayName": "d", "config": "{}", "project": project}
            data = {"upsertBucket": {"bucket": {**bucket, "historyLineCount": 0}, "inserted": True}}
        elif "createRunFiles" in call["query"]:
            files = [{"name": name, "uploadUrl": f"{self.server.url}/up/{name}"} for name in variables["files"]]
            data = {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}
        self._reply({"data": data})


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    with FakeServer() as fake:
        threading.Thread(target=fake.serve_forever, daemon=True).start()
        monkeypatch.setenv("WANDB_BASE_URL", fake.url)
        yield fake
        fake.shutdown()


@pytest.mark.parametrize("where", ["WANDB_API_KEY", "netrc"])
def test_with_a_key_the_mp4_itself_arrives(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    if where == "netrc":
        (tmp_path / "netrc").write_text(f"machine 127.0.0.1:{server.server_port} login user password {FAKE_KEY}\n")
        (tmp_path / "netrc").chmod(0o600)
        monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    else:
        monkeypatch.setenv("WANDB_API_KEY", FAKE_KEY)
    content = use_run(open_run(Settings(), out_dir=tmp_path, config={}, name="job", group="sweep-7"), tmp_path)
    assert warnings_in(caplog) == []
    assert "sweep-7" in server.groups
    (uploaded,) = [name for name in server.uploads if re.search(r"media/videos/sample_0_.*\.mp4", name)]
    assert server.uploads[uploaded] == content


def test_a_server_that_dies_after_the_probe_leaves_the_run_offline(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", FAKE_KEY)
    monkeypatch.setattr(tracking, "_INIT_LIMIT_S", 1.0)
    server.deaf = True
    use_run(open_run(Settings(), out_dir=tmp_path, config={}, name="job"), tmp_path)
    found = stored(tmp_path, "offline-run-*")
    assert found["exit"] == 0
    assert [row["step_s"] for row in found["history"] if "step_s" in row] == [0.25, 0.125], "all was kept for it"
    (warning,) = warnings_in(caplog)
    assert warning.startswith("W&B is offline (")


def test_a_server_lost_at_the_end_holds_the_process_a_bounded_time(server: FakeServer, tmp_path: Path) -> None:
    """Also the hook that W&B runs when Python ends."""
    code = f"""
        import time
        from pathlib import Path
        from types import SimpleNamespace
        from vgen import tracking
        tracking._UPLOAD_LIMIT_S = 1.0
        settings = SimpleNamespace(name="wandb", project="p", mode="auto")
        run = tracking.open_run(settings, out_dir=Path({str(tmp_path)!r}), config={{}}, name="job")
        run.log({{"a": 1}})
        print("opened", flush=True)
        input()
        run.finish()
        print("finished", flush=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    environ = {**os.environ, "WANDB_API_KEY": FAKE_KEY}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stdin is not None
        deadline = time.monotonic() + 20
        while not server.groups and time.monotonic() < deadline:
            time.sleep(0.02)
        server.deaf = True
        started = time.perf_counter()
        output, _ = process.communicate("\n", timeout=20)
        assert time.perf_counter() - started < 6.0
    assert (process.returncode, output.split()) == (0, ["opened", "finished"])


# ---------------------------------------------------------------- failures


def test_a_failure_is_one_warning_and_then_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def log(self, *_: Any, **__: Any) -> None:
            raise SystemExit("wandb is broken\nsecond line")

    monkeypatch.setattr(tracking, "_open", lambda start: (Broken(), False))
    use_run(open_run(Settings(), out_dir=tmp_path, config={}, name="job"), tmp_path)
    (warning,) = warnings_in(caplog)
    assert warning.startswith("W&B tracking stopped (SystemExit: wandb is broken), the run goes on without")


@pytest.mark.parametrize("limit_s", [None, 0.2])
def test_a_hang_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, limit_s: float | None
) -> None:
    release = threading.Event()
    monkeypatch.setattr(tracking, "_open", lambda start: (release.wait(20), False))
    run = open_run(Settings(), out_dir=tmp_path, config={}, name="job")
    started = time.perf_counter()
    if limit_s is None:
        monkeypatch.setattr(tracking, "_LOCAL_LIMIT_S", 0.2)
    run.finish(limit_s=limit_s)
    assert time.perf_counter() - started < 2.0
    release.set()
    (warning,) = warnings_in(caplog)
    assert "it did not finish in time" in warning


def test_a_folder_that_cannot_be_written_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "wandb").write_text("a file where the folder should be")
    use_run(open_run(Settings(mode="offline"), out_dir=tmp_path, config={}, name="job"), tmp_path)
    assert (tmp_path / "wandb").read_text() == "a file where the folder should be"


@pytest.mark.parametrize(
    ("settings", "wandb_mode"),
    [(Settings(name="none"), ""), (Settings(mode="disabled"), ""), (Settings(), "disabled")],
)
def test_switched_off_it_is_a_null_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: Settings, wandb_mode: str
) -> None:
    monkeypatch.setenv("WANDB_MODE", wandb_mode)
    run = open_run(settings, out_dir=tmp_path, config={}, name="job")
    assert isinstance(run, NullRun)
    use_run(run, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["sample_0.mp4"]


def test_switched_off_it_imports_nothing_of_wandb(tmp_path: Path) -> None:
    code = f"""
        import sys, threading
        from pathlib import Path
        from types import SimpleNamespace
        from vgen.tracking import open_run
        settings = SimpleNamespace(name="none", project="p", mode="auto")
        run = open_run(settings, out_dir=Path({str(tmp_path)!r}), config={{}}, name="job")
        run.log({{"a": 1}}); run.log_image("i", None); run.summary({{}}); run.video("v", Path("v.mp4")); run.finish()
        print([n for n in sys.modules if n.split(".")[0] in ("wandb", "torch", "PIL")], threading.active_count())
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] 1"
