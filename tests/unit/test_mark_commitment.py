"""The commitment: a Merkle tree over salted digests, against a transcription of its definition."""

import hashlib

import pytest

from pipeline.mark.commitment import compute_roots, leaf_digest, merkle_proofs, merkle_root, version_digest


def sha(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def transcribed_root(leaves: list[bytes]) -> bytes:
    """Root as METHODS define it: pairs from the left, and an odd node moves up."""
    if len(leaves) == 1:
        return leaves[0]
    above = [sha(b"\x01" + leaves[i] + leaves[i + 1]) for i in range(0, len(leaves) - 1, 2)]
    return transcribed_root(above + ([leaves[-1]] if len(leaves) % 2 else []))


def some_leaves(count: int) -> list[bytes]:
    return [sha(f"leaf {i}".encode()) for i in range(count)]


def test_the_root_is_that_of_the_definition() -> None:
    assert (merkle_root([]), merkle_proofs([])) == (sha(b""), [])
    for count in (*range(1, 18), 100, 1001):
        assert merkle_root(some_leaves(count)) == transcribed_root(some_leaves(count))


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 33])
def test_a_proof_holds_for_its_leaf_alone(count: int) -> None:
    leaves = some_leaves(count)
    root = merkle_root(leaves)
    proofs = merkle_proofs(leaves)
    assert compute_roots(leaves, map(b"".join, proofs)) == [root] * count
    for leaf, proof in zip(leaves, proofs, strict=True):
        assert len(proof) <= (count - 1).bit_length()
        others = [other for other in leaves if other != leaf]
        assert root not in compute_roots(others, [b"".join(proof)] * len(others))


def test_a_leaf_is_canonical_json_of_salted_digests() -> None:
    salt, texts = bytes(range(32)), ["one", "zwei ö\n"]
    digests = [version_digest(salt, text) for text in texts]
    assert digests == [sha(salt + text.encode()) for text in texts]
    expected = f'{{"id":"a\\"ö","index":1,"versions":["{digests[0].hex()}","{digests[1].hex()}"]}}'
    assert leaf_digest('a"ö', 1, b"".join(digests)) == sha(b"\x00" + expected.encode())
    assert leaf_digest('a"ö', 0, b"".join(digests)) != leaf_digest('a"ö', 1, b"".join(digests))
