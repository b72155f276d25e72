"""Whether the scans of a schedule were scored alike and calibrated on the same documents, as prds needs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from pipeline.config.audit import AuditConfig
from pipeline.corpus.shard import OF_A_SHARD
from pipeline.errors import UserError
from pipeline.series.scans import Scan, Schedule
from pipeline.stages.base import AGAINST

IGNORED = OF_A_SHARD | {"document_bytes", "pixels", "detectors", AGAINST}
"""Of a fingerprint: what is of shards, the detectors of other selections and the documents left out."""


def scorers_of(config: AuditConfig, fingerprint: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """What decides a selection's scores and how it ranks them, by its name: a short digest each, by name.

    Args:
        config: of the audit.
        fingerprint: of its scores.
    """
    common = {name: value for name, value in fingerprint.items() if name not in IGNORED}
    scorers = {}
    for selection in config.selections:
        settings = selection.model_dump(mode="json", by_alias=True, exclude={"name", "alpha", "confidence"})
        parts = {**common, "settings": settings}
        scorers[selection.name] = {name: _short_digest(value) for name, value in sorted(parts.items())}
    return scorers


def check_scorers(
    schedule: Schedule,
    scorers: Mapping[str, Mapping[str, str]],
    digests: Mapping[str, str],
) -> None:
    """Check that p-values of a schedule are positively dependent, as far as its claims can tell.

    They are where one unchanged scorer ranks all documents among the same calibration documents. Fresh ones in every
    scan would do too, if none of them was audited in another scan: that no claim can tell.

    Args:
        schedule: its earlier scans.
        scorers: of the next scan, as `scorers_of` makes them.
        digests: by selection, of its calibration documents; empty where they are not known yet.

    Raises:
        UserError: the scorer or the calibration documents changed.
    """
    for name, scorer in scorers.items():
        for scan in schedule.scans:
            _check_scorer(scan, name, scorer)
            digest = scan.claim.calibration.get(name)
            if digest is not None and name in digests and digest != digests[name]:
                raise UserError(
                    f"rule prds: scan {scan.claim.slot} was calibrated on other documents than selection {name} is: "
                    "take exactly the same ones in every scan, or start a new ledger with rule spend, which allows any "
                    "change"
                )


def _check_scorer(scan: Scan, name: str, scorer: Mapping[str, str]) -> None:
    earlier = scan.claim.scorer.get(name)
    if earlier is None:
        return
    names = {*earlier, *scorer}.difference(IGNORED)  # a claim of an older version may hold some
    changed = sorted(key for key in names if earlier.get(key) != scorer.get(key))
    if not changed:
        return
    raise UserError(
        f"rule prds holds for one unchanged scorer, and selection {name} of scan {scan.claim.slot} had another: "
        f"{', '.join(changed)}; keep what that scan had, or start a new ledger with rule spend, which allows any change"
    )


def keys_digest(keys: np.ndarray) -> str:
    """SHA-256 of documents by the keys of their texts, whatever their order; hexadecimal."""
    return hashlib.sha256(np.sort(keys).astype("<i8").tobytes()).hexdigest()


def _short_digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
