"""One shard of documents -> a file of their paraphrases and one receipt; and how scoring reads them back."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

from pipeline import __version__
from pipeline.config.audit import AuditConfig
from pipeline.config.models import ModelConfig, weights_of
from pipeline.corpus.documents import Document, id_key, read_shard
from pipeline.corpus.shard import Shard, shard_fingerprint
from pipeline.detectors.registry import draws_of, parse_detectors
from pipeline.errors import UserError
from pipeline.models.load import check_model, fingerprint_model, open_paraphraser
from pipeline.models.tokens import open_tokenizer, tokenize
from pipeline.passes.generate import Sampling
from pipeline.passes.paraphrase import Draws, ParaphraseSettings, paraphrase
from pipeline.store.attempts import Journal
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt, read_receipt, write_receipt

STAGE = "paraphrase"
WINDOW_DOCUMENTS = 64
AUDITED_ITSELF = (
    "is the audited model itself; the knockoffs of a model must not come from it (KTD, definition 1): give another one"
)

SCHEMA = pa.schema(
    [
        ("doc_id", pa.string()),
        ("row", pa.int64()),
        ("paraphrases", pa.list_(pa.string())),
        ("problem", pa.string()),
    ]
)


@dataclass(frozen=True, slots=True)
class Paraphrases:
    """The paraphrases of one document, or why there are none."""

    texts: tuple[str, ...]
    problem: str | None


def check_paraphraser(config: AuditConfig) -> None:
    """Check without reading weights that the paraphraser can be opened and does not stand where the audited model does.

    Raises:
        UserError: in one line, what is missing or refused.
    """
    assert config.paraphraser is not None
    check_model(config.paraphraser, paraphraser=True)
    if _place(config.paraphraser) == _place(weights_of(config.model)):
        raise UserError(f"paraphraser {config.paraphraser.path} {AUDITED_ITSELF}")


def _place(model: ModelConfig) -> tuple[str | None, ...]:
    return model.path, model.revision, model.gguf_file, model.adapter


def paraphrase_fingerprint(config: AuditConfig) -> dict[str, Any]:
    """All that could change a paraphrase.

    Raises:
        UserError: the paraphraser is the audited model, whose own paraphrases would tell what it knows.
    """
    assert config.paraphraser is not None
    ours = fingerprint_model(config.paraphraser)
    if ours["model"] == fingerprint_model(config.model)["model"]:
        raise UserError(f"paraphraser {config.paraphraser.path} {AUDITED_ITSELF}")
    found: dict[str, Any] = {f"paraphraser_{key}": value for key, value in ours.items()}
    found["paraphraser_settings"] = asdict(_settings(config))
    found["draws"] = draws_of(parse_detectors(config.detectors))
    found["seed"] = config.seed
    if config.text_transform is not None:
        found["text_transform"] = config.text_transform.model_dump()
    return found


def stage_fingerprint(config: AuditConfig) -> dict[str, Any]:
    """The fingerprint of the stage's receipts: paraphrases, what is kept of the documents, and the code."""
    return {**paraphrase_fingerprint(config), "max_tokens": config.max_tokens, "code": __version__}


