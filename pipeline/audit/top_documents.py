"""The top selected documents of a run's selections: what made their scores, and thumbnails of pictures, are written.

`pipeline.audit.evidence` says what that is. Nothing here may end a run.
"""

from __future__ import annotations

import hashlib
import io
import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.audit.dependence import copies_file
from pipeline.audit.digests import read_digests, read_listed
from pipeline.audit.evidence import (
    EVIDENCE_SCHEMA,
    PLAIN,
    STANDARDISED,
    THUMBNAIL_SCHEMA,
    Kind,
    evidence_file,
    thumbnails_file,
)
from pipeline.audit.scored import Overlap, Scored
from pipeline.config.audit import AuditConfig
from pipeline.config.corpus import Role
from pipeline.config.models import ModelConfig
from pipeline.config.selection import HISTORY, NULL_ROLE, SelectionConfig
from pipeline.corpus.documents import read_shard
from pipeline.corpus.pictures import open_picture, picture_key
from pipeline.corpus.shard import Shard
from pipeline.detectors.base import FORWARD
from pipeline.detectors.registry import parse_detectors
from pipeline.errors import BusyError, UserError
from pipeline.report.wording.files import no_top_documents, top_documents
from pipeline.selection.calibrations import calibration_of
from pipeline.selection.passes import Answer, Batch
from pipeline.stages.events import STATISTICS, TOKEN_SCHEMA, ScoredText, ScoredTexts, TokenSettings
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt

if TYPE_CHECKING:
    from PIL.Image import Image

Reread = Callable[[Sequence[Shard], TokenSettings], pa.Table | None]
"""Reads documents of shards once more: a table of `TOKEN_SCHEMA`; None where that failed as a whole."""

_DECIDING = ("model", "tokenizer", "dtype", "quantization", "device", "text_transform", "max_tokens", "code")
"""Of a score's fingerprint: what the tokens of a document and their numbers depend on."""

_MADE_BY = b"seenset_made_by"

MOST_THUMBNAILS = 500
"""Thumbnails of a selection, at most."""

SIDE = 96
"""Pixels of a thumbnail's longer side."""


@dataclass(frozen=True, slots=True, eq=False)
class TopDocuments:
    """The top selected documents of a selection, and how it came to them."""

    name: str  # of the selection
    rows: pa.Table  # the first of `selected.parquet`
    detectors: tuple[str, ...]
    weights: tuple[float, ...]  # of the detectors; empty where they have none
    null_role: Role
    ranking: Ranking
    pairs: Mapping[str, list[str]]  # id -> calibration documents that are known near copies of it

    @property
    def places(self) -> list[Place]:
        """Input and row of each document."""
        return list(zip(self.rows["source"].to_pylist(), self.rows["row"].to_pylist(), strict=True))


def top_documents_of(selection: SelectionConfig, answer: Answer, rows: pa.Table, overlap: Overlap) -> TopDocuments:
    """The top selected documents of a selection, and how it came to them.

    Args:
        selection: its configuration.
        answer: to it.
        rows: the first of `selected.parquet`, in its order.
        overlap: of the role that calibrates.
    """
    weights = tuple(answer.weights or ())
    calibrating = overlap.keep.copy()
    if answer.fused is not None:
        calibrating[calibrating] = answer.fused.calibrating
    fused = None if answer.fused is None else answer.fused.of
    name, score = ranking_of(selection.detectors, weights, selection.procedure, fused)
    pairs: dict[str, list[str]] = {}
    for pair in overlap.diagnostic.pairs:
        pairs.setdefault(pair.audit, []).append(pair.calibration)
    return TopDocuments(
        selection.name,
        rows,
        tuple(selection.detectors),
        weights,
        NULL_ROLE[selection.direction],
        Ranking(name, score, calibrating, calibration_of(selection.calibration).grouped),
        pairs,
    )


def ranking_of(
    detectors: Sequence[str], weights: Sequence[float], procedure: str, fused: Callable[[Batch], np.ndarray] | None
) -> tuple[str, Callable[[Batch], np.ndarray]]:
    """By what a selection ranks documents: its name, and the score of a batch.

    Args:
        detectors: of the selection.
        weights: of the detectors; empty where they have none.
        procedure: of the selection.
        fused: the one score of all detectors, if there is one.
    """
    weighty = [column for column, weight in enumerate(weights) if weight]
    if fused is None or len(weighty) == 1:  # a single one decides alone
        column = weighty[0] if fused is not None else 0
        return detectors[column], lambda batch: batch.matrix[:, column]
    return procedure, fused


