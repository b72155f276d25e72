"""Texts that earlier runs have already audited for the same model: an audit leaves their documents out.

A run has audited a text if it is complete, has answered a selection of the same direction and detectors, and holds a
score of an audit document with this text. A document in quarantine has no score and is audited again. Texts that such
a run left out as already audited count too. Two runs score alike if the model, the text transformation and all else
that the detectors of this run's selections depend on are equal; seed, device, batch sizes and the version of Seenset
may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pyarrow.compute as pc
from pydantic import Field

from pipeline.config.audit import AuditConfig
from pipeline.corpus.shard import SHARD_FIELDS, Shard
from pipeline.errors import IncompleteError, UserError
from pipeline.results.history import read_history
from pipeline.results.status import read_status
from pipeline.run import remedies as wording
from pipeline.run.manifest import read_run
from pipeline.run.records import AUDITED_RECORD, DUPLICATES, VersionedRecord, read_record, write_record
from pipeline.stages import SCORING
from pipeline.stages.audited_texts import AGAINST, AuditedTexts, read_audited_keys, write_audited_keys
from pipeline.store.files import Store, real_address
from pipeline.store.receipts import Receipt, read_filed, read_receipts

_DETECTORS = "detectors"
_RUN_FIELDS = frozenset(
    {
        *SHARD_FIELDS,
        *("document_bytes", "pixels"),
        *("batch_tokens", "gradient_tokens", "device", "seed", "code"),
        *("sketch", AGAINST, _DETECTORS),
    }
)
"""Fingerprint fields that may differ between runs with equal scores."""

Say = Callable[[str], None]


class AuditedRecord(VersionedRecord):
    """Which texts a run leaves out, fixed when it started: `judged.json`."""

    sealed = True

    against: str = Field(description="The run or the ledger that the configuration names.")
    runs: list[str] = Field(description="The runs that have audited these texts: absolute paths or URLs.")
    detectors: list[str] = Field(description="Score columns by which they were audited.")
    texts: int = Field(description="Number of these texts.")
    sha256: str = Field(description="SHA-256 of judged.npy, the 64-bit keys of the texts.")


@dataclass(frozen=True, slots=True)
class ScoringBasis:
    """What the answers of a run depend on."""

    parts: Mapping[str, Any]  # entries of the fingerprint of its scores
    detectors: tuple[str, ...]  # columns that its selections read
    selections: frozenset[tuple[str, str]]  # direction and column of its selections

    @classmethod
    def required(cls, config: AuditConfig, fingerprint: Mapping[str, Any]) -> ScoringBasis:
        """What an audit requires of the earlier runs that it relies on.

        Args:
            config: the audit's configuration; without selections, all its detectors count.
            fingerprint: fingerprint of its scores.
        """
        selections = frozenset((one.direction, column) for one in config.selections for column in one.detectors)
        parts = {key: value for key, value in fingerprint.items() if key not in _RUN_FIELDS}
        return cls(parts, tuple(sorted({column for _, column in selections}) or fingerprint[_DETECTORS]), selections)

    def difference(self, fingerprint: Mapping[str, Any]) -> str | None:
        """The first field that makes another run's scores differ, with both values; None where there is none."""
        unscored = [column for column in self.detectors if column not in fingerprint.get(_DETECTORS, ())]
        if unscored:
            return wording.never_scored(unscored[0])
        for key in sorted({*self.parts, *fingerprint} - _RUN_FIELDS):
            theirs, mine = fingerprint.get(key), self.parts.get(key)
            if mine is None and (key == "plugins" or key.startswith("reference_")):
                continue
            if key in ("reads", "adapters") and isinstance(theirs, dict):  # entries of other detectors do not matter
                theirs = {name: value for name, value in theirs.items() if name in (mine or {})} or None
            if theirs != mine:
                return wording.differs(key, theirs, mine, there=True)
        return None


def recorded_audited_texts(config: AuditConfig, store: Store) -> tuple[AuditedRecord, AuditedTexts] | None:
    """The record of the texts that a run leaves out; None where it has not started or audits all documents.

    Raises:
        UserError: the run started with another `against`, or a file is damaged.
    """
    record = read_record(store, AUDITED_RECORD, AuditedRecord, wording.NEW_RUN, wording.PUT_BACK)
    if record is None:
        return None
    if config.against is None or Store(config.against).url != real_address(record.against):
        now = "none" if config.against is None else config.against
        raise UserError(
            f"run {store.url} started with against {record.against}, now {now}: state the same, or start a new run "
            "directory"
        )
    return record, AuditedTexts(store.url, record.sha256, record.texts)


