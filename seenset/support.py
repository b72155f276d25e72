"""A warning for answers that a check contradicts."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from pipeline.audit.summary import Summary


class UnsupportedWarning(UserWarning):
    """A check contradicts what a selection assumes: nothing is promised of it, and nobody should act on it."""


def warn_of_unsupported(summaries: Iterable[Summary]) -> None:
    """Warn, in the name of the caller of the public function, of every answer that a check contradicts."""
    for summary in summaries:
        if summary.conclusion == "contradicted":
            warnings.warn(summary.line(), UnsupportedWarning, stacklevel=3)
