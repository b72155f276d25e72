"""The output of the command: tables and sentences on standard output, or one JSON object."""

from __future__ import annotations

import io
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from pipeline.errors import LINE_BREAK, one_line, visible
from pipeline.stages import is_scoring
from pipeline.wording import percent

if TYPE_CHECKING:
    from pipeline.answers.evaluation import Evaluation
    from pipeline.answers.verdict import CollectionVerdict
    from pipeline.bundle.verify import BundleVerification
    from pipeline.compare.comparison import Comparison
    from pipeline.compare.joint import JointReport
    from pipeline.compare.ranking import RankingReport
    from pipeline.export.export import Exported
    from pipeline.mark.mark import Marked
    from pipeline.results.status import Status
    from pipeline.results.summary import Summary
    from pipeline.series.summary import SeriesSummary
    from pipeline.trial.progress import TrialStatus
    from pipeline.trial.trial import TrialOutcome

MOST_REPORTS = 8
"""Maximum number of audits of a trial whose addresses are printed."""

MOST_GROUPS = 12
"""Maximum number of groups whose weights are printed."""

_CONTROLS = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

SILENT_SECONDS = 8.0
"""Time after which the next line is due."""


class VisibleConsole(Console):
    """A console that escapes all control characters in its input, because file names and ids may contain any."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print, and report the output to the heartbeat."""
        heartbeat.hear()
        super().print(*objects, **options)

    def lines(self, *lines: str | Text) -> None:
        """Print lines unchanged, with any names in them, and without cutting."""
        for line in lines:
            self.print(line, markup=False, highlight=False, soft_wrap=True)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Segments in which only the console's own codes control the terminal."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


def console(errors: bool = False) -> VisibleConsole:
    """Standard output, or standard error where the output is JSON; wide where it is not a terminal, to cut no table.

    In a notebook it prints text as well, where rich would create an HTML output for every line.
    """
    stream = sys.stderr if errors else sys.stdout
    return VisibleConsole(file=stream, width=None if stream.isatty() else 200, force_jupyter=False)


