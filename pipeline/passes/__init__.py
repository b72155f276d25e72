"""What a model is asked about a text. A pass is run once, whatever the number of detectors that read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Continued:
    """How documents are continued by the model: what is equal here is sampled once, whoever reads it."""

    prefix_ratio: float = 0.5  # share of a document's words that the model is given
    candidate_words: Literal["reference", "all"] = (
        "reference"  # a draw ends with as many words as were left out, or not
    )
    temperature: float = 1.0
    top_k: int | None = 50
    top_p: float = 1.0


@dataclass(frozen=True, slots=True)
class Pass:
    """One way to put a text through a model."""

    kind: Literal["forward", "gradient", "generate"]
    model: Literal["target", "reference"] = "target"
    text: Literal["plain", "lowercase"] = "plain"
    draw: int = 0  # 0: the document; i: its i-th paraphrase
    adapter: str = ""  # "": the target as it is; otherwise the name of the adapter that is switched on over it
    continued: Continued | None = None  # of a generate pass, whose statistics are numbers of draws


FORWARD = Pass("forward")
LOWERCASE = Pass("forward", text="lowercase")
REFERENCE = Pass("forward", model="reference")
GRADIENT = Pass("gradient")
