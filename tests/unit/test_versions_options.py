"""Orders of the options of multiple-choice items as versions, against brute force, and what is left out by rule."""

# ruff: noqa: RUF001 (letters of many scripts)

import itertools
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from benchmarks.small_model import WORDS
from pipeline.config.corpus import VersionsConfig
from pipeline.config.yaml import build
from pipeline.corpus.options import MOST_ORDERS, order_options, why_left_out
from pipeline.corpus.reasons import Reason
from pipeline.errors import UserError
from pipeline.selection.version_scores import VersionPart, VersionScores, joined_versions
from pipeline.store.files import Store
from pipeline.store.receipts import read_receipts
from tests.helpers.commands import ended
from tests.helpers.marked_runs import run_here, versions_audit, write_items

TEMPLATE = "{question}\n{choices}"


def made(options: Any) -> tuple[list[str], int, list[str], list[bytes]]:
    return order_options(options, "choices", {"question": "Which?"}, TEMPLATE)


def text_of(options: Any) -> str:
    return "Which?\n" + "\n".join(f"{letter}. {one}" for letter, one in zip("ABCDEFG", options, strict=False))


@pytest.mark.parametrize("number", [2, 3, 4, 5])
def test_the_published_order_is_uniform_among_versions_and_they_do_not_depend_on_it(number: int) -> None:
    seen: dict[tuple[str, ...], Counter[int]] = {}
    for order in itertools.permutations(WORDS[:number]):
        texts, index, _, _ = made(order)
        assert texts[index] == text_of(order)
        seen.setdefault(tuple(texts), Counter())[index] += 1
    orders = sorted(map(text_of, itertools.permutations(WORDS[:number])))
    assert sorted(itertools.chain.from_iterable(seen)) == orders
    k = min(MOST_ORDERS, len(orders))
    assert len(seen) == len(orders) // k
    assert all(counts == Counter(range(k)) for counts in seen.values())


def test_a_site_is_a_position_and_its_form_the_rank_of_the_length_there() -> None:
    options = ["aa", "b", "cccc"]
    texts, _, kinds, forms = made(options)
    assert kinds == ["position 1", "position 2", "position 3"]
    for text, form in zip(texts, forms, strict=True):
        lengths = [len(line[3:]) for line in text.splitlines()[1:]]
        assert list(form) == [{1: 0, 2: 1, 4: 2}[length] for length in lengths]


LEFT = {
    "too few or many options": [["alone"], list(WORDS[:8])],
    "equal options": [["same", "Same ", "other"]],
    "ordered options": [
        ["3", "7", "12.5"],
        ["1/2", "3/4"],
        ["$1,200", "$30"],
        ["3 cm", "20 cm"],
        ["20%", "5%"],
        ["12 March 2024", "March 3, 1999"],
        ["one", "three"],
        ["i", "iv", "x"],
        ["3 apples", "4 apples"],
        ["1990s", "1980s"],
    ],
    "options that refer to others": [
        ["water", "fire", "All of the above"],
        ["water", "fire", "none of these"],
        ["water", "fire", "Both A and B"],
        ["I only", "II only", "I and II only"],
        ["water", "fire", "Neither"],
        ["water", "fire", "It cannot be determined"],
        ["water", "fire", "The same as option B"],
        ["water", "fire", "Answer (C) is wrong"],
        ["water", "fire", "Only statement II holds"],
        ["water", "fire", "earth", "A and B are correct"],
        ["water", "fire", "earth", "A or B, but not C"],
        ["water", "fire", "earth", "Both are true"],
        ["water", "fire", "Either of the first two"],
        ["water", "fire", "The above are all wrong"],
        ["water", "fire", "Same as (B)"],
        ["water", "fire", "I don't know"],
        ["water", "fire", "Can't tell"],
        ["water", "fire", "Other (please state)"],
        ["water", "fire", "Both water and fire."],
        ["red", "blue", "red and blue", "green"],
        ["agua", "fuego", "Todas las anteriores"],
        ["água", "fogo", "nenhuma das alternativas"],
        ["eau", "feu", "Aucune des réponses"],
        ["Wasser", "Feuer", "keine der genannten"],
        ["acqua", "fuoco", "Nessuna delle precedenti"],
        ["вода", "огонь", "все вышеперечисленные"],
        ["вода", "огонь", "\u0410 и Б"],
        ["su", "ateş", "hiçbiri"],
        ["nước", "lửa", "Tất cả các đáp án trên"],
        ["水", "火", "以上都对"],
        ["水", "火", "A和B"],
        ["水", "火", "①と②"],
        ["红色", "蓝色", "红色和蓝色"],
        ["みず", "ひ", "上記のすべて"],
        ["물", "불", "위의 모두"],
        ["ماء", "نار", "جميع ما سبق"],
        ["पानी", "आग", "उपरोक्त सभी"],
        ["น้ำ", "ไฟ", "ถูกทุกข้อ"],
    ],
}


