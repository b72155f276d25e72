"""The members of a bundle: their names, and the columns of its tables. docs/evidence.md defines each.

Documents with versions have scores of every version, and a proof of their commitment.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.answers.collection_test import version_part
from pipeline.bundle.container import BundleIndex, RefutedError
from pipeline.checks.shuffle import VersionDraws, draw_table, version_draws
from pipeline.config.audit import AuditConfig
from pipeline.config.corpus import ROLES
from pipeline.config.selection import SelectionConfig
from pipeline.corpus.documents import id_key
from pipeline.corpus.shard import Shard
from pipeline.detectors.registry import parse_detectors
from pipeline.errors import UserError
from pipeline.mark.commitment import (
    STEP,
    CommittedDocument,
    Proof,
    compute_roots,
    leaf_digest,
    merkle_proofs,
    read_committed,
    text_digests,
    version_digest,
)
from pipeline.mark.mark import SCHEMA
from pipeline.run.records import MANIFEST_FILE, VERDICT_FILE
from pipeline.selection.blocks import NONE
from pipeline.selection.engine import Verdict
from pipeline.selection.folds import Fold, RoleScores, run_queries
from pipeline.selection.procedures.versions import answer_versions
from pipeline.selection.version_draws import DrawTable
from pipeline.selection.version_scores import VersionPart
from pipeline.stages.events import FEATURES, FEATURES_TYPE, VERSIONS, VERSIONS_TYPE

TEXTS = pa.field("texts", pa.list_(pa.string()))  # texts of all versions, in order
DRAWN = pa.field(FEATURES, FEATURES_TYPE)
FIELDS = (
    pa.field(VERSIONS, VERSIONS_TYPE),
    pa.field("salt", pa.binary(32)),
    pa.field("commitments", pa.binary()),  # d_i of each version, concatenated
    pa.field("proof", pa.list_(pa.binary(33))),  # a byte that is 1 where the node is on the left, and the node
)
"""Columns of `documents.parquet` where documents have versions; null without scores, the last three also without salts.
"""

_PRIVATE = {name: SCHEMA.field(name).type for name in ("id", "versions", "index", "salt")}

DOCUMENTS = "documents.parquet"
VERDICTS = pa.schema([("id", pa.string()), ("p_value", pa.float64()), ("selected", pa.bool_())])
"""Columns of the answer of a selection for each audited document, in the order of `DOCUMENTS`."""

NAMES = pa.dictionary(pa.int32(), pa.string())
_ALWAYS = pa.schema(
    [
        ("role", NAMES),
        ("source", NAMES),
        ("row", pa.int64()),
        ("id", pa.string()),
        ("reason", NAMES),  # why there are no scores; null where there are
        ("calibrates", pa.bool_()),
    ]
)
_RELATED = (
    pa.field("group", pa.string()),
    pa.field("family", pa.int64()),  # of near-duplicates in the role; null for none, -1 where it was not compared
)


@dataclass(frozen=True, slots=True)
class Committed:
    """Documents of one private file of `seenset mark`, by row."""

    documents: list[CommittedDocument]
    proofs: list[Proof]

    @classmethod
    def read(cls, shard: Shard) -> Committed | None:
        """Read the file of a shard; None if `seenset mark` did not write it, or ids are from another column.

        Memory holds the digests of all versions.
        """
        documents = _private_documents(shard.path) if shard.id_column == "id" else None
        if documents is None:
            return None
        order = sorted(range(len(documents)), key=lambda row: documents[row].id)
        proofs: list[Proof] = [[]] * len(documents)
        for row, proof in zip(order, merkle_proofs([documents[row].leaf for row in order]), strict=True):
            proofs[row] = proof
        return cls(documents, proofs)

    def columns(self, table: pa.Table, name: str) -> dict[str, pa.Array]:
        """The columns `FIELDS` of some documents, without the scores.

        Args:
            table: table of the documents, with doc_id, row and `VERSIONS`.
            name: name of the file, for messages.

        Raises:
            UserError: the file does not have the versions that were scored.
        """
        chosen = []
        for doc_id, row, versions in zip(*(table[one].to_pylist() for one in ("doc_id", "row", VERSIONS)), strict=True):
            held = self.documents[row] if row < len(self.documents) else None
            scored = (doc_id, versions["published"], versions["digests"])
            if held is None or (held.id, held.index, held.texts) != scored:
                raise UserError(f"{name} does not hold the versions that were scored: put the file back")
            chosen.append((held, self.proofs[row]))
        values: dict[str, list[Any]] = {
            "salt": [document.salt for document, _ in chosen],
            "commitments": [document.digests for document, _ in chosen],
            "proof": [proof for _, proof in chosen],
        }
        return {field.name: pa.array(values[field.name], field.type) for field in FIELDS[1:]}


@dataclass(frozen=True, slots=True, eq=False)
class BundledVersions:
    """The audited documents of a bundle with scores of all their versions."""

    table: pa.Table  # rows of `documents.parquet`
    config: AuditConfig
    draws: VersionDraws
    parts: dict[tuple[str, ...], VersionPart] = field(default_factory=dict)  # cache, by detectors

    @classmethod
    def parse(cls, documents: pa.Table, config: AuditConfig) -> BundledVersions:
        """Check that the values of each document have consistent lengths.

        Raises:
            RefutedError: a document without versions, or with a value of another length.
        """
        scored = documents.filter(pc.is_null(documents["reason"])) if documents["reason"].null_count else documents
        versions = scored[VERSIONS].combine_chunks()
        held = {name: pc.struct_field(versions, name) for name in VERSIONS_TYPE.names}
        size = pc.binary_length(held["digests"])
        k, columns = pc.divide(size, 32), len(parse_detectors(config.detectors))
        lengths = pc.binary_length(pc.list_flatten(held["forms"])).to_numpy(zero_copy_only=False)
        due, each = (pc.list_value_length(held[name]).fill_null(0).to_numpy() for name in ("kinds", "forms"))
        conditions = {
            "digests": pc.equal(size, pc.multiply(k, 32)),
            "scores": pc.equal(pc.list_value_length(held["scores"]), pc.multiply(k, columns)),
            "forms": pc.or_(
                pc.equal(pc.list_value_length(held["forms"]), k), pc.equal(pc.list_value_length(held["kinds"]), 0)
            ),
            "sites": pa.array([np.array_equal(lengths, np.repeat(due, each))]),
            "published": pc.is_valid(held["published"]),
            "commitments": pc.fill_null(pc.equal(pc.binary_length(scored["commitments"]), size), True),
        }
        for name, holds in conditions.items():
            if not pc.all(pc.fill_null(holds, False), min_count=0).as_py():
                raise RefutedError(f"{name} of a document are not those of its versions")
        named = scored.select(["id", VERSIONS, FEATURES]).rename_columns(["doc_id", VERSIONS, FEATURES])
        return cls(scored, config, _draws(named, config))

    def part(self, columns: list[str]) -> VersionPart:
        """The scores of all versions by these detectors, as `version_part` reads them from a run."""
        renamed = self.table.select(["id", VERSIONS]).rename_columns(["doc_id", VERSIONS])
        if tuple(columns) not in self.parts:
            first = next(iter(self.parts.values()), None)
            part = version_part(renamed, self.config, columns, self.draws.left_out)
            self.parts[tuple(columns)] = replace(part, like=first)
        return self.parts[tuple(columns)]

    def answer(self, selection: SelectionConfig, quarantined: int) -> Verdict:
        """Answer a selection of the run. Raises UserError as `answer_versions`."""
        keys = np.array([id_key(name) for name in self.table["id"].to_pylist()], dtype=np.int64)
        batch = RoleScores(np.empty((keys.size, 1)), None, keys, versions=self.part(selection.detectors))

        def run_folds(folds: Iterable[tuple[int, Fold]]) -> dict[int, Any]:
            return {index: fold.of_shard(batch) for index, fold in folds}

        (answer,) = run_queries([answer_versions(selection, self.config.seed, quarantined)], run_folds)
        return Verdict(answer, *answer.judge(batch), np.empty(0, dtype=bool))

    def roots(self) -> dict[bytes, int]:
        """The roots of documents with salts, and the number of documents for each."""
        read = self.table.select(["id", "commitments", "proof"])
        read = read.append_column("published", pc.struct_field(self.table[VERSIONS], "published"))
        read = read.filter(pc.and_(read["commitments"].is_valid(), read["proof"].is_valid()))
        leaves = list(map(leaf_digest, *(read[name].to_pylist() for name in ("id", "published", "commitments"))))
        flat = pc.list_flatten(read["proof"].combine_chunks())
        steps = bytes(flat.buffers()[1] or b"")[STEP * flat.offset :]
        ends = (STEP * pc.list_value_length(read["proof"]).to_numpy().cumsum()).tolist()
        proofs = (steps[start:end] for start, end in pairwise([0, *ends]))
        return Counter(compute_roots(leaves, proofs))

    def changed_texts(self) -> Iterator[str]:
        """Ids of documents whose texts, where the bundle has them, do not match the digests and commitments."""
        digests = pc.struct_field(self.table[VERSIONS].combine_chunks(), "digests").to_pylist()
        columns = (self.table[name].to_pylist() for name in ("id", "texts", "salt", "commitments"))
        for digest, name, texts, salt, commitments in zip(digests, *columns, strict=True):
            same = texts is not None and digest == text_digests(texts)
            if same and commitments is not None:
                same = salt is not None and commitments == b"".join(version_digest(salt, text) for text in texts)
            if not same:
                yield name


def _draws(table: pa.Table, config: AuditConfig) -> VersionDraws:
    """The draws of documents, from a table with doc_id, versions and features.

    Raises:
        RefutedError: features that no document can have.
    """
    versions = config.corpus.versions
    assert versions is not None
    if table[FEATURES].null_count and (versions.template or versions.window):
        raise RefutedError("a document without features has orders that seenset mark did not draw")
    try:
        return version_draws(DrawTable.joined([draw_table(table)]), versions, config.near_copies)
    except (ValueError, IndexError, OverflowError, pa.ArrowException):
        raise RefutedError("features of a document are not those of its versions") from None


def parse_commitment(data: bytes, name: str) -> Mapping[str, Any]:
    """Parse a `commitment.json`.

    Raises:
        UserError: not such a file.
    """
    try:
        value = json.loads(data)
        if isinstance(value["root"], str) and isinstance(value["documents"], int):
            return dict(value)
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise UserError(f"{name} is not a commitment.json of seenset mark")


def _private_documents(path: str) -> list[CommittedDocument] | None:
    """The documents of a file of `seenset mark`; None for other files."""
    with fsspec.open(path, "rb") as file:
        try:
            parquet = pq.ParquetFile(file)
        except pa.ArrowInvalid:
            return None
        types = {field.name: field.type for field in parquet.schema_arrow}
        return list(read_committed(parquet)) if _PRIVATE.items() <= types.items() else None


def summary_member(selection: str) -> str:
    """Name of the summary of a selection."""
    return f"answers/{selection}.json"


def verdicts_member(selection: str) -> str:
    """Name of the answer of a selection for each document."""
    return f"answers/{selection}.parquet"


def member_names(index: BundleIndex, verdict: bool) -> list[str]:
    """The members after `bundle.json`, in order."""
    answers = [name(one.name) for one in index.selections for name in (summary_member, verdicts_member)]
    return [MANIFEST_FILE, DOCUMENTS, *answers, *([VERDICT_FILE] if verdict else [])]


def score_column(detector: str) -> str:
    """Column with the scores of a detector."""
    return f"score:{detector}"


def bundled_schema(
    selections: Sequence[SelectionConfig],
    columns: Sequence[str],
    texts: bool,
    versions: bool = False,
) -> pa.Schema:
    """Columns of `documents.parquet`.

    Args:
        selections: selections whose answers the bundle includes.
        columns: score columns of the verdict; empty without one.
        texts: whether it includes texts.
        versions: whether documents have versions.
    """
    if versions:
        return pa.schema([*_ALWAYS, *FIELDS, DRAWN, *([TEXTS] if texts else [])])
    scores = sorted({*columns, *(column for one in selections for column in one.detectors)})
    fields = [
        *(_ALWAYS.field(name) for name in _ALWAYS.names),
        *_RELATED,
        *([pa.field("block", pa.int64())] if columns else []),
        *(pa.field(score_column(name), pa.float64()) for name in scores),
        *([pa.field("text", pa.string())] if texts else []),
    ]
    return pa.schema(fields)


def check_values(table: pa.Table) -> None:
    """Check the values of `documents.parquet`; its columns have been checked.

    Raises:
        RefutedError: a document without role, id or score, or a value outside its range.
    """
    scored, role = pc.is_null(table["reason"]), table["role"].cast(pa.string())
    conditions = {
        "role": pc.is_in(role, value_set=pa.array(ROLES)),
        "id": pc.is_valid(table["id"]),
        "reason": pc.or_(scored, pc.equal(role, "audit")),
        "calibrates": pc.is_valid(table["calibrates"]),
    }
    for name in table.column_names:
        if name.startswith("score:"):
            conditions[name] = pc.equal(pc.fill_null(pc.is_finite(table[name]), False), scored)
        elif name == VERSIONS:
            conditions[name] = pc.equal(pc.is_valid(table[name]), scored)
        elif name == "block":
            inside = pc.and_(pc.greater_equal(table[name], 0), pc.less(table[name], len(table)))
            conditions[name] = pc.fill_null(inside, True)
        elif name == "family":
            inside = pc.and_(pc.greater_equal(table[name], NONE), pc.less(table[name], len(table)))
            conditions[name] = pc.and_(pc.fill_null(inside, True), pc.or_(scored, pc.is_null(table[name])))
    for name, holds in conditions.items():
        if not pc.all(holds, min_count=0).as_py():
            raise RefutedError(f"{DOCUMENTS}: column {name} has an invalid value")
