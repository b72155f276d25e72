"""Near-duplicates from sketches, checked against all runs of words and against all pairs."""

import hashlib
import re
import unicodedata
from itertools import combinations

import numpy as np
import pytest
import xxhash
from datasketch import MinHash
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.corpus.near_duplicates import (
    SKETCH,
    NearDuplicateIndex,
    band_width,
    likeness,
    near_families,
    sketch,
    sketches_of_texts,
    stack_sketches,
)

VOCABULARY = [f"word{i}" for i in range(2_000)]


def words(seed: int, count: int) -> list[str]:
    return np.random.default_rng(seed).choice(VOCABULARY, count).tolist()


def runs(text: list[str]) -> set[tuple[str, ...]]:
    return {tuple(text[i : i + 5]) for i in range(len(text) - 4)}


def estimate(one: str, other: str) -> float:
    return float(likeness(stack_sketches([sketch(one)]), stack_sketches([sketch(other)]))[0])


TEXT = st.text(st.sampled_from("ab cd,\n\u2003éßﬁ½日\ud800"), min_size=1, max_size=60).filter(str.strip)


def minhash(text: str) -> bytes:
    normal = unicodedata.normalize("NFKC", text).casefold()
    tokens = re.findall(r"\w+", normal) or normal.split()
    minimum = MinHash(SKETCH, seed=1, hashfunc=xxhash.xxh32_intdigest, scheme="affine32")
    grams = [" ".join(tokens[begin : begin + 5]) for begin in range(max(1, len(tokens) - 4))]
    minimum.update_batch([gram.encode("utf-8", "surrogatepass") for gram in grams])
    return bytes((minimum.hashvalues * np.uint32(0x9E3779B1) >> np.uint32(24)).astype(np.uint8))


@settings(max_examples=40)
@given(st.lists(TEXT, max_size=20))
def test_a_sketch_is_the_minhash_of_datasketch_whatever_it_is_made_with(texts: list[str]) -> None:
    assert sketches_of_texts(texts) == [minhash(text) for text in texts] == [sketch(text) for text in texts]


def test_long_texts_among_short_ones_have_sketches_of_all_their_runs() -> None:
    texts = ["a", " ".join(words(0, 3_000)), "short one", " ".join(words(1, 900)), " ".join(words(2, 200_000)), "b"]
    assert sketches_of_texts(texts) == list(map(minhash, texts))


def test_the_estimate_is_the_share_of_common_runs_within_its_standard_error() -> None:
    errors = []
    for seed in range(300):
        one = words(seed, 200)
        other = list(one)
        for place in np.random.default_rng(seed).choice(200, seed % 15, replace=False):
            other[place] = "changed"
        share = len(runs(one) & runs(other)) / len(runs(one) | runs(other))
        errors.append((estimate(" ".join(one), ", ".join(other).upper()) - share, share))
    error, share = np.array(errors).T
    expected = np.sqrt(share * (1 - share) / SKETCH)
    assert np.abs(error[share == 1]).max() == 0
    assert np.abs(error).max() <= 5 * expected.max()
    assert abs(error.mean()) <= 4 * expected.mean() / np.sqrt(300)
    assert np.mean(error[share < 1] ** 2) == pytest.approx(np.mean(expected[share < 1] ** 2), rel=0.4)