@pytest.mark.parametrize(("cause", "options"), [(cause, one) for cause, all_ in LEFT.items() for one in all_])
def test_items_whose_options_have_an_order_are_left_out_whatever_order_was_published(
    cause: str, options: list[str]
) -> None:
    (found,) = {why_left_out(order) for order in itertools.islice(itertools.permutations(options), 200)}
    assert found is not None
    assert (found.reason, found.cause) == (Reason.NOT_PERMUTABLE, cause)


@pytest.mark.parametrize(
    "line",
    [
        "Greek|νερό|φωτιά|Όλα τα παραπάνω|Κανένα από τα παραπάνω|Όλες οι απαντήσεις|Και τα δύο|ΟΛΑ ΤΑ ΠΑΡΑΠΑΝΩ",
        "Swedish|vatten|eld|Alla ovanstående|Inget av ovanstående|Inget av alternativen|Alla svar är rätt",
        "Danish|vand|ild|Alle ovenstående|Ingen af ovenstående|Alle svar er rigtige|Begge",
        "Norwegian|vann|ild|Alle alternativene|Ingen av de ovennevnte|Alle ovenfor",
        "Finnish|vesi|tuli|Kaikki edellä mainitut|Ei mikään edellä mainituista|Kaikki yllä olevat|Molemmat",
        "Czech|voda|oheň|Všechny výše uvedené|Žádná z výše uvedených|Nic z uvedeného|Všechny odpovědi jsou správné",
        "Slovak|voda|oheň|Všetky vyššie uvedené|Žiadna z uvedených",
        "Hungarian|víz|tűz|A fentiek mindegyike|Egyik sem|Mindkettő|A fentiek közül egyik sem",
        "Romanian|apă|foc|Toate cele de mai sus|Niciuna dintre cele de mai sus|Toate variantele|Niciun răspuns",
        "Ukrainian|вода|вогонь|Усе вищезазначене|Жоден із перелічених|Усі відповіді правильні|Нічого з переліченого",
        "Bulgarian|вода|огън|Всички изброени|Нито едно от изброените|Всички посочени",
        "Serbian|вода|ватра|Све наведено|Ништа од наведеног",
        "Croatian|voda|vatra|Sve navedeno|Ništa od navedenog|Svi odgovori su točni",
        'Hebrew|מים|אש|כל התשובות נכונות|אף תשובה אינה נכונה|כל האמור לעיל|כל הנ"ל',
        "Persian|آب|آتش|همه موارد|هیچ\u200cکدام|هر دو مورد|تمام موارد بالا",
        "Arabic|ماء|نار|كل ما ذكر|لا شيء مما سبق|كل ما سبق",
        "Urdu|پانی|آگ|مندرجہ بالا تمام|ان میں سے کوئی نہیں",
        "Hindi|पानी|आग|इनमें से कोई नहीं|ऊपर के सभी|ये सभी",
        "Bengali|জল|আগুন|উপরের সবগুলো|উপরের কোনোটিই নয়|কোনটিই নয়",
        "Tamil|நீர்|தீ|மேற்கண்ட அனைத்தும்|இவை அனைத்தும்",
        "Telugu|నీరు|నిప్పు|పైవన్నీ|పైవేవీ కాదు",
        "Thai|น้ำ|ไฟ|ไม่มีข้อใดถูก|ทั้งหมดข้างต้น|ข้อ ก และ ข",
        "Vietnamese|nước|lửa|Tất cả đều đúng|Không có đáp án nào|Cả A và B",
        "Indonesian|air|api|Semua benar|Tidak ada yang benar|Semua di atas",
        "Turkish|su|ateş|Yukarıdakilerin hepsi|Hiçbiri|Her ikisi de",
        "Korean|물|불|모두 맞다|정답 없음|위 모두",
        "Japanese|水|火|すべて正しい|どれも違う|該当なし",
        "Armenian|ջուր|կրակ|Բոլոր վերոնշյալները|Նշվածներից ոչ մեկը|Վերը նշված բոլորը",
        "Georgian|წყალი|ცეცხლი|ყველა ზემოთ ჩამოთვლილი|არც ერთი|ყველა პასუხი სწორია",
        "Lithuanian|vanduo|ugnis|Visi aukščiau išvardyti|Nė vienas iš aukščiau",
        "Latvian|ūdens|uguns|Viss iepriekš minētais",
        "Estonian|vesi|tuli|Kõik eelnevad|Mitte ükski",
        "Catalan|aigua|foc|Totes les anteriors|Cap de les anteriors",
        "French|eau|feu|Toutes|Les deux réponses",
    ],
    ids=lambda line: line.partition("|")[0],
)
def test_all_of_the_above_is_left_out_in_many_languages(line: str) -> None:
    language, first, second, *referring = line.split("|")
    assert why_left_out([first, second]) is None, language
    for last in referring:
        for form in ("NFC", "NFD"):
            left = why_left_out([first, second, unicodedata.normalize(form, last)])
            assert left is not None, f"{last} ({form})"
            assert left.cause == "options that refer to others"


