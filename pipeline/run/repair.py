"""Repair a run directory: files that differ from receipts, changed inputs, and quarantined documents to retry."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

from pipeline.config.corpus import Role
from pipeline.corpus.documents import ContentDigest, read_shard, text_digest
from pipeline.corpus.shard import BY_ID, Shard, shard_index
from pipeline.endpoint.answers import Answers
from pipeline.endpoint.client import Usage
from pipeline.errors import DamagedError, UserError, error_line
from pipeline.run.remedies import read_again, unreadable
from pipeline.run.scored import ShardMap
from pipeline.stages import SCORING
from pipeline.stages.base import Placement, Stage
from pipeline.stages.process import changed_input, filed_rows
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt, check_filed, made_again, read_receipt, read_receipts, withdraw_receipt

_log = logging.getLogger(__name__)

AT_ONCE = 2_048
"""Number of receipts that are checked together, which limits memory."""

Stamps = Mapping[tuple[Role, str], str | None]
"""Role and path of each input -> its stamp."""


def withdraw_damaged(stages: Sequence[Stage], shards: Sequence[Shard], store: Store, each: ShardMap) -> Iterator[str]:
    """Withdraw the receipts whose files are missing or changed, so that their shards are done again.

    Files of a stage before the last are needed only where a later stage has not finished the shard.

    Args:
        stages: stages of the run, the scoring stage last.
        shards: shards of the run.
        store: the run directory.
        each: applies a function to every shard.

    Returns:
        A line for each withdrawn receipt.

    Raises:
        UserError: a file cannot be read.
    """
    shards = sorted(shards, key=BY_ID)
    needed = bytearray(b"\1") * len(shards)  # by place: 0 once the last stage has finished the shard
    for stage in reversed(stages):
        filed = (
            (place, replace(receipt, fingerprint={}, reasons={}))  # without long fields that are not read here
            for receipt in read_receipts(store, stage.name)
            if (place := shard_index(receipt.shard, shards)) is not None and needed[place]
        )
        while receipts := dict(islice(filed, AT_ONCE)):
            problems: dict[str, str | None] = dict(each(list(receipts.values()), partial(_problem, store)))
            for place, receipt in receipts.items():
                if (problem := problems[receipt.shard]) is None:
                    needed[place] &= stage is not stages[-1]
                    continue
                if receipt.spent is not None:  # it still counts in the budget
                    shard = shards[place]
                    answers = Answers(store, stage.folder, stage.name, shard.id, stage.identity(shard))
                    answers.add(Usage(**receipt.spent))
                withdraw_receipt(store, stage.name, receipt.shard)
                yield problem


def _problem(store: Store, receipt: Receipt) -> tuple[str, str | None]:
    """A shard, and the fault of the files of its receipt, if any."""
    try:
        for name, record in receipt.files.items():
            check_filed(store, name, record)
    except DamagedError as error:
        return receipt.shard, made_again(error)
    except OSError as error:
        raise UserError(f"cannot read {store.url}/{name}: {error_line(error)}") from None
    return receipt.shard, None


def check_documents_read(
    before: Stamps,
    now: Stamps,
    shards: Sequence[Shard],
    stages: Sequence[str],
    store: Store,
    each: ShardMap,
) -> None:
    """Check that finished shards of modified inputs still have the documents that were read.

    A changed stamp costs reading the finished shards of the input again, and no pass of a model.

    Args:
        before: stamps when the run was planned.
        now: current stamps.
        shards: shards of the run, with numbered rows.
        stages: names of stages.
        store: the run directory.
        each: applies a function to every shard.

    Raises:
        UserError: an input was changed; the message names it and the stage that read other documents in it.
    """
    touched = {key for key, stamp in now.items() if stamp != before.get(key)}
    by_id = {shard.id: shard for shard in shards if (shard.role, shard.path) in touched}
    if not by_id:
        return
    read: dict[str, list[tuple[str, Receipt]]] = {}
    for stage in stages:
        for receipt in read_receipts(store, stage):
            if receipt.shard in by_id:
                read.setdefault(receipt.shard, []).append((stage, receipt))
    if read:
        _log.warning(read_again(len(touched), len(read)))
    for shard_id in [shard_id for shard_id, filed in read.items() if not filed[0][1].documents]:
        _log.warning(unreadable(shard_id, by_id[shard_id].name))
        del read[shard_id]
    firsts = [filed[0][1] for filed in read.values()]
    digests: dict[str, str] = dict(each(firsts, partial(_shard_content, by_id)))
    for shard_id, filed in sorted(read.items()):
        for stage, receipt in filed:
            if receipt.documents and receipt.documents != digests[shard_id]:
                raise UserError(changed_input(by_id[shard_id], stage))


def _shard_content(shards: Mapping[str, Shard], receipt: Receipt) -> tuple[str, str]:
    """A shard, and the digest of its current documents."""
    content = ContentDigest()
    for _ in read_shard(shards[receipt.shard], content):
        pass
    return receipt.shard, content.hexdigest()


def count_refused(store: Store, reasons: Collection[str]) -> int:
    """The number of documents without scores for one of these reasons."""
    return sum(_refused(receipt, reasons) for receipt in read_receipts(store, SCORING))


def withdraw_refused(stages: Sequence[Stage], shards: Sequence[Shard], store: Store, reasons: Collection[str]) -> int:
    """Withdraw the receipts of shards with documents that were refused for one of these reasons.

    In a stage that uses an endpoint, only these documents are requested again: the other answers are kept, as those of
    an interrupted run are. A local model repeats the whole shard, because the composition of a batch affects the last
    bits of a score. A later stage is withdrawn first, so that a run that is killed in
    between still has documents to retry.

    Args:
        stages: stages of the run, the scoring stage last.
        shards: shards of the run.
        store: the run directory, locked.
        reasons: reasons of the refusals.

    Returns:
        Number of shards that have to be done again.
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
            withdraw_shard(stage, wanted[shard], store)
    return len(again)


def withdraw_shard(stage: Stage, shard: Shard, store: Store) -> None:
    """Withdraw the receipt of a shard, if any; an endpoint's answers and their costs are kept.

    Raises:
        UserError: the documents are not those of the requests.
    """
    receipt = read_receipt(store, stage.name, shard.id)
    if receipt is not None:
        if stage.endpoint is not None:
            _keep_answers(stage, shard, receipt, store)
        withdraw_receipt(store, stage.name, shard.id)


def _refused(receipt: Receipt, reasons: Collection[str]) -> int:
    return sum(receipt.reasons.get(reason, 0) for reason in reasons)


def _keep_answers(stage: Stage, shard: Shard, receipt: Receipt, store: Store) -> None:
    """Store the rows and costs of a shard as answers that no receipt names yet.

    Raises:
        UserError: the documents are not those of the requests.
    """
    content = ContentDigest()
    texts = {document.row: text_digest(document.text) for document in read_shard(shard, content)}
    if content.hexdigest() != receipt.documents:
        raise UserError(changed_input(shard, stage.name))
    answers = stage.answers(shard, store)
    answers.close()  # the receipt names all answers of the file
    answers.add(Usage(**receipt.spent) if receipt.spent is not None else Usage())
    try:
        rows = filed_rows(store, receipt)
    except DamagedError as error:
        _log.warning("%s", error)  # all documents are requested again
        return
    asker = stage.make(stage, Placement())
    for number in sorted(rows):
        for answer in asker.filed(rows[number], texts.get(number, "")):
            answers.add(Usage(), **answer)
