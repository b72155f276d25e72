"""ROUGE and the SaMIA scores are those of the method's definition, and of recorded numbers exactly."""

# ruff: noqa: RUF001

import json
import math
import unicodedata
import zlib
from dataclasses import replace

import pytest

from pipeline.corpus.documents import Document, id_key
from pipeline.corpus.scripts import count_units, units
from pipeline.detectors.base import Continuations, Continued, Evidence, plan_passes
from pipeline.detectors.continuations import coverage_score
from pipeline.detectors.registry import needed_continuations, parse_detectors
from pipeline.detectors.samia import cut_words, prefix_and_reference, rouge, samia_score
from pipeline.models.tokens import count_words, tokenize
from pipeline.passes.generate import Prompt, Sampling, continuations
from pipeline.plan.description import build_config
from pipeline.stages.base import Output, Placement
from pipeline.stages.registry import plan_stages
from pipeline.stages.sample import cut_in_two, make_task

REFERENCE = "the cat sat on the mat"


def test_rouge_and_scores_are_the_recorded_ones_exactly(shared_folder):
    for row in json.loads((shared_folder / "golden" / "samia_rouge.json").read_text()):
        texts, words = [candidate["text"] for candidate in row["candidates"]], row["reference"].split()
        for candidate in row["candidates"]:
            given = candidate["text"].split()
            assert rouge(given, words) == candidate["rouge1_recall"]
            assert rouge(given, words, 1, "precision") == candidate["rouge1_precision"]
            assert rouge(given, words, 2, "recall") == candidate["rouge2_recall"]
        assert samia_score(texts, row["reference"]) == row["samia"]
        assert samia_score(texts, row["reference"], compressed=True) == row["samia_zlib"]


@pytest.mark.parametrize(
    ("candidate", "n", "kind", "expected"),
    [
        ("the the the the", 1, "recall", 2 / 6),  # counted as often as it is in both
        ("the the the the", 1, "precision", 2 / 4),
        ("The cat", 1, "recall", 1 / 6),  # case matters
        ("on the mat the cat", 2, "recall", 3 / 5),
        ("on the mat the cat", 2, "precision", 3 / 4),
        ("mat", 2, "recall", 0.0),  # no 2-gram in it
        ("", 1, "precision", 0.0),
    ],
)
def test_rouge_counts_each_ngram_as_often_as_it_is_in_both(candidate, n, kind, expected):
    assert rouge(candidate.split(), REFERENCE.split(), n, kind) == expected


def test_a_longer_candidate_gains_nothing_unless_all_its_words_are_asked_for():
    assert math.isnan(rouge(["a"], [], 1))
    assert math.isnan(samia_score(["a b"], "one", n=2))
    candidate = "no no no no no no the cat sat on the mat"
    assert samia_score([candidate], REFERENCE) == 0.0
    assert samia_score([candidate], REFERENCE, candidate_words="all") == 1.0
    assert samia_score([candidate, REFERENCE], REFERENCE) == 0.5
    candidate = "\n the  cat sat on the mat and more and more"
    size = len(zlib.compress(b"the  cat sat on the mat"))
    assert samia_score([candidate], REFERENCE, compressed=True) == size
    assert samia_score([candidate], REFERENCE, compressed=True, candidate_words="all") > size
    longer = " ".join(f"{i * i % 127:b}" for i in range(100))  # at level 7 a byte more
    assert samia_score([longer] * 2, longer, compressed=True) == len(zlib.compress(longer.encode(), 6))


def test_a_text_is_cut_after_whole_words_and_keeps_its_whitespace():
    text = " one\ttwo \n three "
    assert [cut_words(text, count) for count in (0, 1, 2, 3, 9, None)] == [
        "", "one", "one\ttwo", "one\ttwo \n three", "one\ttwo \n three", "one\ttwo \n three",
    ]  # fmt: skip
    assert (cut_words("one", 0), prefix_and_reference("one")) == ("", ("", "one"))
    assert prefix_and_reference(text, 0.5) == ("one", "two \n three")
    assert prefix_and_reference(text, 0.1) == ("", "one\ttwo \n three")
    words = " ".join(map(str, range(33)))
    prefix, reference = prefix_and_reference(words)
    assert (len(prefix.split()), f"{prefix} {reference}") == (16, words)


