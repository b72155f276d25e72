"""What a run says and stops at before it scores: documents that cannot give the answer."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from pipeline.audit.forecast import outlooks
from pipeline.audit.plan import Plan
from pipeline.audit.precheck import (
    RUN,
    WARNING,
    Precheck,
    check_documents,
    check_shared,
    check_weighable,
    file_precheck,
    filed_precheck,
    remarks,
)
from pipeline.audit.undecodable import check_decodable
from pipeline.config.corpus import Role
from pipeline.errors import UserError
from pipeline.report.wording.documents import checked_before
from pipeline.store.files import Store


def check_before_scoring(
    plan: Plan,
    store: Store,
    say: Callable[[str], None],
    begun: Future[Precheck] | None = None,
) -> None:
    """Check the documents of a run once, before any model is loaded, and say what is wrong; a resume reads the file.

    Nothing of this replaces what selection checks over all scored documents.

    Args:
        plan: of the run.
        store: the run directory.
        say: called with each line.
        begun: the checks, from `begin_checks`; None: they are made here.

    Raises:
        UserError: an input is of another encoding, or calibration documents are near copies of audited ones, and the
            config does not say `overlap: drop`.
    """
    earlier = filed_precheck(store, plan.shards, plan.config.seed)
    checked = earlier or (check_documents(plan, RUN) if begun is None else begun.result())
    check_decodable(checked.undecodable)
    check_shared(checked, plan.config)
    check_weighable(checked, plan.config)
    if earlier is None:
        file_precheck(checked, store, plan.shards, plan.config.seed)
    lines = remarks(checked, plan.config)
    counts = {str(role): n if checked.whole else _at_least(n, plan, role) for role, n in checked.documents.items()}
    for entry in outlooks(plan.config, {role: {"documents": n, "exact": False} for role, n in counts.items()}):
        if entry["ok"] is False:
            lines.append(f"{WARNING}selection {entry['name']}: {entry['sentence']}")
    if lines and not checked.whole:
        say(checked_before(checked.scope))
    for line in lines:
        say(line)


def _at_least(count: int, plan: Plan, role: Role) -> int:
    """The documents of a role as planned; those that were read where a damaged file hides their number."""
    try:
        return plan.documents(role)[0]
    except UserError:
        return count
