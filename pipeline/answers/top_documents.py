"""The top selected documents of a run's selections: write their token attributions, and thumbnails of pictures.

Attributions show the input of a detector and prove nothing: a document may be selected wrongly, with tokens that look
like any other's. No answer depends on them, and an error here does not end a run.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa

from pipeline.checks.check import Overlap
from pipeline.checks.dependent_documents import near_duplicates_file
from pipeline.config.audit import AuditConfig
from pipeline.config.corpus import ChatConfig
from pipeline.config.models import ModelConfig
from pipeline.config.selection import HISTORY, SelectionConfig
from pipeline.corpus.documents import read_shard
from pipeline.corpus.picture_files import open_picture, picture_key
from pipeline.corpus.shard import Shard
from pipeline.detectors.base import FORWARD
from pipeline.detectors.registry import parse_detectors
from pipeline.errors import BusyError, UserError
from pipeline.models.load import count_positions
from pipeline.run.digests import read_digests, read_listed
from pipeline.run.remedies import no_top_documents, top_documents
from pipeline.run.scored import Scored
from pipeline.selection.folds import Answer, RoleScores
from pipeline.stages.events import STATISTICS, TOKEN_SCHEMA, ScoredChats, ScoredText, ScoredTexts, TokenSettings
from pipeline.store.files import Store
from pipeline.store.receipts import json_digest

if TYPE_CHECKING:
    from PIL.Image import Image

Kind = Literal["log-probability", "standardised log-probability"]
PLAIN: Kind = "log-probability"
STANDARDISED: Kind = "standardised log-probability"
_SCHEMA = pa.schema(
    [
        ("doc_id", pa.string()),
        *TOKEN_SCHEMA,
        ("kind", pa.string()),
        ("detector", pa.string()),
        ("ranked_by", pa.string()),
        ("score", pa.float64()),
        ("near_copies", pa.list_(pa.string())),
    ]
)

THUMBNAIL_SCHEMA = pa.schema([("source", pa.string()), ("row", pa.int64()), ("thumbnail", pa.binary())])

Reread = Callable[[Sequence[Shard], TokenSettings], pa.Table | None]
"""Reads documents of shards again: a table of `TOKEN_SCHEMA`; None where that failed as a whole."""

_DECIDING = ("model", "tokenizer", "dtype", "quantization", "device", "text_transform", "max_tokens", "code")
"""Fingerprint fields of a score that a document's tokens and their values depend on."""

_MADE_BY = b"seenset_made_by"

MOST_THUMBNAILS = 500
"""Maximum number of thumbnails of a selection."""

SIDE = 96
"""Longer side of a thumbnail, in pixels."""


@dataclass(frozen=True, slots=True)
class TokenAttributions:
    """The score of one selected document by token: the input of its detector, which is no proof."""

    text: str  # the model's input (cut at max_tokens, or in windows); of a chat its last question and answer
    pieces: list[str]  # the text cut into its tokens: "".join(pieces) == text
    values: list[float | None]  # one per piece: None where the model gives none (the first token)
    kind: str  # "log-probability" or "standardised log-probability"
    detector: str  # the detector that the values belong to
    near_copies: list[str]  # ids of its known near-duplicates, direct or through other documents
    ranked_by: str = ""  # detector, or fusing procedure, that ranks the selection
    score: float | None = None  # score of the document by `ranked_by`


def attributions_file(selection: str) -> str:
    """Path of the token attributions of a selection in a run directory."""
    return f"selection/{selection}/evidence.parquet"


def read_attributions(store: Store, selection: str) -> dict[str, TokenAttributions]:
    """Token attributions of the top documents of a selection, by id, in the order of the list; {} where there are none.

    A file that cannot be read counts as missing, so that a report does not fail because of it.
    """
    try:
        if not store.exists(attributions_file(selection)):
            return {}
        rows = store.read_table(attributions_file(selection), _SCHEMA.names).cast(_SCHEMA).to_pylist()
    except (UserError, OSError, ValueError, LookupError):  # another version, or damaged
        return {}
    return {row["doc_id"]: _attributions(row) for row in rows}


def _attributions(row: Mapping[str, Any]) -> TokenAttributions:
    return TokenAttributions(
        text="".join(row["pieces"]),
        pieces=row["pieces"],
        values=row["standardised" if row["kind"] == STANDARDISED else "log_prob"],
        kind=row["kind"],
        detector=row["detector"],
        near_copies=row["near_copies"],
        ranked_by=row["ranked_by"],
        score=row["score"],
    )


