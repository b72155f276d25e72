"""Scores from elsewhere: the columns of a file as they stand, in the rows that scoring by a model would write."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from pipeline.corpus.documents import Document, id_key
from pipeline.corpus.keys import Keys
from pipeline.corpus.near_copies import SKETCH
from pipeline.corpus.shard import Shard
from pipeline.detectors.base import Evidence
from pipeline.passes.copying import in_one_copy
from pipeline.stages.base import BatchSize, Entry, Output, Placement, Stage, Window
from pipeline.stages.score import WINDOW_CHARACTERS, WINDOW_DOCUMENTS, ScoreSettings, file_scores
from pipeline.store.files import Store


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A document with its scores."""

    role: str
    text_key: int
    sketch: bytes
    scores: tuple[float, ...]  # of the detectors
    truncated: bool = False


class ColumnScorer:
    """The detectors that read columns of scores; no model is opened."""

    def __init__(self, stage: Stage, placement: Placement) -> None:
        """Take the detectors."""
        settings: ScoreSettings = stage.settings
        self.detectors = settings.detectors.parse()
        self.batch_size: BatchSize | None = None
        self.window = Window(WINDOW_DOCUMENTS, WINDOW_CHARACTERS)

    def open(self, shard: Shard, store: Store, output: Output) -> Shard:
        """The shard, whose columns are known."""
        return shard

    def prepare(self, documents: list[Document], inputs: Shard, output: Output) -> list[Entry]:
        """Make the keys of documents: of their texts, or without texts of their roles and ids, near no other's."""
        if inputs.has_text:
            keys = Keys.of(documents)
            made = zip(keys.text.tolist(), map(bytes, keys.sketch), keys.length.tolist(), strict=True)
        else:
            names = [f"{inputs.role} {document.doc_id}" for document in documents]
            made = zip(map(id_key, names), map(_sketch_of_name, names), [0] * len(names), strict=True)
        return [
            Entry(document, words, _Prepared(inputs.role, key, sketch, document.scores))
            for document, (key, sketch, words) in zip(documents, made, strict=True)
        ]

    def work(self, batch: list[Entry], output: Output) -> None:
        """Note the scores of a batch."""
        columns = [detector.arguments["column"] for detector in self.detectors]
        values = zip(*(entry.work.scores for entry in batch), strict=True)
        evidence = Evidence(
            [entry.document.text for entry in batch], {}, columns=dict(zip(columns, values, strict=True))
        )
        scores = in_one_copy([detector.score(evidence) for detector in self.detectors])
        file_scores(self.detectors, batch, scores, output)


def _sketch_of_name(name: str) -> bytes:
    """A sketch that is alike for no two names: uint8, (128,), as independent and uniform ones."""
    return hashlib.shake_128(name.encode("utf-8", "surrogatepass")).digest(SKETCH)
