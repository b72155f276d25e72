"""Scoring of documents with versions: one row with the scores of all versions; a document is scored or refused whole.

A document is refused if any version is invalid, which depends only on the unordered versions.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.corpus.documents import Document, TextVersions
from pipeline.corpus.reasons import Reason
from pipeline.corpus.scripts import has_unspaced, word_pattern
from pipeline.corpus.shard import Shard
from pipeline.errors import UserError
from pipeline.passes.shared import common_beginning, shares_beginnings
from pipeline.stages.base import Entry, Output, Placement, Stage
from pipeline.stages.events import FEATURES, FEATURES_TYPE, VERSIONS, VERSIONS_TYPE
from pipeline.stages.score import Scorer, file_scores, score_schema
from pipeline.stages.worker import longest_first
from pipeline.store.files import Store

_PIECE = re.compile(r"\w+|\s+|[^\w\s]")


def versions_schema(columns: Sequence[str]) -> pa.Schema:
    """Columns of a score file of documents with versions: `score_schema` of the published ones, and two structs."""
    added = [pa.field(VERSIONS, VERSIONS_TYPE), pa.field(FEATURES, FEATURES_TYPE)]
    return pa.schema([*score_schema(columns), *added])


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A document with checked versions."""

    versions: TextVersions
    entries: tuple[Entry, ...]  # the versions prepared by `Scorer`, in order


