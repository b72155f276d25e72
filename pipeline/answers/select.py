"""From score shards to selections: folds of the shards, the decision, and the files of the answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.answers.collection_test import version_part
from pipeline.answers.selected import (
    SMOOTHED,
    STRENGTH,
    GroupTally,
    ScoreHistogram,
    ShardAnswer,
    Total,
    alpha_curve,
    histogram,
    with_excerpts,
    with_strength,
    write_selected,
)
from pipeline.answers.summarise import make_summary, summary_in_run
from pipeline.answers.top_documents import (
    MOST_THUMBNAILS,
    Reread,
    kept_tokens,
    pick_top_documents,
    write_attributions,
    write_thumbnails,
)
from pipeline.checks.blind import NO_BLIND_TEST, BlindTest, blind_file
from pipeline.checks.check import AnswerFacts, Overlap
from pipeline.checks.dependent_documents import MOST, NO_GROUPS, RoleDocuments, SelectionBlocks, read_sketches
from pipeline.checks.overlap import NO_OVERLAP, find_overlaps
from pipeline.checks.shuffle import VersionDraws, read_version_draws
from pipeline.config.audit import AuditConfig
from pipeline.config.corpus import ROLES, Role
from pipeline.config.kinds import Capability
from pipeline.config.models import ModelConfig
from pipeline.config.selection import HISTORY, NULL_ROLE, SOUGHT_ROLE, SelectionConfig
from pipeline.corpus.documents import id_key
from pipeline.corpus.reasons import Reason
from pipeline.errors import FileError, UserError
from pipeline.models.devices import give_back
from pipeline.results.document_checks import run_blind_test
from pipeline.results.history import HISTORY_FILE, Command, note_answers
from pipeline.results.summary import Summary, summary_file
from pipeline.run.digests import (
    DOCUMENTS,
    changed_file,
    check_answer,
    digests_file,
    file_digests,
    read_digests,
    scores_digest,
    verdicts_file,
    write_digests,
)
from pipeline.run.records import (
    AUDITED_RECORD,
    DUPLICATES,
    KEYS_FILE,
    MANIFEST_FILE,
    SHARDS_FILE,
    VERDICT_FILE,
    write_record,
)
from pipeline.run.remedies import already_audited_note, made_again_note
from pipeline.run.scored import Scored, ShardMap, Span, find_span, role_scores
from pipeline.selection.calibrations import calibration_of
from pipeline.selection.engine import answer
from pipeline.selection.folds import EMPTY, Answer, Fold, Query, RoleScores, SelectionInput, run_queries
from pipeline.selection.procedures import procedure_of
from pipeline.selection.procedures.versions import answer_versions
from pipeline.selection.schedule import Level, Slot
from pipeline.selection.smoothing import IdDigest, model_key
from pipeline.stages.events import VERSIONS
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt, read_filed

Claiming = Callable[[], Mapping[str, Slot]]
"""Takes the place of a scan in its schedule and returns it by the name of each selection."""

_RUN_FILES = (
    MANIFEST_FILE,
    SHARDS_FILE,
    HISTORY_FILE,
    AUDITED_RECORD,
    KEYS_FILE,
    DUPLICATES,
    *(blind_file(role) for role in ROLES if role != "audit"),
)
"""Files of the run that state a part of every answer, where they exist."""


@dataclass(frozen=True, slots=True)
class Answering:
    """What a command does with the answers of a run."""

    command: Command = "run"  # command that is recorded in the history
    texts: bool = True  # whether answers show the beginning of selected documents, and tokens are written
    reread: Reread | None = None  # reads selected documents with the model again; None: no model is used
    say: Callable[[str], None] = lambda line: None  # prints a line
    claim: Claiming | None = None  # for a scan of a schedule; called once, before any file of an answer exists


def select_all(
    config: AuditConfig, scored: Scored, limit: int | None, each: ShardMap, how: Answering | None = None
) -> list[Summary]:
    """Answer every configured selection and write the answers; returns the summaries, in order.

    Args:
        config: the audit's configuration.
        scored: its finished score shards.
        limit: the most documents of each role that were read; None when all were.
        each: reads the shards.
        how: treatment of the answers; None: `Answering()`.

    Raises:
        UserError: no calibration or audit documents, shared documents without `overlap: drop`, damaged scores.
    """
    how = how or Answering()
    names = [selection.name for selection in config.selections]
    for line in damaged_answers(scored.store, names, whole=scored.store.local, shared=False):
        how.say(line)
    if scored.n_judged():
        how.say(already_audited_note(scored.n_judged(), config.against, scored.has_news()))
    scored = _keeping_answers(scored)
    if not scored.has_news():
        config = config.model_copy(update={"selections": []})
    if not config.selections:
        note_answers(scored.store, config, how.command, [])
        _remove_others(config, scored)
        return []
    pictured = how.texts and config.corpus.has_pictures
    attributed = Capability.ATTRIBUTED in config.corpus.kind.offers
    rereads = how.texts and isinstance(config.model, ModelConfig) and attributed
    shown = config.evidence if rereads else 0
    kept = kept_tokens(scored) if shown else None  # from the answers that are replaced
    with ThreadPoolExecutor(1, "seenset-copies") as executor:
        tasks, documents = _tasks(config, scored, limit, how.texts, each, executor)
        if how.claim is not None:
            tasks = _claimed(tasks, how.claim)
            config = config.model_copy(update={"selections": [task.selection for task in tasks]})
        answers = _answer_all(tasks, each)
    give_back()  # memory of the sorting threads, before selected rows are merged
    tops = [
        pick_top_documents(one.selection, made, total.selected.first(shown), one.overlap)
        for one, made, total in answers
    ]
    most = MOST_THUMBNAILS if pictured else 0
    pictures = {one.selection.name: total.selected.first(most) for one, _, total in answers}
    summaries = [task.summarise(answer, total, documents) for task, answer, total in answers]
    note_answers(scored.store, config, how.command, summaries)  # before an answer can be read
    files = _write_files(scored, answers, summaries, pictures)
    _remove_others(config, scored)
    attributions = {} if kept is None else write_attributions(scored, config, tops, kept, how.reread, how.say)
    files = {name: {**written, **attributions.get(name, {})} for name, written in files.items()}
    write_answers(scored.store, summaries, files, scores_digest(scored.of("audit")))
    give_back()  # memory of the merge, before figures are drawn
    return summaries


def _keeping_answers(scored: Scored) -> Scored:
    """The scores with a store that leaves equal files of answers untouched, and withdraws all answers before a change.

    The verdict, which is of these answers, goes with them.
    """
    store = scored.store
    digests = [digests_file(name) for name in store.names("selection") if name != HISTORY]
    if answered := [name for name in digests if store.exists(name)]:
        return replace(scored, store=store.keeping(VERDICT_FILE, *answered))
    store.remove(VERDICT_FILE)
    return scored


def _write_files(
    scored: Scored,
    answers: Sequence[tuple[_SelectionTask, Answer, Total]],
    summaries: Sequence[Summary],
    pictures: Mapping[str, pa.Table],
) -> dict[str, dict[str, str]]:
    """Write the files of all answers except token attributions and summaries; SHA-256 by name, with those of the run.

    Args:
        scored: the score shards.
        answers: result of `_answer_all`.
        summaries: summaries of these answers, in their order.
        pictures: by selection, the documents that get thumbnails.
    """
    shared = run_digests(scored.store)
    files = {
        summary.name: {**shared, **task.write(summary, made, total)}
        for (task, made, total), summary in zip(answers, summaries, strict=True)
    }
    thumbnails = write_thumbnails(scored, pictures)
    return {name: {**written, **thumbnails[name]} for name, written in files.items()}


def _claimed(tasks: Sequence[_SelectionTask], claim: Claiming) -> list[_SelectionTask]:
    """The tasks of a scan at the level of its place in a schedule."""
    for task in tasks:
        next(task.query(), None)  # refuses known documents that cannot calibrate, before a place is taken
    slots = claim()
    return [task.placed(slots[task.selection.name]) for task in tasks]


def _tasks(
    config: AuditConfig, scored: Scored, limit: int | None, texts: bool, each: ShardMap, executor: Executor
) -> tuple[list[_SelectionTask], dict[Role, RoleDocuments]]:
    """The configured selections, with shared data: spans of scores, checks and dependent documents."""
    columns = _columns(config.selections)
    if config.corpus.has_versions:
        span, checked = find_span(scored, ["audit"], columns, each), (NO_OVERLAP, NO_BLIND_TEST)
        draws = read_version_draws(config, scored, each)
        tasks = [_SelectionTask(config, one, scored, *checked, span, limit, texts) for one in config.selections]
        return [replace(task, draws=draws) for task in tasks], {}
    roles = dict.fromkeys(["audit", *(NULL_ROLE[s.direction] for s in config.selections)])
    overlaps = find_overlaps(scored, [role for role in roles if role != "audit"], config, each)
    searches: dict[Role, Future[RoleDocuments]] = {}
    for role in roles:
        keep = overlaps[role].keep if role in overlaps else None
        sketched = read_sketches(scored, role, each, keep, MOST if role == "audit" else None)
        searches[role] = executor.submit(sketched.list_near_duplicates, config.near_copies)
    span = find_span(scored, roles, columns, each)
    blind_tests: dict[Role, BlindTest] = {role: run_blind_test(scored, role, config) for role in overlaps}
    documents = {role: search.result() for role, search in searches.items()}
    tasks = []
    for selection in config.selections:
        role = NULL_ROLE[selection.direction]
        tests, keep = (overlaps[role], blind_tests[role]), overlaps[role].keep
        key = b"" if selection.ranks == "whole" else _draw_key(config, scored, role, each)
        blocks = SelectionBlocks.of(scored, selection, (documents["audit"], documents[role]), keep, config.seed)
        tasks.append(_SelectionTask(config, selection, scored, *tests, span, limit, texts, blocks, key=key))
    return tasks, documents


def _draw_key(config: AuditConfig, scored: Scored, role: Role, each: ShardMap) -> bytes:
    """The key of the draws of smoothed ranks: of the audited model, or where its content is unknown, of all ids.

    These are of the audited documents, also those without scores, and of the scored ones of the null role.
    """
    if isinstance(config.model, ModelConfig):
        return model_key(scored.receipts[0].fingerprint["model"])

    def read_ids(receipt: Receipt) -> IdDigest:
        digest = IdDigest.of(scored.table(receipt, ["id_key"])["id_key"].to_numpy())
        if receipt.role != "audit" or receipt.quarantine is None:
            return digest
        rows = read_filed(scored.store, receipt, ["doc_id", "reason"], receipt.quarantine)
        distinct = rows.filter(pc.not_equal(rows["reason"], Reason.DUPLICATE_ID))["doc_id"].to_pylist()
        return digest + IdDigest.of(np.array([id_key(name) for name in distinct], dtype=np.int64))

    return sum(each([*scored.of("audit"), *scored.of(role)], read_ids), IdDigest()).key()


def _columns(selections: Sequence[SelectionConfig]) -> list[str]:  # score columns
    return sorted({column for selection in selections for column in selection.detectors})


def _answer_all(tasks: Sequence[_SelectionTask], each: ShardMap) -> list[tuple[_SelectionTask, Answer, Total]]:
    """Decide all selections in shared folds of the audit shards, then judge every document in one further reading.

    Args:
        tasks: at least one task, all of one run.
        each: reads the shards.

    Raises:
        UserError: no audit documents, or a selection that cannot be answered.
    """
    scored = tasks[0].scored
    detectors = _columns([task.selection for task in tasks])
    versions = [VERSIONS] if tasks[0].config.corpus.has_versions else []
    columns = ["doc_id", "row", "id_key", "text_key", "group", *detectors, *versions]

    def run_folds(folds: Sequence[tuple[int, Fold]]) -> dict[int, Any]:
        def of_shard(receipt: Receipt) -> list[Any]:
            table = scored.table(receipt, columns)
            return [fold.of_shard(tasks[index].batch(table, receipt)) for index, fold in folds]

        merged: dict[int, Any] = {}
        for parts in each(scored.of("audit"), of_shard):
            for (index, fold), part in zip(folds, parts, strict=True):
                merged[index] = fold.merge(merged[index], part) if index in merged else part
        return merged

    answers = run_queries([task.query() for task in tasks], run_folds)
    for _ in each([receipt for receipt in scored.of("audit") if receipt.quarantine], scored.check_quarantine):
        pass  # before an earlier answer is changed

    def judge(receipt: Receipt) -> list[ShardAnswer]:
        table = scored.table(receipt, columns)
        parts = [task.judge(table, receipt, answer) for task, answer in zip(tasks, answers, strict=True)]
        if tasks[0].texts:
            parts = with_excerpts(parts, scored.shards[receipt.shard])
        return [task.ordered(part) for task, part in zip(tasks, parts, strict=True)]

    totals: list[Total] = []
    for parts in each(scored.of("audit"), judge):
        totals = totals or [Total.like(part) for part in parts]
        for total, part in zip(totals, parts, strict=True):
            total.add(part)
    return list(zip(tasks, answers, totals, strict=True))


def _remove_others(config: AuditConfig, scored: Scored) -> None:
    """Remove the answers of selections that are no longer configured, because they may be of other scores."""
    configured = {selection.name for selection in config.selections}
    for name in scored.store.names("selection"):
        if name not in configured and name != HISTORY:
            scored.store.remove_folder(f"selection/{name}")


@dataclass(frozen=True, slots=True)
class _SelectionTask:
    """One selection of a run: decides it and writes its files, the summary last."""

    config: AuditConfig
    selection: SelectionConfig
    scored: Scored
    overlap: Overlap  # overlap of the null role
    blind_test: BlindTest  # blind test of the null role
    span: Span  # span of all scores
    limit: int | None
    texts: bool  # whether the beginning of selected documents is shown
    blocks: SelectionBlocks | None = None  # None: documents have versions
    slot: Slot | None = None  # for a scan of a schedule
    draws: VersionDraws | None = None  # of documents with versions
    key: bytes = b""  # of the draws of smoothed ranks

    @property
    def folder(self) -> str:
        return f"selection/{self.selection.name}"

    @property
    def null_role(self) -> Role:
        """The role whose documents calibrate."""
        return NULL_ROLE[self.selection.direction]

    @property
    def schema(self) -> pa.Schema:
        """Columns of `selection/NAME/documents/*.parquet`: verdict, scores that the selection read, and place."""
        verdict = [("doc_id", pa.string()), ("p_value", pa.float64()), ("selected", pa.bool_())]
        scores = [(detector, pa.float64()) for detector in self.selection.detectors]
        return pa.schema([*verdict, *scores, ("source", pa.string()), ("row", pa.int64())])

    @property
    def grouped(self) -> bool:
        return calibration_of(self.selection.calibration).grouped

    @property
    def quarantined(self) -> int:
        return sum(self.scored.quarantined("audit").values())

    def batch(self, table: pa.Table, receipt: Receipt) -> RoleScores:
        """A shard of audit documents in the form that this selection reads."""
        batch = role_scores(table, self.selection.detectors, self.grouped, receipt.data)
        if self.draws is not None:
            detectors = self.selection.detectors
            return replace(batch, versions=version_part(table, self.config, detectors, self.draws.left_out))
        if self.blocks is not None and self.blocks.places is not None and self.blocks.learning is not None:
            places = (one.of_shard(receipt.shard, len(table)) for one in (self.blocks.places, self.blocks.learning))
            place, learning = places
            return replace(batch, place=place, teaches=learning == 0)
        return batch

    @property
    def keep(self) -> np.ndarray:
        """Whether each document of the null role calibrates, bool."""
        return self.overlap.keep if self.blocks is None else self.blocks.keep

    def known(self) -> RoleScores:
        """The calibration documents of the null role."""
        batch, keep = self.scored.batches(self.null_role, self.selection.detectors, self.grouped), self.keep
        groups = batch.groups.filter(pa.array(keep)) if batch.groups is not None else None
        return RoleScores(batch.matrix[keep], groups, batch.keys[keep])

    def placed(self, slot: Slot) -> _SelectionTask:
        """The same task at the level of a place in a schedule."""
        selection = self.selection.model_copy(update={"alpha": float(slot.level)})
        return replace(self, selection=selection, slot=slot)

    def query(self) -> Query[Answer]:
        """The folds that the answer needs."""
        if self.config.corpus.has_versions:
            return answer_versions(self.selection, self.config.seed, self.quarantined)
        sought = SOUGHT_ROLE[self.selection.direction]
        needed = procedure_of(self.selection.procedure).reads_sought
        others = self.scored.batches(sought, self.selection.detectors, self.grouped) if needed else EMPTY
        level = Level.of(self.selection, self.slot)
        dependence = None if self.blocks is None else self.blocks.dependence
        inputs = self.config.seed, self.known(), others, self.quarantined, dependence, self.key
        return answer(SelectionInput(self.selection, level, *inputs))

    @property
    def edges(self) -> np.ndarray:
        """Bins of the first detector's scores, for the report."""
        return self.span.edges(self.selection.detectors[0])

    def judge(self, table: pa.Table, receipt: Receipt, answer: Answer) -> ShardAnswer:
        """Judge one shard and write its verdicts."""
        batch = self.batch(table, receipt)
        p, selected = answer.judge(batch)
        source = pa.array([self.scored.shards[receipt.shard].name] * len(table), pa.string())
        table = table.append_column("source", source).append_column("p_value", pa.array(p))
        verdicts = table.append_column("selected", pa.array(selected)).select(self.schema.names)
        documents = pa.concat_tables([verdicts, self.unscored(receipt)])
        name = verdicts_file(self.selection.name, receipt.shard)
        files = {name: self.scored.store.write_table(name, documents)}
        size = answer.grid_size
        # p-values off the uniform grid (by group, conditional, fused) are plotted at the next point of it
        places = np.clip(np.ceil(p * size - 1e-6).astype(np.int64), 1, size)
        counts = np.bincount(places - 1, minlength=size)
        part = with_strength(table.filter(pa.array(selected)), self.selection, answer, batch, selected)
        groups = GroupTally.count(table["group"], selected)
        return ShardAnswer(part, counts, histogram(batch.first, self.edges), groups, files)

    def ordered(self, part: ShardAnswer) -> ShardAnswer:
        """The verdicts on a shard with the columns of `selected.parquet`, in their order, and the sort columns."""
        shown = ["excerpt"] if self.texts else []
        drawn = SMOOTHED if self.selection.ranks == "smoothed" else ()
        first = ["doc_id", "p_value", *drawn, *self.selection.detectors]
        order = [*first, "source", "row", "text_key", *shown, *STRENGTH]
        return replace(part, selected=part.selected.select(order))

    def summarise(self, answer: Answer, total: Total, documents: Mapping[Role, RoleDocuments]) -> Summary:
        """The summary of the answer, with the near-duplicates among the documents of each role."""
        roles: list[Role] = ["audit", self.null_role]
        facts = AnswerFacts(
            selection=self.selection,
            answer=answer,
            offers=self.config.corpus.kind.offers,
            groups=(NO_GROUPS, NO_GROUPS)
            if self.blocks is None
            else (documents["audit"].groups, self.blocks.calibrating),
            scored=self.scored,
            overlap=self.overlap,
            blind=self.blind_test.diagnostic,
            tail=self.blind_test.tail,
            near={role: documents[role].record for role in roles if role in documents},
            near_copies=self.config.near_copies,
            selected=total.selected,
            shuffle=None if self.draws is None else self.draws.diagnostic,
        )
        return summary_in_run(
            make_summary(facts, facts.n_selected, self.quarantined, self.limit), self.config, self.slot
        )

    def write(self, summary: Summary, answer: Answer, total: Total) -> dict[str, str]:
        """Write the selected documents and the data of the report; SHA-256 of all files except the summary, by name."""
        store = self.scored.store
        files = {
            **total.files,
            **write_selected(store, self.folder, total.selected, self.selection.direction == "clean"),
        }
        total.selected.close()
        counts = total.ranks.copy()
        counts[-1] += self.quarantined
        filled = np.flatnonzero(counts)
        ranks = pa.table({"rank": filled + 1, "count": counts[filled]})
        files[f"{self.folder}/ranks.parquet"] = store.write_table(f"{self.folder}/ranks.parquet", ranks)
        roles = {self.null_role: histogram(self.known().first, self.edges).tolist(), "audit": total.histogram.tolist()}
        scores = ScoreHistogram(column=self.selection.detectors[0], edges=self.edges.tolist(), roles=roles)
        answer = answer if summary.bound is not None else replace(answer, bound=None)
        curve = None  # for a scan, whose level the user cannot choose
        if self.slot is None:
            curve = alpha_curve(self.selection, answer, summary.n_selected, self.quarantined)
        for name, record in (("scores", scores), ("alphas", curve), ("groups", total.groups.record())):
            if record is not None:
                file = f"{self.folder}/{name}.json"
                files[file] = store.write_json(file, record.plain())
        return files

    def unscored(self, receipt: Receipt) -> pa.Table:
        """Verdicts on the documents of a shard without scores: p = 1, never selected."""
        store, parts = self.scored.store, []
        if receipt.quarantine is not None:
            parts.append(read_filed(store, receipt, ["doc_id", "row"], receipt.quarantine))
        if receipt.shard in self.scored.duplicates:
            rows = read_filed(store, receipt, ["doc_id", "row"])
            parts.append(rows.take(pa.array(self.scored.duplicates[receipt.shard])))
        if not parts:
            return self.schema.empty_table()
        rows = pa.concat_tables(parts)
        given = {"p_value": 1.0, "selected": False, "source": self.scored.shards[receipt.shard].name}
        fields = [field for field in self.schema if field.name not in rows.column_names]
        for field in fields:  # null: the scores
            rows = rows.append_column(field, pa.array([given.get(field.name)] * len(rows), field.type))
        return rows.select(self.schema.names)


