"""The pages of `rank` and `joint`: one self-contained HTML file each, in the style of the report."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import fsspec

from pipeline.compare import comparison_text as wording
from pipeline.compare.finished_runs import FinishedRun
from pipeline.compare.harnesses.base import ItemResults
from pipeline.compare.joint import JointReport, joint_table
from pipeline.compare.output_places import PagePlace
from pipeline.compare.ranking import RankingReport, ranking_table
from pipeline.report.tables import page_table
from pipeline.report.templates import render
from pipeline.results.history import read_history

RANKING_PAGE, JOINT_PAGE = "ranking.html", "joint.html"

LISTED_CHANGES = 20
"""Maximum number of changes of places on the page of a task; ranking.json has all."""


@dataclass(frozen=True, slots=True)
class AuditOfItems:
    """What a page states of a run that audited the documents."""

    run: str
    model: str
    fingerprint: str
    answered: str  # UTC; empty if not recorded
    refused: dict[str, int]  # reason of quarantine -> audited documents without scores, the most frequent first


@dataclass(frozen=True, slots=True)
class ResultFile:
    """A file of results, with its digest."""

    path: str
    models: str
    sha256: str


def write_ranking_page(
    place: PagePlace, ranking: RankingReport, runs: Sequence[FinishedRun], results: Sequence[ItemResults]
) -> str:
    """Write the page of a ranking: models on all items and on clean ones, what is left out, and what to do next.

    Args:
        place: place of the page.
        ranking: the ranking.
        runs: runs that audited the items.
        results: results of all models and tasks.

    Returns:
        The path or URL of the page.
    """
    clean = ranking.clean
    page = render(
        f"pipeline.compare/{RANKING_PAGE}",
        ranking=ranking,
        tasks=[(task, page_table(ranking_table(task)), task.changes[:LISTED_CHANGES]) for task in ranking.tasks],
        audits=[_audit(run) for run in runs],
        files=_files(results),
        next_steps=wording.after_a_ranking([run.store.url for run in runs], clean.n_clean, bool(clean.reasons)),
    )
    return place.write(page, ranking.plain())


def write_joint_page(place: PagePlace, report: JointReport, runs: Sequence[FinishedRun], folder: str) -> str:
    """Write the page of a joint selection: what several models select together, the guarantee, and what to do next.

    Args:
        place: place of the page.
        report: the joint selection.
        runs: its runs.
        folder: the folder with the lists.

    Returns:
        The path or URL of the page.
    """
    page = render(
        f"pipeline.compare/{JOINT_PAGE}",
        report=report,
        table=page_table(joint_table(report)),
        audits=[_audit(run) for run in runs],
        folder=folder,
        next_steps=wording.after_a_joint_selection(report.direction, report.proved.n_selected, bool(report.reasons)),
    )
    return place.write(page, report.plain())


def _audit(run: FinishedRun) -> AuditOfItems:
    history = read_history(run.store)
    refused: Counter[str] = Counter()
    for receipt in run.receipts:
        refused.update(receipt.reasons)
    answered = f"{history[-1].when[:16].replace('T', ' ')} UTC" if history else ""
    return AuditOfItems(run.store.url, run.model, run.fingerprint, answered, dict(refused.most_common()))


def _files(results: Sequence[ItemResults]) -> list[ResultFile]:
    """The files of results with the models of each."""
    models: dict[str, dict[str, None]] = {}
    for one in results:
        models.setdefault(one.path, {}).setdefault(one.model)
    files = []
    for path, names in models.items():
        with fsspec.open(path, "rb") as file:
            files.append(ResultFile(path, ", ".join(names), hashlib.file_digest(file, "sha256").hexdigest()))
    return files
