"""A trial: contaminate, audit, repeat, report. Finished work is reused.

A random part of the documents is trained into the base model, once per set of settings.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import torch
from rich.table import Table

from pipeline import __version__
from pipeline.answers.detection import DetectorScores, detection, roc
from pipeline.checks.held_out_auc import blocks_among
from pipeline.config.audit import AuditConfig
from pipeline.config.corpus import Role
from pipeline.config.models import ModelConfig
from pipeline.corpus.formats.base import Unreadable
from pipeline.detectors.registry import parse_detectors
from pipeline.models.chat_templates import ChatSettings
from pipeline.models.devices import give_back
from pipeline.models.load import check_model, fingerprint_model, open_model, open_picture_model
from pipeline.models.opened import LanguageModel
from pipeline.models.tokens import open_tokenizer
from pipeline.models.unchanged import check_same_files
from pipeline.models.weight_dtypes import processor_here
from pipeline.report.evaluation_page import roc_figures
from pipeline.report.tables import (
    Row,
    as_text,
    detector_rows,
    detector_table,
)
from pipeline.report.templates import FigureImage
from pipeline.results.status import duration
from pipeline.results.summary import Summary
from pipeline.run.digests import read_selected
from pipeline.run.dtypes import WorkerFacts, decide_types, earlier_arithmetic, note_arithmetic, with_types
from pipeline.run.machine import usable_cores
from pipeline.run.manifest import read_run
from pipeline.run.scored import Scored, read_scored
from pipeline.stages.chat_scoring import chat_settings
from pipeline.stages.registry import plan_stages
from pipeline.store.files import Store
from pipeline.store.lock import RunLock
from pipeline.store.receipts import json_digest
from pipeline.training.train import FinetuneConfig, TrainingOptions, TrainingStep, train, train_pictures
from pipeline.training.training_documents import TrainingDocument, training_documents
from pipeline.trial import table, trial_page
from pipeline.trial import trial_text as wording
from pipeline.trial.config import Point, TrialConfig, trial_audit
from pipeline.trial.progress import TrialProgress
from pipeline.trial.ranking import Results, check_ranking, ranking_rows, ranking_tables, read_results
from pipeline.trial.repeats import ROWS_SCHEMA, Pool, align_scores, known_of_documents, measure
from pipeline.trial.splits import Drawable, check_shifts, choose_trained, draw_split, positions
from pipeline.trial.trial_documents import Documents, check_inputs, read_documents
from pipeline.trial.verdict_trial import collection_rows, collection_table, measure_collections

LINE_SECONDS = 10.0
"""Seconds without a line of a training after which its next step is shown."""

PAGE = "trial.html"


@dataclass(frozen=True, slots=True, eq=False)
class Contaminated:
    """One contaminated model, and its training documents, which its audit does not know."""

    model: ModelConfig
    trained: np.ndarray  # bool, (documents,)
    folder: Path | None  # the weights that the training wrote; None if nothing was trained in


def plan_contamination(config: TrialConfig, base: TrialConfig, documents: Documents, index: int) -> Contaminated:
    """Choose the documents that the model of this index is trained on, and the folder of its weights.

    The number of calibration documents is that of the trial as written, so that a sweep over it shares the model.

    Args:
        config: configuration of the point.
        base: the trial without its sweep.
        documents: documents of the trial.
        index: index of the model, from 0.

    Raises:
        UserError: too few documents, or a model that cannot be read.
    """
    seed = config.contaminate.seed + index
    trained = choose_trained(documents.family, config.contaminate.share, base.roles(), seed)
    if not trained.any():
        return Contaminated(config.model, trained, None)
    places = np.flatnonzero(trained)
    training = _training(config, index, places.size)
    content = [[column[i] for i in places] for column in (documents.texts, *documents.contents)]
    rendering = [] if (chat := chat_rendering(config)) is None else [chat.fingerprint()]
    base_model = _fingerprint(config.model.model_dump_json())
    identity = json.dumps([base_model, training.settings(), *content, *rendering])
    folder = Path(os.path.abspath(config.work_folder)) / "models" / hashlib.sha256(identity.encode()).hexdigest()[:12]
    if training.method == "full":
        weights = {"path": str(folder), "gguf_file": None, "revision": None, "adapter": None}
        return Contaminated(config.model.model_copy(update=weights), trained, folder)
    return Contaminated(config.model.model_copy(update={"adapter": str(folder)}), trained, folder)


def contaminate(
    config: TrialConfig,
    planned: Contaminated,
    documents: Documents,
    index: int,
    on_step: Callable[[TrainingStep], None] | None = None,
) -> None:
    """Train the planned model unless its folder exists; a killed training resumes from its checkpoint.

    Raises:
        UserError: the errors of `train` or `train_pictures`.
    """
    if planned.folder is None or planned.folder.exists():
        return
    places = np.flatnonzero(planned.trained)
    training = _training(config, index, places.size)
    dtype = "float32" if training.method == "full" else training.dtype
    threads = torch.get_num_threads()
    torch.set_num_threads(usable_cores())
    opened = None
    try:
        opening = open_model if documents.pictures is None else open_picture_model
        opened = opening(config.model.model_copy(update={"dtype": dtype}), gpus=int(torch.cuda.is_available()))
        base = _fingerprint(config.model.model_dump_json())
        check_same_files(config.model, {}, base)
        options = TrainingOptions(on_step, base=base)
        if documents.pictures is None:
            learnt = learnt_documents(documents, config, places, opened)
            train(opened.model, opened.tokenizer, learnt, training, planned.folder, options)
        else:
            captioned = [(documents.pictures[i], documents.texts[i]) for i in places]
            train_pictures(opened, captioned, training, planned.folder, options)
    finally:
        torch.set_num_threads(threads)
        del opened
        gc.collect()
        give_back()


def chat_rendering(config: TrialConfig) -> ChatSettings | None:
    """The rendering of the chats that a trial trains on; None where the documents are no chats.

    Raises:
        UserError: as `chat_settings`.
    """
    if not config.documents.has_chats:
        return None
    files: dict[str, str] = {role: role for role in ("audit", *config.roles())}
    return chat_settings(trial_audit(config, config.model, files), ())


def learnable(documents: Documents, configs: Sequence[TrialConfig]) -> Documents:
    """The documents without chats of which a training or an audit of a point reads no answer. Raises UserError."""
    settings = [[one.model, one.chat, one.max_tokens, one.contaminate.max_tokens] for one in configs]
    reasons: dict[int, str] = {}
    for config in {repr(given): config for given, config in zip(settings, configs, strict=True)}.values():
        if documents.chats is not None and (rendering := chat_rendering(config)) is not None:
            positions = check_model(config.model)["max_tokens"] or sys.maxsize
            most = min(config.max_tokens, config.contaminate.max_tokens, positions)
            read = training_documents(open_tokenizer(config.model), documents.chats, rendering, most)
            reasons |= {place: one.reason for place, one in enumerate(read) if isinstance(one, Unreadable)}
    return documents.without(reasons) if reasons else documents


def learnt_documents(
    documents: Documents, config: TrialConfig, places: np.ndarray, lm: LanguageModel
) -> list[TrainingDocument]:
    """What a training on the documents at some positions learns: of chats the tokens that the audit scores."""
    rendering = chat_rendering(config)
    if documents.chats is None or rendering is None:
        return [documents.texts[i] for i in places]
    most = min(config.contaminate.max_tokens, lm.max_tokens or sys.maxsize)
    read = training_documents(lm.tokenizer, [documents.chats[i] for i in places], rendering, most)
    return [one for one in read if not isinstance(one, Unreadable)]  # `learnable` left out all others


def _training(config: TrialConfig, index: int, texts: int) -> FinetuneConfig:
    """The training of one model; no batch is larger than all texts."""
    settings = config.contaminate.model_dump(exclude={"share"})
    settings["seed"] += index
    settings["batch_size"] = min(settings["batch_size"], texts * settings["copies"])
    return FinetuneConfig(**settings)


@lru_cache(maxsize=64)
def _fingerprint(model: str) -> dict[str, str]:
    """Fingerprint of the base model without its dtype, because the training chooses one."""
    fingerprint = fingerprint_model(ModelConfig.model_validate_json(model))
    return {key: value for key, value in fingerprint.items() if key != "dtype"}


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """The results of a trial: rows for programs, and tables for display."""

    facts: dict[str, Any]
    tables: list[Table]
    folder: str
    reports: list[str]
    page: str  # path of the page


@dataclass(frozen=True, slots=True, eq=False)
class _Audit:
    """The audit of one contaminated model."""

    key: str
    model: ModelConfig
    pool: Pool
    report: str
    rows: list[Row]  # its own selections compared with the truth


class Audited(Protocol):
    """The result of the audit of a contaminated model."""

    @property
    def selections(self) -> Sequence[Summary]:
        """The summaries, in order."""

    @property
    def report(self) -> str:
        """Path of the page."""


def carry_out(
    config: TrialConfig,
    points: Sequence[Point],
    run_audit: Callable[[AuditConfig], Audited],
    say: Callable[[str], None],
    limit: int | None = None,
    results: str | None = None,
) -> TrialOutcome:
    """Carry out the unfinished parts of a trial; the same call resumes it.

    Args:
        config: the trial as written.
        points: the points of its sweep, from `pipeline.trial.config.load_trial`.
        run_audit: carries out the unfinished parts of an audit.
        say: called with each line of progress.
        limit: maximum number of documents; None: all.
        results: a Parquet file of per-item results whose ranking is repaired (`ranking.read_results`).

    Raises:
        UserError: bad input (exit 2), an incomplete audit (3), or a folder that another driver has locked (75).
    """
    if results is not None:
        check_ranking(points, results)
    check_inputs(config, points)
    check_shifts(points)
    store, work = Store(config.run), Store(config.work_folder)
    documents = learnable(read_documents(config, limit), [config, *(point.config for point in points)])
    item_results = read_results(results, documents.ids) if results is not None else None
    with ExitStack() as locks:
        held = {url: locks.enter_context(RunLock(Store(url), say)).held for url in {store.url, work.url}}
        store, work = held[store.url], held[work.url]
        config = _typed(config, work, say)
        points = [replace(point, config=_typed(point.config, work, say)) for point in points]
        with TrialProgress(store, sum(point.config.models for point in points), len(points)) as progress:
            trial = _Trial(config, run_audit, say, store, work, documents, progress)
            trial.read_words(points, limit)
            return trial.run(points, item_results)


def _typed(config: TrialConfig, work: Store, say: Callable[[str], None]) -> TrialConfig:
    """The trial with each dtype auto replaced by the decided type, recorded under the names of its models."""
    parts = (config.model, config.reference_model, config.paraphraser)
    models = [None if part is None else part.shown for part in parts]
    name = f"arithmetic-{json_digest(models)[:12]}.json"
    gpus = int(torch.cuda.is_available())
    types = decide_types(config, earlier_arithmetic(work, say, name), lambda: WorkerFacts(processor_here(gpus), 1), say)
    note_arithmetic(work, types, name)
    return with_types(config, types.types)


@dataclass(slots=True)
class _Trial:
    """One driver's work on a trial: audits by key, which points can share."""

    base: TrialConfig
    driver: Callable[[AuditConfig], Audited]
    say: Callable[[str], None]
    store: Store
    work: Store
    documents: Documents
    progress: TrialProgress
    audits: dict[str, _Audit] = field(default_factory=dict)
    shown: float = 0.0  # seconds of a training after which its last line was printed
    places: dict[str, np.ndarray] = field(default_factory=dict)
    words: dict[str, Any] = field(default_factory=dict)  # text transform -> words of the documents

    def read_words(self, points: Sequence[Point], limit: int | None) -> None:
        """Count words and compute positions along the shifts, where a point needs them."""
        configs = [self.base, *(point.config for point in points)]
        if any(config.split.shift is not None for config in configs):
            changes = {repr(config.text_transform): config.text_transform for config in configs}
            pictures = self.documents.pictures
            self.words = {
                name: known_of_documents(self.documents.read(change), pictures) for name, change in changes.items()
            }
        for by in dict.fromkeys(config.split.shift.by for config in configs if config.split.shift is not None):
            self.places[by] = positions(self.base, self.documents, by, limit)

    def run(self, points: Sequence[Point], item_results: Results | None) -> TrialOutcome:
        """Run every point, and write the tables and figures."""
        if self.documents.left_out:
            self.say("left out: " + ", ".join(f"{why} {n}" for why, n in sorted(self.documents.left_out.items())))
        audited = [[self.audit(point.config, index) for index in range(point.config.models)] for point in points]
        selections: list[Row] = []
        rankings: list[Row] = []
        by_model: list[Row] = []
        collections: list[Row] = []
        for number, (point, audits) in enumerate(zip(points, audited, strict=True)):
            shown = ", ".join(f"{path}={value}" for path, value in point.settings.items())
            self.say(f"repeats: point {number + 1} of {len(points)} {shown}".rstrip())
            repeats = self.once("repeats", measure, point.config, audits)
            selections += table.selection_rows(point.settings, point.config.selections, repeats)
            if point.config.models > 1:
                by_model += table.model_rows(point.settings, point.config.selections, repeats)
            if point.config.verdict:
                measured = self.once("collections", measure_collections, point.config, audits)
                collections += collection_rows(point.settings, measured)
            if item_results is not None:
                rankings += ranking_rows(point.settings, point.config, [a.pool for a in audits], item_results)
            self.progress.end_point()
        rows = {"selections": selections, "by_model": by_model, "collections": collections, "rankings": rankings}
        return self.write(points, audited, rows)

    # --- one contaminated model and its audit

    def audit(self, config: TrialConfig, index: int) -> _Audit:
        """Contaminate the model of this index and audit it, or read the finished results."""
        planned = plan_contamination(config, self.base, self.documents, index)
        if planned.folder is not None and not planned.folder.exists():
            count = int(planned.trained.sum())
            self.say(wording.training_line(index + 1, config.models, count))
            self.shown = 0.0
            contaminate(config, planned, self.documents, index, self.show_step)
        as_written: dict[str, Any] = {"split": self.base.split}
        if config.detectors == self.base.detectors:
            as_written["selections"] = self.base.selections
        audited = config.model_copy(update=as_written)
        key = self.score_key(audited, planned.model)
        if key not in self.audits:
            self.audits[key] = self.run_audit(audited, planned, key, index)
        self.progress.end_audit()
        return self.audits[key]

    def score_key(self, config: TrialConfig, model: ModelConfig) -> str:
        """A name for the scores, from all values that could change one and the documents."""
        files: dict[str, str] = {role: role for role in ("audit", *self.base.roles())}
        fingerprint = plan_stages(trial_audit(config, model, files))[-1].fingerprint
        return json_digest([fingerprint, self.documents.digest, sorted(files)])[:12]

    def run_audit(self, config: TrialConfig, planned: Contaminated, key: str, index: int) -> _Audit:
        """`seenset run` over the first split of the trial as written; all documents outside calibration are audited."""
        files = self.inputs(planned.trained, key, index)
        audit = trial_audit(config, planned.model, files, self.work.path(f"audits/{key}/run"))
        self.say(f"audit: {audit.run}")
        self.progress.begin_audit(audit.run)
        outcome = self.driver(audit)
        store = Store(audit.run)
        scored = read_scored(store, read_run(store)[1], config.near_copies)
        columns = [detector.column for detector in parse_detectors(audit.detectors)]
        wanted = ["doc_id", "id_key", "group", *columns]
        scores = pa.concat_tables(scored.table(receipt, wanted) for receipt in scored.receipts)
        pool = align_scores(scores, self.documents.ids, self.documents.family, planned.trained, columns)
        words = self.words.get(repr(config.text_transform))
        pool = replace(pool, finetuned=self.finetuned(scored), places=self.places, words=words)
        truth = pa.table({"doc_id": self.documents.ids, "trained": planned.trained})
        self.store.write_table(f"truth/{key}.parquet", truth)
        audited = self.work.read_table(f"audits/{key}/input/audit.parquet", ["id"])["id"].to_pylist()
        members = {doc_id for doc_id, trained in zip(pool.ids, pool.trained, strict=True) if trained}
        rows = []
        for summary in outcome.selections:
            selected = read_selected(store, summary.name, ["doc_id"])["doc_id"].to_pylist()
            rows.append({"audit": key, **table.audit_row(summary, selected, audited, members)})
        return _Audit(key, planned.model, pool, outcome.report, rows)

    def finetuned(self, scored: Scored) -> dict[Role, np.ndarray]:
        """The documents that the audit's adapters were trained on, by the role that they would have had."""
        place = {doc_id: index for index, doc_id in enumerate(self.documents.ids)}
        masks: dict[Role, np.ndarray] = {}
        for role in self.base.roles():
            mask = np.zeros(len(self.documents), dtype=bool)
            for receipt in scored.of(role):
                ids = scored.table(receipt, ["doc_id"], finetuned=True)["doc_id"].to_pylist()
                mask[[place[ids[row]] for row in scored.finetuned.get(receipt.shard, ())]] = True
            if mask.any():
                masks[role] = mask
        return masks

    def inputs(self, trained: np.ndarray, key: str, index: int) -> dict[str, str]:
        """The audit's input files, without labels; written once, so that a changed split repeats no scoring."""
        known = self.base.roles()
        folder = f"audits/{key}/input"
        if not self.work.exists(f"{folder}/audit.parquet"):
            shift = self.base.split.shift
            lean = None if shift is None else shift.strength * self.places[shift.by]
            documents = Drawable(trained, self.documents.family, lean=lean)
            drawn = draw_split(documents, known, self.base.split, self.base.seed, index, 0)
            rest = np.ones(len(self.documents), dtype=bool)
            for role in known:
                rest[drawn.of(role)] = False
                self.work.write_table(f"{folder}/{role}.parquet", self.documents.table(drawn.of(role)))
            self.work.write_table(f"{folder}/audit.parquet", self.documents.table(np.flatnonzero(rest)))
        return {role: self.work.path(f"{folder}/{role}.parquet") for role in ("audit", *known)}

    # --- many splits over its scores

    def once(
        self,
        folder: str,
        measured: Callable[[Pool, TrialConfig, int], pa.Table],
        config: TrialConfig,
        audits: Sequence[_Audit],
    ) -> pa.Table:
        """Measure the repeats over each model's scores, once per question."""
        settings = config.model_dump(mode="json", include={"split", "selections", "repeats", "seed"})
        roles = {str(role): amount for role, amount in config.roles().items()}
        tables = []
        for index, audit in enumerate(audits):
            identity = [audit.key, index, settings, roles, __version__, ROWS_SCHEMA.names]
            name = f"{folder}/{json_digest(identity)[:12]}.parquet"
            if not self.store.exists(name):
                self.store.write_table(name, measured(audit.pool, config, index))
            tables.append(self.store.read_table(name))
        return pa.concat_tables(tables)

    # --- results

    def detectors(self, points: Sequence[Point], audited: Sequence[Sequence[_Audit]]) -> tuple[list[Row], list[str]]:
        """Rows of the detectors, once for points that share their audits, and the settings that distinguish these."""
        keys = [tuple(audit.key for audit in audits) for audits in audited]
        values: dict[str, dict[tuple[str, ...], set[str]]] = {path: {} for path in points[0].settings}
        for point, key in zip(points, keys, strict=True):
            for path, value in point.settings.items():
                values[path].setdefault(key, set()).add(json.dumps(value))
        paths = [
            path
            for path, by_audits in values.items()
            if len(by_audits) > 1 and all(len(settings) == 1 for settings in by_audits.values())
        ]
        rows: list[Row] = []
        for place, (point, audits) in enumerate(zip(points, audited, strict=True)):
            if keys[place] in keys[:place]:
                continue
            detections = {
                column: detection([_sample(audit.pool, column) for audit in audits])
                for column in audits[0].pool.scores.columns
            }
            settings = {path: point.settings[path] for path in paths}
            rows += detector_rows(settings, detections, len(audits))
        return rows, paths

    def write(
        self,
        points: Sequence[Point],
        audited: Sequence[Sequence[_Audit]],
        repeated: dict[str, list[Row]],
    ) -> TrialOutcome:
        """Write rows, tables, figures and the page."""
        detectors, varied = self.detectors(points, audited)
        settings, selections = list(points[0].settings), repeated["selections"]
        audits = [row for audit in self.audits.values() for row in audit.rows]
        of_detectors = detector_table(detectors, varied, wording.detector_title(detectors))
        of_detectors.caption = wording.detector_caption(detectors)
        tables = [
            of_detectors,
            table.audit_table(audits),
            table.selection_table(selections, settings),
            *([table.model_table(repeated["by_model"], settings)] if repeated["by_model"] else []),
            *([collection_table(repeated["collections"], settings)] if repeated["collections"] else []),
            *ranking_tables(repeated["rankings"], settings),
        ]
        rows = {"detectors": detectors, "audits": audits, **repeated}
        for name, table_rows in rows.items():
            if table_rows:
                self.store.write_json(f"{name}.json", table_rows)
                self.store.write_table(f"{name}.parquet", table.to_arrow(table_rows))
        self.store.write("tables.txt", as_text(tables).encode())
        images = [
            *trial_page.selection_figures(selections, settings),
            *self.detector_images(detectors, varied, audited[0][0].pool),
        ]
        for image in images:
            self.store.write(f"figures/{image.file}", image.svg)
        for name in set(self.store.names("figures")) - {image.file for image in images}:
            self.store.remove(f"figures/{name}")
        reports = [audit.report for audit in self.audits.values()]
        models = [{"audit": audit.key, **audit.model.model_dump()} for audit in self.audits.values()]
        facts = {
            "documents": len(self.documents),
            "left_out": self.documents.left_out,
            "config": self.base.model_dump(mode="json"),
            "version": __version__,
            "models": models,
            **rows,
        }
        self.store.write_json("trial.json", {**facts, "reports": reports})
        written = trial_page.trial_page(self.base, facts, settings, tables, images, reports)
        self.store.write(PAGE, written.encode("utf-8", "replace"))
        return TrialOutcome(facts, tables, self.store.url, reports, f"{self.store.url}/{PAGE}")

    def detector_images(self, rows: Sequence[Row], varied: Sequence[str], pool: Pool) -> list[FigureImage]:
        """AUC of the detectors over the sweep, or their ROC curves on the first model."""
        if varied:
            return [trial_page.detector_figure(rows, varied)]
        areas = {row["detector"]: row["auc"] for row in rows}
        samples = {column: _sample(pool, column) for column, area in areas.items() if area is not None}
        curves = {column: roc(sample.trained, sample.untrained) for column, sample in samples.items()}
        return roc_figures(curves, areas, ("trained", "untrained"))

    def show_step(self, step: TrainingStep) -> None:
        """The first step, about every tenth of a training, and a step after ten seconds without a line."""
        silent = step.seconds - self.shown
        if step.step == 1 or step.step % max(1, step.steps // 10) == 0 or silent >= LINE_SECONDS:
            self.shown = step.seconds
            remaining = step.seconds / step.step * (step.steps - step.step)
            self.say(f"  step {step.step}/{step.steps}  loss {step.loss:.2f}  {duration(remaining)} left")


def _sample(pool: Pool, column: str) -> DetectorScores:
    """A detector's scores of the trained and of the untrained documents, and the blocks of dependent ones."""
    trained, untrained = (np.flatnonzero(pool.scored & kind) for kind in (pool.trained, ~pool.trained))
    scores, both = pool.scores.columns[column], np.concatenate([trained, untrained])
    blocks = blocks_among(pool.family[both], pool.scores.group_numbers[both], pool.trained[both])
    return DetectorScores(scores[trained], scores[untrained], blocks, pool.scores.keys[both])
