"""Reconcile a run directory with its configuration: a new run, a run to resume, or a finished run."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pipeline.corpus.inputs import make_stamp, number_rows
from pipeline.corpus.shard import BY_ID, InputFile, Shard, shard_fingerprint, shard_index
from pipeline.errors import DamagedError, UserError
from pipeline.run import remedies as wording
from pipeline.run.dtypes import read_arithmetic
from pipeline.run.manifest import (
    Allocation,
    AuditedModel,
    GradientRecord,
    InputRecord,
    Manifest,
    RecordedModel,
    check_shard_table,
    read_manifest,
    reconciled_shards,
    versions,
    write_manifest,
    write_shards,
)
from pipeline.run.plan import Plan, describe_model
from pipeline.run.records import MANIFEST_FILE, SHARDS_FILE
from pipeline.run.repair import Stamps, check_documents_read
from pipeline.run.scored import Scored, ShardMap, each_in_turn
from pipeline.stages import SCORING
from pipeline.stages.base import Stage
from pipeline.store.files import Store
from pipeline.store.receipts import intact_receipts

_log = logging.getLogger(__name__)


def reconcile(
    plan: Plan,
    fingerprints: Mapping[str, Mapping[str, Any]],
    store: Store,
    allocation: Allocation | None = None,
    each: ShardMap = each_in_turn,
    models: Mapping[str, RecordedModel] | None = None,
) -> Plan:
    """Write the manifest and the shard table, or check that those in the run directory still apply.

    A missing or damaged file is written again, which is logged; the documents of all finished shards are then checked.

    Args:
        plan: plan of the run.
        fingerprints: stage -> all values that could change its result; includes scoring.
        store: the run directory.
        allocation: the allocation of known documents; by default none.
        each: applies a function to every shard.
        models: the opened models, by key of the configuration; by default none.

    Returns:
        The plan with numbered rows.

    Raises:
        UserError: the directory holds scores of another model, other inputs or other settings; the fields are named.
    """
    before = _manifest_before(store)
    earlier = None if before is None else _shards_before(store, before, plan)
    if before is not None and store.exists(SHARDS_FILE):
        _check_layout(plan, before, store)
    plan = replace(plan, shards=earlier or tuple(number_rows(plan.shards)))
    fingerprint = fingerprints[SCORING]
    if before is not None and _free_to_score(plan, before) and _differ_in_detectors(before.fingerprint, fingerprint):
        store.remove_folder(f"receipts/{SCORING}")
    for stage, wanted in fingerprints.items():
        _check_receipts(plan, stage, wanted, store)
    stamps = _stamps([] if before is None else before.inputs)  # without a manifest, all inputs are read again
    check_documents_read(stamps, _stamps(plan.inputs), plan.shards, list(fingerprints), store, each)
    if earlier is None:
        write_shards(store, plan.shards)
    gradient = None
    if before is not None and before.fingerprint == dict(fingerprint):
        model, gradient = before.model, before.gradient
    else:
        types = read_arithmetic(store)
        decided = None if types is None else types.types.get("model")
        described = describe_model(plan.config.model, plan.config.corpus.has_pictures)
        model = AuditedModel(**described, chosen=None if decided is None else decided.reason)
    manifest = _manifest(plan, fingerprint, model, allocation or Allocation())
    write_manifest(store, manifest.model_copy(update={"gradient": gradient, "models": dict(models or {})}))
    return plan


def _manifest_before(store: Store) -> Manifest | None:
    """The manifest of an existing run; None for a new run, and, with a log entry, where it is missing or damaged."""
    try:
        before = read_manifest(store)
        problem = f"{store.url}/{MANIFEST_FILE} is missing" if before is None and store.exists("receipts") else None
    except DamagedError as error:
        before, problem = None, error.problem
    if problem is not None:
        _log.warning("%s: %s", problem, wording.MANIFEST_WRITTEN_AGAIN)
    return before


def _shards_before(store: Store, before: Manifest, plan: Plan) -> tuple[Shard, ...] | None:
    """The planned shards with the row numbers of the shard table; None where there is no table, or a damaged one."""
    try:
        check_shard_table(store, before)
        return reconciled_shards(store, plan.shards)
    except DamagedError as error:
        _log.warning(wording.written_again(error.problem))
        return None


def check_inputs_since(plan: Plan, stages: Sequence[Stage], store: Store, each: ShardMap) -> None:
    """Check that no input was changed while the run read it: its shards would come from two corpora.

    Raises:
        UserError: an input was changed; the message names it.
    """
    now: Stamps = {(entry.role, entry.path): make_stamp(entry) for entry in plan.inputs}
    check_documents_read(_stamps(plan.inputs), now, plan.shards, [stage.name for stage in stages], store, each)


def _stamps(inputs: Sequence[InputFile | InputRecord]) -> Stamps:
    return {(entry.role, entry.path): entry.stamp for entry in inputs}


def note_gradient(store: Store, scored: Scored) -> None:
    """Add the parameters and the method of the gradient norm to the manifest; only the loaded model determines them."""
    coverage = next((receipt.gradient for receipt in scored.receipts if receipt.gradient is not None), None)
    manifest = read_manifest(store)
    if coverage is None or manifest is None:
        return
    gradient = GradientRecord(**coverage)
    if gradient.reason:
        _log.warning(wording.one_backward_pass(gradient.reason))
    write_manifest(store, manifest.model_copy(update={"gradient": gradient}))


def _manifest(plan: Plan, fingerprint: Mapping[str, Any], model: AuditedModel, allocation: Allocation) -> Manifest:
    return Manifest(
        config=plan.config,
        limit=plan.limit,
        seed=plan.config.seed,
        versions=versions(),
        fingerprint=dict(fingerprint),
        inputs=[InputRecord.model_validate(entry, from_attributes=True) for entry in plan.inputs],
        passes=plan.passes(),
        model=model,
        adapters=allocation.adapters,
        shots=allocation.shots,
        calibration=allocation.calibration,
    )


def _check_layout(plan: Plan, before: Manifest, store: Store) -> None:
    if before.limit != plan.limit:
        extent = wording.extent(before.limit)
        raise UserError(f"run {store.url} was planned for {extent}; use the same --limit or another run directory")
    for key in ("shard_bytes", "shard_documents"):
        was, now = getattr(before.config.resources, key), getattr(plan.config.resources, key)
        if was != now:
            raise UserError(f"run {store.url} was cut with resources.{key} {was}, now {now}")


def _free_to_score(plan: Plan, before: Manifest) -> bool:
    """Whether all scores, earlier ones too, come from stored continuations only: recomputing them costs nothing."""
    return all(entry["kind"] == "generate" for entry in [*before.passes, *plan.passes()])


def _differ_in_detectors(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether two fingerprints differ only in their detectors and the stages that these read."""
    changed = {key for key in {**before, **now} if before.get(key) != now.get(key)}
    return bool(changed) and changed <= {"detectors", "plugins", "reads"}


