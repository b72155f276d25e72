"""What a reader must know of a run before its first answer, and what several questions do to a promise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import JsonValue

from pipeline.audit.history import HistoryEntry, count_questions
from pipeline.config.selection import SelectionConfig
from pipeline.report.contents import HistoryReport, PastQuestion
from pipeline.report.facts import RunFacts
from pipeline.report.wording.numbers import sample_of

LISTED_QUESTIONS = 50
_COLUMNS = {"name", "direction", "detectors", "procedure", "alpha"}


def history_report(history: Sequence[HistoryEntry]) -> HistoryReport | None:
    """What a run was asked so far, without times: the same questions and scores give the same page."""
    if not history:
        return None
    questions = [
        PastQuestion(asking=number, others=_other_settings(question.settings), **question.model_dump())
        for number, entry in enumerate(history, 1)
        for question in entry.questions
    ]
    return HistoryReport(
        n_questions=count_questions(history),
        n_askings=len(history),
        sentences=_history_sentences(history, len(questions)),
        last_asked_by=history[-1].command,
        questions=questions[-LISTED_QUESTIONS:],
    )


def _history_sentences(history: Sequence[HistoryEntry], n_lines: int) -> list[str]:
    number = count_questions(history)
    sentences = []
    if number > 1:
        sentences = [
            f"This run was asked {number:,} different questions. An answer, taken by itself, keeps what it promises if "
            "its question was fixed before any answer was seen: that others were asked as well does not weaken "
            "it.",
            "That is not so for an answer that was picked because of what it says, such as the longest list or the "
            "first that is not empty, nor for a question that was changed after an answer was seen. The share of wrong "
            "documents in the best of several answers can be larger than any of them promises.",
            "So report the question that was fixed first, or all of them. A question that was added later "
            "keeps its promise on documents of which no answer was seen.",
        ]
    if history[0].command == "select":
        sentences.append("Answers that were given before this list was begun, if there are any, are not in it.")
    if n_lines > LISTED_QUESTIONS:
        sentences.append(f"These are the last {LISTED_QUESTIONS} of {n_lines:,} lines.")
    return sentences


def _other_settings(settings: Mapping[str, JsonValue]) -> str:
    """The settings that differ from the default and have no column of their own."""
    fields = {field.alias or name: field for name, field in SelectionConfig.model_fields.items()}
    differing = {
        key: value
        for key, value in settings.items()
        if key not in _COLUMNS and not (key in fields and fields[key].default == value)
    }
    return ", ".join(f"{key} {value}" for key, value in differing.items())


def notices(run: RunFacts) -> list[str]:
    """What a reader must know before the first answer."""
    lines: list[str] = []
    manifest = run.manifest
    if manifest.limit is not None:
        lines.append(f"{sample_of(manifest.limit)} Nothing here is about the whole corpus.")
    if manifest.gradient is not None and manifest.gradient.quantised:
        lines.append(
            f"The model is quantised: gradient_norm is the norm over the {manifest.gradient.differentiable:,} "
            f"parameter tensors that can be differentiated, and leaves out {manifest.gradient.quantised:,} quantised "
            "ones."
        )
    if (transform := manifest.config.text_transform) is not None:
        done = "Dates and years are taken out of every text"
        if transform.dates == "replace_year":
            done = f"The year {transform.year} stands in the place of every year in every text"
        lines.append(f"{done}, before any use. Texts that are shown here are changed so.")
    if run.state in ("failed", "incomplete"):
        lines.append(f"The run ended in the state “{run.state}”: what stands here may be partial.")
    unread = len(run.shards) - run.n_receipts
    if unread > 0:
        lines.append(f"{unread:,} of {len(run.shards):,} parts of the corpus are not scored: this run is not complete.")
    if not run.selections:
        lines.append(
            "No selection has been made. Documents were scored, and scores alone say nothing about membership."
        )
    elif run.missing:
        lines.append(f"Asked for and not made yet: {', '.join(run.missing)}.")
    return lines + _disagreements(run)


def fine_tuned(run: RunFacts) -> dict[str, str]:
    """What the adapters of the `fsd` detector were trained on, by name."""
    return {
        name: f"{adapter.training.method}, {adapter.training.epochs} epochs on {len(adapter.documents):,} "
        f"documents of {' and '.join(adapter.train_on)}, which do not calibrate"
        for name, adapter in run.manifest.adapters.items()
    }


def _disagreements(run: RunFacts) -> list[str]:
    audited = next((role.n_in - role.n_judged for role in run.roles if role.role == "audit"), None)
    return [
        f"Selection “{selection.name}” counts {selection.summary.n_audit:,} audited documents, and the run holds "
        f"{audited:,}: it was made from other scores. Make it again before relying on it."
        for selection in run.selections
        if audited is not None and selection.summary.n_audit != audited
    ]
