"""One run on Weights & Biases, which can slow nothing down and break nothing.

All of W&B, its import included, happens in one daemon thread that works off a queue; the run itself only fills the
queue. Whatever fails there costs one warning and the rest of the tracking. Without a key or a server in reach the data
goes to `<out_dir>/wandb`, to be sent later with `wandb sync`.
"""

import configparser
import contextlib
import logging
import netrc
import os
import queue
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol
from urllib.parse import urlsplit

from vgen.record import plain

if TYPE_CHECKING:
    from PIL.Image import Image

log = logging.getLogger(__name__)

_PROBE_LIMIT_S = 1.0
_INIT_LIMIT_S = 8.0  # for a server that answers the probe and then nothing more; its time is not the run's
_UPLOAD_LIMIT_S = 30.0
_LOCAL_LIMIT_S = 15.0  # starting and closing a run without a network takes about 1 s
_GATEWAY_ERRORS = (502, 503, 504)  # a proxy that answers for a server it cannot reach


class TrackingSettings(Protocol):
    """What `logger` in the configuration holds."""

    @property
    def name(self) -> str: ...

    @property
    def project(self) -> str: ...

    @property
    def mode(self) -> str: ...


class Run(Protocol):
    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Numbers of one step."""

    def log_image(self, name: str, image: "Image", step: int | None = None) -> None:
        """A picture of one step, which the caller leaves as it is from here on."""

    def summary(self, values: Mapping[str, Any]) -> None:
        """Values of the whole run: timings, memory."""

    def video(self, name: str, path: Path, caption: str | None = None) -> None:
        """The written mp4 itself."""

    def finish(self, exit_code: int = 0, limit_s: float | None = None) -> None:
        """Wait until all is stored or sent, at most `limit_s` (a run that failed has no time to lose) or what is usual.

        Further calls do nothing.
        """


class NullRun:
    """Tracks nothing and imports nothing."""

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        pass

    def log_image(self, name: str, image: "Image", step: int | None = None) -> None:
        pass

    def summary(self, values: Mapping[str, Any]) -> None:
        pass

    def video(self, name: str, path: Path, caption: str | None = None) -> None:
        pass

    def finish(self, exit_code: int = 0, limit_s: float | None = None) -> None:
        pass


def open_run(
    settings: TrackingSettings,
    *,
    out_dir: Path,
    config: Mapping[str, Any],
    name: str,
    group: str | None = None,
    tags: Sequence[str] = (),
    job_type: str | None = None,
) -> Run:
    """Start a run; returns at once and never raises. To be called by global rank 0 only.

    `settings.mode` is `auto`, `online`, `offline` or `disabled`; `auto` follows WANDB_MODE, and goes online if there is
    a key. `online` without a key or a server goes offline too, with a warning. `group` is the sweep's name.
    """
    mode = settings.mode
    if mode == "auto":
        mode = {"disabled": "disabled", "offline": "offline", "dryrun": "offline"}.get(
            os.environ.get("WANDB_MODE", "").lower(), "auto"
        )
    if settings.name == "none" or mode == "disabled":
        return NullRun()
    start = {
        "project": settings.project,
        "dir": str(out_dir),
        "config": plain(config),
        "name": name,
        "group": group,
        "tags": list(tags),
        "job_type": job_type,
    }
    return _WandbRun(_Start(mode, start, out_dir))


@dataclass(frozen=True)
class _Start:
    mode: str
    arguments: Mapping[str, Any]
    out_dir: Path


class _WandbRun:
    """The queue and its thread. `_run` and `_online` belong to the thread."""

    def __init__(self, start: _Start) -> None:
        self._start = start
        self._run: Any = None
        self._online = False
        self._finished = False
        self._tasks: queue.SimpleQueue[Callable[[Any], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="tracking", daemon=True)
        self._thread.start()

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        values = plain(values)
        self._tasks.put(lambda run: run.log(values, step=step))

    def log_image(self, name: str, image: "Image", step: int | None = None) -> None:
        def send(run: Any) -> None:
            import wandb

            run.log({name: wandb.Image(image)}, step=step)

        self._tasks.put(send)

    def summary(self, values: Mapping[str, Any]) -> None:
        values = plain(values)
        self._tasks.put(lambda run: run.summary.update(values))

    def video(self, name: str, path: Path, caption: str | None = None) -> None:
        def send(run: Any) -> None:
            import wandb

            run.log({name: wandb.Video(str(path), caption=caption)})

        self._tasks.put(send)

    def finish(self, exit_code: int = 0, limit_s: float | None = None) -> None:
        if self._finished:
            return
        self._finished = True
        self._tasks.put(lambda run: run.finish(exit_code=exit_code))
        self._tasks.put(None)
        self._thread.join(_LOCAL_LIMIT_S if limit_s is None else limit_s)
        if limit_s is None and self._online:
            self._thread.join(_UPLOAD_LIMIT_S)
        if self._thread.is_alive():
            self._warn("it did not finish in time")

    def _work(self) -> None:
        # BaseException: nothing that happens in here is the run's business, SystemExit included.
        try:
            self._run, self._online = _open(self._start)
        except BaseException as error:
            self._give_up(error)
        while (task := self._tasks.get()) is not None:
            if self._run is None:
                continue
            try:
                task(self._run)
            except BaseException as error:
                self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        self._run = None
        self._warn(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")

    def _warn(self, reason: str) -> None:
        log.warning(
            "W&B tracking stopped (%s), the run goes on without; what was stored is in %s",
            reason,
            self._start.out_dir / "wandb",
        )


def _open(start: _Start) -> tuple[Any, bool]:
    """The run, and whether it is online. Goes offline rather than failing."""
    # Set for W&B's own reports and messages: the first wait for a network of their own, the second reach the console.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    os.environ.setdefault("WANDB_SILENT", "true")
    url, reason = _base_url(), None
    online = start.mode != "offline" and _has_key(url)
    if online:
        reached = _start_probe(url)

        if not reached():
            reason = f"{url} does not answer within {_PROBE_LIMIT_S:g} s"
    elif start.mode == "online":
        reason = "no key: set WANDB_API_KEY or use `wandb login`"
    if online and reason is None:
        try:
            return _init(start, "online", url), True
        except Exception as error:
            reason = str(error).partition("\n")[0]
    if reason is not None:
        log.warning(
            "W&B is offline (%s); send the run later with: wandb sync %s", reason, start.out_dir / "wandb" / "offline-*"
        )
    return _init(start, "offline", url), False


def _init(start: _Start, mode: Literal["online", "offline"], url: str) -> Any:
    import wandb

    wanted = {
        "base_url": url,
        "silent": True,
        "console": "off",
        "x_disable_stats": True,
        "x_disable_meta": True,
        "disable_git": True,
        "save_code": False,
        "init_timeout": _INIT_LIMIT_S,
        "finish_timeout": _UPLOAD_LIMIT_S,
    }
    known = getattr(wandb.Settings, "model_fields", wanted)
    settings = wandb.Settings(**{name: value for name, value in wanted.items() if name in known})
    return wandb.init(**start.arguments, mode=mode, reinit="create_new", settings=settings)


def _settings_file() -> configparser.ConfigParser:
    folder = os.environ.get("WANDB_CONFIG_DIR") or Path.home() / ".config" / "wandb"
    parser = configparser.ConfigParser()
    with contextlib.suppress(configparser.Error, OSError):
        parser.read(Path(folder) / "settings")
    return parser


def _base_url() -> str:
    stored = _settings_file().get("default", "base_url", fallback=None)
    return (os.environ.get("WANDB_BASE_URL") or stored or "https://api.wandb.ai").rstrip("/")


def _has_key(url: str) -> bool:
    """Whether W&B would find a key for the server at `url` without asking."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    if _settings_file().get("default", "api_key", fallback=None):
        return True
    places = [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    for place in places:
        with contextlib.suppress(netrc.NetrcParseError, OSError):
            found = netrc.netrc(str(Path(place).expanduser())).authenticators(urlsplit(url).netloc)
            if found is not None and found[2]:
                return True
    return False


def _start_probe(url: str) -> Callable[[], bool]:
    """Ask the server for anything; the returned function waits for the answer, within the limit.

    By HTTP rather than a bare connection: so it goes through a proxy where one is set, and a server that takes
    connections but never answers counts as out of reach. The thread bounds the name lookup as well, which has no limit
    of its own.
    """
    answered = threading.Event()

    def ask() -> None:
        try:
            with urllib.request.urlopen(url, timeout=_PROBE_LIMIT_S):
                answered.set()
        except urllib.error.HTTPError as error:
            if error.code not in _GATEWAY_ERRORS:
                answered.set()
            error.close()
        except urllib.error.URLError as error:
            if isinstance(error.reason, ssl.SSLError):  # it is there; W&B has its own certificates
                answered.set()
        except (OSError, ValueError):
            pass
        done.set()

    done = threading.Event()
    deadline = time.monotonic() + _PROBE_LIMIT_S
    threading.Thread(target=ask, name="tracking probe", daemon=True).start()

    def reached() -> bool:
        done.wait(max(0.0, deadline - time.monotonic()))
        return answered.is_set()

    return reached
