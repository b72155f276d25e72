"""The files of an answer as they are written: the summary after all others, and then the digests of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeline.audit.diagnostics import blind_file
from pipeline.audit.digests import changed_file, check_answer, digests_of, read_digests, write_digests
from pipeline.audit.history import HISTORY_FILE
from pipeline.audit.records import JUDGED_RECORD, KEYS_FILE, MANIFEST_FILE, write_record
from pipeline.audit.review import REVIEWED_FILE
from pipeline.audit.score_shards import DUPLICATES
from pipeline.audit.shard_table import SHARDS_FILE
from pipeline.audit.summary import Summary, summary_file
from pipeline.audit.weight_shards import weights_record_file
from pipeline.config.corpus import ROLES
from pipeline.config.selection import HISTORY
from pipeline.errors import DamagedError, UserError
from pipeline.report.wording.files import answered_by, made_again_note
from pipeline.store.files import Store

_OF_RUN = (
    MANIFEST_FILE,
    SHARDS_FILE,
    HISTORY_FILE,
    JUDGED_RECORD,
    KEYS_FILE,
    DUPLICATES,
    REVIEWED_FILE,
    *(blind_file(role) for role in ROLES if role != "audit"),
    *(weights_record_file(role) for role in ROLES if role != "audit"),
)
"""Files of the whole run that state a part of every answer, where they are there."""


def run_digests(store: Store) -> dict[str, str]:
    """SHA-256 of the files of a run that state a part of every answer, by name."""
    return digests_of(store, _OF_RUN)


def write_answer(store: Store, summary: Summary, files: Mapping[str, str], scores: str) -> None:
    """Write the summary of a selection and the digests of its answer, by which it counts as answered.

    Args:
        store: the run directory.
        summary: of the selection.
        files: SHA-256 of all other files of the answer, by name in the run directory, with `run_digests`.
        scores: from `scores_digest`, of the scores that the answer was made from.
    """
    name = summary_file(summary.name)
    write_digests(store, summary.name, {**files, name: write_record(store, name, summary)}, scores)


def check_training_keys(store: Store) -> None:
    """Check that the keys of the documents that adapters were trained on are those of the earlier answers.

    Raises:
        DamagedError: they are not: these documents would calibrate.
    """
    now = store.digest(KEYS_FILE)
    for selection in (name for name in store.names("selection") if name != HISTORY):
        try:
            digests = read_digests(store, selection)
        except UserError:  # damaged, or of another version
            continue
        if digests is not None and digests.files.get(KEYS_FILE) != now:
            raise changed_file(store, KEYS_FILE, missing=now is None)


def damaged_answers(store: Store, selections: Sequence[str], whole: bool = False, shared: bool = True) -> list[str]:
    """What is wrong with the answers of a run, a line for each that is not as this version writes it.

    Args:
        store: the run directory.
        selections: their names; one that was never answered is passed over.
        whole: whether the verdicts on all documents are checked too.
        shared: whether files of the run are checked too, as in `check_answer`.
    """
    problems = []
    for selection in selections:
        try:
            check_answer(store, selection, whole, shared)
        except DamagedError as error:
            problems.append(str(error).rpartition("; ")[0])
        except UserError as error:  # of another version
            problems.append(str(error).removesuffix(f": {answered_by(store.url)}"))
    return [made_again_note(problem, "the answer is") + " from the scores" for problem in problems]
