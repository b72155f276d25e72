"""Why a document goes to quarantine: a fixed set of reasons, each with its sentence."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Self

from pipeline.config.retired import retired
from pipeline.errors import UserError


class Reason(StrEnum):
    """A reason of quarantine, as in files of a run; messages, pages and docs take its sentence from here."""

    sentence: str

    def __new__(cls, name: str, sentence: str) -> Self:
        """A reason with its sentence."""
        member = str.__new__(cls, name)
        member._value_, member.sentence = name, sentence
        return member

    EMPTY = "empty", "It has nothing but white space or null characters, no token ids, or a picture without pixels."
    NOT_TEXT = "not_text", "It lacks its text, or has a value or a file of another type."
    TOO_SHORT = "too_short", "It has too few tokens or words for a score."
    UNDECODABLE = (
        "undecodable",
        "It is in another encoding, a broken line, with a repeated field, of a truncated file, or no picture.",
    )
    NOT_PICTURE = "not_picture", "It has no picture, or a path that leads out of the corpus."
    ANIMATED = "animated", "Its picture has several frames."
    NOT_CHAT = (
        "not_chat",
        "It is no conversation with an answer of the assistant, or the chat template refuses it.",
    )
    NO_SPAN = "no_span", "An answer that the chat template renders is not found at its place."
    TOO_LARGE = "too_large", "It is beyond the limits, or takes all positions of the model."
    DUPLICATE_ID = "duplicate_id", "Its id stands earlier in the documents of its role."
    NO_LABEL = "no_label", "It has no label."
    NOT_PERMUTABLE = (
        "not_permutable",
        "The orders of its options or rows are not equally likely, or do not differ; not counted in error_budget.",
    )
    NO_ANSWER = (
        "no_answer",
        "No draw of an endpoint continues it: refusals, or reasoning that does not end; not counted in error_budget.",
    )
    NON_FINITE_SCORE = (
        "non_finite_score",
        "A score is infinite, missing or not a number, or an endpoint's value is no log-probability.",
    )
    OUT_OF_MEMORY = "out_of_memory", "It is too long for the device, even alone."
    MODEL_ERROR = (
        "model_error",
        "The model or its worker fails repeatedly, an endpoint fails or rejects it, or the model has no such token id.",
    )


FAULTS = (Reason.MODEL_ERROR, Reason.OUT_OF_MEMORY, Reason.NON_FINITE_SCORE)
"""Reasons of code, models and devices, which may not recur in another attempt. All others depend on the document."""

BY_RULE = (Reason.NOT_PERMUTABLE, Reason.NO_ANSWER)
"""Reasons of valid documents that are left out by one rule in every role: they do not count in error_budget."""

ALL = "all"
"""Every one of `FAULTS`."""


def check_reasons(reasons: Sequence[str]) -> tuple[str, ...]:
    """The reasons for which documents are retried.

    Args:
        reasons: some of `FAULTS`, or `ALL`.

    Raises:
        UserError: a reason that would recur in another attempt.
    """
    for reason in reasons:
        if (line := retired("reason", reason)) is not None:
            raise UserError(line)
        if reason not in (*FAULTS, ALL):
            known = ", ".join((*FAULTS, ALL))
            why = next((f" ({one.sentence.removesuffix('.')})" for one in Reason if one == reason), "")
            raise UserError(f"--retry must be one of {known}, got {reason!r}{why}: others would recur")
    return FAULTS if ALL in reasons else tuple(dict.fromkeys(reasons))
