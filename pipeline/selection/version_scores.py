"""Documents with k versions, one of which was drawn at random and published: exact tests without unseen documents.

The null of a document: nothing that depends on its published index was used in training. Given all versions of all
documents, the indices of null documents are uniform and independent, and so are the ranks of their published scores,
for any model and any score that does not depend on the published versions of other documents. Masked data are the data
that do not depend on the indices: scores and texts of all versions, and the groups of documents.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.errors import UserError

if TYPE_CHECKING:
    from scipy.sparse import csr_array

MIRROR = 4
"""Negative ranks per positive rank, fixed before scores are read."""

LEAST_DOCUMENTS = 20  # minimum documents of one k to shrink variances, and with a varying form to fit its preference
FLOOR = 1e-6  # minimum variance relative to the median
_ROUNDING = 1e-12  # relative, for sums of squares; or per version, for standardised scores: rounding, or a tie

MaskedOrder = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""(scores, offsets, groups) -> statistic of each document, in descending order. See `gap_statistic`."""

REDRAWS = 9_999
BETS = (0.1, 0.2, 0.5, 0.9)
"""Stakes of the e-values, all below 1, so that each factor is positive."""

LEAST_IN_CELL = 5
"""Minimum expected documents per cell of the chi-squared test."""

_COMBINATIONS = 1 << 13
"""Maximum combinations of versions of documents that are drawn together: their sums fit the CPU cache."""

_REDRAW = int.from_bytes(b"redraw", "big")
"""Separates the redraws from other random numbers of the same seed, such as the published indices."""


@dataclass(frozen=True, slots=True, eq=False)
class VersionScores:
    """Scores of all versions of all documents, contiguous for each document.

    Raises:
        UserError: fewer than two versions, an index out of range, or a score that is not finite.
    """

    scores: np.ndarray  # float64, (versions,), higher is more member-like
    offsets: np.ndarray  # int64, (documents + 1,): document j has versions offsets[j]..offsets[j + 1] - 1
    published: np.ndarray  # int64, (documents,): index among the document's versions, from 0
    ids: tuple[str, ...]  # distinct ids of the documents
    digests: np.ndarray  # uint8, (versions, 32): SHA-256 of each version's text, distinct within a document
    forms: np.ndarray | csr_array | None = None  # (versions, columns): number of sites with each (rule, form)

    def __post_init__(self) -> None:
        sizes = self.sizes
        for wrong, problem in (
            (sizes < 2, "has fewer than two versions"),
            ((self.published < 0) | (self.published >= sizes), "has a published index outside its versions"),
        ):
            if wrong.any():
                raise UserError(f"document {self.ids[int(np.argmax(wrong))]!r} {problem}")
        if not np.isfinite(self.scores).all():
            count = int((~np.isfinite(self.scores)).sum())
            raise UserError(f"{count:,} scores of versions are not finite: leave out the documents that have one")

    @property
    def sizes(self) -> np.ndarray:
        """Number of versions of each document, int64."""
        return np.diff(self.offsets)

    def standardised(self) -> np.ndarray:
        """Scores standardized within each document; 0 if the standard deviation is 0.

        Standardized scores of several detectors or models are added before ranking.
        """
        centred, squares = _centred(self.scores, self.offsets)
        sd = np.sqrt(squares / self.sizes)
        return np.asarray(centred / np.repeat(np.where(sd > 0, sd, 1.0), self.sizes))


@dataclass(frozen=True, eq=False)
class VersionPart:
    """Scores of some documents, and the edited sites of their versions."""

    scores: VersionScores  # without forms
    kinds: pa.Array  # lists of text: kinds of the sites of each document; empty if unknown
    forms: pa.Array  # lists of bytes: for each version of each document, one byte per site
    like: VersionPart | None = None  # the same documents with other scores; shares what is independent of scores
    left_out: frozenset[str] = frozenset()  # ids of documents that are not used (`pipeline.selection.version_draws`)

    @cached_property
    def residuals(self) -> VersionScores:
        """As `pooled_residuals` for only this part; computed once."""
        joined, rows, preference = (self.like or self)._masked
        return preference.residuals(replace(joined, scores=self.scores.scores[rows]))

    @cached_property
    def _masked(self) -> tuple[VersionScores, np.ndarray, Preference]:
        """The documents in order, the row of each version here, and the preference of their forms."""
        numbered = replace(self.scores, scores=np.arange(self.scores.scores.size, dtype=np.float64))
        joined = joined_versions([replace(self, scores=numbered)])
        return joined, joined.scores.astype(np.int64), Preference.fit(joined)


