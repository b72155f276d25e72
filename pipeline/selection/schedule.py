"""One error rate over a schedule of scans (docs/methods.md)."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from pipeline.config.series import Rule


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one scan in its schedule, and what its selection may spend there."""

    number: int  # 1 for the first scan of the schedule
    rule: Rule
    alpha: Fraction  # of the whole schedule, in (0, 1)
    share: Fraction  # of alpha that is this scan's, in (0, 1]; over all scans they sum to at most 1
    before: int  # documents that earlier scans had selected by the same selection, as filed when the slot was claimed

    @property
    def level(self) -> Fraction:
        """What this scan spends of alpha."""
        return self.alpha * self.share
