"""A schedule of scans under one error rate."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pipeline.config.paths import Place
from pipeline.config.selection import Share
from pipeline.config.yaml import Section

Rule = Literal["spend", "prds", "e-lond"]


class SeriesConfig(Section):
    """One error rate over all scans of a schedule; this run is one of them."""

    ledger: Annotated[str, Place.RUN] = Field(
        description="Folder of the scans of the schedule: a local path or an fsspec URL, the same for every scan."
    )
    alpha: Share = Field(0.1, description="Largest share of all that the scans select together that may be wrong.")
    rule: Rule = Field(
        "spend",
        description="How alpha is shared out. spend: each scan has a part of it, under any dependence; prds: BH, which "
        "counts what was selected before, for one unchanged scorer; e-lond: ebh, which counts it under any dependence.",
    )
    horizon: Annotated[int, Field(ge=1)] | None = Field(
        None,
        description="Scans of the schedule, each with the same part of alpha; null: no end, and ever smaller parts.",
    )