def pooled_residuals(parts: Sequence[VersionPart]) -> VersionScores:
    """The residuals by which the documents of all parts are ranked: `preference_residuals` of `joined_versions`."""
    return parts[0].residuals if len(parts) == 1 else preference_residuals(joined_versions(parts))


def joined_versions(parts: Sequence[VersionPart]) -> VersionScores:
    """The documents of all parts that are used, ordered by id: results do not depend on the order of the parts.

    Of documents with the same set of versions the first is used: the draws of their indices are not independent.

    Args:
        parts: parts with distinct documents, at least one in total.

    Raises:
        UserError: every document is left out.
    """
    sizes = np.concatenate([part.scores.sizes for part in parts])
    ids = [name for part in parts for name in part.scores.ids]
    starts = np.concatenate(([0], np.cumsum(sizes)))
    digests = np.concatenate([part.scores.digests for part in parts])
    sums = np.add.reduceat(digests.view(np.uint64), starts[:-1])  # equal for equal sets
    _, place, count = np.unique(sums.view("V32").ravel(), return_inverse=True, return_counts=True)
    alike = (count > 1)[place.ravel()].tolist()
    sets: dict[bytes | int, int] = {}
    left_out = frozenset().union(*(part.left_out for part in parts))
    for j in sorted((j for j in range(len(ids)) if ids[j] not in left_out), key=ids.__getitem__):
        held = sorted(digests[starts[j] : starts[j + 1]].view("V32").ravel().tolist()) if alike[j] else []
        sets.setdefault(b"".join(held) if alike[j] else j, j)
    if not sets:
        raise UserError("every document with scores is left out, as marks of options do not stand in their places")
    order = np.fromiter(sets.values(), dtype=np.int64)
    offsets = np.concatenate(([0], np.cumsum(sizes[order]))).astype(np.int64)
    rows = np.arange(offsets[-1]) + np.repeat(starts[order] - offsets[:-1], sizes[order])
    kinds = pa.concat_arrays([part.kinds for part in parts])
    counts = form_counts(kinds, pa.concat_arrays([part.forms for part in parts])) if len(kinds.flatten()) else None
    return VersionScores(
        np.concatenate([part.scores.scores for part in parts])[rows],
        offsets,
        np.concatenate([part.scores.published for part in parts])[order],
        tuple(ids[j] for j in order),
        digests[rows],
        None if counts is None else counts[rows],
    )


def form_counts(kinds: pa.Array, forms: pa.Array) -> csr_array:
    """Number of occurrences of each form of each kind of site in each version: (versions, pairs of kind and form).

    Args:
        kinds: lists of text: kinds of the sites of each document.
        forms: lists of bytes: for each version of each document, one byte per site.
    """
    from scipy.sparse import csr_array

    sites, sizes = (
        pc.list_value_length(each).to_numpy(zero_copy_only=False).astype(np.int64) for each in (kinds, forms)
    )
    encoded = kinds.flatten().dictionary_encode()
    number = np.argsort(np.argsort(np.array(encoded.dictionary.to_pylist(), dtype=object)))  # by name
    kind = number[encoded.indices.to_numpy(zero_copy_only=False)]
    of_version, first = np.repeat(sites, sizes), np.repeat(np.cumsum(sites) - sites, sizes)
    ends = np.cumsum(of_version)
    pairs = kind[np.arange(of_version.sum()) + np.repeat(first - ends + of_version, of_version)] * 256
    pairs += np.frombuffer(b"".join(forms.flatten().to_pylist()), dtype=np.uint8)
    stands = np.zeros(256 * number.size, dtype=bool)
    stands[pairs] = True
    columns = (np.cumsum(stands) - 1)[pairs]
    starts = np.concatenate(([0], ends))
    counts = csr_array((np.ones(pairs.size), columns, starts), shape=(of_version.size, int(stands.sum())))
    counts.sum_duplicates()
    return counts


