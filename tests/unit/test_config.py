"""The configuration refuses what it does not know, in one line with the near miss."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from pipeline.audit.description import build_config, load_config
from pipeline.errors import UserError


def audit(**changes: Any) -> dict[str, Any]:
    selection = {"name": "members", "detectors": ["loss"], "procedure": "bh", "alpha": 0.1}
    return {
        "run": "runs/x",
        "model": {"path": "m"},
        "corpus": {"audit": {"path": "a.jsonl"}, "unseen": {"path": "u.jsonl"}},
        "detectors": ["loss", {"min_k": {"k": [0.1, 0.2]}}],
        "selections": [selection],
        **changes,
    }


def message(data: dict[str, Any], *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        build_config(data, overrides)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("alpha", [0, 1, -0.1, 1.5, "x", float("nan")])
def test_alpha_outside_the_open_unit_interval_is_refused_with_its_value(alpha: Any) -> None:
    text = message(audit(), f"selections.0.alpha={alpha}")
    assert "selections.0.alpha" in text
    assert str(alpha) in text


def test_an_unknown_key_names_the_nearest() -> None:
    text = message(audit(max_token=5))
    assert "max_token" in text
    assert "did you mean 'max_tokens'" in text


def test_an_unknown_nested_key_names_the_nearest_of_its_section() -> None:
    data = audit(corpus={"audit": {"path": "a", "txet": "x"}, "unseen": {"path": "u"}})
    assert "did you mean 'text'" in message(data)


def test_an_unknown_detector_names_the_nearest() -> None:
    assert "min_k_plus_plus" in message(audit(detectors=["min_k_plus"]))


def test_a_selection_over_a_column_that_is_not_scored_names_the_nearest() -> None:
    text = message(audit(), 'selections.0.detectors=["min_k(k=0.3)"]')
    assert "min_k(k=0.3)" in text
    assert "min_k(k=0.1)" in text


def test_a_missing_key_is_named() -> None:
    data = audit()
    del data["model"]
    assert message(data) == "missing key 'model'; add model: {path: ...}"
    data = audit()
    del data["run"]
    assert message(data) == "missing key 'run'"


def test_reference_without_a_reference_model_is_refused() -> None:
    assert "add reference_model: {path: ...}" in message(audit(detectors=["loss", "reference"]))


def test_a_direction_without_its_calibration_role_is_refused() -> None:
    assert message(audit(), "selections.0.direction=clean") == (
        "selections.0: direction clean is calibrated on corpus.seen, which is not given; add corpus.seen: {path: ...}, "
        "documents of the same kind that are known to be in the training data"
    )


def test_two_selections_of_one_name_are_refused() -> None:
    data = audit()
    data["selections"] = data["selections"] * 2
    assert "used twice" in message(data)


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "x" * 65])
def test_a_selection_name_that_could_leave_its_folder_is_refused(name: str) -> None:
    data = audit()
    data["selections"][0]["name"] = name
    assert "selections.0.name" in message(data)


def test_a_value_that_no_kind_allows_names_every_kind() -> None:
    with pytest.raises(UserError) as caught:
        build_config(audit(), ["resources.actors=0"])
    kinds = "'auto' or greater than or equal to 1 or must be a section with keys of its own"
    assert str(caught.value) == f"resources.actors: input should be {kinds}, got 0"


def test_overrides_reach_lists_and_new_keys() -> None:
    config = build_config(audit(), ["selections.0.alpha=0.05", "resources.actors=3", "model.dtype=bfloat16"])
    assert config.selections[0].alpha == 0.05
    assert config.resources.actors == 3
    assert config.model.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("alpha", "key=value"),
        ("selections.3.alpha=0.1", "no entry '3'"),
        ("seed.x=1", "seed"),
        ("resources.actors=0", "resources.actors"),
        ("resources.actors=many", "resources.actors"),
        ("error_budget=2", "error_budget"),
        ("max_tokens=1", "max_tokens"),
        ("corpus=null", "corpus: must be a section with keys of its own, got None"),
        ("resources=3", "resources: must be a section with keys of its own, got 3"),
    ],
)
def test_a_bad_override_is_one_line(override: str, part: str) -> None:
    data = audit(seed=0)
    assert part in message(data, override)


def test_alpha_is_the_decimal_that_the_user_wrote() -> None:
    assert build_config(audit()).selections[0].exact_alpha == Fraction(1, 10)


def test_a_source_needs_exactly_one_of_path_and_dataset() -> None:
    assert "exactly one" in message(audit(corpus={"audit": {"text": "t"}}, selections=[]))


def test_a_config_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read config"):
        load_config(str(tmp_path / "none.yaml"))
    bad = tmp_path / "bad.yaml"
    bad.write_text("run: [")
    with pytest.raises(UserError, match="not YAML"):
        load_config(str(bad))
    bad.write_text("just words")
    with pytest.raises(UserError, match="must be a mapping"):
        load_config(str(bad))
    bad.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="UTF-8"):
        load_config(str(bad))


def test_actors_are_a_number_or_bounds_between_which_a_run_grows() -> None:
    def between(value: Any) -> tuple[int, int]:
        return build_config(audit(), [f"resources.actors={value}"]).resources.actors_between(4, 16)

    assert between("auto") == (4, 16)
    assert between(3) == (3, 3)
    assert between(9) == (4, 9), "it begins with what is there"
    assert between("{min: 2, max: 64}") == (4, 64)
    assert between("{min: 6, max: 64}") == (6, 64), "an autoscaling cluster is asked for them"
    assert between("{max: 2}") == (2, 2)
    with pytest.raises(UserError, match=r"max must be at least min, 3, got 2"):
        between("{min: 3, max: 2}")