def _check_receipts(plan: Plan, stage: str, fingerprint: Mapping[str, Any], store: Store) -> None:
    """Check that finished shards are those that this plan would compute; the error names the differing fields."""
    shards = sorted(plan.shards, key=BY_ID)
    for receipt in intact_receipts(store, stage):
        place = shard_index(receipt.shard, shards)
        if place is None:
            raise UserError(
                f"run {store.url} holds shard {receipt.shard}, which the inputs no longer give; "
                "use another run directory"
            )
        shard = shards[place]
        wanted = shard_fingerprint(fingerprint, shard)
        differing = [
            key for key in {**wanted, **receipt.fingerprint} if wanted.get(key) != receipt.fingerprint.get(key)
        ]
        if "code" in differing:
            raise UserError(
                f"run {store.url} holds the work of seenset {receipt.fingerprint.get('code')}, and this is "
                f"{wanted['code']}: scores of two versions do not mix; use another run directory"
            )
        if differing:
            fields = "; ".join(wording.differs(key, receipt.fingerprint.get(key), wanted.get(key)) for key in differing)
            where = f" (shard {shard.id}, {shard.name})" if {"rows", "columns"} & set(differing) else ""
            raise UserError(
                f"run {store.url} holds the work of stage {stage} with other settings: {fields}{where}; "
                "use another run directory"
            )