def test_detectors_that_differ_in_what_they_count_share_their_continuations():
    given = {"draws": [2, 5], "n": [1, 2], "kind": ["recall", "precision"]}
    detectors = parse_detectors([{"samia": given}, {"samia_zlib": {"draws": 3, "prefix_ratio": 0.25}}])
    assert len(detectors) == 9
    assert len(plan_passes(detectors)) == 2
    assert needed_continuations(detectors) == {Continued(): 5, Continued(prefix_ratio=0.25): 3}
    texts = ["the cat sat", "the mat", "no", "no", "no"]
    evidence = Evidence([""], {}, continuations={Continued(): [Continuations(REFERENCE, texts)]})
    scores = {d.column: d.score(evidence).item() for d in detectors if d.name == "samia"}
    assert scores["samia(draws=2, n=1, kind=recall)"] == (3 / 6 + 2 / 6) / 2
    assert scores["samia(draws=5, n=2, kind=precision)"] == (2 / 2 + 1 / 1) / 5


def test_a_draw_ends_with_the_words_of_the_rest_or_where_the_model_likes():
    text = "one two three four five"
    document = Document(0, "a", text, None)
    task = cut_in_two(document, len(text), Continued())
    assert (task.prefix, task.reference, task.words) == ("one two", "three four five", 3)
    assert task.max_new_tokens == 16 + len("three four five") // 3
    task = cut_in_two(document, len("one two three"), Continued(candidate_words="all"))
    assert (task.prefix, task.reference, task.words, task.max_new_tokens) == ("one", "two three", None, 1024)
    assert cut_in_two(document, len("one"), Continued()) is None
    assert cut_in_two(document, len(text), Continued(prefix_ratio=0.1)) is None


def test_a_worker_draws_by_seed_id_and_ratio_behind_what_the_model_has_room_for(tiny_model_folder):
    given = {"run": "run", "model": {"path": str(tiny_model_folder)}, "corpus": {"audit": {"path": "a"}}, "seed": 3}
    stage, _ = plan_stages(build_config({**given, "detectors": [{"samia": {"draws": 2, "prefix_ratio": 0.3}}]}))
    worker, output = stage.make(stage, Placement()), Output()
    lm = worker.lm = replace(worker.lm, max_tokens=9)
    text = "the river and the quiet garden in winter " * 3
    worker.work(worker.prepare([Document(0, "a", text, None)], None, output), output)
    prefix, rest = prefix_and_reference(text[: tokenize(lm.tokenizer, [text], 9)[0].kept], 0.3)
    ids, limit = lm.tokenizer(prefix)["input_ids"], 16 + len(rest) // 3
    prompt = Prompt((id_key("a"), 300_000), ids, range(2), len(rest.split()), limit)
    (draws,) = continuations(lm, [prompt], Sampling(1.0, 50, 1.0), 3)
    assert (output.rows[0]["reference"], output.tokens) == (rest, sum(len(draw.ids) for draw in draws))
    assert output.rows[0]["continuations"] == [draw.text for draw in draws]


def test_a_word_stands_for_a_token_where_the_tokenizer_is_unknown():
    short, long = count_words(["one two", " one  two three "], 2)
    assert (len(short.ids), short.truncated, short.kept) == (2, False, 7)
    assert (len(long.ids), long.truncated, long.kept) == (2, True, len(" one  two"))


CHINESE = "".join(chr(0x4E00 + 37 * place % 3_000) for place in range(690))
UNSPACED = {
    "Chinese": CHINESE,
    "Japanese": "これは日本語の文章で、ABCという言葉を含みます。" * 20,
    "Thai": "ภาษาไทยไม่มีช่องว่างระหว่างคำ แต่มีระหว่างวลี" * 20,
    "Khmer": "ភាសាខ្មែរមិនមានដកឃ្លារវាងពាក្យទេ" * 20,
    "Tibetan": "བོད་སྐད་ཀྱི་ཡི་གེ" * 20,
    "a sequence": "ACGTTGCA" * 60,
}


