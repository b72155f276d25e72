"""The commands that hold finished runs against each other: seenset compare | joint | rank. None asks a model."""

from __future__ import annotations

from typing import Annotated

import typer

from ray_jobs import terminal
from ray_jobs.options import (
    OUTPUT_HELP,
    AsJson,
    FirstRun,
    JointAlpha,
    OnShared,
    ResultPaths,
    RunPaths,
    SecondRun,
    SharedSelection,
)


def compare(
    run_a: FirstRun,
    run_b: SecondRun,
    selection: SharedSelection = None,
    output: Annotated[str, typer.Option("--output", metavar="FOLDER", help=OUTPUT_HELP)] = "comparison",
    json_: AsJson = False,
) -> None:
    """What changed between two runs: documents gained and lost, scores against each other, settings and data."""
    from pipeline.compare.comparison import COMPARISON_FILE, compare_runs
    from pipeline.compare.comparison_page import write_comparison
    from pipeline.compare.finished_runs import open_finished
    from pipeline.compare.output import open_output

    store = open_output(output, COMPARISON_FILE)
    comparison, scores = compare_runs(open_finished(run_a), open_finished(run_b), selection, store)
    page = write_comparison(store, comparison, scores)
    if json_:
        terminal.print_json({**comparison.plain(), "page": page})
    else:
        terminal.print_comparison(comparison, page)


def joint(
    runs: RunPaths,
    selection: SharedSelection = None,
    alpha: JointAlpha = None,
    shared: OnShared = False,
    output: Annotated[str, typer.Option("--output", metavar="FOLDER", help=OUTPUT_HELP)] = "joint",
    json_: AsJson = False,
) -> None:
    """What is clean (or was trained on) under every one of several models, at one error rate."""
    from pipeline.compare.finished_runs import open_finished
    from pipeline.compare.joint import JOINT_FILE, decide_jointly, joint_documents, write_joint
    from pipeline.compare.output import open_output

    store = open_output(output, JOINT_FILE)
    opened = [open_finished(run) for run in runs]
    with joint_documents(opened, selection, shared) as (summaries, rows, common):
        answer = decide_jointly(opened, summaries, rows, common, alpha)
        write_joint(store, answer, rows)
    if json_:
        terminal.print_json({**answer.report.plain(), "folder": store.url})
    else:
        terminal.print_joint(answer.report, store.url)


def rank(
    results: ResultPaths,
    run: Annotated[
        list[str] | None,
        typer.Option("--run", metavar="RUN", help="A finished run that judged the items; several: clean under all."),
    ] = None,
    selection: SharedSelection = None,
    alpha: JointAlpha = None,
    metric: Annotated[str | None, typer.Option("--metric", help="By default acc, else exact_match.")] = None,
    filter_: Annotated[str | None, typer.Option("--filter", help="By default the only one.")] = None,
    task: Annotated[
        list[str] | None,
        typer.Option("--task", metavar="TASK=INPUT", help="The audited input that a task is; may be repeated."),
    ] = None,
    id_field: Annotated[
        str | None,
        typer.Option(
            "--id", metavar="FIELD", help="Field of each doc with its id; by default items are matched by row."
        ),
    ] = None,
    output: Annotated[str, typer.Option("--output", metavar="FOLDER", help=OUTPUT_HELP)] = "ranking",
    json_: AsJson = False,
) -> None:
    """Accuracy of models on all items of a benchmark and on those selected as clean, from their per-item results."""
    from pipeline.compare.finished_runs import open_finished
    from pipeline.compare.items import clean_items, model_warnings
    from pipeline.compare.output import open_output
    from pipeline.compare.ranking import RANKING_FILE, rank_models
    from pipeline.compare.results import read_all_results, task_inputs

    store, inputs = open_output(output, RANKING_FILE), task_inputs(task or ())
    runs = [open_finished(one) for one in run or ()]
    clean, items = clean_items(runs, selection, alpha)
    read = read_all_results(results, metric, filter_, id_field)
    ranking = rank_models(clean, items, read, runs[0], inputs, store, model_warnings(runs))
    if json_:
        terminal.print_json({**ranking.plain(), "folder": store.url})
    else:
        terminal.print_ranking(ranking, store.url)
