"""The checks of the documents in a process of their own, beside one that opens a model.

Both import libraries for seconds, and threads of one process would do so in turn.
"""

from __future__ import annotations

import os

from pipeline.audit.plan import Plan
from pipeline.audit.precheck import Effort, Precheck, check_documents
from pipeline.stages.child import Child, LostChildError

NICENESS = 10
"""Of a check beside work that has begun: workers that start have most of the cores."""


def check_apart(plan: Plan, effort: Effort, niceness: int = 0) -> Precheck:
    """`check_documents` in a process that ends with this one; where there can be none, in this process.

    Args:
        plan: of the audit.
        effort: how much to read.
        niceness: how far the process stands back where others want its core, in [0, 19].

    Raises:
        UserError: as `check_documents`.
    """
    try:
        child = Child(quiet=True)
    except OSError:
        return check_documents(plan, effort)
    try:
        return child.call(_check, plan, effort, niceness)
    except LostChildError:  # what fails there is done and said here
        return check_documents(plan, effort)
    finally:
        child.end(0)


def check_aside(plan: Plan, effort: Effort) -> Precheck:
    """`check_apart` beside work that has begun and does not wait for it."""
    return check_apart(plan, effort, NICENESS)


def _check(plan: Plan, effort: Effort, niceness: int) -> Precheck:
    os.nice(niceness)
    return check_documents(plan, effort)
