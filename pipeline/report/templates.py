"""Templates of pages and their script: one style, everything escaped, no external resources.

Matplotlib's figures become SVG files, which pages show as images: a browser runs no script of an image and loads no
resource of it. `figures.css` inverts the lightness of the colours on a dark page.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup
from pydantic import BaseModel

from pipeline.answers.stated_bounds import share_text
from pipeline.checks.resolution import null_share
from pipeline.errors import UserError, visible
from pipeline.report import brief
from pipeline.wording import percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_UNUSUAL = re.compile(r"[^\n\t\x20-\x7e]")
_EXPORTS = re.compile(r"export\s*\{[^}]*?([\w$]+) as default[^}]*\};?")

BLUE, ORANGE, GREEN, INK = "#0072B2", "#D55E00", "#009E73", "#333333"  # Okabe & Ito: safe for colour blindness
COLOURS = (BLUE, ORANGE, GREEN, "#CC79A7", "#E69F00", "#56B4E9", INK)
SIZE = (5.4, 3.7)
"""Inches, at 72 units each; on a narrow phone a unit is at least a pixel."""
LONGEST_LABEL, SHORT_LABEL = 40, 26
MOST_GROUPS = 20  # whose weights are in a table
AXES_HEIGHT, LINE_HEIGHT = 3.1, 0.21
SETTINGS = {
    "font.family": "DejaVu Sans",  # as wide as any font of a page, so that the layout fits
    "font.size": 10,
    "text.usetex": False,
    "text.parse_math": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "legend.frameon": False,
    "path.simplify": True,
    "svg.fonttype": "none",
    "svg.hashsalt": "seenset",
}
FONTS = b"'DejaVu Sans', 'Segoe UI', Roboto, Arial, sans-serif"  # the first font may be missing
_TAG = re.compile(rb"<(?:path|text) [^>]*")
_FRACTION = re.compile(rb"(\.\d\d)\d+")


def render(template: str, **values: Any) -> str:
    """A page from a template of this folder or of another package; all of its values are escaped.

    Args:
        template: file name; for another package with its name and a slash, as `pipeline.compare/comparison.html`.
        values: the values of the template; a missing one is an error.
    """
    return _environment().get_template(template).render(**values)


@cache
def _environment() -> Environment:
    """The cached environment: compiling a template takes longer than filling it in."""
    environment = Environment(
        loader=FunctionLoader(_source),
        autoescape=True,
        finalize=_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(percent=percent, pretty=_pretty)
    environment.filters.update(relative=lambda name, folders: folders.relative(name))
    environment.globals.update(null_share=null_share, share_text=share_text)
    environment.globals.update(role_names={"audit": "audited", "unseen": "known unseen", "seen": "known seen"})
    environment.globals.update(marks=brief.MARKS, guarantee_on_page=brief.guarantee_on_page)
    environment.globals.update(most_groups=MOST_GROUPS)
    environment.tests.update(on_card=brief.on_card)
    return environment


def _source(name: str) -> str:
    room, _, file = name.rpartition("/")
    return resources.files(room or "pipeline.report").joinpath(file).read_text(encoding="utf-8")


def _shown(value: Any) -> Any:
    """The text of any value before escaping: invisible characters are shown, and an empty value is a dash."""
    if value is None:
        return "\N{EN DASH}"
    return visible(value) if type(value) is str else value


def _pretty(value: Any) -> str:
    """A mapping, list or configuration as readable JSON."""
    plain = value.model_dump(mode="json", by_alias=True) if isinstance(value, BaseModel) else value
    return json.dumps(plain, indent=2, ensure_ascii=False)


@cache
def page_script() -> str:
    """One module script: DataTables and its use on the page.

    Raises:
        UserError: the package that contains DataTables is not installed, or has an unknown form.
    """
    bundle = _bundle().read_text(encoding="utf-8")
    exports = _EXPORTS.search(bundle)
    if exports is None or "</script" in bundle.lower():
        raise UserError(f"{_bundle()} is not the DataTables that the page needs: install itables 2.9")
    table = f"const DataTable = {exports.group(1)};"
    documents = resources.files("pipeline.report").joinpath("documents.js").read_text(encoding="utf-8")
    before, after = bundle[: exports.start()], bundle[exports.end() :]
    script = f"{before}{{\n{table}\n{documents}}}\n{after}"  # a block avoids name conflicts with the bundle
    return _UNUSUAL.sub(_as_base64, script)


def _as_base64(unusual: re.Match[str]) -> str:
    """An invisible character as a JavaScript escape; any other character unchanged."""
    character = unusual.group()
    return character if visible(character) == character else f"\\u{ord(character):04x}"


def script_hash(script: str) -> str:
    """The hash of an allowed script in a Content-Security-Policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")


def _bundle() -> Path:
    package = find_spec("itables")  # only located, because an import would load notebooks
    if package is None or not package.submodule_search_locations:
        raise UserError("the report needs the package itables, which contains DataTables: pip install 'itables>=2.9'")
    return Path(package.submodule_search_locations[0]) / "html" / "dt_bundle.js"


@dataclass(frozen=True, slots=True)
class FigureImage:
    """A figure: its file name, its text alternative, and its file."""

    file: str
    title: str
    alt: str  # one sentence, with the numbers
    caption: str
    svg: bytes

    @property
    def image(self) -> Markup:
        """The figure in the markup of a page."""
        source = base64.b64encode(self.svg).decode()
        return Markup('<img src="data:image/svg+xml;base64,{}" alt="{}">').format(Markup(source), visible(self.alt))


Paint = Callable[["Figure", "Axes"], None]


def draw(file: str, title: str, alt: str, caption: str, paint: Paint) -> FigureImage:
    """A figure of one pair of axes.

    Args:
        file: file name, ending in .svg, unique on a page.
        title: a short title.
        alt: the content in one sentence.
        caption: explanation for the reader.
        paint: draws on the axes, and makes the legend if there is one.
    """
    import matplotlib  # import takes a second, and only pages need it
    from matplotlib.figure import Figure

    with matplotlib.rc_context(SETTINGS), warnings.catch_warnings():  # type: ignore[arg-type]
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # the browser's fonts draw the text
        figure = Figure(figsize=SIZE, layout="constrained")
        paint(figure, figure.add_subplot())
        buffer = io.BytesIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    return FigureImage(file, title, alt, caption, _TAG.sub(_shorten, buffer.getvalue()))


def _shorten(tag: re.Match[bytes]) -> bytes:
    """A tag with coordinates rounded to a hundredth of a point, and with fallback fonts."""
    return _FRACTION.sub(rb"\1", tag.group()).replace(b"'DejaVu Sans'", FONTS)


def label(text: str) -> str:
    """A name from the user in a figure: invisible characters are shown, and a long name is cut."""
    shown = " ".join(visible(text).split())
    return shown if len(shown) <= LONGEST_LABEL else shown[: LONGEST_LABEL - 1] + "…"


def put_legend(figure: Figure, title: str | None = None) -> None:
    """Put the legend above the axes, which keep their height; the figure grows."""
    _, names = figure.axes[0].get_legend_handles_labels()
    columns = 2 if len(names) > 3 and max(map(len, names)) <= SHORT_LABEL else 1
    figure.set_figheight(AXES_HEIGHT + LINE_HEIGHT * (-(-len(names) // columns) + (title is not None)))
    figure.legend(loc="outside upper left", alignment="left", ncols=columns, title=title)


def count_axis(axes: Axes) -> None:
    """Whole numbers with thousands separators on the vertical axis."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
