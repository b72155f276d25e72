"""`coverage`, `cdd` and `pac` are their formulas, whatever the batch and whichever other detectors are scored."""

import random

import pytest

from pipeline.config.models import ModelConfig
from pipeline.detectors.base import FORWARD, Continuations, Continued, Evidence, Pass
from pipeline.detectors.continuations import cdd_score, coverage_score, within_edits
from pipeline.detectors.registry import needed_continuations, parse_detectors
from pipeline.errors import UserError
from pipeline.models.load import open_model
from pipeline.models.tokens import tokenize
from pipeline.passes.forward import forward
from pipeline.passes.statistics import swapped_words, text_read

LETTERS = random.Random(5)
GREEDY = Continued(temperature=0.0, top_k=None)
COPIES = [Pass("forward", text=f"swapped{copy}") for copy in range(1, 6)]


def words(count: int, kinds: str = "abc") -> str:
    return " ".join(LETTERS.choice(kinds) for _ in range(count))


def covered(candidate: str, reference: str) -> float:
    """Section 11 of the methods, word by word."""
    given, expected, total = candidate.split(), reference.split(), 0.0
    for length in range(2, 13):
        runs = [given[i : i + length] for i in range(len(given) - length + 1)]
        hit = set()
        for i in range(len(expected) - length + 1):
            if expected[i : i + length] in runs:
                hit |= set(range(i, i + length))
        total += len(hit) / len(expected)
    return total


def distance(one, other) -> int:
    table = {(i, 0): i for i in range(len(one) + 1)} | {(0, j): j for j in range(len(other) + 1)}
    for i in range(1, len(one) + 1):
        for j in range(1, len(other) + 1):
            changed = table[i - 1, j - 1] + (one[i - 1] != other[j - 1])
            table[i, j] = min(changed, table[i - 1, j] + 1, table[i, j - 1] + 1)
    return table[len(one), len(other)]


def test_coverage_is_its_definition():
    for size in (2, 5, 13, 40, 60):
        reference, candidates = words(size), [words(size) for _ in range(4)]
        candidates.append(" ".join(["x", *reference.split()[1:20]]))
        expected = max(covered(" ".join(text.split()[:size]), reference) for text in candidates)
        assert coverage_score(candidates, reference) == pytest.approx(expected, rel=1e-12)
    text = words(30)
    assert coverage_score(["a b x c d"], "a b c d") == 2 / 4  # cut to four words: of these only "a b" is a run
    assert coverage_score(["no", "A b c d"], "a b c d") == 3 / 4 + 3 / 4  # case matters; the largest of the draws
    assert coverage_score([""], "a b c d") == coverage_score([text], "a") == 0.0  # one word has no run of two
    assert coverage_score([text], text) == 11.0
    assert coverage_score([f"{'x ' * 30}{text}"], text) == 0.0
    assert coverage_score([f"{'x ' * 30}{text}"], text, "all") == 11.0


def test_the_band_decides_as_the_whole_table_of_edits():
    verdicts = set()
    for _ in range(300):
        one, other = (words(LETTERS.randrange(12), "ab").split() for _ in range(2))
        for most in range(6):
            verdicts.add(within_edits(one, other, most))
            assert within_edits(one, other, most) == (distance(one, other) <= most), (one, other, most)
    assert verdicts == {True, False}


def test_cdd_worked_by_hand_and_by_its_definition():
    greedy = list(range(20))
    near, far, longer = [99, *greedy[1:]], [99, 98, *greedy[2:]], [*greedy, *range(50, 90)]
    assert cdd_score([greedy, near, far], greedy) == 2 / 3  # .05 * 20 is one edit
    assert cdd_score([greedy, near, far, longer], greedy) == 3 / 4  # of 60 tokens three
    assert cdd_score([[*range(100), 7, 8, 9]], [*range(100), 1, 2], 0.009) == 1.0  # the first 100 tokens count
    assert cdd_score([near[:19]], greedy[:19]) == 0.0  # of 19 tokens none
    assert cdd_score([[-1] * 7 + list(range(7, 100))], range(100), alpha=0.07) == 1.0
    assert cdd_score([[1]], [2]) == 0.0
    assert cdd_score([[1]], [1]) == 1.0  # of one draw a score is 0 or 1
    assert cdd_score([[], []], []) == 0.0  # nothing was sampled, and a peak at nothing is none
    assert cdd_score([[], [1]], []) == 0.0
    assert cdd_score([[], [1]], [1]) == 1 / 2
    assert cdd_score([], [1]) == 0.0
    for alpha in (0.05, 0.3, 1.0):
        centre, draws = words(130, "ab").split(), [words(n, "ab").split() for n in (3, 70, 110, 140)]
        longest = max(len(tokens[:100]) for tokens in (centre, *draws))
        expected = [distance(tokens[:100], centre[:100]) <= alpha * longest for tokens in draws]
        assert cdd_score(draws, centre, alpha) == sum(expected) / 4


