"""Builds a run directory by hand, as the driver leaves it: the data that the report's tests read."""

import json
from collections.abc import Container
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.checks.blind import blind_diagnostic
from pipeline.checks.diagnostic import CountDiagnostic, OverlapDiagnostic, ShareDiagnostic
from pipeline.checks.registry import Conclusion
from pipeline.checks.resolution import ResolutionDiagnostic, resolution
from pipeline.config.audit import AuditConfig
from pipeline.config.selection import SelectionConfig
from pipeline.corpus.inputs import find_inputs, number_rows, plan_shards
from pipeline.corpus.keys import make_excerpt
from pipeline.results.status import Counts, StatusFile
from pipeline.results.summary import Summary, read_summary, summary_file
from pipeline.run.manifest import AuditedModel, InputRecord, Manifest, read_run, write_manifest
from pipeline.run.records import write_record
from pipeline.selection.conformal import RankCounts, calibrate, ranks
from pipeline.selection.folds import PLAIN
from pipeline.selection.guarantees import Outcome, StrictAnswer
from pipeline.selection.procedures import Decision
from pipeline.selection.procedures.estimating import strict
from pipeline.selection.procedures.record import decide
from pipeline.selection.step_up import minimum_selectable
from pipeline.store.files import Store
from pipeline.store.receipts import FileRecord, Receipt, write_filed, write_receipt
from tests.helpers.signed import sign

SCRIPT = "<script>alert('selected')</script><img src=http://evil.example/x onerror=alert(1)>"
SECRET = "Harvest of the unlikely orchard"
BIDI = "safe\u202etxt.exe\u0000end"


def build_run(
    folder: Path,
    *,
    m: int = 240,
    n: int = 100,
    members: float = 0.5,
    limit: int | None = None,
    selections: tuple[dict[str, Any], ...] = ({},),
    drawn: Container[str] | None = None,
) -> Store:
    """A run directory as the driver leaves it, on simulated scores, with figures to draw for the selections `drawn`."""
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
            "resources": {"shard_bytes": 1 << 20},
        }
    )
    inputs = find_inputs(config.corpus)
    shards = number_rows(plan_shards(config.corpus, inputs, config.resources))
    store = Store(str(folder / "run"))
    store.write_json("shards.json", [shard.to_dict() for shard in shards])
    StatusFile(store, Counts(len(shards))).write("complete", 0)
    manifest = Manifest(
        config=config,
        limit=limit,
        seed=7,
        versions={"seenset": "0.1.0", "torch": "2.9"},
        fingerprint={"weights": "ab12", "tokenizer": "cd34"},
        inputs=[InputRecord.model_validate(entry, from_attributes=True) for entry in inputs],
        passes=[],
        model=AuditedModel(architecture="LlamaForCausalLM", dtype="float32", max_tokens=2048, parameters=None),
    )
    write_manifest(store, manifest)
    _score(store, [shard.id for shard in shards], m, n)
    for selection in config.selections:
        _select(store, selection, texts, source, n, members, limit)
        if drawn is not None and selection.name not in drawn:
            for file in ("ranks.parquet", "scores.json"):
                store.remove(f"selection/{selection.name}/{file}")
    return sign(store)


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
    refused = write_filed(store, "quarantine/audit-000000-a.parquet", quarantine)
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
            files={f"scores/{shard}-a.parquet": FileRecord(0, 0, ""), "quarantine/audit-000000-a.parquet": refused},
            documents=f"{shard} {size}",
            tokens=1000,
            n_truncated=2,
        )
        write_receipt(store, "score", receipt)


def _select(
    store: Store, selection: SelectionConfig, texts: list[str], source: Path, n: int, members: float, limit: int | None
) -> None:
    name, direction = selection.name, selection.direction
    generator = np.random.default_rng(3)
    scored = len(texts) - 4
    audit = generator.normal(size=scored) + 3.0 * (np.arange(scored) < round(members * len(texts)))
    audit[:2] += 6 if members else 0
    calibration = generator.normal(size=n)
    if direction == "clean":
        audit, calibration = -audit, -calibration
    rank = ranks(audit, calibrate(calibration), direction)
    counts = RankCounts.of(np.append(rank, [n + 1] * 4), n)
    decision = decide(selection.procedure, counts, selection.exact_alpha)
    write_record(store, summary_file(name), summary_of(selection, counts, decision, limit))
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
            "source": pa.array([str(source)] * len(rows), pa.string()),
            "row": pa.array(rows, pa.int64()),
            "excerpt": pa.array([make_excerpt(texts[row], 200) for row in rows], pa.string()),
        }
    )
    store.write_table(f"selection/{name}/selected.parquet", selected)


def summary_of(selection: SelectionConfig, counts: RankCounts, decision: Decision, limit: int | None = None) -> Summary:
    """The summary of a decision, four of whose documents are quarantined."""
    safe = strict(decision, counts)
    least = minimum_selectable(counts.n, counts.m, decision.alpha, decision.factor)
    diagnostics = Conclusion(
        blind=blind_diagnostic(None, "unseen"),
        resolution=ResolutionDiagnostic(**resolution(counts.n, counts.m, least, 1, "unseen", PLAIN)),
        overlap=OverlapDiagnostic(
            outcome=Outcome.PASSED, sentence="No calibration document is also audited.", n_calibration=0, n_audit=0
        ),
        duplicates=CountDiagnostic(outcome=Outcome.PASSED, sentence="No document repeats an id.", count=0),
        truncated=ShareDiagnostic(
            outcome=Outcome.INCONCLUSIVE,
            sentence="2 of 340 documents were truncated at max_tokens.",
            share=2 / counts.m,
        ),
    )
    return Summary(
        name=selection.name,
        procedure=selection.procedure,
        direction=selection.direction,
        alpha=selection.alpha,
        detectors=selection.detectors,
        calibration=selection.calibration,
        n_audit=counts.m,
        n_calibration=counts.n,
        n_quarantined=4,
        n_selected=decision.n_selected,
        threshold=decision.threshold,
        null_proportion=decision.null_proportion,
        factor=float(decision.factor),
        weights=None,
        guarantee=decision.guarantee,
        assumption=decision.assumption,
        promise=decision.promise,
        conclusion=diagnostics.value,
        reasons=diagnostics.failures(),
        minimum_selectable=least,
        strict=StrictAnswer(safe.procedure, safe.n_selected, safe.threshold, safe.guarantee),
        details=decision.details,
        diagnostics=diagnostics,
        limit=limit,
    )


def summary_in(store: Store, name: str = "members") -> Summary:
    summary = read_summary(store, name)
    assert summary is not None
    return summary


def amend(store: Store, name: str, **changes: Any) -> None:
    """Change fields of a selection's summary, whatever other files of the answer were changed before."""
    store = sign(store)
    write_record(store, summary_file(name), summary_in(store, name).model_copy(update=changes))
    sign(store)


def amend_manifest(store: Store, **changes: Any) -> None:
    write_manifest(store, read_run(store)[0].model_copy(update=changes))
    sign(store)


def amend_checks(store: Store, name: str = "members", **results: Any) -> None:
    """Change results of the checks of a selection, and with them whether they support it."""
    checks = summary_in(store, name).diagnostics.model_copy(update=results)
    amend(store, name, diagnostics=checks, conclusion=checks.value, reasons=checks.failures())
