"""What needs no model is checked before one is loaded: shared texts, repeated ids, words that tell roles apart."""

import gzip
import io
import json
import random
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from benchmarks.small_model import WORDS
from pipeline.checks import blind as blind_wording
from pipeline.checks.overlap import find_overlaps
from pipeline.errors import UserError
from pipeline.plan.description import build_config, load_config
from pipeline.plan.forecast import forecast
from pipeline.plan.preflight import RUN, Effort, begin_checks, check_before_scoring, check_documents, plan_checks
from pipeline.results.document_checks import stored_preflight
from pipeline.run.plan import Plan, make_plan
from pipeline.run.scored import read_scored
from pipeline.selection.procedures.bh import BH
from pipeline.selection.procedures.record import Rule
from pipeline.selection.ranked import fewest_selectable
from pipeline.store.files import Store
from pipeline.store.receipts import sealed
from ray_jobs.progress import Reporter
from ray_jobs.start import Checks
from tests.helpers.commands import user_error
from tests.helpers.finished import score_all
from tests.helpers.made_up import sentence, write_corpus

HEADER = "licensed to everybody under the terms of the licence "


def text(seed: int) -> str:
    words = np.random.default_rng(seed).choice(WORDS, 100).tolist()
    return f"text {seed % 100} {' '.join(words)}"


def planned(tmp_path: Path, audit: Sequence[str], unseen: Sequence[str], **settings: Any) -> Plan:
    rows: dict[str, list[dict[str, Any]]] = {}
    group_of = settings.pop("group_of", None)
    for role, texts in (("audit", audit), ("unseen", unseen)):
        ids = settings.pop(f"{role}_ids", [f"{role[0]}{i}" for i in range(len(texts))])
        rows[role] = [{"id": doc_id, "text": each} for doc_id, each in zip(ids, texts, strict=True)]
        if group_of is not None:
            rows[role] = [{**row, "author": group_of(role, i)} for i, row in enumerate(rows[role])]
    described = {
        "run": str(tmp_path / "run"),
        "model": {"path": "m"},
        "corpus": write_corpus(tmp_path, rows, **({} if group_of is None else {"group": "author"})),
        "detectors": ["loss"],
        "selections": [{"name": "members", "detectors": ["loss"], "alpha": 0.2}],
        "resources": {"shard_bytes": 1000},
        **settings,
    }
    return make_plan(build_config(described))


WHOLE = {"shard_bytes": 1 << 20}
"""Shards whose documents are all compared by the blind test."""


def dated(word: str) -> list[str]:
    """100 texts that end with a word."""
    return [f"{text(i)} {word} {word}" for i in range(200, 300)]


def said(plan: Plan) -> list[str]:
    lines: list[str] = []
    check_before_scoring(plan, Store(plan.config.run), lines.append)
    return lines


def test_a_near_duplicate_in_two_roles_stops_and_names_both(tmp_path: Path) -> None:
    audit = [*map(text, range(30)), text(70)]
    unseen = [*map(text, range(100, 130)), f"Corrected by the desk on the next day: {text(70).upper()}\n"]
    copied = planned(tmp_path, audit, unseen)
    line = "1 of 31 unseen documents are near-duplicates of audit documents (0 of them with the same text; 1 audit docu"
    assert user_error(said, copied).startswith(line)
    with pytest.raises(UserError, match=r"first: a30 and u30, (9\d|100)%\); remove them, or set overlap: drop"):
        plan_checks(copied)
    assert stored_preflight(Store(copied.config.run), copied.shards, 0) is None, "the corrected corpus is read again"
    equal = planned(tmp_path, audit, [*unseen[:30], f"  {text(70).upper()}\n"])
    assert "(1 of them with the same text" in user_error(plan_checks, equal)
    assert plan_checks(planned(tmp_path, audit, unseen, near_copies=1.0))["overlap"]["unseen"]["n_calibration"] == 0
    dropped = planned(tmp_path, audit, unseen, overlap="drop")
    said(dropped)
    kept = stored_preflight(Store(dropped.config.run), dropped.shards, 0)
    assert (kept.overlap["unseen"].n_calibration, kept.overlap["unseen"].n_equal) == (1, 0)


