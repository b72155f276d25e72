"""Checks of the documents before any model is loaded: near-duplicates, repeated ids, differing words."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

from pipeline.checks.blind import CHECK as BLIND
from pipeline.checks.blind import SAMPLED_TEXTS
from pipeline.checks.check import Planned, SampleLine
from pipeline.checks.document_sample import Effort, read_sample
from pipeline.checks.groups import CHECK as GROUPS
from pipeline.checks.input_findings import NOTE, WARNING
from pipeline.checks.registry import check_sample, lines_about_inputs, lines_before_scoring, refuse_documents
from pipeline.config.audit import AuditConfig
from pipeline.config.corpus import Role
from pipeline.config.paths import written
from pipeline.errors import UserError
from pipeline.plan.matching import advice
from pipeline.plan.outlooks import outlooks
from pipeline.results.document_checks import PreflightChecks, checks_file, stored_preflight
from pipeline.run.plan import Plan
from pipeline.run.records import write_record
from pipeline.selection.guarantees import Outcome
from pipeline.store.files import Store
from pipeline.wording import percent

EXAMPLES = 3
"""Maximum number of unreadable inputs that a plan names."""

LARGE_ALPHA = 0.5
"""Alpha above which most of a list may be wrong: a warning."""

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
    config, sample = plan.config, read_sample(plan, effort)
    for role, source in config.corpus.roles():
        if not sample.tally.count(role) and not sample.damaged:  # files with column names alone
            raise UserError(f"{config.corpus.key(role)} holds no documents: {', '.join(map(written, source.paths))}")
    results = check_sample(sample)
    return PreflightChecks(
        documents={role: len(keys.keys) for role, keys in sample.read.items()},
        whole=sample.whole,
        damaged=sorted(set(sample.damaged))[:EXAMPLES],
        undecodable=sample.tally.undecodable(),
        findings=sample.tally.findings(),
        **results,
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
    words = f", and the {corpus.units} of at most {PLAN.texts:,} documents of each role" if corpus.has_text else ""
    telling, lines = advice(plan, checked.result(BLIND), PLAN.texts)
    scope = f"{checked.scope}{words}"
    return {**checked.plain(), "scope": scope, "lines": [*_lines(checked, plan), *lines], "words": telling}


def check_usable(checked: PreflightChecks, config: AuditConfig) -> None:
    """Stop where most documents would be quarantined, or where selection would refuse them after scoring.

    Raises:
        UserError: an input is entirely in another encoding, or cannot be read with its settings; or a check refuses
            the documents (`SampleCheck.refuse`).
    """
    for one in checked.undecodable:
        if one.stops:
            raise UserError(one.sentence)
    for finding in checked.findings:
        if finding.stops:
            raise UserError(finding.problems)
    error = refuse_documents(checked, Planned(config, checked.documents, checked.whole))
    if error is not None:
        raise error if checked.whole else UserError(f"in {checked.scope}, {error}")


def _lines(checked: PreflightChecks, plan: Plan) -> list[str]:
    """A line for each check, with a prefix for those that did not pass."""
    config = plan.config
    inputs = [f"{WARNING}{line}" for line in (*checked.damaged, *(one.sentence for one in checked.undecodable))]
    explained = {one.name for one in checked.undecodable}
    for finding in checked.findings:
        inputs += finding.lines(config.error_budget) if finding.name not in explained else []
    inputs += _with_prefixes(lines_about_inputs(checked))
    large = [
        f"selection {one.name}: alpha {one.alpha:g} allows a list of which up to {percent(one.alpha)} may be wrong"
        for one in config.selections
        if one.alpha > LARGE_ALPHA
    ]
    lines = lines_before_scoring(checked, Planned(config, _planned_documents(checked, plan), checked.whole))
    return [*inputs, *(f"{WARNING}{line}" for line in large), *_with_prefixes(lines)]


def _with_prefixes(lines: Iterable[SampleLine]) -> list[str]:
    return [f"{_PREFIXES[line.outcome]}{line.sentence}" for line in lines]


_PREFIXES = {Outcome.PASSED: "", Outcome.INCONCLUSIVE: NOTE, Outcome.FAILED: WARNING}


def _planned_documents(checked: PreflightChecks, plan: Plan) -> dict[Role, int]:
    """The number of documents of each role: read, or planned where a sample was read."""
    return {role: n if checked.whole else _at_least(n, plan, role) for role, n in checked.documents.items()}


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
    roles = {str(role): {"documents": n, "exact": False} for role, n in _planned_documents(checked, plan).items()}
    for entry in outlooks(plan.config, roles, None, checked.result(GROUPS), checked.whole):
        if entry["outcome"] == Outcome.FAILED:
            lines.append(f"{WARNING}selection {entry['name']}: {entry['sentence']}")
    if lines and not checked.whole:
        say(f"checked before scoring: {checked.scope}; what they share is checked again over all of them after it")
    for line in lines:
        say(line)


def _at_least(count: int, plan: Plan, role: Role) -> int:
    """The planned number of documents of a role; the number read where a damaged file makes it unknown."""
    try:
        return plan.documents(role)[0]
    except UserError:
        return count