def reconcile_audited_texts(
    config: AuditConfig, fingerprint: Mapping[str, Any], store: Store, runs: Iterable[str], strict: bool, say: Say
) -> AuditedTexts:
    """Record once which texts a run leaves out. The run's lock must be held.

    Args:
        config: the audit's configuration, with `against`.
        fingerprint: fingerprint of its scores.
        store: its run directory.
        runs: earlier runs that may have audited some of its texts.
        strict: whether an unusable earlier run is an error; otherwise it is left out with a notice.
        say: prints a line.

    Raises:
        UserError: the run started without `against`; with `strict`, an earlier run is missing, damaged or scored
            differently.
        IncompleteError: with `strict`, an earlier run is not complete.
    """
    assert config.against is not None
    if any(store.names(f"receipts/{stage}") for stage in store.names("receipts")):
        raise UserError(
            f"run {store.url} started without against {config.against}, or has lost its {AUDITED_RECORD}: start a new "
            "run directory"
        )
    basis, counted, keys = ScoringBasis.required(config, fingerprint), [], [np.empty(0, dtype=np.int64)]
    for run in dict.fromkeys(runs):
        if run == store.url:
            continue
        try:
            keys.append(audited_by(Store(run), basis))
            counted.append(run)
        except (UserError, OSError) as error:
            if strict:
                raise
            say(wording.counts_nothing(error))
    texts = write_audited_keys(store, np.concatenate(keys))
    record = AuditedRecord(
        against=Store(config.against).url,
        runs=counted,
        detectors=list(basis.detectors),
        texts=texts.count,
        sha256=texts.sha256,
    )
    write_record(store, AUDITED_RECORD, record)
    return texts


def audited_by(store: Store, basis: ScoringBasis) -> np.ndarray:
    """Keys of the texts that a run has audited or left out as already audited: int64, in no order.

    Raises:
        UserError: not a run, a damaged run, or one scored differently; the message names the field.
        IncompleteError: the run is not complete.
    """
    _, shards = read_run(store)
    status, by_id = read_status(store), {shard.id: shard for shard in shards}
    receipts = [receipt for receipt in read_receipts(store, SCORING) if receipt.shard in by_id]
    if status is None or status.state != "complete" or len(receipts) < len(shards):
        raise IncompleteError(f"run {store.url} is not complete: finish it first, with the same command")
    for receipt in receipts:
        if (difference := basis.difference(receipt.fingerprint)) is not None:
            raise UserError(f"run {store.url} scored differently, so its answers are not comparable: {difference}")
    _check_answered(store, basis)
    keys = [_read_text_keys(store, receipts, by_id)]
    record = read_record(store, AUDITED_RECORD, AuditedRecord, wording.NEW_RUN, wording.PUT_BACK)
    if record is not None and set(basis.detectors) <= set(record.detectors):
        keys.append(read_audited_keys(store, record.sha256))
    return np.concatenate(keys)


def _check_answered(store: Store, basis: ScoringBasis) -> None:
    """Check that a run has answered the selections in question; scores alone are not an audit.

    Raises:
        UserError: it has not; the message names the first detector.
    """
    settings = [question.settings for entry in read_history(store) for question in entry.questions]
    answered = {(one.get("direction"), column) for one in settings for column in cast(list[str], one["detectors"])}
    for direction, column in sorted(basis.selections):
        if (direction, column) not in answered:
            raise UserError(
                f"run {store.url} has scores, but no selection of direction {direction} with detector {column}; run "
                "seenset select on it, or name another run"
            )


def _read_text_keys(store: Store, receipts: list[Receipt], shards: Mapping[str, Shard]) -> np.ndarray:
    """The text keys of the scored audit documents, without those that repeat an id of an earlier shard."""
    repeats = None
    if store.exists(DUPLICATES):
        table = store.read_table(DUPLICATES, ["role", "source", "row"])
        repeats = table.filter(pc.equal(table["role"], "audit"))
    keys = [np.empty(0, dtype=np.int64)]
    for receipt in receipts:
        if receipt.role == "audit" and receipt.n_scored:
            table = read_filed(store, receipt, ["row", "text_key"])
            if repeats is not None:
                here = repeats.filter(pc.equal(repeats["source"], shards[receipt.shard].name))
                table = table.filter(pc.invert(pc.is_in(table["row"], value_set=here["row"].combine_chunks())))
            keys.append(table["text_key"].to_numpy())
    return np.concatenate(keys)
