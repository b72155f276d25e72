"""A commitment to versions and indices before publication: a Merkle tree over salted digests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow.parquet as pq

_BATCH = 256  # documents per batch, with all their versions
STEP = 33  # bytes per step of a proof
_quoted = json.JSONEncoder(ensure_ascii=False).encode


Proof = Sequence[bytes]
"""The steps from a leaf to the root: a byte that is 1 if the other node is on the left, and 32 bytes of that node."""


def version_digest(salt: bytes, text: str) -> bytes:
    """d_i = SHA-256(salt || UTF-8 of a version), salt of 32 bytes."""
    return hashlib.sha256(salt + text.encode()).digest()


def text_digests(texts: Iterable[str]) -> bytes:
    """SHA-256 of the UTF-8 of each text, concatenated."""
    return b"".join(hashlib.sha256(text.encode()).digest() for text in texts)


def leaf_digest(doc_id: str, index: int, digests: bytes) -> bytes:
    """Leaf of a document: SHA-256(0x00 || canonical JSON of {id, index, versions: [d_1, ..., d_k]}).

    Canonical JSON is that of RFC 8785: keys in order, no blanks, UTF-8; digests are lower-case hexadecimal.

    Args:
        doc_id: id of the document.
        index: index of the published version, from 0.
        digests: digests of all versions, concatenated in order.
    """
    listed = digests.hex(",", 32).replace(",", '","')
    data = f'{{"id":{_quoted(doc_id)},"index":{index},"versions":["{listed}"]}}'
    return hashlib.sha256(b"\x00" + data.encode()).digest()


def merkle_root(leaves: Sequence[bytes]) -> bytes:
    """Root over leaves, ordered by the ids of their documents by code point; SHA-256 of nothing without leaves.

    A node is SHA-256(0x01 || left || right); a node without a neighbour moves up unchanged.
    """
    return _levels(leaves)[-1][0] if leaves else hashlib.sha256(b"").digest()


def merkle_proofs(leaves: Sequence[bytes]) -> list[Proof]:
    """The proof of each leaf."""
    levels, proofs = _levels(leaves), list[Proof]()
    for position in range(len(leaves)):
        steps = []
        for level in levels[:-1]:
            sibling = position ^ 1
            if sibling < len(level):
                steps.append(bytes([sibling < position]) + level[sibling])
            position //= 2
        proofs.append(steps)
    return proofs


def compute_roots(leaves: Sequence[bytes], proofs: Iterable[bytes]) -> list[bytes]:
    """The root for each leaf and its proof, whose steps are concatenated.

    A path stops at a node that another path with the same remaining steps has reached.
    """
    made: dict[bytes, bytes] = {}  # node and the remaining steps -> root
    roots = []
    for leaf, proof in zip(leaves, proofs, strict=True):
        root, passed = leaf, []
        for start in range(0, len(proof), STEP):
            sibling, end = proof[start + 1 : start + STEP], start + STEP
            root = _node(sibling + root if proof[start] == 1 else root + sibling)
            passed.append(root + proof[end:])
            if (above := made.get(passed[-1])) is not None:
                root = above
                break
        made.update(dict.fromkeys(passed, root))
        roots.append(root)
    return roots


@dataclass(frozen=True, slots=True)
class CommittedDocument:
    """A document of `private/versions.parquet`, and its leaf in the commitment."""

    id: str
    index: int  # index of the published version
    salt: bytes  # 32
    digests: bytes  # d_i of each version, concatenated
    texts: bytes  # SHA-256 of each version without the salt, concatenated

    @property
    def leaf(self) -> bytes:
        """Its leaf digest."""
        return leaf_digest(self.id, self.index, self.digests)


def read_committed(parquet: pq.ParquetFile) -> Iterator[CommittedDocument]:
    """The documents of the private file of `seenset mark`, in the order of the file, which differs from the leaves'.

    Memory holds the texts of one batch.
    """
    for batch in parquet.iter_batches(_BATCH, columns=["id", "index", "salt", "versions"]):
        for row in batch.to_pylist():
            digests = b"".join(version_digest(row["salt"], text) for text in row["versions"])
            yield CommittedDocument(row["id"], row["index"], row["salt"], digests, text_digests(row["versions"]))


def _levels(leaves: Sequence[bytes]) -> list[list[bytes]]:
    """The nodes of a tree, from the leaves to the root."""
    levels = [list(leaves)]
    while len(levels[-1]) > 1:
        levels.append(_above(levels[-1]))
    return levels


def _above(level: Sequence[bytes]) -> list[bytes]:
    pairs = [_node(left + right) for left, right in zip(level[::2], level[1::2], strict=False)]
    return pairs if len(level) % 2 == 0 else [*pairs, level[-1]]


def _node(pair: bytes) -> bytes:
    return hashlib.sha256(b"\x01" + pair).digest()
