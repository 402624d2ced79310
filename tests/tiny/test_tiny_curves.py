"""Losses of trainings: read as they were last run, and drawn as a small SVG."""

import json
import math
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from vgen.tiny.training import curves
from vgen.tiny.training.history import STAGES, History, read_histories, read_history
from vgen.typed import ConfigurationError


def write(path: Path, rows: Sequence[Mapping[str, float]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def row(step: int, loss: float, time_s: float = 0.0) -> dict[str, float]:
    return {"step": step, "time_s": time_s, "loss": loss, "l1": loss / 2, "gradient": 3.0}


def test_a_run_that_went_on_takes_the_place_of_what_was_after(tmp_path: Path) -> None:
    rows = [
        row(1, 9.0), row(26, 8.0), {"step": 26, "psnr": 10.0}, row(51, 7.0),
        row(26, 6.0), row(51, 5.0), {"step": 51, "psnr": 20.0},
    ]  # fmt: skip
    history = read_history(write(tmp_path / "video_vae.jsonl", rows))
    assert [(one["step"], one["loss"]) for one in history.losses] == [(1, 9.0), (26, 6.0), (51, 5.0)]
    assert history.measured == {"psnr": 20.0}
    assert history.parts == ("loss", "l1")


def test_a_run_that_began_anew_leaves_nothing_of_the_old(tmp_path: Path) -> None:
    rows = [row(step, 1.0) for step in range(1, 200, 25)] + [row(1, 5.0), row(26, 4.0)]
    assert [one["loss"] for one in read_history(write(tmp_path / "x.jsonl", rows)).losses] == [5.0, 4.0]


def test_pauses_do_not_count_as_time(tmp_path: Path) -> None:
    rows = [row(step, 1.0, time_s=step / 10 + (1000 if step > 100 else 0)) for step in range(1, 202, 25)]
    assert read_history(write(tmp_path / "x.jsonl", rows)).seconds == pytest.approx(20.1)
    assert read_history(write(tmp_path / "x.jsonl", rows[:1])).seconds == 0


def test_stages_are_read_in_order_and_others_left(tmp_path: Path) -> None:
    for name in ("diffusion", "video_vae", "something"):
        write(tmp_path / f"{name}.jsonl", [row(1, 1.0)])
    assert list(read_histories(tmp_path)) == ["video_vae", "diffusion"]


def test_what_cannot_be_read_is_said_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"has no video_vae.jsonl or other stage's; give a train.folder"):
        read_histories(tmp_path)
    path = write(tmp_path / "vocoder.jsonl", [row(1, 1.0)])
    for broken in ('{"step": 2, "lo', "3", '{"loss": 1.0}'):
        path.write_text(json.dumps(row(1, 1.0)) + f"\n{broken}\n")
        with pytest.raises(ConfigurationError, match=r"line 2 of .*vocoder.jsonl is no row with a step; remove it"):
            read_histories(tmp_path)
    write(path, [{"step": 3, "psnr": 1.0}])
    with pytest.raises(ConfigurationError, match="has no losses; train that stage first"):
        read_histories(tmp_path)


def test_smoothing_keeps_the_mean_and_few_points() -> None:
    rows = [row(step, random.Random(step).random()) for step in range(1, 4002, 25)]
    smooth = curves.smoothed(rows, "loss")
    assert len(rows) > 150 and 25 < len(smooth) <= curves.SMOOTH_POINTS
    assert smooth[0] == {"step": 38.5, "loss": pytest.approx(sum(one["loss"] for one in rows[:4]) / 4)}
    assert curves.smoothed(rows[:1], "loss") == [{"step": 1, "loss": rows[0]["loss"]}]


# ---------------------------------------------------------------- the picture


def training(folder: Path, seed: int, stages: Sequence[str] = STAGES) -> Path:
    """As long as a true one, with as many parts of each loss."""
    draw = random.Random(seed)
    parts = {"video_vae": ("l1", "edges", "coarse", "kl"), "diffusion": ("video", "audio")}
    for stage in stages:
        rows = []
        for step in range(1, 9000, 25):
            loss = math.exp(-step / 3000 + draw.gauss(0, 0.2))
            rows.append(row(step, loss) | {part: loss * draw.random() for part in parts.get(stage, ("l1", "kl"))})
        write(folder / f"{stage}.jsonl", rows)
    return folder


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(sys, "argv", ["curves"])


@pytest.mark.usefixtures("command")
def test_the_command_draws_a_small_picture_of_all_runs(tmp_path: Path) -> None:
    folders = [training(tmp_path / name, seed) for seed, name in enumerate(("a", "b", "c"))]
    sys.argv += [*map(str, folders), str(tmp_path / "docs" / "losses.svg")]
    curves.main()
    drawn = (tmp_path / "docs" / "losses.svg").read_bytes()
    assert len(drawn) < 150_000
    text = drawn.decode()
    assert all(f">{name}<" in text for name in (*STAGES, "edges", "audio")) and "run 3: dotted" in text
    assert ">gradient<" not in text and text.count("stroke-dasharray") >= 2 * len(STAGES)


@pytest.mark.usefixtures("command")
def test_a_run_without_a_stage_and_a_loss_of_nothing_are_drawn_twice_alike(tmp_path: Path) -> None:
    nothing = History([{"step": 1, "loss": 0.0}], {})
    for name in ("one", "again"):
        curves.draw_curves([{"vocoder": nothing}, {"upsampler": nothing}], tmp_path / f"{name}.svg")
    assert ">upsampler<" in (tmp_path / "one.svg").read_text()
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "again.svg").read_bytes()


def test_the_command_says_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, message in (
        ([str(tmp_path), str(tmp_path / "a.svg")], "give a train.folder"),
        ([str(tmp_path), str(tmp_path)], "usage: "),
        ([str(tmp_path / "a.svg")], "usage: "),
    ):
        monkeypatch.setattr(sys, "argv", ["curves", *arguments])
        with pytest.raises(SystemExit, match=message):
            curves.main()


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'vgen\[train\]'"):
        curves.draw_curves([{"vocoder": History([{"step": 1, "loss": 1.0}], {})}], tmp_path / "one.svg")
