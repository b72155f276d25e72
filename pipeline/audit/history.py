"""The questions that a run was asked and what came of each: `selection/history.jsonl`, a line each time of asking."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal

from pydantic import Field, JsonValue

from pipeline.audit.conclusion import Concluded
from pipeline.audit.digests import HISTORY_FILE
from pipeline.audit.records import VersionedRecord, opened, parse_part
from pipeline.audit.summary import Summary
from pipeline.config.audit import AuditConfig
from pipeline.config.selection import SelectionConfig
from pipeline.errors import DamagedError
from pipeline.report.wording.files import LINE_LEFT_OUT, answered_by, asked_several
from pipeline.store.files import Store, to_json
from pipeline.store.receipts import DIGEST, sealed

Command = Literal["run", "select"]

_log = logging.getLogger(__name__)


class AnsweredQuestion(Concluded):
    """One selection as it was asked for, and what came of it."""

    name: str = Field(description="Name of the selection.")
    settings: dict[str, JsonValue] = Field(description="Its settings, with every default.")
    n_audit: int = Field(description="Audited documents, quarantined ones included.")
    n_selected: int = Field(description="Documents selected.")

    def key(self) -> str:
        """The same for the same question, whatever its name."""
        return json.dumps({**self.settings, "name": None}, sort_keys=True)


class HistoryEntry(VersionedRecord):
    """What a run was asked at one time: a line of `selection/history.jsonl`."""

    sealed = True

    when: str = Field(description="When the answers were there, in UTC.")
    command: Command = Field(description="What asked: seenset run, or seenset select.")
    overlap: str = Field(description="What was to become of calibration documents that are audited too.")
    error_budget: float = Field(description="Share of documents that could be quarantined before any selection.")
    questions: list[AnsweredQuestion] = Field(description="The questions, in the order of the configuration.")


def read_history(store: Store) -> list[HistoryEntry]:
    """All that a run was asked, first things first; empty where nothing was.

    Raises:
        UserError: in one line, a damaged file, or one of another version.
    """
    return [_entry(store, number, line) for number, line in enumerate(_lines(store), 1)]


def _entry(store: Store, number: int, line: bytes) -> HistoryEntry:
    """A line of the history.

    Raises:
        DamagedError: it is not as it was written.
        UserError: it is of another version.
    """
    where = f"{store.url}/{HISTORY_FILE}"
    try:
        value = json.loads(line)
    except ValueError:
        raise DamagedError(f"{where} is damaged: line {number} is not JSON; {answered_by(store.url)}") from None
    if isinstance(value, dict) and DIGEST in value:  # version 0.9.0 wrote none
        try:
            value = opened(value, f"{where}, line {number},")
        except DamagedError as error:
            raise DamagedError(f"{error}; {answered_by(store.url)}") from None
    return parse_part(HistoryEntry, value, f"{where}, line {number},")


def answered_by_0_9_0(store: Store) -> bool:
    """Whether the last line of the history has no digest: version 0.9.0, which wrote no digests, made the answers."""
    try:
        last = json.loads(_lines(store)[-1])
    except (IndexError, ValueError):
        return False
    return isinstance(last, dict) and DIGEST not in last


def note_answers(store: Store, config: AuditConfig, command: Command, summaries: Sequence[Summary]) -> None:
    """Add what was asked and what came of it, unless it is what was asked and came of it the last time too.

    A damaged line is left out, and logged.

    The run's lock must be held: the file is read and written whole, because not every store can append.

    Args:
        store: the run directory.
        config: with the selections that were asked for.
        command: what asked.
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
                supported=summary.supported,
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
    """The lines of the history that are as they were written, and what they hold."""
    lines, entries = [], []
    for number, line in enumerate(_lines(store), 1):
        try:
            entries.append(_entry(store, number, line))
            lines.append(line)
        except DamagedError as error:
            problem = str(error).partition("; seenset ")[0]
            _log.warning("%s; %s", problem, LINE_LEFT_OUT)
    return lines, entries


def was_asked(store: Store) -> bool:
    """Whether a run was asked anything before, as far as its history tells; a damaged one counts as yes."""
    try:
        return any(entry.questions for entry in read_history(store))
    except DamagedError:
        return True


def answer_names(store: Store, config: AuditConfig) -> list[str]:
    """The selections that were asked for last; those of the run's configuration where none was answered yet.

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
    return [SelectionConfig.model_validate(question.settings) for question in history[-1].questions]


def count_questions(history: Sequence[HistoryEntry]) -> int:
    """How many different questions were asked, whatever their names."""
    return len({question.key() for entry in history for question in entry.questions})


def several_questions(history: Sequence[HistoryEntry]) -> str | None:
    """What asking again does to a guarantee, in one sentence; None where all was asked at once, or only once."""
    first = {question.key() for entry in history[:1] for question in entry.questions}
    if not history or len(first) == (number := count_questions(history)):
        return None
    return asked_several(number)


def _lines(store: Store) -> list[bytes]:
    try:
        return [line for line in store.read(HISTORY_FILE).split(b"\n") if line.strip()]
    except FileNotFoundError:
        return []
