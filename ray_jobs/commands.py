"""The commands that read the files of runs, seenset mark, and seenset verify."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import datetime
from typing import Annotated, Literal

import typer

from pipeline.errors import ExitCode, UserError
from ray_jobs import terminal
from ray_jobs.supervisor import supervise

ConfigPath = Annotated[str, typer.Argument(metavar="AUDIT.YAML", help="Configuration of the audit.")]
RunPath = Annotated[str, typer.Argument(metavar="RUN", help="Run directory: local path or fsspec URL.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=C", help="Override a setting; may be repeated.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Limit = Annotated[int | None, typer.Option("--limit", metavar="N", help="Read the first N documents of each role.")]
NoText = Annotated[bool, typer.Option("--no-text", help="Leave all texts out of the report and the lists.")]
FailIfSelected = Annotated[
    bool,
    typer.Option(
        "--fail-if-selected",
        help="Exit with 4 if anything is selected, with 5 if a check contradicts a selection that selects anything.",
    ),
]

TRAINED_HELP = "Exit with 4 if it is shown that the collection was trained on, with 5 if a check contradicts that."
PAGE_HELP = "Write a page with its JSON file to FOLDER, used for nothing else, or the page alone to FILE.html."
NEW_HELP = (
    "Exit with 4 if the latest scan selected a document that no earlier scan selected, with 5 if a check contradicts "
    "such a list."
)
OUTPUT_HELP = "Output folder, used for nothing else: local path or fsspec URL."
INPUT_HELP = "File or folder with the documents: Parquet, JSONL (.gz, .zst), CSV, .txt."
OUT_HELP = "Output folder, used for nothing else, for public/, private/ and commitment.json. Nothing is overwritten."
BUNDLE_HELP = "File to write: local path or fsspec URL. Default: RUN.bundle. Nothing is overwritten."
COMMITMENT_HELP = "commitment.json of seenset mark, against which indices and versions are checked."
TEXTS_HELP = "Include the texts of the scored documents in the bundle."
SEED_HELP = "Secret number below 2**256 that seeds all draws. Default: drawn and written to private/seed.json."
WITH_HELP = "YAML file with a paraphraser, as `paraphraser:` of an audit: a model writes all versions."

SharedSelection = Annotated[
    str | None,
    typer.Option("--selection", metavar="NAME", help="The selection. Default: the only one that the runs share."),
]
JointAlpha = Annotated[
    float | None,
    typer.Option("--alpha", metavar="A", help="Error rate of the joint selection. Default: that of the runs."),
]


def status(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Run directory (local path or fsspec URL), or the folder of a trial.")
    ],
    json_: AsJson = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Follow the run to its end; with --json, one object a line at each change.")
    ] = False,
    every: Annotated[
        float | None, typer.Option("--every", metavar="SECONDS", min=0.1, help="Interval of --watch.", show_default="2")
    ] = None,
) -> None:
    """Show the progress of a run or a trial, from its files alone. Exit 3 if it is incomplete and not running."""
    if every is not None and not watch:
        raise UserError("--every is the interval of --watch: give both, or neither")
    from pipeline.results.status import Status
    from ray_jobs.progress import read_progress, watch_progress

    status = watch_progress(run, json_, every) if watch else read_progress(run)
    if not json_:
        for line in terminal.progress_lines(status):
            terminal.print_line(line)
        if isinstance(status, Status):
            terminal.print_answers(run, status.selections)
    elif not watch:
        terminal.print_json(status.plain())
    # scripts can use it without reading the text
    raise typer.Exit(int(ExitCode.INCOMPLETE if status.state in ("incomplete", "failed") else ExitCode.DONE))


def select(
    run: RunPath,
    set_: Overrides = None,
    json_: AsJson = False,
    no_text: NoText = False,
    fail_if_selected: FailIfSelected = False,
) -> None:
    """Select again from the scores of a finished run, with other settings by --set. Every selection is recorded."""
    _check_run(run, set_)
    from pipeline.results.summary import selection_exit_code, unsupported
    from ray_jobs.progress import Reporter
    from ray_jobs.select import select_again

    summaries = select_again(run, set_ or (), not no_text, Reporter(terminal.console(errors=json_)).say)
    if json_:
        answers = [summary.plain() for summary in summaries]
        terminal.print_json({"selections": answers, "unsupported": unsupported(summaries)})
    else:
        terminal.print_answers(run, summaries)
    if fail_if_selected and (code := selection_exit_code(summaries)):
        raise typer.Exit(int(code))


def verdict(
    run: RunPath,
    blocks: Annotated[
        str | None,
        typer.Option("--blocks", metavar="group|family", help="Unit that the permutation test moves as a whole."),
    ] = None,
    json_: AsJson = False,
    fail_if_trained: Annotated[bool, typer.Option("--fail-if-trained", help=TRAINED_HELP)] = False,
) -> None:
    """Test whether the collection was trained on, and state a lower bound of how many of its documents were."""
    _check_run(run)
    from pipeline.answers.scored_collection import block_kind
    from ray_jobs.select import give_verdict

    answer = give_verdict(run, block_kind(blocks))
    terminal.show(json_, answer.plain(), terminal.print_verdict, answer)
    if fail_if_trained and answer.exit_code:
        raise typer.Exit(int(answer.exit_code))


def report(run: RunPath, json_: AsJson = False, no_text: NoText = False) -> None:
    """Write the report of a run again."""
    from pipeline.run.manifest import read_run
    from pipeline.store.files import Store

    store = Store(run)
    read_run(store)
    from pipeline.report.page import write_report

    path = write_report(store, texts=not no_text)
    terminal.show(json_, {"report": path}, terminal.print_line, f"report: {path}")


def export(
    run: RunPath,
    out: Annotated[
        str | None,
        typer.Argument(metavar="OUT", help="Output folder: local path or fsspec URL. Default: named after the run."),
    ] = None,
    selection: Annotated[
        str | None,
        typer.Option("--selection", metavar="NAME", help="Name of the selection; required if there are several."),
    ] = None,
    keep: Annotated[
        Literal["selected", "rest"] | None,
        typer.Option("--keep", help="Documents to write. Default: the rest; with direction clean, the selected."),
    ] = None,
    as_list: Annotated[bool, typer.Option("--list", help="Write ids and rows only. Default: of the selected.")] = False,
    samples: Annotated[bool, typer.Option("--samples", help="Write samples.json for lm-eval --samples.")] = False,
    task: Annotated[
        str | None,
        typer.Option("--task", metavar="NAME", help="Task of --samples. Default: named by the group column."),
    ] = None,
    huggingface: Annotated[bool, typer.Option("--huggingface", help="Write a Hugging Face dataset folder.")] = False,
    without_quarantined: Annotated[
        bool, typer.Option("--without-quarantined", help="Leave documents that could not be scored out of the rest.")
    ] = False,
    unsupported_too: Annotated[
        bool, typer.Option("--unsupported-too", help="Export what a check contradicts, marked as such.")
    ] = False,
    json_: AsJson = False,
) -> None:
    """Write the corpus without the selected documents, or the selected alone, in the format of the input."""
    from pipeline.export.export import write_export
    from pipeline.export.request import ExportRequest, choose_form

    form = choose_form({"list": as_list, "samples": samples, "huggingface": huggingface})
    options = {"quarantined": not without_quarantined, "unsupported_too": unsupported_too}
    exported = write_export(ExportRequest(run, out, selection, keep, form, task, **options))
    terminal.show(json_, exported.plain(), terminal.print_export, exported)


def compare(
    run_a: Annotated[str, typer.Argument(metavar="RUN_A", help="The first finished run: local path or fsspec URL.")],
    run_b: Annotated[str, typer.Argument(metavar="RUN_B", help="The second finished run.")],
    selection: SharedSelection = None,
    output: Annotated[str, typer.Option("--output", metavar="FOLDER", help=OUTPUT_HELP)] = "comparison",
    json_: AsJson = False,
) -> None:
    """Compare two runs: documents gained and lost, scores, settings and data."""
    from pipeline.compare.comparison import COMPARISON_FILE, compare_runs, write_comparison
    from pipeline.compare.finished_runs import open_finished
    from pipeline.compare.output_places import open_output

    store = open_output(output, COMPARISON_FILE)
    comparison, scores = compare_runs(open_finished(run_a), open_finished(run_b), selection, store)
    page = write_comparison(store, comparison, scores)
    terminal.show(json_, {**comparison.plain(), "page": page}, terminal.print_comparison, comparison, page)


def joint(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Finished run directories: local paths or fsspec URLs.")
    ],
    selection: SharedSelection = None,
    alpha: JointAlpha = None,
    shared: Annotated[
        bool, typer.Option("--shared", help="Answer for the documents that all runs audited, if the runs differ.")
    ] = False,
    output: Annotated[str, typer.Option("--output", metavar="FOLDER", help=OUTPUT_HELP)] = "joint",
    page: Annotated[str | None, typer.Option("--page", metavar="FOLDER|FILE", help=PAGE_HELP)] = None,
    json_: AsJson = False,
) -> None:
    """Select the documents that are clean (or trained on) under all of several models, with one error rate."""
    from pipeline.compare.answer_pages import JOINT_PAGE, write_joint_page
    from pipeline.compare.finished_runs import open_finished
    from pipeline.compare.joint import JOINT_FILE, decide_jointly, joint_documents, write_joint
    from pipeline.compare.output_places import open_output, page_place

    store = open_output(output, JOINT_FILE)
    place = None if page is None else page_place(page, JOINT_PAGE, JOINT_FILE)
    opened = [open_finished(run) for run in runs]
    with joint_documents(opened, selection, alpha, shared) as (summaries, rows, common):
        answer = decide_jointly(opened, summaries, rows, common, alpha)
        write_joint(store, answer, rows)
    report = answer.report
    address = None if place is None else write_joint_page(place, report, opened, store.url)
    facts = {**report.plain(), "folder": store.url, **({} if address is None else {"page": address})}
    terminal.show(json_, facts, terminal.print_joint, report, store.url, address)


def rank(
    results: Annotated[
        list[str],
        typer.Argument(
            metavar="RESULTS...",
            help="Files of lm-eval, inspect_ai, lighteval, or folders of them (NAME=PATH names the model), or "
            "Parquet or CSV with columns model, item, correct.",
        ),
    ],
    run: Annotated[
        list[str],
        typer.Option("--run", metavar="RUN", help="Finished run that audited the items. Several: clean under all."),
    ],
    selection: SharedSelection = None,
    alpha: JointAlpha = None,
    metric: Annotated[str | None, typer.Option("--metric", help="Default: acc, else exact_match.")] = None,
    filter_: Annotated[str | None, typer.Option("--filter", help="Filter of lm-eval. Default: the only one.")] = None,
    task: Annotated[
        list[str] | None, typer.Option("--task", metavar="TASK=INPUT", help="Audited input of a task; may be repeated.")
    ] = None,
    id_field: Annotated[
        str | None,
        typer.Option(
            "--id", metavar="FIELD", help="Field of each item that holds its id. Default: items are matched by row."
        ),
    ] = None,
    output: Annotated[str, typer.Option("--output", metavar="FOLDER", help=OUTPUT_HELP)] = "ranking",
    page: Annotated[str | None, typer.Option("--page", metavar="FOLDER|FILE", help=PAGE_HELP)] = None,
    json_: AsJson = False,
) -> None:
    """Rank models by accuracy on all items of a benchmark and on those selected as clean, from per-item results."""
    from pipeline.compare.answer_pages import RANKING_PAGE, write_ranking_page
    from pipeline.compare.finished_runs import open_finished
    from pipeline.compare.harnesses import read_all_results, task_inputs
    from pipeline.compare.harnesses.base import ResultOptions
    from pipeline.compare.items import check_clean, clean_items
    from pipeline.compare.output_places import open_output, page_place
    from pipeline.compare.ranking import RANKING_FILE, rank_models

    store, inputs = open_output(output, RANKING_FILE), task_inputs(task or ())
    place = None if page is None else page_place(page, RANKING_PAGE, RANKING_FILE)
    runs = [open_finished(one) for one in run]
    check_clean(runs, selection, alpha)
    read = read_all_results(results, ResultOptions(metric, filter_, id_field))
    clean, items = clean_items(runs, selection, alpha)
    ranking = rank_models(clean, items, read, runs, inputs, store)
    address = None if place is None else write_ranking_page(place, ranking, runs, read)
    facts = {**ranking.plain(), "folder": store.url, **({} if address is None else {"page": address})}
    terminal.show(json_, facts, terminal.print_ranking, ranking, store.url, address)


def series(
    ledger: Annotated[
        str, typer.Argument(metavar="LEDGER", help="Folder of the scans of a schedule: local path or fsspec URL.")
    ],
    page: Annotated[str | None, typer.Option("--page", metavar="FOLDER|FILE", help=PAGE_HELP)] = None,
    fail_if_new: Annotated[bool, typer.Option("--fail-if-new", help=NEW_HELP)] = False,
    json_: AsJson = False,
) -> None:
    """Show the scans of a schedule, the error rate over all of them, and what the last one added."""
    from pipeline.compare.output_places import page_place
    from pipeline.series.series_page import SERIES_FILE, SERIES_PAGE, write_series_page
    from pipeline.series.summary import read_series

    place = None if page is None else page_place(page, SERIES_PAGE, SERIES_FILE, ledger)
    summary = read_series(ledger)
    address = None if place is None else write_series_page(place, summary)
    terminal.show(json_, {**summary.plain(), "page": address}, terminal.print_series, summary, address)
    if fail_if_new and (code := summary.exit_code()):
        raise typer.Exit(int(code))


def mark(
    source: Annotated[str, typer.Argument(metavar="INPUT", help=INPUT_HELP)],
    out: Annotated[str, typer.Option("--out", metavar="DIR", help=OUT_HELP)],
    versions: Annotated[int, typer.Option("--versions", metavar="K", help="Versions per document, 2 to 1,000.")] = 20,
    text: Annotated[str, typer.Option("--text", metavar="COLUMN", help="Column that holds the text.")] = "text",
    id_: Annotated[
        str | None, typer.Option("--id", metavar="COLUMN", help="Column that holds the id. Default: file#row.")
    ] = None,
    language: Annotated[str, typer.Option("--language", metavar="CODE", help="Language of the documents.")] = "en",
    encoding: Annotated[
        str,
        typer.Option(
            "--encoding", metavar="NAME", help="Encoding of CSV, JSONL and .txt files, such as cp1252 or utf-16."
        ),
    ] = "utf-8",
    delimiter: Annotated[
        str, typer.Option("--delimiter", metavar="C", help="Character between the fields of CSV files.")
    ] = ",",
    seed: Annotated[int | None, typer.Option("--seed", metavar="N", help=SEED_HELP)] = None,
    with_: Annotated[str | None, typer.Option("--with", metavar="CONFIG.YAML", help=WITH_HELP)] = None,
    date: Annotated[
        datetime | None,
        typer.Option(
            "--date", metavar="YYYY-MM-DD", formats=["%Y-%m-%d"], help="Date stated in commitment.json. Default: none."
        ),
    ] = None,
    json_: AsJson = False,
) -> None:
    """Write several versions of each document and draw one to publish, so that training on it can be tested later."""
    from pipeline.mark.mark import MarkRequest, check_request, mark_documents, new_seed, read_paraphraser

    number, created = new_seed() if seed is None else seed, None if date is None else date.date().isoformat()
    request, draw = MarkRequest(source, out, versions, text, id_, number, language), None
    request = replace(request, created=created, encoding=encoding, delimiter=delimiter)
    check_request(request)
    if with_ is not None:
        model = read_paraphraser(with_)
        from pipeline.mark.paraphrases import paraphrasing

        request, draw = replace(request, model=model.shown), paraphrasing(model, request.versions, request.seed)
    marked = mark_documents(request, draw)
    terminal.show(json_, marked.plain(), terminal.print_marked, marked)


def pack(
    run: RunPath,
    out: Annotated[str | None, typer.Argument(metavar="OUT", help=BUNDLE_HELP)] = None,
    texts: Annotated[bool, typer.Option("--texts", help=TEXTS_HELP)] = False,
    json_: AsJson = False,
) -> None:
    """Write the evidence for the answers of a finished run to one file, which seenset verify checks offline."""
    _check_run(run)
    from ray_jobs.select import write_bundle

    facts = write_bundle(run, out, texts)
    terminal.show(json_, facts, terminal.print_bundle, facts)


def verify(
    bundle: Annotated[str, typer.Argument(metavar="BUNDLE", help="File that seenset pack wrote.")],
    commitment: Annotated[str | None, typer.Option("--commitment", metavar="FILE", help=COMMITMENT_HELP)] = None,
    json_: AsJson = False,
) -> None:
    """Recompute the answers in a bundle from its scores, offline and without the model. Exit 5 if one is refuted."""
    from pipeline.bundle.members import parse_commitment
    from pipeline.bundle.verify import verify_bundle

    if os.path.isdir(bundle):
        raise UserError(f"{bundle} is a folder; seenset verify reads the file that seenset pack makes of a run")
    committed = None if commitment is None else parse_commitment(_content(commitment), commitment)
    verification = verify_bundle(_content(bundle), bundle, committed)
    terminal.show(json_, verification.plain(), terminal.print_verification, verification)
    if not verification.holds:
        raise typer.Exit(int(ExitCode.UNSUPPORTED))


def _content(path: str) -> bytes:
    """The bytes of a file, a local path or an fsspec URL."""
    from pipeline.store.files import Store

    folder, name = os.path.split(path)
    data = Store(folder or ".").find(name) if name else None
    if data is None:
        raise UserError(f"{path} is not a file")
    return data


def _check_run(run: str, overrides: list[str] | None = None) -> None:
    """Raise errors of a run directory or of new settings for it before slow imports, as `_planned` does."""
    from pipeline.plan.description import build_config
    from pipeline.run.machine import may_need_cluster
    from pipeline.run.manifest import check_changed, read_run
    from pipeline.store.files import Store

    manifest, _ = read_run(Store(run))
    if manifest.config.corpus.audit is None:
        raise UserError(
            f"{run} compares documents of known membership, without selections: the same seenset evaluate finishes it"
        )
    config = build_config(manifest.config.model_dump(mode="json", by_alias=True), overrides or ())
    check_changed(manifest.config, config)
    supervise(may_need_cluster(manifest.config.resources) or bool(config.import_))  # whose code may end its process
