"""Scoring: one float64 per document and detector, from the passes and the rows of earlier stages."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from pipeline.config.models import AnyModel, ModelConfig, display_name
from pipeline.corpus.documents import Document, id_key
from pipeline.corpus.keys import Keys
from pipeline.corpus.near_duplicates import SKETCH_KIND, SKETCH_TYPE
from pipeline.corpus.reasons import Reason
from pipeline.corpus.shard import Shard
from pipeline.detectors.base import FORWARD, Continuations, Continued, Detector, Evidence, Pass, Prefix, plan_passes
from pipeline.detectors.plugins import load_plugins
from pipeline.detectors.registry import DetectorChoice, PluginCode, count_draws
from pipeline.endpoint.replies import answers, note_replies
from pipeline.errors import UserError
from pipeline.models.chat_templates import ChatSettings
from pipeline.models.load import LanguageModel, open_model
from pipeline.models.opened import embedding_rows, unknown_id
from pipeline.models.sharing import Adapters
from pipeline.models.tokens import (
    Cut,
    Tokens,
    check_same_tokens,
    count_words,
    open_tokenizer,
    plain_ids,
    repeated,
    shared_tokens,
    tokenize,
    tokenizer_difference,
)
from pipeline.models.windows import check_room, tokenize_windows
from pipeline.passes.forward import TokenStatistics, from_log_probs, in_one_copy, restricted, to_device
from pipeline.passes.gradient import gradient_coverage
from pipeline.passes.parts import (
    PassSizes,
    behind_in_parts,
    forward_in_parts,
    gradients_in_parts,
    versions_in_parts,
    windows_in_parts,
)
from pipeline.passes.shared import HeldPrefixes
from pipeline.passes.statistics import text_read
from pipeline.stages.base import BatchSize, Entry, Output, Placement, Stage, Window
from pipeline.stages.prefixes import Prefixes, token_rarity
from pipeline.stages.process import read_rows
from pipeline.store.files import Store

WINDOW_DOCUMENTS = 4096
WINDOW_CHARACTERS = 1 << 23
PADDING_TOKENS = {"cpu": 64, "cuda": None}
"""Maximum padding of a batch: on a CPU it takes as long as text, and another batch as long as a few dozen tokens."""

WINDOW_BATCHES = {"cpu": 128, "cuda": 16}
"""Approximate number of batches in a window: enough to group documents of similar length, which limits padding on a
CPU, and few enough that a GPU does not wait for the first window."""

CHARACTERS_OF_TOKEN = 4


def batch_window(batch_tokens: int, device: str, max_tokens: int, draws: int) -> Window:
    """The window of about `WINDOW_BATCHES` batches, estimated by characters.

    Args:
        batch_tokens: padded tokens in a batch.
        device: "cpu" or "cuda".
        max_tokens: maximum tokens of a document.
        draws: paraphrases per document, which are held with it.
    """
    return Window(
        WINDOW_DOCUMENTS,
        -(-WINDOW_CHARACTERS // (1 + draws)),
        WINDOW_BATCHES[device] * batch_tokens * CHARACTERS_OF_TOKEN,
        max_tokens * CHARACTERS_OF_TOKEN,
    )


@dataclass(frozen=True, slots=True)
class ScoreSettings:
    """Everything that scores depend on, except the rows of earlier stages."""

    model: AnyModel
    reference_model: AnyModel | None  # None if no detector reads it
    detectors: DetectorChoice
    plugins: PluginCode | None  # None if all detectors are built in
    adapters: Mapping[str, Any] | None  # name -> key of its folder, or the settings that determine the key
    max_tokens: int
    batch_tokens: int  # padded, of a forward pass
    gradient_tokens: int  # padded, of a gradient pass over a part of the batch
    device: str  # `Device.mark`
    sketch: str = SKETCH_KIND
    prefixes: Prefixes | None = None  # None if no detector reads one, or before they are drawn
    chat: ChatSettings | None = None  # None if the documents are no chats
    windows: int | None = None  # maximum windows of a document; None: its beginning alone is read


def score_schema(columns: Sequence[str]) -> pa.Schema:
    """Columns of a score file for selection, ending with one float64 column per detector."""
    fixed = [
        ("doc_id", pa.string()),
        ("role", pa.string()),
        ("group", pa.string()),
        ("row", pa.int64()),
        ("n_tokens", pa.int32()),
        ("truncated", pa.bool_()),
        ("id_key", pa.int64()),
        ("text_key", pa.int64()),
        ("sketch", SKETCH_TYPE),
    ]
    return pa.schema([*fixed, *((column, pa.float64()) for column in columns)])


@dataclass(frozen=True, slots=True)
class Inputs:
    """Rows of earlier stages for a shard's documents, by row number."""

    role: str
    paraphrases: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    continuations: Mapping[Continued, Mapping[int, Mapping[str, Any]]] = field(default_factory=dict)
    log_probs: Mapping[Pass, Mapping[int, Mapping[str, Any]]] = field(default_factory=dict)

    def continued(self, number: int) -> dict[Continued, Mapping[str, Any]]:
        """The rows of a document's continuations."""
        return {continued: rows[number] for continued, rows in self.continuations.items() if number in rows}

    def refusal(self, number: int) -> tuple[str, str] | None:
        """Reason and message if an earlier stage refused a document."""
        for rows in (self.paraphrases, *self.continuations.values(), *self.log_probs.values()):
            row = rows.get(number)
            if row is not None and row["reason"] is not None:
                return row["reason"], row["problem"]
        return None


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A checked document, tokenized for every pass."""

    role: str
    text_key: int
    sketch: bytes  # both of the whole text, not only the kept part
    texts: tuple[str, ...]  # kept parts (max_tokens) of the text and of each paraphrase
    truncated: bool
    ids: Mapping[Pass, list[int]]
    continuations: Mapping[Continued, Continuations]
    log_probs: Mapping[Pass, Sequence[float]]  # from an endpoint
    keep: Mapping[Pass, Sequence[bool]] | None = None  # scored tokens, from the second on; None: all
    places: Mapping[Prefix, int] = field(default_factory=dict)  # index of its document in each prefix
    cuts: Sequence[Cut] = ()  # its windows; empty: its ids are one piece


def same_token_pair(detectors: Sequence[Detector], given: bool) -> str | None:
    """The first detector that gives target and reference the same tokens; None without one.

    Args:
        detectors: the detectors.
        given: whether both models always read the same tokens: of documents of token ids, or in windows.
    """
    same = {d.column: d.same_tokens or (given and any(p.model == "reference" for p in d.needs)) for d in detectors}
    return next((column for column, alike in same.items() if alike), None)


class Scorer:
    """The models of one actor and its detectors. Scores depend only on the shard.

    Attributes:
        passes: the passes to run on each document -> the statistics that detectors read of them.
        answers: passes that an endpoint has answered -> the stage that asked it.
        samples: continuations that detectors read -> the stage that drew them.
        paraphrase: the stage that drew paraphrases; None: no detector reads them.
        models: the models that are opened here: "target", "reference".
        alike: whether both models have the same tokenizer, so that passes share their tokens.
        pair: the detector that needs it; None: none does.
        prefixes: documents that stand before each document, by the prefix that a detector reads.
        rarity: of each token, by the prefix whose tokens a detector counts.
        parts: sizes of batches that fitted into memory, by kind of pass and model.
        rows: rows of the embedding of each model, beyond which a token id is refused.
    """

    reads_ids = False  # whether documents are token ids

    def __init__(self, stage: Stage, placement: Placement) -> None:
        """Load the models."""
        settings: ScoreSettings = stage.settings
        if settings.plugins is not None:
            load_plugins(settings.plugins.plugins)
        self.detectors, self.seed = settings.detectors.parse(), stage.seed
        self.adapter_keys = settings.adapters or {}
        self.paraphrase = next(iter(stage.reads_with("paraphrases")), None)
        self.samples = {earlier.settings.continued: earlier for earlier in stage.reads_with("continuations")}
        self.answers = {earlier.settings.forward: earlier for earlier in stage.reads_with("log_probs")}
        passes = plan_passes(self.detectors)
        run = {p: read for p, read in passes.items() if p.kind in ("forward", "gradient")}
        self.passes = {p: read for p, read in run.items() if p not in self.answers}
        self.draws = count_draws(self.detectors)
        gradient = any(p.kind == "gradient" for p in self.passes)
        placement.set_up(settings.device, gradient)
        self.models: dict[str, LanguageModel] = {}
        self.tokenizer: Any = None  # None for an endpoint, whose tokenizer is unknown
        if isinstance(settings.model, ModelConfig):
            if any(p.model == "target" for p in self.passes):
                self.models["target"] = placement.open(open_model, settings.model)
            target = self.models.get("target")
            self.tokenizer = target.tokenizer if target is not None else open_tokenizer(settings.model)
        if any(p.model == "reference" for p in self.passes):
            assert isinstance(settings.reference_model, ModelConfig)
            self.models["reference"] = placement.open(open_model, settings.reference_model)
        self.pair = same_token_pair(self.detectors, self.reads_ids or settings.windows is not None)
        if self.pair is not None:
            assert settings.reference_model is not None
            names = (display_name(settings.model), display_name(settings.reference_model))
            shared = shared_tokens(self.reads_ids, settings.windows)
            check_same_tokens(self.tokenizer, self.models["reference"].tokenizer, names, self.pair, shared)
        tokenizers = [lm.tokenizer for lm in self.models.values()]
        self.alike = len(tokenizers) == 2 and tokenizer_difference(*tokenizers) is None
        self.base = stage.fingerprint["model"]
        self.shown = display_name(settings.model)
        self.adapters: Adapters | None = None  # the folder of the run is known with the first shard
        self.gradient_tokens = settings.gradient_tokens
        shots = {} if settings.prefixes is None else settings.prefixes.shots
        self.prefixes = {prefix: some for prefix, some in shots.items() if not prefix.counted}
        self.parts: defaultdict[str, PassSizes] = defaultdict(PassSizes)  # by kind of pass and model
        self.held: defaultdict[Pass, HeldPrefixes] = defaultdict(HeldPrefixes)
        self.gradient = asdict(gradient_coverage(self.models["target"].model)) if gradient else None
        self.rows = {name: embedding_rows(lm.model) for name, lm in self.models.items()}
        for prefix, some in shots.items():
            if (problem := unknown_id([one for ids in some.ids for one in ids], self.rows["target"])) is not None:
                raise UserError(f"{prefix.named}: {problem}")
        counted = {prefix: some.ids for prefix, some in shots.items() if prefix.counted}
        self.rarity = {
            prefix: to_device(torch.from_numpy(token_rarity(ids, self.rows["target"])), self.models["target"].device)
            for prefix, ids in counted.items()
        }
        limits = [m.max_tokens for m in self.models.values() if m.max_tokens is not None]
        self.max_tokens = min([settings.max_tokens, *limits])
        device = "cuda" if placement.gpus else "cpu"
        self.batch_tokens = settings.batch_tokens
        self.batch_size = BatchSize(settings.batch_tokens, PADDING_TOKENS[device])
        self.windows = self._most_windows(settings.windows)
        self.window = batch_window(settings.batch_tokens, device, self.max_tokens * self.windows, self.draws)

    def _most_windows(self, given: int | None) -> int:
        """The maximum number of windows of a document. Raises UserError if a window has no score."""
        if given is None:
            return 1
        check_room(self.tokenizer, self.max_tokens)
        return given

    def open(self, shard: Shard, store: Store, output: Output) -> Inputs:
        """The rows of the earlier stages; with the first shard, the adapters of the run."""
        if self.adapters is None:
            folders = {name: Path(store.path(f"adapters/{key}")) for name, key in self.adapter_keys.items()}
            self.adapters = Adapters(self.models.get("target"), folders, self.base, self.shown)
        output.gradient = self.gradient
        return Inputs(
            shard.role,
            read_rows(self.paraphrase, shard, store, output) if self.paraphrase is not None else {},
            {continued: read_rows(stage, shard, store, output) for continued, stage in self.samples.items()},
            {forward_pass: read_rows(stage, shard, store, output) for forward_pass, stage in self.answers.items()},
        )

    def prepare(self, documents: list[Document], inputs: Inputs, output: Output) -> list[Entry]:
        """Tokenize documents for every pass; too short documents and those refused by an earlier stage are refused."""
        usable, draws = [], {continued: stage.settings.draws for continued, stage in self.samples.items()}
        for document in documents:
            for continued, row in inputs.continued(document.row).items():
                note_replies(row.get("replies"), draws[continued], output.notes, document.row)
            if (refusal := inputs.refusal(document.row)) is not None:
                output.refuse(document, *refusal)
            else:
                usable.append(document)
        tokens, texts = self.tokenise(usable)
        kept = [texts]
        ids: dict[Pass, list[list[int]]] = {FORWARD: [entry.ids for entry in tokens]}
        for draw in range(1, self.draws + 1):
            drawn, texts = self.tokenise_draw(usable, inputs, draw)
            kept.append(texts)
            ids[replace(FORWARD, draw=draw)] = [entry.ids for entry in drawn]
        self.tokenise_passes(usable, kept, ids)
        for needed, rows in inputs.log_probs.items():  # only the number of these tokens is known
            ids[needed] = [[0] * (1 + len(rows[d.row]["log_probs"])) for d in usable]
        keys = Keys.of(usable)
        id_keys = [id_key(document.doc_id) for document in usable]
        places = {prefix: shots.places(self.seed, id_keys, keys.sketch) for prefix, shots in self.prefixes.items()}
        entries = []
        for index, document in enumerate(usable):
            shortest = min(len(sequences[index]) for sequences in ids.values())
            if shortest < 2:
                output.refuse(document, Reason.TOO_SHORT, f"{shortest} tokens; a score needs 2")
                continue
            if (problem := self._unknown_id(ids, index)) is not None:
                output.refuse(document, Reason.MODEL_ERROR, problem)
                continue
            before = {prefix: place for prefix, of_each in places.items() if (place := of_each[index]) is not None}
            if len(before) < len(places):
                output.refuse(
                    document, Reason.MODEL_ERROR, "a near-duplicate of all known documents that could stand before it"
                )
                continue
            prepared = _Prepared(
                inputs.role,
                int(keys.text[index]),
                bytes(keys.sketch[index]),
                tuple(texts[index] for texts in kept),
                tokens[index].truncated,
                {needed: sequences[index] for needed, sequences in ids.items()},
                {
                    continued: Continuations(row["reference"], answers(row["continuations"], draws[continued]))
                    for continued, row in inputs.continued(document.row).items()
                },
                {needed: rows[document.row]["log_probs"] for needed, rows in inputs.log_probs.items()},
                places=before,
                cuts=tokens[index].cuts,
            )
            entries.append(Entry(replace(document, text="", chat=None), len(prepared.ids[FORWARD]), prepared))
        return entries

    def tokenise(self, documents: Sequence[Document]) -> tuple[list[Tokens], list[str]]:
        """The tokens of documents, and the parts of their texts that the tokens cover."""
        texts = [document.text for document in documents]
        if self.windows > 1:
            return tokenize_windows(self.tokenizer, texts, self.max_tokens, self.windows)
        read = count_words if self.tokenizer is None else partial(tokenize, self.tokenizer)
        tokens = read(texts, self.max_tokens)
        return tokens, [text[: entry.kept] for text, entry in zip(texts, tokens, strict=True)]

    def tokenise_draw(self, documents: Sequence[Document], inputs: Inputs, draw: int) -> tuple[list[Tokens], list[str]]:
        """The tokens of one paraphrase of each document, and the parts of its text that the tokens cover."""
        texts = [inputs.paraphrases[document.row]["paraphrases"][draw - 1] for document in documents]
        tokens = tokenize(self.tokenizer, texts, self.max_tokens)
        return tokens, [text[: entry.kept] for text, entry in zip(texts, tokens, strict=True)]

    def work(self, batch: list[Entry], output: Output) -> None:
        """Score a batch."""
        file_scores(self.detectors, batch, self.scores([entry.work for entry in batch]), output)

    def _unknown_id(self, ids: Mapping[Pass, list[list[int]]], index: int) -> str | None:
        """An error for a token id of a document without a row in a model's embedding."""
        read = {(p.model, id(ids[p])): ids[p][index] for p in self.passes}  # several passes share a list
        problems = (unknown_id(sequence, self.rows[model]) for (model, _), sequence in read.items())
        return next((problem for problem in problems if problem is not None), None)

    def tokenise_passes(
        self, documents: Sequence[Document], kept: list[list[str]], ids: dict[Pass, list[list[int]]]
    ) -> None:
        """Add the ids of every pass; passes over the same text share them if their models' tokenizers agree."""
        for needed in self.passes:
            same = replace(needed, kind="forward", adapter="", prefix=None)
            if self.alike and (of_target := replace(same, model="target")) in ids:
                ids[same] = ids[of_target]  # else the end of a truncated text may have other tokens
            if same not in ids:
                texts = kept[needed.draw]
                texts = [text_read(text, needed.text, self.seed) for text in texts]
                tokenizer = self.models[needed.model].tokenizer
                tokens = tokenize(tokenizer, texts, self.max_tokens)
                ids[same] = [entry.ids for entry in tokens]
                if needed.text == "repeated":
                    ids[same] = [repeated(one, self.max_tokens, tokenizer.bos_token_id) for one in ids[same]]
            ids[needed] = ids[same]

    def scores(self, batch: Sequence[_Prepared], versions: bool = False) -> torch.Tensor:
        """Scores of a batch: float64, (documents, detectors).

        Args:
            batch: prepared documents.
            versions: whether these are versions of one document, whose common beginning is computed once.
        """
        assert self.adapters is not None
        statistics: dict[Pass, TokenStatistics] = {}
        norms: dict[Pass, torch.Tensor] = {}
        predicted: dict[Pass, torch.Tensor] = {}
        for needed in self.answers:
            device = next((model.device for model in self.models.values()), "cpu")  # the device of the other model
            statistics[needed] = from_log_probs([entry.log_probs[needed] for entry in batch], device)
        for needed, names in self.passes.items():
            model, ids = self.models[needed.model], [entry.ids[needed] for entry in batch]
            keep = [entry.keep[needed] for entry in batch if entry.keep is not None]
            parts = self.parts[f"{needed.kind} {needed.model} {needed.prefix}"]
            with self.adapters.on(needed.adapter):
                if needed.kind == "gradient":
                    norms[needed] = gradients_in_parts(model, ids, keep or None, self.gradient_tokens, parts)
                    predicted[needed] = torch.tensor([sum(one) for one in keep] or [len(one) - 1 for one in ids])
                elif needed.prefix is not None:
                    shots, places = self.prefixes[needed.prefix], [entry.places[needed.prefix] for entry in batch]
                    behind = list(zip(places, ids, strict=True))
                    statistics[needed] = behind_in_parts(
                        model, shots.ids, behind, self.batch_tokens, parts, self.held[needed]
                    )
                elif self.windows > 1:
                    cuts = [entry.cuts for entry in batch]
                    statistics[needed] = windows_in_parts(model, ids, cuts, names, parts, self.batch_tokens)
                else:
                    in_parts = versions_in_parts if versions else forward_in_parts
                    statistics[needed] = in_parts(model, ids, names, parts)
                    if keep:
                        statistics[needed] = restricted(statistics[needed], keep)
        texts, *paraphrases = ([entry.texts[draw] for entry in batch] for draw in range(self.draws + 1))
        continuations = {continued: [e.continuations[continued] for e in batch] for continued in self.samples}
        tokens = str.split if self.tokenizer is None else partial(plain_ids, self.tokenizer)
        evidence = Evidence(
            texts,
            statistics,
            norms,
            paraphrases,
            continuations=continuations,
            tokens=tokens,
            rarity=self.rarity,
            predicted=predicted,
        )
        return in_one_copy([detector.score(evidence) for detector in self.detectors])


def file_scores(
    detectors: Sequence[Detector], batch: Sequence[Entry], scores: torch.Tensor | np.ndarray, output: Output
) -> None:
    """Record the scores of a batch; a document with a score that is not finite is refused.

    Args:
        detectors: detectors of the scores.
        batch: entries whose `work` has role, text_key, sketch and truncated.
        scores: float64, (documents, detectors).
        output: output of the shard.
    """
    for entry, values in zip(batch, scores.tolist(), strict=True):
        document, prepared = entry.document, entry.work
        bad = [d.column for d, value in zip(detectors, values, strict=True) if not math.isfinite(value)]
        if bad:
            output.refuse(document, Reason.NON_FINITE_SCORE, f"not a finite number: {', '.join(bad)}")
            continue
        output.keep(
            document,
            role=prepared.role,
            group=document.group,
            n_tokens=entry.tokens,
            truncated=prepared.truncated,
            id_key=id_key(document.doc_id),
            text_key=prepared.text_key,
            sketch=prepared.sketch,
            **{d.column: value for d, value in zip(detectors, values, strict=True)},
        )
        output.tokens += entry.tokens
        output.n_truncated += prepared.truncated
