"""What the documents themselves say, before any model is loaded: near-duplicates, repeated ids, words that differ."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from pydantic import Field

from pipeline.audit.blind import SAMPLED_TEXTS, BlindTest, blind_test
from pipeline.audit.dependence import near_duplicates_among
from pipeline.audit.halvings import LEAST
from pipeline.audit.matching import advice, calibrating
from pipeline.audit.overlap import KnownTexts, check_calibration_left, find_shared, repeated_ids, shared_error
from pipeline.audit.plan import Plan
from pipeline.audit.records import Record, VersionedRecord, read_record, write_record
from pipeline.audit.resolution import outlooks
from pipeline.audit.summary import BlindDiagnostic, CountDiagnostic, Diagnostic, NearDuplicates, OverlapDiagnostic
from pipeline.config.audit import AuditConfig
from pipeline.config.corpus import Role
from pipeline.config.selection import NULL_ROLE
from pipeline.corpus.documents import Document, read_shard
from pipeline.corpus.files import suggested_encoding
from pipeline.corpus.formats import format_named
from pipeline.corpus.inputs import number_rows
from pipeline.corpus.keys import Keys, content_size, keyed
from pipeline.corpus.shard import Shard
from pipeline.errors import DamagedError, UserError
from pipeline.report.wording import documents as wording
from pipeline.report.wording.blind import to_be_weighted
from pipeline.report.wording.documents import checked_before
from pipeline.report.wording.files import checked_after, made_again_note, other_encoding
from pipeline.selection.calibrations import calibration_of
from pipeline.store.files import Store
from pipeline.store.receipts import json_digest

_LEAST = 3  # documents that are not of the encoding, before a run stops for it

EXAMPLES = 3
DOCUMENT_COST = 256  # characters that take as long as a document's row does, whatever its length
NOTE, WARNING = "note: ", "warning: "
"""Before a line of a check that did not pass."""

_FORM = 2  # of the checks: a file of an earlier form is not read
_ORDER = 5  # the stream of random numbers that the shards of a sample are drawn from


class Undecodable(Record):
    """An input of which documents that were read are not of its encoding, and another encoding is recognised."""

    name: str = Field(description="The input, as the configuration names it.")
    documents: int = Field(description="Documents of it that were read.")
    undecodable: int = Field(description="How many of these are not of the encoding that is set.")
    unit: str = Field(description="What a document is: a line or a file.")
    label: str = Field(description="The encoding that is set.")
    encoding: str = Field(description="The encoding that was recognised.")

    @property
    def sentence(self) -> str:
        """What is wrong, and the setting that corrects it."""
        counts = self.undecodable, self.documents
        return other_encoding(self.name, counts, self.unit, self.label, self.encoding)

    @property
    def stops(self) -> bool:
        """Whether the input as a whole is of another encoding: at least half of its documents are."""
        return self.undecodable >= max(_LEAST, self.documents / 2)


class DecodingTally:
    """Counts of the documents that were read of every input, and of those that are not of its encoding."""

    def __init__(self) -> None:
        self._counts: dict[str, tuple[Shard, list[int]]] = {}

    def readable(self, shard: Shard) -> Iterator[Document]:
        """The documents of a shard that have no problem; all are counted."""
        _, counts = self._counts.setdefault(shard.path, (shard, [0, 0]))
        encoded = "encoding" in format_named(shard.format).settings
        for document in read_shard(shard):
            counts[0] += 1
            if document.problem is None:
                counts[1] += encoded and "\0" in document.text  # as UTF-16 has that is read as UTF-8
                yield document
            elif document.problem[0] == "undecodable":
                counts[1] += 1

    def undecodable(self) -> list[Undecodable]:
        """The inputs with documents of another encoding."""
        described = (_described(shard, *counts) for shard, counts in self._counts.values() if counts[1])
        return [one for one in described if one is not None]


def _described(shard: Shard, documents: int, undecodable: int) -> Undecodable | None:
    if "encoding" not in format_named(shard.format).settings:
        return None
    path = f"{shard.path}/{shard.files[0]}" if shard.files and shard.files[0] else shard.path
    encoding = suggested_encoding(path, shard.dialect)
    if encoding is None:
        return None
    return Undecodable(
        name=shard.name,
        documents=documents,
        undecodable=undecodable,
        unit=format_named(shard.format).unit,
        label=shard.dialect.label,
        encoding=encoding,
    )


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is read. A corpus that is no larger is checked whole; of a larger one shards are drawn at random.

    Half of it is for the audited documents, at least, and a quarter for each known role, at most. So memory is bounded
    too: half a kilobyte a document, of which there are at most `characters / DOCUMENT_COST`.
    """

    characters: int  # of text, at most, each document counted with DOCUMENT_COST more
    texts: int  # of each side of the blind test


