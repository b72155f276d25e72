"""Write the table of the steps of a run into docs/architecture.md, from the steps themselves.

python -m docs.steps
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from ray_jobs.scoring import STEPS, Step

PAGE = Path(__file__).parent / "architecture.md"
HEAD = "| step | what it does | after |\n|---|---|---|\n"
_TABLE = re.compile(re.escape(HEAD) + r"(\|[^\n]*\n)*")


def steps_table() -> str:
    """All steps in order, with their first sentence and the steps that they come after."""
    return HEAD + "".join(
        f"| `{one.name}` | {(inspect.getdoc(one.work) or '').splitlines()[0]} | "
        f"{', '.join(f'`{name}`' for name in _directly_before(one)) or '-'} |\n"
        for one in STEPS
    )


def page() -> str:
    """The page with the table."""
    return _TABLE.sub(lambda _: steps_table(), PAGE.read_text(encoding="utf-8"))


def _directly_before(one: Step) -> list[str]:
    """The steps that provide what a step requires, without those that another of these comes after."""
    before = _before(one)
    implied = {name for other in before for name in _all_before(other)}
    return [other.name for other in before if other.name not in implied]


def _before(one: Step) -> list[Step]:
    return [other for other in STEPS if other.provides & one.requires]


def _all_before(one: Step) -> set[str]:
    """The names of all steps that must come before a step."""
    return {name for other in _before(one) for name in {other.name, *_all_before(other)}}


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
