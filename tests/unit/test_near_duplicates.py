# ruff: noqa: RUF001
"""Near-duplicates from sketches, checked against all runs of words and against all pairs."""

import hashlib
import random
import unicodedata
from collections.abc import Iterator
from itertools import combinations

import numpy as np
import pytest
import regex
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


TEXT = st.text(st.sampled_from("ab cd,\n\u2003éßﬁ½日本語かきｶ\u0301\u200b\ud800"), min_size=1, max_size=60).filter(
    lambda text: text.replace("\u200b", "").strip()
)
UNIT = regex.compile(
    r"[\p{Han}\p{Hiragana}\p{Katakana}]\p{M}*|[[\p{L}\p{N}_]--[\p{Han}\p{Hiragana}\p{Katakana}]]\p{M}*", regex.V1
)


def units(normal: str) -> list[tuple[str, int]]:
    """Words and characters of scripts without blanks, with the fortieths of a run that each counts."""
    found: list[tuple[str, int]] = []
    end = -1
    for match in UNIT.finditer(normal):
        if regex.match(r"[\p{Han}\p{Hiragana}\p{Katakana}]", match[0]):
            found.append(("\x1f" + match[0], 5))
        elif found and match.start() == end and found[-1][1] == 8:
            found[-1] = (found[-1][0] + match[0], 8)
        else:
            found.append((match[0], 8))
        end = match.end()
    return found or [(sign, 8) for sign in normal.split()]


def ends_of(found: list[tuple[str, int]]) -> Iterator[tuple[int, int]]:
    """The beginning and end of each run; of fewer units than a run all of them."""
    end = size = 0
    for begin in range(len(found)):
        while size < 40 and end < len(found):
            size += found[end][1]
            end += 1
        if size >= 40 or begin == 0:
            yield begin, end
        size -= found[begin][1]


def minhash(text: str) -> bytes:
    found = units(unicodedata.normalize("NFKC", text).casefold().replace("\u200b", ""))
    grams = [" ".join(unit for unit, _ in found[begin:end]) for begin, end in ends_of(found)]
    minimum = MinHash(SKETCH, seed=1, hashfunc=xxhash.xxh32_intdigest, scheme="affine32")
    minimum.update_batch([gram.encode("utf-8", "surrogatepass") for gram in grams])
    return bytes((minimum.hashvalues * np.uint32(0x9E3779B1) >> np.uint32(24)).astype(np.uint8))


@settings(max_examples=100)
@given(st.lists(TEXT, max_size=20))
def test_a_sketch_is_the_minhash_of_datasketch_whatever_it_is_made_with(texts: list[str]) -> None:
    assert sketches_of_texts(texts) == [minhash(text) for text in texts] == [sketch(text) for text in texts]


@pytest.mark.slow
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


@pytest.mark.recorded
def test_sketches_are_the_same_on_every_machine() -> None:
    """Recorded: sketches that were stored must be comparable with those of tomorrow."""
    digest = hashlib.sha256(b"".join(sketch(" ".join(words(seed, 50))) for seed in range(10))).hexdigest()
    assert digest == "648c76af77743102f99cd9844b6cf2b08e1e74a379c70b185414e804453a5ec0"


def test_long_texts_are_read_to_their_end() -> None:
    text = words(3, 9_000)
    assert estimate(" ".join(text), " ".join(text[4_500:])) == pytest.approx(0.5, abs=4 * 0.045)
    assert estimate(" ".join(text), " ".join([*text[-10:], *text])) > 0.98


SCRIPTS = {
    "Han": range(0x4E00, 0x5E00),
    "Hiragana and Katakana": [*range(0x3041, 0x3090), *range(0x30A1, 0x30F0)],
    "Thai": range(0xE01, 0xE2F),
    "Lao": [0xE81, 0xE82, 0xE84, 0xE87, 0xE94, 0xE99, 0xEAD],
    "Khmer": range(0x1780, 0x17A3),
    "Myanmar": range(0x1000, 0x1021),
    "Tibetan": [*range(0xF40, 0xF47), 0xF0B],
    "Yi": range(0xA000, 0xA48C),
    "beyond U+FFFF": range(0x20000, 0x21000),
    "a sequence of DNA": [ord(letter) for letter in "ACGT"],
}


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("edit", ["changed", "inserted", "removed", "in lines", "with signs"])
def test_a_text_without_blanks_is_near_one_with_a_changed_character_and_no_other(script: str, edit: str) -> None:
    rng = random.Random(script + edit)
    letters = [chr(code) for code in SCRIPTS[script]]
    text, other = ("".join(rng.choices(letters, k=690)) for _ in range(2))
    new = {
        "changed": text[:345] + rng.choice(letters) + text[346:],
        "inserted": text[:345] + rng.choice(letters) + text[345:],
        "removed": text[:345] + text[346:],
        "in lines": "\n".join(text[begin : begin + 60] for begin in range(0, 690, 60)),
        "with signs": "。".join(text[begin : begin + 60] for begin in range(0, 690, 60)),
    }[edit]
    if edit == "with signs" and script == "a sequence of DNA":
        return  # words of 60 letters
    assert estimate(text, new) > 0.9
    assert estimate(text, other) < 0.1


def test_a_text_that_mixes_scripts_is_read_by_words_and_characters() -> None:
    rng = random.Random(0)
    pieces = [rng.choice(VOCABULARY) + "".join(chr(rng.randrange(0x4E00, 0x9000)) for _ in range(8)) for _ in range(60)]
    text = " ".join(pieces)
    assert estimate(text, text.replace(pieces[30], "word三四五六七八")) > 0.9
    assert estimate(text, "".join(pieces)) > 0.9, "blanks between a word and a character separate nothing more"
    assert estimate(text, " ".join(piece[-8:] for piece in pieces)) < 0.5


def test_marks_belong_to_their_letter_and_what_is_not_seen_changes_nothing() -> None:
    hindi = "हिन्दी में लिखा हुआ एक छोटा वाक्य जिसमें कुछ शब्द हैं"
    assert estimate(hindi, hindi.replace("\u093f", "\u0940")) < 0.9, "another vowel is another word"
    persian = "می\u200cخواهم کتاب\u200cهای تازه را در خانه بخوانم"
    for text in (hindi, persian, "naïve café an\u00adother ordinary sentence", "ภาษาไทย\u200bไม่มี\u200bช่องว่าง"):
        assert sketch(text) == sketch(text.replace("\u200c", "").replace("\u200b", "").replace("\u00ad", ""))
        assert sketch(text) == sketch(unicodedata.normalize("NFD", text))
    assert sketch("ＡＢＣ ｶﾞｷﾞ") == sketch("abc ガギ")


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


def test_families_are_what_pairs_connect_and_thousands_of_copies_are_one() -> None:
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
