"""The page of a comparison: one HTML file that needs nothing else, in the style of the report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pipeline.compare.comparison import CHANGES_FILE, Comparison, PairedScores
from pipeline.compare.density import density_figure
from pipeline.report.names import run_names
from pipeline.report.templates import render
from pipeline.store.files import Store

PAGE_FILE = "comparison.html"


def write_comparison(store: Store, comparison: Comparison, scores: Mapping[str, PairedScores]) -> str:
    """Write comparison.html; the same comparison gives the same bytes.

    Args:
        store: the folder of the comparison.
        comparison: what was compared.
        scores: of each selection, by name.

    Returns:
        the path or URL of the page.
    """
    page = render(
        f"pipeline.compare/{PAGE_FILE}",
        comparison=comparison,
        figures={name: density_figure(paired) for name, paired in scores.items()},
        changes_file=CHANGES_FILE,
        plain=_plain,
        folder_names=run_names(comparison.a.run, comparison.b.run),
    )
    store.write(PAGE_FILE, page.encode("utf-8", "replace"))
    return f"{store.url}/{PAGE_FILE}"


def _plain(value: Any) -> str:
    """A value of a configuration on one line."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
