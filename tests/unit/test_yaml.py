"""What YAML would read otherwise than it was meant is refused, with its line, or asks for quotes."""

from pathlib import Path
from typing import Any

import pytest

from pipeline.config.audit import AuditConfig
from pipeline.config.yaml import NotYamlError, build, load_yaml, read_mapping
from tests.helpers.commands import refusal, user_error

TOP = """run: runs/t
model: {path: m}
corpus:
  audit: {path: a.jsonl}
  unseen: {path: b.jsonl}
"""


def parsed(folder: Path, text: str) -> AuditConfig:
    (folder / "audit.yaml").write_text(text, encoding="utf-8")
    return build(AuditConfig, read_mapping(str(folder / "audit.yaml"), AuditConfig))


@pytest.mark.parametrize(
    ("text", "key", "lines"),
    [
        ("seed: 1\nseed: 2\n", "'seed'", (6, 7)),
        ("selections:\n  - name: members\n    alpha: 0.2\n    alpha: 0.9\n", "'alpha'", (8, 9)),
        ('limits: {"document_bytes": 5, document_bytes: 7}\n', "'document_bytes'", (6, 6)),
        ("detectors:\n  - min_k:\n      k: 0.1\n      'k': 0.2\n", "'k'", (8, 9)),
        ("run: again\n", "'run'", (1, 6)),
        ("corpus: {audit: {path: c.jsonl}}\n", "'corpus'", (3, 6)),
        ("x: &base {a: 1, a: 2}\ny: *base\n", "'a'", (6, 6)),
        ("x: {true: 1, yes: 2}\n", "True", (6, 6)),
        ("x: {1: a, 1: b}\n", "1", (6, 6)),
        ("? seed\n: 1\n? seed\n: 2\n", "'seed'", (6, 8)),
        ("x:\n  - - a: 1\n      b: 2\n      a: 3\n", "'a'", (7, 9)),
    ],
)
def test_a_key_that_stands_twice_is_refused_with_both_lines(
    tmp_path: Path, text: str, key: str, lines: tuple[int, int]
) -> None:
    refused = user_error(parsed, tmp_path, TOP + text)
    assert f"key {key} stands twice in a section, on lines {lines[0]} and {lines[1]}" in refused


