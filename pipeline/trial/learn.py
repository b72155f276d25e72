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
"""What is learnt from, beside the detectors of the trial."""

FEATURES_OF_REFERENCE: list[Any] = ["reference", "ez", "wbc", {"difference_quantile": {"share": SHARES}}]
"""The same of a trial with a reference model, whose tokens must be those of the model."""

TREES, RATE, DEPTH, LEAST = 200, 0.05, 3, 5


def with_features(file: str, config: TrialConfig, points: Sequence[Point]) -> tuple[TrialConfig, list[Point]]:
    """The trial and its points with the detectors that are learnt from.

    Args:
        file: that is to be written.
        config: the trial as written.
        points: the places of its sweep.

    Raises:
        UserError: the documents are pictures, the sweep changes detectors, a detector was learnt itself, or the file is
            a folder or not of this machine.
    """
    if "://" in file or os.path.isdir(file):
        raise UserError(f"--learn writes a file of this machine, got {file}; name one, such as learnt.json")
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
    """The entries of single columns that an entry of `detectors` stands for."""
    if isinstance(entry, str):
        yield entry
        return
    for name, settings in entry.items():
        choices = [value if isinstance(value, list) else [value] for value in (settings or {}).values()]
        for values in itertools.product(*choices):
            yield {name: dict(zip(settings or {}, values, strict=True))}


def learn(file: str, config: TrialConfig, pools: Sequence[Pool], texts: Sequence[str]) -> Learnt:
    """Learn from the scores of contaminated models which documents were trained in, and write the file.

    The same scores and seed give the same bytes.

    Args:
        file: path of the file; replaced.
        config: of the trial, with the detectors that are learnt from.
        pools: of its models.
        texts: of its documents, as the audits read them.

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
    """The classifier of scikit-learn, fitted.

    Args:
        rows: (documents, features).
        trained: bool, (documents,), both values among them.
        seed: of the rows and features that each tree and split sees.
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
    """The trees of a classifier of scikit-learn, as `detectors.learnt.Tree` has them, in lists."""
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
