"""The progress of a trial, in a small file of its folder that `seenset status` reads."""

from __future__ import annotations

from types import TracebackType

from pydantic import Field

from pipeline.errors import ExitCode, UserError
from pipeline.results.status import RunState, Status, final_state, run_status
from pipeline.run.records import MANIFEST_FILE, VersionedRecord, read_record
from pipeline.run.remedies import DRIVER_GONE
from pipeline.store.files import Store
from pipeline.store.lock import lock_is_live

TRIAL_STATUS_FILE = "trial_status.json"


class TrialStatus(VersionedRecord):
    """The progress or the end of a trial: `trial_status.json`."""

    state: RunState = Field(description="running; complete; incomplete: the same command resumes it; failed.")
    exit_code: int | None = Field(description="Exit code of the command; null while it runs.")
    message: str | None = Field(description="Why the trial is incomplete or failed, in one line.")
    audits: int = Field(description="Number of contaminated models of all points; points may share some.")
    audits_done: int = Field(description="Number of models that are contaminated and audited.")
    points: int = Field(description="Points of the sweep; 1 without one.")
    points_done: int = Field(description="Number of points whose repeats are computed.")
    audit_run: str | None = Field(description="Run directory of the current audit; null where there is none.")
    audit: Status | None = Field(None, description="Progress of that audit; not kept in trial_status.json.")

    def line(self) -> str:
        """The progress in one line."""
        counts = f"audits {self.audits_done}/{self.audits}, points {self.points_done}/{self.points}"
        return f"trial {self.state}: {counts}"


class TrialProgress:
    """Writes trial_status.json while a trial runs; a context manager that writes the final state."""

    def __init__(self, store: Store, audits: int, points: int) -> None:
        self.store = store
        self.status = TrialStatus(
            state="running",
            exit_code=None,
            message=None,
            audits=audits,
            audits_done=0,
            points=points,
            points_done=0,
            audit_run=None,
        )

    def __enter__(self) -> TrialProgress:
        """Write the state running."""
        self._write()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write the final state."""
        state, code, message = ("complete", ExitCode.DONE, None) if error is None else final_state(error)
        self._write(state=state, exit_code=int(code), message=message)

    def begin_audit(self, run: str) -> None:
        """Record the run directory of the current audit."""
        self._write(audit_run=run)

    def end_audit(self) -> None:
        """Count a contaminated and audited model."""
        self._write(audits_done=self.status.audits_done + 1, audit_run=None)

    def end_point(self) -> None:
        """Count a point whose repeats are computed."""
        self._write(points_done=self.status.points_done + 1)

    def _write(self, **changes: object) -> None:
        self.status = self.status.model_copy(update=changes)
        self.store.write_json(TRIAL_STATUS_FILE, self.status.model_dump(mode="json", by_alias=True, exclude={"audit"}))


def trial_status(folder: str) -> TrialStatus | None:
    """The progress of a trial, from storage alone; None where the folder is not that of a trial.

    Raises:
        UserError: the work folder of trials, or a damaged file.
    """
    store = Store(folder)
    if store.exists(MANIFEST_FILE):
        return None
    status = read_record(store, TRIAL_STATUS_FILE, TrialStatus, "seenset trial writes it again")
    if status is None:
        if audits := store.names("audits"):
            raise UserError(
                f"{store.url} is the work folder of trials: give the folder that `run` of one names, or a single "
                f"audit, {store.url}/audits/{audits[0]}/run"
            )
        return None
    if status.state == "running" and not lock_is_live(store):
        update = {"state": "incomplete", "message": DRIVER_GONE}
        status = status.model_copy(update=update)
    if status.audit_run is not None and Store(status.audit_run).exists(MANIFEST_FILE):
        status = status.model_copy(update={"audit": run_status(status.audit_run)})
    return status