UNSPACED = {"Han": 0x4E00, "Hiragana": 0x3041, "Thai": 0xE01, "Khmer": 0x1780, "Myanmar": 0x1000}


@pytest.mark.parametrize("script", UNSPACED)
def test_texts_without_blanks_are_compared_too(tmp_path: Path, script: str) -> None:
    """No blank, no comma: such a text was left out as one word."""
    rng = random.Random(script)
    texts = ["".join(chr(UNSPACED[script] + rng.randrange(0x20)) for _ in range(200)) for _ in range(60)]
    changed = texts[7][:100] + chr(UNSPACED[script]) + texts[7][101:]
    near = planned(tmp_path, texts[:30], [*texts[30:], changed])
    assert user_error(said, near).startswith("1 of 31 unseen documents are near-duplicates of audit documents (0 of")
    equal = planned(tmp_path, texts[:30], [*texts[30:], texts[8]])
    assert "(1 of them with the same text" in user_error(plan_checks, equal)
    assert plan_checks(planned(tmp_path, texts[:30], texts[30:]))["overlap"]["unseen"]["n_calibration"] == 0


def test_no_run_begins_whose_calibration_documents_are_all_audited_too(tmp_path: Path) -> None:
    audit = list(map(text, range(30)))
    again = planned(tmp_path, audit, audit[:12], overlap="drop")
    for check in (said, plan_checks):
        with pytest.raises(UserError, match=r"^no calibration documents: all 12 unseen documents .*first: a0 and u0"):
            check(again)
    one_left = planned(tmp_path, audit, [*audit[:12], text(200)], overlap="drop")
    assert plan_checks(one_left)["overlap"]["unseen"]["n_calibration"] == 12


def test_near_duplicates_within_a_role_are_a_note(tmp_path: Path) -> None:
    audit = [*map(text, range(30)), text(7), f"Corrected: {text(9)}"]
    plan = planned(tmp_path, audit, list(map(text, range(100, 130))))
    copies = check_documents(plan, RUN).copies
    assert (copies["audit"].n_copies, copies["audit"].n_families, copies["unseen"].n_copies) == (4, 2, 0)
    assert [family.ids for family in copies["audit"].families] == [["a7", "a30"], ["a9", "a31"]]
    note = "4 of 32 audited documents are near-duplicates of others among them (2 families, the largest of 2)."
    assert f"note: {note}" in said(plan)
    assert "None of the unseen documents is a near-duplicate of another." in plan_checks(plan)["lines"]


def questions(*procedures: str, **settings: Any) -> list[dict[str, Any]]:
    return [{"name": name, "detectors": ["loss"], "procedure": name, "alpha": 0.2, **settings} for name in procedures]


def about(plan: Plan, name: str) -> list[str]:
    return [line for line in said(plan) if f"selection {name}: the" in line or f"selection {name}: one" in line]


