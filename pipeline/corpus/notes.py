"""Notes on input files: what a reader, a chat template or an endpoint completed, left out or doubts, by input.

A note never changes a document. `plan` shows all of them; those that doubt the documents are on the page too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class NoteKind:
    """One kind of notes."""

    name: str  # in receipts
    doubts: bool  # whether documents may be wrong, or missing
    sentence: Callable[[str, int, int], str]  # of the input's name, the number of notes, and the first place


def _short_records(name: str, count: int, line: int) -> str:
    verb = "record lacks" if count == 1 else "records lack"
    return f"{count:,} {verb} last fields in {name} (first: line {line:,}): they are empty, and no setting names them"


def _surplus_fields(name: str, count: int, line: int) -> str:
    verb = "record has" if count == 1 else "records have"
    return (
        f"{count:,} {verb} more fields than the header of {name} (first: line {line:,}), the last of them empty: these "
        "are left out; if the header lacks the name of the first column, every field is in the place of another"
    )


def _rows_in_field(name: str, count: int, line: int) -> str:
    verb = "field holds" if count == 1 else "fields hold"
    return (
        f"{count:,} {verb} lines that are records themselves in {name} (first: line {line:,}): a quote may be open "
        "there, which hides their documents"
    )


def _header_again(name: str, count: int, line: int) -> str:
    verb = "record repeats" if count == 1 else "records repeat"
    return (
        f"{count:,} {verb} the header of {name} (first: line {line:,}) and counts as a document: files may "
        "have been joined with their headers"
    )


def _hidden_members(name: str, count: int, place: int) -> str:
    verb = "member is" if count == 1 else "members are"
    return f"{count:,} hidden {verb} left out of {name}, such as the ._ files that macOS adds"


def _control_tokens(name: str, count: int, row: int) -> str:
    verb = "chat holds" if count == 1 else "chats hold"
    return (
        f"{count:,} {verb} control tokens of the model in {name} (first: row {row:,}): its tokenizer reads them as in "
        "a training, and the model may take a content for a turn"
    )


def _removed_pieces(name: str, count: int, row: int) -> str:
    verb = "piece of an answer is" if count == 1 else "pieces of answers are"
    return (
        f"{count:,} {verb} left out by the chat template in {name} (first: row {row:,}), such as earlier reasoning: "
        "the model does not read them, and no score is of them"
    )


def _tags_alone(name: str, count: int, row: int) -> str:
    verb = "answer consists" if count == 1 else "answers consist"
    return (
        f"{count:,} {verb} of tags alone in {name} (first: row {row:,}), such as <think></think>: they have no word "
        "to score"
    )


def _unread_tools(name: str, count: int, row: int) -> str:
    verb = "chat has" if count == 1 else "chats have"
    return (
        f"{count:,} {verb} tools in {name} (first: row {row:,}), and the chat template does not read tools: the model "
        "reads none of them"
    )


def _left_out_draws(name: str, count: int, row: int) -> str:
    verb = "draw is" if count == 1 else "draws are"
    return (
        f"{count:,} {verb} no answer of the endpoint in {name} (first: row {row:,}), such as refusals: they are left "
        "out, by one rule in every role"
    )


def _cut_reasoning(name: str, count: int, row: int) -> str:
    verb = "draw begins" if count == 1 else "draws begin"
    return (
        f"{count:,} {verb} with reasoning of the model in {name} (first: row {row:,}): it is cut, and the text "
        "behind it is scored"
    )


SHORT_RECORDS = NoteKind("short_records", False, _short_records)
"""Records of CSV files that lack last fields."""

SURPLUS_FIELDS = NoteKind("surplus_fields", False, _surplus_fields)
"""Records of CSV files with empty fields behind those of the header."""

ROWS_IN_FIELD = NoteKind("rows_in_field", True, _rows_in_field)
"""Fields of CSV files with lines that look like records."""

HEADER_AGAIN = NoteKind("header_again", True, _header_again)
"""Records of CSV files that are equal to the column names."""

HIDDEN_MEMBERS = NoteKind("hidden_members", False, _hidden_members)
"""Members of archives that belong to a file system, not to its documents."""

CONTROL_TOKENS = NoteKind("control_tokens", True, _control_tokens)
"""Chats whose contents hold special tokens of the tokenizer."""

REMOVED_PIECES = NoteKind("removed_pieces", True, _removed_pieces)
"""Pieces of answers that the chat template does not render."""

TAGS_ALONE = NoteKind("tags_alone", True, _tags_alone)
"""Answers without a word beside their tags."""

UNREAD_TOOLS = NoteKind("unread_tools", True, _unread_tools)
"""Chats with tools, which the chat template does not read."""

LEFT_OUT_DRAWS = NoteKind("left_out_draws", True, _left_out_draws)
"""Draws of an endpoint that are no answer."""

CUT_REASONING = NoteKind("cut_reasoning", True, _cut_reasoning)
"""Draws of an endpoint that begin with reasoning."""

_KINDS = {
    kind.name: kind
    for kind in (
        *(ROWS_IN_FIELD, HEADER_AGAIN, SHORT_RECORDS, SURPLUS_FIELDS, HIDDEN_MEMBERS),
        *(CONTROL_TOKENS, REMOVED_PIECES, TAGS_ALONE, UNREAD_TOOLS),
        *(LEFT_OUT_DRAWS, CUT_REASONING),
    )
}


@dataclass(slots=True)
class Notes:
    """Numbers of notes on one input."""

    counts: dict[str, tuple[int, int]] = field(default_factory=dict)  # kind -> number, first place

    def add(self, kind: NoteKind, place: int, more: int = 1) -> None:
        """Add notes.

        Args:
            kind: kind of the notes.
            place: line or row that they are about.
            more: their number.
        """
        count, first = self.counts.get(kind.name, (0, place))
        self.counts[kind.name] = count + more, first

    def include(self, other: Mapping[str, tuple[int, int]]) -> None:
        """Add the notes on a later part of the input, or on one that a receipt states."""
        for name, (count, first) in other.items():
            before, place = self.counts.get(name, (0, first))
            self.counts[name] = before + count, min(place, first)

    def sentences(self, name: str, doubts: bool) -> list[str]:
        """The notes in words.

        Args:
            name: name of the input.
            doubts: whether those that doubt documents are given, or the others.
        """
        kinds = ((kind, self.counts[kind.name]) for kind in _KINDS.values() if kind.name in self.counts)
        return [kind.sentence(name, *counts) for kind, counts in kinds if kind.doubts == doubts]
