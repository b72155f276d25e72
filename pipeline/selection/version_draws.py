"""Documents with versions whose draws are independent: features of their texts, and which documents are left out.

Near-duplicates repeat one draw, and items with the same options are often in one order throughout. No score is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.corpus.draw_features import OUT_OF_PLACE, UNKNOWN, UNMARKED
from pipeline.corpus.near_duplicates import NEAR_SHARE, SKETCH, near_families
from pipeline.selection.collection import joined_blocks

MOST_OUT_OF_PLACE = 0.01
"""Share of marked items with a mark that is not in its place, above which no marked item is used."""

COMMON_WORDS, MOST_COMPARED = 0.5, 500
"""Share of common words of the options of near-duplicates, and the size of a family above which it is not split."""

LEAST_SET, HONEST = 20, 0.1
"""Fewest items with the same options that may all be used, and the p-value of their orders that it takes."""


@dataclass(frozen=True, slots=True, eq=False)
class DrawTable:
    """Features of documents with versions, in any order; arrays of shape (documents,) unless stated."""

    ids: tuple[str, ...]
    published: np.ndarray  # int64, index of the published version
    sizes: np.ndarray  # int64, number of versions
    number: np.ndarray  # int64, `DrawFeatures.number`
    marks: np.ndarray  # int8
    equal: np.ndarray  # int64
    options: np.ndarray  # int64, key of the unordered options
    order: np.ndarray  # int64
    sketches: np.ndarray  # uint8, (documents, 128 or 256); (documents, 0) for rows
    orders: np.ndarray  # int64, (documents, features)
    places: np.ndarray  # int64, (documents, features)
    answers: Mapping[str, np.ndarray]  # int64, of each column; the name of the ends of columns is empty
    permuted: bool  # whether the versions are orders of options

    @classmethod
    def of(cls, ids: Sequence[str], published: np.ndarray, sizes: np.ndarray, features: pa.StructArray) -> DrawTable:
        """The features of some documents; those without features, which `seenset mark` drew, are left out.

        Args:
            ids: ids of the documents.
            published: int64, (documents,), index of the published version.
            sizes: int64, (documents,), number of versions.
            features: rows of `DrawFeatures`; null for none.
        """
        known = features.is_valid()
        kept = known.to_numpy(zero_copy_only=False)
        held = {field.name: pc.struct_field(features, field.name).filter(known) for field in features.type}
        count = int(kept.sum())

        def column(name: str) -> np.ndarray:
            return np.asarray(pc.fill_null(held[name], 0).to_numpy(zero_copy_only=False).astype(np.int64))

        def matrix(name: str) -> np.ndarray:
            flat = pc.list_flatten(held[name]).to_numpy(zero_copy_only=False).astype(np.int64)
            return flat.reshape(count, -1) if count else np.empty((0, 0), dtype=np.int64)

        sketches = np.frombuffer(b"".join(held["sketches"].to_pylist()), dtype=np.uint8)
        _check_codes(held)
        return cls(
            ids=tuple(np.array(ids, dtype=object)[kept].tolist()),
            published=published[kept],
            sizes=sizes[kept],
            number=column("number"),
            marks=column("marks"),
            equal=column("equal"),
            options=column("options"),
            order=column("order"),
            sketches=sketches.reshape(count, -1) if count else np.empty((0, 0), dtype=np.uint8),
            orders=matrix("orders"),
            places=matrix("places"),
            answers=_answers(held["columns"], held["answers"]),
            permuted=bool(held["options"].is_valid().to_numpy(zero_copy_only=False).any()),
        )

    @classmethod
    def joined(cls, parts: Sequence[DrawTable]) -> DrawTable | None:
        """All documents of several parts, in the order of their ids; None if there are none."""
        filled = [part for part in parts if part.ids]
        if not filled:
            return None
        names = dict.fromkeys(name for part in filled for name in part.answers)
        unknown = {part: np.full(len(part.ids), UNKNOWN) for part in filled}
        whole = cls(
            ids=tuple(name for part in filled for name in part.ids),
            **{name: np.concatenate([getattr(part, name) for part in filled]) for name in _ARRAYS},
            answers={
                name: np.concatenate([part.answers.get(name, unknown[part]) for part in filled]) for name in names
            },
            permuted=any(part.permuted for part in filled),
        )
        return whole.take(np.array(sorted(range(len(whole.ids)), key=whole.ids.__getitem__)))

    def take(self, places: np.ndarray) -> DrawTable:
        """Some of the documents: bool, (documents,), or int64 places."""
        chosen = np.flatnonzero(places) if places.dtype == bool else places
        values = {name: getattr(self, name)[chosen] for name in _ARRAYS}
        ids = tuple(self.ids[i] for i in chosen.tolist())
        answers = {name: codes[chosen] for name, codes in self.answers.items()}
        return DrawTable(ids=ids, **values, answers=answers, permuted=self.permuted)


MOST_IN_ORDER = 1000
"""Most options or rows of a document, as `versions.window` allows."""


def _check_codes(held: Mapping[str, Any]) -> None:
    """Check the ranges of the features of some documents.

    Raises:
        ValueError: a value that no document has.
    """
    number = held["number"].to_numpy(zero_copy_only=False)
    codes = [pc.list_flatten(held[name]).to_numpy(zero_copy_only=False) for name in ("orders", "places", "answers")]
    codes.append(held["order"].to_numpy(zero_copy_only=False))
    ordered = pc.list_value_length(held["orders"]).to_numpy(zero_copy_only=False) > 0
    if number.min(initial=2) < 2 or number[ordered].max(initial=2) > MOST_IN_ORDER:
        raise ValueError("a number of versions, options or rows is out of range")
    if any(one.size and one.min() < UNKNOWN for one in codes):
        raise ValueError("a code is out of range")
    lengths = [pc.list_value_length(held[name]) for name in ("columns", "answers")]
    if not pc.all(pc.equal(*lengths), min_count=0).as_py():
        raise ValueError("columns and answers differ in number")


_ARRAYS = ("published", "sizes", "number", "marks", "equal", "options", "order", "sketches", "orders", "places")


def _answers(columns: Any, answers: Any) -> dict[str, np.ndarray]:
    """The code of each column, UNKNOWN for documents without it: int64, (documents,)."""
    codes_of: dict[str, np.ndarray] = {}
    rows = pc.list_parent_indices(columns).to_numpy(zero_copy_only=False)
    names = pc.list_flatten(columns).dictionary_encode()
    codes = pc.list_flatten(answers).to_numpy(zero_copy_only=False)
    which = names.indices.to_numpy(zero_copy_only=False)
    for number, name in enumerate(names.dictionary.to_pylist()):
        codes_of[name] = np.full(len(columns), UNKNOWN)
        codes_of[name][rows[which == number]] = codes[which == number]
    return codes_of


# --- independent draws


@dataclass(frozen=True, slots=True)
class OptionSet:
    """Items with the same unordered options and other questions."""

    used: str  # id of the item that is used alone, or of the first one
    items: int
    p_value: float  # exact, of the most frequent published order
    all_used: bool


@dataclass(frozen=True, slots=True)
class IndependentDraws:
    """The documents that are left out because their draws are not independent, or their marks not in place."""

    left_out: Mapping[str, str]  # id of a document -> why
    marked: int = 0  # items whose marks were taken off and put back by place
    out_of_place: int = 0  # of these, those with a mark that did not stand in its place
    misplaced: int = 0  # items that are left out because of that: these, or all marked ones
    repeated: int = 0  # documents that are equal to another one or its near-duplicates
    sets: Sequence[OptionSet] = ()  # items with the same options


def independent_draws(table: DrawTable | None, near_copies: float = NEAR_SHARE) -> IndependentDraws:
    """Which documents are left out, from texts alone; the others have independent draws if these were honest.

    Of marked items those with a mark out of its place are left out, and all if these are more than 1%. Of equal
    documents and near-duplicates one is used, by a hash of the id. Of items with the same options and other questions,
    all are used if there are at least 20 and their published orders look shuffled (p > 0.1), else one: a model that
    always prefers one order has p > 0.05 from such a set. A set that was shuffled honestly is reduced with a
    probability of at most 0.1.

    Args:
        table: features of the documents; None for none.
        near_copies: smallest share of common runs of near-duplicates.
    """
    if table is None or not (table.sketches.size or table.permuted):
        return IndependentDraws({})
    reasons: dict[str, str] = {}
    marked, out = table.marks != UNMARKED, table.marks == OUT_OF_PLACE
    misplaced = marked if out.sum() > MOST_OUT_OF_PLACE * marked.sum() else out
    for place in np.flatnonzero(misplaced).tolist():
        reasons[table.ids[place]] = (
            "marks of its options do not stand in their places"
            if out[place]
            else (f"{int(out.sum()):,} of {int(marked.sum()):,} items with marks have one that is not in its place")
        )
    rest = np.flatnonzero(~misplaced)
    family = _families(table.take(rest), near_copies)  # of equal documents and near-duplicates
    single, repeated = _one_of_each(table, rest, family)
    for place, kept in repeated.items():
        reasons[table.ids[place]] = f"equal to document {kept!r}, or a near-duplicate of it"
    sets = []
    if table.permuted:
        for items in _groups(table.options[single], single):
            option_set = _option_set(table, items)
            sets.append(option_set)
            if not option_set.all_used:
                others = (name for name in (table.ids[place] for place in items.tolist()) if name != option_set.used)
                reasons |= dict.fromkeys(
                    others, f"has the options of {option_set.used!r}, whose order is no draw of its own"
                )
    return IndependentDraws(reasons, int(marked.sum()), int(out.sum()), int(misplaced.sum()), len(repeated), sets)


def _families(table: DrawTable, near_copies: float) -> np.ndarray:
    """Numbers of the families of equal documents and near-duplicates: int64, (documents,)."""
    family = np.unique(table.equal, return_inverse=True)[1].ravel().astype(np.int64)
    for start in range(0, SKETCH * (table.sketches.shape[1] // SKETCH), SKETCH):
        alike = near_families(np.ascontiguousarray(table.sketches[:, start : start + SKETCH]), near_copies)
        if table.permuted:
            alike = _with_common_options(alike, table.sketches[:, SKETCH:])
        family = joined_blocks(family, alike)
    return family


def _with_common_options(family: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Families split into items that share half of the words of their options, as questions on one passage do not.

    Args:
        family: int64, (documents,), families of near-duplicates.
        words: uint8, (documents, 64), sketches of the words of the options.
    """
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import connected_components

    split, following = family.copy(), int(family.max(initial=0)) + 1
    for members in _groups(family, np.arange(family.size)):
        if members.size > MOST_COMPARED:
            continue
        alike = (words[members][:, None, :] == words[members][None, :, :]).mean(axis=2) >= COMMON_WORDS
        parts = connected_components(csr_array(alike), directed=False)[1]
        split[members] = following + parts
        following += int(parts.max()) + 1
    return split


