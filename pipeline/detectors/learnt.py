"""A score that was learnt: gradient-boosted trees over other detectors, in a file of `seenset trial --learn`.

The trees are learnt once, from other documents and models, and are then a fixed function of a document's evidence. A
fixed function of exchangeable null and calibration documents is exchangeable too, so the rank of a null among the
calibration documents is uniform and the guarantees hold whatever was learnt: what was learnt decides the power alone.
The assumption: no document of the run was learnt from. Those that were, by the beginning of their text, get NaN.
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
"""Characters of a text by which documents that were learnt from are recognised: `max_tokens` cuts behind them."""

QuantileShare = Annotated[float, Field(ge=0, le=1)]
NODE = {"feature": np.int64, "threshold": np.float64, "left": np.int64, "right": np.int64, "value": np.float64}


@detector(needs={FORWARD: ["log_prob"]})
def token_quantile(evidence: Evidence, share: QuantileShare = 0.1) -> Tensor:
    """The log-probability below which a share of a document's tokens lies, <= 0 (linear interpolation)."""
    t = evidence[FORWARD]
    return _quantile(t.log_prob.double(), t.mask, share)


@detector(needs={FORWARD: ["log_prob"], REFERENCE: ["log_prob"]}, signed=True, same_tokens=True)
def difference_quantile(evidence: Evidence, share: QuantileShare = 0.1) -> Tensor:
    """The same of ln p_target - ln p_reference, any sign: both models read the same tokens."""
    return _quantile(*token_differences(evidence), share)


def _quantile(values: Tensor, mask: Tensor, share: float) -> Tensor:
    return values.masked_fill(~mask, float("nan")).nanquantile(share, dim=1)


Tree = Mapping[str, np.ndarray]
"""Arrays of `NODE`, one entry a node, the root first. At a leaf `feature` is -1 and `value` counts; elsewhere a row
goes left where its feature, as a float32, is at most the threshold."""


@dataclass(frozen=True, slots=True)
class LearntFile:
    """A file of `seenset trial --learn` with its text, which is what workers receive."""

    path: str
    text: str = field(repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class Learnt:
    """What a file holds."""

    path: str
    fingerprint: str  # SHA-256 of all else in the file
    features: tuple[Detector, ...]
    baseline: float
    trees: tuple[Tree, ...]
    texts: frozenset[int]  # keys of the beginnings of the documents that were learnt from

    def __str__(self) -> str:
        return written(self.path)

    @property
    def same_tokens(self) -> bool:
        """Whether a feature compares the target and the reference token by token."""
        return any(feature.same_tokens for feature in self.features)


def trees_sum(baseline: float, trees: Iterable[Tree], rows: np.ndarray) -> np.ndarray:
    """The baseline plus the value of each tree's leaf, (documents,) float64: log-odds of a member where it was learnt.

    Args:
        baseline: log-odds before any tree.
        trees: in order.
        rows: (documents, features).
    """
    rows = rows.astype(np.float32)
    total = np.full(len(rows), baseline)
    for tree in trees:
        at = np.zeros(len(rows), dtype=np.int64)
        for _ in tree["feature"]:  # no path is longer
            feature = tree["feature"][at]
            if (feature < 0).all():
                break
            low = rows[np.arange(len(rows)), feature] <= tree["threshold"][at]
            at = np.where(feature < 0, at, np.where(low, tree["left"][at], tree["right"][at]))
        total += tree["value"][at]
    return total


def beginning_key(text: str) -> int:
    """The key by which a document that was learnt from is recognised."""
    return text_key(text[:BEGINNING])


def learnt_text(content: Mapping[str, Any]) -> str:
    """The text of a file: its content with format, version and fingerprint."""
    whole = {"format": FORMAT, "version": VERSION, **content}
    return json.dumps({**whole, "fingerprint": _fingerprint(whole)}, sort_keys=True) + "\n"


def _fingerprint(content: Mapping[str, Any]) -> str:
    kept = {name: value for name, value in content.items() if name != "fingerprint"}
    return json_digest(kept)


def learnt_of(value: Any) -> Learnt:
    """What a file of `seenset trial --learn` holds.

    Args:
        value: its path, or a `LearntFile`.

    Raises:
        ValueError: no such file, or one of another format or version, or a damaged one.
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
    """Log-odds that gradient-boosted trees give a member, any sign (as Maini et al. 2024 learn weights).

    NaN where a feature is NaN, and for a document that was learnt from. Trees have steps: features that differ in their
    last bits, on another processor, may give a document near a threshold another leaf.
    """
    import torch

    columns = torch.stack([feature.score(evidence).cpu() for feature in file.features], dim=1).numpy()
    scores = trees_sum(file.baseline, file.trees, columns)
    seen = np.array([beginning_key(text) in file.texts for text in evidence.texts])
    scores[seen | np.isnan(columns).any(1)] = np.nan
    return torch.from_numpy(scores)


def with_contents(entry: Any) -> Any:
    """An entry of `detectors` with the files that it names in the place of their paths, for workers elsewhere."""
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
