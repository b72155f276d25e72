"""The selected documents as the page carries them: the top of each selection, compressed, in bounded memory."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.audit.top_documents import DocumentEvidence, read_evidence, read_thumbnails
from pipeline.errors import visible
from pipeline.report.facts import NOT_SCORES, SelectionFacts, finite, first_selected
from pipeline.report.names import Folders
from pipeline.store.files import Store

MAX_ROWS = 20_000
"""Most documents on a page, over all of its selections."""

_EVIDENCE = 0.35  # the share of the room that goes to tokens
_DIGITS = 6


@dataclass(frozen=True, slots=True)
class Listing:
    """The top selected documents of one selection, for the table of the page.

    `rows` and `evidence` are base64 of gzip of lines of JSON: a line of `rows` holds the columns of some hundred
    documents, a line of `evidence` the tokens of one.
    """

    rows: str
    evidence: str
    n_rows: int
    n_evidence: int
    sources: bool  # whether they stand in several inputs


def read_listings(
    store: Store, selections: Sequence[SelectionFacts], folders: Folders, texts: bool, room: int
) -> dict[str, Listing]:
    """The listings of all selections by name; together at most `MAX_ROWS` documents.

    Args:
        store: the run directory.
        selections: of the run.
        folders: of the inputs, which no id begins with.
        texts: whether texts of documents may be on the page.
        room: characters that all of them may take.

    Raises:
        UserError: a list of selected documents that cannot be read.
    """
    limits = even_shares([selection.summary.n_selected for selection in selections], MAX_ROWS)
    listings: dict[str, Listing] = {}
    for served, (selection, limit) in enumerate(zip(selections, limits, strict=True)):
        part = room // (len(selections) - served)  # what smaller ones leave goes to those that follow
        listing = _listing(store, selection, folders, texts, limit, part)
        listings[selection.name] = listing
        room -= len(listing.rows) + len(listing.evidence)
    return listings


def even_shares(sizes: Sequence[int], total: int) -> list[int]:
    """How much each of several may have of a total: all of it, or as much as any other that does not have all."""
    shares = [0] * len(sizes)
    smallest_first = sorted(range(len(sizes)), key=lambda index: sizes[index])
    for served, index in enumerate(smallest_first):
        shares[index] = min(sizes[index], total // (len(sizes) - served))
        total -= shares[index]
    return shares


def _listing(store: Store, selection: SelectionFacts, folders: Folders, texts: bool, limit: int, room: int) -> Listing:
    evidence = read_evidence(store, selection.name)
    room_of_tokens = int(_EVIDENCE * room) if evidence else 0
    rows, tokens, places = _Packed(room - room_of_tokens), _Packed(room_of_tokens), dict[str, int]()
    thumbnails = read_thumbnails(store, selection.name) if texts else {}
    n_rows = n_evidence = 0
    for batch in (some.to_pydict() for some in first_selected(store, selection.name, limit, texts)):
        columns = _columns(batch, places, folders, texts)
        pictured = {**columns, "thumbs": _thumbnails(batch, thumbnails)} if thumbnails else columns
        if not (rows.add(pictured) or rows.add(columns)):
            break
        for index, doc_id in enumerate(batch["doc_id"]):
            if doc_id in evidence and tokens.add(_tokens(n_rows + index, evidence[doc_id], folders, texts)):
                n_evidence += 1
        n_rows += len(batch["doc_id"])
    return Listing(rows.text(), tokens.text(), n_rows, n_evidence, len(places) > 1)


def _columns(batch: Mapping[str, list[Any]], places: dict[str, int], folders: Folders, texts: bool) -> dict[str, Any]:
    """Some hundred documents as the page's script reads them: an id that only says the place is left out.

    Args:
        batch: of the documents.
        places: numbers of the inputs, in the order in which they are met; new ones are added.
        folders: of the inputs.
        texts: whether texts are on the page.
    """
    met = len(places)
    where = [places.setdefault(str(source), len(places)) for source in batch["source"]]
    default = [f"{source}#{row}" for source, row in zip(batch["source"], batch["row"], strict=True)]
    ids = [
        None if doc_id == other else visible(folders.relative(str(doc_id)))
        for doc_id, other in zip(batch["doc_id"], default, strict=True)
    ]
    scores = {name: list(map(_short, values)) for name, values in batch.items() if name not in NOT_SCORES}
    columns = {
        "ids": ids,
        "p": list(map(_short, batch["p_value"])),
        "scores": scores,
        "source": where,
        "row": batch["row"],
        "sources": [visible(folders.relative(source)) for source in list(places)[met:]],
    }
    if texts:
        columns["text"] = [visible(text or "") for text in batch.get("excerpt") or [None] * len(ids)]
    return columns


def _thumbnails(batch: Mapping[str, list[Any]], thumbnails: Mapping[tuple[str, int], bytes]) -> list[str | None]:
    """Base64 of the thumbnail of each document; None where it has none."""
    files = (thumbnails.get(place) for place in zip(batch["source"], batch["row"], strict=True))
    return [None if data is None else base64.b64encode(data).decode("ascii") for data in files]


def _short(value: float | None) -> float | None:
    """A number with so many digits as a reader can use."""
    known = finite(value)
    return None if known is None else float(f"{known:.{_DIGITS}g}")


def _rounded(value: float | None) -> float | None:
    known = finite(value)
    return None if known is None else round(known, 2)


def _tokens(index: int, evidence: DocumentEvidence, folders: Folders, texts: bool) -> dict[str, Any]:
    """What made the score of the document with an index on the page; without texts, no token and no value of one."""
    tokens: dict[str, Any] = {
        "at": index,
        "kind": evidence.kind,
        "detector": evidence.detector,
        "by": evidence.ranked_by,
        "score": _short(evidence.score),
        "near": [[visible(folders.relative(doc_id)), _short(score)] for doc_id, score in evidence.neighbours],
        "copies": [visible(folders.relative(doc_id)) for doc_id in evidence.near_copies],
    }
    if texts:
        tokens["pieces"] = [visible(piece) for piece in evidence.pieces or [evidence.text]]
        tokens["values"] = [_rounded(value) for value in evidence.values]
    return tokens


class _Packed:
    """Lines of JSON, compressed as they come, in a bounded number of characters."""

    def __init__(self, room: int) -> None:
        self.room = 3 * room // 4 - 64  # base64 takes four characters for three bytes
        self._pack = zlib.compressobj(6, zlib.DEFLATED, 31)  # gzip, without a time: the same lines give the same bytes
        self._parts: list[bytes] = []
        self._size = 0

    def add(self, value: Any) -> bool:
        """Add a line if there is room for it; whether there was."""
        line = json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n"
        tried = self._pack.copy()
        part = tried.compress(line.encode("utf-8", "replace")) + tried.flush(zlib.Z_SYNC_FLUSH)
        if self._size + len(part) > self.room:
            return False
        self._pack = tried
        self._parts.append(part)
        self._size += len(part)
        return True

    def text(self) -> str:
        """Base64 of the gzip file."""
        return base64.b64encode(b"".join([*self._parts, self._pack.copy().flush()])).decode("ascii")
