"""A learnt score: gradient-boosted trees on other detectors, from a file of `seenset trial --learn`.

The trees are learnt once, from other documents and models, and are then a fixed function of a document's evidence. A
fixed function of exchangeable null and calibration documents is exchangeable too, so the rank of a null among the
calibration documents is uniform and the guarantees hold for any trees: they affect only the power. The assumption is
that no document of the run was used for learning. Such documents, identified by the start of their text, get NaN.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field

from pipeline.config.paths import written
from pipeline.corpus.documents import text_key
from pipeline.detectors.base import FORWARD, REFERENCE, Detector, Evidence, Needs, detector, parse, plan_passes
from pipeline.detectors.pairs import token_differences
from pipeline.errors import UserError
from pipeline.store.receipts import json_digest

if TYPE_CHECKING:
    from torch import Tensor

FORMAT, VERSION = "seenset-learnt", 1
BEGINNING = 200
"""Characters of a text that identify documents used for learning: `max_tokens` truncates after them."""

QuantileShare = Annotated[float, Field(ge=0, le=1)]
NODE = {"feature": np.int64, "threshold": np.float64, "left": np.int64, "right": np.int64, "value": np.float64}


@detector(needs={FORWARD: ["log_prob"]})
def token_quantile(evidence: Evidence, share: QuantileShare = 0.1) -> Tensor:
    """Quantile of the log-probabilities of a document's tokens, <= 0 (linear interpolation)."""
    t = evidence[FORWARD]
    return _quantile(t.log_prob.double(), t.mask, share)


@detector(needs={FORWARD: ["log_prob"], REFERENCE: ["log_prob"]}, signed=True, same_tokens=True)
def difference_quantile(evidence: Evidence, share: QuantileShare = 0.1) -> Tensor:
    """Quantile of ln p_target - ln p_reference, of any sign: both models read the same tokens."""
    return _quantile(*token_differences(evidence), share)


def _quantile(values: Tensor, mask: Tensor, share: float) -> Tensor:
    return values.masked_fill(~mask, float("nan")).nanquantile(share, dim=1)


Tree = Mapping[str, np.ndarray]
"""Arrays of `NODE`, one entry per node, the root first. At a leaf `feature` is -1 and `value` is added; elsewhere a row
goes left if its feature, as a float32, is at most the threshold."""


