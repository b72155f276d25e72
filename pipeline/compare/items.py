"""The audited documents as items of benchmarks, with the place of each and whether it was selected as clean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import PurePath

import numpy as np
import pyarrow as pa
from pydantic import Field

from pipeline.compare import comparison_text as wording
from pipeline.compare.finished_runs import FinishedRun, RunRecord, chosen_selection, read_answer_tables, run_record
from pipeline.compare.harnesses.base import ItemResults
from pipeline.compare.joint import decide_jointly, doubtful_runs, joint_documents, joint_level
from pipeline.corpus.documents import fetch_texts
from pipeline.errors import UserError, nearest
from pipeline.results.summary import Summary
from pipeline.run.conclusion import Concluded
from pipeline.selection.joint import joint_levels

_LEAST_CHECKED = 5
_LEAST_CHARACTERS = 12


class CleanItems(Concluded):
    """The items that were selected as clean, and the guarantee."""

    runs: list[RunRecord] = Field(description="The runs that audited the items; several: clean under all their models.")
    selection: str = Field(description="The selection of direction clean.")
    alpha: float = Field(description="Largest share of the selected that may be wrong, in (0, 1).")
    n_audit: int = Field(description="Audited documents.")
    n_clean: int = Field(description="Documents selected as clean.")
    guarantee: str = Field(description="Guarantee of the selection.")
    promise: str = Field(description="The guarantee of the selection in words.")
    reasons: list[str] = Field(description="The checks that contradict the guarantee, one line each.")
    warnings: list[str] = Field(description="Further cautions, one line each.")


@dataclass(frozen=True, slots=True)
class Item:
    """One audited document."""

    doc_id: str
    source: str  # the input, by its name in ids of this run
    row: int
    clean: bool


def check_clean(runs: Sequence[FinishedRun], selection: str | None, alpha: float | None) -> str:
    """Check what is asked of `clean_items`, before a document is read.

    Returns:
        The name of the selection.

    Raises:
        UserError: no such selection, direction members, alpha given for one run, or outside (0, 1).
    """
    name = chosen_selection(runs, selection)
    for run in runs:
        if (direction := run.summary(name).direction) != "clean":
            raise UserError(
                f"selection {name} of {run.store.url} has direction {direction}: only direction clean selects "
                "items that are clean; not to be selected as a member proves nothing"
            )
    if len(runs) > 1:
        joint_level([run.summary(name) for run in runs], alpha)
    elif alpha is not None:
        raise UserError(
            f"one run's selection has another alpha, {runs[0].summary(name).alpha:g}: repeat it with seenset select "
            f"{runs[0].store.url}"
        )
    return name


def clean_items(
    runs: Sequence[FinishedRun], selection: str | None, alpha: float | None
) -> tuple[CleanItems, list[Item]]:
    """The audited documents of runs, with those selected as clean; for several runs, under all of their models.

    The selection of a single run is used as it is; for several runs, e-BH decides again (`pipeline.compare.joint`).

    Args:
        runs: at least one run.
        selection: name of the selection; None: the only one that they share.
        alpha: alpha of a joint selection; None: that of the selections.

    Raises:
        UserError: the errors of `check_clean`, or runs that audited different documents.
    """
    name = check_clean(runs, selection, alpha)
    return _alone(runs[0], name) if len(runs) == 1 else _together(runs, name, alpha)


def _alone(run: FinishedRun, name: str) -> tuple[CleanItems, list[Item]]:
    summary = run.summary(name)
    items = _items(run, summary)
    n_clean, limit = sum(item.clean for item in items), run.manifest.limit
    limited = [] if limit is None else [wording.first_of_role(limit)]
    record = CleanItems(
        runs=[run_record(run)],
        selection=name,
        n_clean=n_clean,
        warnings=[*doubtful_runs([run], [summary]), *limited, *([] if n_clean else [wording.NOTHING_CLEAN])],
        **summary.model_dump(include={"alpha", "n_audit", "guarantee", "promise", "conclusion", "reasons"}),
    )
    return record, items


def _together(runs: Sequence[FinishedRun], name: str, alpha: float | None) -> tuple[CleanItems, list[Item]]:
    clean: set[str] = set()
    with joint_documents(runs, name, alpha, False) as (summaries, rows, shared):
        answer = decide_jointly(runs, summaries, rows, shared, alpha)
        for part in rows.parts():
            p = np.stack([table["p_value"].to_numpy() for table in part.shared])
            keep = joint_levels(answer.evidence, p) <= answer.proved.level
            clean.update(part.shared[0]["doc_id"].filter(pa.array(keep)).to_pylist())
    report = answer.report
    record = CleanItems(
        runs=[run_record(run) for run in runs],
        selection=name,
        n_clean=len(clean),
        guarantee=report.proved.guarantee,
        promise=report.proved.promise,
        warnings=[*report.warnings, *([] if clean else [f"{wording.NOTHING_CLEAN}. {report.resolution()}"])],
        **report.model_dump(include={"alpha", "n_audit", "conclusion", "reasons"}),
    )
    return record, _items(runs[0], summaries[0], clean)


def _items(run: FinishedRun, summary: Summary, clean: Set[str] | None = None) -> list[Item]:
    """Every audited document with its place, in the order of the inputs.

    Args:
        run: run that audited the documents.
        summary: summary of its selection.
        clean: ids of the documents selected under several models; None: those that the run itself selected.
    """
    columns = ("doc_id", "source", "row", "selected", "quarantined")
    items = [
        Item(name, source, row, selected if clean is None else name in clean and not quarantined)
        for table in read_answer_tables(run, summary)
        for name, source, row, selected, quarantined in zip(*(table[c].to_pylist() for c in columns), strict=True)
    ]
    return sorted(items, key=lambda item: (item.source, item.row))


def task_name(source: str) -> str:
    """The task of an input: its file name without suffixes, as in `clean_ids.json`."""
    return PurePath(source).name.split(".")[0]


def match_items(results: ItemResults, items: Sequence[Item], run: FinishedRun, inputs: Mapping[str, str]) -> list[Item]:
    """The items of results, in the order of the documents; results and documents must be the same items.

    Args:
        results: results of one model and task.
        items: all audited documents.
        run: run that audited them.
        inputs: task -> input, for tasks with another name than their input.

    Raises:
        UserError: another task, another number of items, an unknown item, or one without a result.
    """
    of_task = list(items) if results.any_input else _of_task(results, items, inputs)
    if not results.by_id:
        rows = {str(item.row) for item in of_task}
        if results.values.keys() != rows:
            extra = len(results.values.keys() - rows)
            raise UserError(
                f"{results.path} has results of {len(results.values):,} items"
                f"{f', {extra:,} of them beyond its rows' if extra else ''}, and the run audited {len(rows):,} "
                f"rows of {of_task[0].source}: they must be the same items; --id FIELD matches by an id"
            )
        _check_fields(results, of_task, run)
        return of_task
    known = {item.doc_id: item for item in of_task}
    full = {run.folder + name: name for name in known}
    named = {full.get(item, item) for item in results.values}
    for item in results.values:
        if full.get(item, item) not in known:
            raise UserError(
                f"item {item!r} in {results.path} is not a document that {run.store.url} audited; "
                f"{nearest(item, list(known)[:20], 'the first are')}"
            )
    if missing := [name for name in known if name not in named]:
        raise UserError(
            f"model {results.model!r} has no result in {results.path} for {len(missing):,} of {len(known):,} audited "
            f"items, first {missing[0]!r}"
        )
    results.values = {full.get(item, item): value for item, value in results.values.items()}
    results.hashes = {full.get(item, item): value for item, value in results.hashes.items()}
    return of_task


def _of_task(results: ItemResults, items: Sequence[Item], inputs: Mapping[str, str]) -> list[Item]:
    sources = list(dict.fromkeys(item.source for item in items))
    wanted = inputs.get(results.task)
    if wanted is not None and wanted not in sources:
        raise UserError(f"--task {results.task}={wanted}: no such input; {nearest(wanted, sources, 'the run audited')}")
    if wanted is None and results.by_id and len(sources) == 1:
        return list(items)
    matching = [source for source in sources if (source == wanted if wanted else task_name(source) == results.task)]
    if len(matching) != 1:
        problem = "several inputs are" if matching else "no input is"
        raise UserError(
            f"{results.path} is of task {results.task!r}, and {problem} named so; "
            f"{nearest(results.task, sources, 'the run audited')}; --task {results.task}=INPUT names it"
        )
    return [item for item in items if item.source == matching[0]]


def _check_fields(results: ItemResults, items: Sequence[Item], run: FinishedRun) -> None:
    """Refuse results none of whose first items occurs in the text of its row, where the texts can be read.

    Raises:
        UserError: there are such results, whose rows are not the items of the input.
    """
    looked_at = [item for item in items if str(item.row) in results.fields]
    shards = [shard for shard in run.shards.values() if shard.role == "audit"]
    names = {shard.name.removeprefix(run.folder): shard.name for shard in shards}
    try:
        texts = fetch_texts(shards, [(names[item.source], item.row) for item in looked_at])
    except UserError:
        return
    checked = alike = 0
    for item in looked_at:
        text = _bare(texts.get((names[item.source], item.row), ""))
        fields = [bare for one in results.fields[str(item.row)] if len(bare := _bare(one)) >= _LEAST_CHARACTERS]
        if text and fields:
            checked += 1
            alike += any(one in text or text in one for one in fields)
    if checked >= _LEAST_CHECKED and not alike:
        raise UserError(
            f"{results.path}: of its first {checked} items none has a field that occurs in the audited text of its row "
            f"in {looked_at[0].source}: these are other items, or in another order; --id FIELD matches by an id"
        )


def _bare(text: str) -> str:
    return " ".join(text.split()).casefold()
