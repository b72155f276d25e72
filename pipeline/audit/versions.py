"""Audits of documents with versions: what their score files hold, and what is checked of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.audit.blind import BlindTest
from pipeline.audit.scored import Overlap
from pipeline.audit.summary import OverlapDiagnostic
from pipeline.config.audit import AuditConfig
from pipeline.detectors.registry import parse_detectors
from pipeline.report.wording import versions as wording
from pipeline.selection.versions import VersionPart, VersionScores
from pipeline.stages.score_versions import VERSIONS, VERSIONS_TYPE


def version_part(table: pa.Table, config: AuditConfig, wanted: Sequence[str]) -> VersionPart:
    """The scores of all versions of the documents of a score shard.

    Scores of several detectors are standardised within documents and added.

    Args:
        table: of the shard, with doc_id and the column `VERSIONS`.
        config: of the run, whose detectors made the scores.
        wanted: columns of detectors.
    """
    columns = [detector.column for detector in parse_detectors(config.detectors)]
    held = {name: pc.struct_field(table[VERSIONS].combine_chunks(), name) for name in VERSIONS_TYPE.names}
    sizes = pc.binary_length(held["digests"]).to_numpy(zero_copy_only=False) // 32
    scores = VersionScores(
        np.zeros(sizes.sum()),
        np.concatenate(([0], np.cumsum(sizes))).astype(np.int64),
        held["published"].to_numpy(zero_copy_only=False).astype(np.int64),
        tuple(table["doc_id"].to_pylist()),
        np.frombuffer(b"".join(held["digests"].to_pylist()), dtype=np.uint8).reshape(-1, 32),
    )
    matrix = held["scores"].flatten().to_numpy(zero_copy_only=False).reshape(-1, len(columns))
    each = [replace(scores, scores=np.ascontiguousarray(matrix[:, columns.index(column)])) for column in wanted]
    if len(each) > 1:
        each = [replace(scores, scores=np.sum([one.standardised() for one in each], axis=0))]
    return VersionPart(each[0], held["kinds"], held["forms"])


NO_BLIND_TEST = BlindTest(
    ok=True,
    outcome="not tested",
    sentence=wording.NO_BLIND_TEST,
)
NO_OVERLAP = Overlap(
    OverlapDiagnostic(ok=True, sentence=wording.NO_OVERLAP, n_calibration=0, n_audit=0),
    n_trained=0,
    keep=np.ones(0, dtype=bool),
)