@pytest.mark.parametrize(
    "options",
    [
        ["an answer a day", "a choice i made", "option Blue"],
        ["a red car", "a blue car"],
        ["2 dogs", "3 cats"],
        ["Both parents agree", "Rain"],
        ["civil", "mild"],
        ["bed", "bye", "eye"],
        ["Band A", "Type B"],
        ["Na", "K", "NaCl"],
        ["18岁以上的人", "孩子"],
        ["di atas meja", "di sana"],
        ["an early bird", "birds"],
    ],
)
def test_other_items_stay(options: list[str]) -> None:
    assert why_left_out(options) is None


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"template": "{question}"}, r"does not name the options: put \{choices\} where they stand"),
        ({"template": "{choices}"}, "names the options alone"),
        ({"template": "{question} {choices!r}"}, "names no column"),
        ({"template": "{question} {} {choices}"}, "names no column"),
        ({"index": "answer"}, "permute makes the versions: leave out index"),
        ({"template": None}, "permute and template go together"),
    ],
)
def test_settings_that_make_no_versions_are_refused_in_one_line(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        build(VersionsConfig, {"permute": "choices", "template": TEMPLATE, **changed})


def test_an_item_that_stands_twice_is_used_once() -> None:
    digests = np.repeat(np.array([1, 2, 2, 1, 5, 6, 6, 5], dtype=np.uint8), 32).reshape(8, 32)

    def ids(last: int) -> tuple[str, ...]:
        digests[3] = last
        scores = VersionScores(np.arange(8.0), np.arange(0, 9, 2), np.array([0, 1, 0, 1]), tuple("badc"), digests)
        return joined_versions(
            [VersionPart(scores, pa.array([[]] * 4, pa.list_(pa.string())), pa.array([[b""] * 2] * 4))]
        ).ids

    assert ids(3) == ("a", "b", "c")
    assert ids(1) == ("a", "c")


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_run_permutes_the_options_of_a_benchmark_and_counts_what_it_leaves_out(
    tmp_path: Path, tiny_model_folder: Path, suffix: str
) -> None:
    rng = np.random.default_rng(0)
    drawn = [
        rng.permutation(list(itertools.combinations(WORDS[:20], size)))[:15] for size in (3, 4)
    ]  # no two items have the same
    rows = [
        {"question": f"Which is {number}?", "choices": rng.permutation(drawn[number % 2][number // 2]).tolist()}
        for number in range(30)
    ]
    rows += [rows[0], *({"question": "How many?", "choices": one} for one in (["3", "4"], ["mild", "None of these"]))]
    source = {"path": str(write_items(tmp_path, suffix, rows))}
    source["versions"] = {"permute": "choices", "template": TEMPLATE}
    assert run_here(tmp_path, versions_audit(tmp_path, tiny_model_folder, source)) == 0
    store = Store(str(tmp_path / "run"))
    counted = sum((Counter(receipt.reasons) for receipt in read_receipts(store, "score")), Counter[str]())
    assert counted == {"not_permutable": 2}
    files = [receipt.quarantine for receipt in read_receipts(store, "score") if receipt.quarantine]
    left = [row for file in files for row in store.read_table(file).to_pylist()]
    assert {row["reason"] for row in left} == {"not_permutable"}
    assert {row["message"].partition(":")[0] for row in left} == {"ordered options", "options that refer to others"}
    assert ended("verdict", tmp_path / "run") == 0
    assert store.read_json("verdict.json")["versions"]["documents"] == 30, "no two have the same options"
    assert ended("pack", tmp_path / "run", tmp_path / "bundle") == 0
    assert ended("verify", tmp_path / "bundle") == 0
