"""The form of an export, its documents of a run, and notes on its files."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.wording import was

FORM_PHRASES = {
    "files": "files in the format that came in",
    "list": "a list of ids and rows",
    "samples": "samples for lm-evaluation-harness",
    "huggingface": "a Hugging Face dataset folder",
}
"""Description of an export by form."""

UNFINISHED_NOTE = (
    "This export is not finished: files are missing or old. Run the same seenset export again to finish it."
)
"""Content of the file that marks an incomplete export folder."""

SELECTED_NOT_HERE = "The guarantee covers only the selected documents, which are not here."
QUARANTINED_LABEL = "quarantined: could not be scored"
CALIBRATED_LABEL = "that calibrated the p-values"
FINGERPRINT_LABEL = "fingerprint of the scores"
"""Labels of the rows of a data card."""


def audited_sample(audited: int, limit: int | None) -> str:
    """The audited documents; `limit`: the maximum that the run read, None for all."""
    sample = "" if limit is None else f" (a sample: the first {limit:,}, not the whole corpus)"
    return f"Of {audited:,} audited documents{sample}"


def exported_documents(audited: str, model: str, counts: tuple[int, int], direction: str, keeps_selected: bool) -> str:
    """States which documents an export has; it claims no more than the selection does.

    Args:
        audited: phrase for the documents of the run, from `audited_sample`.
        model: name of the audited model.
        counts: numbers of selected documents and of those that the export keeps.
        direction: direction of the selection.
        keeps_selected: whether the export keeps the selected documents, or the others.
    """
    training, (selected, kept) = f"the training data of {model}", counts
    if keeps_selected and direction == "clean":
        return f"{audited}, {selected:,} {was(selected)} selected as not part of {training}; all others are left out."
    if keeps_selected:
        return f"{audited}, {selected:,} {was(selected)} selected as part of {training}: this is the list to remove."
    if direction == "clean":
        return (
            f"{audited}, {selected:,} {was(selected)} selected as not part of {training} and left out here; the "
            f"other {kept:,} are neither shown to be part of it nor shown not to be."
        )
    return (
        f"{audited}, {selected:,} {was(selected)} selected as part of {training} and removed. {kept:,} remain; it "
        "is not shown that none of them is part of it."
    )


def quarantined_documents(count: int, keeps_selected: bool, keeps_quarantined: bool) -> str:
    """States the treatment of documents that could not be scored."""
    if not count:
        return "Every audited document was scored."
    what = f"{count:,} audited document{'s' * (count != 1)} could not be scored (quarantined)"
    if keeps_selected:
        return f"{what}: never selected, so left out here."
    if keeps_quarantined:
        return f"{what}: nothing is known of them, and they are kept here (--without-quarantined leaves them out)."
    return f"{what}: nothing is known of them, and they are left out here (--without-quarantined)."


def stated_guarantee(alpha: float, promise: str, assumption: str) -> list[str]:
    """The guarantee of a selection and its assumption."""
    return [f"With alpha = {alpha:g}: {promise}", f"It rests on this: {assumption}"]


def no_table_rows(count: int) -> str:
    """States how many documents a table cannot hold."""
    return f"{count:,} documents that would be kept cannot be rows of a table and are left out."


def empty_tasks(tasks: Sequence[str]) -> str:
    """States the tasks without a kept item."""
    return (
        f"No item of {', '.join(tasks)} is kept: leave these out of --tasks, as lm-evaluation-harness evaluates all "
        "items of a task without indices."
    )


def without_task(count: int) -> str:
    """States how many documents are items of no task."""
    return f"{count:,} documents name no task and are items of none."


def counted_over(names: Sequence[str]) -> str:
    """States the inputs over which the items of a task are counted."""
    return f"Items are counted over {len(names)} inputs in this order: {', '.join(names)}."
