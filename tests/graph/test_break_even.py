"""Whether a graph mode pays: a sentence where it does not, by what was measured."""

import dataclasses
import subprocess
import sys

import pytest

from vgen.config import GraphConfig
from vgen.graph.break_even import GraphWork, advice, cost_s, gain_s, kinds_of

EAGER = GraphConfig("eager", "default", "block", "transformer", 2, 8, False, "capture")
LTX2 = GraphWork(kinds=1, passes=1, tokens=15360)


def of(mode: str) -> GraphConfig:
    return dataclasses.replace(EAGER, mode=mode)  # type: ignore[arg-type]


def test_eager_has_nothing_to_pay() -> None:
    assert advice(EAGER, LTX2) is None
    assert cost_s(EAGER, LTX2) == gain_s(EAGER, LTX2) == 0


@pytest.mark.parametrize("mode", ["compile", "cuda", "compile_cuda"])
def test_it_pays_from_the_passes_on_that_the_sentence_says(mode: str) -> None:
    graph = of(mode)
    sentence = advice(graph, LTX2)
    assert sentence is not None and sentence.startswith(f"graph={mode} will not pay here")
    enough = int(sentence.partition("pays from ")[2].split()[0])
    assert advice(graph, dataclasses.replace(LTX2, passes=enough + 1)) is None
    assert advice(graph, dataclasses.replace(LTX2, passes=enough - 1)) is not None


def test_more_tokens_gain_more_and_more_kinds_cost_more() -> None:
    graph = of("compile_cuda")
    assert gain_s(graph, LTX2) > gain_s(graph, dataclasses.replace(LTX2, tokens=1920))
    assert cost_s(graph, dataclasses.replace(LTX2, kinds=3)) == pytest.approx(3 * cost_s(graph, LTX2))
    # 1013 ms against 1068 were measured.
    assert gain_s(of("compile"), LTX2) == pytest.approx(0.055, rel=0.1)


def test_text_makes_no_kind() -> None:
    assert kinds_of(("cond",)) == kinds_of(("cond", "uncond")) == 1
    assert kinds_of(("cond", "uncond", "ptb", "mod")) == 3


def test_it_needs_no_torch() -> None:
    code = "import sys, vgen.graph.break_even; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
