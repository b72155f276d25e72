"""Trials on scores that a test makes up: their configuration, documents, rows and facts."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.selection.engine import Scores
from pipeline.trial.config import Point, TrialConfig, build_trial
from pipeline.trial.repeats import Pool, measure
from pipeline.trial.table import selection_rows


def trial(**settings: Any) -> dict[str, Any]:
    return {
        "run": "runs/trial",
        "model": {"path": "somewhere"},
        "documents": {"path": "documents.jsonl"},
        "detectors": ["loss", "min_k"],
        "selections": [{"name": "members", "detectors": ["loss"], "procedure": "bh", "alpha": 0.2}],
        **settings,
    }


def pool(n: int = 300, effect: float = 2.5, share: float = 1 / 3, seed: int = 0) -> Pool:
    rng = np.random.default_rng(seed)
    trained = np.zeros(n, dtype=bool)
    trained[rng.permutation(n)[: round(share * n)]] = True
    columns = {name: rng.normal(size=n) + effect * trained for name in ("loss", "min_k")}
    scores = Scores(columns, rng.integers(-(2**62), 2**62, n), pa.nulls(n, pa.string()))
    return Pool([f"d{i}" for i in range(n)], np.arange(n), trained, np.ones(n, dtype=bool), scores)


def facts_of(rows: list[dict[str, Any]], config: TrialConfig, model: str = "models/one") -> dict[str, Any]:
    return {
        "documents": 300,
        "left_out": {"too_short": 2},
        "config": config.model_dump(mode="json"),
        "version": "0",
        "models": [{"path": model}],
        "selections": rows,
    }


def measured(points: Sequence[Point]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for point in points:
        rows += selection_rows(point.settings, point.config.selections, measure(pool(), point.config, 0))
    return rows


def swept_rows(**selection: Any) -> tuple[Any, list[dict[str, Any]], list[str]]:
    asked = [{"name": "members", "detectors": ["loss"], "procedure": "bh", **selection}]
    config, points = build_trial(trial(repeats=20, selections=asked, sweep={"selections.0.alpha": [0.1, 0.2]}))
    return config, measured(points), ["selections.0.alpha"]
