"""Claims about the typed results: each field has its sentence, and what cannot be read is refused in one line."""

import itertools
import json
import operator
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from docs.records import record_schema, render_schemas, write_schemas
from pipeline.plan.starter import Starter, audit_starter, write_starter
from pipeline.report.contents import Report
from pipeline.report.facts import read_facts
from pipeline.report.page import write_report
from pipeline.results.status import Status, read_status
from pipeline.results.summary import Summary, read_summary
from pipeline.run.conclusion import bound_condition, conclude, weakest
from pipeline.run.conclusion_text import UNCONFIRMED
from pipeline.run.digests import AnswerDigests
from pipeline.run.manifest import Manifest, read_manifest, read_run
from pipeline.run.records import Record, VersionedRecord
from pipeline.selection.guarantees import ConclusionValue, Outcome, StrictAnswer
from pipeline.store.files import Store
from pipeline.trial.starter import trial_starter
from tests.helpers.commands import refusal, user_error
from tests.helpers.report_run import build_run, summary_in
from tests.helpers.signed import sign, sign_manifest, sign_status

SCHEMAS = Path(__file__).parents[2] / "docs/schemas"


def records(kind: type[Record] = Record) -> Iterator[type[Record]]:
    """Every kind of record."""
    for record in kind.__subclasses__():
        yield record
        yield from records(record)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return build_run(tmp_path)