_log = logging.getLogger(__name__)

RUN = Effort(1 << 25, SAMPLED_TEXTS)
"""Of `seenset run`: about 30,000 documents of 800 characters, some seconds on one core beside a starting cluster."""

PLAN = Effort(1 << 24, 1_000)
"""Of `seenset plan`: a few seconds at most."""


class PreflightChecks(VersionedRecord):
    """The checks that need no model: `diagnostics/documents-<inputs>.json`."""

    sealed = True
    always_sealed = True  # checks of version 0.9.0 are made again

    documents: dict[Role, int] = Field(description="Documents that were read, by role.")
    whole: bool = Field(description="Whether these are all; else they are a sample, of shards drawn at random.")
    overlap: dict[Role, OverlapDiagnostic] = Field(
        description="What each known role shares with the audited documents."
    )
    copies: dict[Role, NearDuplicates] = Field(description="Near-duplicates among the documents of each role.")
    duplicates: CountDiagnostic = Field(description="Documents that repeat an id of their role.")
    blind: dict[Role, BlindTest] = Field(
        description="Whether words alone tell a known role from the audited documents; a role whose texts cannot be "
        "read is missing."
    )
    damaged: list[str] = Field(description="The first inputs that could not be read to their end, a line each.")
    undecodable: list[Undecodable] = Field([], description="Inputs with documents of another encoding.")

    @property
    def scope(self) -> str:
        """How many documents were read."""
        return wording.documents_read(sum(self.documents.values()), self.whole)


def check_documents(plan: Plan, effort: Effort) -> PreflightChecks:
    """Check the documents of an audit: near-duplicates, ids that repeat, and words that tell roles apart.

    Texts are compared as scoring compares them: after `text_transform`, all of the text, each id once. Texts of one
    word are left out, because a model may have no score for them. Pure: nothing is written.

    Args:
        plan: of the audit.
        effort: how much to read.

    Raises:
        UserError: the inputs of the plan are gone; or as `check_calibration_left`.
    """
    config = plan.config
    roles = [role for role, _ in config.corpus.roles()]
    known = (
        [role for role in roles if role != "audit"] if "audit" in roles and config.corpus.has_text else []
    )  # to be compared with the audited
    damaged: list[str] = []
    quarter = effort.characters // 4
    amounts = {role: effort.characters - (len(roles) - 1) * quarter if role == "audit" else quarter for role in roles}
    sample = _Sample(plan.shards, config.seed, damaged, DecodingTally())
    read = {role: _read(sample, role, amounts[role]) for role in roles}
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
    return PreflightChecks(
        documents={role: len(sample.keys) for role, sample in read.items()},
        whole=all(keys.whole for keys in read.values()),
        overlap=overlaps,
        copies={role: _near(keys, config.near_copies) for role, keys in read.items() if config.corpus.has_text},
        duplicates=_duplicates(list(read.values()), config),
        blind=blind_tests,
        damaged=sorted(set(damaged))[:EXAMPLES],
        undecodable=sample.tally.undecodable(),
    )


