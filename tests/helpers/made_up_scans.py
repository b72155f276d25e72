"""Scans of a schedule without a model: receipts with made-up scores, and configurations that ask about them."""

from typing import Any

from pipeline.config.audit import AuditConfig
from pipeline.config.yaml import build
from pipeline.results.summary import Summary
from pipeline.run.scored import Scored
from pipeline.selection.guarantees import ConclusionValue
from pipeline.store.files import Store
from pipeline.store.receipts import FileRecord, Receipt

FINGERPRINT = {"model": "m1", "dtype": "float32", "max_tokens": 1024, "code": "0.7.0", "rows": [0, 9]}


def scan_config(
    ledger: str, run: str = "/runs/one", names: tuple[str, ...] = ("members",), **terms: Any
) -> AuditConfig:
    """The configuration of a scan; `terms` are of its series, but for `procedure`, `direction` and `adapter`."""
    asked = {"procedure": terms.pop("procedure", "bh"), "direction": terms.pop("direction", "members")}
    selections = [{"name": name, "detectors": ["loss"], **asked} for name in names]
    return build(
        AuditConfig,
        {
            "run": run,
            "model": {"path": "model", "adapter": terms.pop("adapter", None)},
            "corpus": {"audit": {"path": "audit.jsonl"}, "unseen": {"path": "unseen.jsonl"}},
            "detectors": ["loss"],
            "selections": selections,
            "series": {"ledger": ledger, "alpha": 0.1, **terms},
        },
    )


def scan_scores(config: AuditConfig, content: str, **fingerprint: Any) -> Scored:
    """Finished score shards; another `content` is other scores."""
    data = f"scores/{content}.parquet"
    files = {data: FileRecord(3, 100, content)}
    made_of = {**FINGERPRINT, **fingerprint}
    receipt = Receipt("audit-000000", "audit", 3, 3, 0, data, None, {}, made_of, files, content)
    return Scored(Store(config.run), (receipt,), {}, {}, {})


def scan_summary(
    config: AuditConfig, name: str, n_selected: int, conclusion: ConclusionValue = ConclusionValue.SUPPORTED
) -> Summary:
    """An answer, as far as a ledger holds it."""
    return Summary.model_construct(
        name=name,
        procedure="bh",
        direction="members",
        detectors=["loss"],
        alpha=0.01,
        n_audit=100,
        n_calibration=20,
        n_selected=n_selected,
        guarantee="finite-sample",
        conclusion=conclusion,
        bound=None,
    )
