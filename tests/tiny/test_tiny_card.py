"""The card's numbers are those of the files."""

import json
import sys
from pathlib import Path

import pytest

from vgen.tiny import card


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [{"step": n, "time_s": 2.0 * n, "loss": 9.0, "l1": 1.0, "gradient": 3.0} for n in range(1, 77, 25)]
    rows.append({"step": 101, "time_s": 202.0, "loss": 0.03125, "l1": 0.25, "gradient": 3.0})
    lines = [json.dumps(row) for row in (*rows, {"step": 101, "psnr": 31.52, "worst_psnr": 27.0})]
    (tmp_path / "video_vae.jsonl").write_text("\n".join(lines))
    return tmp_path


SCORE = {
    "seen": {
        "count": 100, "passed": 0.97, "shape": 1.0, "colour": 0.99, "motion": 0.98, "pitch": None, "loudness": 0.5,
        "clips": [{"passed": True, "psnr": 1.0}],
    },
    "round_trips": {"count": 40, "video_psnr_db": {"mean": 30.126, "worst": 28.5}, "frequency_kept": 1.0},
}  # fmt: skip


def test_the_tables_have_the_numbers_of_the_files(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "score.json").write_text(json.dumps(SCORE))
    monkeypatch.setattr(sys, "argv", ["card", str(folder), "--score", str(folder / "score.json")])
    card.main()
    assert capsys.readouterr().out.split("\n") == [
        "| stage | steps | minutes | losses at the end | measured |",
        "| --- | --- | --- | --- | --- |",
        "| video_vae | 101 | 3.4 | loss 0.03125, l1 0.25 | psnr 31.52, worst_psnr 27 |",
        "",
        "|  | clips | passed | shape | colour | motion | pitch | loudness |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| seen | 100 | 97.0 % | 100.0 % | 99.0 % | 98.0 % | – | 50.0 % |",
        "",
        "|  | measured | value |",
        "| --- | --- | --- |",
        "| round_trips | count | 40 |",
        "| round_trips | video_psnr_db mean | 30.13 |",
        "| round_trips | video_psnr_db worst | 28.5 |",
        "| round_trips | frequency_kept | 1 |",
        "",
    ]


def test_the_command_says_what_is_wrong(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = folder / "video_vae.jsonl"
    for arguments, message in (
        ([tmp_path / "no"], "give a train.folder"),
        ([folder, "--score", tmp_path / "no"], "No such file"),
        ([folder, "--score", other], "video_vae.jsonl is not what task=score writes"),
    ):
        monkeypatch.setattr(sys, "argv", ["card", *map(str, arguments)])
        with pytest.raises(SystemExit, match=message):
            card.main()