def show_all_characters() -> None:
    """Print a character that the terminal's encoding lacks as its code point, instead of failing."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def print_line(text: str) -> None:
    """Print one plain line, with any names in it."""
    heartbeat.hear()
    print(visible(text).replace("\n", LINE_BREAK))


def print_json(value: Any, in_one_line: bool = False) -> None:
    """Print one JSON object, indented or on one line, with control characters escaped."""
    text = json.dumps(value, indent=None if in_one_line else 2, ensure_ascii=False)
    print(_CONTROLS.sub(lambda match: f"\\u{ord(match.group()):04x}", text))


def show(as_json: bool, facts: Any, print_text: Callable[..., None], *arguments: Any) -> None:
    """Print an answer: its facts as one JSON object, or as text by a function and its arguments."""
    if as_json:
        print_json(facts)
    else:
        print_text(*arguments)


def _pass_in_words(entry: dict[str, Any]) -> str:
    """A pass of the forecast, as text that follows the word pass."""
    if entry["kind"] == "generate":
        if entry["prefix_ratio"] is None:
            return f"generate: {entry['draws']} continuations of a chat before its last answer"
        share = 100 * entry["prefix_ratio"]
        return f"generate: {entry['draws']} continuations of the first {share:g}% of a text's words"
    more = f" and {entry['paraphrases']} paraphrases of it" if entry["paraphrases"] else ""
    on = f" with adapter {entry['adapter']}" if entry["adapter"] else ""
    read = f"{entry['text']} text" if entry["text"].startswith(("plain", "lowercase", "swapped")) else entry["text"]
    read = entry["prefix"] if entry["kind"] == "count" else read
    if "prefix_tokens" in entry:
        read += f" after {entry['prefix']} ({entry['prefix_tokens']:,} tokens)"
    return f"{entry['kind']}: {entry['model']} model{on}, {read}{more}"


def print_plan(facts: dict[str, Any]) -> None:
    """Print the forecast of a run (`pipeline.plan.forecast`)."""
    screen = console()
    model = facts["model"]
    chosen = f", {model['chosen']}" if model.get("chosen") else ""
    about = model["architecture"] + ("" if model["dtype"] == "unknown" else f", {model['dtype']}{chosen}")
    screen.lines(f"model {model['path']} ({about})", *facts.get("slow", ()))
    table = Table("role", "documents", "shards")
    for role, entry in facts["roles"].items():
        about = "" if entry["exact"] else "about "
        table.add_row(role, f"{about}{entry['documents']:,}", f"{entry['shards']:,}")
    screen.print(table)
    if facts["limit"] is not None:
        screen.print(f"a sample: the first {facts['limit']:,} documents of each role")
    for entry in facts["passes"]:
        screen.print(f"pass {_pass_in_words(entry)}", highlight=False)
    for entry in facts["adapters"]:
        source = " and ".join(entry["train_on"])
        some = f"{entry['documents']:,} documents" if entry["documents"] else "documents"
        epochs = f"{entry['epochs']} epochs" if entry["epochs"] > 1 else "1 epoch"
        screen.print(f"adapter {entry['name']}: {entry['method']} on {some} of {source}, {epochs}", highlight=False)
    screen.print(f"detectors {', '.join(facts['detectors'])}", markup=False, highlight=False)
    seconds = facts["estimated_seconds_one_worker"]
    if seconds is not None:
        from pipeline.results.status import duration

        screen.print(
            f"about {facts['estimated_tokens']:,} tokens a pass; "
            f"about {duration(seconds)} on one worker like this machine (estimated from {facts['estimated_from']})",
            highlight=False,
            soft_wrap=True,
        )
    if (endpoint := facts["endpoint"]) is not None:
        price = f", about {endpoint['price']:,.2f}" if endpoint["price"] else ""
        screen.lines(
            f"endpoint: {endpoint['requests']:,} requests, about {endpoint['prompt_tokens']:,} tokens of prompts and "
            f"at most {endpoint['answer_tokens']:,} of answers{price}",
            *(f"warning: {limit}, less than that" for limit in endpoint["over"]),
            *endpoint["parameters"],
        )
    if facts.get("cluster") is not None:
        screen.lines(facts["cluster"])
    checks = facts["checks"]
    screen.lines(f"checked {checks['scope']}:", *(f"  {line}" for line in checks["lines"]))
    screen.lines(*(f"series: {line}" for line in (facts.get("series") or {}).get("lines", [])))
    if facts.get("against") is not None:
        screen.lines(f"against: {facts['against']}")
    for entry in facts["selections"]:
        mark = "warning: " if entry["outcome"] == "failed" else ""
        head = f"selection {entry['name']} ({entry['procedure']}, {entry['direction']}, alpha {entry['alpha']:g}): "
        screen.lines(f"{head}{mark}{' '.join(entry[key] for key in ('sentence', 'advice') if key in entry)}")
    expected = next((entry["expected"] for entry in facts["selections"] if "expected" in entry), None)
    if expected is not None:
        from pipeline.answers.verdict_text import expected_text

        screen.lines(expected_text(expected))
    screen.lines(*(facts[key] for key in ("window", "windows") if key in facts))
    screen.lines(*(facts[key]["sentence"] for key in ("chats", "continued") if key in facts))


def print_starter(facts: dict[str, Any], command: str) -> None:
    """Print what `seenset init` wrote and guessed, and the next step."""
    from pipeline.config.yaml import printable

    path, missing = facts["config"], facts["missing"]
    table = Table("found", Column("files", justify="right"), "taken as", "what is read, or why not")
    for row in facts["contents"]:
        count = f"{row['count']:,}" if row["count"] else ""
        table.add_row(*(Text(printable(cell)) for cell in (row["files"], count, row["taken_as"] or "-", row["reason"])))
    console().print(table)
    print_line(f"wrote {path}")
    for line in facts["guesses"]:
        print_line(f"  {printable(line)}")
    for line in missing:
        print_line(f"missing: {line}")
    print_line(f"next: {'correct that, then ' if missing else ''}seenset {command} {path}")


def progress_lines(status: Status | TrialStatus) -> list[str]:
    """The progress of a run, without its answers; or of a trial and its current audit."""
    from pipeline.results.status import Status

    if not isinstance(status, Status):
        lines = [status.line(), *([status.message] if status.message else [])]
        if (audit := status.audit) is not None:
            done = f"{audit.shards_done}/{audit.shards}"
            lines.append(f"audit {status.audit_run}: {audit.state}, {audit.stage}: shards {done}")
        return lines
    stage = "" if is_scoring(status.stage) else f", {status.stage}"
    scored = f", scored {status.scored:,}" if is_scoring(status.stage) else ""
    already_audited = f", already audited {status.judged:,}" if status.judged else ""
    lines = [
        f"{status.state}{stage}: shards {status.shards_done}/{status.shards}, documents {status.documents:,}{scored}, "
        f"quarantined {status.quarantined:,}{already_audited}"
    ]
    if status.state == "running":
        eta = "-" if status.eta_s is None else f"{status.eta_s:.0f} s"
        rates = f"{status.documents_per_s:,.1f} documents/s, {status.tokens_per_s:,.0f} tokens/s"
        under_way = f"{status.under_way:,} more under way, " if status.under_way else ""
        lines.append(f"{under_way}{rates}, ETA {eta}")
    return lines + status.parameters + ([status.message] if status.message else [])


_LEFT_OUT = ("strict", "threshold p", "procedure")
"""Columns that a narrow terminal leaves out, the first one first; summary.json holds them."""


def _answers_table(summaries: Sequence[Summary], left_out: Sequence[str]) -> Table:
    from pipeline.run.conclusion import STYLES
    from pipeline.selection.guarantees import ConclusionValue

    contradicted = ConclusionValue.CONTRADICTED
    rows: list[dict[str, str | Text]] = [
        {
            "selection": summary.name,
            "procedure": summary.procedure,
            "alpha": f"{summary.alpha:g}",
            "audited": f"{summary.n_audit:,}",
            "selected": f"{summary.n_selected:,}",
            "checks": Text(summary.conclusion_shown, style=STYLES[summary.conclusion]),
            "threshold p": "-" if summary.threshold is None else f"{summary.threshold:.4g}",
            "guarantee": summary.guarantee + ", but contradicted here" * (summary.conclusion == contradicted),
            "strict": f"{summary.strict.n_selected:,} ({summary.strict.procedure})",
        }
        for summary in summaries
    ]
    least = {"checks": len("CONTRADICTED"), "alpha": 5, "audited": 7, "selected": 8}  # complete on any terminal
    names = [name for name in rows[0] if name not in left_out]
    table = Table(*(Column(name, min_width=least.get(name), overflow="fold") for name in names))
    for row in rows:
        table.add_row(*(row[name] for name in names))
    return table


def _print_weights(screen: VisibleConsole, summary: Summary) -> None:
    """Print what the p-values of the groups of a selection are divided by, if they are."""
    if summary.weighting is None:
        return
    groups, numbers = summary.groups_by_weight, ("audited", "calibration", "compared", "high scores", "weight")
    table = Table("group", *(Column(name, justify="right") for name in numbers))
    for one in groups[:MOST_GROUPS]:
        high = percent(round(one.n_high / max(1, one.n_pooled), 3))
        counts = (f"{count:,}" for count in (one.n_audit, one.n_calibration, one.n_pooled))
        table.add_row(Text(one.group), *counts, high, f"{one.weight:.3g}")
    screen.lines(f"{summary.name}: {summary.weighting}")
    screen.print(table)
    if len(groups) > MOST_GROUPS:
        screen.lines(f"{len(groups) - MOST_GROUPS:,} more groups are in summary.json")


def print_summaries(summaries: Sequence[Summary]) -> None:
    """Print a table of the answers, the contradicted ones, and the guarantee of each list."""
    if not summaries:
        return
    from pipeline.answers.stated_bounds import bound_sentence
    from pipeline.answers.summarise import learnt_sentences
    from pipeline.checks.answered import AnsweredDiagnostic
    from pipeline.report.brief import next_steps

    screen, left_out = console(), list[str]()
    table = _answers_table(summaries, left_out)
    wide = screen.options.update_width(1000)  # a measure is at most the width that it is given
    while screen.measure(table, options=wide).maximum > screen.width and len(left_out) < len(_LEFT_OUT):
        left_out.append(_LEFT_OUT[len(left_out)])
        table = _answers_table(summaries, left_out)
    screen.print(table)
    for summary in summaries:
        _print_weights(screen, summary)
    notes: dict[str, list[str]] = {}
    for summary in summaries:
        bounded = bound_sentence(summary)
        place = [summary.series.sentence] if summary.series is not None else []
        drawn = [summary.smoothed.sentence(summary.n_selected)] if summary.smoothed is not None else []
        drawn += learnt_sentences(summary)
        answered = summary.diagnostics.find(AnsweredDiagnostic)
        drawn += [answered.sentence] if answered is not None else []
        for remark in [*place, *summary.remarks, *([bounded] if bounded else []), *drawn]:
            notes.setdefault(remark, []).append(summary.name)
    for remark, names in notes.items():
        screen.lines(f"{', '.join(names)}: {remark}")
    for step, names in next_steps(summaries).items():
        whose = f" ({', '.join(names)})" if len(names) < len(summaries) else ""
        screen.lines(f"next{whose}: {step}")


def print_outcome(run: str, status: Status, report: str) -> None:
    """Print the final status of a run: its answers, the effect of several questions, and the address of the report."""
    print_answers(run, status.selections)
    print_line(f"report: {report}")


def print_verdict(verdict: CollectionVerdict) -> None:
    """Print the verdict on a collection: the answer, its contradictions, and its numbers."""
    from pipeline.run.conclusion import STYLES
    from pipeline.run.conclusion_text import WARNING
    from pipeline.selection.guarantees import ConclusionValue, Outcome

    screen = console()
    head, *others = verdict.sentences
    style = STYLES[verdict.conclusion]
    screen.lines(Text(head, style="bold" if verdict.answer == "not shown" else f"bold {style}"))
    contradicted = verdict.conclusion == ConclusionValue.CONTRADICTED
    mark = f"{WARNING}: " if contradicted else ""  # other reasons state their result
    screen.lines(*(Text(f"{mark}{reason}", style=style) for reason in verdict.reasons), *others)
    if verdict.blind.outcome == Outcome.PASSED:
        screen.lines(f"blind test: {verdict.blind.sentence}")
    if verdict.next is not None:
        screen.lines(f"next: {verdict.next}")
    print_line(f"verdict: {verdict.run}/verdict.json")


def print_answers(run: str, summaries: Sequence[Summary]) -> None:
    """Print the answers of a run, and the effect of several questions on their guarantee."""
    from pipeline.config.selection import HISTORY
    from pipeline.results.history import read_history, several_questions
    from pipeline.store.files import Store

    print_summaries(summaries)
    if (sentence := several_questions(read_history(Store(run)))) is not None:
        console().lines(f"{sentence} All of them: selection/{HISTORY}, and section 2 of the report.")


def print_export(exported: Exported) -> None:
    """Print the written files of an export, and notes for readers."""
    screen = console()
    screen.lines(*exported.sentences())
    files = len(exported.files)
    print_line(f"export: {exported.plan.out} ({files:,} file{'s' * (files != 1)}, and README.md)")


def print_evaluation(evaluation: Evaluation, page: str) -> None:
    """Print the figures of an evaluation, and its cautions."""
    from pipeline.report.tables import evaluation_table

    screen = console()
    screen.print(evaluation_table(evaluation))
    screen.lines(*(f"note: {notice}" for notice in evaluation.notices))
    print_line(f"page: {page}")


def print_joint(report: JointReport, folder: str, page: str | None) -> None:
    """Print the joint selection of several runs, its guarantee, and the place of the lists."""
    from pipeline.compare.joint import joint_table

    screen = console()
    screen.print(joint_table(report))
    screen.lines(*(f"warning: {warning}" for warning in report.warnings))
    screen.lines(*report.sentences())
    print_line(f"lists: {folder} ({report.proved.file}; {report.largest_p.file}: not proved)")
    if page is not None:
        print_line(f"page: {page}")


def print_comparison(comparison: Comparison, page: str) -> None:
    """Print the changes between two runs, and their limits."""
    from pipeline.compare.comparison import comparison_table, differences_table

    screen = console()
    screen.lines(*comparison.sides())
    screen.lines(*(f"note: {notice}" for notice in comparison.notices))
    screen.print(comparison_table(comparison))
    screen.lines(comparison.caution)
    if comparison.differences:
        screen.print(differences_table(comparison))
    print_line(f"page: {page}")


def print_ranking(ranking: RankingReport, folder: str, page: str | None) -> None:
    """Print models on all and on the clean items, changes of places, and the basis of the numbers."""
    from pipeline.compare.ranking import ranking_table
    from pipeline.run.conclusion_text import WARNING

    screen = console()
    clean = ranking.clean
    screen.lines(*(Text(f"{WARNING}: {reason}", style="bold red") for reason in clean.reasons))
    screen.lines(*(f"note: {warning}" for warning in [*clean.warnings, *ranking.notices]))
    for task in ranking.tasks:
        screen.print(ranking_table(task))
        screen.lines(*(change.sentence() for change in task.changes))
    count = f"{clean.n_clean:,} of {clean.n_audit:,} items are selected as clean at alpha {clean.alpha:g}"
    screen.lines(f"{count} ({clean.guarantee}). {clean.promise}", ranking.intervals)
    print_line(f"ranking: {folder}")
    if page is not None:
        print_line(f"page: {page}")


def print_series(summary: SeriesSummary, page: str | None) -> None:
    """Print the scans of a schedule, the guarantee for all of them with its limits, and new documents."""
    from pipeline.series.summary import series_table

    screen = console()
    screen.print(series_table(summary))
    screen.lines(*(f"note: {note}" for note in summary.notes))
    for one in summary.selections:
        bounded = [one.bound.sentence] if one.bound is not None else []
        screen.lines(*(f"{one.name}: {line}" for line in (one.promise, *one.not_promised, *bounded)))
    for latest in summary.new:
        screen.lines(*(f"{latest.name}: {line}" for line in (latest.sentence(), *latest.notes)))
    if page is not None:
        print_line(f"page: {page}")


def print_marked(marked: Marked) -> None:
    """Print the result of marking, and a sample of it side by side for inspection."""
    screen = console()
    screen.lines(*marked.sentences())
    for document in marked.sample:
        table = Table("as it was", "as it is published", title=Text(document.id), title_justify="left")
        for before, after in document.edits:
            table.add_row(Text(before), Text(after))
        screen.print(table)
    print_line(f"publish: {marked.folder}/public; keep secret: {marked.folder}/private")
    print_line(f"root: {marked.root} ({marked.folder}/commitment.json)")


def print_trial(outcome: TrialOutcome) -> None:
    """Print the results of a trial, and the place of its files."""
    for table in outcome.tables:
        console().print(table)
    print_line(f"trial: {outcome.folder} (tables.txt, *.json, *.parquet, figures/)")
    for report in outcome.reports[:MOST_REPORTS]:
        print_line(f"report: {report}")
    print_line(f"page: {outcome.page}")


def print_bundle(facts: dict[str, Any]) -> None:
    """Print the bundle that `seenset pack` wrote, and the next step."""
    print_line(f"bundle: {facts['bundle']} ({facts['bytes']:,} bytes, SHA-256 {facts['sha256']})")
    print_line(f"next: seenset verify {facts['bundle']}")


def print_verification(verification: BundleVerification) -> None:
    """Print the results of checking a bundle, one line per statement."""
    for finding in verification.findings:
        print_line(f"{finding.outcome:<8} {finding}")
    end = "nothing is refuted" if verification.holds else "REFUTED"
    print_line(f"{verification.bundle} (SHA-256 {verification.sha256}): {end}")


class Heartbeat:
    """Prints the activity of a command while nothing else is printed; nothing before `begin`."""

    def __init__(self) -> None:
        self._stream: TextIO = sys.stdout
        self._phase = ""
        self._silent = SILENT_SECONDS
        self._began = self._heard = 0.0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, stream: TextIO, phase: str, silent: float | None = None) -> None:
        """Start with a first phase.

        Args:
            stream: stream for the lines.
            phase: activity of the command.
            silent: seconds without a line, > 0; None: `SILENT_SECONDS`.
        """
        self._stream, self._silent = stream, silent or SILENT_SECONDS
        self.phase(phase)
        self.hear()
        self.resume()

    def phase(self, phase: str) -> None:
        """Start another phase."""
        self._phase = phase
        self._began = time.monotonic()

    def hear(self) -> None:
        """Record that something was printed."""
        self._heard = time.monotonic()

    def resume(self) -> None:
        """Print lines again, if started, because a fork does not copy threads."""
        if not self._phase:
            return
        self.stop()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, args=(self._ended,), name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop printing after the line under way; without this thread, the process can fork."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(1.0)  # a stream that is not read can delay it

    def _beat(self, ended: threading.Event) -> None:
        while not ended.wait(max(self._heard + self._silent - time.monotonic(), self._silent / 10)):
            if time.monotonic() - self._heard >= self._silent:
                self.hear()
                try:
                    print(f"{one_line(self._phase)}: {time.monotonic() - self._began:.0f} s", file=self._stream)
                    self._stream.flush()
                except (OSError, ValueError):  # closed or not read
                    return


heartbeat = Heartbeat()
"""Heartbeat of the command that this process runs."""