def test_grouped_unseen_documents_are_a_warning_with_remedy_and_shortest_list(
    tmp_path: Path,
) -> None:
    texts = list(map(text, range(60))), list(map(text, range(100, 160)))

    def author(role: str, i: int) -> str | None:
        return f"author {i // 3}" if role == "unseen" else None

    plan = planned(tmp_path, *texts, group_of=author, selections=questions("bh", "storey"))
    assert about(plan, "bh") == [
        "warning: selection bh: the 60 unseen documents rank as 20 independent ones, so p-values can be too small by a "
        "factor of up to 2.90, and the answer would not be supported; with calibrate: one_per_block 20 calibrate, and "
        "the shortest possible list has 15 documents."
    ]
    assert len(about(plan, "storey")) == 1
    one = planned(tmp_path, *texts, group_of=author, selections=questions("bh", calibrate="one_per_block"))
    assert about(one, "bh") == [
        "note: selection bh: one unseen document of each block calibrates, 20 of 60, and the shortest possible list "
        "has 15 documents."
    ]
    assert fewest_selectable(Rule(BH, Fraction(1, 5)), 20, 60) == 15
    (planned_list,) = forecast(one, {}, plan_checks(one))["selections"]
    assert planned_list["minimum_selectable"] == 15, "of 60 it would be 5"
    assert planned_list["sentence"].startswith(
        "With 20 unseen documents to calibrate on, one of each block, and 60 to judge, the shortest possible list has "
    )
    assert "unseen documents of different blocks a single document can be selected" in planned_list["sentence"]
    (unread,) = forecast(one, {})["selections"]
    assert unread["sentence"].startswith("With at most 60 unseen documents to calibrate on, one of each block,")
    few = planned(tmp_path, *texts, group_of=lambda role, i: f"{role} {i}", selections=questions("bh"))
    assert not about(few, "bh"), "groups of one document each"


def test_large_groups_of_both_roles_turn_storey_into_bh_and_the_plan_says_so(tmp_path: Path) -> None:
    texts = list(map(text, range(60))), list(map(text, range(100, 160)))

    def language(role: str, i: int) -> str:
        return ("en", "de", "fr")[i % 3]

    plan = planned(tmp_path, *texts, group_of=language, selections=questions("storey", "bh", "ptdi"))
    assert about(plan, "storey") == [
        "note: selection storey: the audited documents form 3 blocks of groups and near-duplicates, with which storey "
        "takes a share of nulls of at least 0.68 (bh takes 1), so it selects little more than bh; calibration: "
        "by_group ranks within the groups of both roles, which then are no blocks, and keeps it."
    ]
    assert float(Fraction(20 * 61, 30) / 60) == pytest.approx(0.678, abs=0.001)
    assert not about(plan, "bh"), "strata that calibrate are independent"
    assert about(plan, "ptdi") == [
        "warning: selection ptdi: the audited documents form 3 blocks of groups and near-duplicates, the largest of 20 "
        "documents, too few for the estimate of procedure ptdi: the answer would not be supported; take bh or storey."
    ]
    by_group = questions("storey", "ptdi", calibration="by_group")
    assert not any(
        about(planned(tmp_path, *texts, group_of=language, selections=by_group), n) for n in ("storey", "ptdi")
    )


def test_what_is_checked_before_is_what_selection_checks_after(tmp_path: Path, tiny_model_folder: Path) -> None:
    """Repeated ids, texts without a score and transformed dates included."""
    audit = [*map(text, range(20)), text(200), text(201), "a", f"{text(203)} 2024-05-06", text(204), ""]
    unseen = [*map(text, range(100, 120)), text(200), text(201), "a", f"{text(203)} 1999", HEADER + text(1)]
    settings = {
        "model": {"path": str(tiny_model_folder)},
        "overlap": "drop",
        "text_transform": {"dates": "remove"},
        "audit_ids": [*(f"a{i}" for i in range(25)), "a25"],
        "unseen_ids": [*(f"u{i}" for i in range(21)), "u20", "u22", "u23", "u24"],
    }
    plan = planned(tmp_path, audit, unseen, **settings)
    checked = check_documents(plan, RUN)
    store = Store(plan.config.run)
    score_all(plan, store)
    scored = read_scored(store, plan.shards)
    after = find_overlaps(scored, ["unseen"], plan.config)["unseen"].diagnostic
    before = checked.overlap["unseen"]
    counts = [(each.n_calibration, each.n_equal, each.n_audit) for each in (before, after)]
    assert counts == [(3, 2, 3)] * 2, (
        "text 200, 203 without its date, 1 after a header; 201 repeats an id, and a lone word may have no score"
    )
    assert before.pairs == after.pairs
    assert (
        checked.duplicates.count == sum(scored.quarantined(role)["duplicate_id"] for role in ("audit", "unseen")) == 1
    )
    assert "(first: u20)" in checked.duplicates.sentence


