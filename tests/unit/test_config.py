"""The configuration refuses what it does not know, in one line with the near miss."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from pipeline.plan.description import build_config, load_config
from tests.helpers.commands import user_error


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


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in audit().items() if name != key}


@pytest.mark.parametrize(
    ("data", "overrides", "parts"),
    [
        *(
            (audit(), [f"selections.0.alpha={alpha}"], ["selections.0.alpha", str(alpha)])
            for alpha in (0, 1, -0.1, 1.5, "x", float("nan"))
        ),
        *(
            (audit(selections=[{"name": name, "detectors": ["loss"]}]), [], ["selections.0.name"])
            for name in ("../x", "a/b", "", ".hidden", "x" * 65)
        ),
        (audit(), ["selections.0.name=history.jsonl"], ["must not be history.jsonl"]),
        (audit(max_token=5), [], ["max_token", "did you mean 'max_tokens'"]),
        (audit(corpus={"audit": {"path": "a", "txet": "x"}, "unseen": {"path": "u"}}), [], ["did you mean 'text'"]),
        (audit(detectors=["min_k_plus"]), [], ["min_k_plus_plus"]),
        (audit(), ['selections.0.detectors=["min_k(k=0.3)"]'], ["min_k(k=0.3)", "min_k(k=0.1)"]),
        (without("model"), [], ["missing key 'model'; add model: {path: ...}"]),
        (without("run"), [], ["missing key 'run'"]),
        (audit(detectors=["loss", "reference"]), [], ["add reference_model: {path: ...}"]),
        (
            audit(),
            ["selections.0.direction=clean"],
            [
                "selections.0: direction clean is calibrated on corpus.seen, which is not given; add corpus.seen: "
                "{path: ...}, documents of the same kind that are known to be in the training data"
            ],
        ),
        (audit(selections=audit()["selections"] * 2), [], ["used twice"]),
        (audit(corpus={"audit": {"text": "t"}}, selections=[]), [], ["exactly one"]),
        (audit(seed=0), ["alpha"], ["key=value"]),
        (audit(seed=0), ["selections.3.alpha=0.1"], ["no entry '3'"]),
        (audit(seed=0), ["seed.x=1"], ["seed"]),
        (
            audit(),
            ["resources.actors=0"],
            [
                "resources.actors: input should be 'auto' or greater than or equal to 1 or must be a section with "
                "keys of its own, got 0"
            ],
        ),
        (audit(), ["error_budget=2"], ["error_budget"]),
        (audit(), ["max_tokens=1"], ["max_tokens"]),
        (audit(), ["corpus=null"], ["corpus: must be a section with keys of its own, got None"]),
        (audit(), ["resources=3"], ["resources: must be a section with keys of its own, got 3"]),
    ],
)
def test_what_is_wrong_is_named_in_one_line_with_the_nearest_name(
    data: dict[str, Any], overrides: list[str], parts: list[str]
) -> None:
    text = user_error(build_config, data, overrides)
    assert all(part in text for part in parts)


def test_overrides_reach_lists_and_new_keys() -> None:
    config = build_config(audit(), ["selections.0.alpha=0.05", "resources.actors=3", "model.dtype=bfloat16"])
    assert config.selections[0].alpha == 0.05
    assert config.selections[0].exact_alpha == Fraction(1, 20), "the decimal that the user wrote"
    assert config.resources.actors == 3
    assert config.model.dtype == "bfloat16"


def test_a_config_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    assert "cannot read config" in user_error(load_config, str(tmp_path / "none.yaml"))
    assert user_error(load_config, str(tmp_path)) == f"config {tmp_path} is a folder, not a file; it is empty"
    bad = tmp_path / "bad.yaml"
    for content, part in ((b"run: [", "not YAML"), (b"just words", "must be a mapping"), (b"\xff\xfe\x00", "UTF-8")):
        bad.write_bytes(content)
        assert part in user_error(load_config, str(bad))


def test_actors_are_a_number_or_bounds_between_which_a_run_grows() -> None:
    def between(value: Any) -> tuple[int, int]:
        return build_config(audit(), [f"resources.actors={value}"]).resources.actors_between(4, 16)

    assert between("auto") == (4, 16)
    assert between(3) == (3, 3)
    assert between(9) == (4, 9), "it begins with what is there"
    assert between("{min: 2, max: 64}") == (4, 64)
    assert between("{min: 6, max: 64}") == (6, 64), "an autoscaling cluster is asked for them"
    assert between("{max: 2}") == (2, 2)
    assert "max must be at least min, 3, got 2" in user_error(between, "{min: 3, max: 2}")
