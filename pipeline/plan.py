"""What a run would do, from metadata alone; and whether a run directory's earlier work can be kept."""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from importlib import metadata
from typing import Any

import torch

from pipeline import __version__
from pipeline.config import NULL_ROLE, AuditConfig, Role, SelectionConfig, named
from pipeline.corpus import Shard, number_rows, plan_shards, shard_fingerprint
from pipeline.detectors import adapters_of, parse_detectors, plan_passes, sampled_of
from pipeline.endpoint.estimate import estimate
from pipeline.errors import UserError
from pipeline.inputs import InputFile, estimated_rows, find_inputs
from pipeline.models import check_model
from pipeline.parts import OWN_CORPUS, own_inputs, too_few
from pipeline.scoring import STAGE
from pipeline.selection.conditional import simes_grid
from pipeline.selection.evalues import dependence_factor
from pipeline.selection.grid import Grid
from pipeline.selection.knockoff import fewest
from pipeline.selection.step_up import calibration_needed, harmonic_bound, minimum_selectable
from pipeline.store import Store, read_receipts

BYTES_PER_TOKEN = 4.0
COST = {"forward": 1, "gradient": 3}  # of a pass, in forward passes
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
        model = check_model(plan.config.model)
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


def forecast(plan: Plan, model: Mapping[str, Any]) -> dict[str, Any]:
    """What `seenset plan` says: documents, shards, passes, time, and what alpha could ever select.

    The time is a guess for one worker like this machine: 2 floating-point operations a parameter and token, at
    the speed of a matrix product measured here and now, halved for all that is not a matrix product.
    """
    config = plan.config
    roles: dict[str, Any] = {}
    for role, _ in config.corpus.roles():
        count, exact = plan.documents(role)
        shards = sum(1 for shard in plan.shards if shard.role == role)
        roles[role] = {"documents": count, "exact": exact, "shards": shards}
    adapters, left = _adapters(config, roles)
    at_most = any(config.fsd.adapter(entry["name"]).group is not None for entry in adapters)
    total = sum(entry["documents"] for entry in roles.values())
    everything = sum(estimated_rows(entry)[0] for entry in plan.inputs)
    average = plan.text_bytes() / BYTES_PER_TOKEN / max(1, everything)
    tokens = round(total * min(average, config.max_tokens))
    passes = plan.passes()
    seconds = None
    if model.get("parameters"):
        reads = total * sum(_forward_passes(entry) for entry in passes)
        reads += COST["gradient"] * sum(entry["documents"] * entry["epochs"] for entry in adapters)
        each = tokens / max(1, total)
        seconds = 2 * model["parameters"] * each * reads / (0.5 * measured_flops(model["dtype"]))
    return {
        "run": config.run,
        "model": {"path": named(config.model), **model},
        "roles": roles,
        "limit": plan.limit,
        "shards": len(plan.shards),
        "passes": passes,
        "adapters": adapters,
        "detectors": [detector.column for detector in parse_detectors(config.detectors)],
        "estimated_tokens": tokens,
        "endpoint": estimate(config, total, plan.text_bytes() / max(1, everything)),
        "estimated_seconds_one_worker": None if seconds is None else float(f"{seconds:.3g}"),
        "selections": [
            _outlook(selection, roles["audit"]["documents"], left, at_most) for selection in config.selections
        ],
    }


def _forward_passes(entry: Mapping[str, Any]) -> float:
    """What a pass costs, in forward passes over the whole text."""
    if entry["kind"] == "generate":
        return float(entry["prefix_ratio"] + entry["draws"] * (1 - entry["prefix_ratio"]))
    return float(COST[entry["kind"]] * (1 + entry["paraphrases"]))


def _adapters(config: AuditConfig, roles: Mapping[str, Any]) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """What would be fine-tuned, and how many known documents of each role would calibrate."""
    found = []
    taken = Counter[str]()
    for name in adapters_of(parse_detectors(config.detectors)):
        settings = config.fsd.adapter(name)
        own = {role: settings.count(roles[role]["documents"], at) for at, role in enumerate(settings.roles)}
        if settings.corpus is not None:
            own_inputs(config, settings, name)
        for role, count in own.items():
            have = roles[role]["documents"]
            if roles[role]["exact"] and count >= have:
                raise too_few(name, f"corpus.{role}", have, count, 1)
            taken[role] = max(taken[role], count)  # smaller parts lie in larger ones, but for groups
        facts = {"name": name, "method": settings.method, "epochs": settings.epochs}
        documents = sum(own.values()) if own else settings.documents or 0
        found.append({**facts, "documents": documents, "train_on": [*map(str, own)] or [OWN_CORPUS]})
    return found, {role: max(0, entry["documents"] - taken[role]) for role, entry in roles.items()}


def _outlook(selection: SelectionConfig, m: int, calibration: Mapping[str, int], at_most: bool) -> dict[str, Any]:
    """What a selection could ever select of m documents, were the share of nulls 1."""
    facts = {key: getattr(selection, key) for key in ("name", "procedure", "direction", "alpha")}
    alpha, hundredth = selection.exact_alpha, max(1, m // 100)
    if selection.procedure == "ktd":
        least, sentence = fewest(alpha, m)
        return {**facts, "minimum_selectable": least, "ok": least <= m, "sentence": sentence}
    role = NULL_ROLE[selection.direction]
    n = calibration[role]
    if selection.procedure == "adadetect":
        n -= n // 2  # the other half trains the classifier
    grid = Grid.uniform(n)
    if selection.calibration == "conditional":
        grid = simes_grid(n, Fraction(repr(selection.delta)))
    factors = {"by": lambda: harmonic_bound(m), "ebh": lambda: dependence_factor(grid, m, alpha)}
    factor = factors.get(selection.procedure, lambda: Fraction(1))()
    needed = minimum_selectable(grid, m, alpha, factor)
    found = resolution(n, m, needed, calibration_needed(m, alpha, hundredth, factor), role)
    if at_most:  # which documents of a group there are is not known before they are read
        found["sentence"] = found["sentence"].replace("With ", "With at most ", 1)
    return {**facts, **found}


def resolution(n: int, m: int, needed: int, enough: int, role: str) -> dict[str, Any]:
    """Whether n calibration documents let anything be selected out of m: numbers and a sentence (METHODS 3)."""
    sentence = (
        f"With {n:,} {role} documents to calibrate on and {m:,} to judge, nothing can be selected unless at least "
        f"{needed:,} stand out."
    )
    ok = needed <= max(1, m // 100)
    if not ok:
        sentence += f" To select as few as 1% of the audited documents takes {enough:,} {role} documents."
    return {"minimum_selectable": needed, "calibration_for_1_percent": enough, "ok": ok, "sentence": sentence}


def measured_flops(dtype: str) -> float:
    """Floating-point operations a second of one matrix product on this machine, the best of a few."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = 4096 if device == "cuda" else 768
    left = torch.ones(size, size, dtype=getattr(torch, dtype, torch.float32), device=device)
    best = float("inf")
    for _ in range(6):
        began = time.perf_counter()
        product = left @ left
        product[0, 0].item()
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best
