"""The words of the blind test: what is a token in each script, and what two roles differ by in any."""

# ruff: noqa: RUF001

import json
import random
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.checks.blind import after_blind, blind_diagnostic, blind_test
from pipeline.checks.classifier import blind, blind_result, hold_out
from pipeline.checks.held_out_auc import Blind, Compared
from pipeline.checks.held_out_tail import tail_test
from pipeline.checks.words import CHARACTERS, COLUMNS, WORD_COLUMNS, read_words, tokens, word_counts
from pipeline.plan.description import load_config
from pipeline.plan.matching import telling_words
from pipeline.plan.preflight import plan_checks
from pipeline.run.plan import make_plan
from tests.helpers.made_up import write_audit, write_corpus


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The cat, I.", ["the", "cat", ",", "i", "."]),
        ("x = a[0] + 1;", ["x", "=", "a", "[", "0", "]", "+", "1", ";"]),
        ("parseHTTPResponse", ["parsehttpresponse", "parse", "http", "response"]),
        ("naïveÉtat2", ["naïveétat2", "naïve", "état", "2"]),
        ("snake_case _x", ["snake_case", "snake", "case", "_x"]),
        ("हिन्दी में", ["हिन्दी", "में"]),
        ("می\u200cخواهم", ["می\u200cخواهم"]),
        ("cafe\u0301 café", ["cafe\u0301", "café"]),
        ("한국어 문장", ["한국어", "문장"]),
        ("😀😀❤️", ["😀", "😀", "❤", "\ufe0f"]),
        ("我们", ["我", "们", "我们"]),
        ("你好，iPhone手机", ["你", "好", "你好", "，", "iphone", "i", "phone", "手", "机", "手机"]),
        ("ABC字", ["abc", "字"]),
        ("ไทย", ["ไ", "ท", "ย", "ไท", "ทย", "ไทย"]),
        ("བོད་", ["བ", "ོ", "ད", "བོ", "ོད", "བོད", "་"]),
        ("", []),
        (" \n", []),
    ],
)
def test_a_token_is_a_word_a_sign_or_a_neighbourhood_of_characters(text: str, expected: list[str]) -> None:
    assert sorted(tokens(text)) == sorted(expected)


def test_a_run_longer_than_any_word_is_read_by_its_characters_too() -> None:
    run = "acgtacgtacgtacgtacgta"
    assert len(run) == 21
    grams = [run[begin : begin + size] for size in (1, 2, 3) for begin in range(22 - size)]
    assert sorted(tokens(run)) == sorted([run, *grams])
    assert tokens(run[:20]) == [run[:20]]