def test_documents_without_an_id_are_named_by_their_row_in_whatever_shard_they_stand(tmp_path: Path) -> None:
    corpus = {}
    for role, first in (("audit", 0), ("unseen", 100)):
        path = tmp_path / f"{role}.jsonl"
        texts = [*map(text, range(first, first + 30)), f"{role} {text(70)}"]
        path.write_text("".join(json.dumps({"text": each}) + "\n" for each in texts))
        corpus[role] = {"path": str(path)}
    described = {"run": str(tmp_path / "run"), "model": {"path": "m"}, "corpus": corpus, "overlap": "drop"}
    plan = make_plan(build_config({**described, "resources": {"shard_bytes": 500}}))
    assert len(plan.shards) > 10
    checked = check_documents(plan, RUN)
    assert checked.duplicates.count == 0
    (pair,) = checked.overlap["unseen"].pairs
    assert (pair.audit, pair.calibration) == (f"{corpus['audit']['path']}#30", f"{corpus['unseen']['path']}#30")


def test_words_and_resolution_are_told_before_scoring_and_only_if_something_is_wrong(tmp_path: Path) -> None:
    many, hopeless = ([{"name": "members", "detectors": ["loss"], "alpha": alpha}] for alpha in (0.5, 0.001))
    plain = planned(tmp_path, list(map(text, range(100))), list(map(text, range(200, 400))), selections=many)
    unsettled, decided = said(plain)
    assert unsettled.startswith("note: Inconclusive: too few documents to determine whether the words")
    assert decided == f"note: {blind_wording.how_decided(blind_wording.WORDS, False)}"
    alike = planned(
        tmp_path, list(map(text, range(1000))), list(map(text, range(2000, 3000))), selections=many, resources={}
    )
    assert said(alike) == []
    later = planned(tmp_path, list(map(text, range(100))), dated("quartz"), resources=WHOLE)
    (blind,) = said(later)
    assert blind.startswith("warning: A classifier that knows only their words tells the unseen documents")
    assert plan_checks(later)["blind"]["unseen"]["outcome"] == "failed"
    strict = planned(tmp_path, list(map(text, range(60))), list(map(text, range(200, 260))), selections=hopeless)
    unsettled, _decided, resolution = said(strict)
    assert unsettled.startswith("note: Inconclusive")
    assert resolution.startswith("warning: selection members: With 60 unseen documents to calibrate on")


@pytest.mark.parametrize(("alpha", "warned"), [(0.95, True), (0.51, True), (0.5, False), (0.1, False)])
def test_an_alpha_above_a_half_is_a_warning_before_scoring(tmp_path: Path, alpha: float, warned: bool) -> None:
    selections = [{"name": "members", "detectors": ["loss"], "alpha": alpha}]
    plan = planned(tmp_path, [*map(text, range(60))], [*map(text, range(100, 160))], selections=selections)
    line = f"warning: selection members: alpha {alpha:g} allows a list of which up to {alpha:.0%} may be wrong"
    assert (line in plan_checks(plan)["lines"], line in said(plan)) == (warned, warned)


def test_a_resume_reads_what_is_filed_and_a_corrected_corpus_is_read_again(tmp_path: Path) -> None:
    plan = planned(tmp_path, list(map(text, range(100))), dated("quartz"), resources=WHOLE)
    said(plan)
    (name,) = (tmp_path / "run/diagnostics").iterdir()
    value = json.loads(name.read_text())
    value["blind"]["unseen"]["sentence"] = "As it was filed."
    name.write_text(json.dumps(sealed({key: value[key] for key in value if key != "digest"})))
    assert said(plan)[0] == "warning: As it was filed."
    corrected = planned(tmp_path, list(map(text, range(100))), dated("zephyr"), resources=WHOLE)
    assert said(corrected)[0].startswith("warning: A classifier"), "of the same size and with other words"


