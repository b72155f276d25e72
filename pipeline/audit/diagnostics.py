"""The diagnostics of a selection: what the run's files say of the assumptions."""

from __future__ import annotations

from typing import Any

from pipeline.audit.blind import blind, blind_sentence, sample_texts
from pipeline.audit.scored import Overlap, Scored
from pipeline.errors import UserError


def blind_diagnostic(scored: Scored, role: str, seed: int) -> dict[str, Any]:
    """The blind diagnostic of a role; computed once a run, because the texts may be gone when it is read again."""
    name = f"diagnostics/blind-{role}.json"
    found: dict[str, Any] | None = scored.store.read_json(name)
    if found is not None:
        return found
    shards = {r: [scored.shards[receipt.shard] for receipt in scored.of(r)] for r in (role, "audit")}
    try:
        found = blind_sentence(blind(sample_texts(shards[role]), sample_texts(shards["audit"]), seed), role)
    except UserError as error:
        return {
            "ok": None,
            "sentence": f"Whether the words of {role} and audited documents differ was not tested: {error}.",
        }
    scored.store.write_json(name, found)
    return found


def overlap_diagnostic(overlap: Overlap, role: str) -> dict[str, Any]:
    """How many calibration documents are audited too."""
    tail = " and were left out of calibration." if overlap.n_calibration else "."
    sentence = f"{overlap.n_calibration} {role} documents are audit documents too{tail}"
    return {"n_calibration": overlap.n_calibration, "n_audit": overlap.n_audit, "ok": True, "sentence": sentence}


def finetuned_diagnostic(scored: Scored, role: str) -> dict[str, Any]:
    """What fine-tuning took from calibration, where a run fine-tunes."""
    if not scored.finetuned:
        return {}
    count = scored.n_finetuned(role)
    sentence = f"{count} {role} documents were fine-tuned on, or begin like one that was, and do not calibrate."
    return {"fine_tuned": {"count": count, "ok": True, "sentence": sentence}}


def duplicates_diagnostic(scored: Scored) -> dict[str, Any]:
    """How many documents repeat an id."""
    count = sum(scored.quarantined(role)["duplicate_id"] for role in ("audit", "unseen", "seen"))
    return {
        "count": count,
        "ok": count == 0,
        "sentence": f"{count} documents repeat an id and were quarantined.",
    }


def truncated_diagnostic(scored: Scored) -> dict[str, Any]:
    """How many documents were judged by their beginning alone."""
    total = sum(receipt.n_scored for receipt in scored.receipts)
    cut = sum(receipt.n_truncated for receipt in scored.receipts)
    share = cut / total if total else 0.0
    sentence = f"{cut} of {total} scored documents ({share:.1%}) were judged by their first max_tokens tokens only."
    return {"share": share, "ok": None, "sentence": sentence}