@pytest.mark.parametrize("script", UNSPACED)
def test_a_text_without_blanks_is_cut_and_compared_by_characters(script):
    text = UNSPACED[script]
    count = count_units(text)
    assert count > 100
    task = cut_in_two(Document(0, "a", text, None), len(text), Continued())
    assert (count_units(task.prefix, True), task.words) == (int(0.5 * count), count_units(task.reference))
    assert task.words == count - int(0.5 * count)
    assert "".join((task.prefix + task.reference).split()) == "".join(text.split()).removesuffix("་")
    more = f"{task.reference}。{task.prefix}"
    assert samia_score([task.reference], task.reference) == samia_score([more], task.reference) == 1.0
    assert coverage_score([more], task.reference) == 11.0
    half = "".join(units(task.reference, True)[: task.words // 2])
    assert 0.4 < samia_score([half], task.reference, n=6) < 0.51
    assert samia_score(["no such word"], task.reference) == 0.0


def test_rouge_of_characters_is_its_definition_for_composed_and_decomposed_ones():
    assert samia_score(["我不喜欢"], "我喜欢猫") == 3 / 4
    assert samia_score(["我不喜欢"], "我喜欢猫", n=2) == 1 / 3
    assert samia_score(["我不喜欢狗"], "我喜欢猫", kind="precision", candidate_words="all") == 3 / 5
    assert samia_score(["好好好好"], "好人") == 1 / 2, "counted as often as it is in both"
    assert coverage_score(["x我喜欢"], "我喜欢猫") == 3 / 4 + 3 / 4
    assert samia_score(["ガギグ"], unicodedata.normalize("NFD", "ガギグ")) == 1.0
    assert samia_score(["café"], unicodedata.normalize("NFD", "café au lait")) == 1 / 3
    english = "the cat 猫 sat"
    assert samia_score([english], english) == 1.0
    assert units(english) == english.split()


@pytest.mark.parametrize(("text", "count"), [("猫", "1 character"), ("cat", "1 word"), ("สวั", "2 characters")])
def test_only_a_text_that_leaves_no_two_parts_is_too_short(text, count, tiny_model_folder):
    given = {"run": "run", "model": {"path": str(tiny_model_folder)}, "corpus": {"audit": {"path": "a"}}}
    stage, _ = plan_stages(build_config({**given, "detectors": [{"samia": {"prefix_ratio": 0.3}}]}))
    output = Output()
    assert make_task(stage, Document(0, "a", text, None), len(text), output) is None
    _, reason, message = output.refused[0]
    assert (reason, message.split(":")[0]) == ("too_short", count)


def test_an_endpoint_gets_at_most_max_tokens_characters_of_a_script_without_blanks(shared_folder):
    rows = [json.loads(line) for line in (shared_folder / "cases" / "zh_long.jsonl").read_text().splitlines()]
    for row in rows:
        (counted,) = count_words([row["text"]], 2_048)
        assert (len(counted.ids), counted.kept) == (min(2_048, len(row["text"])), min(2_048, len(row["text"])))
        assert counted.truncated == (len(row["text"]) > 2_048)
        assert cut_in_two(Document(0, "a", row["text"], None), counted.kept, Continued()) is not None
    mixed = "中" * 10 + " word " + "文" * 10
    (counted,) = count_words([mixed], 12)
    assert mixed[: counted.kept] == "中" * 10 + " word 文"


def test_draws_of_a_text_without_blanks_are_scored_by_a_real_model(smollm2, smollm2_file):
    given = {"run": "run", "model": {"path": str(smollm2_file)}, "corpus": {"audit": {"path": "a"}}, "max_tokens": 120}
    stage, _ = plan_stages(build_config({**given, "detectors": [{"samia": {"draws": 2}}]}))
    worker, output = stage.make(stage, Placement()), Output()
    worker.lm = smollm2
    text = "今天天气很好，我们去公园散步，然后回家吃晚饭。" * 3
    worker.work(worker.prepare([Document(0, "a", text, None)], None, output), output)
    row = output.rows[0]
    count = count_units(row["reference"])
    assert count > 10
    for draw in row["continuations"]:
        assert count <= count_units(draw, True) <= 3 * count + 10 or len(draw) < count, "it ends soon after its words"
    assert 0 <= samia_score(row["continuations"], row["reference"]) <= 1