def rewrite(store: Store, name: str, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a JSON file of the run directory in place."""
    value = store.read_json(name)
    changed = change(value)
    store.write_json(name, value if changed is None else changed)
    seal(store, name)


def seal(store: Store, name: str) -> None:
    """Write the digests again, as if the program had written the file as it is now."""
    if name == "manifest.json":
        sign_manifest(store)
    elif name == "status.json":
        sign_status(store)
    elif name.startswith("selection"):
        sign(store)


@pytest.mark.parametrize("record", sorted(set(records()), key=lambda record: record.__name__))
def test_every_field_of_a_record_has_a_sentence_and_none_changes(record: type[Record]) -> None:
    assert record.__doc__
    assert record.model_config["frozen"]
    assert record.model_config["extra"] == "forbid"
    for name, field in record.model_fields.items():
        assert field.description, name
        assert field.description.endswith("."), name


def test_the_schemas_of_the_documentation_are_those_of_the_records(tmp_path: Path) -> None:
    assert {path.name: path.read_bytes() for path in SCHEMAS.iterdir()} == render_schemas()
    assert render_schemas().keys() == {
        f"{name}.schema.json" for name in ("summary", "verdict", "status", "audit", "trial")
    }
    strict = Summary.model_json_schema()["$defs"]["StrictAnswer"]["properties"]
    assert list(strict) == [field.name for field in fields(StrictAnswer)]
    assert all(entry["description"].endswith(".") for entry in strict.values())
    write_schemas(tmp_path / "schemas")
    assert {path.name: path.read_bytes() for path in (tmp_path / "schemas").iterdir()} == render_schemas()


@pytest.mark.parametrize(("name", "starter"), [("audit", audit_starter), ("trial", trial_starter)])
def test_the_schema_of_a_configuration_is_the_one_that_init_writes(
    tmp_path: Path, name: str, starter: Callable[[str], Starter]
) -> None:
    (tmp_path / "unseen.jsonl").write_text('{"text": "A document of some words."}\n' * 3)
    _, schema = write_starter(str(tmp_path), starter(str(tmp_path)))
    assert json.loads(Path(schema).read_text()) == json.loads((SCHEMAS / f"{name}.schema.json").read_text())


def test_each_file_of_a_run_says_its_schema_and_holds_the_keys_that_its_schema_names(store: Store) -> None:
    write_report(store)
    files: dict[str, type[VersionedRecord]] = {
        "selection/members/summary.json": Summary,
        "selection/members/digests.json": AnswerDigests,
        "manifest.json": Manifest,
        "status.json": Status,
        "report/report.json": Report,
    }
    for file, kind in files.items():
        schema, value = record_schema(kind), store.read_json(file)
        assert value["schema"] == schema["properties"]["schema"]["const"], file
        assert set(schema["required"]) <= set(value) <= set(schema["properties"]), file
        assert ("digest" in value) == kind.sealed, file
        value.pop("digest", None)
        plain = kind.model_validate(value).plain()
        assert {key: plain[key] for key in value} == value, file
    summary = summary_in(store)
    assert summary.plain() == store.read_json("selection/members/summary.json")
    assert Report.model_validate(store.read_json("report/report.json")).selections[0].summary == summary


def test_an_answer_is_supported_unless_a_check_of_its_guarantee_failed(store: Store) -> None:
    diagnostics = summary_in(store).diagnostics
    passed, inconclusive, failed = Outcome
    for outcomes, conclusion, reasons in (
        ({"blind": passed}, "supported", []),
        ({"blind": inconclusive}, "inconclusive", []),
        ({"blind": failed}, "contradicted", ["About blind."]),
        ({"blind": passed, "overlap": failed}, "contradicted", ["About overlap."]),
        ({"blind": inconclusive, "overlap": failed}, "contradicted", ["About overlap."]),
        ({"blind": passed, "resolution": failed}, "supported", []),
        ({"blind": passed, "duplicates": inconclusive, "truncated": inconclusive}, "supported", []),
    ):
        about = {name: {"outcome": one, "sentence": f"About {name}."} for name, one in outcomes.items()}
        update = {name: getattr(diagnostics, name).model_copy(update=result) for name, result in about.items()}
        checked = diagnostics.model_copy(update=update)
        assert (checked.value, checked.failures()) == (conclusion, reasons), outcomes


def test_outcomes_and_conclusions_have_no_truth_value_and_are_written_as_words() -> None:
    for word in (*Outcome, *ConclusionValue):
        with pytest.raises(TypeError, match="has no truth value: compare it with one of"):
            bool(word)
        assert json.loads(json.dumps({"word": word})) == {"word": word.value}
        assert f"{word}" == str(word) == word.value


def test_the_worst_outcome_decides_a_conclusion_and_the_worst_conclusion_several() -> None:
    alone = {"passed": "supported", "inconclusive": "inconclusive", "failed": "contradicted"}
    assert {str(outcome): str(conclude([outcome])) for outcome in Outcome} == alone
    for some in itertools.product(Outcome, repeat=3):
        worst = max(some, key=list(Outcome).index)
        assert conclude(some) == alone[worst]
        assert weakest([conclude([one]) for one in some]) == alone[worst]
    assert conclude([]) == weakest([]) == "supported"
    stated = [bound_condition(value) for value in ConclusionValue]
    assert stated == ["", UNCONFIRMED, None]
    assert bound_condition("anything else") is None, "no bound is stated under a word that is not known"


def test_a_summary_of_an_earlier_form_is_refused_in_one_line(store: Store) -> None:
    earlier = {**summary_in(store).plain(), "schema": 2, "supported": True}
    store.write_json("selection/members/summary.json", earlier)
    assert "in form 2, and this version reads form 3" in user_error(summary_in, sign(store))


def test_an_old_manifest_is_refused_with_the_version_that_wrote_it(store: Store) -> None:
    manifest = json.loads(store.read("manifest.json"))
    for old, form in (
        ({**manifest, "schema": 1}, "form 1"),
        ({**manifest, "schema": 2}, "form 2"),
        ({k: manifest[k] for k in manifest if k != "schema"}, "an older form"),
    ):
        store.write_json("manifest.json", old)
        line = user_error(read_run, store)
        assert f"manifest.json was written by seenset 0.1.0 in {form}, and this version reads form 3" in line
        assert "start a new run directory with seenset run, or use that version" in line
    store.write_json("manifest.json", {"config": manifest["config"]})
    assert "was written by seenset of an unknown version in an older form" in user_error(read_run, store)


def test_a_manifest_with_a_retired_setting_says_what_to_do_instead(
    store: Store,
) -> None:
    def change(manifest: dict[str, Any]) -> None:
        manifest["config"]["selections"][0]["calibration"] = "weighted"

    rewrite(store, "manifest.json", change)
    line = user_error(read_run, store)
    assert (
        "manifest.json was written by seenset 0.1.0, and calibration weighted was removed in 1.0: take calibration"
        in line
    )
    assert line.endswith("; start a new run directory with seenset run, or use that version")
    assert "damaged" not in line


def test_an_old_summary_is_refused_with_what_to_do(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    old = ("schema", "reasons", "limit")
    rewrite(store, "selection/members/summary.json", lambda v: {key: v[key] for key in v if key not in old})
    for command in ("report", "status"):
        line = refusal(capsys, command, store.url)
        assert "selection/members/summary.json was written by seenset 0.1.0 in an older form" in line
        assert f"seenset select {store.url}" in line


READERS: dict[str, Callable[[Store], Any]] = {
    "manifest.json": read_manifest,
    "status.json": read_status,
    "selection/members/summary.json": lambda store: read_summary(store, "members"),
}


@pytest.mark.parametrize("name", READERS)
def test_a_file_of_a_newer_schema_or_that_is_no_mapping_is_refused(store: Store, name: str) -> None:
    rewrite(store, name, lambda value: value.update(schema=9))
    line = user_error(READERS[name], store)
    assert f"{name} was written by seenset 0.1.0 in form 9, and this version reads form " in line
    for content, part in ((b"{", "not JSON"), (b"[1]", "not a mapping")):
        store.write(name, content)
        seal(store, name)
        assert f"{name} is damaged: {part}" in user_error(READERS[name], store)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("manifest.json", "fingerprint"),
        ("status.json", "state"),
        ("selection/members/summary.json", "strict"),
        ("selection/members/summary.json", "diagnostics.blind.sentence"),
        ("selection/members/summary.json", "strict.n_selected"),
    ],
)
def test_a_missing_and_an_unknown_key_are_named(store: Store, name: str, key: str) -> None:
    *sections, last = key.split(".")

    def change(edit: Callable[[dict[str, Any]], Any]) -> str:
        value = store.read_json(name)
        edit(reduce(operator.getitem, sections, value))
        store.write_json(name, value)
        seal(store, name)
        return user_error(READERS[name], store)

    unknown = change(lambda section: section.update({f"{last}s": 1}))
    assert f"{name} is damaged: unknown key '{key}s'; did you mean '{last}'?" in unknown
    missing = change(lambda section: (section.pop(f"{last}s"), section.pop(last)))
    assert f"{name} is damaged: missing key '{key}'" in missing


def test_wrong_kinds_of_values_damaged_histograms_and_shard_tables_are_named(store: Store) -> None:
    rewrite(store, "selection/members/scores.json", lambda value: {**value, "edges": value["edges"][1:]})
    assert "selection/members/scores.json is damaged: 128 counts of audit, 128 edges" in user_error(read_facts, store)
    rewrite(store, "selection/members/summary.json", lambda value: value.update(n_selected="many"))
    line = user_error(read_facts, store)
    assert "summary.json is damaged: n_selected: " in line
    assert "got 'many'" in line
    store.write_json("shards.json", [{"id": "audit-000000"}])
    assert "shards.json is damaged" in user_error(read_run, store)
