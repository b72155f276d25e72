"""`seenset trial --learn`: gradient-boosted trees over detectors of models whose training data a trial knows."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pipeline.config.audit import DetectorEntry
from pipeline.detectors.learnt import (
    Learnt,
    LearntFile,
    beginning_key,
    learnt_fingerprints,
    learnt_of,
    learnt_text,
)
from pipeline.detectors.registry import parse_detectors
from pipeline.errors import UserError
from pipeline.store.files import Store
from pipeline.trial.config import Point, TrialConfig
from pipeline.trial.repeats import Pool

SHARES = [0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9]
WINDOWS = [1, 2, 4, 8, 16]
SIGNALS = ["slope", "share_1", "share_2", "share_3", "above_running_mean", "phrases_3", "entropy_200"]
FEATURES: list[Any] = [
    "loss",
    "zlib",
    {"token_quantile": {"share": SHARES}},
    {"min_k": {"window": WINDOWS}},
    {"min_k_plus_plus": {"window": WINDOWS}},
    {"etd": {"beta": [0.5, 1.0, 2.0]}},
    {"camia": {"signal": ["mean", *SIGNALS], "of": ["first", "difference"]}},
]
"""Features that are learnt from, in addition to the detectors of the trial."""

FEATURES_OF_REFERENCE: list[Any] = ["reference", "ez", "wbc", {"difference_quantile": {"share": SHARES}}]
"""Further features for a trial with a reference model, whose tokens must be those of the model."""

TREES, RATE, DEPTH, LEAST = 200, 0.05, 3, 5


def with_features(file: str, config: TrialConfig, points: Sequence[Point]) -> tuple[TrialConfig, list[Point]]:
    """The trial and its points with the detectors to learn from.

    Args:
        file: the file to write.
        config: the trial as written.
        points: the points of its sweep.

    Raises:
        UserError: the documents are pictures, the sweep changes detectors, a detector is itself learnt, or the file is
            a folder or not local.
    """
    if "://" in file or os.path.isdir(file):
        raise UserError(f"--learn writes a local file, got {file}; name one, such as learnt.json")
    if config.documents.image is not None:
        raise UserError("--learn learns from detectors of texts, and the documents are pictures")
    if any(path.split(".")[0] == "detectors" for path in config.sweep):
        raise UserError("--learn learns from the same detectors at every point, and the sweep changes detectors")
    entries: dict[str, Any] = {}
    for entry in [*config.detectors, *FEATURES, *(FEATURES_OF_REFERENCE if config.reference_model else [])]:
        for single in _singles(entry):
            (one,) = parse_detectors([single])
            if learnt_fingerprints([one]):
                raise UserError(f"--learn learns from measured detectors, and {one} was learnt; leave it out")
            entries.setdefault(one.column, single)
    changed = {"detectors": list(entries.values())}
    changed_points = [replace(point, config=point.config.model_copy(update=changed)) for point in points]
    return config.model_copy(update=changed), changed_points


def _singles(entry: DetectorEntry) -> Iterator[DetectorEntry]:
    """The entries of single columns for an entry of `detectors`."""
    if isinstance(entry, str):
        yield entry
        return
    for name, settings in entry.items():
        choices = [value if isinstance(value, list) else [value] for value in (settings or {}).values()]
        for values in itertools.product(*choices):
            yield {name: dict(zip(settings or {}, values, strict=True))}


def learn(file: str, config: TrialConfig, pools: Sequence[Pool], texts: Sequence[str]) -> Learnt:
    """Train a classifier on the scores of contaminated models to identify training documents, and write the file.

    The same scores and seed give the same bytes.

    Args:
        file: path of the file; replaced.
        config: configuration of the trial, with the detectors to learn from.
        pools: documents and scores of its models.
        texts: texts of its documents, as read by the audits.

    Raises:
        UserError: all scored documents were trained in, or none was.
    """
    columns = [one.column for one in parse_detectors(config.detectors)]
    rows = np.concatenate([np.stack([p.scores.columns[c][p.scored] for c in columns], axis=1) for p in pools])
    trained = np.concatenate([pool.trained[pool.scored] for pool in pools])
    if trained.all() or not trained.any():
        kind = "all" if trained.size and trained.all() else "none"
        raise UserError(f"--learn needs trained and untrained documents, and {kind} of {trained.size} were trained in")
    share = float(trained.mean())
    content = {
        "features": config.detectors,
        "baseline": float(np.log(share / (1 - share))),
        "trees": trees_of(boosted(rows, trained, config.seed)),
        "texts": sorted({beginning_key(text) for text in texts}),
        "models": len(pools),
        "documents": int(trained.size),
    }
    text, path = learnt_text(content), os.path.abspath(os.path.expanduser(file))
    Store(os.path.dirname(path)).write(os.path.basename(path), text.encode())
    return learnt_of(LearntFile(path, text))


def boosted(rows: np.ndarray, trained: np.ndarray, seed: int) -> Any:
    """Fit the classifier of scikit-learn.

    Args:
        rows: (documents, features).
        trained: bool, (documents,), with both values.
        seed: seed of the rows and features for each tree and split.
    """
    from sklearn.ensemble import GradientBoostingClassifier

    return GradientBoostingClassifier(
        n_estimators=TREES,
        learning_rate=RATE,
        max_depth=DEPTH,
        min_samples_leaf=LEAST,
        subsample=0.5,
        max_features="sqrt",
        random_state=seed,
    ).fit(rows, trained)


def trees_of(model: Any) -> list[dict[str, list[Any]]]:
    """The trees of a classifier of scikit-learn in the format of `detectors.learnt.Tree`, as lists."""
    trees = []
    for tree in (estimator.tree_ for estimator in model.estimators_[:, 0]):
        leaf = tree.children_left < 0
        arrays = {
            "feature": np.where(leaf, -1, tree.feature),
            "threshold": np.where(leaf, 0.0, tree.threshold),
            "left": np.where(leaf, 0, tree.children_left),
            "right": np.where(leaf, 0, tree.children_right),
            "value": np.where(leaf, model.learning_rate * tree.value[:, 0, 0], 0.0),
        }
        trees.append({name: array.tolist() for name, array in arrays.items()})
    return trees
