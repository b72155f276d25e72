"""Audits and trials from Python: the same runs as those of the command, with their results as objects."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

import pyarrow as pa

from pipeline.answers.scored_collection import block_kind
from pipeline.answers.verdict import CollectionVerdict
from pipeline.config.audit import AuditConfig
from pipeline.config.paths import placed
from pipeline.plan.description import build_config, load_config
from pipeline.results.status import run_status
from pipeline.results.summary import Summary
from pipeline.run.digests import VerdictTables, read_selected
from pipeline.selection.guarantees import ConclusionValue
from pipeline.store.files import Store
from pipeline.trial.config import TrialConfig, build_trial, load_trial
from pipeline.trial.trial import TrialOutcome, carry_out
from ray_jobs import terminal
from ray_jobs.audit import run_audit
from ray_jobs.progress import Reporter
from ray_jobs.select import give_verdict


@dataclass(frozen=True, slots=True, repr=False)
class RunSelection:
    """The answer of one selection of a run. Its printed form states its guarantee.

    Example:
        >>> members = seenset.open_run("runs/my-audit").selections["members"]
        >>> members
        RunSelection(members: 22 of 100 selected (storey, alpha 0.1, finite-sample), ...)
        >>> members.table()["doc_id"].to_pylist()[:3]
        ['audited-19', 'audited-18', 'audited-17']
        >>> members.documents().num_rows
        100
    """

    summary: Summary
    store: Store

    def __repr__(self) -> str:
        return f"RunSelection({self.summary.line()})"

    @property
    def n_selected(self) -> int:
        """Number of selected documents."""
        return self.summary.n_selected

    def table(self) -> pa.Table:
        """The selected documents by ascending p-value: doc_id, p_value, a column per detector, source, row, excerpt."""
        return read_selected(self.store, self.summary.name)

    def documents(self) -> pa.Table:
        """All audited documents: doc_id, p_value in (0, 1], selected, scores (null where missing), source, row."""
        tables = VerdictTables.open(self.store, self.summary.name)
        return pa.concat_tables([tables.read(shard) for shard in tables.shards])


@dataclass(frozen=True, slots=True)
class Run:
    """A run directory with its answers.

    Example:
        >>> run = seenset.open_run("runs/my-audit")
        >>> {name: selection.n_selected for name, selection in run.selections.items()}
        {'members': 22}
    """

    path: str
    state: str  # running, complete, incomplete or failed
    selections: Mapping[str, RunSelection]  # by name, in the order of the configuration
    report: str | None  # address of the report; None if there is none yet


def audit(
    config: str | PathLike[str] | Mapping[str, Any] | AuditConfig, *, limit: int | None = None, quiet: bool = False
) -> Run:
    """Carry out the unfinished parts of an audit: score, select, report. The same call resumes it.

    It runs on the cluster that RAY_ADDRESS names, or on this machine.

    Args:
        config: A YAML file, the equivalent mapping, or an `AuditConfig`. Relative paths are relative to the
            file, or for a mapping to the working directory.
        limit: Maximum number of documents of each role, for a test run.
        quiet: Show no progress; otherwise a bar on a terminal and lines elsewhere.

    Returns:
        The finished run. `UnsupportedWarning` for every selection whose guarantee a check contradicts.

    Raises:
        UserError: an error that the user can correct, in one line.

    Example:
        >>> run = seenset.audit("audit.yaml", quiet=True)
        >>> run.state
        'complete'
        >>> run.selections["members"].n_selected
        22
    """
    described = (
        load_config(str(config)) if isinstance(config, (str, PathLike)) else build_config(_mapping(config, AuditConfig))
    )
    run_audit(described, Reporter(terminal.console(), quiet=quiet), limit)
    run = _open(described.run)
    warn_of_unsupported(selection.summary for selection in run.selections.values())
    return run


def open_run(path: str | PathLike[str]) -> Run:
    """The results of a run directory, without a model or a cluster.

    Args:
        path: A local path or an fsspec URL.

    Returns:
        The run, complete or not. `UnsupportedWarning` for every selection whose guarantee a check contradicts.

    Raises:
        UserError: not a run directory.

    Example:
        >>> run = seenset.open_run("runs/my-audit")
        >>> run.state, list(run.selections)
        ('complete', ['members'])
    """
    run = _open(str(path))
    warn_of_unsupported(selection.summary for selection in run.selections.values())
    return run


def _open(path: str) -> Run:
    store = Store(path)
    status = run_status(path)
    selections = {summary.name: RunSelection(summary, store) for summary in status.selections}
    report = "report/report.html"
    return Run(store.url, status.state, selections, f"{store.url}/{report}" if store.exists(report) else None)


def trial(
    config: str | PathLike[str] | Mapping[str, Any] | TrialConfig, *, limit: int | None = None, quiet: bool = False
) -> TrialOutcome:
    """Test the guarantee: train documents into a model, audit it, and compare with the truth. Resumes as `audit`.

    Args:
        config: A YAML file, the equivalent mapping, or a `TrialConfig`; relative paths as in `audit`.
        limit: Maximum number of documents.
        quiet: Show no progress.

    Returns:
        `facts` for programs, `tables` (rich) for display, `folder`, `reports` and `page`.

    Raises:
        UserError: an error that the user can correct, in one line.

    Example:
        >>> outcome = seenset.trial("trial.yaml", quiet=True)
        >>> (members,) = outcome.facts["selections"]  # its FDR and power too, with 95% intervals
        >>> members["selection"], members["repeats"], members["contradicted"]
        ('members', 3, False)
    """
    source = (
        load_trial(str(config)) if isinstance(config, (str, PathLike)) else build_trial(_mapping(config, TrialConfig))
    )
    reporter = Reporter(terminal.console(), quiet=quiet)
    return carry_out(*source, lambda audit: run_audit(audit, reporter), reporter.say, limit)


def verdict(run: str | PathLike[str] | Run, *, blocks: str | None = None) -> CollectionVerdict:
    """Test whether a collection was trained on, by a count of its documents and a permutation test of the whole.

    As `seenset verdict`: no model is used; verdict.json is written, and an existing report is updated.

    Args:
        run: A finished run, or its directory. It needs unseen documents.
        blocks: Units that the test permutes: `group` or `family`; by default groups where documents have one.

    Returns:
        The verdict. `UnsupportedWarning` where the count or the test shows that the collection was trained on, and a
        check contradicts it.

    Raises:
        UserError: no unseen documents, too few for the test, or not a finished run.

    Example:
        >>> verdict = seenset.verdict("runs/my-audit")
        >>> verdict.answer
        'trained on'
        >>> print(verdict.sentences[0])
        It is shown, with p = 0.0001, that my-model was trained on documents of this collection, provided ...
    """
    answer = give_verdict(run.path if isinstance(run, Run) else str(run), block_kind(blocks))
    if answer.answer == "not supported":
        warnings.warn(" ".join([answer.sentences[0], *answer.reasons]), UnsupportedWarning, stacklevel=2)
    return answer


def _mapping(
    config: Mapping[str, Any] | AuditConfig | TrialConfig, kind: type[AuditConfig] | type[TrialConfig]
) -> dict[str, Any]:
    data = config.model_dump() if isinstance(config, (AuditConfig, TrialConfig)) else config
    return placed(kind, data, os.path.realpath(os.getcwd()))


class UnsupportedWarning(UserWarning):
    """A check contradicts an assumption of a selection: its answer has no guarantee and must not be acted on.

    Example:
        >>> import warnings
        >>> differences, of_unseen = [2.0, 1.5, -0.5], range(1, 200)  # all above 0, where half should be
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error", seenset.UnsupportedWarning)
        ...     seenset.select(differences, unseen=of_unseen, procedure="ktd")
        Traceback (most recent call last):
            ...
        seenset.runs.UnsupportedWarning: selection: CONTRADICTED, do not act on it: ...
    """


def warn_of_unsupported(summaries: Iterable[Summary]) -> None:
    """Warn, with the caller of the public function as origin, of every answer that a check contradicts."""
    for summary in summaries:
        if summary.conclusion == ConclusionValue.CONTRADICTED:
            step = f" Next: {summary.next}" if summary.next else ""
            warnings.warn(f"{summary.line()}{step}", UnsupportedWarning, stacklevel=3)
