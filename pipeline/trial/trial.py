"""A trial: contaminate, audit, repeat, report. All that is finished is used again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import torch
from rich.table import Table

from pipeline import __version__
from pipeline.audit.arithmetic import Deciding, decide_types, earlier_arithmetic, note_arithmetic, with_types
from pipeline.audit.detection import DetectorScores, detection, roc
from pipeline.audit.digests import read_selected
from pipeline.audit.halvings import blocks_among
from pipeline.audit.manifest import read_run
from pipeline.audit.scored import Scored, read_scored
from pipeline.audit.status import duration
from pipeline.audit.summary import Summary
from pipeline.config.audit import AuditConfig
from pipeline.config.corpus import Role
from pipeline.config.models import ModelConfig, display_name
from pipeline.detectors.registry import parse_detectors
from pipeline.models.arithmetic import processor_here
from pipeline.report.evaluation_page import roc_figures
from pipeline.report.names import model_name
from pipeline.report.svg import FigureImage
from pipeline.report.tables import (
    PageTable,
    Row,
    as_text,
    cell,
    detector_rows,
    detector_table,
    labels,
    of_numbers,
    page_table,
    readable,
)
from pipeline.report.templates import render
from pipeline.report.wording import trial as wording
from pipeline.stages.registry import stages_of
from pipeline.store.files import Store
from pipeline.store.lock import RunLock
from pipeline.training.train import TrainingStep
from pipeline.trial import figures, table
from pipeline.trial.collection import collection_rows, collection_table, measure_collections
from pipeline.trial.config import Point, TrialConfig, audit_of
from pipeline.trial.contaminate import Contaminated, contaminate, plan_contamination
from pipeline.trial.documents import Documents, check_inputs, read_documents
from pipeline.trial.learn import learn
from pipeline.trial.progress import TrialProgress
from pipeline.trial.ranking import Results, ranking_rows, ranking_tables, read_results
from pipeline.trial.repeats import ROWS_SCHEMA, Pool, known_of_documents, measure, pool_of
from pipeline.trial.shift import check_shifts, positions
from pipeline.trial.splits import Drawable, draw_split

LINE_SECONDS = 10.0
"""Without a line of a training, after which its next step is shown."""

PAGE = "trial.html"
MOST_ROWS = 12
"""Rows of the overview; the table below it holds all of them."""


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """The results of a trial: rows for machines, tables for people."""

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
    rows: list[Row]  # its own selections held against the truth


class Audited(Protocol):
    """How the audit of a contaminated model ended."""

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
    learn_file: str | None = None,
) -> TrialOutcome:
    """Do what is not done yet of a trial. The same call again resumes.

    Args:
        config: the trial as written.
        points: the places of its sweep, from `pipeline.trial.config.load_trial`.
        run_audit: does what is not done yet of an audit.
        say: called with each line of progress.
        limit: only the first documents.
        results: a Parquet file of per-item results whose ranking is to be repaired (`ranking.read_results`).
        learn_file: the file of what is learnt from the models of the first point (`learn.learn`).

    Raises:
        UserError: bad input (exit 2), an incomplete audit (3), or a folder that another driver holds (75).
    """
    check_inputs(config, points)
    check_shifts(points)
    store, work = Store(config.run), Store(config.work_folder)
    documents = read_documents(config, limit)
    item_results = read_results(results, documents.ids) if results is not None else None
    with ExitStack() as locks:
        held = {url: locks.enter_context(RunLock(Store(url), say)).held for url in {store.url, work.url}}
        store, work = held[store.url], held[work.url]
        config = _typed(config, work, say)
        points = [replace(point, config=_typed(point.config, work, say)) for point in points]
        with TrialProgress(store, sum(point.config.models for point in points), len(points)) as progress:
            trial = _Trial(config, run_audit, say, store, work, documents, progress)
            trial.read_words(points, limit)
            return trial.run(points, item_results, learn_file)


def _typed(config: TrialConfig, work: Store, say: Callable[[str], None]) -> TrialConfig:
    """The trial with decided types in the place of dtype auto, which are recorded under the names of its models."""
    parts = (config.model, config.reference_model, config.paraphraser)
    models = [None if part is None else part.shown for part in parts]
    name = f"arithmetic-{_digest(models)}.json"
    gpus = int(torch.cuda.is_available())
    types = decide_types(config, earlier_arithmetic(work, say, name), lambda: Deciding(processor_here(gpus), 1), say)
    note_arithmetic(work, types, name)
    return with_types(config, types.types)


@dataclass(slots=True)
class _Trial:
    """One driver's work on a trial: audits by key, so that points share them."""

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
        """Count words and place the documents along the shifts, where a point needs that."""
        configs = [self.base, *(point.config for point in points)]
        if any(config.reads_words for config in configs):
            changes = {repr(config.text_transform): config.text_transform for config in configs}
            pictures = self.documents.pictures
            self.words = {
                name: known_of_documents(self.documents.read(change), pictures) for name, change in changes.items()
            }
        for by in dict.fromkeys(config.split.shift.by for config in configs if config.split.shift is not None):
            self.places[by] = positions(self.base, self.documents, by, limit)

    def run(self, points: Sequence[Point], item_results: Results | None, learn_file: str | None) -> TrialOutcome:
        """Every point, then the tables and figures, and what is learnt from the models of the first point."""
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
        outcome = self.write(points, audited, rows)
        if learn_file is not None:
            config, pools = points[0].config, [audit.pool for audit in audited[0]]
            learnt = learn(learn_file, config, pools, self.documents.read(config.text_transform))
            self.say(wording.learnt_line(learn_file, learnt.fingerprint, len(learnt.features), len(pools)))
        return outcome

    # --- one contaminated model and its audit

    def audit(self, config: TrialConfig, index: int) -> _Audit:
        """Contaminate the model of this index and audit it, or read what is there."""
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
        key = self.key_of(audited, planned.model)
        if key not in self.audits:
            self.audits[key] = self.run_audit(audited, planned, key, index)
        self.progress.end_audit()
        return self.audits[key]

    def key_of(self, config: TrialConfig, model: ModelConfig) -> str:
        """A name for the scores: all that could change one, and the documents."""
        files: dict[str, str] = {role: role for role in ("audit", *self.base.roles())}
        fingerprint = stages_of(audit_of(config, model, files))[-1].fingerprint
        return _digest([fingerprint, self.documents.digest, sorted(files)])

    def run_audit(self, config: TrialConfig, planned: Contaminated, key: str, index: int) -> _Audit:
        """`seenset run` over the first split of the trial as written: all that does not calibrate is audited."""
        files = self.inputs(planned.trained, key, index)
        audit = audit_of(config, planned.model, files, self.work.path(f"audits/{key}/run"))
        self.say(f"audit: {audit.run}")
        self.progress.begin_audit(audit.run)
        outcome = self.driver(audit)
        store = Store(audit.run)
        scored = read_scored(store, read_run(store)[1], config.near_copies)
        columns = [detector.column for detector in parse_detectors(audit.detectors)]
        wanted = ["doc_id", "id_key", "group", *columns]
        scores = pa.concat_tables(scored.table(receipt, wanted) for receipt in scored.receipts)
        pool = pool_of(scores, self.documents.ids, self.documents.family, planned.trained, columns)
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
        """Which documents the audit's adapters were trained on, by the role that they would have had."""
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
        """The audit's input files, without a label; written once, so that a changed split scores nothing anew."""
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
        """What is measured of the repeats over each model's scores, computed once for the same question."""
        settings = config.model_dump(mode="json", include={"split", "selections", "repeats", "seed"})
        roles = {str(role): amount for role, amount in config.roles().items()}
        tables = []
        for index, audit in enumerate(audits):
            name = f"{folder}/{_digest([audit.key, index, settings, roles, __version__, ROWS_SCHEMA.names])}.parquet"
            if not self.store.exists(name):
                self.store.write_table(name, measured(audit.pool, config, index))
            tables.append(self.store.read_table(name))
        return pa.concat_tables(tables)

    # --- what it comes to

    def detectors(self, points: Sequence[Point], audited: Sequence[Sequence[_Audit]]) -> tuple[list[Row], list[str]]:
        """Rows of the detectors, once for points that share their audits, and the settings that tell these apart."""
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
            *figures.selection_figures(selections, settings),
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
        page = trial_page(self.base, facts, settings, tables, images, reports)
        self.store.write(PAGE, page.encode("utf-8", "replace"))
        return TrialOutcome(facts, tables, self.store.url, reports, f"{self.store.url}/{PAGE}")

    def detector_images(self, rows: Sequence[Row], varied: Sequence[str], pool: Pool) -> list[FigureImage]:
        """AUC of the detectors over the sweep, or their ROC curves on the first model."""
        if varied:
            return [figures.detector_figure(rows, varied)]
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


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def trial_page(
    config: TrialConfig,
    facts: Mapping[str, Any],
    settings: Sequence[str],
    tables: Sequence[Table],
    images: Sequence[FigureImage],
    reports: Sequence[str],
) -> str:
    """The page as HTML; every text is escaped, and nothing is loaded from anywhere.

    Args:
        config: the trial as written.
        facts: of `TrialOutcome`.
        settings: of the sweep.
        tables: as the command prints them.
        images: the figures.
        reports: addresses of the audits' reports.
    """
    shifted = config.split.shift is not None or any(path.startswith("split.shift") for path in settings)
    return render(
        "trial.html",
        model=model_name(config.model),
        path=display_name(config.model),
        overview=overview(facts["selections"], settings),
        verification=wording.verification(facts["selections"], settings, config.models, shifted),
        tables=[page_table(table) for table in tables],
        figures=images,
        facts=facts,
        left_out=", ".join(f"{why.replace('_', ' ')} {n:,}" for why, n in sorted(facts["left_out"].items())),
        reports=reports,
    )


def overview(rows: Sequence[Row], settings: Sequence[str]) -> PageTable:
    """The selections at a glance; of more than MOST_ROWS those that the repeats contradict come first."""
    shown = list(readable(rows, settings))
    short = len(shown) > MOST_ROWS
    if short:
        shown.sort(key=lambda row: not (row["contradicted"] or row.get("bound_contradicted")))
    caption = wording.overview_caption(MOST_ROWS, len(shown)) if short else None
    figures, title = of_numbers("target", "FDR", "power"), wording.OVERVIEW_TITLE
    columns = [*labels(settings), "selection", "procedure"]
    table = Table(*columns, *figures, "the repeats", title=title, caption=caption)
    for row in shown[:MOST_ROWS]:
        cells = f"{row['target']:g}", cell(row, "fdr"), cell(row, "power"), wording.outcome(row)
        table.add_row(*(str(row[setting]) for setting in settings), row["selection"], row["procedure"], *cells)
    return page_table(table)