@pytest.mark.parametrize(("count", "near"), [(20, 0.0), (200, 1.0)])
def test_a_changed_word_in_the_middle_hides_a_short_text_and_no_long_one(count: int, near: float) -> None:
    """It takes five runs away: of n - 4, so that n + 1 - 10 of n + 1 are common, 4/5 from n = 49 on."""
    shares = []
    for seed in range(40):
        text = words(seed, count)
        shares.append(estimate(" ".join(text), " ".join([*text[: count // 2], "new", *text[count // 2 + 1 :]])))
    assert np.mean(np.array(shares) >= 0.8) == pytest.approx(near, abs=0.05)


def test_sketches_are_the_same_on_every_machine_and_long_texts_are_read_to_their_end() -> None:
    """Recorded: sketches that were stored must be comparable with those of tomorrow."""
    digest = hashlib.sha256(b"".join(sketch(" ".join(words(seed, 50))) for seed in range(10))).hexdigest()
    assert digest == "648c76af77743102f99cd9844b6cf2b08e1e74a379c70b185414e804453a5ec0"
    text = words(3, 9_000)
    assert estimate(" ".join(text), " ".join(text[4_500:])) == pytest.approx(0.5, abs=4 * 0.045)
    assert estimate(" ".join(text), " ".join([*text[-10:], *text])) > 0.98


def perturbed(rng: np.random.Generator, documents: int, kinds: int, share: float) -> np.ndarray:
    bases = rng.integers(0, 256, (kinds, SKETCH), dtype=np.uint8)[rng.integers(0, kinds, documents)]
    changed = rng.random((documents, SKETCH)) > rng.uniform(share, 1, (documents, 1))
    return np.where(changed, rng.integers(0, 256, bases.shape, dtype=np.uint8), bases).astype(np.uint8)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([0.5, 0.8, 0.95, 1.0]), st.integers(1, 25))
def test_all_clear_pairs_are_found_and_no_pair_below_the_threshold(seed: int, threshold: float, kinds: int) -> None:
    sketches = perturbed(np.random.default_rng(seed), 60, kinds, 0.6)
    known, given_ones = sketches[:40], sketches[40:]
    index = NearDuplicateIndex.of(known, threshold)
    given_places, places = index.near(given_ones)
    pairs = {
        (int(a), int(b)) for a, p in zip(given_places, places, strict=True) for b in np.flatnonzero(index.number == p)
    }
    for a in range(20):
        share = likeness(np.repeat(given_ones[a : a + 1], 40, axis=0), known)
        for b in range(40):
            if (a, b) in pairs:
                assert share[b] >= threshold - 1e-9
            elif kinds == 1 or share[b] < min(1.0, threshold + 0.12):
                continue  # near the threshold a pair may be missed
            else:
                raise AssertionError((a, b, share[b]))
    assert (index.matches(given_ones) == np.isin(np.arange(20), [a for a, _ in pairs])).all()


def test_families_are_what_pairs_connect_in_whatever_order_and_thousands_of_copies_are_one() -> None:
    rng = np.random.default_rng(5)
    sketches = perturbed(rng, 200, 30, 0.93)
    family = near_families(sketches, 0.7)
    index = NearDuplicateIndex.of(sketches, 0.7)
    label = np.arange(200)
    for one, other in combinations(range(200), 2):
        if likeness(sketches[one : one + 1], sketches[other : other + 1])[0] >= 0.75:
            label[label == label[other]] = label[one]
    assert (np.equal.outer(family, family) == np.equal.outer(label, label)).all()
    assert len(index.distinct) == len(np.unique(sketches, axis=0))
    order = rng.permutation(200)
    assert (
        np.equal.outer(near_families(sketches[order], 0.7), near_families(sketches[order], 0.7))
        == (np.equal.outer(family[order], family[order]))
    ).all()
    assert family[0] == 0
    assert (np.diff(np.unique(family, return_index=True)[1]) > 0).all(), "numbered in the order of first documents"
    assert near_families(np.empty((0, SKETCH), dtype=np.uint8)).size == 0
    sketches = perturbed(np.random.default_rng(1), 5_000, 1, 0.97)
    assert near_families(sketches).max() == 0
    assert NearDuplicateIndex.of(sketches, 0.8).matches(sketches[:50]).all()


@pytest.mark.parametrize("threshold", [0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
def test_bands_leave_nineteen_of_twenty_pairs_at_the_threshold_to_be_compared(threshold: float) -> None:
    width, rng = band_width(threshold), np.random.default_rng(0)
    equal = rng.random((20_000, SKETCH // width, width)) < threshold
    assert equal.all(axis=2).any(axis=1).mean() >= 0.94
