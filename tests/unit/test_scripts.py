"""Words stand between blanks; in scripts without blanks characters take their place, and English texts lose nothing."""

# ruff: noqa: RUF001

import random
import sys
import unicodedata

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.corpus.scripts import (
    UNSPACED,
    by_characters,
    count_units,
    cut_units,
    has_unspaced,
    unit_spans,
    units,
)

OF_UNSPACED = (
    *("Han", "Hiragana", "Katakana", "Bopomofo", "Thai", "Lao", "Khmer", "Myanmar", "Tibetan", "Yi", "Javanese"),
    *("Tai_Le", "New_Tai_Lue", "Tai_Tham", "Tai_Viet", "Balinese", "Tangut", "Nushu", "Khitan_Small_Script", "Ahom"),
)
SENTENCES = {
    "English": "The quick brown fox jumps over the lazy dog, twice.",
    "Russian": "Быстрая лиса перепрыгнула через ленивую собаку.",
    "Arabic": "قفز الثعلب السريع فوق الكلب الكسول",
    "Hebrew": "השועל המהיר קפץ מעל הכלב העצלן",
    "Hindi": "तेज़ भूरी लोमड़ी आलसी कुत्ते के ऊपर कूदती है",
    "Tamil": "விரைவான நரி சோம்பேறி நாயின் மீது தாவுகிறது",
    "Korean": "빠른 갈색 여우가 게으른 개를 뛰어넘는다",
    "Vietnamese": "Con cáo nâu nhanh nhẹn nhảy qua con chó lười",
    "Amharic": "ፈጣኑ ቀበሮ በሰነፉ ውሻ ላይ ዘለለ",
    "Georgian": "სწრაფი მელა გადაახტა ზარმაც ძაღლს",
    "Greek": "Η γρήγορη αλεπού πηδά πάνω από το σκυλί",
}


def test_the_scripts_without_blanks_are_those_of_unicode() -> None:
    of_script = regex.compile("".join(["[", *(rf"\p{{Script={name}}}" for name in OF_UNSPACED), "]"]))
    written, letter = regex.compile(f"[{UNSPACED}]"), regex.compile(r"[\p{L}\p{M}\p{N}]")
    for code in range(sys.maxunicode):
        sign = chr(code)
        if of_script.match(sign) and letter.match(sign):
            assert written.match(sign), hex(code)
        elif written.match(sign) and regex.match(r"[\p{Letter}--[\p{Common}]]", sign, regex.V1):
            assert not regex.match(r"[\p{Latin}\p{Greek}\p{Cyrillic}\p{Arabic}\p{Hangul}\p{Devanagari}]", sign)


@pytest.mark.parametrize("language", SENTENCES)
@pytest.mark.parametrize("form", ["NFC", "NFD", "NFKC"])
def test_words_of_scripts_with_blanks_stand_between_blanks(language: str, form: str) -> None:
    text = unicodedata.normalize(form, SENTENCES[language])
    assert not by_characters(text)
    assert not has_unspaced(text)
    assert units(text) == units(text, characters=True) == text.split()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("我有iPhone手机，and more。」", ["我", "有", "iPhone", "手", "机", "，", "and", "more", "。", "」"]),
        ("東京マラソン 2024年", ["東", "京", "マ", "ラ", "ソ", "ン", "2024", "年"]),
        ("か\u3099き", ["か\u3099", "き"]),
        ("ผมชื่อ วิชัย", ["ผ", "ม", "ชื่", "อ", "วิ", "ชั", "ย"]),
        ("ភ្នំពេញ", ["ភ្នំ", "ពេ", "ញ"]),
        ("བོད་སྐད།", ["བོ", "ད", "སྐ", "ད", "།"]),
        ("ไทย\u200bไม่มี", ["ไ", "ท", "ย", "ไ", "ม่", "มี"]),
        ("𠀀𠀁x", ["𠀀", "𠀁", "x"]),
        ("ACGT" * 20, list("ACGT" * 20)),
        ("a+b/" * 60, list("a+b/" * 60)),
    ],
)
def test_characters_with_their_marks_are_units_and_words_between_them_stay_whole(
    text: str, expected: list[str]
) -> None:
    assert by_characters(text)
    assert units(text) == expected


def test_a_text_is_read_by_characters_only_where_these_are_most_of_its_units() -> None:
    english = " ".join(["word"] * 80)
    for foreign in ("精準扶貧", "(东京马拉松)", "X" * 100, "https://example.org/" + "a" * 200):
        assert units(f"{english} {foreign}") == f"{english} {foreign}".split()
    assert by_characters("几个字 and four words here") is False
    assert by_characters("这里有几个字 and four words here") is True
    assert count_units("") == count_units(" \n") == 0
    assert not by_characters("")


@settings(max_examples=300)
@given(st.text(st.sampled_from("ab \n。，\u4e00\u4e01\u3042\u0e01\u0e34\u0301\u200d\U00020000é한"), max_size=40))
def test_spans_units_and_cuts_agree(text: str) -> None:
    for characters in (True, False, None):
        found = units(text, characters)
        assert [text[begin:end] for begin, end in unit_spans(text, characters)] == found
        assert count_units(text, characters) == len(found)
        assert not any(unit.isspace() or not unit for unit in found)
        for count in (0, 1, 3, 100):
            assert units(text[: cut_units(text, count, characters)], bool(characters)) == found[:count] or (
                characters is None
            )


def test_a_long_text_is_read_only_as_far_as_needed() -> None:
    rng = random.Random(0)
    text = "".join(chr(rng.randrange(0x4E00, 0x9FFF)) for _ in range(1_000_000))
    assert cut_units(text, 2_048) == 2_048
    assert text[slice(*next(iter(unit_spans(text))))] == text[0]
