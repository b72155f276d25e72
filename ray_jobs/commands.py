"""The commands that read what runs have left (only retry asks a model), seenset mark, and seenset verify."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Annotated, Literal

import typer

from pipeline.errors import ExitCode, UserError
from ray_jobs import terminal
from ray_jobs.options import AsJson, ExitZeroOn, FailIfSelected, NoText, Overrides, RunPath, from_options
from ray_jobs.supervisor import supervise

TRAINED_HELP = "Exit 4 when the collection was trained on, and 5 when something says so that a check contradicts."
PAGE_HELP = "Write series.html and series.json into FOLDER, of its own, or the page alone to FILE.html."
NEW_HELP = (
    "Exit 4 when the scan filed last selected a document that none before it had, and 5 when a check contradicts "
    "such a list."
)
OUTPUT_HELP = "Folder of what is written, of its own: local path or fsspec URL."
INPUT_HELP = "File or folder with the documents: Parquet, JSONL (.gz, .zst), CSV, .txt."
OUT_HELP = "Folder to write, of its own: public/, private/ and commitment.json. Nothing is overwritten."
BUNDLE_HELP = "File to write: local path or fsspec URL. By default RUN.bundle; nothing is overwritten."
REVIEW_HELP = "CSV file to write: local path or fsspec URL. By default RUN-review.csv; nothing is overwritten."
COMMITMENT_HELP = "commitment.json of seenset mark, whose root the indices and versions must lead to."
TEXTS_HELP = "Put the texts of the scored documents into the bundle."
SEED_HELP = "Secret number below 2**256 that all draws follow from; by default drawn and written to private/seed.json."
WITH_HELP = "YAML of a paraphraser, as `paraphraser:` of an audit: a model writes all versions, the published one too."

SharedSelection = Annotated[
    str | None,
    typer.Option("--selection", metavar="NAME", help="Which selection; by default the only one that the runs share."),
]
JointAlpha = Annotated[
    float | None,
    typer.Option("--alpha", metavar="A", help="Error rate of the joint selection; by default that of the runs'."),
]


def retry(
    run: RunPath,
    reason: Annotated[
        list[str] | None,
        typer.Option(
            "--reason", help="Why they are in quarantine; may be repeated. By default model_error, out_of_memory."
        ),
    ] = None,
    json_: AsJson = False,
    no_text: NoText = False,
    exit_zero_on: ExitZeroOn = None,
) -> None:
    """Try documents in quarantine again that a fault put there, and answer anew; all else is kept."""
    _check_run(run)
    from ray_jobs.audit import retry_run
    from ray_jobs.progress import Reporter

    outcome = retry_run(run, reason or (), Reporter(terminal.console(errors=json_)), not no_text)
    if outcome is None:
        return terminal.print_json({"retried": 0}) if json_ else None
    terminal.print_outcome(run, outcome.status, outcome.report, json_)


def status(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run directory (local path or fsspec URL), or the folder of a trial.")
    ],
    json_: AsJson = False,
    watch: Annotated[
        bool,
        typer.Option("--watch", help="Until the run ends; with --json, one object a line whenever it is further."),
    ] = False,
    every: Annotated[
        float | None,
        typer.Option("--every", metavar="SECONDS", min=0.1, help="How often --watch looks.", show_default="2"),
    ] = None,
    exit_zero_on: ExitZeroOn = None,
) -> None:
    """Say how far a run or a trial is, from storage alone. Exit 3 where it is not running and not complete."""
    if every is not None and not watch:
        raise UserError("--every says how often --watch looks: give both, or neither")
    from pipeline.audit.status import Status
    from ray_jobs.watch import read_progress, watch_progress

    status = watch_progress(run, json_, every) if watch else read_progress(run)
    if not json_:
        for line in terminal.progress_lines(status):
            terminal.print_line(line)
        if isinstance(status, Status):
            terminal.print_summaries(status.selections)
            terminal.print_history(run)
    elif not watch:
        terminal.print_json(status.plain())
    # so that a script need not read the text
    raise typer.Exit(int(ExitCode.INCOMPLETE if status.state in ("incomplete", "failed") else ExitCode.DONE))


def select(
    run: RunPath,
    set_: Overrides = None,
    json_: AsJson = False,
    no_text: NoText = False,
    fail_if_selected: FailIfSelected = False,
    exit_zero_on: ExitZeroOn = None,
) -> None:
    """Ask a finished run its own questions anew, or with --set other ones; no model is touched, all are remembered."""
    _check_run(run, set_)
    from pipeline.audit.summary import exit_code_of, unsupported
    from ray_jobs.progress import Reporter
    from ray_jobs.select import select_again

    summaries = select_again(run, set_ or (), not no_text, Reporter(terminal.console(errors=json_)).say)
    if json_:
        answers = [summary.plain() for summary in summaries]
        terminal.print_json({"selections": answers, "unsupported": unsupported(summaries)})
    else:
        terminal.print_summaries(summaries)
        terminal.print_history(run)
    if fail_if_selected and (code := exit_code_of(summaries)):
        raise typer.Exit(int(code))


def verdict(
    run: RunPath,
    blocks: Annotated[
        str | None,
        typer.Option("--blocks", metavar="group|family", help="What the permutation test moves whole."),
    ] = None,
    json_: AsJson = False,
    fail_if_trained: Annotated[bool, typer.Option("--fail-if-trained", help=TRAINED_HELP)] = False,
    exit_zero_on: ExitZeroOn = None,
) -> None:
    """Was this collection trained on? At least so many of its documents, and a test of it as a whole."""
    _check_run(run)
    from pipeline.audit.collection import block_kind
    from ray_jobs.select import give_verdict

    answer = give_verdict(run, block_kind(blocks))
    terminal.show(json_, answer.plain(), terminal.print_verdict, answer)
    if fail_if_trained and answer.exit_code:
        raise typer.Exit(int(answer.exit_code))


def review(
    run: RunPath,
    out: Annotated[str | None, typer.Argument(metavar="[OUT]", help=REVIEW_HELP)] = None,
    json_: AsJson = False,
    no_text: NoText = False,
) -> None:
    """Write the unseen documents with the highest scores to a file, to fill in whether each was trained on."""
    _check_run(run)
    from ray_jobs.select import write_review_file

    facts = write_review_file(run, out, not no_text)
    terminal.show(json_, facts, terminal.print_review, facts)


def report(run: RunPath, json_: AsJson = False, no_text: NoText = False) -> None:
    """Write the report of a run anew."""
    from pipeline.audit.manifest import read_run
    from pipeline.store.files import Store

    store = Store(run)
    read_run(store)
    from pipeline.report.page import write_report

    path = write_report(store, texts=not no_text)
    terminal.show(json_, {"report": path}, terminal.print_line, f"report: {path}")


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """The options of `seenset export`."""

    run: RunPath
    out: Annotated[
        str | None,
        typer.Argument(
            metavar="[OUT]", help="Folder to write: local path or fsspec URL. By default named after the run."
        ),
    ] = None
    selection: Annotated[
        str | None,
        typer.Option("--selection", metavar="NAME", help="Which selection; needed where there are several."),
    ] = None
    keep: Annotated[
        Literal["selected", "rest"] | None,
        typer.Option("--keep", help="Which documents; by default the rest, and with direction clean the selected."),
    ] = None
    as_list: Annotated[bool, typer.Option("--list", help="Ids and rows alone; by default of the selected.")] = False
    samples: Annotated[bool, typer.Option("--samples", help="What lm-evaluation-harness takes for --samples.")] = False
    task: Annotated[
        str | None,
        typer.Option("--task", metavar="NAME", help="The task of --samples; by default the group column names it."),
    ] = None
    huggingface: Annotated[bool, typer.Option("--huggingface", help="A Hugging Face dataset folder, as Parquet.")] = (
        False
    )
    without_quarantined: Annotated[
        bool, typer.Option("--without-quarantined", help="Leave documents out of the rest that could not be scored.")
    ] = False
    unsupported_too: Annotated[
        bool,
        typer.Option("--unsupported-too", help="Export a selection whose promise a check contradicts, marked so."),
    ] = False
    json_: AsJson = False


@from_options
def export(options: ExportOptions) -> None:
    """Write the cleaned data, the corpus without the selected, or what to remove, in the format that came in."""
    from pipeline.export.export import write_export
    from pipeline.export.request import ExportRequest, form_of

    form = form_of({"list": options.as_list, "samples": options.samples, "huggingface": options.huggingface})
    request = ExportRequest(
        options.run,
        options.out,
        options.selection,
        options.keep,
        form,
        options.task,
        quarantined=not options.without_quarantined,
        unsupported_too=options.unsupported_too,
    )
    exported = write_export(request)
    terminal.show(options.json_, exported.plain(), terminal.print_export, exported)


def compare(
    run_a: Annotated[str, typer.Argument(metavar="RUN_A", help="The first finished run: local path or fsspec URL.")],
    run_b: Annotated[str, typer.Argument(metavar="RUN_B", help="The second.")],
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
    terminal.show(json_, {**comparison.plain(), "page": page}, terminal.print_comparison, comparison, page)


def joint(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Finished run directories: local paths or fsspec URLs.")
    ],
    selection: SharedSelection = None,
    alpha: JointAlpha = None,
    shared: Annotated[
        bool, typer.Option("--shared", help="Answer for the documents that all runs audited, where others differ.")
    ] = False,
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
    terminal.show(json_, {**answer.report.plain(), "folder": store.url}, terminal.print_joint, answer.report, store.url)


@dataclass(frozen=True, slots=True)
class RankOptions:
    """The options of `seenset rank`."""

    results: Annotated[
        list[str],
        typer.Argument(
            metavar="RESULTS...",
            help="lm-eval's sample files or folders of them (NAME=PATH names the model), or Parquet: model, item, "
            "correct.",
        ),
    ]
    run: Annotated[
        list[str] | None,
        typer.Option("--run", metavar="RUN", help="A finished run that judged the items; several: clean under all."),
    ] = None
    selection: SharedSelection = None
    alpha: JointAlpha = None
    metric: Annotated[str | None, typer.Option("--metric", help="By default acc, else exact_match.")] = None
    filter_: Annotated[str | None, typer.Option("--filter", help="By default the only one.")] = None
    task: Annotated[
        list[str] | None,
        typer.Option("--task", metavar="TASK=INPUT", help="The audited input that a task is; may be repeated."),
    ] = None
    id_field: Annotated[
        str | None,
        typer.Option(
            "--id", metavar="FIELD", help="Field of each doc with its id; by default items are matched by row."
        ),
    ] = None
    output: Annotated[str, typer.Option("--output", metavar="FOLDER", help=OUTPUT_HELP)] = "ranking"
    json_: AsJson = False


@from_options
def rank(options: RankOptions) -> None:
    """Accuracy of models on all items of a benchmark and on those selected as clean, from their per-item results."""
    from pipeline.compare.finished_runs import open_finished
    from pipeline.compare.items import clean_items
    from pipeline.compare.output import open_output
    from pipeline.compare.ranking import RANKING_FILE, rank_models
    from pipeline.compare.results import read_all_results, task_inputs

    store, inputs = open_output(options.output, RANKING_FILE), task_inputs(options.task or ())
    runs = [open_finished(one) for one in options.run or ()]
    clean, items = clean_items(runs, options.selection, options.alpha)
    read = read_all_results(options.results, options.metric, options.filter_, options.id_field)
    ranking = rank_models(clean, items, read, runs, inputs, store)
    terminal.show(options.json_, {**ranking.plain(), "folder": store.url}, terminal.print_ranking, ranking, store.url)


def series(
    ledger: Annotated[
        str, typer.Argument(metavar="LEDGER", help="Folder of the scans of a schedule: local path or fsspec URL.")
    ],
    page: Annotated[str | None, typer.Option("--page", metavar="FOLDER|FILE", help=PAGE_HELP)] = None,
    fail_if_new: Annotated[bool, typer.Option("--fail-if-new", help=NEW_HELP)] = False,
    json_: AsJson = False,
    exit_zero_on: ExitZeroOn = None,
) -> None:
    """Every scan of a schedule, the error rate over all of them, and what is new since the last one."""
    from pipeline.series.course import read_course
    from pipeline.series.page import check_page_place, write_course

    place = None if page is None else check_page_place(page, ledger)
    course = read_course(ledger)
    address = None if place is None else write_course(place, course)
    terminal.show(json_, {**course.plain(), "page": address}, terminal.print_course, course, address)
    if fail_if_new and (code := course.exit_code()):
        raise typer.Exit(int(code))


@dataclass(frozen=True, slots=True)
class MarkOptions:
    """The options of `seenset mark`."""

    source: Annotated[str, typer.Argument(metavar="INPUT", help=INPUT_HELP)]
    out: Annotated[str, typer.Option("--out", metavar="DIR", help=OUT_HELP)]
    versions: Annotated[int, typer.Option("--versions", metavar="K", help="Versions of a document, 2 to 1,000.")] = 20
    text: Annotated[str, typer.Option("--text", metavar="COLUMN", help="Column that holds the text.")] = "text"
    id_: Annotated[
        str | None, typer.Option("--id", metavar="COLUMN", help="Column that holds the id; by default file#row.")
    ] = None
    language: Annotated[str, typer.Option("--language", metavar="CODE", help="Language of the documents.")] = "en"
    seed: Annotated[int | None, typer.Option("--seed", metavar="N", help=SEED_HELP)] = None
    with_: Annotated[str | None, typer.Option("--with", metavar="CONFIG.YAML", help=WITH_HELP)] = None
    date: Annotated[
        datetime | None,
        typer.Option(
            "--date",
            metavar="YYYY-MM-DD",
            formats=["%Y-%m-%d"],
            help="Date that commitment.json states; by default none.",
        ),
    ] = None
    json_: AsJson = False


@from_options
def mark(options: MarkOptions) -> None:
    """Write documents in versions and publish one of each, drawn at random, so that training on them can be shown."""
    from pipeline.mark.mark import MarkRequest, check_request, mark_documents
    from pipeline.mark.versions import new_seed

    request, draw = (
        MarkRequest(
            options.source,
            options.out,
            options.versions,
            options.text,
            options.id_,
            new_seed() if options.seed is None else options.seed,
            options.language,
            created=None if options.date is None else options.date.date().isoformat(),
        ),
        None,
    )
    check_request(request)
    if options.with_ is not None:
        from pipeline.mark.paraphrases import paraphraser_of, paraphrasing

        model = paraphraser_of(options.with_)
        request, draw = replace(request, model=model.shown), paraphrasing(model, request.versions, request.seed)
    marked = mark_documents(request, draw)
    terminal.show(options.json_, marked.plain(), terminal.print_marked, marked)


def pack(
    run: RunPath,
    out: Annotated[str | None, typer.Argument(metavar="[OUT]", help=BUNDLE_HELP)] = None,
    texts: Annotated[bool, typer.Option("--texts", help=TEXTS_HELP)] = False,
    json_: AsJson = False,
    exit_zero_on: ExitZeroOn = None,
) -> None:
    """Write one file with the evidence for the answers of a finished run, which seenset verify checks offline."""
    _check_run(run)
    from ray_jobs.select import write_bundle

    facts = write_bundle(run, out, texts)
    terminal.show(json_, facts, terminal.print_bundle, facts)


def verify(
    bundle: Annotated[str, typer.Argument(metavar="BUNDLE", help="File that seenset pack wrote.")],
    commitment: Annotated[str | None, typer.Option("--commitment", metavar="FILE", help=COMMITMENT_HELP)] = None,
    json_: AsJson = False,
    exit_zero_on: ExitZeroOn = None,
) -> None:
    """Recompute the answers in a bundle from its scores, offline and without the model. Exit 5 where one is refuted."""
    from pipeline.bundle.verify import verify_bundle
    from pipeline.bundle.versions import commitment_of

    committed = None if commitment is None else commitment_of(_content(commitment), commitment)
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
        raise UserError(f"{path} is no file")
    return data


def _check_run(run: str, overrides: list[str] | None = None) -> None:
    """Show what is wrong with a run directory or with new settings for it, as early as `_planned`."""
    from pipeline.audit.description import build_config
    from pipeline.audit.machine import may_need_cluster
    from pipeline.audit.manifest import read_run
    from pipeline.store.files import Store

    manifest, _ = read_run(Store(run))
    if manifest.config.corpus.audit is None:
        raise UserError(
            f"{run} compares documents of known membership, and asks nothing: the same seenset evaluate goes on with it"
        )
    build_config(manifest.config.model_dump(mode="json", by_alias=True), overrides or ())
    supervise(may_need_cluster(manifest.config.resources))


COMMANDS = (retry, status, select, verdict, review, report, export, compare, joint, rank, series, mark, pack, verify)
"""In the order of the help."""