def test_one_drawing_serves_all_that_sample_alike():
    detectors = parse_detectors([{"samia": {"draws": 3}}, {"coverage": {"draws": [1, 5]}}, {"cdd": {"draws": 4}}])
    assert needed_continuations(detectors) == {Continued(): 5, GREEDY: 1}
    drawn = Continuations("a b c d", ["x b c y", "a b x x", "a b c d", "no", "a b c d"])
    given = {Continued(): [drawn], GREEDY: [Continuations("a b c d", ["a b c d e"])]}
    evidence = Evidence([""], {}, continuations=given)
    scores = {detector.column: detector.score(evidence).item() for detector in detectors}
    assert (scores["coverage(draws=1)"], scores["coverage(draws=5)"]) == (2 / 4, 3.0)
    assert scores["cdd(draws=4)"] == 1 / 4  # words, cut to those of the rest, where no tokenizer is known
    letters = Evidence([""], {}, continuations=given, tokens=list)
    (wide,) = parse_detectors([{"cdd": {"draws": 4, "alpha": 0.3}}])
    assert (wide.score(evidence).item(), wide.score(letters).item()) == (1 / 4, 3 / 4)  # two edits of seven letters
    plain = [one.arguments for one in parse_detectors(["samia", "samia_zlib", "coverage", "cdd"])]
    assert [(one["draws"], one.get("n", 1), one.get("alpha", 0.05)) for one in plain] == [(10, 1, 0.05)] * 4
    for wrong in ({"cdd": {"temperature": 0}}, {"coverage": {"draws": 0}}, {"pac": {"copies": 0}}):
        with pytest.raises(UserError, match=r"temperature|draws|copies"):
            parse_detectors([wrong])


def test_copies_exchange_pairs_of_words_by_text_copy_and_seed_alone():
    text = "  " + "  ".join(f"w{i}" for i in range(41)) + "\n"
    copy = swapped_words(text, 1, 0)
    moved = [i for i, (a, b) in enumerate(zip(text.split(), copy.split(), strict=True)) if a != b]
    assert len(moved) == 12  # int(.3 * 41) words
    assert (sorted(copy.split()), len(copy)) == (sorted(text.split()), len(text))
    assert [i for i, c in enumerate(copy) if c.isspace()][:2] == [0, 1]
    others = {swapped_words(text, 2, 0), swapped_words(text, 1, 1), swapped_words(text[:-1], 1, 0) + "\n"}
    assert len(others | {copy}) == 4
    assert copy == text_read(text, "swapped1", 0)
    assert swapped_words("one two", 1, 0) == "two one"
    chinese = "".join(chr(0x4E00 + place) for place in range(41))
    moved = [i for i, (a, b) in enumerate(zip(chinese, swapped_words(chinese, 1, 0), strict=True)) if a != b]
    assert len(moved) == 12, "characters, where no blanks separate words"
    assert [swapped_words(short, 1, 0) for short in ("", " ", "one", " one ")] == ["", " ", "one", " one "]


def test_pac_is_its_formula_in_every_batch(tiny_model_folder):
    lm = open_model(ModelConfig(path=str(tiny_model_folder)))
    texts = [words(LETTERS.randrange(3, 60), "abcdefghij") for _ in range(32)]

    def read(some: list[str], needed: Pass):
        ids = tokenize(lm.tokenizer, [text_read(text, needed.text, 7) for text in some], 512)
        return forward(lm, [entry.ids for entry in ids], frozenset())

    def polarised(text: str, needed: Pass) -> float:
        lp = sorted(read([text], needed).log_prob[0].tolist())
        high, low = max(1, int(0.05 * len(lp))), max(1, int(0.3 * len(lp)))
        return sum(lp[-high:]) / high - sum(lp[:low]) / low

    expected = [sum(polarised(t, copy) for copy in COPIES) / 5 - polarised(t, FORWARD) for t in texts]
    assert max(map(abs, expected)) > 0.01
    (detector,) = parse_detectors(["pac"])
    for size in (1, 7, 32):
        parts = [texts[start : start + size] for start in range(0, 32, size)]
        scores = [detector.score(Evidence(p, {n: read(p, n) for n in detector.needs})).tolist() for p in parts]
        assert [s for part in scores for s in part] == pytest.approx(expected, abs=1e-4)
