"""Whom a failure is put on that shows in a collective, from the ends of ranks and their notes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launchers.failure import Ending, first_failure
from launchers.notes import Arrivals, Note

LOG = Path("rank.log")
OWN: dict[str, Any] = {"kind": "E", "message": "spoilt", "stage": "denoise", "traceback": "t"}
GONE = OWN | {"kind": "RuntimeError", "message": "Connection closed by peer [127.0.0.1]:9"}
LATE = OWN | {"kind": "RuntimeError", "message": "Timed out waiting 45000ms for recv"}
WATCHDOG = "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9)"


def note(inside: bool = True, stage: str | None = "denoise", **counts: int) -> Note:
    """Of a rank that came so often to the collective of each group; the last named is the last it came to.

    Groups are named by their ranks: `g01` has 0 and 1.
    """
    groups = {
        name: Arrivals(tuple(int(rank) for rank in name[1:]), 45.0, f"meet in {name}", count)
        for name, count in counts.items()
    }
    return Note(stage, list(counts)[-1] if counts else None, stage, inside, groups)


def failed(rank: int, error: dict[str, Any], at: float, **options: Any) -> Ending:
    return Ending(rank, 1, at + 0.2, LOG, error=error | {"time": at}, **options)


def ended(rank: int) -> Ending:
    """By the supervisor."""
    return Ending(rank, -15, 51.0, LOG, terminated_at=50.5)


WAITED = failed(0, LATE, 50.0)
LOST = failed(0, GONE, 50.0)


def test_the_rank_that_did_not_come_is_blamed() -> None:
    stopped = Ending(1, -9, 60.0, LOG, terminated_at=50.5, killed=True)
    found = first_failure([WAITED, stopped], {0: note(g01=812), 1: note(inside=False, g01=811, g1=410)})
    assert (found.rank, found.kind, found.stage) == (1, "RankStalled", "denoise")
    assert (found.collective, found.exit_code, found.signal) == ("'meet in g01' (no. 812)", None, None)
    assert str(found) == (
        "Rank 1 did not come to 'meet in g01' (no. 812) in denoise within 45 s; "
        "it was last in 'meet in g1' (no. 410) of denoise (log: rank.log)"
    )


@pytest.mark.parametrize(
    ("last", "words"),
    [
        (note(), "it had been in no collective and was in denoise"),
        (note(stage=None), "it had been in no collective"),
        (note(g1=4), "it was still in 'meet in g1' (no. 4) of denoise"),
        (
            replace(note(inside=False, g1=4), stage="decode"),
            "it was last in 'meet in g1' (no. 4) of denoise and then in decode",
        ),
    ],
)
def test_what_is_said_of_the_rank_that_did_not_come(last: Note, words: str) -> None:
    message = first_failure([WAITED, ended(1)], {0: note(g01=5), 1: last}).message
    assert message == f"did not come to 'meet in g01' (no. 5) in denoise within 45 s; {words}"


@pytest.mark.parametrize(
    ("endings", "notes", "rank"),
    [
        # Rank 0 waits for 2, which waits for 3.
        (
            [WAITED, ended(1), ended(2), ended(3)],
            {0: note(g02=7), 1: note(g13=7), 2: note(g02=6, g23=9), 3: note(inside=False, g13=6, g23=8)},
            3,
        ),
        # Two are missing, and one of them only because of the other.
        (
            [WAITED, ended(1), ended(2)],
            {0: note(g012=7), 1: note(g012=6, g12=2), 2: note(inside=False, g012=6, g12=1)},
            2,
        ),
        # The other came to something else, no earlier.
        (
            [WAITED, ended(1)],
            {0: note(g01=7), 1: replace(note(g01=7), groups={"g01": Arrivals((0, 1), 45.0, "other", 7)})},
            1,
        ),
        # Only the collective that the rank is in counts: it can leave others before all have come.
        ([WAITED, ended(1), ended(2)], {0: note(g02=3, g01=7), 1: note(g01=6, g1=1), 2: note(g02=2, g2=1)}, 1),
        # All have come, or nothing is known of the other: what the rank itself says.
        ([WAITED, ended(1)], {0: note(g01=7), 1: note(g01=7)}, 0),
        ([WAITED, ended(1)], {0: note(g01=7)}, 0),
        # A timeout of something else.
        ([WAITED, ended(1)], {0: note(inside=False, g01=7), 1: note(g01=6)}, 0),
        # A peer is gone since it ended too early.
        ([LOST, Ending(1, 0, 49.0, LOG)], {0: note(g01=7), 1: note(inside=False, g01=6)}, 1),
        # An error on the supervisor's SIGTERM is no cause.
        (
            [LOST, failed(1, OWN, 50.6, terminated_at=50.5), Ending(2, 0, 49.0, LOG)],
            {0: note(g02=7), 1: note(inside=False), 2: note(inside=False, g02=6)},
            2,
        ),
        # A peer is gone that waited in vain for a third.
        (
            [failed(0, GONE, 49.9), failed(1, LATE, 50.0), ended(2)],
            {0: note(g01=7), 1: note(g12=7), 2: note(inside=False, g12=6)},
            2,
        ),
        # NCCL's watchdog: both ranks are outside of what they queued, and the one that is less ahead waits, too.
        (
            [Ending(0, -6, 50.0, LOG, tail=WATCHDOG), ended(1), ended(2)],
            {0: note(inside=False, g012=9), 1: note(inside=False, g012=8), 2: note(inside=False, g012=5)},
            2,
        ),
        # Another abort.
        ([Ending(0, -6, 50.0, LOG, tail="free(): invalid size"), ended(1)], {0: note(g01=9), 1: note(g01=8)}, 0),
    ],
)
def test_blame_by_notes(endings: list[Ending], notes: dict[int, Note], rank: int) -> None:
    assert first_failure(endings, notes).rank == rank


@pytest.mark.parametrize("first", [failed(1, OWN, 50.1), Ending(1, -11, 53.0, LOG)])
def test_a_rank_that_fails_is_blamed_before_its_peers(first: Ending) -> None:
    """Though it comes to be known after what its end did to them."""
    found = first_failure([LOST, first], {0: note(g01=7), 1: note(inside=False, g01=6)})
    assert (found.rank, found.kind) == (1, "E" if first.error else "RankKilled")


def test_a_rank_that_fails_in_a_collective_says_which() -> None:
    raised, killed = failed(0, OWN, 50.0), Ending(0, -9, 50.0, LOG)
    inside, outside = {0: note(g01=7)}, {0: note(inside=False, g01=7)}
    meet, end = "'meet in g01' (no. 7)", "(log: rank.log)"
    hint = "was ended by SIGKILL, often the kernel's out-of-memory killer,"
    assert str(first_failure([raised], inside)) == f"Rank 0 failed in stage denoise with E: in {meet}: spoilt {end}"
    assert str(first_failure([raised], outside)) == f"Rank 0 failed in stage denoise with E: spoilt {end}"
    assert str(first_failure([killed], inside)) == f"Rank 0 in stage denoise {hint} in {meet} {end}"
    assert str(first_failure([killed], outside)) == f"Rank 0 in stage denoise {hint} after {meet} {end}"
    assert (first_failure([killed], inside).collective, first_failure([killed], outside).collective) == (meet, None)
