"""Documents with versions: what is checked of them, and the verdict, for which all published indices are redrawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.audit.blind import BlindTest
from pipeline.audit.judge import Setting, audited_model
from pipeline.audit.scored import Each, Overlap, Scored
from pipeline.audit.summary import Diagnostic, OverlapDiagnostic
from pipeline.audit.verdict import LEVEL, CollectionVerdict, Statement, VersionsTest
from pipeline.config.audit import AuditConfig
from pipeline.detectors.registry import parse_detectors
from pipeline.errors import UserError
from pipeline.report.wording import versions as wording
from pipeline.selection.versions import VersionPart, VersionScores, residuals_of, version_ranks
from pipeline.selection.versions_collection import REDRAWS, log_e_values, redraw_p_value
from pipeline.stages.events import VERSIONS, VERSIONS_TYPE
from pipeline.store.receipts import Receipt


def judge_versions(config: AuditConfig, scored: Scored, limit: int | None, each: Each) -> CollectionVerdict:
    """Was the collection of a run's documents with versions trained on? By redrawing all indices, which is exact.

    The statistic is the sum over documents of the published version's standardised score, of all detectors of the run
    together, which were fixed before any score was read. The e-value multiplies: that of documents which arrive later,
    with indices of their own, times this one is an e-value of both.

    Args:
        config: of the run.
        scored: its finished score shards.
        limit: the most documents that were read; None when all were.
        each: reads the shards.

    Raises:
        UserError: no document has scores of all its versions, or damaged scores.
    """
    columns = [detector.column for detector in parse_detectors(config.detectors)]

    def part_of(receipt: Receipt) -> VersionPart:
        return version_part(scored.table(receipt, ["doc_id", VERSIONS]), config, columns)

    parts = list(each(scored.of("audit"), part_of))
    if not sum(len(part.scores.ids) for part in parts):
        raise UserError(f"no document of {scored.store.url} has scores of all its versions")
    return judge_parts(parts, Setting(scored.store.url, audited_model(config), limit, config.seed, False, False))


def judge_parts(parts: Sequence[VersionPart], setting: Setting) -> CollectionVerdict:
    """The verdict on documents the scores of whose versions are at hand.

    Args:
        parts: scores by all detectors of the run together; at least one document in all.
        setting: of the run.
    """
    scores = residuals_of(parts)
    log_e = float(log_e_values(version_ranks(scores, setting.seed, "against"), scores.sizes)[-1])
    above = float(scores.standardised()[scores.offsets[:-1] + scores.published].mean())
    test = VersionsTest(
        p_value=redraw_p_value(scores, setting.seed),
        redraws=REDRAWS,
        e_value=math.exp(min(log_e, math.log(np.finfo(float).max))),
        documents=scores.sizes.size,
        versions=int(scores.sizes.max()),
        above=above,
    )
    answer: Statement = "trained on" if test.p_value <= LEVEL else "not shown"
    return CollectionVerdict(
        run=setting.run,
        model=setting.model,
        limit=setting.limit,
        seed=setting.seed,
        answer=answer,
        supported=True,
        reasons=[],
        sentences=wording.verdict_on_versions(setting.model, answer, test, setting.limit),
        level=LEVEL,
        counts=[],
        test=None,
        blind=NO_BLIND_TEST.diagnostic,
        direction=Diagnostic(ok=above > 0, sentence=wording.direction_of_versions(above)),
        versions=test,
    )


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
