"""A finished run over pictures with hostile files and captions."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from PIL import PngImagePlugin
from rich.console import Console

from pipeline.plan.description import build_config
from pipeline.store.files import Store
from ray_jobs.audit import run_audit
from ray_jobs.progress import Reporter
from tests.helpers.picture_models import encoded, picture_audit, random_pictures, save_llava, write_pictures

HOSTILE = "<script>alert(1)</script>"


DETECTOR = "loss(part=description, caption=given)"


def hostile_picture() -> bytes:
    info = PngImagePlugin.PngInfo()
    info.add_text("Comment", HOSTILE)
    return encoded(random_pictures([(300, 100)])[0], "PNG", pnginfo=info)


def finished_run(folder: Path, **arguments: Any) -> Store:
    """A finished run that selected pictures, some of them with a hostile file and all with a hostile caption."""
    save_llava(folder / "llava")
    write_pictures(folder / "unseen.parquet", 12, 2)
    write_pictures(folder / "audit.parquet", 8, 1, {row: hostile_picture() for row in (0, 3)})
    names = pq.read_table(folder / "audit.parquet")
    captions = [f"{HOSTILE} a red house {row}" for row in range(8)]
    pq.write_table(names.set_column(2, "caption", [captions]), folder / "audit.parquet")
    selection = {"name": "m", "detectors": [DETECTOR], "procedure": "bh", "alpha": 0.999}
    detectors: list[Any] = [{"loss": {"part": "description", "caption": "given"}}]
    given = picture_audit(folder, folder / "llava", detectors=detectors, selections=[selection], overlap="drop")
    outcome = run_audit(build_config(given), Reporter(Console(), quiet=True), **arguments)
    assert outcome.report
    return Store(given["run"])