class VersionScorer:
    """The models of one actor, which read every version of a document. Scores depend only on the shard."""

    def __init__(self, stage: Stage, placement: Placement) -> None:
        """Load the models."""
        self.scorer = Scorer(stage, placement)
        self.columns = [detector.column for detector in self.scorer.detectors]
        self.batch_size = self.scorer.batch_size
        self.window = self.scorer.window

    def open(self, shard: Shard, store: Store, output: Output) -> Any:
        """As `Scorer.open`."""
        return self.scorer.open(shard, store, output)

    def prepare(self, documents: list[Document], inputs: Any, output: Output) -> list[Entry]:
        """Tokenize all versions; a document is refused with the reason of its first refused version."""
        entries = []
        for document in documents:
            assert document.versions is not None
            checked, texts = Output(), enumerate(document.versions.texts)
            prepared = self.scorer.prepare([replace(document, row=i, text=text) for i, text in texts], inputs, checked)
            if checked.refused:
                place = min(checked.refused)
                _, reason, message = checked.refused[place]
                output.refuse(document, reason, f"version {place}: {message}")
                continue
            if document.versions.differing:
                prepared = self._differing(document.versions, prepared)
                if any(not any(keep) for entry in prepared for keep in entry.work.keep.values()):
                    output.refuse(document, Reason.TOO_SHORT, "what differs between versions stands behind max_tokens")
                    continue
            work = _Prepared(document.versions, tuple(prepared))
            bare = replace(document, text="", versions=None)
            entries.append(Entry(bare, sum(entry.tokens for entry in prepared), work))
        return entries

    def _differing(self, versions: TextVersions, entries: Sequence[Entry]) -> list[Entry]:
        """The versions of a document, restricted to tokens that are not common to all."""
        made = []
        for text, spans, entry in zip(versions.texts, differing_spans(versions.texts), entries, strict=True):
            keep = {
                needed: tokens_in(self.scorer.models[needed.model].tokenizer, text, spans, len(entry.work.ids[needed]))
                for needed in self.scorer.passes
            }
            made.append(replace(entry, work=replace(entry.work, keep=keep)))
        return made

    def work(self, batch: list[Entry], output: Output) -> None:
        """Score all versions of some documents: those with a long common beginning separately, others by length."""
        separate = []
        for document in batch:
            if not self._shares(document):
                separate.append(document)
                continue
            each, longest = document.work.entries, max(entry.tokens for entry in document.work.entries)
            step = max(1, self.batch_size.tokens // longest)
            parts = [[entry.work for entry in each[start : start + step]] for start in range(0, len(each), step)]
            of_parts = [self.scorer.scores(part, versions=True).numpy() for part in parts]
            self._keep(document, np.concatenate(of_parts), output)
        versions = [entry for document in separate for entry in document.work.entries]
        scores = np.zeros((len(versions), len(self.columns)))
        numbered = [replace(entry, document=replace(entry.document, row=row)) for row, entry in enumerate(versions)]
        for part in longest_first(numbered, self.batch_size):
            scores[[entry.document.row for entry in part]] = self.scorer.scores([entry.work for entry in part]).numpy()
        start = 0
        for entry in separate:
            stop = start + len(entry.work.entries)
            self._keep(entry, scores[start:stop], output)
            start = stop

    def _shares(self, document: Entry) -> bool:
        """Whether a pass computes a common beginning of the versions once."""
        return any(
            needed.kind == "forward"
            and shares_beginnings(self.scorer.models[needed.model])
            and common_beginning([entry.work.ids[needed] for entry in document.work.entries])
            for needed in self.scorer.passes
        )

    def _keep(self, entry: Entry, scores: np.ndarray, output: Output) -> None:
        """Record the scores of a document, float64, (versions, detectors); refuse it if one is not finite."""
        document, prepared = entry.document, entry.work
        wrong = ~np.isfinite(scores)
        if wrong.any():
            place = int(wrong.any(axis=1).argmax())
            names = [column for column, bad in zip(self.columns, wrong[place], strict=True) if bad]
            output.refuse(
                document, Reason.NON_FINITE_SCORE, f"version {place}: not a finite number: {', '.join(names)}"
            )
            return
        versions, published = prepared.versions, prepared.entries[prepared.versions.published]
        work = replace(published.work, truncated=any(version.work.truncated for version in prepared.entries))
        row = scores[versions.published : versions.published + 1]
        file_scores(self.scorer.detectors, [Entry(document, published.tokens, work)], row, output)
        output.rows[document.row][VERSIONS] = {
            "published": versions.published,
            "digests": versions.digests,
            "kinds": versions.kinds,
            "forms": versions.forms,
            "scores": scores.ravel().tolist(),
        }
        output.rows[document.row][FEATURES] = None if versions.features is None else versions.features.row()
        output.tokens += entry.tokens - published.tokens  # tokens of the other versions


# --- differences between the versions of a text, aligned by words, and by characters in scripts without blanks


@cache
def _mixed_piece() -> re.Pattern[str]:
    return re.compile(rf"{word_pattern(True).pattern}|\s+|[^\w\s]")


def differing_spans(texts: Sequence[str]) -> list[list[tuple[int, int]]]:
    """Spans of each text that are not common to all, as (start, end) in characters, of at least one character.

    The texts are aligned with the one whose SHA-256 is the least, which depends neither on the published version nor on
    the order of the texts. Every text has a span wherever one differs: for an omission, the following character.

    Args:
        texts: at least two, distinct.
    """
    piece = _mixed_piece() if any(map(has_unspaced, texts)) else _PIECE
    pieces = [piece.findall(text) for text in texts]
    base = min(range(len(texts)), key=lambda place: sha256(texts[place].encode("utf-8", "surrogatepass")).digest())
    matched = [_matched(pieces[base], other) for other in pieces]
    common = sorted(set.intersection(*(set(places) for places in matched)))
    ends = [[0] for _ in texts]
    for places, words in zip(ends, pieces, strict=True):
        for piece in words:
            places.append(places[-1] + len(piece))
    spans: list[list[tuple[int, int]]] = [[] for _ in texts]
    for before, after in zip([-1, *common], [*common, len(pieces[base])], strict=True):
        starts = [places[before] + 1 if before >= 0 else 0 for places in matched]
        stops = [
            places[after] if after in places else len(words) for places, words in zip(matched, pieces, strict=True)
        ]
        if any(start < stop for start, stop in zip(starts, stops, strict=True)):
            for several, places, start, stop in zip(spans, ends, starts, stops, strict=True):
                first = min(places[start], places[-1] - 1)
                several.append((first, max(places[stop], first + 1)))
    return spans


def _matched(first: Sequence[str], other: Sequence[str]) -> dict[int, int]:
    """Positions in one text -> positions in the other of equal pieces, in order."""
    blocks = difflib.SequenceMatcher(None, first, other, autojunk=False).get_matching_blocks()
    return {block.a + step: block.b + step for block in blocks for step in range(block.size)}


def tokens_in(tokenizer: Any, text: str, spans: Iterable[tuple[int, int]], number: int) -> list[bool]:
    """Whether each token of a text, from the second on, overlaps a span.

    Args:
        tokenizer: tokenizer of the model.
        text: text that the model reads.
        spans: result of `differing_spans`.
        number: number of kept tokens of the text.

    Raises:
        UserError: the tokenizer has no offsets.
    """
    if not tokenizer.is_fast:
        raise UserError("versions.differing needs a tokenizer with token offsets (tokenizer.json)")
    offsets = tokenizer(text, add_special_tokens=True, return_offsets_mapping=True, verbose=False)["offset_mapping"]
    spans = list(spans)
    return [any(begin < stop and start < end for start, stop in spans) for begin, end in offsets[1:number]]
