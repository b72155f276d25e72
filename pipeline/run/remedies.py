"""Messages about a run directory and its inputs: the fault, its treatment, and the remedy."""

from __future__ import annotations

from pipeline.errors import error_line

NEW_RUN = "start a new run directory"
PUT_BACK = f"put it back, or {NEW_RUN}"
"""Remedy for a file that cannot be made again."""

OTHER_VERSION = f"{NEW_RUN} with seenset run, or use that version"
"""Remedy for a file of another version."""

REWRITTEN = "seenset run with the configuration of the run writes it again"
"""Remedy for a damaged manifest."""

MANIFEST_WRITTEN_AGAIN = (
    "it is written again from the configuration, and the inputs of all finished shards are compared with what was "
    "scored"
)
LINE_LEFT_OUT = "the line is left out: the run may have had more requests than its history lists"
NOT_OF_ANSWER = "is damaged, or not the one of this answer (seenset evaluate with other settings writes it too)"
"""The fault of a manifest with which the answer of its run was not made."""

UNKNOWN_VERSION = "of an unknown version"
"""Version of the program that wrote a file."""

DRIVER_GONE = "its driver is gone; the same command resumes"
REPEATED_ID = "the id stands in an earlier shard"
"""Why a document with a repeated id is in quarantine."""


def changed(place: str) -> str:
    """States that a file is not the one that was written."""
    return f"{place} is not as it was written"


def made_again_note(problem: object, what: str) -> str:
    """The fault of a file, and a note that its content (`what`, with its verb) is made again."""
    return f"{problem}; {what} made again"


def written_again(problem: object) -> str:
    """The fault of a file that is written again."""
    return f"{problem}; it is written again"


def answered_by(run: str) -> str:
    """The command that makes the answers of a run again."""
    return f"seenset select {run} makes the answer again from the scores"


def verdict_again_note(run: str) -> str:
    """The command that makes the verdict of a run again."""
    return f"run seenset verdict {run} again"


def checked_after(file: str) -> str:
    """Remedy for checks before scoring of another version."""
    return f"remove {file} and run again"


def not_as_written(missing: bool = False) -> str:
    """The fault of a file that is missing, or is not the one that was written."""
    return "is missing" if missing else "is damaged: its content is not what was written"


def differs(key: str, was: object, now: object, there: bool = False) -> str:
    """A field that differs from the current request; `there`: in another run. Long values are cut."""
    before, after = _cut(was), _cut(now)
    return f"{key} is {before} there and {after} here" if there else f"{key}: {before} then, {after} now"


def _cut(value: object) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:12]}..."


def never_scored(detector: str) -> str:
    """States that another run did not score a detector."""
    return f"detector {detector} was never scored there"


def extent(limit: int | None) -> str:
    """The part of its corpus that a run reads."""
    return f"a sample (--limit {limit})" if limit else "the whole corpus"


def counts_nothing(error: Exception) -> str:
    """Why an earlier run is not counted."""
    return f"against: a run is not counted: {error_line(error)}"


def already_audited_note(count: int, against: str | None, others: bool) -> str:
    """The audited documents that are left out; `others`: whether there are more."""
    rest = "" if others else ", and there are no others: nothing is selected"
    return f"{count:,} audit documents are already audited by {against} and left out{rest}"


def asked_several(number: int) -> str:
    """States the effect of repeated requests on the guarantee of an answer."""
    return (
        f"This run was asked {number} different questions, and not all at once: the guarantee of an answer holds if "
        "its question was fixed before any answer was seen, and not for an answer that was picked among several "
        "because of its result."
    )


def read_again(inputs: int, shards: int) -> str:
    """States that inputs are compared with what was read of them."""
    return f"{inputs} inputs may have changed since: their {shards} finished shards are read again"


def unreadable(shard: str, name: str) -> str:
    """States that a shard cannot be compared with what was read of it."""
    return f"shard {shard} of {name} holds a document that kills its reader: whether others changed is not checked"


def other_encoding(name: str, counts: tuple[int, int], unit: str, label: str, encoding: str) -> str:
    """States the documents of an input in another encoding, and the setting that corrects it.

    Args:
        name: name of the input.
        counts: numbers of these documents and of all that were read.
        unit: unit of a document: a line or a file.
        label: the configured encoding.
        encoding: the recognised encoding.
    """
    bad, read = counts
    return f"{bad:,} of {read:,} sampled {unit}s of {name} are not {label}; set encoding: {encoding}"


def one_backward_pass(reason: str) -> str:
    """Why the gradient norm was not taken over a batch."""
    return f"gradient_norm took one backward pass a document: {reason}"


def recorded_model(model: str) -> str:
    """States that the files of a model are missing, and what stands for them."""
    return f"the files of model {model} are not there: the fingerprint that the run recorded is used"


def top_documents(count: int, total: int) -> str:
    """States how many of the top documents have token attributions."""
    return f"token attributions: {count:,} of {total:,} documents have them"


def no_top_documents(error: Exception) -> str:
    """Why there are no token attributions."""
    return f"no token attributions: {error_line(error) or type(error).__name__}"