def weighed_tokens(config: AuditConfig, detectors: Sequence[str], weights: Sequence[float]) -> tuple[str, Kind]:
    """Whose numbers of tokens are shown of a selection, and of which kind.

    Those of its detector of the largest weight, or else the first, that reads token log-probabilities of the target;
    where none does, plain ones, which are those of `loss`.

    Args:
        config: of the audit.
        detectors: of the selection.
        weights: of the detectors; empty where they have none.
    """
    reads = {one.column: one.needs.get(FORWARD, frozenset()) for one in parse_detectors(config.detectors)}
    order = sorted(range(len(detectors)), key=lambda index: -weights[index] if weights else 0)
    for column in (detectors[index] for index in order):
        if reads[column] >= STATISTICS:
            return column, STANDARDISED
        if "log_prob" in reads[column]:
            return column, PLAIN
    return "loss", PLAIN


def kept_tokens(scored: Scored) -> pa.Table:
    """The tokens of documents that an earlier answer of this run read, of the same model: no document twice.

    Returns:
        Of `TOKEN_SCHEMA`.
    """
    store, tables, seen = scored.store, [TOKEN_SCHEMA.empty_table()], set[Place]()
    wanted = _maker(scored)
    for selection in store.names("selection"):
        try:
            digests = None if selection == HISTORY else read_digests(store, selection)
            if digests is None or evidence_file(selection) not in digests.files:
                continue
            table = read_listed(store, digests, evidence_file(selection))
            if (table.schema.metadata or {}).get(_MADE_BY) != wanted:
                continue
            table = table.select(TOKEN_SCHEMA.names).cast(TOKEN_SCHEMA)
        except (UserError, OSError, ValueError, LookupError):  # as `read_evidence`
            continue
        places = list(zip(table["source"].to_pylist(), table["row"].to_pylist(), strict=True))
        tables.append(table.filter(pa.array([place not in seen for place in places], pa.bool_())))
        seen.update(places)
    return pa.concat_tables(tables)


def _maker(scored: Scored) -> bytes:
    """A digest of what the tokens of this run's documents depend on."""
    fingerprint = scored.receipts[0].fingerprint
    parts = {key: fingerprint.get(key) for key in _DECIDING}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest().encode()


def write_evidence(
    scored: Scored,
    config: AuditConfig,
    tops: Sequence[TopDocuments],
    kept: pa.Table,
    reread: Reread | None,
    say: Callable[[str], None],
) -> dict[str, dict[str, str]]:
    """Write the evidence of all selections of a run, one file each; what goes wrong with it ends no run.

    Args:
        scored: the score shards.
        config: of the audit, whose target model is at hand.
        tops: of each selection.
        kept: what earlier answers read, from `kept_tokens`.
        reread: reads the documents that are not among these; None: they have no evidence.
        say: prints a line.

    Returns:
        By selection, the SHA-256 of its file, by name; nothing of a selection that has none.

    Raises:
        BusyError: another driver has taken the run.
    """
    written: dict[str, dict[str, str]] = {}
    places = {place for one in tops for place in one.places}
    if not places:
        return written
    try:
        texts = _scored_texts(scored, places)
        tokens = _all_tokens(scored, config, texts, kept, reread)
        copies = families_of(scored.store, places)
        neighbours = _neighbours(scored, tops, texts)
        index = {place: number for number, place in enumerate(_places(tokens))}
        for one, near in zip(tops, neighbours, strict=True):
            table = _table(one, weighed_tokens(config, one.detectors, one.weights), near, copies, tokens, index)
            if len(table):
                written[one.name] = _write(scored, one.name, table)
        if reread is not None:
            say(top_documents(len(index.keys() & places), len(places)))
    except BusyError:
        raise
    except Exception as error:  # the answers stand without it
        say(no_top_documents(error))
    return written


@dataclass(frozen=True, slots=True)
class _Text:
    """Where a document stands among the scores."""

    shard: Shard
    scored: ScoredText
    group: str | None