def test_pairs_of_a_long_text_come_from_windows_spread_over_it() -> None:
    text = "".join(chr(0x4E00 + place) for place in range(15_000))
    assert len(tokens(text)) == 8 * (500 + 499 + 498)
    read = {token for token in tokens(text) if len(token) == 1}
    assert {text[0], text[499], text[-1], text[-500]} <= read
    assert max(np.diff(sorted(map(ord, read)))) < 1_600
    clauses = "，".join(text[begin : begin + 50] for begin in range(0, 15_000, 50))
    assert all("\n" not in token and len(token) < 4 for token in tokens(clauses))
    assert tokens("a " * CHARACTERS) == ["a"] * (CHARACTERS // 2)


def test_features_count_the_tokens_the_characters_and_three_shares() -> None:
    texts = ["The cat SAT, the mat.", "x", "我们去公园" * 3, "acgt" * 9, "", "a\nb\r\nc", "Ünï_çode mixedCase 😀"]
    features = word_counts(texts)
    assert features.shape == (len(texts), COLUMNS)
    for text, row in zip(texts, features.toarray(), strict=True):
        counts = np.array(sorted(Counter(tokens(text)).values()), dtype=float)
        words = np.sort(row[:WORD_COLUMNS][row[:WORD_COLUMNS] > 0])
        if text:
            assert np.linalg.norm(words) == pytest.approx(1, rel=1e-5)
        if not {"acgt" * 9} & {text}:  # there a letter is a token once as a word and once in a run
            assert words * np.linalg.norm(counts) == pytest.approx(counts, rel=1e-5)
        signs = np.array(sorted(Counter(text).values()), dtype=float)
        alphabet = np.sort(row[WORD_COLUMNS:-3][row[WORD_COLUMNS:-3] > 0])
        assert alphabet == pytest.approx(np.sqrt(signs / max(1, len(text))), rel=1e-5)
        capitals = sum(map(str.isupper, text)) / max(1, sum(map(str.isalpha, text)))
        visible = [sign for sign in text if not sign.isspace()]
        punctuation = sum(unicodedata.category(sign)[0] == "P" for sign in visible) / max(1, len(visible))
        breaks = sum(sign in "\r\n" for sign in text) / max(1, len(text))
        assert row[-3:] == pytest.approx(np.sqrt([capitals, punctuation, breaks]), rel=1e-5)


def test_the_same_text_has_the_same_features_beside_any_others() -> None:
    texts = [f"{place} 我们 some Words" * (1 + place % 7) for place in range(600)]
    features = word_counts(texts)
    assert (features[511].toarray() == word_counts([texts[511]]).toarray()).all()
    assert features.has_canonical_format or (features.sorted_indices() != features).nnz == 0


def test_shared_words_are_those_of_two_characters_that_another_document_has() -> None:
    assert read_words(["aa bb a !", "aa cc b !", "dd a b"]).shared == 1.0
    assert read_words(["aa bb", "aa bb", "cc dd"]).shared == 2.0
    assert read_words(["我们去", "我们来"]).shared == 1.0, "a pair"
    assert read_words(["a b c d e f g h i j k l"] * 3).shared == 0.0
    assert read_words(["one"]).shared == 0.0


SCRIPTS: dict[str, list[str]] = {
    name: [sign for code in range(*span) if (sign := chr(code)).isalpha()]
    for name, span in {
        "Latin": (0x61, 0x7B), "Greek": (0x3B1, 0x3CA), "Cyrillic": (0x430, 0x450), "Armenian": (0x561, 0x587),
        "Hebrew": (0x5D0, 0x5EB), "Arabic": (0x621, 0x64B), "Devanagari": (0x904, 0x93A), "Bengali": (0x985, 0x9BA),
        "Tamil": (0xB85, 0xBBA), "Thai": (0xE01, 0xE2F), "Lao": (0xE81, 0xEB0), "Tibetan": (0xF40, 0xF6D),
        "Myanmar": (0x1000, 0x1021), "Georgian": (0x10D0, 0x10F1), "Amharic": (0x1200, 0x1340),
        "Khmer": (0x1780, 0x17B3), "Mongolian": (0x1820, 0x1843), "Hiragana": (0x3041, 0x3097),
        "Katakana": (0x30A1, 0x30FB), "Han": (0x4E00, 0x5600), "Yi": (0xA000, 0xA200), "Hangul": (0xAC00, 0xB000),
        "Gothic": (0x10330, 0x1034B), "Han beyond U+FFFF": (0x20000, 0x20400),
    }.items()
}  # fmt: skip
SCRIPTS |= {
    "capitals": list("ABCDEFGHIJKLMNOPQRSTUVWXYZ"),
    "digits": list("0123456789"),
    "Arabic digits": [chr(0x660 + digit) for digit in range(10)],
    "emoji": [chr(code) for code in range(0x1F600, 0x1F640)],
    "symbols of code": list("{}()[];=<>+-*/&|!%^~#$@"),
    "punctuation": list(".,:;!?'\"-–—…«»“”"),
    "marks on one letter": ["a" + chr(code) for code in range(0x300, 0x320)],
}
STYLES = {
    "words": (5, 9, " ", 40),
    "letters": (1, 1, " ", 40),
    "one run": (200, 200, "", 1),
    "lines": (3, 30, "\n", 12),
}


def texts(signs: list[str], style: str, count: int, seed: Any) -> list[str]:
    """Texts of random words, of which none is expected to stand in two."""
    low, high, blank, words = STYLES[style]
    rng = random.Random(str(seed))
    return [
        blank.join("".join(rng.choices(signs, k=rng.randint(low, high))) for _ in range(words)) for _ in range(count)
    ]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("script", SCRIPTS)
def test_roles_without_a_common_character_differ_in_every_script(script: str, style: str) -> None:
    signs = random.Random(script).sample(SCRIPTS[script], len(SCRIPTS[script]))
    half = len(signs) // 2
    test = blind(texts(signs[:half], style, 150, 1), texts(signs[half:], style, 150, 2), 0)
    assert test.auc > 0.99
    assert test.outcome == "failed"


@pytest.mark.parametrize(
    "script", ["Latin", "Arabic", "Devanagari", "Thai", "Han", "Hangul", "emoji", "symbols of code"]
)
def test_alike_roles_do_not_differ_and_without_common_words_the_test_could_not_look(script: str) -> None:
    signs = SCRIPTS[script]
    test = blind(texts(signs, "words", 900, 1), texts(signs, "words", 900, 2), 0)
    assert test.outcome != "failed"
    assert test.looked == (script in ("Thai", "Han")), "only neighbours of characters are common"
    if not test.looked:
        shown = blind_diagnostic(test, "unseen")
        assert (shown.outcome, shown.n_to_settle) == ("inconclusive", None)
        assert shown.sentence.startswith("Inconclusive: the test could not look. Half of the documents have at most ")
        assert str(after_blind(shown, "unseen")).startswith("Give longer documents, or more of their kind, so that ")
    assert not blind(texts(signs, "letters", 900, 1), texts(signs, "letters", 900, 2), 0).looked


def test_roles_that_differ_in_style_alone_differ() -> None:
    words = [f"word{place}" for place in range(300)]

    def role(seed: int, change: Any = lambda text: text) -> list[str]:
        rng = random.Random(seed)
        return [change(" ".join(rng.choices(words, k=60))) for _ in range(150)]

    changes = {
        "capitals": str.upper,
        "titles": str.title,
        "lines": lambda text: text.replace(" ", "\n"),
        "commas": lambda text: text.replace(" ", ", "),
        "double blanks": lambda text: text.replace(" ", "  "),
        "tabs": lambda text: text.replace(" ", "\t"),
        "decomposed": lambda text: unicodedata.normalize("NFD", text.replace("o", "ö")),
        "full width": lambda text: "".join(chr(ord(sign) + 0xFEE0) if sign > " " else sign for sign in text),
        "zero width": lambda text: text.replace("w", "w\u200b"),
        "quotes": lambda text: f"“{text}”",
    }
    for name, change in changes.items():
        test = blind(role(1), role(2, change), 0)
        assert (name, test.outcome) == (name, "failed")
    assert blind(role(1), role(2), 0).outcome != "failed"


def test_a_test_that_could_not_look_fails_where_it_sees_and_never_passes() -> None:
    assert Blind(0.9, 0.8, 0.95, 100, 100, shared=0).outcome == "failed"
    assert Blind(0.5, 0.46, 0.54, 100, 100, shared=9).outcome == "inconclusive"
    assert Blind(0.5, 0.46, 0.54, 100, 100, shared=10).outcome == "passed"
    assert Blind(0.5, 0.46, 0.54, 100, 100).outcome == "passed", "of pictures"


def test_what_tells_roles_apart_is_named_in_every_script() -> None:
    rng = random.Random(0)
    common = [f"word{place}" for place in range(100)]

    def role(extra: str, change: Any = lambda text: text) -> list[str]:
        return [change(" ".join(rng.choices(common, k=30)) + extra) for _ in range(60)]

    assert set(telling_words(role(""), role(" 我们"))[0][:3]) == {"我", "们", "我们"}
    assert set(telling_words(role(" {x}"), role(""))[1][:3]) == {"x", "{", "}"}
    assert telling_words(role(""), role("", str.upper))[0][0] == "(share of capitals)"
    assert "(share of line breaks)" in telling_words(role(""), role("", lambda text: text.replace(" ", "\n")))[0]
    assert telling_words(role("\u200b"), role(""))[1][0] == "⟨U+200B⟩", "shown, not printed"


def zh(shared_folder: Path, role: str) -> list[str]:
    lines = (shared_folder / "cases" / f"zh_{role}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines]


def test_chinese_roles_without_a_common_character_are_contradicted(shared_folder: Path, tmp_path: Path) -> None:
    path = write_audit(
        tmp_path,
        tmp_path,
        corpus=write_corpus(tmp_path, {role: zh(shared_folder, role) for role in ("unseen", "audit")}),
    )
    plan = make_plan(load_config(str(path)))
    test = blind_test(plan.shards, "unseen", plan.config)
    assert test.outcome == "failed"
    assert test.auc > 0.999
    assert test.shared >= 10
    checked = plan_checks(plan)
    assert any(line.startswith("words that tell them apart: ") for line in checked["lines"])
    known = set("".join(zh(shared_folder, "unseen")))
    audited, of_unseen = checked["words"]["unseen"]["audit"], checked["words"]["unseen"]["unseen"]
    assert all(set(word) <= known for word in of_unseen if not word.startswith("("))
    assert not any(set(word) & known for word in audited if not word.startswith("(") and word not in "，。")


def test_ten_times_as_many_alike_chinese_documents_pass(shared_folder: Path) -> None:
    """Each is a rearrangement of the case's clauses."""
    clauses = [clause for text in zh(shared_folder, "audit") for clause in text.split("，")]
    rng = random.Random(0)
    made = ["，".join(rng.choices(clauses, k=8)) for _ in range(4_000)]
    held = hold_out(made, Compared.of(np.arange(4_000) >= 2_000), 0)
    assert blind_result(held).outcome == "passed"
    assert not tail_test(held, [("s", row) for row in range(4_000)]).significant
