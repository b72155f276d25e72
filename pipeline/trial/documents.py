"""The documents of a trial in memory: ids, texts, groups and families."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from pipeline.config.corpus import CorpusConfig, TransformConfig
from pipeline.corpus.documents import read_shard
from pipeline.corpus.inputs import find_inputs
from pipeline.corpus.near_copies import near_families, sketch, stack_sketches
from pipeline.corpus.shards import number_rows, plan_shards
from pipeline.corpus.transforms import transform
from pipeline.errors import UserError
from pipeline.models.checkpoints import check_files
from pipeline.store.files import Store
from pipeline.trial.config import Point, TrialConfig

MIN_WORDS = 2
"""A shorter text may be a single token, which can be neither trained on nor scored."""


@dataclass(frozen=True, slots=True, eq=False)
class Documents:
    """The documents of a trial, in the order of the files."""

    ids: list[str]
    texts: list[str]
    groups: list[str | None]
    family: np.ndarray  # int64, (documents,): those of one number are near copies, and stay together
    left_out: dict[str, int]  # reason -> documents that no model can be trained on

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def digest(self) -> str:
        """SHA-256 of the documents."""
        content = json.dumps([self.ids, self.texts, self.groups], ensure_ascii=True)
        return hashlib.sha256(content.encode()).hexdigest()

    def read(self, changed: TransformConfig | None) -> list[str]:
        """The texts as an audit with this text transform reads them."""
        return self.texts if changed is None else [transform(text, changed) for text in self.texts]

    def table(self, positions: np.ndarray) -> pa.Table:
        """The documents at these positions, as an audit reads them: columns id, text and group."""
        columns = {
            "id": [self.ids[i] for i in positions],
            "text": [self.texts[i] for i in positions],
            "group": [self.groups[i] for i in positions],
        }
        return pa.table(columns, schema=pa.schema([(name, pa.string()) for name in columns]))


def check_inputs(config: TrialConfig, points: Sequence[Point]) -> None:
    """Check that documents and models are there and that folders are local, by names and metadata alone.

    Args:
        config: the trial as written.
        points: the places of its sweep.

    Raises:
        UserError: a bad file or column, a missing model, or a folder that is not local.
    """
    for folder in (config.run, config.work_folder):
        if not Store(folder).local:
            raise UserError(f"a trial trains into local folders, got {folder}")
    find_inputs(CorpusConfig(audit=config.documents), config.limits)
    models = [
        model
        for at in (point.config for point in points)
        for model in (at.model, at.reference_model, at.paraphraser)
        if model is not None
    ]
    for model in {repr(model): model for model in models}.values():
        check_files(model)


def read_documents(config: TrialConfig, limit: int | None = None) -> Documents:
    """Read the documents of a trial. Bad ones, one-word texts and repeated ids are left out and counted.

    Raises:
        UserError: a bad file or column, a damaged file, or no documents.
    """
    corpus = CorpusConfig(audit=config.documents)
    shards = plan_shards(
        corpus, find_inputs(corpus, config.limits), config.resources, limit=limit, limits=config.limits
    )
    ids: list[str] = []
    texts: list[str] = []
    groups: list[str | None] = []
    earlier_ids: set[str] = set()
    left_out: Counter[str] = Counter()
    for shard in number_rows(shards):
        for document in read_shard(shard):
            if document.problem is not None:
                left_out[document.problem[0]] += 1
            elif len(document.text.split()) < MIN_WORDS:
                left_out["too_short"] += 1
            elif document.doc_id in earlier_ids:
                left_out["duplicate_id"] += 1
            else:
                earlier_ids.add(document.doc_id)
                ids.append(document.doc_id)
                texts.append(document.text)
                groups.append(document.group)
    if not ids:
        raise UserError(f"no documents to try on; left out: {dict(left_out)}")
    changed = config.text_transform
    read = texts if changed is None else [transform(text, changed) for text in texts]  # as the audits do
    family = near_families(stack_sketches([sketch(text) for text in read]), config.near_copies)
    return Documents(ids, texts, groups, family, dict(left_out))
