"""``bench.json`` and the table ``bench.txt`` of a benchmark task."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from vgen import record
from vgen.tasks.measure import Measurement


def write_bench(
    out_dir: Path, rows: Sequence[Measurement], errors: dict[str, float], *, baseline: str, against: str
) -> None:
    """``errors``: relative error of a row's output against ``against``; ratios are of medians over ``baseline``."""
    base = next(row for row in rows if row.name == baseline)
    table = [
        {
            **dataclasses.asdict(row),
            "speed_ratio": base.median_ms / row.median_ms,
            "relative_error": errors.get(row.name),
        }
        for row in rows
    ]
    record.write_json_atomic(out_dir / "bench.json", {"rows": table, "baseline": baseline, "error_against": against})
    lines = [f"{'':24}{'first ms':>10}{'median ms':>11}{'peak GiB':>10}{'× ' + baseline:>20}{'rel. error':>12}"]
    for row, entry in zip(rows, table, strict=True):
        peak = "" if row.peak_gib is None else f"{row.peak_gib:.2f}"
        error = "" if entry["relative_error"] is None else f"{entry['relative_error']:.1e}"
        lines.append(
            f"{row.name:24}{row.first_ms:10.1f}{row.median_ms:11.2f}{peak:>10}{entry['speed_ratio']:20.3f}{error:>12}"
        )
    (out_dir / "bench.txt").write_text("\n".join(lines) + "\n")  # the parent shows it