def version_ranks(scores: VersionScores, seed: int, ties: Literal["hash", "against"] = "hash") -> np.ndarray:
    """Rank of the published score among the document's versions, 1 for the largest: int64, (documents,).

    With `hash`, equal scores are ordered by SHA-256 of the text's digest, the id and the seed, so that the rank of a
    null document is exactly uniform; with `against`, the published version is last among equal scores.

    Args:
        scores: scores of k versions of each document.
        seed: fixed before scores are read.
        ties: `against` only for e-values: in `mirrored_list` it violates the guarantee.
    """
    starts = scores.offsets[:-1]
    observed = np.repeat(scores.scores[starts + scores.published], scores.sizes)
    above = np.add.reduceat(scores.scores > observed, starts, dtype=np.int64)
    equal = scores.scores == observed
    tied = np.add.reduceat(equal, starts, dtype=np.int64)
    if ties == "against":
        return np.asarray(above + tied)
    before = np.ones_like(above)
    for document in np.flatnonzero(tied > 1).tolist():
        start, end = scores.offsets[document : document + 2].tolist()
        prefix = _prefix("ties", seed, scores.ids[document])
        keys = [sha256(prefix + row.tobytes()).digest() for row in scores.digests[start:end]]
        limit = keys[scores.published[document]]
        before[document] += sum(keys[i] < limit for i in np.flatnonzero(equal[start:end]))
    return np.asarray(above + before)


@dataclass(frozen=True, slots=True, eq=False)
class VersionList:
    """The result of `mirrored_list` with its intermediate values; arrays of shape (documents,)."""

    selected: np.ndarray  # bool
    ranks: np.ndarray  # int64, rank of the published score or residual
    signs: np.ndarray  # int8: 1 positive, -1 negative, 0 dropped
    statistic: np.ndarray  # float64, the order of the documents
    z: int  # negative ranks per positive rank


def mirrored_list(
    scores: VersionScores, q: Fraction, seed: int, z: int = MIRROR, order: MaskedOrder | None = None
) -> VersionList:
    """Select documents whose published version has a high rank, by comparison with mirrored low ranks.

    With r the rank among k versions and G = max(1, floor(k / (z + 1))), a document is positive if r <= G, in group r;
    negative if r > k - z G, in group ((k - r) mod G) + 1; and dropped otherwise. If k <= z, z_j = k - 1 replaces z, and
    a positive document is kept if a hash of it is below z_j / z. Documents are ordered by masked data, and the positive
    ones of the longest prefix with (1 + #negative) / (z #positive) <= q are selected (Barber & Candes 2015). z = k - 1
    is the filter of simultaneous knockoffs (Gimenez & Zou 2019).

    Guaranteed: FDR <= q in finite samples for every order, because a null document is positive with probability
    1 / (z + 1) given the masked data, independently. This requires the uniform draw of indices, a score that does not
    depend on other documents' published versions, and a seed and z fixed before scores are read.

    Args:
        scores: scores of k versions of each document, perhaps `preference_residuals`.
        q: exact, in (0, 1).
        seed: seed of three hashes: for equal scores, for equal statistics and for small k.
        z: >= 1; max k - 1 is used if that is smaller.
        order: any function of masked data; default: `gap_statistic`.
    """
    ranks, z = version_ranks(scores, seed), _mirror_ranks(scores.sizes, z)
    signs, groups = _mirrored(scores, ranks, z, seed)
    statistic = (order or gap_statistic)(scores.scores, scores.offsets, groups)
    places = np.flatnonzero(signs).tolist()
    hashes = {j: sha256(_prefix("order", seed, scores.ids[j])).digest() for j in places}
    places.sort(key=lambda j: (-statistic[j], hashes[j]))
    positive = signs[places] > 0
    n_positive, n_negative = np.cumsum(positive), np.cumsum(~positive)
    holds = np.flatnonzero((1 + n_negative) * q.denominator <= q.numerator * z * n_positive)
    selected = np.zeros(signs.size, dtype=bool)
    if holds.size:
        selected[places[: holds[-1] + 1]] = positive[: holds[-1] + 1]
    return VersionList(selected, ranks, signs, statistic, z)


def fewest_versions(q: Fraction, sizes: np.ndarray, z: int = MIRROR) -> int:
    """Minimum number of documents that `mirrored_list` can select, ceil(1 / (z q)).

    Args:
        q: exact level.
        sizes: int64, (documents,): number of versions of each document, at least one document.
        z: as in `mirrored_list`.
    """
    return math.ceil(1 / (_mirror_ranks(sizes, z) * q))