def thumbnails_file(selection: str) -> str:
    """Path of the thumbnails of a selection in a run directory."""
    return f"selection/{selection}/thumbnails.parquet"


def read_thumbnails(store: Store, selection: str) -> dict[tuple[str, int], bytes]:
    """The thumbnails of a selection, as JPEG files, by input and row; empty where the documents are texts."""
    name = thumbnails_file(selection)
    if not store.exists(name):
        return {}
    table = store.read_table(name)
    places = zip(table["source"].to_pylist(), table["row"].to_pylist(), strict=True)
    return dict(zip(places, table["thumbnail"].to_pylist(), strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class TopDocuments:
    """The top selected documents of a selection, and how they were ranked."""

    name: str  # name of the selection
    rows: pa.Table  # first rows of `selected.parquet`
    detectors: tuple[str, ...]
    weights: tuple[float, ...]  # weights of the detectors; empty where there are none
    ranked_by: str  # detector, or procedure that fuses several
    score: Callable[[RoleScores], np.ndarray]  # float64, (documents,), the ranking score
    pairs: Mapping[str, list[str]]  # id -> calibration documents that are known near-duplicates of it

    @property
    def places(self) -> list[Place]:
        """Input and row of each document."""
        return list(zip(self.rows["source"].to_pylist(), self.rows["row"].to_pylist(), strict=True))


def pick_top_documents(selection: SelectionConfig, answer: Answer, rows: pa.Table, overlap: Overlap) -> TopDocuments:
    """The top selected documents of a selection, and how they were ranked.

    Args:
        selection: its configuration.
        answer: the selection's answer.
        rows: first rows of `selected.parquet`, in its order.
        overlap: overlap of the role that calibrates.
    """
    weights = tuple(answer.weights or ())
    name, score = choose_ranking(selection.detectors, weights, selection.procedure, answer.fused)
    pairs: dict[str, list[str]] = {}
    for pair in overlap.diagnostic.pairs:
        pairs.setdefault(pair.audit, []).append(pair.calibration)
    return TopDocuments(
        selection.name,
        rows,
        tuple(selection.detectors),
        weights,
        name,
        score,
        pairs,
    )


def choose_ranking(
    detectors: Sequence[str], weights: Sequence[float], procedure: str, fused: Callable[[RoleScores], np.ndarray] | None
) -> tuple[str, Callable[[RoleScores], np.ndarray]]:
    """The name of the ranking of a selection's documents, and its score of a batch.

    Args:
        detectors: detectors of the selection.
        weights: weights of the detectors; empty where there are none.
        procedure: procedure of the selection.
        fused: the fused score of all detectors, if there is one.
    """
    weighty = [column for column, weight in enumerate(weights) if weight]
    if fused is None or len(weighty) == 1:  # a single detector decides
        column = weighty[0] if fused is not None else 0
        return detectors[column], lambda batch: batch.matrix[:, column]
    return procedure, fused


def weighed_tokens(config: AuditConfig, detectors: Sequence[str], weights: Sequence[float]) -> tuple[str, Kind]:
    """The detector and the kind of the token values that are shown for a selection.

    The detector with the largest weight, or else the first, that reads token log-probabilities of the target; where
    there is none, plain log-probabilities, as in `loss`.

    Args:
        config: the audit's configuration.
        detectors: detectors of the selection.
        weights: weights of the detectors; empty where there are none.
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
    """The tokens of texts that an earlier answer of this run read with the same model; no text occurs twice.

    Returns:
        A table of `TOKEN_SCHEMA`, each row at one of the places of its text.
    """
    store, tables, seen = scored.store, [TOKEN_SCHEMA.empty_table()], set[str]()
    wanted = _maker(scored)
    for selection in store.names("selection"):
        try:
            digests = None if selection == HISTORY else read_digests(store, selection)
            if digests is None or attributions_file(selection) not in digests.files:
                continue
            table = read_listed(store, digests, attributions_file(selection))
            if (table.schema.metadata or {}).get(_MADE_BY) != wanted:
                continue
            table = table.select(TOKEN_SCHEMA.names).cast(TOKEN_SCHEMA)
        except (UserError, OSError, ValueError, LookupError):  # as `read_attributions`
            continue
        first: dict[str, int] = {}
        for number, key in enumerate(table["text_key"].to_pylist()):
            if key not in seen:
                first.setdefault(key, number)
        tables.append(table.take(pa.array(first.values(), pa.int64())))
        seen.update(first)
    return pa.concat_tables(tables)


def _maker(scored: Scored) -> bytes:
    """A digest of the values that the tokens of this run's documents depend on."""
    fingerprint = scored.receipts[0].fingerprint
    parts = {key: fingerprint.get(key) for key in _DECIDING}
    parts.update({key: fingerprint[key] for key in ("windows", "chat") if key in fingerprint})  # of some runs
    return json_digest(parts).encode()


def write_attributions(
    scored: Scored,
    config: AuditConfig,
    tops: Sequence[TopDocuments],
    kept: pa.Table,
    reread: Reread | None,
    say: Callable[[str], None],
) -> dict[str, dict[str, str]]:
    """Write the token attributions of all selections of a run, one file each; an error here does not end a run.

    Args:
        scored: the score shards.
        config: the audit's configuration; its target model is loaded or can be.
        tops: top documents of each selection.
        kept: tokens of earlier answers, from `kept_tokens`.
        reread: reads the documents that are not in `kept`; None: these have no attributions.
        say: prints a line.

    Returns:
        By selection, the SHA-256 of its file, by name; empty for a selection without one.

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
        duplicates = related_ids(scored.store, places)
        index = {key: number for number, key in enumerate(tokens["text_key"].to_pylist())}
        known = {place: index[text.key] for place, (_, text) in texts.items() if text.key in index}
        for one in (one for one in tops if len(one.rows)):
            shown = weighed_tokens(config, one.detectors, one.weights)
            table = _table(one, shown, duplicates, tokens, known)
            if len(table):
                written[one.name] = _write(scored, one.name, table)
        if reread is not None:
            say(top_documents(len(known), len(places)))
    except BusyError:
        raise
    except Exception as error:  # the answers do not depend on it
        say(no_top_documents(error))
    return written


def _scored_texts(scored: Scored, places: Iterable[Place]) -> dict[Place, tuple[Shard, ScoredText]]:
    """The shards and texts of documents, from the few score shards that hold them."""
    receipts = {receipt.shard: receipt for receipt in scored.of("audit")}
    shards = sorted((scored.shards[shard_id] for shard_id in receipts), key=_shard_start)
    rows: dict[str, set[int]] = {}
    for place in places:
        shard = shards[bisect_right(shards, place, key=_shard_start) - 1]
        rows.setdefault(shard.id, set()).add(place[1])
    texts: dict[Place, tuple[Shard, ScoredText]] = {}
    for shard_id in sorted(rows):
        shard = scored.shards[shard_id]
        table = scored.table(receipts[shard_id], ["row", "text_key", "n_tokens"])
        table = table.filter(pa.array(np.isin(table["row"].to_numpy(), list(rows[shard_id]))))
        for one in table.to_pylist():
            texts[shard.name, one["row"]] = shard, ScoredText(one["row"], one["text_key"], one["n_tokens"])
    return texts


def _shard_start(shard: Shard) -> Place:
    return shard.name, shard.first_row


def _places(tokens: pa.Table) -> Iterable[Place]:
    return zip(tokens["source"].to_pylist(), tokens["row"].to_pylist(), strict=True)


def _all_tokens(
    scored: Scored,
    config: AuditConfig,
    texts: Mapping[Place, tuple[Shard, ScoredText]],
    kept: pa.Table,
    reread: Reread | None,
) -> pa.Table:
    """The tokens of texts: kept ones, and those that are read now."""
    known = set(kept["text_key"].to_pylist())
    by_shard: dict[str, tuple[Shard, list[ScoredText]]] = {}
    for place in sorted(texts):
        shard, text = texts[place]
        if text.key not in known:
            by_shard.setdefault(shard.id, (shard, []))[1].append(text)
    if reread is None or not by_shard or not isinstance(config.model, ModelConfig):
        return kept
    wanted = ScoredTexts({shard.id: some for shard, some in by_shard.values()})
    fingerprint, rendered = scored.receipts[0].fingerprint, scored.receipts[0].fingerprint.get("chat")
    chats = None if rendered is None else ScoredChats(config.chat or ChatConfig(), rendered["templates"]["target"])
    windows = (config.windows, _window_tokens(config)) if config.windows > 1 else None
    settings = TokenSettings(wanted, config.model, str(fingerprint["device"]), windows, chats)
    read = reread([shard for shard, _ in by_shard.values()], settings)
    return kept if read is None else pa.concat_tables([kept, read])


def _window_tokens(config: AuditConfig) -> int:
    """Most ids of a window, by `max_tokens` and the positions of the reference model that reads it too."""
    reads = any(p.model == "reference" for one in parse_detectors(config.detectors) for p in one.needs)
    if not reads or not isinstance(config.reference_model, ModelConfig):
        return config.max_tokens
    return min(config.max_tokens, count_positions(config.reference_model) or config.max_tokens)


def _table(
    one: TopDocuments,
    shown: tuple[str, Kind],
    family: Mapping[Place, list[str]],
    tokens: pa.Table,
    index: Mapping[Place, int],
) -> pa.Table:
    """The attributions of a selection's documents with known tokens, in their order."""
    detector, kind = shown
    matrix = np.stack([one.rows[name].to_numpy() for name in one.detectors], axis=1)
    scores = one.score(RoleScores(matrix, None, np.zeros(len(matrix), dtype=np.int64)))
    ids, places = one.rows["doc_id"].to_pylist(), one.places
    here = [number for number, place in enumerate(places) if place in index]
    table = tokens.take(pa.array([index[places[number]] for number in here], pa.int64()))
    columns: dict[str, list[Any]] = {
        "doc_id": [ids[number] for number in here],
        "source": [places[number][0] for number in here],
        "row": [places[number][1] for number in here],
        "kind": [kind] * len(here),
        "detector": [detector] * len(here),
        "ranked_by": [one.ranked_by] * len(here),
        "score": [float(scores[number]) for number in here],
        "near_copies": [[*one.pairs.get(ids[number], []), *family.get(places[number], [])][:NAMED] for number in here],
    }
    parts = {name: columns[name] if name in columns else table[name] for name in _SCHEMA.names}
    return pa.table(parts, schema=_SCHEMA).combine_chunks()


def _write(scored: Scored, selection: str, table: pa.Table) -> dict[str, str]:
    name = attributions_file(selection)
    return {name: scored.store.write_table(name, table.replace_schema_metadata({_MADE_BY: _maker(scored)}))}


NAMED = 10
"""Maximum number of near-duplicates of a document that are named."""

Place = tuple[str, int]
"""An audited document: its input and row number."""


def related_ids(store: Store, places: Collection[Place]) -> dict[Place, list[str]]:
    """Ids of the first other audited documents of the family of each document; empty without near-duplicates.

    A family consists of near-duplicates, directly or through others.

    Args:
        store: the run directory with the list of near-duplicates.
        places: places of the documents.
    """
    name = near_duplicates_file("audit")
    if not places or not store.exists(name):
        return {}
    table = store.read_table(name)
    near = table.filter(pa.array(np.isin(table["row"].to_numpy(), [row for _, row in places])))
    here = zip(_places(near), near["family"].to_pylist(), strict=True)
    family = {place: number for place, number in here if place in places}
    members: dict[int, list[tuple[Place, str]]] = {number: [] for number in family.values()}
    near = table.filter(pa.array(np.isin(table["family"].to_numpy(), list(members))))
    for number, place, doc_id in zip(
        near["family"].to_pylist(), _places(near), near["doc_id"].to_pylist(), strict=True
    ):
        if len(members[number]) <= NAMED:
            members[number].append((place, doc_id))
    return {
        place: [doc_id for other, doc_id in members[number] if other != place][:NAMED]
        for place, number in family.items()
    }


def make_thumbnail(picture: Image) -> bytes:
    """A picture, RGB, as a small JPEG file of its pixels only, without metadata of its own file."""
    from PIL import Image

    small = Image.frombytes("RGB", picture.size, picture.tobytes())
    small.thumbnail((SIDE, SIDE))
    file = io.BytesIO()
    small.save(file, "JPEG", quality=75)
    return file.getvalue()


def write_thumbnails(scored: Scored, selected: Mapping[str, pa.Table]) -> dict[str, dict[str, str]]:
    """Write the thumbnails of selected pictures that have not changed since they were scored.

    Args:
        scored: the score shards.
        selected: by selection name, its top documents, with columns source and row.

    Returns:
        By selection, the SHA-256 of its file of thumbnails, by name; empty where it has none.
    """
    written: dict[str, dict[str, str]] = {name: {} for name in selected}
    for name, rows in selected.items():
        if len(rows):
            file = thumbnails_file(name)
            written[name][file] = scored.store.write_table(file, _make_thumbnails(scored, rows))
    return written


def _make_thumbnails(scored: Scored, selected: pa.Table) -> pa.Table:
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
                        row = {"source": shard.name, "row": document.row, "thumbnail": make_thumbnail(picture)}
                        rows.append(row)
        except (UserError, ValueError, LookupError, OSError):  # missing or replaced: an answer needs no picture
            continue
    return pa.Table.from_pylist(rows, schema=THUMBNAIL_SCHEMA)
