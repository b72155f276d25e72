"""What `seenset plan` says that alpha could ever select."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.audit.description import build_config
from pipeline.audit.forecast import forecast
from pipeline.audit.plan import describe_model, make_plan
from pipeline.config.models import ModelConfig
from pipeline.stages.registry import forward_passes
from ray_jobs.terminal import print_plan


def outlook(tmp_path: Path, known: int | None = 100, **selection: Any) -> dict[str, Any]:
    corpus = {}
    for role, count in (("audit", 200), ("unseen", known)):
        if count is not None:
            path = tmp_path / f"{role}.jsonl"
            path.write_text("".join(json.dumps({"text": f"{role} {i}"}) + "\n" for i in range(count)))
            corpus[role] = {"path": str(path)}
    signed = selection.get("procedure") == "ktd"
    asked = {"name": "a", "detectors": ["min_k_plus_plus" if signed else "loss"], "alpha": 0.1, **selection}
    config = build_config({"run": "run", "model": {"path": "m"}, "corpus": corpus, "selections": [asked]})
    found: dict[str, Any] = forecast(make_plan(config), {"dtype": "float32"})["selections"][0]
    return found


@pytest.mark.parametrize(
    ("selection", "fewest"),
    [
        ({"procedure": "bh"}, 20),  # 200 / (.1 * 101) = 19.8
        ({"procedure": "by"}, 117),  # times 1 + 1/2 + ... + 1/200 = 5.878
        ({"procedure": "adadetect", "detectors": ["loss", "zlib"]}, 40),  # 50 of the 100 calibrate
        ({"procedure": "ktd"}, 10),  # 1 / q
    ],
)
def test_the_fewest_that_can_be_selected_are_those_of_the_procedure(
    tmp_path: Path, selection: dict[str, Any], fewest: int
) -> None:
    assert outlook(tmp_path, **selection)["minimum_selectable"] == fewest


def test_dependence_and_conditioning_cost_what_they_cost_in_the_selection(tmp_path: Path) -> None:
    plain = outlook(tmp_path, procedure="bh")["minimum_selectable"]
    ebh = outlook(tmp_path, procedure="ebh")["minimum_selectable"]
    assert plain < ebh <= outlook(tmp_path, procedure="by")["minimum_selectable"]
    assert outlook(tmp_path, calibration="conditional")["minimum_selectable"] > plain


def warnings_of(outlook: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines of a printed plan that warn."""
    facts = {
        "model": {"path": "m", "architecture": "LlamaForCausalLM", "dtype": "float32"},
        "roles": {},
        "limit": None,
        "passes": [],
        "adapters": [],
        "detectors": ["loss"],
        "estimated_seconds_one_worker": None,
        "endpoint": None,
        "checks": {"scope": "all 1,200 documents", "lines": []},
        "selections": [outlook],
    }
    print_plan(facts)
    return [line for line in capsys.readouterr().out.splitlines() if "warning" in line]


def test_an_ordinary_audit_is_planned_without_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    usual = outlook(tmp_path, procedure="bh")
    assert usual["minimum_selectable"] == 20
    assert usual["ok"] is None, "10% of the audited documents: a number to know"
    assert "With 999 unseen documents as few as 1% of the audited documents can be selected." in usual["sentence"]
    assert warnings_of(usual, capsys) == []
    assert outlook(tmp_path, known=1000, procedure="bh")["ok"] is True


def test_an_audit_that_cannot_select_anything_is_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hopeless = outlook(tmp_path, known=5, procedure="bh")
    assert hopeless["ok"] is False
    (line,) = warnings_of(hopeless, capsys)
    assert (
        "warning: With 5 unseen documents to calibrate on and 200 to judge, nothing can be selected: the shortest "
        "possible list would have" in line
    )


def test_a_knockoff_selection_is_planned_without_unseen_documents(tmp_path: Path) -> None:
    found = outlook(tmp_path, known=None, procedure="ktd")
    assert found["ok"]
    assert "list of the knockoff filter has 10 documents." in found["sentence"]
    beyond = outlook(tmp_path, known=None, procedure="ktd", alpha=0.001)
    assert not beyond["ok"]
    assert "has 1,000 documents and only 200 are audited, so nothing can be selected" in beyond["sentence"]


def test_the_time_is_a_guess_from_the_number_of_parameters(tmp_path: Path, tiny_model_folder: Path) -> None:
    about = describe_model(ModelConfig(path=str(tiny_model_folder)))
    path = tmp_path / "audit.jsonl"
    path.write_text("".join(json.dumps({"text": f"some words {i}"}) + "\n" for i in range(50)))
    described = {"run": "run", "model": {"path": str(tiny_model_folder)}, "corpus": {"audit": {"path": str(path)}}}
    plan = make_plan(build_config({**described, "detectors": ["loss"]}))
    small, large = (forecast(plan, {**about, "parameters": parameters}) for parameters in (10**6, 10**9))
    assert small["estimated_seconds_one_worker"] > 0
    assert large["estimated_seconds_one_worker"] > 20 * small["estimated_seconds_one_worker"]
    assert small["estimated_from"] == "a matrix product on it"
    unknown = forecast(plan, {**about, "parameters": None})
    assert unknown["estimated_seconds_one_worker"] is None
    assert unknown["estimated_from"] is None


def test_a_continued_text_costs_its_prefix_once_and_the_rest_once_a_draw() -> None:
    assert forward_passes({"kind": "generate", "prefix_ratio": 0.25, "draws": 4}) == 0.25 + 4 * 0.75
