"""The record and settings of scoring, and workers for token ids and columns of scores."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipeline.config.audit import AuditConfig
from pipeline.config.models import EndpointConfig, ModelConfig
from pipeline.config.paths import written
from pipeline.config.training import AdapterConfig
from pipeline.corpus.documents import Document, id_key
from pipeline.corpus.keys import Keys
from pipeline.corpus.near_duplicates import SKETCH, SKETCH_KIND
from pipeline.corpus.picture_files import PICTURE_SKETCH_KIND
from pipeline.corpus.shard import Shard
from pipeline.detectors.base import FORWARD, Evidence, Pass
from pipeline.detectors.camia import COPIES
from pipeline.detectors.registry import DetectorChoice, needed_adapters, parse_detectors, plugin_code
from pipeline.models.tokens import Tokens, check_same_tokens, open_tokenizer, repeated, shared_tokens
from pipeline.passes.budget import Budget
from pipeline.passes.forward import in_one_copy
from pipeline.stages import SCORE_FOLDER, SCORING
from pipeline.stages.base import BatchSize, Entry, Output, Placement, Stage, StageKind, StagePlan, Window, Worker
from pipeline.stages.chat_scoring import ChatScorer, chat_settings
from pipeline.stages.picture_scoring import PictureScorer
from pipeline.stages.score import (
    WINDOW_CHARACTERS,
    WINDOW_DOCUMENTS,
    Scorer,
    ScoreSettings,
    file_scores,
    same_token_pair,
    score_schema,
)
from pipeline.stages.score_versions import VersionScorer, versions_schema
from pipeline.store.files import Store

_GRADIENT_COST = 3.0  # in forward passes


def _stages(wanted: StagePlan, earlier: Sequence[Stage]) -> list[Stage]:
    config, detectors = wanted.config, wanted.detectors
    reference = config.reference_model if any(p.model == "reference" for p in wanted.passes) else None
    served = isinstance(config.model, EndpointConfig)  # texts and chats alone, of which words are counted
    budget = _budget(wanted, wanted.budget(config.model, reference))
    described = {name: _adapter_settings(config.fsd.adapter(name)) for name in needed_adapters(detectors)} or None
    settings = ScoreSettings(
        config.model,
        reference,
        DetectorChoice(tuple(config.detectors)),
        plugin_code(config.import_, detectors),
        described if wanted.adapters is None else wanted.adapters,
        config.max_tokens,
        budget.forward,
        budget.gradient,
        wanted.device.mark,
        PICTURE_SKETCH_KIND if config.corpus.has_pictures else SKETCH_KIND,
        wanted.prefixes,
        chat_settings(config, detectors) if config.corpus.has_chats and not served else None,
        config.windows if config.windows > 1 else None,
    )
    columns = [detector.column for detector in detectors]
    stage = wanted.stage(
        SCORING,
        folder=SCORE_FOLDER,
        schema=versions_schema(columns) if config.corpus.has_versions else score_schema(columns),
        settings=settings,
        make=Scorer if served else SCORERS[config.corpus.kind.keys[0]],
        reads=tuple(earlier),
        quarantines=True,
    )
    return [stage]


def _budget(wanted: StagePlan, budget: Budget) -> Budget:
    """The sizes of batches: configured, or else from `budget`."""
    tokens = wanted.config.resources.batch_tokens
    if tokens == "auto":
        return budget
    return replace(budget, forward=tokens, gradient=min(tokens, budget.gradient) if wanted.device.gpus else tokens)


def _adapter_settings(adapter: AdapterConfig) -> dict[str, Any]:
    """The settings of an adapter, without the local path of its corpus."""
    settings = adapter.model_dump(mode="json")
    if adapter.corpus is not None and adapter.corpus.path is not None:
        settings["corpus"]["path"] = [written(path) for path in adapter.corpus.paths]
    return settings


def _forward(entry: Mapping[str, Any]) -> float:
    each = (COPIES if entry.get("text") == "repeated" else 1.0) * (1 + float(entry["paraphrases"]))
    return each + float(entry.get("prefix_cost", 0.0))


def _gradient(entry: Mapping[str, Any]) -> float:
    return _GRADIENT_COST * (1 + entry["paraphrases"])


def _check(config: AuditConfig) -> tuple[()]:
    """Check that the tokenizers of two models agree if a detector gives them the same tokens. Raises UserError."""
    pair = same_token_pair(parse_detectors(config.detectors), config.corpus.has_ids or config.windows > 1)
    if pair is not None:
        assert isinstance(config.model, ModelConfig)
        assert isinstance(config.reference_model, ModelConfig)
        models = (config.model, config.reference_model)
        first, second = map(open_tokenizer, models)
        shared = shared_tokens(config.corpus.has_ids, config.windows)
        check_same_tokens(first, second, (models[0].shown, models[1].shown), pair, shared)
    if config.corpus.has_chats:
        chat_settings(config, parse_detectors(config.detectors))
    return ()


KIND = StageKind(SCORING, SCORE_FOLDER, _stages, _check, costs={"forward": _forward, "gradient": _gradient})


class IdScorer(Scorer):
    """A scorer of token ids. Detectors of texts, such as `zlib`, read the ids decoded by the target's tokenizer."""

    reads_ids = True

    def tokenise(self, documents: Sequence[Document]) -> tuple[list[Tokens], list[str]]:
        """The ids of documents, truncated to `max_tokens`, and their decoded texts.

        Args:
            documents: documents whose texts are ids, from `pipeline.corpus.documents.ids_text`.
        """
        texts = [document.text for document in documents]
        most, known = self.max_tokens, len(self.tokenizer)
        ids = [list(map(int, text.split(" ", most)[:most])) for text in texts]
        tokens = [Tokens(each, text.count(" ") >= most, len(text)) for each, text in zip(ids, texts, strict=True)]
        plain = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return tokens, [str(self.tokenizer.decode([one for one in each if one < known], **plain)) for each in ids]

    def tokenise_passes(
        self, documents: Sequence[Document], kept: list[list[str]], ids: dict[Pass, list[list[int]]]
    ) -> None:
        """Use the ids, or several copies of them, for every pass."""
        for needed in self.passes:
            mark = self.models[needed.model].tokenizer.bos_token_id
            ids[needed] = (
                [repeated(each, self.max_tokens, mark) for each in ids[FORWARD]]
                if needed.text == "repeated"
                else ids[FORWARD]
            )


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A document with its scores."""

    role: str
    text_key: int
    sketch: bytes
    scores: tuple[float, ...]  # one per detector
    truncated: bool = False


class ColumnScorer:
    """The detectors that read columns of scores; no model is opened."""

    def __init__(self, stage: Stage, placement: Placement) -> None:
        """Store the detectors."""
        settings: ScoreSettings = stage.settings
        self.detectors = settings.detectors.parse()
        self.batch_size: BatchSize | None = None
        self.window = Window(WINDOW_DOCUMENTS, WINDOW_CHARACTERS)

    def open(self, shard: Shard, store: Store, output: Output) -> Shard:
        """Return the shard, which has the names of the columns."""
        return shard

    def prepare(self, documents: list[Document], inputs: Shard, output: Output) -> list[Entry]:
        """Compute the keys of documents: of their texts, or without texts distinct keys of their roles and ids."""
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
        """Record the scores of a batch."""
        columns = [detector.arguments["column"] for detector in self.detectors]
        values = zip(*(entry.work.scores for entry in batch), strict=True)
        evidence = Evidence(
            [entry.document.text for entry in batch], {}, columns=dict(zip(columns, values, strict=True))
        )
        scores = in_one_copy([detector.score(evidence) for detector in self.detectors])
        file_scores(self.detectors, batch, scores, output)


def _sketch_of_name(name: str) -> bytes:
    """A pseudo-random sketch of a name, without near-duplicates: uint8, (128,)."""
    return hashlib.shake_128(name.encode("utf-8", "surrogatepass")).digest(SKETCH)


SCORERS: dict[str, Callable[[Stage, Placement], Worker]] = {
    "text": Scorer,
    "image": PictureScorer,
    "tokens": IdScorer,
    "messages": ChatScorer,
    "prompt": ChatScorer,
    "scores": ColumnScorer,
    "versions": VersionScorer,
}
"""Key that states a kind of documents -> the worker that scores them."""
