"""Matplotlib's figures as SVG files, which pages show as images: a browser runs and loads nothing of an image.

`figures.css` inverts the lightness of the colours on a dark page.
"""

from __future__ import annotations

import base64
import io
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from markupsafe import Markup

from pipeline.errors import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, INK = "#0072B2", "#D55E00", "#009E73", "#333333"  # Okabe & Ito: told apart by every eye
COLOURS = (BLUE, ORANGE, GREEN, "#CC79A7", "#E69F00", "#56B4E9", INK)
SIZE = (5.4, 3.7)
"""Inches, at 72 units each; on a narrow phone a unit is still a pixel."""
LONGEST_LABEL, SHORT_LABEL = 40, 26
AXES_HEIGHT, LINE_HEIGHT = 3.1, 0.21
SETTINGS = {
    "font.family": "DejaVu Sans",  # as wide as any that a page may use, so that what is laid out by it fits
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
FONTS = b"'DejaVu Sans', 'Segoe UI', Roboto, Arial, sans-serif"  # a reader may not have the first one
_TAG = re.compile(rb"<(?:path|text) [^>]*")
_FRACTION = re.compile(rb"(\.\d\d)\d+")


@dataclass(frozen=True, slots=True)
class FigureImage:
    """A figure: its file name, what it shows in words, and its file."""

    file: str
    title: str
    alt: str  # one sentence, with the numbers
    caption: str
    svg: bytes

    @property
    def image(self) -> Markup:
        """The figure as a page shows it."""
        source = base64.b64encode(self.svg).decode()
        return Markup('<img src="data:image/svg+xml;base64,{}" alt="{}">').format(Markup(source), visible(self.alt))


Paint = Callable[["Figure", "Axes"], None]


def draw(file: str, title: str, alt: str, caption: str, paint: Paint) -> FigureImage:
    """A figure of one pair of axes.

    Args:
        file: its name, ending in .svg; no two figures of a page share one.
        title: a few words.
        alt: what it shows in one sentence.
        caption: what a reader must know to read it.
        paint: draws on the axes, and makes the legend if there is one.
    """
    import matplotlib  # costs a second, and nothing but a page needs it
    from matplotlib.figure import Figure

    with matplotlib.rc_context(SETTINGS), warnings.catch_warnings():  # type: ignore[arg-type]
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # the reader's fonts draw the text
        figure = Figure(figsize=SIZE, layout="constrained")
        paint(figure, figure.add_subplot())
        buffer = io.BytesIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    return FigureImage(file, title, alt, caption, _TAG.sub(_shorten, buffer.getvalue()))


def _shorten(tag: re.Match[bytes]) -> bytes:
    """A tag with its coordinates to a hundredth of a point, and with fonts to fall back on."""
    return _FRACTION.sub(rb"\1", tag.group()).replace(b"'DejaVu Sans'", FONTS)


def label(text: str) -> str:
    """A name that a user chose, as a figure shows it: nothing hides, and a long one is cut."""
    shown = " ".join(visible(text).split())
    return shown if len(shown) <= LONGEST_LABEL else shown[: LONGEST_LABEL - 1] + "…"


def put_legend(figure: Figure, title: str | None = None) -> None:
    """The legend above the axes, which keep their height: the figure grows."""
    _, names = figure.axes[0].get_legend_handles_labels()
    columns = 2 if len(names) > 3 and max(map(len, names)) <= SHORT_LABEL else 1
    figure.set_figheight(AXES_HEIGHT + LINE_HEIGHT * (-(-len(names) // columns) + (title is not None)))
    figure.legend(loc="outside upper left", alignment="left", ncols=columns, title=title)


def count_axis(axes: Axes) -> None:
    """Whole numbers with thousands apart on the vertical axis."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
