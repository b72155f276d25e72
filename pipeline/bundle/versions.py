"""Documents with versions in a bundle: scores of every version, and the way from each document to the commitment."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.audit.judge import version_part
from pipeline.bundle.container import RefutedError
from pipeline.config.audit import AuditConfig
from pipeline.config.selection import SelectionConfig
from pipeline.corpus.documents import id_key
from pipeline.corpus.shard import Shard
from pipeline.detectors.registry import parse_detectors
from pipeline.errors import UserError
from pipeline.mark.commitment import (
    STEP,
    CommittedDocument,
    Proof,
    leaf_digest,
    merkle_proofs,
    read_committed,
    roots_of,
    text_digests,
    version_digest,
)
from pipeline.mark.mark import SCHEMA
from pipeline.selection.engine import Verdict
from pipeline.selection.passes import Ask, Batch, together
from pipeline.selection.procedures.versions import answer_versions
from pipeline.selection.versions import VersionPart
from pipeline.stages.events import VERSIONS, VERSIONS_TYPE

TEXTS = pa.field("texts", pa.list_(pa.string()))  # of all versions, in their order
FIELDS = (
    pa.field(VERSIONS, VERSIONS_TYPE),
    pa.field("salt", pa.binary(32)),
    pa.field("commitments", pa.binary()),  # d_i of each version, side by side
    pa.field("proof", pa.list_(pa.binary(33))),  # a byte that is 1 where the node stands left, and the node
)
"""Columns of `documents.parquet` where documents have versions; null without scores, the last three also without salts.
"""

_PRIVATE = {name: SCHEMA.field(name).type for name in ("id", "versions", "index", "salt")}


@dataclass(frozen=True, slots=True)
class Committed:
    """Documents of one private file of `seenset mark`, by row."""

    documents: list[CommittedDocument]
    proofs: list[Proof]

    @classmethod
    def of(cls, shard: Shard) -> Committed | None:
        """Read the file of a shard; None where it is not one that `seenset mark` wrote, or ids are of another column.

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
            table: of the documents, with doc_id, row and `VERSIONS`.
            name: of the file, for messages.

        Raises:
            UserError: the file does not hold the versions that were scored.
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
    """The audited documents of a bundle that have scores of all their versions."""

    table: pa.Table  # of `documents.parquet`
    config: AuditConfig
    parts: dict[tuple[str, ...], VersionPart] = field(default_factory=dict)  # of detectors that were read before

    @classmethod
    def of(cls, documents: pa.Table, config: AuditConfig) -> BundledVersions:
        """Check that what stands side by side has the lengths that belong together.

        Raises:
            RefutedError: a document without versions, or one with a value of another length.
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
        return cls(scored, config)

    def part(self, columns: list[str]) -> VersionPart:
        """The scores of all versions by these detectors, as `version_part` reads them of a run."""
        renamed = self.table.select(["id", VERSIONS]).rename_columns(["doc_id", VERSIONS])
        if tuple(columns) not in self.parts:
            first = next(iter(self.parts.values()), None)
            self.parts[tuple(columns)] = replace(version_part(renamed, self.config, columns), like=first)
        return self.parts[tuple(columns)]

    def answer(self, selection: SelectionConfig, quarantined: int) -> Verdict:
        """Answer a selection of the run. Raises UserError as `answer_versions`."""
        keys = np.array([id_key(name) for name in self.table["id"].to_pylist()], dtype=np.int64)
        batch = Batch(np.empty((keys.size, 1)), None, keys, versions=self.part(selection.detectors))

        def run_pass(asks: Iterable[tuple[int, Ask]]) -> dict[int, Any]:
            return {index: ask.of_shard(batch) for index, ask in asks}

        (answer,) = together([answer_versions(selection, self.config.seed, quarantined)], run_pass)
        return Verdict(answer, *answer.judge(batch))

    def roots(self) -> dict[bytes, int]:
        """Roots to which documents with salts lead, and the number of documents that lead to each."""
        read = self.table.select(["id", "commitments", "proof"])
        read = read.append_column("published", pc.struct_field(self.table[VERSIONS], "published"))
        read = read.filter(pc.and_(read["commitments"].is_valid(), read["proof"].is_valid()))
        leaves = list(map(leaf_digest, *(read[name].to_pylist() for name in ("id", "published", "commitments"))))
        flat = pc.list_flatten(read["proof"].combine_chunks())
        steps = bytes(flat.buffers()[1] or b"")[STEP * flat.offset :]
        ends = (STEP * pc.list_value_length(read["proof"]).to_numpy().cumsum()).tolist()
        proofs = (steps[start:end] for start, end in pairwise([0, *ends]))
        return Counter(roots_of(leaves, proofs))

    def changed_texts(self) -> Iterator[str]:
        """Ids of documents whose texts, where the bundle has them, are not those of the digests and commitments."""
        digests = pc.struct_field(self.table[VERSIONS].combine_chunks(), "digests").to_pylist()
        columns = (self.table[name].to_pylist() for name in ("id", "texts", "salt", "commitments"))
        for digest, name, texts, salt, commitments in zip(digests, *columns, strict=True):
            same = texts is not None and digest == text_digests(texts)
            if same and commitments is not None:
                same = salt is not None and commitments == b"".join(version_digest(salt, text) for text in texts)
            if not same:
                yield name


def commitment_of(data: bytes, name: str) -> Mapping[str, Any]:
    """The values of a `commitment.json`.

    Raises:
        UserError: no such file.
    """
    try:
        value = json.loads(data)
        if isinstance(value["root"], str) and isinstance(value["documents"], int):
            return dict(value)
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise UserError(f"{name} is no commitment.json of seenset mark")


def _private_documents(path: str) -> list[CommittedDocument] | None:
    """The documents of a file that `seenset mark` wrote; None of any other file."""
    with fsspec.open(path, "rb") as file:
        try:
            parquet = pq.ParquetFile(file)
        except pa.ArrowInvalid:
            return None
        types = {field.name: field.type for field in parquet.schema_arrow}
        return list(read_committed(parquet)) if _PRIVATE.items() <= types.items() else None