@dataclass(frozen=True, slots=True)
class LearntFile:
    """A file of `seenset trial --learn` with its text, as sent to workers."""

    path: str
    text: str = field(repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class Learnt:
    """The content of a file."""

    path: str
    fingerprint: str  # SHA-256 of the rest of the file
    features: tuple[Detector, ...]
    baseline: float
    trees: tuple[Tree, ...]
    texts: frozenset[int]  # keys of the starts of the documents used for learning

    def __str__(self) -> str:
        return written(self.path)

    @property
    def same_tokens(self) -> bool:
        """Whether a feature compares the target and the reference token by token."""
        return any(feature.same_tokens for feature in self.features)


def trees_sum(baseline: float, trees: Iterable[Tree], rows: np.ndarray) -> np.ndarray:
    """The baseline plus the value of each tree's leaf, (documents,) float64: log-odds of a member in the training data.

    Args:
        baseline: log-odds before any tree.
        trees: trees in order.
        rows: (documents, features).
    """
    rows = rows.astype(np.float32)
    total = np.full(len(rows), baseline)
    for tree in trees:
        at = np.zeros(len(rows), dtype=np.int64)
        for _ in tree["feature"]:  # bounds the length of a path
            feature = tree["feature"][at]
            if (feature < 0).all():
                break
            low = rows[np.arange(len(rows)), feature] <= tree["threshold"][at]
            at = np.where(feature < 0, at, np.where(low, tree["left"][at], tree["right"][at]))
        total += tree["value"][at]
    return total


def beginning_key(text: str) -> int:
    """The key that identifies a document used for learning."""
    return text_key(text[:BEGINNING])


def learnt_text(content: Mapping[str, Any]) -> str:
    """The text of a file: its content with format, version and fingerprint."""
    whole = {"format": FORMAT, "version": VERSION, **content}
    return json.dumps({**whole, "fingerprint": _fingerprint(whole)}, sort_keys=True) + "\n"


def _fingerprint(content: Mapping[str, Any]) -> str:
    kept = {name: value for name, value in content.items() if name != "fingerprint"}
    return json_digest(kept)


def learnt_of(value: Any) -> Learnt:
    """The content of a file of `seenset trial --learn`.

    Args:
        value: path of the file, or a `LearntFile`.

    Raises:
        ValueError: the file does not exist, has another format or version, or is damaged.
    """
    if isinstance(value, str):
        value = _read(value)
    if not isinstance(value, LearntFile):
        raise ValueError("must be the path of a file that `seenset trial --learn` wrote")
    return _parsed(value)


def _read(path: str) -> LearntFile:
    try:
        return LearntFile(path, Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"must be a file that `seenset trial --learn` wrote ({error.strerror})") from None
    except ValueError:
        raise ValueError("must be a file that `seenset trial --learn` wrote, and this is not UTF-8 text") from None


@lru_cache(maxsize=8)
def _parsed(file: LearntFile) -> Learnt:
    try:
        content = json.loads(file.text)
    except ValueError:
        content = None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError("must be a file that `seenset trial --learn` wrote, and this is another or a damaged one")
    if content.get("version") != VERSION:
        raise ValueError(f"must be of version {VERSION} of its format, and this is of {content.get('version')}")
    stated, actual = str(content.get("fingerprint")), _fingerprint(content)
    if stated != actual:
        raise ValueError(f"must be undamaged: it states fingerprint {stated[:12]}, and its content has {actual[:12]}")
    try:
        trees = tuple({name: np.array(tree[name], kind) for name, kind in NODE.items()} for tree in content["trees"])
        texts = frozenset(int(key) for key in content["texts"])
        return Learnt(file.path, actual, parse(content["features"]), float(content["baseline"]), trees, texts)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"must be a file that `seenset trial --learn` wrote, and this lacks {error}") from None
    except UserError as error:
        raise ValueError(f"names features that are not known here: {error}") from None


def _needs(file: Any) -> Needs:
    if not isinstance(file, Learnt):
        raise UserError("detector learnt needs a file of `seenset trial --learn`: {learnt: {file: learnt.json}}")
    return plan_passes(file.features)


@detector(needs=_needs, checks={"file": learnt_of}, signed=True)
def learnt(evidence: Evidence, file: Any = "") -> Tensor:
    """Log-odds of a member by gradient-boosted trees, of any sign (as Maini et al. 2024 learn weights).

    NaN if a feature is NaN, and for documents used for learning. Trees have steps: on another processor, features that
    differ in their last bits may lead to another leaf for a document near a threshold.
    """
    import torch

    columns = torch.stack([feature.score(evidence).cpu() for feature in file.features], dim=1).numpy()
    scores = trees_sum(file.baseline, file.trees, columns)
    seen = np.array([beginning_key(text) in file.texts for text in evidence.texts])
    scores[seen | np.isnan(columns).any(1)] = np.nan
    return torch.from_numpy(scores)


def with_contents(entry: Any) -> Any:
    """An entry of `detectors` with paths of files replaced by the files, for workers on other machines."""
    if isinstance(entry, Mapping):
        return {
            name: {**value, "file": _opened(value["file"])}
            if name == "learnt" and isinstance(value, Mapping) and "file" in value
            else with_contents(value)
            for name, value in entry.items()
        }
    return [with_contents(one) for one in entry] if isinstance(entry, list) else entry


def _opened(value: Any) -> Any:
    return [_opened(one) for one in value] if isinstance(value, list) else _read(value)


def learnt_fingerprints(detectors: Sequence[Detector]) -> dict[str, str]:
    """The files that scores depend on, and their fingerprints."""
    return {str(one): one.fingerprint for one in _learnt_in(detectors)}


def _learnt_in(detectors: Iterable[Detector]) -> Iterator[Learnt]:
    for one in detectors:
        for value in one.arguments.values():
            if isinstance(value, Learnt):
                yield value
            elif isinstance(value, Detector):
                yield from _learnt_in([value])
