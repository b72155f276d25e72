"""Audits of documents with versions in words: what to expect, what is not needed, and the verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeline.audit.verdict import LEVEL, Statement, VersionsTest
from pipeline.report.wording.numbers import percent
from pipeline.selection.procedures.versions import ASSUMPTION
from pipeline.selection.promises import beside

NO_BLIND_TEST = (
    "Not needed: the published version of each document is compared with its other versions, not with other documents."
)
NO_OVERLAP = "No other document calibrates."
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


def rows_that_fit(window: int, average: float, most: int) -> str:
    """Whether a run of consecutive rows has room in what a model reads of a text.

    Args:
        window: rows of a document.
        average: tokens of a row, about.
        most: `max_tokens`.
    """
    line = f"a document is {window:,} rows of about {average:,.0f} tokens each; max_tokens is {most:,}"
    if window * average <= most:
        return line
    fit = int(most / average)
    return f"warning: {line}, " + (f"so that window: {fit} fits" if fit > 1 else "so that no two rows fit")


def _times(copies: int) -> str:
    return "once" if copies == 1 else f"{copies} times"


def direction_of_versions(above: float) -> str:
    """How far published versions score above the mean of their document's versions, in standard deviations."""
    side = "above" if above > 0 else "below"
    return (
        f"Published versions score {abs(above):.2f} standard deviations {side} the mean of their document's versions, "
        "on average."
    )


def verdict_on_versions(model: str, answer: Statement, test: VersionsTest, limit: int | None) -> list[str]:
    """The verdict on a collection of documents with versions.

    Args:
        model: its name.
        answer: of the verdict.
        test: the redraws of published versions.
        limit: the most documents that were read; None when all were.
    """
    heads = {
        "trained on": f"{model} was trained on documents of this collection, as published.",
        "not shown": f"It is not shown that {model} was trained on this collection. That is no proof that it was not.",
    }
    return [
        heads[answer],
        f"Redrawing the published versions of {test.documents:,} documents {test.redraws:,} times gives "
        f"p = {beside(test.p_value, LEVEL, kind='g')}; of collections that were not trained on at most {LEVEL:g} have "
        f"p <= {LEVEL:g}. This is exact, for any model.",
        direction_of_versions(test.above),
        f"The e-value is {test.e_value:.3g}: multiply it by that of documents which arrive later; of collections that "
        "were not trained on at most one in N ever reaches N.",
        f"The verdict assumes that {ASSUMPTION}. No unseen documents are needed.",
        *([] if limit is None else [f"This is a sample: only the first {limit:,} documents were read."]),
    ]
