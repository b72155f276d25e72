"""Checks of the documents before any model is loaded: near-duplicates, repeated ids, differing words."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pipeline.checks import document_text as wording
from pipeline.checks.blind import SAMPLED_TEXTS, BlindTest, blind_test
from pipeline.checks.blind_text import how_decided
from pipeline.checks.dependence import near_duplicates_among
from pipeline.checks.dependence_plan import count_blocks, dependence_lines, relate_documents
from pipeline.checks.document_checks import PreflightChecks, checks_file, stored_preflight
from pipeline.checks.document_text import checked_before
from pipeline.checks.draws import DrawReader
from pipeline.checks.input_findings import NOTE, WARNING, DocumentTally
from pipeline.checks.overlap import check_calibration_left, find_shared, shared_error
from pipeline.config.audit import AuditConfig
from pipeline.config.corpus import Role
from pipeline.config.paths import written
from pipeline.corpus.documents import Document, UnclosedError, read_shard
from pipeline.corpus.formats import distinguishing_column
from pipeline.corpus.inputs import number_rows
from pipeline.corpus.keys import Keys, content_size, keyed
from pipeline.corpus.known_texts import KnownTexts, repeated_ids
from pipeline.corpus.shard import Shard
from pipeline.errors import UserError
from pipeline.plan.matching import advice, calibrating
from pipeline.plan.outlooks import outlooks
from pipeline.run.next_step import after_blind
from pipeline.run.plan import Plan
from pipeline.run.records import write_record
from pipeline.run.summary import BlindDiagnostic, CountDiagnostic, Diagnostic, NearDuplicates, OverlapDiagnostic
from pipeline.selection.blocks import Related
from pipeline.selection.guarantees import Outcome
from pipeline.store.files import Store

EXAMPLES = 3
DOCUMENT_COST = 256  # fixed cost of a document, in characters

LARGE_ALPHA = 0.5
"""Alpha above which most of a list may be wrong: a warning."""

_ORDER = 5  # random number stream of the sampled shards


@dataclass(frozen=True, slots=True)
class Effort:
    """Limits of the reading. A corpus within them is checked as a whole; of a larger one shards are drawn at random.

    The audited documents get at least half of it, each known role at most a quarter. This also limits the memory: half
    a kilobyte per document, of which there are at most `characters / DOCUMENT_COST`.
    """

    characters: int  # maximum; each document counts as its length plus DOCUMENT_COST
    texts: int  # maximum for each role of the blind test


_log = logging.getLogger(__name__)

RUN = Effort(1 << 25, SAMPLED_TEXTS)
"""For `seenset run`: about 30,000 documents of 800 characters, some seconds on one core while a cluster starts."""

PLAN = Effort(1 << 24, 1_000)
"""For `seenset plan`: a few seconds at most."""


def check_documents(plan: Plan, effort: Effort) -> PreflightChecks:
    """Check the documents of an audit: near-duplicates, repeated ids, and words that distinguish roles.

    Texts are compared as in scoring: after `text_transform`, the whole text, each id once. Texts of one
    word are left out, because a model may have no score for them. Nothing is written.

    Args:
        plan: plan of the audit.
        effort: limits of the reading.

    Raises:
        UserError: the inputs of the plan are missing; a role has no documents; an input ends inside a quoted field;
            also the errors of `check_calibration_left`.
    """
    config = plan.config
    roles = [role for role, _ in config.corpus.roles()]
    known = (
        [role for role in roles if role != "audit"] if "audit" in roles and config.corpus.has_text else []
    )  # to be compared with the audited
    damaged: list[str] = []
    quarter = effort.characters // 4
    amounts = {role: effort.characters - (len(roles) - 1) * quarter if role == "audit" else quarter for role in roles}
    sample = _Sample(plan.shards, config.seed, damaged, DocumentTally(), DrawReader())
    read = {role: _read(sample, role, amounts[role]) for role in roles}
    for role, source in config.corpus.roles():
        if not sample.tally.count(role) and not damaged:  # files with column names alone
            raise UserError(f"{config.corpus.key(role)} holds no documents: {', '.join(map(written, source.paths))}")
    overlaps = {role: _overlap(read[role], read["audit"], role, config.near_copies) for role in known}
    for role in calibrating(config):
        if role in overlaps and config.overlap == "drop" and read[role].whole:
            check_calibration_left(overlaps[role], len(read[role].keys) - read[role].repeats.size, role)
    blind_tests: dict[Role, BlindTest] = {}
    for role in known:
        try:
            blind_tests[role] = blind_test(plan.shards, role, config, effort.texts)
        except UserError as error:
            damaged.append(str(error))
    near = {role: _near(keys, config) for role, keys in read.items()}
    others = [role for role in roles if role != "audit"] if "audit" in roles else []
    blocks = {role: count_blocks(near["audit"][1], near[role][1]) for role in others}
    return PreflightChecks(
        documents={role: len(sample.keys) for role, sample in read.items()},
        whole=all(keys.whole for keys in read.values()),
        overlap=overlaps,
        copies={role: record for role, (record, _) in near.items() if config.corpus.has_text},
        duplicates=_duplicates(list(read.values()), config),
        blind=blind_tests,
        damaged=sorted(set(damaged))[:EXAMPLES],
        undecodable=sample.tally.undecodable(),
        draws=None
        if config.corpus.versions is None
        else sample.draws.preview(config.corpus.versions, config.near_copies),
        findings=sample.tally.findings(),
        blocks={role: counts for role, counts in blocks.items() if counts},
    )


def begin_checks(plan: Plan, effort: Effort) -> Future[PreflightChecks]:
    """Start `check_documents` in a thread, which ends with the process at the latest.

    Args:
        plan: plan of the audit.
        effort: limits of the reading.

    Returns:
        The pending checks; their result raises the errors of `check_documents`.
    """
    checks: Future[PreflightChecks] = Future()

    def work() -> None:
        try:
            checks.set_result(check_documents(plan, effort))
        except BaseException as error:
            checks.set_exception(error)

    threading.Thread(target=work, name="seenset-checks", daemon=True).start()
    return checks


def plan_checks(plan: Plan) -> dict[str, Any]:
    """The document checks of `seenset plan`: the checks, "scope" (documents read) and "lines" (one per check).

    "words" are those that distinguish a known role from the audited documents, where the blind test failed.

    Raises:
        UserError: the errors of `check_usable`.
    """
    checked = check_documents(plan, PLAN)
    check_usable(checked, plan.config)
    corpus = plan.config.corpus
    scope = wording.documents_and_words(checked.scope, PLAN.texts, corpus.units) if corpus.has_text else checked.scope
    words, lines = advice(plan, checked.blind, PLAN.texts)
    return {**checked.plain(), "scope": scope, "lines": [*_lines(checked, plan), *lines], "words": words}


def check_usable(checked: PreflightChecks, config: AuditConfig) -> None:
    """Stop where most documents would be quarantined, or where selection would refuse them after scoring.

    Raises:
        UserError: an input is entirely in another encoding, or cannot be read with its settings; or a role that
            calibrates a selection has near-duplicates of audited documents, and the configuration does not set
            `overlap: drop`.
    """
    for one in checked.undecodable:
        if one.stops:
            raise UserError(one.sentence)
    if checked.draws is not None and not checked.draws.used and checked.whole:
        raise UserError(f"no document has a draw of its own: {checked.draws.shuffle.sentence}")
    for finding in checked.findings:
        if finding.stops:
            raise UserError(finding.problems)
    for role in calibrating(config):
        shared = checked.overlap.get(role)
        if shared is not None and shared.n_calibration and config.overlap == "error":
            error = shared_error(shared, checked.documents[role], role)
            raise error if checked.whole else UserError(f"in {checked.scope}, {error}")


def _steps(tests: Mapping[Role, BlindDiagnostic], config: AuditConfig) -> list[str]:
    """What to do after failed blind tests."""
    known = {role: tests[role] for role in calibrating(config) if role in tests}
    failed = {role: test for role, test in known.items() if test.outcome == Outcome.FAILED}
    return [step for role, test in failed.items() if (step := after_blind(test, role))]


def _lines(checked: PreflightChecks, plan: Plan) -> list[str]:
    """A line for each check, with a prefix for those that did not pass."""
    config, draws = plan.config, checked.draws
    checks: list[Diagnostic | None] = [checked.duplicates]
    for role in calibrating(config):
        checks += [checked.overlap.get(role), checked.blind.get(role)]
    words = {Outcome.PASSED: "", Outcome.INCONCLUSIVE: NOTE, Outcome.FAILED: WARNING}
    lines = [f"{words[check.outcome]}{check.sentence}" for check in checks if check is not None]
    if draws is not None:
        quiet = NOTE if draws.shuffle.left_out else ""
        lines.insert(1, f"{words[draws.shuffle.outcome] or quiet}{draws.shuffle.sentence}")
    blind_checks = [one for one in checks if isinstance(one, BlindDiagnostic)]
    undecided = [one for one in blind_checks if one.tested and one.outcome == Outcome.INCONCLUSIVE and not one.below]
    if undecided:
        blocks = any(one.n_audit_blocks is not None for one in undecided)
        lines.append(f"{NOTE}{how_decided(undecided[0].by, blocks)}")
    lines += [f"next: {step}" for step in _steps(checked.blind, config)]
    for role, duplicates in checked.copies.items():
        if role == "audit" or role in calibrating(config):
            line = wording.count_sentence(duplicates, "audited documents" if role == "audit" else f"{role} documents")
            lines.append(f"{NOTE if duplicates.n_copies else ''}{line}")
    counts = {role: n if checked.whole else _at_least(n, plan, role) for role, n in checked.documents.items()}
    for failing, sentence in dependence_lines(config, checked.blocks, counts, checked.whole):
        lines.append(f"{WARNING if failing else NOTE}{sentence}")
    inputs = [f"{WARNING}{line}" for line in (*checked.damaged, *(one.sentence for one in checked.undecodable))]
    explained = {one.name for one in checked.undecodable}
    for finding in checked.findings:
        inputs += finding.lines(config.error_budget) if finding.name not in explained else []
    if draws is not None:
        lines += [*draws.lines, *(f"{WARNING}{line}" for line in draws.warnings)]
    large = [wording.large_alpha(one.name, one.alpha) for one in config.selections if one.alpha > LARGE_ALPHA]
    return [*inputs, *(f"{WARNING}{line}" for line in large), *lines]


@dataclass(frozen=True, slots=True, eq=False)
class _RoleKeys:
    """The keys of the documents of one role that were read, in the order of the files."""

    shards: list[Shard]
    ends: np.ndarray  # int64, (shards,): cumulative number of documents at the end of each
    keys: Keys
    repeats: np.ndarray  # int64: positions of documents with an id of an earlier one
    compared: np.ndarray  # int64: positions of the others that have more than one word, or a picture
    whole: bool

    def doc_id(self, position: int) -> str:
        """The id of a document, from its file."""
        index = int(np.searchsorted(self.ends, position, side="right"))
        offset = position - (int(self.ends[index - 1]) if index else 0)
        (shard,) = number_rows([self.shards[index]])
        readable = (document for document in read_shard(shard) if document.problem is None)
        for document in itertools.islice(readable, offset, None):
            return document.doc_id
        raise UserError(f"{self.shards[index].name} changed while it was read")

    def whole_file(self, position: int) -> Shard:
        """A shard of all rows of the file that holds a document."""
        inside = self.shards[int(np.searchsorted(self.ends, position, side="right"))]
        some = [shard for shard in self.shards if shard.path == inside.path]
        return replace(some[0], stop=some[-1].stop)

    def compared_ids(self, places: Sequence[int]) -> list[str]:
        """The ids of documents by their places among the compared ones."""
        return [self.doc_id(int(self.compared[place])) for place in places]


@dataclass(frozen=True, slots=True)
class _Sample:
    """The source of a sample of documents, and notes taken while reading."""

    shards: Sequence[Shard]
    seed: int
    damaged: list[str]  # one line per input
    tally: DocumentTally
    draws: DrawReader


def _read(sample: _Sample, role: Role, characters: int) -> _RoleKeys:
    """Read the documents of a role: all, or shards drawn at random up to the given number of characters."""
    candidates = [shard for shard in sample.shards if shard.role == role]
    order = np.random.default_rng([sample.seed, _ORDER]).permutation(len(candidates)).tolist()
    parts: dict[int, list[Keys]] = {}
    left = characters
    for index in order:
        if left <= 0:
            break
        parts[index] = []
        try:
            for documents, keys in keyed(_distinct(candidates[index], sample)):
                rest = left - np.cumsum([0, *(content_size(document) + DOCUMENT_COST for document in documents)])
                parts[index].append(keys.take(rest[:-1] > 0))
                left = int(rest[-1])
                if left <= 0:
                    break
        except UnclosedError:
            raise
        except UserError as error:  # of one file; the run finishes the others and reports it
            sample.damaged.append(str(error))
    read = {index: Keys.joined(parts[index]) for index in sorted(parts)}
    keys = Keys.joined(read.values())
    repeats = repeated_ids([(0, keys.id)], len(keys)).get(0, np.empty(0, dtype=np.int64))
    once = np.ones(len(keys), dtype=bool)
    once[repeats] = False
    ends = np.cumsum([len(part) for part in read.values()], dtype=np.int64)
    compared = np.flatnonzero(once & (keys.length > 1))
    return _RoleKeys([candidates[index] for index in read], ends, keys, repeats, compared, left > 0)


def _distinct(shard: Shard, sample: _Sample) -> Iterator[Document]:
    """The readable documents of a shard, with ids that cannot repeat by their row number alone."""
    for document in sample.tally.readable(shard):
        sample.draws.add(document)
        # without a column ids are file#row, which cannot repeat; a plan has not counted the rows yet
        yield document if shard.id_column else replace(document, doc_id=f"{shard.id} {document.doc_id}")


def _overlap(known: _RoleKeys, audit: _RoleKeys, role: Role, near_copies: float) -> OverlapDiagnostic:
    texts = known.keys.take(known.compared)
    shared = KnownTexts.of(texts.text, texts.sketch, near_copies).shared(audit.keys.take(audit.compared))
    return find_shared([shared], len(texts), audit.compared_ids, known.compared_ids, role)[0]


def _near(keys: _RoleKeys, config: AuditConfig) -> tuple[NearDuplicates, Related]:
    """The near-duplicates among the documents, and what makes them depend on one another."""
    compared = keys.compared if config.corpus.has_text else keys.compared[:0]
    sketches = keys.keys.sketch[compared]
    record, family = near_duplicates_among(sketches, config.near_copies, True, keys.compared_ids)
    once = np.setdiff1d(np.arange(len(keys.keys)), keys.repeats)
    return record, relate_documents(keys.keys, once, compared, family)


def _duplicates(read: Sequence[_RoleKeys], config: AuditConfig) -> CountDiagnostic:
    count = sum(keys.repeats.size for keys in read)
    if not count:
        return CountDiagnostic(outcome=Outcome.PASSED, sentence=wording.NO_REPEATED_ID, count=0)
    places = [(keys, int(position)) for keys in read for position in keys.repeats[:EXAMPLES]][:EXAMPLES]
    over = count > config.error_budget * sum(len(keys.keys) for keys in read)
    budget, whole = config.error_budget if over else None, all(keys.whole for keys in read)
    sentence = wording.repeated_ids_to_come(count, [keys.doc_id(place) for keys, place in places], budget, whole)
    of_file = places[0][0].whole_file(places[0][1])
    sentence += wording.repeats_differ(of_file.name, distinguishing_column(of_file))
    return CountDiagnostic(outcome=Outcome.INCONCLUSIVE, sentence=sentence, count=count)


def check_before_scoring(
    plan: Plan,
    store: Store,
    say: Callable[[str], None],
    begun: Future[PreflightChecks] | None = None,
) -> None:
    """Check the documents of a run once, before any model is loaded, and print the problems; a resume reads the file.

    This does not replace the checks of a selection over all scored documents.

    Args:
        plan: plan of the run.
        store: the run directory.
        say: called with each line.
        begun: the checks from `begin_checks`; None: they are made here.

    Raises:
        UserError: the errors of `check_usable`.
    """
    earlier = stored_preflight(store, plan.shards, plan.config.seed)
    checked = earlier or (check_documents(plan, RUN) if begun is None else begun.result())
    check_usable(checked, plan.config)
    if earlier is None:
        write_record(store, checks_file(plan.shards, plan.config.seed), checked)
    lines = [line for line in _lines(checked, plan) if line.startswith((WARNING, NOTE))]
    counts = {str(role): n if checked.whole else _at_least(n, plan, role) for role, n in checked.documents.items()}
    roles = {role: {"documents": n, "exact": False} for role, n in counts.items()}
    for entry in outlooks(plan.config, roles, None, checked.blocks, checked.whole):
        if entry["outcome"] == Outcome.FAILED:
            lines.append(f"{WARNING}selection {entry['name']}: {entry['sentence']}")
    if lines and not checked.whole:
        say(checked_before(checked.scope))
    for line in lines:
        say(line)


def _at_least(count: int, plan: Plan, role: Role) -> int:
    """The planned number of documents of a role; the number read where a damaged file makes it unknown."""
    try:
        return plan.documents(role)[0]
    except UserError:
        return count
