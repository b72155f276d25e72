"""Progress in a notebook: one output of the cell, written anew. Needs nothing but the kernel of the notebook."""

from __future__ import annotations

import contextlib
import html
import sys
import time
import uuid
from typing import Any

from pipeline.errors import LINE_BREAK, visible

REDRAW_SECONDS = 0.5


def notebook_shell() -> Any:
    """The shell of the notebook that this process is the kernel of; None elsewhere, also in IPython on a terminal."""
    ipython = sys.modules.get("IPython")  # whoever has not imported it is no notebook
    shell = None if ipython is None else ipython.get_ipython()
    return shell if getattr(shell, "kernel", None) is not None else None


class NotebookBar:
    """A bar and a line below the cell, kept up to date through the display hook of the kernel."""

    def __init__(self, shell: Any) -> None:
        """Show nothing yet.

        Args:
            shell: of `notebook_shell`.
        """
        self._publish = shell.display_pub.publish
        self._name = uuid.uuid4().hex
        self._shown = False
        self._next = 0.0
        self._last: tuple[float | None, str] = (None, "")

    @property
    def is_due(self) -> bool:
        """Whether the last drawing is so old that another one is worth it."""
        return time.monotonic() >= self._next

    def draw(self, share: float | None, line: str) -> None:
        """Draw the bar.

        Args:
            share: done, in [0, 1]; None where it is not known.
            line: what the bar is of.
        """
        self._next = time.monotonic() + REDRAW_SECONDS
        self._last = share, line
        line = visible(line).replace("\n", LINE_BREAK)
        percent = "" if share is None else f"{100 * share:.0f}% "
        value = "" if share is None else f' value="{share:.4f}"'
        bar = f'<progress max="1"{value} style="width:16em" aria-label="progress"></progress>'
        text = f'<span style="white-space:pre-wrap;font-family:monospace">{html.escape(percent + line)}</span>'
        data = {"text/plain": percent + line, "text/html": f"<div>{bar} {text}</div>"}
        with contextlib.suppress(Exception):  # of a connection to the browser: progress is worth no failure
            self._publish(data, transient={"display_id": self._name}, update=self._shown)
            self._shown = True

    def stop(self, ended: bool) -> None:
        """Say of a bar that is not full that nothing moves it any more."""
        share, line = self._last
        if self._shown and not ended:
            self.draw(0.0 if share is None else share, f"stopped: {line}")
