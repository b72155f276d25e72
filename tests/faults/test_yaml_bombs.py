"""A configuration of a few bytes that stands for billions of values is refused at once, in one line."""

from pathlib import Path

import pytest
import yaml
from bounded_memory import run_within
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config.audit import AuditConfig
from pipeline.config.yaml import MOST_BYTES, build, load_yaml
from pipeline.errors import UserError
from pipeline.plan.description import load_config
from tests.helpers.commands import user_error

LAUGHS = "a: &a [lol, lol]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join([f'*{chr(97 + i)}'] * 9)}]\n" for i in range(20)
)


def test_an_alias_bomb_is_refused_at_once_within_little_memory(tmp_path: Path) -> None:
    (tmp_path / "audit.yaml").write_text(LAUGHS)
    imports = """
    from pipeline.plan.description import load_config
    from pipeline.errors import UserError
    """
    code = f"""
    try:
        load_config({str(tmp_path / "audit.yaml")!r})
    except UserError as error:
        print(error)
    """
    message = run_within(100, imports, code, seconds=30)
    assert "is not YAML: its aliases make it " in message
    assert message.endswith("values; it may have 100,000")


def test_ten_thousand_selections_are_read() -> None:
    """Only what aliases repeat is bounded: what is written is bounded by the length of the file."""
    lines = "".join(f"  - {{name: s{i}, terms: *terms}}\n" for i in range(10_000))
    value = load_yaml(f"terms: &terms {{procedure: bh, alpha: 0.1}}\nselections:\n{lines}")
    assert len(value["selections"]) == 10_000
    assert len(load_yaml(f"selections: [{'0, ' * 100_001}]")["selections"]) == 100_001


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: &a [*a]", "an alias refers to itself"),
        ("a: &a {<<: *a}", "an alias refers to itself"),
        ("a: &a {b: 1}\n" + "".join(f"x{i}: &x{i} {{<<: [{', '.join(['*a'] * 9)}]}}\n" for i in range(3)), None),
        ("[" * 3_000, "more than 100 brackets within one another"),
        ("{a: " * 20_000, "more than 100 brackets within one another"),
        ("".join(" " * n + "a:\n" for n in range(2000)), "its brackets or indents are nested too deeply"),
        ("run: " + "9" * 5000, "line 1: the number 99999999999999999999... has more than 64 bits"),
        ("a: 1\nrun: 0x" + "f" * 5000, "line 2: the number 0xffffffffffffffffff... has more than 64 bits"),
        ("run: -0x" + "f" * 17, "line 1: the number -0xfffffffffffffffff has more than 64 bits"),
        ("run: 0" + "7" * 6000, "has more than 64 bits; a text that looks like a number needs quotes"),
        ("run: 0b" + "1" * 20_000, "has more than 64 bits"),
        ("run: 1" + ":59" * 100_000, "has more than 64 bits"),
        ("run: 0xffffffffffffffffff", "has more than 64 bits"),
        ("run: !!int 0x" + "f" * 5000, "has more than 64 bits"),
        ("? 0x" + "f" * 5000 + "\n: 1", "has more than 64 bits"),
        ("run: 2024-99-99", "a value cannot be read: month must be in"),
        ("# " + "x" * MOST_BYTES, "it has more than 4,194,304 bytes"),
        ("run: !!python/object:os.system {}", "could not determine a constructor"),
    ],
)
def test_what_cannot_be_read_is_one_line(tmp_path: Path, text: str, reason: str | None) -> None:
    (tmp_path / "audit.yaml").write_text(text)
    line = user_error(load_config, str(tmp_path / "audit.yaml"))
    assert reason is None or reason in line


NUMBERS = {
    "run: 0xff": "run: input should be a valid string, got 255; YAML reads it as a number; put it in quotes",
    "run: 1:30:45": "1:30:45 on line 1 is a number of base 60 in YAML: put it in quotes",
    "run: 2024-01-01": "got 2024-01-01; YAML reads it as a date; put it in quotes",
    "run: yes": "got True; YAML reads it as true or false; put it in quotes",
    "run: .inf": "got inf; YAML reads it as a number; put it in quotes",
    "run: [1]": "run: input should be a valid string, got [1]",
    "corpus: {audit: {path: a, id: 0xff}}": "corpus.audit.id: input should be a valid string, got 255; YAML reads",
    "corpus: {audit: {path: 010}}": "010 on line 3 is a number of base 8 in YAML: put it in quotes",
    "model: {path: 10}": "model.path: input should be a valid string, got 10; YAML reads it as a number; put it in",
    "max_tokens: 0x8000000000000000": "max_tokens: input should be an integer of less than 64 bits, got one of 64",
    "detectors: [{min_k: {k: 0xffffffffffffffff}}]": "detectors.0.min_k.k: input should be an integer of less than 64",
    "error_budget: .nan": "error_budget: input should be a finite number, got nan",
    "error_budget: 1.0e+999": "error_budget: input should be a finite number, got inf",
    "model: {endpoint: 'http://h/v1', name: a, timeout: .inf}": "model.timeout: input should be a finite number",
    "model: {endpoint: 'http://h/v1', name: a, budget: {tokens: 0xffffffffffffffff}}": "model.budget.tokens: input",
    f"resources: {{shard_bytes: '{'9' * 400}'}}": "resources.shard_bytes: input should be 'auto' or a number of bytes",
    "resources: {shard_bytes: 9000000 TiB}": "resources.shard_bytes: input should be ",
}


@pytest.mark.parametrize("text", NUMBERS)
def test_a_number_that_a_setting_cannot_be_is_one_line_that_names_it(tmp_path: Path, text: str) -> None:
    settings = {"run": "run: r", "model": "model: {path: a}", "corpus": "corpus: {audit: {path: a}}"}
    settings[text.partition(":")[0]] = text
    (tmp_path / "audit.yaml").write_text("\n".join(settings.values()))
    line = user_error(load_config, str(tmp_path / "audit.yaml"))
    assert NUMBERS[text] in line
    assert len(line) < 500


def test_a_seed_may_have_64_bits_and_a_number_that_no_text_contained_no_more() -> None:
    model, corpus = {"path": "a"}, {"audit": {"path": "a"}}
    assert build(AuditConfig, {"run": "r", "model": model, "corpus": corpus}, [f"seed={2**64 - 1}"]).seed == 2**64 - 1
    for value in (2**64, 16**5000):
        line = user_error(build, AuditConfig, {"run": "r", "model": model, "corpus": corpus, "seed": value})
        assert line.startswith("seed: input should be an integer of less than 64 bits, got one of ")


@pytest.mark.parametrize("value", ["[" * 3_000, "9" * 5000, LAUGHS, "2024-99-99", "0x" + "f" * 5000])
def test_overrides_have_the_same_bounds(value: str) -> None:
    with pytest.raises(UserError, match=r"^--set run: .* is not a YAML value: .*$"):
        build(AuditConfig, {}, [f"run={value}"])


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**64) + 1, 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=25)
@given(PLAIN)
def test_honest_values_are_read_as_before(value: object) -> None:
    shared = {"one": value, "other": value}  # is written with an anchor and an alias
    text = yaml.safe_dump(shared)
    assert load_yaml(text) == yaml.safe_load(text) == shared