def _scored_texts(scored: Scored, places: Iterable[Place]) -> dict[Place, _Text]:
    """What is known of documents, from the few score shards that hold them."""
    receipts = {receipt.shard: receipt for receipt in scored.of("audit")}
    shards: dict[str, list[Shard]] = {}
    for shard_id in receipts:
        shard = scored.shards[shard_id]
        shards.setdefault(shard.name, []).append(shard)
    for some in shards.values():
        some.sort(key=lambda shard: shard.first_row)
    rows: dict[str, set[int]] = {}
    for source, row in places:
        place = bisect_right(shards[source], row, key=lambda shard: shard.first_row) - 1
        rows.setdefault(shards[source][place].id, set()).add(row)
    texts: dict[Place, _Text] = {}
    for shard_id in sorted(rows):
        shard = scored.shards[shard_id]
        table = scored.table(receipts[shard_id], ["row", "text_key", "n_tokens", "group"])
        table = table.filter(pa.array(np.isin(table["row"].to_numpy(), list(rows[shard_id]))))
        for one in table.to_pylist():
            text = ScoredText(one["row"], one["text_key"], one["n_tokens"])
            texts[shard.name, one["row"]] = _Text(shard, text, one["group"])
    return texts


def _places(tokens: pa.Table) -> Iterable[Place]:
    return zip(tokens["source"].to_pylist(), tokens["row"].to_pylist(), strict=True)


def _all_tokens(
    scored: Scored, config: AuditConfig, texts: Mapping[Place, _Text], kept: pa.Table, reread: Reread | None
) -> pa.Table:
    """The tokens of documents: kept ones of the same text, and those that are read now."""
    keys = zip(_places(kept), kept["text_key"].to_pylist(), strict=True)
    same = [place in texts and texts[place].scored.key == key for place, key in keys]
    kept = kept.filter(pa.array(same, pa.bool_()))
    known = set(_places(kept))
    by_shard: dict[str, tuple[Shard, list[ScoredText]]] = {}
    for place in sorted(texts.keys() - known):
        text = texts[place]
        by_shard.setdefault(text.shard.id, (text.shard, []))[1].append(text.scored)
    if reread is None or not by_shard or not isinstance(config.model, ModelConfig):
        return kept
    wanted = ScoredTexts({shard.id: some for shard, some in by_shard.values()})
    settings = TokenSettings(wanted, config.model, str(scored.receipts[0].fingerprint["device"]))
    read = reread([shard for shard, _ in by_shard.values()], settings)
    return kept if read is None else pa.concat_tables([kept, read])


def _neighbours(scored: Scored, tops: Sequence[TopDocuments], texts: Mapping[Place, _Text]) -> list[Neighbours]:
    """Of each selection, the neighbours of its documents; every calibration shard is read once."""
    folds = [_fold(one, texts) for one in tops]
    for role in dict.fromkeys(one.null_role for one in tops):
        of_role = [(one, fold) for one, fold in zip(tops, folds, strict=True) if one.null_role == role]
        columns = sorted({column for one, _ in of_role for column in one.detectors})
        start = 0
        for receipt in scored.of(role):
            table = scored.table(receipt, ["doc_id", "group", "id_key", *columns])
            for one, fold in of_role:
                calibrating = np.flatnonzero(one.ranking.calibrating[start : start + len(table)])
                _add(one, fold, table.take(pa.array(calibrating)), receipt)
            start += len(table)
    return folds


def _fold(one: TopDocuments, texts: Mapping[Place, _Text]) -> Neighbours:
    groups = [texts[place].group for place in one.places] if one.ranking.grouped else None
    matrix = _matrix(one.rows, one.detectors)
    scores = one.ranking.of(Batch(matrix, None, np.zeros(len(matrix), dtype=np.int64)))
    return Neighbours.of(scores, None if groups is None else np.array(groups, dtype=object))


def _matrix(table: pa.Table, detectors: Sequence[str]) -> np.ndarray:
    return np.stack([table[name].to_numpy() for name in detectors], axis=1)


def _add(one: TopDocuments, fold: Neighbours, known: pa.Table, receipt: Receipt) -> None:
    """Take in the documents of a shard that calibrate."""
    scores = one.ranking.of(Batch(_matrix(known, one.detectors), None, known["id_key"].to_numpy()))
    groups = groups_of(known) if one.ranking.grouped else None
    fold.add(scores, groups, lambda places: known["doc_id"].take(pa.array(places)).to_pylist())


def _table(
    one: TopDocuments,
    shown: tuple[str, Kind],
    near: Neighbours,
    copies: Mapping[Place, list[str]],
    tokens: pa.Table,
    index: Mapping[Place, int],
) -> pa.Table:
    """The evidence of a selection: of its documents whose tokens are known, in their order."""
    detector, kind = shown
    neighbours = near.pairs()
    ids, places = one.rows["doc_id"].to_pylist(), one.places
    here = [number for number, place in enumerate(places) if place in index]
    table = tokens.take(pa.array([index[places[number]] for number in here], pa.int64()))
    columns: dict[str, list[Any]] = {
        "doc_id": [ids[number] for number in here],
        "kind": [kind] * len(here),
        "detector": [detector] * len(here),
        "ranked_by": [one.ranking.name] * len(here),
        "score": [float(near.scores[number]) for number in here],
        "neighbours": [[{"doc_id": name, "score": score} for name, score in neighbours[number]] for number in here],
        "near_copies": [[*one.pairs.get(ids[number], []), *copies.get(places[number], [])][:NAMED] for number in here],
    }
    parts = {name: table[name] if name in TOKEN_SCHEMA.names else columns[name] for name in EVIDENCE_SCHEMA.names}
    return pa.table(parts, schema=EVIDENCE_SCHEMA).combine_chunks()


