"""Documents that are selected as clean, or as members, under every one of several models, at one error rate."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np
import pyarrow as pa
from pydantic import Field
from rich.table import Table
from rich.text import Text

from pipeline.compare import comparison_text as wording
from pipeline.compare.finished_runs import (
    FinishedRun,
    JoinedRuns,
    RunRecord,
    Shared,
    chosen_selection,
    joined_runs,
    refuse_different,
    run_record,
    same_models,
)
from pipeline.config.selection import Direction
from pipeline.errors import UserError
from pipeline.report.tables import of_numbers
from pipeline.results.summary import Summary
from pipeline.run.conclusion import Concluded, weakest
from pipeline.run.conclusion_text import WARNING
from pipeline.run.records import Record, VersionedRecord
from pipeline.selection.calibrations import calibration_of
from pipeline.selection.guarantees import JOINTLY, ConclusionValue, GuaranteeKind
from pipeline.selection.joint import (
    JointCut,
    JointEvidence,
    JointResolution,
    count_levels,
    e_values,
    exact_level,
    joint_cut,
    joint_levels,
    joint_resolution,
)
from pipeline.selection.procedures.record import procedure_of
from pipeline.store.external_sort import SortedRows, write_pieces
from pipeline.store.files import Store

JOINT_FILE = "joint.json"
GRID_ERROR = 1e-6
"""Tolerance of p-values from the grid k / (n + 1), in ranks; the float64 rounding is smaller up to 10^9 documents."""


class JointModel(Concluded, RunRecord):
    """One model of a joint selection, with the result of its own selection."""

    procedure: str = Field(description="The procedure of this run's own selection.")
    n_audit: int = Field(description="Documents that this run audited, quarantined ones included.")
    n_quarantined: int = Field(description="Of these, those without scores; p = 1 under this model.")
    n_calibration: int = Field(description="Documents that its p-values were calibrated on.")
    n_selected: int = Field(description="Documents that its own selection holds, at its own alpha.")
    alpha: float = Field(description="Alpha of its own selection.")
    factor: float = Field(description="A document's e-value is 1 / (factor p), or 0 where that could select nothing.")


class JointList(Record):
    """One of the two joint selections."""

    n_selected: int = Field(description="Documents selected under every model.")
    file: str = Field(description="The file that lists them.")
    guarantee: GuaranteeKind = Field(
        description="finite-sample: proved for any number of documents; heuristic: not proved."
    )
    assumption: str = Field(description="The assumption of the guarantee.")
    promise: str = Field(description="The guarantee under the assumption.")


class JointReport(Concluded, VersionedRecord):
    """The joint selection of several runs: `joint.json`."""

    schema_: Literal[2] = Field(  # type: ignore[assignment]
        2, alias="schema", description="Version of the form of this file."
    )
    selection: str = Field(description="The selection of every run that was joined.")
    direction: Direction = Field(description="clean: under no model trained on; members: under every one.")
    alpha: float = Field(description="Largest share of the selected that may be wrong, in (0, 1).")
    models: list[JointModel] = Field(description="The runs, in the order in which they were given.")
    documents: Shared = Field(description="Number of documents that the runs share.")
    n_audit: int = Field(description="Documents of the joint selection: those that all runs audited.")
    proved: JointList = Field(description="e-BH on the smallest of the models' e-values.")
    largest_p: JointList = Field(description="BH on the largest of the models' p-values.")
    reasons: list[str] = Field(description="The checks that contradict the guarantee, one line each.")
    fewest: int = Field(description="The fewest documents that the proved selection can hold, if any.")
    needed_for_any: int = Field(description="Calibration documents of every run for anything to be selectable.")
    needed_for_1_percent: int = Field(description="The same for a list of 1% of the audited documents.")
    grouped: bool = Field(description="Whether needed documents are those of every group: a run calibrates by group.")
    smallest_alpha: float = Field(description="Below it nothing can be selected, whatever the scores.")
    warnings: list[str] = Field(description="Further cautions, one line each.")

    def sentences(self) -> list[str]:
        """The answer in readable lines; contradictions of the guarantee come first."""
        proved, other = self.proved, self.largest_p
        selected = wording.jointly_selected(
            proved.n_selected, self.n_audit, self.direction, len(self.models), self.alpha
        )
        return [
            *(f"{WARNING}: {reason}" for reason in self.reasons),
            f"{selected} ({proved.guarantee}). {proved.promise}",
            self.resolution(),
            wording.largest_p_answer(other.n_selected, other.guarantee, other.promise),
        ]

    def resolution(self) -> str:
        """The minimum length of the list, and the requirements of a shorter one."""
        small = JointResolution(self.fewest, self.smallest_alpha, self.needed_for_any, self.needed_for_1_percent)
        return wording.joint_shortest(small, self.n_audit, self.alpha, self.grouped)


@dataclass(frozen=True, slots=True)
class JointAnswer:
    """The decision: the report, the evidence, and the thresholds."""

    report: JointReport
    evidence: list[JointEvidence]
    proved: JointCut
    largest_p: JointCut


@contextlib.contextmanager
def joint_documents(
    runs: Sequence[FinishedRun], selection: str | None, alpha: float | None, on_shared: bool
) -> Iterator[tuple[list[Summary], JoinedRuns, Shared]]:
    """The documents of several runs for a joint selection: summaries, joined rows, and the shared documents.

    Raises:
        UserError: fewer than 2 runs, selections or an alpha that cannot be joined, or different documents without
            `on_shared`.
    """
    if len(runs) < 2:
        raise UserError(f"a joint selection needs at least 2 runs, got {len(runs)}; one run has its own selections")
    if len({run.store.url for run in runs}) < len(runs):
        raise UserError("a run is given twice; each of the models is one run")
    name = chosen_selection(runs, selection)
    summaries = [run.summary(name) for run in runs]
    _check_selections(runs, summaries)
    joint_level(summaries, alpha)  # before a document is read
    with joined_runs(runs, summaries) as rows:
        shared = rows.count()
        refuse_different(shared, on_shared)
        yield summaries, rows, shared


def _check_selections(runs: Sequence[FinishedRun], summaries: Sequence[Summary]) -> None:
    """Refuse selections without an e-value, whose p-values are not individually valid or test another null.

    Raises:
        UserError: there is one; the message names it.
    """
    first = summaries[0]
    for run, summary in zip(runs, summaries, strict=True):
        where = f"selection {summary.name} of {run.store.url}"
        if summary.direction != first.direction:
            raise UserError(
                f"{where} has direction {summary.direction}, and that of {runs[0].store.url} has {first.direction}"
            )
        if calibration_of(summary.calibration).conditional:
            raise UserError(
                f"{where} has calibration {summary.calibration}: a joint selection takes pooled or by_group, whose "
                "p-values are valid on average over calibration sets"
            )
        if not procedure_of(summary.procedure).is_valid(reconformal=summary.guarantee == "finite-sample"):
            raise UserError(f"{where} is {summary.procedure}, whose p-values are not valid: set reconformal: true")


def decide_jointly(
    runs: Sequence[FinishedRun],
    summaries: Sequence[Summary],
    rows: JoinedRuns,
    shared: Shared,
    alpha: float | None,
) -> JointAnswer:
    """Decide a joint selection: one reading of the documents.

    Args:
        runs: at least 2 runs.
        summaries: summaries of their selections.
        rows: their documents, from `joint_documents`.
        shared: counts of the shared documents.
        alpha: alpha of the joint selection; None: that of the selections.

    Raises:
        UserError: alpha outside (0, 1), selections with different alphas and none given, or damaged p-values.
    """
    level = joint_level(summaries, alpha)
    evidence = [
        JointEvidence.of(summary.n_calibration, shared.n_shared, level, calibration_of(summary.calibration).grouped)
        for summary in summaries
    ]
    plain = [one.plain() for one in evidence]
    counts: tuple[Counter[int], Counter[int]] = (Counter(), Counter())
    for part in rows.parts():
        p = np.stack([table["p_value"].to_numpy() for table in part.shared])
        _check_places(p, runs, summaries)
        for total, kind in zip(counts, (evidence, plain), strict=True):
            total.update(count_levels(joint_levels(kind, p)))
    cuts = [joint_cut(total, shared.n_shared) for total in counts]
    report = _report(runs, summaries, shared, evidence, cuts)
    return JointAnswer(report, evidence, *cuts)


def joint_level(summaries: Sequence[Summary], alpha: float | None) -> Fraction:
    """The alpha of a joint selection; None: that of the selections. Raises UserError as `decide_jointly`."""
    levels = sorted({summary.alpha for summary in summaries})
    if alpha is None and len(levels) > 1:
        raise UserError(f"the selections have alpha {' and '.join(f'{one:g}' for one in levels)}: set --alpha")
    return exact_level(levels[0] if alpha is None else alpha)


def _check_places(p: np.ndarray, runs: Sequence[FinishedRun], summaries: Sequence[Summary]) -> None:
    for values, run, summary in zip(p, runs, summaries, strict=True):
        places = values * (summary.n_calibration + 1)
        off = np.abs(places - np.rint(places)).max(initial=0) if calibration_of(summary.calibration).plain else 0.0
        if off > GRID_ERROR or not ((values > 0) & (values <= 1)).all():
            raise UserError(
                f"{run.store.url}: selection {summary.name} holds p-values that {summary.n_calibration:,} calibration "
                f"documents cannot give; repeat the selections with seenset select {run.store.url}"
            )


def _report(
    runs: Sequence[FinishedRun],
    summaries: Sequence[Summary],
    shared: Shared,
    evidence: Sequence[JointEvidence],
    cuts: Sequence[JointCut],
) -> JointReport:
    named = list(zip(runs, summaries, evidence, strict=True))
    lists = []
    for stated, cut, file in zip(JOINTLY.values(), cuts, ("selected.parquet", "largest_p.parquet"), strict=True):
        stricter = [
            f"For {run.store.url}: {summary.assumption}"
            for run, summary in zip(runs, summaries, strict=True)
            if (ranked := procedure_of(summary.procedure)).several
            or ranked.signed
            or calibration_of(summary.calibration).grouped
        ]
        assumption = " ".join([stated.assumption, *(stricter if stated.guarantee == "finite-sample" else [])])
        lists.append(
            JointList(
                n_selected=cut.n_selected,
                file=file,
                guarantee=stated.guarantee,
                assumption=assumption,
                promise=stated.promise,
            )
        )
    small = joint_resolution(evidence)
    models = [
        JointModel(
            **run_record(run).model_dump(),
            **summary.model_dump(
                include={"procedure", "n_audit", "n_quarantined", "n_calibration", "n_selected", "alpha", "conclusion"}
            ),
            factor=float(one.factor),
        )
        for run, summary, one in named
    ]
    return JointReport(
        selection=summaries[0].name,
        direction=summaries[0].direction,
        alpha=float(evidence[0].alpha),
        models=models,
        documents=shared,
        n_audit=shared.n_shared,
        proved=lists[0],
        largest_p=lists[1],
        conclusion=weakest(summary.conclusion for summary in summaries),
        reasons=[f"{run.store.url}: {reason}" for run, summary, _ in named for reason in summary.reasons],
        warnings=_warnings(runs, summaries, shared, small),
        fewest=small.fewest,
        needed_for_any=small.needed_for_any,
        needed_for_1_percent=small.needed_for_1_percent,
        grouped=any(one.grouped for one in evidence),
        smallest_alpha=small.smallest_alpha,
    )


def _warnings(
    runs: Sequence[FinishedRun], summaries: Sequence[Summary], shared: Shared, small: JointResolution
) -> list[str]:
    warnings = same_models(runs)
    warnings += doubtful_runs(runs, summaries)
    if not shared.alike:
        warnings.append(f"{shared.sentence()}; {wording.SHARED_ONLY}")
    limits = [(run.store.url, run.manifest.limit) for run in runs]
    warnings += [f"{url} is {wording.first_of_role(limit)}" for url, limit in limits if limit is not None]
    if small.fewest > shared.n_shared:
        warnings.append(wording.TOO_FEW_CALIBRATED)
    return warnings


def doubtful_runs(runs: Sequence[FinishedRun], summaries: Sequence[Summary]) -> list[str]:
    """Why runs are inconclusive, and what to do next; what contradicts others is a reason of its own."""
    lines: list[str] = []
    for run, one in zip(runs, summaries, strict=True):
        if one.conclusion != ConclusionValue.SUPPORTED:
            remarks = one.remarks if one.conclusion == ConclusionValue.INCONCLUSIVE else []
            lines += [f"{run.store.url}: {line}" for line in [*remarks, *([f"next: {one.next}"] if one.next else [])]]
    return lines


def write_joint(store: Store, answer: JointAnswer, rows: JoinedRuns) -> None:
    """Write both lists, smallest p-value first, and joint.json last.

    Columns: doc_id, e_value (a lower limit of the smallest), largest_p, and p_value_1, p_value_2 and so on in the
    order of the runs.

    Args:
        store: the folder, from `open_output`.
        answer: result of `decide_jointly`.
        rows: the same documents.
    """
    report, evidence = answer.report, answer.evidence
    plain = [one.plain() for one in evidence]
    with contextlib.ExitStack() as stack:
        for cut, listed, kind in (
            (answer.proved, report.proved, evidence),
            (answer.largest_p, report.largest_p, plain),
        ):
            selected = SortedRows(_schema(len(evidence)), ["largest_p", "doc_id"])
            stack.callback(selected.close)
            for part in rows.parts():
                p = np.stack([table["p_value"].to_numpy() for table in part.shared])
                keep = joint_levels(kind, p) <= cut.level
                e = e_values(joint_levels(evidence, p[:, keep]), evidence[0].m, evidence[0].alpha)
                ids = part.shared[0]["doc_id"].filter(pa.array(keep))
                columns = [ids, pa.array(e), pa.array(p[:, keep].max(axis=0, initial=0)), *map(pa.array, p[:, keep])]
                selected.add(pa.table(columns, schema=selected.schema))
            write_pieces(store, listed.file, selected.schema, selected.pieces())
    store.write_json(JOINT_FILE, report.plain())


def _schema(models: int) -> pa.Schema:
    numbers = ["e_value", "largest_p", *(f"p_value_{index + 1}" for index in range(models))]
    return pa.schema([("doc_id", pa.string()), *((name, pa.float64()) for name in numbers)])


def joint_table(report: JointReport) -> Table:
    """The runs of a joint selection, with the selection of each."""
    figures = of_numbers("alpha", "audited", "calibrated on", "selected alone")
    title = f"Selection {report.selection} ({report.direction})"
    table = Table("", "run", "model", "procedure", *figures, title=title)
    for number, model in enumerate(report.models, 1):
        table.add_row(
            str(number),
            Text(model.run),
            Text(model.model),
            model.procedure,
            f"{model.alpha:g}",
            f"{model.n_audit:,}",
            f"{model.n_calibration:,}",
            f"{model.n_selected:,}",
        )
    return table
