"""The steps of a driver: each states what must have happened before it, and their order provides that."""

import ast
import inspect
import random
import re
from dataclasses import fields

import pytest

from docs import steps as page_of_steps
from ray_jobs.scoring import STEPS, Scoring, Step, ordered_steps

GIVEN = {entry.name for entry in fields(Scoring) if entry.init}
"""What the loop gives to the first step."""

VALUES = {entry.name for entry in fields(Scoring)} - GIVEN
RESULT = {"scored", "status", "each", "reread"}
"""What remains of the steps for the driver."""


def uses(step: Step) -> tuple[set[str], set[str]]:
    """The fields that the function of a step reads and sets."""
    attributes = [
        node
        for node in ast.walk(ast.parse(inspect.getsource(step.work)))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "run"
    ]
    set_here = {node.attr for node in attributes if isinstance(node.ctx, ast.Store)}
    return {node.attr for node in attributes if isinstance(node.ctx, ast.Load)}, set_here


def test_what_a_step_requires_is_provided_by_an_earlier_one() -> None:
    provided: list[str] = []
    for one in STEPS:
        assert one.requires <= set(provided), one.name
        provided += one.provides
    assert len(provided) == len(set(provided)), "two steps provide one thing"
    assert set(provided) >= VALUES, "a field that no step sets"
    assert ordered_steps(STEPS) == STEPS


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_a_step_declares_every_field_that_it_reads_or_sets(step: Step) -> None:
    """And every other thing that it provides is a change of the run directory that a later step requires."""
    read, written = uses(step)
    assert read - GIVEN - step.provides <= step.requires
    assert written - {"plan"} == step.provides & VALUES
    required = set().union(*(one.requires for one in STEPS))
    assert step.provides <= required | RESULT


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_a_step_says_what_it_does_and_what_must_have_happened_before(step: Step) -> None:
    does, before = (inspect.getdoc(step.work) or "").split("\n\n")
    assert re.fullmatch(r"[A-Z].*[.]", does)
    assert re.match(r"(After|Before|The first step|The last check)\b", before)


@pytest.mark.parametrize("step", [one for one in STEPS if one.requires], ids=lambda step: step.name)
def test_a_step_before_one_that_it_comes_after_is_refused(step: Step) -> None:
    for other in (one for one in STEPS if one.provides & step.requires):
        moved = [one for one in STEPS if one is not step]
        moved.insert(moved.index(other), step)
        with pytest.raises(ValueError, match=f"step {step.name} requires .*, which no earlier step provides"):
            ordered_steps(moved)
        without = [one for one in STEPS if one is not other]
        with pytest.raises(ValueError, match=r"requires .*, which no earlier step provides"):
            ordered_steps(without)


@pytest.mark.parametrize("seed", range(50))
def test_a_shuffled_order_is_refused(seed: int) -> None:
    shuffled = [*STEPS]
    random.Random(seed).shuffle(shuffled)
    with pytest.raises(ValueError, match=r"^step \w+ requires "):
        ordered_steps(shuffled)


def test_a_step_that_is_carried_out_twice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^step lock_run provides lock, store, which an earlier step provides$"):
        ordered_steps([*STEPS, next(one for one in STEPS if one.name == "lock_run")])


def test_the_steps_on_the_page_are_those_of_the_code() -> None:
    text = page_of_steps.PAGE.read_text(encoding="utf-8")
    assert text == page_of_steps.page(), "python -m docs.steps writes it anew"
    rows = re.findall(r"^\| `(\w+)` \| [A-Z][^|]+\. \| (?:-|`[\w`, ]+) \|$", text, re.MULTILINE)
    assert rows == [one.name for one in STEPS]
