"""Inputs and statistics of passes, without an import of model libraries."""

from __future__ import annotations

import hashlib
from itertools import chain, pairwise
from typing import Literal

import numpy as np

from pipeline.corpus.scripts import unit_spans

Part = Literal["image", "instruction", "description", "instruction_description"]
PARTS: tuple[Part, ...] = ("image", "instruction", "description", "instruction_description")
"""Parts of the model input for a picture, in order."""

RENYI_ORDERS = ("0.5", "1", "2", "inf")
MODIFIED_ORDERS = ("0.5", "2")
"""Orders of modified Renyi entropies; order 1 is `m_entropy`."""

STATISTICS = frozenset(
    {
        "log_prob",
        "mean",
        "variance",
        "m_entropy",
        *(f"renyi_{order}" for order in RENYI_ORDERS),
        *(f"mod_renyi_{order}" for order in MODIFIED_ORDERS),
    }
)
"""Statistics of a forward pass: the fields of `forward.TokenStatistics`, and its Renyi entropies by order."""

GIVEN = frozenset({"token"})
"""Inputs that a forward pass returns: the token, which endpoints do not return."""

SWAPPED = "swapped"
"""Prefix of the number of a copy, from 1, in `Pass.text`: swapped1."""

HELD = 1024
"""Maximum tokens of prefixes whose keys and values a worker keeps for a pass, unless a single one is longer."""

SHARE_SWAPPED = 0.3
"""Share of a text's words that are swapped in a copy (PAC, arXiv 2405.11930)."""


def text_read(text: str, kind: str, seed: int) -> str:
    """The text that a pass reads.

    Args:
        text: part of a document that max_tokens keeps.
        kind: `Pass.text`.
        seed: seed of the run.
    """
    if kind == "lowercase":
        return text.lower()
    return swapped_words(text, int(kind.removeprefix(SWAPPED)), seed) if kind.startswith(SWAPPED) else text


def swapped_words(text: str, copy: int, seed: int, share: float = SHARE_SWAPPED) -> str:
    """The text with a share of its words, in [0, 1], swapped in pairs, rounded down to pairs, at least one pair.

    The choice depends only on the text, the copy's number and the seed. White space is unchanged. Words are the units
    of `pipeline.corpus.scripts`: characters in scripts without blanks. A text of fewer than two is returned unchanged.
    """
    ends = [0, *chain.from_iterable(unit_spans(text)), len(text)]
    pieces = [text[begin:end] for begin, end in pairwise(ends)]
    places = range(1, len(pieces), 2)  # the others are between words
    if len(places) < 2:
        return text
    digest = hashlib.blake2b(f"{seed} {copy} {text}".encode("utf-8", "surrogatepass"), digest_size=16).digest()
    order = np.random.PCG64(int.from_bytes(digest, "little")).random_raw(len(places)).argsort(kind="stable")
    for pair in range(max(1, int(share * len(places)) // 2)):
        one, other = places[order[2 * pair]], places[order[2 * pair + 1]]
        pieces[one], pieces[other] = pieces[other], pieces[one]
    return "".join(pieces)