def _mirror_ranks(sizes: np.ndarray, z: int) -> int:
    return max(1, min(z, int(sizes.max(initial=2)) - 1))


def _mirrored(scores: VersionScores, ranks: np.ndarray, z: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Sign (int8) and group (int64, 0 if dropped) of each document."""
    k = scores.sizes
    reach, groups = np.minimum(z, k - 1), np.maximum(1, k // (z + 1))
    positive, negative = ranks <= groups, ranks > k - reach * groups
    for j in np.flatnonzero(positive & (reach < z)).tolist():
        number = int.from_bytes(sha256(_prefix("thinning", seed, scores.ids[j])).digest(), "big")
        positive[j] = number * z < int(reach[j]) << 256
    group = np.where(positive, ranks, np.where(negative, (k - ranks) % groups + 1, 0))
    return positive.astype(np.int8) - negative.astype(np.int8), group


def _prefix(use: str, seed: int, document: str) -> bytes:
    """The prefix of a hash for one use; only a digest of 32 bytes may follow the id, so it is unambiguous."""
    return f"{use}\0{seed}\0{document}\0".encode(errors="surrogatepass")


def gap_statistic(scores: np.ndarray, offsets: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """T = (x_(g) - mean of the others) / (s sqrt(1 + 1 / (k - 1))) for the g-th largest score: float64, (documents,).

    v is the variance of the others, for each version of each document. Among the documents of one k, log s^2 is log v
    shrunk towards its median by b = max(0, Var(log v) - trigamma((k - 2) / 2)) / Var(log v); v is at least 1e-6 of its
    median. s is the pooled within-document standard deviation for k <= 3, for fewer than 20 documents of one k, or if
    the median of v is 0.

    Args:
        scores: float64, (versions,), finite.
        offsets: int64, (documents + 1,).
        groups: int64, (documents,), g; 0 is treated as 1.
    """
    sizes = np.diff(offsets)
    document = np.repeat(np.arange(sizes.size), sizes)
    centred, squares = _centred(scores, offsets)
    pooled = math.sqrt(squares.sum() / max(1, int((sizes - 1).sum()))) or 1.0
    centred, squares, k = centred / pooled, (squares / pooled**2)[document], sizes[document]
    gap = centred * (k / (k - 1))
    others = squares - centred * gap
    variance = np.where(others > _ROUNDING * squares, others, 0.0) / np.maximum(k - 2, 1)
    for size in np.unique(sizes).tolist():
        variance[k == size] = _shrunk(variance[k == size], size)
    statistic = gap / np.sqrt(variance * (1 + 1 / (k - 1)))
    descending = np.lexsort((-scores, document))
    return np.asarray(statistic[descending[offsets[:-1] + np.maximum(groups, 1) - 1]])


def _shrunk(variance: np.ndarray, size: int) -> np.ndarray:
    """s^2 from v of all versions of the documents with `size` versions, shape as `variance`."""
    median = float(np.median(variance))
    if size <= 3 or variance.size < LEAST_DOCUMENTS * size or median == 0:
        return np.ones_like(variance)
    log = np.log(np.maximum(variance, FLOOR * median))
    middle = float(np.median(log))
    return np.asarray(np.exp(middle + shrinkage(float(np.var(log)), size) * (log - middle)))


def shrinkage(spread: float, size: int) -> float:
    """Share b = max(0, Var(log v) - trigamma((k - 2) / 2)) / Var(log v), in [0, 1); `spread` Var(log v), `size` k."""
    from scipy.special import polygamma

    return max(0.0, spread - float(polygamma(1, (size - 2) / 2))) / spread if spread > 0 else 0.0


def _centred(values: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values minus the mean of their document, exactly 0 if all are equal, and sums of their squares by document."""
    sizes, starts = np.diff(offsets), offsets[:-1]
    above = values - np.repeat(np.minimum.reduceat(values, starts), sizes)
    centred = above - np.repeat(np.add.reduceat(above, starts) / sizes, sizes)
    return centred, np.add.reduceat(centred**2, starts)


def preference_residuals(scores: VersionScores) -> VersionScores:
    """Scores without the part explained by the forms of a version: the model's preference, independent of publication.

    Scores and form counts are centred within documents; ridge regression with penalty 1 on the standardized columns
    that vary in at least 20 documents. The regression does not use the published index, so ranks of residuals are
    uniform like those of scores. Residuals are in pooled standard deviations, rounded to 10 decimals.

    Args:
        scores: scores of versions; returned unchanged if they have no forms, or none that varies enough.
    """
    return Preference.fit(scores).residuals(scores)


@dataclass(frozen=True, slots=True, eq=False)
class Preference:
    """The part of `preference_residuals` that is independent of scores: varying columns of forms and their products."""

    forms: csr_array | None = None  # (versions, columns); None if scores are unchanged
    sd: np.ndarray = field(default_factory=lambda: np.empty(0))  # (columns,)
    penalised: np.ndarray = field(default_factory=lambda: np.empty(0))  # (columns, columns)

    @classmethod
    def fit(cls, scores: VersionScores) -> Preference:
        """The preference of some versions. Two threads multiply; sums of integer counts are exact."""
        if scores.forms is None:
            return cls()
        from scipy.sparse import csr_array

        size = scores.scores.size
        forms = csr_array(scores.forms, dtype=np.float64)  # products of small integers would overflow
        of_document = csr_array((np.ones(size), np.arange(size), scores.offsets), shape=(scores.sizes.size, size))
        sums = of_document @ forms
        squares = of_document @ csr_array((forms.data**2, forms.indices, forms.indptr), shape=forms.shape)
        varies = squares.data * np.repeat(scores.sizes, np.diff(sums.indptr)) > sums.data**2
        varied = np.bincount(sums.indices[varies], minlength=forms.shape[1])
        kept = np.flatnonzero(varied >= LEAST_DOCUMENTS)
        if not kept.size:
            return cls()
        if kept.size < varied.size:
            forms, sums = forms[:, kept], sums[:, kept]
        means = csr_array(
            (sums.data / np.repeat(scores.sizes, np.diff(sums.indptr)), sums.indices, sums.indptr), shape=sums.shape
        )
        pairs = [*((half, half) for half in _halves(forms)), *zip(_halves(sums), _halves(means), strict=True)]
        with ThreadPoolExecutor(2) as pool:  # products of scipy.sparse release the GIL
            products = list(pool.map(lambda pair: (pair[0].T @ pair[1]).toarray(), pairs))
        gram = products[0] + products[1] - (products[2] + products[3])
        sd = np.sqrt(np.diag(gram) / size)
        return cls(forms, sd, gram / np.outer(sd, sd) + np.eye(kept.size))

    def residuals(self, scores: VersionScores) -> VersionScores:
        """`preference_residuals` of scores of the same versions."""
        centred, squares = _centred(scores.scores, scores.offsets)
        if self.forms is None or not squares.any():
            return scores
        weights = np.linalg.solve(self.penalised, (self.forms.T @ centred) / self.sd) / self.sd
        explained, _ = _centred(self.forms @ weights, scores.offsets)
        pooled = math.sqrt(squares.sum() / int((scores.sizes - 1).sum()))
        return replace(scores, scores=np.round((centred - explained) / pooled, 10))


def _halves(rows: csr_array) -> tuple[csr_array, csr_array]:
    """The first and the second half of the rows, without copies."""
    middle = rows.shape[0] // 2
    at = rows.indptr[middle]
    first = (rows.data[:at], rows.indices[:at], rows.indptr[: middle + 1])
    second = (rows.data[at:], rows.indices[at:], rows.indptr[middle:] - at)
    make = type(rows)
    return make(first, shape=(middle, rows.shape[1])), make(second, shape=(rows.shape[0] - middle, rows.shape[1]))


def rank_step_up(ranks: np.ndarray, sizes: np.ndarray, q: Fraction) -> np.ndarray:
    """Benjamini & Hochberg's (1995) step-up procedure on p = r / k, exact: bool, (documents,).

    Guaranteed: FDR <= q for independent uniform ranks. p is at least 1 / k, so R of m documents can be selected only
    if some k >= m / (q R).

    Args:
        ranks: int64, (documents,), from `version_ranks`.
        sizes: int64, (documents,): number of versions of each document.
        q: exact level.
    """
    pairs, which, counts = np.unique(np.stack([ranks, sizes]), axis=1, return_inverse=True, return_counts=True)
    p = [Fraction(r, k) for r, k in pairs.T.tolist()]
    reached, cut = 0, Fraction(0)
    for i in sorted(range(len(p)), key=p.__getitem__):
        reached += int(counts[i])
        cut = p[i] if p[i] * len(ranks) <= q * reached else cut
    return np.array([one <= cut for one in p], dtype=bool)[which.ravel()]


def redraw_p_value(scores: VersionScores, seed: int, redraws: int = REDRAWS) -> float:
    """Test whether the model learnt from the collection: p of T, the sum of the published standardized scores.

    All indices are redrawn `redraws` times: p = (1 + #{T* >= T}) / (1 + redraws), with ties counted against (the test
    of exchangeability of Oren et al. 2023, arXiv 2310.17623, with T instead of the mean likelihood). Memory O(redraws).

    Guaranteed: P(p <= t) <= t if no document was learnt, in finite samples.

    Args:
        scores: scores of k versions of each document.
        seed: seed of the redraws, >= 0, fixed before scores are read.
        redraws: number of redraws, >= 1.
    """
    values, rng = scores.standardised(), np.random.default_rng([seed, _REDRAW])
    observed, redrawn, sums, size = 0.0, np.zeros(redraws), np.zeros(1), 0
    for start, k, index in np.stack([scores.offsets[:-1], scores.sizes, scores.published], axis=1).tolist():
        versions = values[start : start + k]
        if not versions.any():
            continue
        if sums.size * k > _COMBINATIONS:
            redrawn += sums[rng.integers(sums.size, size=redraws, dtype=np.min_scalar_type(sums.size))]
            sums = np.zeros(1)
        sums = np.add.outer(sums, versions).ravel()
        observed += float(versions[index])
        size += k
    redrawn += sums[rng.integers(sums.size, size=redraws)]
    return float((1 + int((redrawn >= observed - _ROUNDING * size).sum())) / (1 + redraws))


def log_e_values(ranks: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """E-values of a growing collection: the mean over stakes L of prod_j (1 + L (k_j + 1 - 2 r_j) / (k_j - 1)).

    Guaranteed: for a null collection E has mean at most 1 at every stopping time, and P(max E >= 1 / a) <= a (Ville).
    The order of documents must not depend on their published indices.

    Args:
        ranks: int64, (documents,), in order of arrival, from `version_ranks` with ties against.
        sizes: int64, (documents,): versions of each.

    Returns:
        float64, (documents,): the natural logarithm of E after each document.
    """
    bets = np.array(BETS)[:, None] * ((sizes + 1 - 2 * ranks) / (sizes - 1))
    return np.asarray(np.logaddexp.reduce(np.log1p(bets).cumsum(axis=1), axis=0) - math.log(len(BETS)))


def uniformity_p_value(ranks: np.ndarray, sizes: np.ndarray) -> float:
    """Chi-squared test of uniform ranks, for a model that cannot have seen the collection; 1 for too few documents.

    Documents of each k are counted in cells of adjacent ranks that expect at least 5; statistics and degrees of
    freedom are summed over k.

    Args:
        ranks: int64, (documents,), from `version_ranks`.
        sizes: int64, (documents,): versions of each.
    """
    from scipy.special import chdtrc

    statistic, freedom = 0.0, 0
    for k in np.unique(sizes).tolist():
        same = ranks[sizes == k]
        cells = k // math.ceil(LEAST_IN_CELL * k / same.size)
        if cells < 2:
            continue
        cell = np.arange(k) * cells // k
        due = np.bincount(cell) * (same.size / k)
        statistic += float(((np.bincount(cell[same - 1], minlength=cells) - due) ** 2 / due).sum())
        freedom += cells - 1
    return float(chdtrc(freedom, statistic)) if freedom else 1.0


@dataclass(frozen=True, slots=True)
class ExpectedShare:
    """Expected results for documents that a model of 8B parameters read this often among 500B tokens."""

    copies: int
    auc: float  # of members versus others, across documents (Hubble, arXiv 2510.19811)
    least: float  # lower bound of the share of these documents that is selected
    most: float


EXPECTED = (
    ExpectedShare(1, 0.54, 0.0, 0.0),
    ExpectedShare(4, 0.56, 0.0, 0.0),
    ExpectedShare(16, 0.73, 0.0, 0.15),
    ExpectedShare(64, 0.996, 0.9, 0.9),
)
"""With one or four readings the collection is detected, but no single document."""