def _one_of_each(table: DrawTable, places: np.ndarray, family: np.ndarray) -> tuple[np.ndarray, dict[int, str]]:
    """One document of each family, by hash, int64, ascending; and of the others the document that is used."""
    left: dict[int, str] = {}
    for members in _groups(family, places):
        kept = min(members.tolist(), key=lambda place: _hash(table.ids[place]))
        left |= dict.fromkeys((place for place in members.tolist() if place != kept), table.ids[kept])
    return np.array([place for place in places.tolist() if place not in left], dtype=np.int64), left


def _groups(keys: np.ndarray, places: np.ndarray) -> Iterator[np.ndarray]:
    """The places of each key that occurs more than once."""
    order = np.argsort(keys, kind="stable")
    bounds = np.flatnonzero(np.diff(keys[order])) + 1
    for group in np.split(places[order], bounds):
        if group.size > 1:
            yield group


def _option_set(table: DrawTable, items: np.ndarray) -> OptionSet:
    cells = math.factorial(int(table.number[items[0]]))
    counts = np.bincount(table.order[items])
    p_value = largest_cell(items.size, cells, int(counts.max()))
    whole = items.size >= LEAST_SET and p_value > HONEST
    names = [table.ids[place] for place in items.tolist()]
    return OptionSet(names[0] if whole else min(names, key=_hash), items.size, p_value, whole)


