"""Documents are read and prepared with the journal at hand, so that one that kills its worker is found and left out.

A death leaves one name in the journal. The next attempt does one thing at a time, and tries what the name stands for in
parts: a window of documents, then a few rows, then one. A document is condemned when it has killed its worker alone,
twice, and the second time a control survived just before: deaths that come from outside meet the control as often.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pipeline.corpus.documents import Document
from pipeline.corpus.pictures import made_up_picture
from pipeline.errors import UserError
from pipeline.models.device_errors import check_lost, out_of_memory
from pipeline.stages.base import Entry, Output, Worker
from pipeline.store.attempts import Journal

_TOGETHER = 64  # rows that are named together first, where naming takes time and deaths cost no command
_MESSAGE_CHARACTERS = 300
_MADE_UP = "A document of a few words, which nobody could mind."


@dataclass(frozen=True, slots=True)
class Control:
    """What should survive just before a suspect is tried."""

    name: str  # as if it were in flight itself
    run: Callable[[], object]
    deaths: int = 2  # of workers with the suspect in flight, more than with its controls, from which it is condemned


MADE_UP_DEATHS = 3
"""The same where the control is made up, and ends sooner than the suspect may."""

_LINE = Control("made-up line", lambda: json.loads(json.dumps({"text": _MADE_UP})))
_WAY = replace(_LINE, deaths=MADE_UP_DEATHS)


def condemned(journal: Journal, name: str, control: Control) -> bool:
    """Whether something in the journal must not be tried again; if it is suspect, its control is tried first.

    Args:
        journal: of the shard.
        name: of what would be in flight alone.
        control: of it.
    """
    if journal.guilt(name) >= control.deaths:
        journal.condemn(name)
        return True
    if journal.suspects(name):
        journal.enter_control(name, control.name)
        control.run()
    return False


def nearest_control(journal: Journal, length: int, others: Iterable[tuple[int, Control]]) -> Control | None:
    """Of what is no suspect itself, the control that is most like one; if possible, one that has survived already.

    Args:
        journal: of the shard.
        length: of the suspect, in any unit.
        others: lengths and controls.
    """
    fit = [(size, control) for size, control in others if not journal.suspects(control.name)]
    if not fit:
        return None
    return min(fit, key=lambda pair: (pair[1].name not in journal.survivors, abs(pair[0] - length)))[1]


def refusal_of(error: BaseException) -> tuple[str, str]:
    """Reason and message of a document whose work ends in an error."""
    if isinstance(error, SystemExit):
        return "model_error", f"sys.exit({error.code!r}) was called"[:_MESSAGE_CHARACTERS]
    message = " ".join(str(error).split())[:_MESSAGE_CHARACTERS] or type(error).__name__
    return "out_of_memory" if out_of_memory(error) else "model_error", message


class CarefulReader:
    """Reads and prepares the documents of a shard, and notes in the journal which are in flight."""

    def __init__(self, worker: Worker, inputs: Any, output: Output, journal: Journal) -> None:
        """Begin.

        Args:
            worker: that prepares documents.
            inputs: of the shard, from `worker.open`.
            output: of the shard.
            journal: of the shard.
        """
        self.worker = worker
        self.inputs = inputs
        self.output = output
        self.journal = journal
        self._note = journal.enter if journal.careful else journal.enter_ahead
        self._together = 1 if journal.eager else _TOGETHER
        self._apart = False  # whether this window was in flight at a death
        self._rows = ""  # that are being read together

    def prepared(self, windows: Iterator[list[Document]]) -> Iterator[list[Entry]]:
        """Windows of documents, each ready to be worked on."""
        position = 0
        while True:
            name = f"window {position}"
            self._apart = self.journal.careful and self.journal.suspects(name)
            self._note(name)
            documents = next(windows, None)
            if documents is None:
                return
            position = documents[-1].row + 1
            entries = self._prepare(documents)
            self._note(None)
            yield entries

    def watch(self, row: int, between: bool) -> bool:
        """Note a row that is about to be read, or the way to it; whether it must not be read (`read_shard`)."""
        if not self._apart:
            return False
        first = row - row % self._together
        together = f"rows {first}+{self._together}"
        if self._together > 1 and not self.journal.suspects(together):
            if not between and together != self._rows:
                self._rows = together
                self._note(together)
            return False
        name = f"way to row {row}" if between else f"row {row}"
        if condemned(self.journal, name, _WAY if between else _LINE):
            return True
        self._note(name)
        return False

    def _prepare(self, documents: list[Document]) -> list[Entry]:
        if not self._apart:
            return self._halved(documents)
        entries = []
        for start in range(0, len(documents), self._together):
            entries += self._prepare_part(documents[start : start + self._together], documents)
        return entries

    def _halved(self, documents: list[Document]) -> list[Entry]:
        """Prepare documents; where that fails, in halves, so that only the culprit has no result."""
        try:
            return self.worker.prepare(documents, self.inputs, self.output)
        except UserError:  # of the settings, which no other document would change
            raise
        except (Exception, SystemExit) as error:  # what a tokenizer raises on a text is that text's fault
            check_lost(error)
            if len(documents) == 1:
                self.output.refuse(documents[0], *refusal_of(error))
                return []
        half = len(documents) // 2
        return self._halved(documents[:half]) + self._halved(documents[half:])

    def _prepare_part(self, part: list[Document], window: list[Document]) -> list[Entry]:
        name = _preparing(part)
        if len(part) == 1:
            if self.journal.suspects(name) and condemned(self.journal, name, self._control(part[0], window)):
                message = "it was being prepared for the model when its worker was killed, again and again"
                self.output.refuse(part[0], "model_error", message)
                return []
        elif self.journal.suspects(name):
            return [entry for document in part for entry in self._prepare_part([document], window)]
        self._note(name)
        return self._halved(part)

    def _control(self, suspect: Document, window: list[Document]) -> Control:
        """Prepare the document of the window that is most like a suspect in length; else a made-up one."""
        others = (
            (len(document.text), Control(_preparing([document]), partial(self._try, document)))
            for document in window
            if document.row != suspect.row
        )
        control = nearest_control(self.journal, len(suspect.text), others)
        return control or Control("made-up document", partial(self.made_up, suspect), MADE_UP_DEATHS)

    def made_up(self, suspect: Document) -> list[Entry]:
        """Prepare a made-up text or picture in the place of a document's own."""
        picture = None if suspect.picture is None else made_up_picture()
        return self._try(replace(suspect, text=_MADE_UP, picture=picture))

    def _try(self, document: Document) -> list[Entry]:
        return self.worker.prepare([document], self.inputs, Output())


def _preparing(documents: list[Document]) -> str:
    return f"preparation {documents[0].row}+{len(documents)}"
