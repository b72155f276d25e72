"""What audits of documents with versions may expect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeline.report.wording.numbers import percent

EXPECTED = (
    "what to expect (8B parameters, 500B tokens, texts inserted at random; Hubble, arXiv 2510.19811): of documents "
    "that a model read {shares} are named; a collection of 500 to 1,500 may be shown where no document is"
)


def expected_text(expected: Sequence[Mapping[str, float]]) -> str:
    """What share of documents with versions is selected, by how often the model read them.

    Args:
        expected: rows of `EXPECTED` in `pipeline.selection.versions_collection`, as a forecast holds them.
    """
    shares = []
    for row in expected:
        least, most = percent(row["least"]), percent(row["most"])
        shares.append(f"{_times(int(row['copies']))} {least if least == most else f'{least} to {most}'}")
    return EXPECTED.format(shares=", ".join(shares))


def _times(copies: int) -> str:
    return "once" if copies == 1 else f"{copies} times"