def _hash(doc_id: str) -> bytes:
    """A hash of an id that nothing else uses."""
    return sha256(f"independent draw\0{doc_id}".encode(errors="surrogatepass")).digest()


# --- exact tail probabilities


def largest_cell(documents: int, cells: int, most: int) -> float:
    """The p-value of the fullest of some equally likely cells: cells P(Bin(documents, 1 / cells) >= most), at most 1.

    Args:
        documents: number of documents, each in one cell.
        cells: number of cells.
        most: number of documents in the fullest cell.
    """
    return min(1.0, cells * binomial_tail([(documents, 1 / cells)], most))


def binomial_tail(groups: Sequence[tuple[int, float]], count: int) -> float:
    """P(X >= count) of a sum of independent binomial numbers, exact (Poisson binomial).

    Args:
        groups: number of trials and probability of each; at least one group.
        count: >= 0.
    """
    from scipy.special import bdtrc

    if count <= 0:
        return 1.0
    *others, (trials, chance) = sorted(groups)
    law = np.ones(1)
    for number, probability in others:
        law = np.convolve(law, _binomial(number, probability))
    below = np.minimum(count - 1 - np.arange(law.size), trials)
    return min(1.0, float(law @ np.where(below < 0, 1.0, bdtrc(np.maximum(below, 0), trials, chance))))


def _binomial(trials: int, chance: float) -> np.ndarray:
    """Probabilities of 0, 1, ... successes, without the highest numbers whose probability is 0 in floating point."""
    from scipy.special import gammaln, xlog1py, xlogy

    k = np.arange(trials + 1)
    ways = gammaln(trials + 1) - gammaln(k + 1) - gammaln(trials - k + 1)
    law = np.exp(ways + xlogy(k, chance) + xlog1py(trials - k, -chance))
    return np.asarray(law[: int(np.flatnonzero(law)[-1]) + 1])