def test_a_large_corpus_is_sampled_and_says_so(tmp_path: Path) -> None:
    shared = list(map(text, range(1000, 1040)))
    plan = planned(tmp_path, [*map(text, range(200)), *shared], [*map(text, range(300, 400)), *shared])
    some = check_documents(plan, Effort(60_000, 50))
    assert not some.whole
    assert 0 < some.documents["audit"] < 240
    assert some.scope == f"a sample of {sum(some.documents.values())} documents"
    assert 0 < some.overlap["unseen"].n_calibration < 40
    assert some == check_documents(plan, Effort(60_000, 50)), "the same documents every time"
    assert check_documents(plan, Effort(1_000_000, 50)).whole
    assert check_documents(plan, Effort(1_000_000, 50)).overlap["unseen"].n_calibration == 40


def test_a_damaged_file_stops_no_check_of_the_others(tmp_path: Path) -> None:
    plan = planned(tmp_path, list(map(text, range(60))), list(map(text, range(200, 260))))
    whole = gzip.compress("".join(json.dumps({"text": text(i)}) + "\n" for i in range(3000)).encode())
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    described = plan.config.model_dump(mode="json", by_alias=True)
    described["corpus"]["audit"] = {"path": [str(tmp_path / "cut.jsonl.gz"), str(tmp_path / "audit.jsonl")]}
    found = check_documents(make_plan(build_config(described)), RUN)
    assert found.documents["unseen"] == 60
    assert found.documents["audit"] > 60
    assert "cut.jsonl.gz is damaged after row" in found.damaged[0]


def test_checks_that_are_not_done_stop_nothing_and_what_they_say_is_said_once(make_audit: Callable[..., Path]) -> None:
    output = io.StringIO()
    plan = make_plan(load_config(str(make_audit([sentence(1)] * 2 + [sentence(i) for i in range(9)]))))
    reporter = Reporter(Console(file=output, width=400))
    checks = Checks(plan, Store(plan.config.run), reporter, begin_checks(plan, RUN))
    checks.look()
    assert output.getvalue() == ""
    checks.wait()
    checks.look()
    assert output.getvalue().count("are near-duplicates of") == 1


def test_repeated_ids_that_another_column_tells_apart_are_named_with_how_to_take_one(tmp_path: Path) -> None:
    """As in samples of lm-evaluation-harness with two filters."""
    rows = [
        {"id": n, "text": f"{words} number {n}", "note": f"{kind} {n}", "kind": kind, "part's": "x"}
        for kind, words in (("strict", "a quiet river"), ("loose", "an old house"))
        for n in range(30)
    ]
    for name in ("a.jsonl", "a.parquet"):
        place = tmp_path / name
        table = pa.Table.from_pylist(rows)
        pq.write_table(table, place) if name == "a.parquet" else place.write_text("\n".join(map(json.dumps, rows)))
        corpus = {"audit": {"path": str(place), "id": "id"}}
        config = {"run": str(tmp_path / "run"), "model": {"path": "m"}, "corpus": corpus, "detectors": ["loss"]}
        plan = make_plan(build_config({**config, "resources": {"shard_documents": 7}}))
        sentence = check_documents(plan, RUN).duplicates.sentence
        assert f"In {place} documents of one id differ in column 'kind' (loose, strict)" in sentence
        assert f"jq -c 'select(.kind == \"loose\")' {place} > one.jsonl" in sentence


def test_repeated_ids_of_rows_that_differ_in_their_texts_alone_name_no_column(tmp_path: Path) -> None:
    rows = [{"id": n % 5, "place": n, "text": f"short {n}"} for n in range(10)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    corpus = {"audit": {"path": str(tmp_path / "a.jsonl"), "id": "id"}}
    config = {"run": str(tmp_path / "run"), "model": {"path": "m"}, "corpus": corpus, "detectors": ["loss"]}
    sentence = check_documents(make_plan(build_config(config)), RUN).duplicates.sentence
    assert sentence.startswith("5 documents repeat an id")
    assert "differ in column" not in sentence
