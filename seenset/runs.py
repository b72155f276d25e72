"""Audits and trials from Python: the same runs as those of the command, and their results as objects."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

import pyarrow as pa

from pipeline.audit.collection import block_kind
from pipeline.audit.description import build_config, load_config
from pipeline.audit.digests import VerdictTables, read_selected
from pipeline.audit.status import run_status
from pipeline.audit.summary import Summary
from pipeline.audit.verdict import CollectionVerdict
from pipeline.config.audit import AuditConfig
from pipeline.config.paths import placed
from pipeline.store.files import Store
from pipeline.trial.config import TrialConfig, build_trial, load_trial
from pipeline.trial.trial import TrialOutcome, carry_out
from ray_jobs import terminal
from ray_jobs.audit import run_audit
from ray_jobs.progress import Reporter
from ray_jobs.select import give_verdict


@dataclass(frozen=True, slots=True, repr=False)
class RunSelection:
    """The answer of one selection of a run. Printed, it says what its guarantee is worth."""

    summary: Summary
    store: Store

    def __repr__(self) -> str:
        return f"RunSelection({self.summary.line()})"

    @property
    def n_selected(self) -> int:
        """How many documents it selects."""
        return self.summary.n_selected

    def table(self) -> pa.Table:
        """The selected documents by ascending p-value: doc_id, p_value, a column a detector, source, row, excerpt."""
        return read_selected(self.store, self.summary.name)

    def documents(self) -> pa.Table:
        """All audited documents: doc_id, p_value in (0, 1], selected, scores (null if it has none), source, row."""
        tables = VerdictTables.of(self.store, self.summary.name)
        return pa.concat_tables([tables.read(shard) for shard in tables.shards])


@dataclass(frozen=True, slots=True)
class Run:
    """A run directory whose selections are answered."""

    path: str
    state: str  # running, complete, incomplete or failed
    selections: Mapping[str, RunSelection]  # by name, in the order of the configuration
    report: str | None  # address of the report; None where none is written yet


def audit(
    config: str | PathLike[str] | Mapping[str, Any] | AuditConfig, *, limit: int | None = None, quiet: bool = False
) -> Run:
    """Do what is not done yet of an audit: score, select, report. The same call again resumes.

    It runs on the cluster that RAY_ADDRESS names, or on this machine.

    Args:
        config: A YAML file, the mapping that it would hold, or an `AuditConfig`. Relative paths are relative to the
            file; of a mapping, to the working directory.
        limit: Only the first documents of each role, as a trial run.
        quiet: No progress; otherwise a bar on a terminal and lines elsewhere.

    Returns:
        The finished run. `UnsupportedWarning` for every selection whose guarantee a check contradicts.

    Raises:
        UserError: in one line, what the user can correct.

    Example:
        >>> run = seenset.audit(config, quiet=True)
        >>> run.selections["members"].n_selected
        0
        >>> run.selections["members"].documents().column_names
        ['doc_id', 'p_value', 'selected', 'loss', 'source', 'row']
        >>> seenset.open_run(run.path).state
        'complete'
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
        The run, done or not. `UnsupportedWarning` for every selection whose guarantee a check contradicts.

    Raises:
        UserError: not a run directory.
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
    """Hold the guarantee against the truth: train documents into a model, audit it, and compare. Resumes as `audit`.

    Args:
        config: A YAML file, the mapping that it would hold, or a `TrialConfig`; relative paths as in `audit`.
        limit: Only the first documents.
        quiet: No progress.

    Returns:
        `facts` for machines, `tables` (rich) for people, `folder`, `reports` and `page`.

    Raises:
        UserError: in one line, what the user can correct.
    """
    source = (
        load_trial(str(config)) if isinstance(config, (str, PathLike)) else build_trial(_mapping(config, TrialConfig))
    )
    reporter = Reporter(terminal.console(), quiet=quiet)
    return carry_out(*source, lambda audit: run_audit(audit, reporter), reporter.say, limit)


def verdict(run: str | PathLike[str] | Run, *, blocks: str | None = None) -> CollectionVerdict:
    """Was this collection trained on? A count of its documents, and a permutation test of it as a whole.

    As `seenset verdict`: no model is touched; verdict.json is written, and the report anew if there is one.

    Args:
        run: A finished run, or its directory. It needs unseen documents.
        blocks: What the test moves whole: `group` or `family`; by default groups where documents have one.

    Returns:
        The verdict. `UnsupportedWarning` where one of both says that the collection was trained on, and a check
        contradicts it.

    Raises:
        UserError: no unseen documents, too few for the test, or not a finished run.
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
    """A check contradicts an assumption of a selection: its answer has no guarantee and must not be acted on."""


def warn_of_unsupported(summaries: Iterable[Summary]) -> None:
    """Warn, in the name of the caller of the public function, of every answer that a check contradicts."""
    for summary in summaries:
        if summary.conclusion == "contradicted":
            warnings.warn(summary.line(), UnsupportedWarning, stacklevel=3)
