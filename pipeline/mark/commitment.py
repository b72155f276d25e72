"""A commitment to versions and indices before publication: a Merkle tree over salted digests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProofStep:
    """A node beside the path from a leaf to the root."""

    digest: bytes  # 32
    left: bool  # whether it stands to the left of the path


def version_digest(salt: bytes, text: str) -> bytes:
    """d_i = SHA-256(salt || UTF-8 of a version), salt of 32 bytes."""
    return hashlib.sha256(salt + text.encode()).digest()


def leaf_digest(doc_id: str, index: int, digests: Iterable[bytes]) -> bytes:
    """Leaf of a document: SHA-256(0x00 || canonical JSON of {id, index, versions: [d_1, ..., d_k]}).

    Canonical JSON is that of RFC 8785: keys in order, no blanks, UTF-8; digests are lower-case hexadecimal.

    Args:
        doc_id: of the document.
        index: of the published version, from 0.
        digests: of all versions, in their order.
    """
    value = {"id": doc_id, "index": index, "versions": [digest.hex() for digest in digests]}
    data = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    return hashlib.sha256(b"\x00" + data).digest()


def merkle_root(leaves: Sequence[bytes]) -> bytes:
    """Root over leaves, in the order of their documents' ids by code point; SHA-256 of nothing where there are none.

    A node is SHA-256(0x01 || left || right); one without a neighbour moves up as it is.
    """
    level = list(leaves)
    if not level:
        return hashlib.sha256(b"").digest()
    while len(level) > 1:
        level = _above(level)
    return level[0]


def merkle_proof(leaves: Sequence[bytes], position: int) -> list[ProofStep]:
    """The nodes by which the leaf at a position leads to the root, from below.

    Raises:
        IndexError: no leaf stands there.
    """
    if not 0 <= position < len(leaves):
        raise IndexError(f"no leaf {position} among {len(leaves)}")
    level, steps = list(leaves), list[ProofStep]()
    while len(level) > 1:
        beside = position ^ 1
        if beside < len(level):
            steps.append(ProofStep(level[beside], left=beside < position))
        level, position = _above(level), position // 2
    return steps


def check_proof(leaf: bytes, proof: Iterable[ProofStep], root: bytes) -> bool:
    """Whether a proof leads from a leaf to a root."""
    for step in proof:
        leaf = _node(step.digest, leaf) if step.left else _node(leaf, step.digest)
    return leaf == root


def _above(level: Sequence[bytes]) -> list[bytes]:
    pairs = [_node(left, right) for left, right in zip(level[::2], level[1::2], strict=False)]
    return pairs if len(level) % 2 == 0 else [*pairs, level[-1]]


def _node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\x01" + left + right).digest()
