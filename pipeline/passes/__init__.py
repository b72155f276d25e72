"""What a model is asked about a text. A pass is run once, whatever the number of detectors that read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, order=True)
class Pass:
    """One way to put a text through a model."""

    kind: Literal["forward", "gradient"]
    model: Literal["target", "reference"] = "target"
    text: Literal["plain", "lowercase"] = "plain"
    draw: int = 0  # 0: the document; i: its i-th paraphrase
    adapter: str = ""  # "": the target as it is; otherwise the name of the adapter that is switched on over it


FORWARD = Pass("forward")
LOWERCASE = Pass("forward", text="lowercase")
REFERENCE = Pass("forward", model="reference")
GRADIENT = Pass("gradient")
