"""What a training would refuse, the plan refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import refusal
from made_up import sentence

MakeAudit = Callable[..., Path]
SETTINGS: dict[str, Any] = {"detectors": [{"fsd": {"base": "loss"}}], "selections": []}


@pytest.mark.parametrize(
    ("adapter", "line"),
    [
        ({"target_modules": ["q_prj"]}, "no linear layer 'q_prj' in the model; did you mean 'q_proj'?"),
        ({"group": "news"}, "group 'news' needs corpus.unseen.group, a column"),
    ],
)
def test_an_adapter_that_cannot_be_trained_is_refused_by_the_plan(
    adapter: dict[str, Any], line: str, make_audit: MakeAudit, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_audit([sentence(i) for i in range(20)], [sentence(100 + i) for i in range(20)], fsd=adapter, **SETTINGS)
    assert line in refusal(capsys, "plan", str(path))
