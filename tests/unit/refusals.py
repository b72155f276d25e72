"""What a function refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pipeline.errors import UserError


def refusal_of(
    function: Callable[..., Any], *arguments: Any, kind: type[UserError] = UserError, **settings: Any
) -> str:
    """The one line of a user error."""
    with pytest.raises(kind) as caught:
        function(*arguments, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)
