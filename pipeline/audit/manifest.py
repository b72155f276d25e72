"""The manifest of a run directory: what its scores are made of, and whether a later command still asks for that."""

from __future__ import annotations

import logging
import platform
from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata
from typing import Any

from pipeline import __version__
from pipeline.audit.plan import Plan, describe_model
from pipeline.audit.scored import Scored
from pipeline.corpus.shard import Shard, shard_fingerprint
from pipeline.corpus.shards import number_rows
from pipeline.errors import UserError
from pipeline.stages.score import STAGE
from pipeline.store.files import Store
from pipeline.store.receipts import read_receipts

_log = logging.getLogger(__name__)


def read_run(store: Store) -> tuple[dict[str, Any], list[Shard]]:
    """The manifest and the shard table of a run directory.

    Raises:
        UserError: there is none.
    """
    manifest, table = store.read_json("manifest.json"), store.read_json("shards.json")
    if manifest is None or table is None:
        raise UserError(f"{store.url} is not a run directory: it has no manifest.json and shards.json")
    return manifest, [Shard.from_dict(value) for value in table]


def note_gradient(store: Store, scored: Scored) -> None:
    """Add to the manifest over what the gradient norm was taken, and how: only the loaded model could tell."""
    found = next((receipt.gradient for receipt in scored.receipts if receipt.gradient is not None), None)
    if found is not None:
        if found["reason"]:
            _log.warning("gradient_norm took one backward pass a document: %s", found["reason"])
        store.write_json("manifest.json", {**store.read_json("manifest.json"), "gradient": found})


PACKAGES = ("torch", "transformers", "peft", "ray", "numpy", "pyarrow")


def versions() -> dict[str, str]:
    """Versions of this program and of what computes its scores."""
    found = {"seenset": __version__, "python": platform.python_version()}
    return {**found, **{name: metadata.version(name) for name in PACKAGES}}


def settle(
    plan: Plan,
    fingerprints: Mapping[str, Mapping[str, Any]],
    store: Store,
    facts: Mapping[str, Any] | None = None,
) -> Plan:
    """Write the manifest and the shard table, or check that the ones in the run directory still hold.

    Args:
        plan: of the run.
        fingerprints: stage -> all that could change what it computes; scoring among them.
        store: the run directory.
        facts: what else the manifest says.

    Returns:
        The plan with its rows numbered.

    Raises:
        UserError: the directory holds scores of another model, other inputs or other settings: names the fields.
    """
    before = store.read_json("manifest.json")
    table = store.read_json("shards.json")
    if before is not None and table is not None:
        _check_layout(plan, before, store)
        shards = tuple(Shard.from_dict(value) for value in table)
        if [_unnumbered(shard) for shard in shards] != [_unnumbered(shard) for shard in plan.shards]:
            shards = tuple(number_rows(plan.shards))
    else:
        shards = tuple(number_rows(plan.shards))
    plan = Plan(plan.config, plan.inputs, shards, plan.limit)
    if before is not None and _free_to_score(plan, before) and _differ(before["fingerprint"], fingerprints[STAGE]):
        store.remove_folder(f"receipts/{STAGE}")
    for stage, fingerprint in fingerprints.items():
        _check_receipts(plan, stage, fingerprint, store)
    fingerprint = fingerprints[STAGE]
    store.write_json("shards.json", [shard.to_dict() for shard in shards])
    if before is not None and before["fingerprint"] == dict(fingerprint) and "model" in before:
        model = before["model"]
    else:
        model = describe_model(plan.config.model)
    store.write_json("manifest.json", {**_manifest(plan, fingerprint), "model": model, **(facts or {})})
    return plan


def _manifest(plan: Plan, fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "config": plan.config.model_dump(mode="json"),
        "limit": plan.limit,
        "seed": plan.config.seed,
        "versions": versions(),
        "fingerprint": dict(fingerprint),
        "inputs": [{k: v for k, v in asdict(entry).items() if k != "files"} for entry in plan.inputs],
        "passes": plan.passes(),
    }


def _check_layout(plan: Plan, before: Mapping[str, Any], store: Store) -> None:
    if before.get("limit") != plan.limit:
        held = f"a sample (--limit {before['limit']})" if before.get("limit") else "the whole corpus"
        raise UserError(f"run {store.url} was planned for {held}; use the same --limit or another run directory")
    ours = plan.config.resources
    for key in ("shard_bytes", "shard_documents"):
        was = before["config"]["resources"][key]
        if was != getattr(ours, key):
            raise UserError(f"run {store.url} was cut with resources.{key} {was}, now {getattr(ours, key)}")


def _free_to_score(plan: Plan, before: Mapping[str, Any]) -> bool:
    """Whether scores, earlier ones too, are made of stored continuations alone: then they are made anew at no cost."""
    return all(entry["kind"] == "generate" for entry in [*before["passes"], *plan.passes()])


def _differ(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether two fingerprints differ in their detectors and the stages that these read, and in nothing else."""
    changed = {key for key in {**before, **now} if before.get(key) != now.get(key)}
    return bool(changed) and changed <= {"detectors", "reads"}


def _check_receipts(plan: Plan, stage: str, fingerprint: Mapping[str, Any], store: Store) -> None:
    """Finished shards must be what this plan would compute: a mismatch names the differing fields."""
    shards = {shard.id: shard for shard in plan.shards}
    for receipt in read_receipts(store, stage):
        shard = shards.get(receipt.shard)
        if shard is None:
            raise UserError(
                f"run {store.url} holds shard {receipt.shard}, which the inputs no longer give; "
                "use another run directory"
            )
        wanted = shard_fingerprint(fingerprint, shard)
        differing = [
            key for key in {**wanted, **receipt.fingerprint} if wanted.get(key) != receipt.fingerprint.get(key)
        ]
        if differing:
            fields = "; ".join(
                f"{key}: {_short(receipt.fingerprint.get(key))} then, {_short(wanted.get(key))} now"
                for key in differing
            )
            where = f" (shard {shard.id}, {shard.name})" if {"rows", "columns"} & set(differing) else ""
            raise UserError(
                f"run {store.url} holds the work of stage {stage} with other settings: {fields}{where}; "
                "use another run directory"
            )


def _unnumbered(shard: Shard) -> dict[str, Any]:
    return {key: value for key, value in shard.to_dict().items() if key != "first_row"}


def _short(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:12]}..."
