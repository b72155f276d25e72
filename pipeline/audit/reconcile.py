"""Reconcile a run directory with its configuration: written for a new run, compared with the plan for a resumed one."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.audit.arithmetic import read_arithmetic
from pipeline.audit.manifest import (
    Allocation,
    AuditedModel,
    GradientRecord,
    InputRecord,
    Manifest,
    check_shard_table,
    read_manifest,
    versions,
    write_manifest,
)
from pipeline.audit.plan import Plan, describe_model
from pipeline.audit.records import MANIFEST_FILE
from pipeline.audit.repair import Stamps, check_documents_read
from pipeline.audit.scored import Each, Scored, each_in_turn
from pipeline.audit.shard_table import SHARDS_FILE, reconciled_shards, write_shards
from pipeline.corpus.inputs import number_rows, stamp_of
from pipeline.corpus.shard import BY_ID, InputFile, Shard, place_of, shard_fingerprint
from pipeline.errors import DamagedError, UserError
from pipeline.report.wording import files as wording
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
    each: Each = each_in_turn,
) -> Plan:
    """Write the manifest and the shard table, or check that the ones in the run directory still hold.

    A missing or damaged one is written again, which is logged; the documents of all finished shards are then checked.

    Args:
        plan: of the run.
        fingerprints: stage -> all that could change what it computes; scoring among them.
        store: the run directory.
        allocation: which known documents are trained on; by default none.
        each: a function of every shard.

    Returns:
        The plan with its rows numbered.

    Raises:
        UserError: the directory holds scores of another model, other inputs or other settings: names the fields.
    """
    before = _manifest_before(store)
    earlier = None if before is None else _shards_before(store, before, plan)
    if before is not None and store.exists(SHARDS_FILE):
        _check_layout(plan, before, store)
    plan = Plan(plan.config, plan.inputs, earlier or tuple(number_rows(plan.shards)), plan.limit)
    fingerprint = fingerprints[SCORING]
    if before is not None and _free_to_score(plan, before) and _differ_in_detectors(before.fingerprint, fingerprint):
        store.remove_folder(f"receipts/{SCORING}")
    for stage, wanted in fingerprints.items():
        _check_receipts(plan, stage, wanted, store)
    stamps = _stamps([] if before is None else before.inputs)  # without a manifest all that was read is read again
    check_documents_read(stamps, _stamps(plan.inputs), plan.shards, list(fingerprints), store, each)
    if earlier is None:
        write_shards(store, plan.shards)
    if before is not None and before.fingerprint == dict(fingerprint):
        model = before.model
    else:
        types = read_arithmetic(store)
        decided = None if types is None else types.types.get("model")
        described = describe_model(plan.config.model, plan.config.corpus.has_pictures)
        model = AuditedModel(**described, chosen=None if decided is None else decided.reason)
    write_manifest(store, _manifest(plan, fingerprint, model, allocation or Allocation()))
    return plan


def _manifest_before(store: Store) -> Manifest | None:
    """The manifest of a run that goes on; None for a new run, and where it is gone or damaged, which is then logged."""
    try:
        before = read_manifest(store)
        problem = f"{store.url}/{MANIFEST_FILE} is missing" if before is None and store.exists("receipts") else None
    except DamagedError as error:
        before, problem = None, str(error).partition("; seenset ")[0]
    if problem is not None:
        _log.warning("%s: %s", problem, wording.MANIFEST_WRITTEN_AGAIN)
    return before


def _shards_before(store: Store, before: Manifest, plan: Plan) -> tuple[Shard, ...] | None:
    """The planned shards as the shard table numbers their rows; None where there is no table, or a damaged one."""
    try:
        check_shard_table(store, before)
        return reconciled_shards(store, plan.shards)
    except DamagedError as error:
        _log.warning(wording.written_again(str(error).partition("; seenset ")[0]))
        return None


def check_inputs_since(plan: Plan, stages: Sequence[Stage], store: Store, each: Each) -> None:
    """Check that no input was changed while the run read it: its shards would be of two corpora.

    Raises:
        UserError: names the input.
    """
    now: Stamps = {(entry.role, entry.path): stamp_of(entry) for entry in plan.inputs}
    check_documents_read(_stamps(plan.inputs), now, plan.shards, [stage.name for stage in stages], store, each)


def _stamps(inputs: Sequence[InputFile | InputRecord]) -> Stamps:
    return {(entry.role, entry.path): entry.stamp for entry in inputs}


def note_gradient(store: Store, scored: Scored) -> None:
    """Add to the manifest over what the gradient norm was taken, and how: only the loaded model could tell."""
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
    counts = [config.corpus.review[0] for config in (before.config, plan.config)]
    if counts[0] != counts[1]:
        raise UserError(
            f"run {store.url} was started with corpus.unseen.review_count {counts[0]}, now {counts[1]}: it is fixed "
            "before the first score; use another run directory"
        )
    for key in ("shard_bytes", "shard_documents"):
        was, now = getattr(before.config.resources, key), getattr(plan.config.resources, key)
        if was != now:
            raise UserError(f"run {store.url} was cut with resources.{key} {was}, now {now}")


def _free_to_score(plan: Plan, before: Manifest) -> bool:
    """Whether scores, earlier ones too, are made of stored continuations alone: then they are made anew at no cost."""
    return all(entry["kind"] == "generate" for entry in [*before.passes, *plan.passes()])


def _differ_in_detectors(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether two fingerprints differ in their detectors and the stages that these read, and in nothing else."""
    changed = {key for key in {**before, **now} if before.get(key) != now.get(key)}
    return bool(changed) and changed <= {"detectors", "plugins", "reads"}


def _check_receipts(plan: Plan, stage: str, fingerprint: Mapping[str, Any], store: Store) -> None:
    """Finished shards must be what this plan would compute: a mismatch names the differing fields."""
    shards = sorted(plan.shards, key=BY_ID)
    for receipt in intact_receipts(store, stage):
        place = place_of(receipt.shard, shards)
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
