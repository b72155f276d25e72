"""Try quarantined documents again: what refused them is withdrawn, and what an endpoint answered stays."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from pipeline.corpus.documents import ContentDigest, read_shard, text_digest
from pipeline.corpus.shard import Shard
from pipeline.endpoint.client import Usage
from pipeline.errors import DamagedError, UserError
from pipeline.stages.base import Placement, Stage
from pipeline.stages.process import changed_input, filed_rows
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt, read_receipts, withdraw_receipt

_log = logging.getLogger(__name__)

REASONS = ("model_error", "out_of_memory", "non_finite_score")
"""Of a refusal that another attempt may not meet. The others are of the document: they would be the same again."""

USUAL = ("model_error", "out_of_memory")
"""Those that are tried again unless others are named."""


def check_reasons(reasons: Sequence[str]) -> tuple[str, ...]:
    """The reasons for which documents are tried again.

    Args:
        reasons: none for `USUAL`.

    Raises:
        UserError: one of which no other attempt would be different.
    """
    for reason in reasons:
        if reason not in REASONS:
            raise UserError(
                f"reason must be one of {', '.join(REASONS)}, got {reason!r}: of any other a document stays out"
            )
    return tuple(dict.fromkeys(reasons or USUAL))


def count_refused(store: Store, stage: str, reasons: Collection[str]) -> int:
    """How many documents the finished shards of a stage refused for one of these reasons."""
    return sum(_refused(receipt, reasons) for receipt in read_receipts(store, stage))


def withdraw_refused(stages: Sequence[Stage], shards: Sequence[Shard], store: Store, reasons: Collection[str]) -> int:
    """Withdraw the receipts of shards with documents that were refused for one of these reasons.

    A shard of a stage that asks an endpoint is then asked for these documents alone: the answers to its others are kept
    as those of a run that was interrupted are. Where a model of ours works the whole shard is done again, because what
    shares a batch decides the last bits of a score. A later stage is withdrawn first, so that a run that is killed in
    the midst of this has documents to try again as before.

    Args:
        stages: of the run, the one that scores last.
        shards: of the run.
        store: the run directory, held.
        reasons: of the refusals.

    Returns:
        Shards that have to be done again.
    """
    filed = {stage.name: {receipt.shard: receipt for receipt in read_receipts(store, stage.name)} for stage in stages}
    refused = {
        name: {shard for shard, receipt in receipts.items() if _refused(receipt, reasons)}
        for name, receipts in filed.items()
    }
    wanted = {shard.id: shard for shard in shards}
    again = set[str]().union(*refused.values()) & wanted.keys()
    *before, scoring = stages
    for shard in sorted(again & filed[scoring.name].keys()):
        withdraw_receipt(store, scoring.name, shard)
    for stage in before:
        for shard in sorted(again & refused[stage.name]):
            if stage.endpoint is not None:
                _keep_answers(stage, wanted[shard], filed[stage.name][shard], store)
            withdraw_receipt(store, stage.name, shard)
    return len(again)


def _refused(receipt: Receipt, reasons: Collection[str]) -> int:
    return sum(receipt.reasons.get(reason, 0) for reason in reasons)


def _keep_answers(stage: Stage, shard: Shard, receipt: Receipt, store: Store) -> None:
    """Write down what the shard's rows hold, and what they cost, as answers that no receipt names yet.

    Raises:
        UserError: the documents are not those that were asked about.
    """
    content = ContentDigest()
    texts = {document.row: text_digest(document.text) for document in read_shard(shard, content)}
    if content.hexdigest() != receipt.documents:
        raise UserError(changed_input(shard, stage.name))
    answers = stage.answers(shard, store)
    answers.close()  # of what stands there the receipt names all
    answers.add(Usage(**receipt.spent) if receipt.spent is not None else Usage())
    try:
        rows = filed_rows(store, receipt)
    except DamagedError as error:
        _log.warning("%s", error)  # all of it is asked again
        return
    asker = stage.make(stage, Placement())
    for number in sorted(rows):
        for answer in asker.filed(rows[number], texts.get(number, "")):
            answers.add(Usage(), **answer)
