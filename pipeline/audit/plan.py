"""What a run would do, from metadata alone; and whether a run directory's earlier work can be kept."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from typing import Any

from pipeline import __version__
from pipeline.config.audit import AuditConfig
from pipeline.config.corpus import Role
from pipeline.config.models import EndpointConfig, ModelConfig
from pipeline.corpus.inputs import InputFile, estimated_rows, find_inputs
from pipeline.corpus.shard import Shard, shard_fingerprint
from pipeline.corpus.shards import number_rows, plan_shards
from pipeline.detectors.registry import parse_detectors, plan_passes, sampled_of
from pipeline.endpoint.client import check_endpoint
from pipeline.errors import UserError
from pipeline.models.load import check_model
from pipeline.stages.score import STAGE
from pipeline.store.files import Store
from pipeline.store.receipts import read_receipts

PACKAGES = ("torch", "transformers", "peft", "ray", "numpy", "pyarrow")


@dataclass(frozen=True, slots=True)
class Plan:
    """The work of one audit: inputs cut into shards, in a fixed order."""

    config: AuditConfig
    inputs: tuple[InputFile, ...]
    shards: tuple[Shard, ...]
    limit: int | None

    def documents(self, role: Role) -> tuple[int, bool]:
        """Documents of a role, and whether the number is exact (it is a guess where only reading would tell)."""
        estimates = [estimated_rows(entry) for entry in self.inputs if entry.role == role]
        count, exact = sum(rows for rows, _ in estimates), all(known for _, known in estimates)
        if self.limit is not None and self.limit <= count:
            return self.limit, exact
        return count, exact

    def passes(self) -> list[dict[str, Any]]:
        """The passes that the detectors need, each run once a document and once a paraphrase of it."""
        planned = plan_passes(parse_detectors(self.config.detectors))
        draws = Counter(replace(p, draw=0) for p in planned if p.draw)
        found: list[dict[str, Any]] = [
            {
                "kind": p.kind,
                "model": p.model,
                "text": p.text,
                "adapter": p.adapter or None,
                "paraphrases": draws[p],
                "statistics": sorted(read),
            }
            for p, read in planned.items()
            if not p.draw and p.continued is None
        ]
        asked = sampled_of(parse_detectors(self.config.detectors))
        found += [{"kind": "generate", **asdict(continued), "draws": m} for continued, m in asked.items()]
        return found

    def text_bytes(self) -> int:
        """Bytes of all inputs, compressed ones taken for a third of their text."""
        return sum(entry.size * (1 if entry.splittable else 3) for entry in self.inputs)


def make_plan(config: AuditConfig, limit: int | None = None) -> Plan:
    """Find the inputs and cut them into shards.

    Raises:
        UserError: a bad file or column, a role without documents, a limit below 1.
    """
    if limit is not None and limit < 1:
        raise UserError(f"--limit must be at least 1, got {limit}")
    inputs = find_inputs(config)
    return Plan(config, tuple(inputs), tuple(plan_shards(config, inputs, limit)), limit)


def describe_model(model: ModelConfig | EndpointConfig) -> dict[str, Any]:
    """Check without loading weights that a model can be asked: `check_model` or `check_endpoint`."""
    return check_endpoint(model) if isinstance(model, EndpointConfig) else check_model(model)


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
    """Whether two fingerprints differ in their detectors and in nothing else."""
    return {key for key in {**before, **now} if before.get(key) != now.get(key)} == {"detectors"}


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


def pending(plan: Plan, stage: str, store: Store) -> list[Shard]:
    """The shards without a receipt of a stage."""
    done = {name.removesuffix(".json") for name in store.names(f"receipts/{stage}", ".json")}
    return [shard for shard in plan.shards if shard.id not in done]
