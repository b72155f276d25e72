"""Where a ledger may be: in a folder of its own, as a run removes what it does not know from its directory."""

from __future__ import annotations

from pathlib import Path

from pipeline.audit.records import MANIFEST_FILE
from pipeline.errors import UserError
from pipeline.store.files import Store


def check_ledger_place(ledger: Store, run: Store) -> None:
    """Check that a ledger is in no run directory, and no run directory in it.

    Args:
        ledger: its folder.
        run: directory of a scan. Other runs are looked for on a disk alone.

    Raises:
        UserError: they are not apart.
    """
    there, here = ledger.url, run.url
    within = here if f"{there}/".startswith(f"{here}/") else None
    if within is None and f"{here}/".startswith(f"{there}/"):
        raise UserError(
            f"series.ledger {ledger.url}: run {run.url} is in it, and a ledger holds its entries alone: name a folder "
            "beside the run directories"
        )
    if within is None and ledger.local:
        folders = (there, *map(str, Path(there).parents))
        within = next((folder for folder in folders if Path(folder, MANIFEST_FILE).exists()), None)
    if within is not None:
        raise UserError(
            f"series.ledger {ledger.url} is in run directory {within}, and a run removes what is not its own: name a "
            "folder beside the run directories"
        )
