"""A configuration of a few bytes that stands for billions of values is refused at once, in one line."""

from pathlib import Path

import pytest
import yaml
from bounded_memory import run_within
from commands import user_error
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.audit.description import load_config
from pipeline.config.audit import AuditConfig
from pipeline.config.yaml import MOST_BYTES, build, load_yaml
from pipeline.errors import UserError

LAUGHS = "a: &a [lol, lol]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join([f'*{chr(97 + i)}'] * 9)}]\n" for i in range(20)
)


def test_an_alias_bomb_is_refused_at_once_within_little_memory(tmp_path: Path) -> None:
    (tmp_path / "audit.yaml").write_text(LAUGHS)
    imports = """
    from pipeline.audit.description import load_config
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
        ("run: " + "9" * 5000, "a value cannot be read: Exceeds the limit"),
        ("run: 2024-99-99", "a value cannot be read: month must be in"),
        ("# " + "x" * MOST_BYTES, "it has more than 4,194,304 bytes"),
        ("run: !!python/object:os.system {}", "could not determine a constructor"),
    ],
)
def test_what_cannot_be_read_is_one_line(tmp_path: Path, text: str, reason: str | None) -> None:
    (tmp_path / "audit.yaml").write_text(text)
    line = user_error(load_config, str(tmp_path / "audit.yaml"))
    assert reason is None or reason in line


@pytest.mark.parametrize("value", ["[" * 3_000, "9" * 5000, LAUGHS, "2024-99-99"])
def test_overrides_have_the_same_bounds(value: str) -> None:
    with pytest.raises(UserError, match=r"^--set run: .* is not a YAML value: .*$"):
        build(AuditConfig, {}, [f"run={value}"])


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=25)
@given(PLAIN)
def test_honest_values_are_read_as_before(value: object) -> None:
    shared = {"one": value, "other": value}  # is written with an anchor and an alias
    text = yaml.safe_dump(shared)
    assert load_yaml(text) == yaml.safe_load(text) == shared
