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
    RunPaths,
    SecondRun,
    SelectionName,
)


def compare(
    run_a: FirstRun,
    run_b: SecondRun,
    selection: SelectionName = None,
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
    selection: SelectionName = None,
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
