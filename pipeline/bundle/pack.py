"""`seenset pack`: one file with all data that determine the answers of a finished run."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import __version__
from pipeline.answers.scored_collection import Collection, read_collection
from pipeline.answers.verdict import read_verdict
from pipeline.bundle.container import RefutedError, pack_members
from pipeline.bundle.members import (
    DOCUMENTS,
    TEXTS,
    VERDICTS,
    Committed,
    bundled_schema,
    score_column,
    summary_member,
    verdicts_member,
)
from pipeline.bundle.verify import verify_bundle
from pipeline.checks.dependent_documents import MOST, read_sketches
from pipeline.checks.overlap import find_overlaps
from pipeline.config.audit import AuditConfig
from pipeline.config.corpus import ROLES, Role
from pipeline.config.selection import NULL_ROLE, SelectionConfig
from pipeline.corpus.documents import read_shard, text_key
from pipeline.corpus.reasons import Reason
from pipeline.corpus.shard import Shard
from pipeline.errors import IncompleteError, UserError
from pipeline.results.history import answered_selections, read_history, several_questions
from pipeline.results.summary import read_summary, summary_file
from pipeline.run.digests import VerdictTables
from pipeline.run.records import MANIFEST_FILE, VERDICT_FILE
from pipeline.run.scored import Scored, ShardMap
from pipeline.selection.procedures import procedure_of
from pipeline.stages.events import FEATURES, VERSIONS
from pipeline.store.receipts import Receipt, read_filed


def pack_run(config: AuditConfig, scored: Scored, each: ShardMap, texts: bool = False) -> bytes:
    """The bytes of the bundle of a run, equal for the same run, after a successful verification.

    Args:
        config: configuration of the run.
        scored: its finished score shards; the lock of the run must be held.
        each: reads the shards.
        texts: whether the bundle includes the texts of the documents.

    Raises:
        UserError: a run without answers, with a damaged answer or with a procedure of a plugin; changed texts.
        IncompleteError: an answer that is not made yet.
    """
    store = scored.store
    history, selections = read_history(store), answered_selections(store, config)
    if history:
        config = config.model_copy(update={"overlap": history[-1].overlap})
    if not selections:
        raise UserError(f"{store.url} has no selections, so there is nothing to pack: make one with seenset select")
    for one in selections:
        if not procedure_of(one.procedure).built_in:
            raise UserError(
                f"selection {one.name}: procedure {one.procedure} is a plugin's, which seenset verify cannot compute; "
                "seenset pack takes runs whose selections use built-in procedures"
            )
        if read_summary(store, one.name) is None:
            raise IncompleteError(f"selection {one.name} of {store.url} is not made yet: run the audit to its end")
    verdict, collection = read_verdict(store), None
    if verdict is not None and not config.corpus.has_versions:
        kind = None if verdict.test is None else verdict.test.blocks
        collection = read_collection(config, scored, each, kind)
    packing = _Packing.gather(config, scored, selections, collection, each, texts)
    contents = {MANIFEST_FILE: store.read(MANIFEST_FILE), DOCUMENTS: _parquet(packing.documents())}
    for one in selections:
        contents[summary_member(one.name)] = store.read(summary_file(one.name))
        contents[verdicts_member(one.name)] = _parquet(_verdicts(packing, one.name))
    if verdict is not None:
        contents[VERDICT_FILE] = store.read(VERDICT_FILE)
    index = {
        "seenset": __version__,
        "selections": [one.model_dump(mode="json", by_alias=True) for one in selections],
        "columns": [] if collection is None else collection.columns,
        "blocks": None if collection is None else collection.kind,
        "texts": texts,
        "several": several_questions(history),
    }
    data = pack_members(index, contents)
    _check_packed(data, store.url)
    return data


@dataclass(frozen=True, slots=True, eq=False)
class _Packing:
    """A run, and the data that are packed with its documents."""

    scored: Scored
    schema: pa.Schema  # schema of `documents.parquet`
    keep: dict[Role, np.ndarray]  # by calibration role: bool, (documents,)
    families: dict[Role, pa.Array]  # by role: int64, (documents,)
    collection: Collection | None

    @classmethod
    def gather(
        cls,
        config: AuditConfig,
        scored: Scored,
        selections: list[SelectionConfig],
        collection: Collection | None,
        each: ShardMap,
        texts: bool,
    ) -> _Packing:
        """Find the known documents that calibrate, and near-duplicates."""
        if config.corpus.has_versions:
            return cls(scored, bundled_schema(selections, [], texts, versions=True), {}, {}, None)
        roles = list(dict.fromkeys(NULL_ROLE[one.direction] for one in selections))
        overlaps = find_overlaps(scored, roles, config, each)
        families = {}
        for role in dict.fromkeys(["audit", *roles]):
            keep, most = (None, MOST) if role == "audit" else (overlaps[role].keep, None)
            compared = read_sketches(scored, role, each, keep, most).find_near_duplicates(config.near_copies)
            families[role] = pa.array(compared.families(sum(map(scored.count, scored.of(role)))), pa.int64())
        return cls(
            scored,
            bundled_schema(selections, [] if collection is None else collection.columns, texts),
            {role: overlaps[role].keep for role in roles},
            families,
            collection,
        )

    def documents(self) -> pa.Table:
        """The documents of all roles: for each shard those with scores, then those without."""
        return pa.concat_tables(
            [self.schema.empty_table(), *(part for role in ROLES for part in self._role_tables(role))]
        )

    def _role_tables(self, role: Role) -> Iterator[pa.Table]:
        """The documents of a role, one table per shard."""
        if VERSIONS in self.schema.names:
            yield from self._with_versions(role)
            return
        columns = [name.removeprefix("score:") for name in self.schema.names if name.startswith("score:")]
        calibrates, place = self.keep.get(role), 0
        blocks = self._blocks(role)
        for receipt in self.scored.of(role):
            table = self.scored.table(receipt, ["id_key", "text_key", "doc_id", "row", "group", *columns])
            part = {"id": table["doc_id"], "row": table["row"], "group": table["group"]}
            part |= {score_column(name): table[name] for name in columns}
            kept = np.full(len(table), role != "audit")
            part["calibrates"] = pa.array(kept if calibrates is None else calibrates[place : place + len(table)])
            if role in self.families:
                part["family"] = self.families[role].slice(place, len(table))
            part["block"] = pa.array([blocks.get(key) for key in table["id_key"].to_pylist()], pa.int64())
            if "text" in self.schema.names:
                part["text"] = pa.array(self._texts(receipt, table), pa.string())
            place += len(table)
            yield self._table(role, receipt, part)
            if role == "audit":
                yield from (self._table(role, receipt, unscored) for unscored in self._unscored(receipt))

    def _with_versions(self, role: Role) -> Iterator[pa.Table]:
        """The documents of a role that have versions, one table per shard.

        Raises:
            UserError: the file with the versions was changed since scoring.
        """
        files: dict[str, Committed | None] = {}
        for receipt in self.scored.of(role):
            shard = self.scored.shards[receipt.shard]
            table = self.scored.table(receipt, ["doc_id", "row", VERSIONS, FEATURES])
            if shard.path not in files:
                files[shard.path] = Committed.read(shard)
            committed = files[shard.path]
            part = {"id": table["doc_id"], "row": table["row"], **{one: table[one] for one in (VERSIONS, FEATURES)}}
            part["calibrates"] = pa.array(np.zeros(len(table), dtype=bool))
            if committed is not None:
                part |= committed.columns(table, shard.name)
            if TEXTS.name in self.schema.names:
                part[TEXTS.name] = pa.array(self._all_texts(shard, table["row"].to_pylist()), TEXTS.type)
            yield self._table(role, receipt, part)
            yield from (self._table(role, receipt, unscored) for unscored in self._unscored(receipt))

    def _all_texts(self, shard: Shard, rows: Sequence[int]) -> list[tuple[str, ...]]:
        """All versions of some documents of a shard, from their file."""
        texts = {one.row: one.texts for one in read_shard(replace(shard, transform=None), wanted=rows)}
        return [texts.get(row, ()) for row in rows]

    def _table(self, role: Role, receipt: Receipt, part: dict[str, pa.Array]) -> pa.Table:
        """Documents of a shard with all columns; missing columns are null."""
        size = len(part["id"])
        fixed = {"role": [role] * size, "source": [self.scored.shards[receipt.shard].name] * size}
        given = {**fixed, **part}
        columns = [given[field.name] if field.name in given else pa.nulls(size, field.type) for field in self.schema]
        return pa.table(columns, names=self.schema.names).cast(self.schema)

    def _unscored(self, receipt: Receipt) -> Iterator[dict[str, pa.Array]]:
        """Documents of a shard without scores, in the order of its verdicts."""
        store, names = self.scored.store, ["doc_id", "row", "reason"]
        parts = []
        if receipt.quarantine is not None:
            parts.append(read_filed(store, receipt, names, receipt.quarantine))
        if receipt.shard in self.scored.duplicates:
            repeated = read_filed(store, receipt, names[:2]).take(pa.array(self.scored.duplicates[receipt.shard]))
            parts.append(repeated.append_column("reason", pa.array([Reason.DUPLICATE_ID] * len(repeated))))
        for table in parts:
            calibrates = pa.array([False] * len(table))
            yield {"id": table["doc_id"], "row": table["row"], "reason": table["reason"], "calibrates": calibrates}

    def _blocks(self, role: Role) -> dict[int, int]:
        """The block of each document of a role in the verdict, by the key of its id."""
        if self.collection is None or role == "seen":
            return {}
        of_role = self.collection.audited == (role == "audit")
        pairs = zip(self.collection.keys[of_role].tolist(), self.collection.block[of_role].tolist(), strict=True)
        return dict(pairs)

    def _texts(self, receipt: Receipt, table: pa.Table) -> list[str]:
        """The texts of the scored documents of a shard.

        Raises:
            UserError: the texts are not those that were scored.
        """
        shard = self.scored.shards[receipt.shard]
        wanted = dict(zip(table["row"].to_pylist(), table["text_key"].to_pylist(), strict=True))
        texts = {one.row: one.text for one in read_shard(shard, wanted=wanted) if one.problem is None}
        if any(row not in texts or text_key(texts[row]) != key for row, key in wanted.items()):
            raise UserError(
                f"--texts reads the texts again, and those of {shard.name} are not the ones that were scored"
            )
        return [texts[row] for row in wanted]


def _check_packed(data: bytes, run: str) -> None:
    """Verify a bundle before it is written.

    Raises:
        UserError: its answers do not follow from its scores.
    """
    try:
        refuted = [str(finding) for finding in verify_bundle(data, run).findings if finding.outcome == "refuted"]
    except RefutedError as error:
        refuted = [str(error)]
    if refuted:
        raise UserError(f"{run} cannot be packed, as its answers do not follow from its scores: {refuted[0]}")


def _verdicts(packing: _Packing, selection: str) -> pa.Table:
    """The answer of a selection for each audited document."""
    tables = VerdictTables.open(packing.scored.store, selection)
    parts = [tables.read(receipt.shard) for receipt in packing.scored.of("audit")]
    whole = pa.concat_tables(part.select(["doc_id", "p_value", "selected"]) for part in parts)
    return whole.rename_columns(VERDICTS.names).cast(VERDICTS)


def _parquet(table: pa.Table) -> bytes:
    """Write a table as bytes that depend only on the table."""
    buffer = io.BytesIO()
    pq.write_table(table.combine_chunks(), buffer, compression="zstd")
    return buffer.getvalue()