def _write(scored: Scored, selection: str, table: pa.Table) -> dict[str, str]:
    name = evidence_file(selection)
    return {name: scored.store.write_table(name, table.replace_schema_metadata({_MADE_BY: _maker(scored)}))}


NEIGHBOURS = 5


@dataclass(slots=True, eq=False)
class Neighbours:
    """For each of some documents, the calibration documents of those seen so far that are nearest to it by score.

    Of several at one distance the first in the order of the shards count.
    """

    scores: np.ndarray  # float64, (documents,)
    groups: np.ndarray | None  # object, (documents,), where documents are ranked in their group alone
    distance: np.ndarray  # float64, (documents, NEIGHBOURS), ascending, inf where there is none
    nearest: np.ndarray  # float64, as `distance`: their scores
    ids: np.ndarray  # object, as `distance`

    @classmethod
    def of(cls, scores: np.ndarray, groups: np.ndarray | None) -> Neighbours:
        """No neighbour yet."""
        shape = len(scores), NEIGHBOURS
        return cls(scores, groups, np.full(shape, np.inf), np.zeros(shape), np.full(shape, None, dtype=object))

    def add(self, scores: np.ndarray, groups: np.ndarray | None, ids: Callable[[np.ndarray], list[str]]) -> None:
        """Take in calibration documents.

        Args:
            scores: float64, (others,).
            groups: object, (others,), where these have groups.
            ids: of documents by their places, ascending.
        """
        if self.groups is None or groups is None:
            self._add(np.arange(len(self.scores)), np.arange(len(scores)), scores, ids)
            return
        for group in dict.fromkeys(self.groups.tolist()):
            self._add(np.flatnonzero(self.groups == group), np.flatnonzero(groups == group), scores, ids)

    def _add(
        self, here: np.ndarray, there: np.ndarray, scores: np.ndarray, ids: Callable[[np.ndarray], list[str]]
    ) -> None:
        """Take in calibration documents, by their places, as neighbours of some documents, by theirs."""
        if not here.size or not there.size:
            return
        there = there[np.argsort(scores[there], kind="stable")]
        ordered, wanted = scores[there], self.scores[here]
        window = np.searchsorted(ordered, wanted)[:, None] + np.arange(-NEIGHBOURS, NEIGHBOURS)
        inside = (window >= 0) & (window < there.size)
        window = window.clip(0, there.size - 1)
        distance = np.where(inside, np.abs(ordered[window] - wanted[:, None]), np.inf)
        every = np.concatenate([self.distance[here], distance], axis=1)
        best = np.argsort(every, axis=1, kind="stable")[:, :NEIGHBOURS]
        fresh = best >= NEIGHBOURS
        places = np.take_along_axis(there[window], np.where(fresh, best - NEIGHBOURS, 0), axis=1)
        fresh &= np.isfinite(np.take_along_axis(every, best, axis=1))
        kept = np.where(best < NEIGHBOURS, best, 0)
        names = np.take_along_axis(self.ids[here], kept, axis=1)
        chosen = np.unique(places[fresh])
        if chosen.size:
            new = np.array(ids(chosen), dtype=object)
            names[fresh] = new[np.searchsorted(chosen, places[fresh])]
        self.ids[here] = names
        self.nearest[here] = np.where(fresh, scores[places], np.take_along_axis(self.nearest[here], kept, axis=1))
        self.distance[here] = np.take_along_axis(every, best, axis=1)

    def pairs(self) -> list[list[tuple[str, float]]]:
        """Of each document (id, score) of its neighbours, the nearest first."""
        return [
            [(name, float(score)) for name, score in zip(names, scores, strict=True) if name is not None]
            for names, scores in zip(self.ids.tolist(), self.nearest.tolist(), strict=True)
        ]


