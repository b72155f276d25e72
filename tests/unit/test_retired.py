"""What 0.10 had and 1.0 has not is refused in one line that names what to do instead."""

import pytest
from commands import refusal, user_error

from pipeline.config.retired import RETIRED
from pipeline.detectors.registry import parse_detectors


@pytest.mark.parametrize(("name", "instead"), RETIRED["detector"].items())
def test_a_retired_detector_is_refused_with_what_to_take(name: str, instead: str) -> None:
    assert user_error(parse_detectors, ["loss", {name: {"share": 0.1}}]) == f"detector {name} left in 1.0: {instead}"
    assert instead in user_error(parse_detectors, [name])


@pytest.mark.parametrize(("option", "instead"), RETIRED["option"].items())
def test_a_retired_option_is_refused_with_what_to_do(
    capsys: pytest.CaptureFixture[str], option: str, instead: str
) -> None:
    command, name = option.split()
    assert refusal(capsys, command, "any", name, "any") == f"seenset: option {option} left in 1.0: {instead}\n"
