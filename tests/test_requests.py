"""Prompts files: text, JSONL, and their faults."""

import dataclasses
from pathlib import Path

import pytest

from vgen.config import RequestConfig
from vgen.requests import build_requests
from vgen.typed import ConfigurationError

CONFIG = RequestConfig("p", "n", None, 1, 64, 96, 9, 24.0, True)


def _from_file(tmp_path: Path, name: str, text: str) -> tuple[object, ...]:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return build_requests(dataclasses.replace(CONFIG, prompts_file=str(path)))


def test_single_request_takes_the_settings() -> None:
    (request,) = build_requests(CONFIG)
    assert dataclasses.asdict(request) == {
        "index": 0, "prompt": "p", "negative_prompt": "n", "seed": 1, "height": 64, "width": 96, "num_frames": 9,
        "fps": 24.0, "audio": True,
    }  # fmt: skip


def test_text_file_has_one_prompt_per_line(tmp_path: Path) -> None:
    requests = _from_file(tmp_path, "p.txt", 'a, {b} = "c"\n\n  \n日本語\u2028 same line\r\n${x}')
    assert [r.prompt for r in requests] == ['a, {b} = "c"', "日本語\u2028 same line", "${x}"]  # type: ignore[attr-defined]
    assert [r.index for r in requests] == [0, 1, 2]  # type: ignore[attr-defined]


def test_jsonl_overrides_single_fields(tmp_path: Path) -> None:
    text = '{"prompt": "a\\nb", "seed": 9, "audio": false}\n{"prompt": "c", "fps": 30}\n'
    first, second = _from_file(tmp_path, "p.jsonl", text)
    assert (first.prompt, first.seed, first.audio, first.fps) == ("a\nb", 9, False, 24.0)  # type: ignore[attr-defined]
    assert (second.seed, second.fps) == (1, 30.0)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        ("p.txt", "\n \n", "has no prompt"),
        ("p.jsonl", "{", "line 1 is not JSON"),
        ("p.jsonl", '{"prompt": "a"}\n{"seed": 1}', "line 2 has no prompt"),
        ("p.jsonl", '{"prompt": "a", "sede": 1}', "sets 'sede'"),
        ("p.jsonl", '{"prompt": "a", "seed": "x"}', "seed='x' is not a whole number"),
        ("p.jsonl", '{"prompt": "a", "index": 4}', "sets 'index'"),
    ],
)
def test_faults_are_named(tmp_path: Path, name: str, text: str, part: str) -> None:
    with pytest.raises(ConfigurationError, match=part):
        _from_file(tmp_path, name, text)


def test_missing_file_is_named() -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        build_requests(dataclasses.replace(CONFIG, prompts_file="/nowhere/p.txt"))