@dataclass(frozen=True, slots=True, eq=False)
class Ranking:
    """By which score a selection ranks documents, and among which calibration documents."""

    name: str  # a detector; a procedure where it fuses several
    of: Callable[[Batch], np.ndarray]  # float64, (documents,)
    calibrating: np.ndarray  # bool, of all documents of the null role that are scored, in the order of the shards
    grouped: bool  # whether only documents of a document's group count


def groups_of(table: pa.Table) -> np.ndarray:
    """The groups of documents: object, (documents,)."""
    return np.array(table["group"].to_pylist(), dtype=object)


NAMED = 10
"""Near copies of a document that are named, at most."""

Place = tuple[str, int]
"""Of an audited document: its input and the number of its row there."""


def families_of(store: Store, places: Collection[Place]) -> dict[Place, list[str]]:
    """The first other audited documents of the family of each document, by id; none where it has no near copy.

    A family is of near copies, and of near copies of these. Memory holds a batch of the list.

    Args:
        store: the run directory, in which the near copies are listed.
        places: of the documents.
    """
    name = copies_file("audit")
    if not places or not store.exists(name):
        return {}
    rows = np.unique([row for _, row in places])
    family: dict[Place, int] = {}
    for batch in _batches(store, name):
        near = batch.filter(pa.array(np.isin(batch["row"].to_numpy(), rows)))
        for source, row, number in _tuples(near, ["source", "row", "family"]):
            if (source, row) in places:
                family[source, row] = number
    wanted = np.unique(list(family.values())).astype(np.int64)
    members: dict[int, list[tuple[Place, str]]] = {int(number): [] for number in wanted}
    for batch in _batches(store, name) if members else ():
        of_these = batch.filter(pa.array(np.isin(batch["family"].to_numpy(), wanted)))
        for doc_id, source, row, number in _tuples(of_these, ["doc_id", "source", "row", "family"]):
            if len(members[number]) <= NAMED:
                members[number].append(((source, row), doc_id))
    return {
        place: [doc_id for other, doc_id in members[number] if other != place][:NAMED]
        for place, number in family.items()
    }


def _batches(store: Store, name: str) -> Iterator[pa.Table]:
    with store.fs.open(store.path(name), "rb") as file:
        for batch in pq.ParquetFile(file).iter_batches():
            yield pa.Table.from_batches([batch])


def _tuples(table: pa.Table, columns: Sequence[str]) -> Iterator[tuple]:
    return zip(*(table[column].to_pylist() for column in columns), strict=True)


def thumbnail_of(picture: Image) -> bytes:
    """A picture, RGB, as a small JPEG file of its pixels alone: nothing that stood in its own file is in it."""
    from PIL import Image

    small = Image.frombytes("RGB", picture.size, picture.tobytes())
    small.thumbnail((SIDE, SIDE))
    file = io.BytesIO()
    small.save(file, "JPEG", quality=75)
    return file.getvalue()


def write_thumbnails(scored: Scored, selected: Mapping[str, pa.Table]) -> dict[str, dict[str, str]]:
    """Write the thumbnails of selected pictures that are still those that were scored.

    Args:
        scored: the score shards.
        selected: by name of the selection its top documents, with columns source and row.

    Returns:
        By selection, the SHA-256 of its file of thumbnails, by name; nothing where it has none.
    """
    written: dict[str, dict[str, str]] = {name: {} for name in selected}
    for name, rows in selected.items():
        if len(rows):
            file = thumbnails_file(name)
            written[name][file] = scored.store.write_table(file, _thumbnails_of(scored, rows))
    return written


def _thumbnails_of(scored: Scored, selected: pa.Table) -> pa.Table:
    wanted: defaultdict[str, set[int]] = defaultdict(set)
    for source, row in zip(selected["source"].to_pylist(), selected["row"].to_pylist(), strict=True):
        wanted[source].add(row)
    rows = []
    for receipt in scored.of("audit"):
        shard = scored.shards[receipt.shard]
        if shard.name not in wanted:
            continue
        table = scored.table(receipt, ["row", "text_key"])
        pairs = zip(table["row"].to_pylist(), table["text_key"].to_pylist(), strict=True)
        keys = {row: key for row, key in pairs if row in wanted[shard.name]}
        try:
            for document in read_shard(shard) if keys else ():
                if document.row in keys and document.picture is not None:
                    picture = open_picture(document.picture)
                    if picture_key(picture) == keys[document.row]:
                        row = {"source": shard.name, "row": document.row, "thumbnail": thumbnail_of(picture)}
                        rows.append(row)
        except (UserError, ValueError, LookupError, OSError):  # gone, or another file: an answer needs no picture
            continue
    return pa.Table.from_pylist(rows, schema=THUMBNAIL_SCHEMA)