class Paraphraser:
    """The paraphraser of one actor. Results depend on the shard alone."""

    def __init__(self, config: AuditConfig, fingerprint: Mapping[str, Any], gpus: float = 0) -> None:
        """Load the model, on the CPU for gpus = 0."""
        import torch

        assert config.paraphraser is not None
        if gpus == 0:
            torch.set_num_threads(config.resources.cpus_per_actor)
        self.config = config
        self.fingerprint = fingerprint
        self.draws = draws_of(parse_detectors(config.detectors))
        self.model = open_paraphraser(config.paraphraser, gpus=gpus)
        self.tokenizer = open_tokenizer(weights_of(config.model))

    def process(self, shard: Shard, store: Store, driver: str = "") -> Receipt:
        """Paraphrase a shard's documents and file the receipt; an already filed receipt is returned as it is.

        Documents that scoring will quarantine anyway are passed over.

        Raises:
            UserError: the shard's file is damaged.
        """
        if done := read_receipt(store, STAGE, shard.id):
            return done
        began = time.monotonic()
        journal = Journal(store, STAGE, shard, driver)
        rows: list[dict[str, Any]] = []
        for documents in windows(shard):
            rows += self._paraphrased(documents, journal)
        data = f"paraphrases/{shard.id}-{uuid.uuid4().hex[:8]}.parquet"
        store.write_table(data, pa.Table.from_pylist(rows, schema=SCHEMA))
        bad = sum(row["problem"] is not None for row in rows)
        written = [text for row in rows for text in row["paraphrases"]]
        receipt = Receipt(
            shard=shard.id,
            role=shard.role,
            n_in=len(rows),
            n_scored=len(rows) - bad,
            n_quarantined=bad,
            data=data,
            quarantine=None,
            reasons={"model_error": bad} if bad else {},
            fingerprint=shard_fingerprint(self.fingerprint, shard),
            tokens=sum(len(entry.ids) for entry in tokenize(self.tokenizer, written, self.config.max_tokens)),
            seconds=round(time.monotonic() - began, 3),
        )
        filed = write_receipt(store, STAGE, receipt)
        journal.close()
        return filed

    def _paraphrased(self, documents: list[Document], journal: Journal) -> list[dict[str, Any]]:
        """Rows of a window; one that killed its worker twice goes one document at a time."""
        name = f"{documents[0].row}+{len(documents)}"
        if journal.deadly(name):
            if len(documents) > 1:
                return [row for document in documents for row in self._paraphrased([document], journal)]
            return [_row(documents[0], (), "its worker died twice while this was paraphrased")]
        journal.enter(name)
        tokens = tokenize(self.tokenizer, [d.text for d in documents], self.config.max_tokens)
        kept = [d.text[: entry.kept] for d, entry in zip(documents, tokens, strict=True)]
        keys = [id_key(document.doc_id) for document in documents]
        asked = list(zip(keys, kept, strict=True))
        found = paraphrase(self.model, asked, self.draws, _settings(self.config), self.config.seed)
        return [
            _row(document, drawn.texts, None) if isinstance(drawn, Draws) else _row(document, (), drawn.message)
            for document, drawn in zip(documents, found, strict=True)
        ]


def read_paraphrases(store: Store, shard: Shard) -> dict[int, Paraphrases]:
    """The paraphrases of a finished shard, by row.

    Raises:
        UserError: the shard was not paraphrased.
    """
    receipt = read_receipt(store, STAGE, shard.id)
    if receipt is None:
        raise UserError(f"shard {shard.id} of {shard.name} has no paraphrases yet")
    table = store.read_table(receipt.data)
    columns = (table[name].to_pylist() for name in ("row", "paraphrases", "problem"))
    return {row: Paraphrases(tuple(texts), problem) for row, texts, problem in zip(*columns, strict=True)}


def windows(shard: Shard) -> Iterator[list[Document]]:
    """The good documents of a shard, a bounded number at a time."""
    window: list[Document] = []
    for document in read_shard(shard):
        if document.problem is None:
            window.append(document)
        if len(window) == WINDOW_DOCUMENTS:
            yield window
            window = []
    if window:
        yield window


def _row(document: Document, texts: tuple[str, ...], problem: str | None) -> dict[str, Any]:
    return {"doc_id": document.doc_id, "row": document.row, "paraphrases": list(texts), "problem": problem}


def _settings(config: AuditConfig) -> ParaphraseSettings:
    assert config.paraphraser is not None
    asked = config.paraphraser
    return ParaphraseSettings(Sampling(temperature=asked.temperature, top_k=asked.top_k, top_p=asked.top_p))