def test_the_example_of_a_repeated_key_is_refused(shared_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = shared_folder / "cases/duplicate_key.yaml"
    first, second = [n for n, line in enumerate(path.read_text().splitlines(), 1) if "alpha" in line]
    assert f"key 'alpha' stands twice in a section, on lines {first} and {second}" in refusal(capsys, "plan", path)


def test_one_key_in_several_sections_and_merge_keys_are_legal() -> None:
    text = (
        "base: &base {a: 1, b: 2}\nother: &other {c: 3}\none: {<<: *base, a: 5}\ntwo:\n  <<: [*base, *other]\n  c: 4\n"
    )
    value = load_yaml(text)
    assert value["one"] == {"a": 5, "b": 2}
    assert value["two"] == {"a": 1, "b": 2, "c": 4}
    assert load_yaml("a: {x: 1}\nb: {x: 2}\nc: [{x: 1}, {x: 2}]")["c"] == [{"x": 1}, {"x": 2}]
    with pytest.raises(NotYamlError, match="key 'a' stands twice"):
        load_yaml("base: &base {a: 1}\none: {<<: *base, a: 5, a: 6}")


def test_an_override_is_held_to_the_same(tmp_path: Path) -> None:
    refused = user_error(build, AuditConfig, {}, ["limits={document_bytes: 1, document_bytes: 2}"])
    assert "--set limits" in refused
    assert "key 'document_bytes' stands twice in a section, on lines 1 and 1" in refused


@pytest.mark.parametrize(
    ("overrides", "refused"),
    [
        (["seed=1", "seed=2"], "--set seed is given twice"),
        (["seed=1", "run=a", "seed=1"], "--set seed is given twice"),
        (["model.path=a", "model={path: b}"], "--set model undoes --set model.path before it"),
    ],
)
def test_an_override_that_undoes_another_is_refused(overrides: list[str], refused: str) -> None:
    assert user_error(build, AuditConfig, load_yaml(TOP), overrides) == f"{refused}: leave one of them out"


def test_an_override_of_a_part_of_another_is_legal() -> None:
    selections = ["selections=[{name: a, detectors: [loss]}]", "selections.*.alpha=0.2", "selections.0.alpha=0.3"]
    config = build(AuditConfig, load_yaml(TOP), ["model={path: b}", "model.path=c", *selections])
    assert (config.model.path, config.selections[0].alpha) == ("c", 0.3)


@pytest.mark.parametrize(("value", "base"), [("1:30", 60), ("190:20:30.15", 60), ("-1:30", 60), ("010", 8), ("0_7", 8)])
def test_numbers_of_other_bases_ask_for_quotes(tmp_path: Path, value: str, base: int) -> None:
    refused = user_error(parsed, tmp_path, f"{TOP}seed: {value}\n")
    assert f"{value} on line 6 is a number of base {base} in YAML: put it in quotes" in refused
    assert load_yaml(f"a: '{value}'") == {"a": value}


@pytest.mark.parametrize("value", ["no", "on", "12", "1.5", "2026-01-01"])
def test_a_column_that_yaml_reads_as_another_value_asks_for_quotes(tmp_path: Path, value: str) -> None:
    refused = user_error(parsed, tmp_path, TOP.replace("{path: a.jsonl}", f"{{path: a.jsonl, id: {value}}}"))
    assert refused.startswith("corpus.audit.id: input should be a valid string, got ")
    assert refused.endswith("; put it in quotes")
    config = parsed(tmp_path, TOP.replace("{path: a.jsonl}", f'{{path: a.jsonl, id: "{value}"}}'))
    assert config.corpus.audit is not None
    assert config.corpus.audit.id == value


@pytest.mark.parametrize(("text", "value"), [("0.1", 0.1), ("1e-1", 0.1), ('"0.1"', 0.1), ("1.0e-1", 0.1), (".1", 0.1)])
def test_every_way_to_write_a_number_is_the_number(tmp_path: Path, text: str, value: Any) -> None:
    selections = f"selections: [{{name: members, detectors: [loss], procedure: bh, alpha: {text}}}]\n"
    assert parsed(tmp_path, TOP + selections).selections[0].alpha == value


@pytest.mark.parametrize(
    "text", ["seed:\t1\n", "\tseed: 1\n", "seed: [1\n", "1: 2\n", "? [a]\n: 1\n", "seed: 1\n---\nseed: 2\n"]
)
def test_other_traps_are_one_line(tmp_path: Path, text: str) -> None:
    assert user_error(parsed, tmp_path, TOP + text)


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    assert parsed(tmp_path, f"\ufeff{TOP}seed: 3\n").seed == 3


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        (TOP.replace("run: runs/t", "run:runs/t"), "line 1, 'run:runs/t', is no setting: write KEY: VALUE"),
        (TOP.replace("run: runs/t", "run = runs/t"), "line 1, 'run = runs/t', is no setting: write KEY: VALUE"),
        (f"# ours\n<<<<<<< HEAD\n\n{TOP}", "line 2, '<<<<<<< HEAD', is no setting: write KEY: VALUE"),
        (f"// ours\n{TOP}", "line 1, '// ours', is no setting: write KEY: VALUE"),
        (f"{TOP}detectors: [loss\nseed: 1\n", "on line 6 close the bracket that opens there ("),
        (f"{TOP}detectors: [loss, {{min_k: {{k: 0.1}}]\n", "on line 6 close the bracket that opens there ("),
        (TOP.replace("{path: m}", '{path: "m}'), "on line 2 close the quote that opens there ("),
        (TOP.replace("  unseen", "   unseen"), "on line 5 give the keys of a section one indent ("),
        (f"- {TOP}", "on line 2 do not mix entries (-) and keys ("),
        (f"```yaml\n{TOP}```\n", "on line 1 leave out the marks of a code block ("),
        (f"{TOP}seed: !!python/name:os.system 1\n", "on line 6 leave out the tag, which begins with ! ("),
        (
            TOP.replace("{path: m}", "{path: \u201cm\u201d}"),
            "\u201cm\u201d on line 2 has typographic quotes",
        ),
        (TOP.replace("run: runs/t", "run: a: b"), "on line 1 put a value that holds a colon and a space in quotes ("),
    ],
)
def test_a_text_that_is_not_yaml_is_answered_by_its_line_and_the_remedy(tmp_path: Path, text: str, remedy: str) -> None:
    path = tmp_path / "audit.yaml"
    assert user_error(parsed, tmp_path, text).startswith(f"config {path} is not YAML: {remedy}")


def test_typographic_quotes_within_others_are_letters(tmp_path: Path) -> None:
    assert load_yaml("a: '\u201cm\u201d'\nb: say \u201cm\u201d") == {"a": "\u201cm\u201d", "b": "say \u201cm\u201d"}


def test_a_text_without_a_value_and_a_path_within_a_section_are_answered(tmp_path: Path) -> None:
    line = user_error(parsed, tmp_path, TOP.replace("run: runs/t", "run: #runs/t"))
    assert line.startswith("run: input should be a valid string, got None; nothing stands behind its colon")
    line = user_error(parsed, tmp_path, TOP.replace("{path: a.jsonl}", "{path: {path: a.jsonl}}"))
    assert line.endswith("; did you mean a.jsonl?")
