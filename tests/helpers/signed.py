"""Digests of a run directory whose files a test has changed, written as the program writes them."""

from typing import Any

from pipeline.answers.select import run_digests
from pipeline.checks.blind import blind_file
from pipeline.checks.diagnostic import BlindDiagnostic
from pipeline.config.selection import HISTORY
from pipeline.errors import UserError
from pipeline.results.status import STATUS_FILE
from pipeline.run.digests import digests_file, file_digests, scores_digest, write_digests
from pipeline.run.records import MANIFEST_FILE, SHARDS_FILE, write_part
from pipeline.stages import SCORING
from pipeline.store.files import Store
from pipeline.store.receipts import read_receipts, sealed


def sign_manifest(store: Store) -> None:
    """Write the digests of the manifest as it is now, whatever it holds."""
    _seal(store, MANIFEST_FILE, shard_table=store.digest(SHARDS_FILE))


def sign_status(store: Store) -> None:
    """Write the digest of status.json as it is now, whatever it holds."""
    _seal(store, STATUS_FILE)


def _seal(store: Store, name: str, **changes: Any) -> None:
    try:
        value = store.read_json(name)
    except UserError:
        return
    if isinstance(value, dict) and "digest" in value:
        kept = {key: value[key] for key in value if key != "digest"}
        store.write_json(name, sealed({**kept, **changes}))


def sign(store: Store) -> Store:
    """Write the digests of the manifest, the status and every answer as they are now; a store that has read nothing."""
    store = Store(store.url)
    sign_manifest(store)
    sign_status(store)
    shared = run_digests(store)
    scores = scores_digest(receipt for receipt in read_receipts(store, SCORING) if receipt.role == "audit")
    for selection in store.names("selection"):
        if selection != HISTORY and store.names(f"selection/{selection}"):
            paths = store.fs.find(store.path(f"selection/{selection}"))
            names = [path[len(store.root) + 1 :] for path in paths]
            files = file_digests(store, [name for name in names if name != digests_file(selection)])
            write_digests(store, selection, {**shared, **files}, scores)
    return store


def file_blind_test(store: Store, outcome: BlindDiagnostic) -> None:
    """File what the blind test of a run came to, which the program finds out once."""
    write_part(store, blind_file("unseen"), outcome)
    sign(store)
