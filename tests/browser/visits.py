"""A page in a real browser, with the network cut, and everything written down that it should not have done."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

SERIOUS = ("serious", "critical")
PHONE = {"width": 390, "height": 844}
DESKTOP = {"width": 1200, "height": 900}
MOST_STOPS = 400


@dataclass(frozen=True, slots=True)
class Visit:
    """An open page, and what went wrong on it: dialogs, console messages, errors, requests."""

    page: Any
    problems: list[str]

    def watch(self, address: str) -> None:
        """Go to an address, with the network cut, and note what goes wrong from now on."""

        def judge(route: Any) -> None:
            if route.request.url.partition("#")[0] == address:
                route.continue_()
                return
            self.problems.append(f"request: {route.request.url}")
            route.abort()

        def dismiss(dialog: Any) -> None:
            self.problems.append(f"dialog: {dialog.message}")
            dialog.dismiss()

        self.page.context.route("**/*", judge)
        self.page.on("dialog", dismiss)
        self.page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        self.page.on("console", lambda message: self.problems.append(f"console: {message.type} {message.text}"))
        self.page.goto(address, wait_until="load")

    def open_folds(self) -> None:
        """Open every fold; of folds that exclude one another the first stays."""
        self.page.evaluate("for (const fold of document.querySelectorAll('details:not([name])')) fold.open = true")

    def picture(self, path: Path) -> np.ndarray:
        """A screenshot of the page's first screens into a file; every second pixel: uint8, (height, width, 3)."""
        path.write_bytes(self.page.screenshot(full_page=True, clip={"x": 0, "y": 0, "width": 1200, "height": 1600}))
        return np.asarray(Image.open(path).convert("RGB"))[::2, ::2]

    def tab_stops(self) -> list[str]:
        """What the Tab key reaches, in order, each as its tag and its first words."""
        stops = []
        self.page.evaluate("document.activeElement.blur()")
        for _ in range(MOST_STOPS):
            self.page.keyboard.press("Tab")
            stop = self.page.evaluate(
                "(() => { const e = document.activeElement; if (e === document.body) return null;"
                " return e.tagName.toLowerCase() + ' ' + (e.getAttribute('aria-label') || e.textContent).trim(); })()"
            )
            if stop is None:
                return stops
            stops.append(stop)
        raise AssertionError(f"the Tab key does not leave the page: {stops[-5:]}")


def serious_violations(visit: Visit) -> list[str]:
    """What axe-core calls serious or critical, each with the first elements that it names."""
    from axe_playwright_python.sync_playwright import Axe

    violations = Axe().run(visit.page).response["violations"]
    return [
        f"{one['impact']} {one['id']}: {one['help']}: {[node['html'][:160] for node in one['nodes'][:3]]}"
        for one in violations
        if one["impact"] in SERIOUS
    ]
