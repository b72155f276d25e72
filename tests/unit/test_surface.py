"""The surface of Seenset is counted: what is added shows in docs/architecture.md, which says what it replaces."""

import re
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

import seenset
from docs import surface

PLACEHOLDERS = ("SHARD-ATTEMPT", "NUMBER", "STAGE", "SHARD", "DIGEST", "INPUTS", "ROLE", "NAME")


def test_the_page_on_the_architecture_states_the_surface() -> None:
    text = surface.PAGE.read_text(encoding="utf-8")
    assert text.count(surface.HEAD) == 1
    assert text == surface.page(), "python -m docs.surface writes it anew"


def test_everything_on_the_surface_is_there_to_be_counted() -> None:
    counts = {one.thing: one.count() for one in surface.SURFACE}
    assert min(counts.values()) > 2, counts


def test_every_file_of_a_run_is_of_a_kind_that_the_docs_list(make_audit: Callable[..., Path], tmp_path: Path) -> None:
    seenset.audit(make_audit(audit=60, unseen=60))
    patterns = [re.sub("|".join(PLACEHOLDERS), "*", kind) for kind in surface.kinds_of_files()]
    files = [str(file.relative_to(tmp_path / "run")) for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert len(files) > 20
    assert [file for file in files if not any(fnmatch(file, pattern) for pattern in patterns)] == []