def run_digests(store: Store) -> dict[str, str]:
    """SHA-256 of the files of a run that state a part of every answer, by name."""
    return file_digests(store, _RUN_FILES)


def write_answers(
    store: Store, summaries: Sequence[Summary], files: Mapping[str, Mapping[str, str]], scores: str
) -> None:
    """Write the summaries of selections, then the digests of their answers, which mark them as answered.

    Files of an earlier answer that a selection does not have are removed.

    Args:
        store: the run directory.
        summaries: summaries of the selections.
        files: by selection, SHA-256 of all other files of the answer, by name in the run directory, with `run_digests`.
        scores: digest from `scores_digest` of the scores that the answers were made from.
    """
    answers: dict[str, dict[str, str]] = {}
    for summary in summaries:
        name, folder = summary_file(summary.name), f"selection/{summary.name}"
        answers[summary.name] = {**files[summary.name], name: write_record(store, name, summary)}
        kept = {*answers[summary.name], digests_file(summary.name), f"{folder}/{DOCUMENTS}"}
        for part in (folder, f"{folder}/{DOCUMENTS}"):
            for other in {f"{part}/{base}" for base in store.names(part)} - kept:
                store.remove_folder(other)
    for _ in range(2):  # the first change removes all digests, also equal ones that come before it
        for selection, digests in answers.items():
            write_digests(store, selection, digests, scores)


def check_training_keys(store: Store) -> None:
    """Check that the keys of the documents that adapters were trained on are those of the earlier answers.

    Raises:
        DamagedError: they differ, so that these documents would calibrate.
    """
    now = store.digest(KEYS_FILE)
    for selection in (name for name in store.names("selection") if name != HISTORY):
        try:
            digests = read_digests(store, selection)
        except UserError:  # damaged, or of another version
            continue
        if digests is not None and digests.files.get(KEYS_FILE) != now:
            raise changed_file(store, KEYS_FILE, missing=now is None)


def damaged_answers(store: Store, selections: Sequence[str], whole: bool = False, shared: bool = True) -> list[str]:
    """The faults of a run's answers, one line for each that is not as this version writes it.

    Args:
        store: the run directory.
        selections: names of selections; those without an answer are ignored.
        whole: whether the verdicts on all documents are also checked.
        shared: whether files of the run are also checked, as in `check_answer`.
    """
    problems = []
    for selection in selections:
        try:
            check_answer(store, selection, whole, shared)
        except FileError as error:  # damaged, or of another version
            problems.append(error.problem)
        except UserError as error:
            problems.append(str(error))
    return [made_again_note(problem, "the answer is") + " from the scores" for problem in problems]
