"""From the sites of a text to its versions, all drawn from one secret seed."""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.mark.rules import MarkRule, canonical, with_forms

FEWEST_SITES = 5
"""Of a document that is marked; one with fewer is published as it is."""

MOST_VERSIONS = 1000
MOST_CHARACTERS = 1 << 28
"""Of all versions of a document."""

SEED_BYTES = 32
MOST_SEED = (1 << 8 * SEED_BYTES) - 1


@dataclass(frozen=True, slots=True)
class Versions:
    """The distinct texts of a document, in the order in which they were drawn."""

    texts: tuple[str, ...]
    choices: tuple[bytes, ...]  # of each version, the form at each site
    kinds: tuple[str, ...]  # of each site


class KeyedStream:
    """Uniform integers that follow from a seed, a purpose and an id: SHA-256 in counter mode, keyed by HMAC."""

    def __init__(self, seed: int, purpose: str, doc_id: str) -> None:
        """Start the stream of one purpose and one document."""
        self._key = derived(seed, purpose, doc_id)
        self._block, self._count = b"", 0

    def below(self, n: int) -> int:
        """A uniform integer in [0, n), 1 <= n <= 65,536: words of 16 bits, those beyond a multiple of n rejected."""
        most = 65_536 - 65_536 % n
        while True:
            if not self._block:
                self._block = hashlib.sha256(self._key + self._count.to_bytes(8, "big")).digest()
                self._count += 1
            word, self._block = int.from_bytes(self._block[:2], "big"), self._block[2:]
            if word < most:
                return word % n


def new_seed() -> int:
    """A seed of 256 bits from the operating system."""
    return int.from_bytes(secrets.token_bytes(SEED_BYTES), "big")


def derived(seed: int, purpose: str, doc_id: str) -> bytes:
    """32 bytes of one purpose and one document: HMAC-SHA-256(seed, purpose || 0x00 || UTF-8 of the id)."""
    return hmac.digest(seed.to_bytes(SEED_BYTES, "big"), f"{purpose}\0{doc_id}".encode(), "sha256")


def drawn_index(seed: int, doc_id: str, k: int) -> int:
    """Which of k versions of a document is published: uniform in [0, k), independent of the versions."""
    return KeyedStream(seed, "index", doc_id).below(k)


def versions_of(text: str, doc_id: str, k: int, seed: int, rules: Sequence[MarkRule]) -> Versions | str:
    """Draw k distinct versions of a text, or say why there are none.

    Each is a choice of a form at every site of the canonical text, uniform among all choices not drawn before: the
    versions do not depend on which forms the author wrote.

    Args:
        text: of the document.
        doc_id: of the document.
        k: versions, >= 2.
        seed: of the collection.
        rules: of its language.
    """
    if k * len(text) > MOST_CHARACTERS:
        return f"more than {MOST_CHARACTERS:,} characters in {k:,} versions"
    settled = canonical(text, rules)
    if settled is None:
        return "its edits exclude one another"
    base, sites = settled
    if len(sites) < FEWEST_SITES:
        return f"fewer than {FEWEST_SITES} sites"
    if math.prod(len(site.forms) for site in sites) < k:
        return f"fewer than {k:,} versions"
    stream, drawn = KeyedStream(seed, "versions", doc_id), dict[str, bytes]()
    counts = [len(site.forms) for site in sites]
    while len(drawn) < k:
        choice = bytes(map(stream.below, counts))
        drawn.setdefault(with_forms(base, sites, choice), choice)
    return Versions(tuple(drawn), tuple(drawn.values()), tuple(site.kind for site in sites))
