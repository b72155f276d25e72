"""Builds a run directory by hand, as the driver leaves it: the data that the report's tests read."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.config.audit import AuditConfig
from pipeline.corpus.inputs import find_inputs
from pipeline.corpus.shards import number_rows, plan_shards
from pipeline.selection import Decision, RankCounts, calibrate, decide, minimum_selectable, ranks, strict
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt, write_receipt

SCRIPT = "<script>alert('selected')</script><img src=http://evil.example/x onerror=alert(1)>"
SECRET = "Harvest of the unlikely orchard"
BIDI = "safe\u202etxt.exe\u0000end"


def build_run(
    folder: Path,
    *,
    m: int = 240,
    n: int = 100,
    members: float = 0.5,
    shift: float = 3.0,
    limit: int | None = None,
    selections: tuple[dict[str, Any], ...] = ({},),
) -> Store:
    """A run directory as the driver leaves it: real inputs, shards, receipts and decisions on simulated scores."""
    texts = [f"{SECRET} number {row} " + "and more of it " * 40 for row in range(m)]
    texts[0], texts[1] = f"{SCRIPT} {SECRET}", f"{BIDI} {SECRET}"
    folder.mkdir(exist_ok=True)
    source = folder / "audit.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    other = folder / "unseen.jsonl"
    other.write_text(json.dumps({"text": "calibration"}) + "\n")
    config = AuditConfig.model_validate(
        {
            "run": str(folder / "run"),
            "model": {"path": "models/tiny<b>"},
            "corpus": {"audit": {"path": str(source)}, "unseen": {"path": str(other)}},
            "selections": [{"name": "members", "detectors": ["loss"], **extra} for extra in selections],
        }
    )
    inputs = find_inputs(config)
    shards = number_rows(plan_shards(config, inputs))
    store = Store(str(folder / "run"))
    store.write_json("shards.json", [shard.to_dict() for shard in shards])
    store.write_json("status.json", {"state": "complete", "exit_code": 0})
    manifest = {
        "config": config.model_dump(),
        "versions": {"seenset": "0.1.0", "torch": "2.9"},
        "model": {"architecture": "LlamaForCausalLM", "dtype": "float32"},
        "fingerprint": {"weights": "ab12", "tokenizer": "cd34"},
        "seed": 7,
        "inputs": [
            {"role": e.role, "name": e.name, "format": e.format, "size": e.size, "rows": e.rows} for e in inputs
        ],
        "limit": limit,
    }
    store.write_json("manifest.json", manifest)
    _score(store, [shard.id for shard in shards], m, n)
    for extra in selections:
        _select(store, str(source), m, n, members, shift, extra)
    return store


def _score(store: Store, shards: list[str], m: int, n: int) -> None:
    quarantine = pa.table(
        {
            "doc_id": [f"q{i}" for i in range(4)],
            "role": ["audit"] * 4,
            "source": ["audit.jsonl"] * 4,
            "row": [m - 4 + i for i in range(4)],
            "stage": ["score"] * 4,
            "reason": ["empty", "empty", "empty", "model_error"],
            "message": ["nothing but white space"] * 3 + [f"<b>failed on {SECRET}</b>"],
        }
    )
    store.write_table("quarantine/audit-000000-a.parquet", quarantine)
    for shard in shards:
        role = shard.split("-")[0]
        size, bad = (m, 4) if role == "audit" else (n, 0)
        receipt = Receipt(
            shard=shard,
            role=role,
            n_in=size,
            n_scored=size - bad,
            n_quarantined=bad,
            data=f"scores/{shard}-a.parquet",
            quarantine="quarantine/audit-000000-a.parquet" if bad else None,
            reasons={"empty": 3, "model_error": 1} if bad else {},
            fingerprint={},
            tokens=1000,
            n_truncated=2,
        )
        write_receipt(store, "score", receipt)


def _select(store: Store, source: str, m: int, n: int, members: float, shift: float, extra: dict[str, Any]) -> None:
    name, direction = extra.get("name", "members"), extra.get("direction", "members")
    alpha, procedure = Fraction(repr(extra.get("alpha", 0.1))), extra.get("procedure", "bh")
    generator = np.random.default_rng(3)
    scored = m - 4
    audit = generator.normal(size=scored) + shift * (np.arange(scored) < round(members * m))
    audit[:2] += 6 if members else 0
    calibration = generator.normal(size=n)
    if direction == "clean":
        audit, calibration = -audit, -calibration
    rank = ranks(audit, calibrate(calibration), direction)
    counts = RankCounts.of(np.append(rank, [n + 1] * 4), n)
    decision = decide(procedure, counts, alpha)
    summary = _summary(name, direction, alpha, counts, decision)
    store.write_json(f"selection/{name}/summary.json", summary)
    occupied = np.flatnonzero(counts.counts)
    store.write_table(
        f"selection/{name}/ranks.parquet", pa.table({"rank": occupied + 1, "count": counts.counts[occupied]})
    )
    edges = np.linspace(-8, 8, 129)
    values = {"audit": audit, "unseen": calibration}
    histogram = {role: np.histogram(scores, edges)[0].tolist() for role, scores in values.items()}
    store.write_json(f"selection/{name}/scores.json", {"column": "loss", "edges": edges.tolist(), "roles": histogram})
    rows = [row for row in np.lexsort((np.arange(scored), rank)) if rank[row] <= decision.rank]
    selected = pa.table(
        {
            "doc_id": [f"{source}#{row}" for row in rows],
            "p_value": pa.array([rank[row] / (n + 1) for row in rows], pa.float64()),
            "loss": pa.array([audit[row] for row in rows], pa.float64()),
            "source": pa.array([source] * len(rows), pa.string()),
            "row": pa.array(rows, pa.int64()),
        }
    )
    store.write_table(f"selection/{name}/selected.parquet", selected)


def _summary(name: str, direction: str, alpha: Fraction, counts: RankCounts, decision: Decision) -> dict[str, Any]:
    safe = strict(decision, counts)
    least = minimum_selectable(counts.n, counts.m, alpha, decision.null_proportion)
    return {
        "name": name,
        "procedure": decision.procedure,
        "direction": direction,
        "alpha": float(alpha),
        "detectors": ["loss"],
        "n_audit": counts.m,
        "n_calibration": counts.n,
        "n_quarantined": 4,
        "n_selected": decision.n_selected,
        "threshold": decision.threshold,
        "null_proportion": decision.null_proportion,
        "weights": None,
        "guarantee": decision.guarantee,
        "assumption": decision.assumption,
        "minimum_selectable": least,
        "strict": {
            "procedure": safe.procedure,
            "n_selected": safe.n_selected,
            "threshold": safe.threshold,
            "guarantee": safe.guarantee,
        },
        "details": decision.details,
        "diagnostics": {
            "resolution": {"ok": least <= counts.m / 100, "sentence": f"A selection holds at least {least}."},
            "overlap": {"ok": True, "count": 0, "sentence": "No calibration document is also audited."},
            "truncated": {"ok": None, "sentence": "2 documents were cut short."},
        },
    }


def amend(store: Store, name: str, **changes: Any) -> None:
    """Change fields of a selection's summary."""
    path = f"selection/{name}/summary.json"
    store.write_json(path, {**store.read_json(path), **changes})