def begin_checks(plan: Plan, effort: Effort) -> Future[PreflightChecks]:
    """Start `check_documents` in a thread, which ends with the process at the latest.

    Args:
        plan: of the audit.
        effort: how much to read.

    Returns:
        The checks to come; their result raises what `check_documents` raises.
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
    """What `seenset plan` says of the documents: the checks, "scope" (how many were read) and "lines" (one a check).

    "words" are those that tell a known role from the audited documents, where such a test failed.

    Raises:
        UserError: as `check_usable`.
    """
    checked = check_documents(plan, PLAN)
    check_usable(checked, plan.config)
    corpus = plan.config.corpus
    scope = wording.documents_and_words(checked.scope, PLAN.texts, corpus.units) if corpus.has_text else checked.scope
    words, lines = advice(plan, checked.blind, PLAN.texts)
    return {**checked.plain(), "scope": scope, "lines": [*_lines(checked, plan.config), *lines], "words": words}


def check_usable(checked: PreflightChecks, config: AuditConfig) -> None:
    """Stop at documents of which most would go to quarantine, or that selection would refuse after scoring.

    Raises:
        UserError: an input is of another encoding as a whole; a role that calibrates a selection has near-duplicates of
            audited documents, and the config does not say `overlap: drop`; or fewer than 20 documents of either kind
            to be weighed.
    """
    for one in checked.undecodable:
        if one.stops:
            raise UserError(one.sentence)
    for role in calibrating(config):
        shared = checked.overlap.get(role)
        if shared is not None and shared.n_calibration and config.overlap == "error":
            error = shared_error(shared, checked.documents[role], role)
            raise error if checked.whole else UserError(f"in {checked.scope}, {error}")
    for selection in config.selections:
        role = NULL_ROLE[selection.direction]
        test = checked.blind.get(role)
        counts = None if test is None else (test.n_calibration or 0, test.n_audit or 0)
        if calibration_of(selection.calibration).weighted and counts is not None and min(counts) < LEAST:
            raise UserError(
                f"selection {selection.name}: calibration weighted needs at least {LEAST} {role} and {LEAST} audited "
                f"documents to learn how their {config.corpus.units} differ, got {counts[0]} and {counts[1]}"
            )


def _lines(checked: PreflightChecks, config: AuditConfig) -> list[str]:
    """A line for each check, those that did not pass with the word for it before."""
    checks: list[Diagnostic | None] = [checked.duplicates]
    for role in calibrating(config):
        checks += [checked.overlap.get(role), _before_weights(checked.blind.get(role), role, config)]
    words = {True: "", None: NOTE, False: WARNING}
    lines = [f"{words[check.ok]}{check.sentence}" for check in checks if check is not None]
    for role, duplicates in checked.copies.items():
        if role == "audit" or role in calibrating(config):
            line = wording.counted(duplicates, "audited documents" if role == "audit" else f"{role} documents")
            lines.append(f"{NOTE if duplicates.n_copies else ''}{line}")
    inputs = [*checked.damaged, *(one.sentence for one in checked.undecodable)]
    return [*(f"{WARNING}{line}" for line in inputs), *lines]


def _before_weights(test: BlindDiagnostic | None, role: Role, config: AuditConfig) -> BlindDiagnostic | None:
    """The blind test; no warning where every selection of the role weighs its documents, which is to repair that."""
    of_role = [calibration_of(s.calibration) for s in config.selections if NULL_ROLE[s.direction] == role]
    if test is None or test.ok is not False or not of_role or not all(one.weighted for one in of_role):
        return test
    return test.model_copy(update={"ok": None, "sentence": to_be_weighted(test.sentence, test.by)})


def stored_preflight(store: Store, shards: Sequence[Shard], seed: int) -> PreflightChecks | None:
    """The checks of these very documents that a run has filed; None where it has not, or they are not as written.

    Raises:
        UserError: the file is of another version.
    """
    name = _file(shards, seed)
    try:
        return read_record(store, name, PreflightChecks, checked_after(name))
    except DamagedError as error:
        _log.warning(made_again_note(error, "the checks are"))
        return None


def _file(shards: Sequence[Shard], seed: int) -> str:
    """The name says what was read and by which form of the checks, so a corpus that was repaired is read again."""
    content = [replace(shard, name="", path="", first_row=0).to_dict() for shard in shards]
    digest = json_digest([_FORM, seed, content])
    return f"diagnostics/documents-{digest[:12]}.json"


@dataclass(frozen=True, slots=True, eq=False)
class _RoleKeys:
    """The keys of the documents of one role that were read, in the order of the files."""

    shards: list[Shard]
    ends: np.ndarray  # int64, (shards,): documents up to the end of each
    keys: Keys
    repeats: np.ndarray  # int64: positions of documents whose id stands before
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

    def compared_ids(self, places: Sequence[int]) -> list[str]:
        """The ids of documents by their places among those that are compared."""
        return [self.doc_id(int(self.compared[place])) for place in places]


@dataclass(frozen=True, slots=True)
class _Sample:
    """Where documents are drawn from, and what is noted while they are read."""

    shards: Sequence[Shard]
    seed: int
    damaged: list[str]  # a line an input
    tally: DecodingTally


def _read(sample: _Sample, role: Role, characters: int) -> _RoleKeys:
    """Read the documents of a role: all, or shards drawn at random until so many characters are read."""
    candidates = [shard for shard in sample.shards if shard.role == role]
    order = np.random.default_rng([sample.seed, _ORDER]).permutation(len(candidates)).tolist()
    parts: dict[int, list[Keys]] = {}
    left = characters
    for index in order:
        if left <= 0:
            break
        parts[index] = []
        try:
            for documents, keys in keyed(_distinct(candidates[index], sample.tally)):
                rest = left - np.cumsum([0, *(content_size(document) + DOCUMENT_COST for document in documents)])
                parts[index].append(keys.take(rest[:-1] > 0))
                left = int(rest[-1])
                if left <= 0:
                    break
        except UserError as error:  # of one file; the run finishes the others, and says so
            sample.damaged.append(str(error))
    read = {index: Keys.joined(parts[index]) for index in sorted(parts)}
    keys = Keys.joined(read.values())
    repeats = repeated_ids([(0, keys.id)], len(keys)).get(0, np.empty(0, dtype=np.int64))
    once = np.ones(len(keys), dtype=bool)
    once[repeats] = False
    ends = np.cumsum([len(part) for part in read.values()], dtype=np.int64)
    compared = np.flatnonzero(once & (keys.length > 1))
    return _RoleKeys([candidates[index] for index in read], ends, keys, repeats, compared, left > 0)


def _distinct(shard: Shard, tally: DecodingTally) -> Iterator[Document]:
    """The readable documents of a shard, with ids that no document of another shard has by its number alone."""
    for document in tally.readable(shard):
        # without a column ids are file#row, which cannot repeat; a plan has not counted the rows yet
        yield document if shard.id_column else replace(document, doc_id=f"{shard.id} {document.doc_id}")


def _overlap(known: _RoleKeys, audit: _RoleKeys, role: Role, near_copies: float) -> OverlapDiagnostic:
    texts = known.keys.take(known.compared)
    shared = KnownTexts.of(texts.text, texts.sketch, near_copies).shared(audit.keys.take(audit.compared))
    return find_shared([shared], len(texts), audit.compared_ids, known.compared_ids, role)[0]


def _near(keys: _RoleKeys, near_copies: float) -> NearDuplicates:
    return near_duplicates_among(keys.keys.sketch[keys.compared], near_copies, True, keys.compared_ids)[0]


def _duplicates(read: Sequence[_RoleKeys], config: AuditConfig) -> CountDiagnostic:
    count = sum(keys.repeats.size for keys in read)
    if not count:
        return CountDiagnostic(ok=True, sentence=wording.NO_REPEATED_ID, count=0)
    places = [(keys, int(position)) for keys in read for position in keys.repeats[:EXAMPLES]]
    ids = [keys.doc_id(position) for keys, position in places[:EXAMPLES]]
    over = count > config.error_budget * sum(len(keys.keys) for keys in read)
    budget, whole = config.error_budget if over else None, all(keys.whole for keys in read)
    sentence = wording.repeated_ids_to_come(count, ids, budget, whole)
    return CountDiagnostic(ok=None, sentence=sentence, count=count)


def check_before_scoring(
    plan: Plan,
    store: Store,
    say: Callable[[str], None],
    begun: Future[PreflightChecks] | None = None,
) -> None:
    """Check the documents of a run once, before any model is loaded, and say what is wrong; a resume reads the file.

    Nothing of this replaces what selection checks over all scored documents.

    Args:
        plan: of the run.
        store: the run directory.
        say: called with each line.
        begun: the checks, from `begin_checks`; None: they are made here.

    Raises:
        UserError: as `check_usable`.
    """
    earlier = stored_preflight(store, plan.shards, plan.config.seed)
    checked = earlier or (check_documents(plan, RUN) if begun is None else begun.result())
    check_usable(checked, plan.config)
    if earlier is None:
        write_record(store, _file(plan.shards, plan.config.seed), checked)
    lines = [line for line in _lines(checked, plan.config) if line.startswith((WARNING, NOTE))]
    counts = {str(role): n if checked.whole else _at_least(n, plan, role) for role, n in checked.documents.items()}
    for entry in outlooks(plan.config, {role: {"documents": n, "exact": False} for role, n in counts.items()}):
        if entry["ok"] is False:
            lines.append(f"{WARNING}selection {entry['name']}: {entry['sentence']}")
    if lines and not checked.whole:
        say(checked_before(checked.scope))
    for line in lines:
        say(line)


def _at_least(count: int, plan: Plan, role: Role) -> int:
    """The documents of a role as planned; those that were read where a damaged file hides their number."""
    try:
        return plan.documents(role)[0]
    except UserError:
        return count
