"""The selections that a run has answered, with their results: `selection/history.jsonl`, one line per request."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal

from pydantic import Field, JsonValue

from pipeline.config.audit import AuditConfig
from pipeline.config.selection import SelectionConfig, recorded
from pipeline.errors import DamagedError
from pipeline.results.summary import Summary
from pipeline.run.conclusion import Concluded
from pipeline.run.digests import HISTORY_FILE
from pipeline.run.records import VersionedRecord, opened, parse_part
from pipeline.run.remedies import LINE_LEFT_OUT, answered_by, asked_several
from pipeline.store.files import Store, to_json
from pipeline.store.receipts import sealed

Command = Literal["run", "select"]

_log = logging.getLogger(__name__)


class AnsweredQuestion(Concluded):
    """One selection as requested, with its result."""

    name: str = Field(description="Name of the selection.")
    settings: dict[str, JsonValue] = Field(description="Its settings, with every default.")
    n_audit: int = Field(description="Audited documents, quarantined ones included.")
    n_selected: int = Field(description="Documents selected.")

    def key(self) -> str:
        """Equal for equal questions, whatever their names."""
        return json.dumps({**recorded(self.settings), "name": None}, sort_keys=True)


class HistoryEntry(VersionedRecord):
    """The selections of one request to a run: a line of `selection/history.jsonl`."""

    sealed = True

    schema_: Literal[2] = Field(  # type: ignore[assignment]
        2, alias="schema", description="Version of the form of this file."
    )
    when: str = Field(description="Time of the answers, in UTC.")
    command: Command = Field(description="The command: seenset run, or seenset select.")
    overlap: str = Field(description="Treatment of calibration documents that are also audited.")
    error_budget: float = Field(description="Largest share of quarantined documents for which selections were made.")
    questions: list[AnsweredQuestion] = Field(description="The questions, in the order of the configuration.")


def read_history(store: Store) -> list[HistoryEntry]:
    """All requests to a run, the first one first; empty where there are none.

    Raises:
        UserError: a damaged file, or one of another version.
    """
    return [_entry(store, number, line) for number, line in enumerate(_lines(store), 1)]


def _entry(store: Store, number: int, line: bytes) -> HistoryEntry:
    """A line of the history.

    Raises:
        DamagedError: the line was changed or cut off.
        UserError: the line is of another version.
    """
    where = f"{store.url}/{HISTORY_FILE}"
    try:
        value = json.loads(line)
    except ValueError:
        raise DamagedError(where, f"is damaged: line {number} is not JSON", answered_by(store.url)) from None
    if isinstance(value, dict):
        try:
            value = opened(value, f"{where}, line {number},")
        except DamagedError as error:
            raise error.with_remedy(answered_by(store.url)) from None
    return parse_part(HistoryEntry, value, f"{where}, line {number},")


def note_answers(store: Store, config: AuditConfig, command: Command, summaries: Sequence[Summary]) -> None:
    """Append a request and its answers, unless they equal those of the last request.

    A damaged line is dropped and logged.

    The run's lock must be held: the file is read and written as a whole, because not every store can append.

    Args:
        store: the run directory.
        config: configuration with the requested selections.
        command: the requesting command.
        summaries: their answers, in the same order.

    Raises:
        UserError: a damaged file.
    """
    entry = HistoryEntry(
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
        overlap=config.overlap,
        error_budget=config.error_budget,
        questions=[
            AnsweredQuestion(
                name=selection.name,
                settings=selection.model_dump(mode="json", by_alias=True),
                n_audit=summary.n_audit,
                n_selected=summary.n_selected,
                conclusion=summary.conclusion,
            )
            for selection, summary in zip(config.selections, summaries, strict=True)
        ],
    )
    lines, history = _intact(store)
    last = history[-1] if history else None
    repeated = last is not None and entry.model_copy(update={"when": last.when, "command": last.command}) == last
    if not repeated and (entry.questions or history):
        lines.append(_line(entry))
    if lines != _lines(store):
        store.write(HISTORY_FILE, b"".join(one + b"\n" for one in lines))


def _line(entry: HistoryEntry) -> bytes:
    plain = json.loads(to_json(entry.plain()))  # as it is read again: a file holds no lone surrogate
    return json.dumps(sealed(plain), ensure_ascii=False, allow_nan=False).encode()


def _intact(store: Store) -> tuple[list[bytes], list[HistoryEntry]]:
    """The undamaged lines of the history, and their entries."""
    lines, entries = [], []
    for number, line in enumerate(_lines(store), 1):
        try:
            entries.append(_entry(store, number, line))
            lines.append(line)
        except DamagedError as error:
            _log.warning("%s; %s", error.problem, LINE_LEFT_OUT)
    return lines, entries


def was_asked(store: Store) -> bool:
    """Whether a run has an earlier request in its history; True for a damaged history."""
    try:
        return any(entry.questions for entry in read_history(store))
    except DamagedError:
        return True


def answer_names(store: Store, config: AuditConfig) -> list[str]:
    """The selections of the last request; those of the run's configuration where none was answered yet.

    Raises:
        UserError: a damaged history.
    """
    history = read_history(store)
    return [one.name for one in (history[-1].questions if history else config.selections)]


def answered_selections(store: Store, config: AuditConfig) -> list[SelectionConfig]:
    """The selections of `answer_names` with their settings.

    Raises:
        UserError: a damaged history.
    """
    history = read_history(store)
    if not history:
        return list(config.selections)
    return [SelectionConfig.model_validate(recorded(question.settings)) for question in history[-1].questions]


def count_questions(history: Sequence[HistoryEntry]) -> int:
    """The number of different questions, whatever their names."""
    return len({question.key() for entry in history for question in entry.questions})


def several_questions(history: Sequence[HistoryEntry]) -> str | None:
    """One sentence on the effect of repeated requests on a guarantee; None where there was one request or question."""
    first = {question.key() for entry in history[:1] for question in entry.questions}
    if not history or len(first) == (number := count_questions(history)):
        return None
    return asked_several(number)


def _lines(store: Store) -> list[bytes]:
    try:
        return [line for line in store.read(HISTORY_FILE).split(b"\n") if line.strip()]
    except FileNotFoundError:
        return []
