"""What a run was asked so far, and what asking several questions does to a promise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import JsonValue

from pipeline.audit.history import HistoryEntry, count_questions
from pipeline.config.selection import SelectionConfig
from pipeline.report.contents import HistoryReport, PastQuestion

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
