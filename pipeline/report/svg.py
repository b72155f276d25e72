"""Matplotlib's figures as small SVG that can stand in a page: no script, no style, no address, one colour of text.

What a page's policy could forbid or its other figures could clash with is taken out: the style element and attributes,
identifiers that are not of this figure alone, fonts. Dark ink becomes `currentColor`, so that text and axes have the
colour of the page's text, light or dark; the other colours are changed by `figures.css`.
"""

from __future__ import annotations

import hashlib
import io
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING
from xml.etree import ElementTree

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
FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', Arial, sans-serif"
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
_NUMBER = re.compile(r"-?\d+\.\d+")
_REFERENCE = re.compile(r"#([\w.-]+)")
_COORDINATES = {"d", "x", "y", "transform", "points", "stroke-width", "stroke-dasharray", "font-size"}
_NOTHING = {"font-family", "id", "version"}
_DEFAULTS = {"stroke-dashoffset": "0", "fill": "currentColor"}  # the latter of the whole figure
_NO_TURN = re.compile(r"rotate\(-?0 [^)]*\)")


@dataclass(frozen=True, slots=True)
class FigureImage:
    """A figure: its kind and file name, what it shows in words, and the SVG."""

    kind: str  # what of: scores, p-values, quantiles, alphas, groups, w, weights, roc, ...
    file: str
    title: str
    alt: str  # one sentence, with the numbers
    caption: str
    svg: Markup  # the file, and as it stands in a page


Paint = Callable[["Figure", "Axes"], None]


def draw(kind: str, file: str, title: str, alt: str, caption: str, paint: Paint) -> FigureImage:
    """A figure of one pair of axes.

    Args:
        kind: of figure.
        file: its name, ending in .svg; no two figures of a page share one.
        title: a few words.
        alt: what it shows in one sentence.
        caption: what a reader must know to read it.
        paint: draws on the axes, and makes the legend if there is one.
    """
    import matplotlib  # costs a second, and nothing but a page needs it

    with matplotlib.rc_context(SETTINGS), warnings.catch_warnings():  # type: ignore[arg-type]
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # the reader's fonts draw the text
        figure = _figure_class()(figsize=SIZE, layout="constrained")
        paint(figure, figure.add_subplot())
        buffer = io.BytesIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    return FigureImage(kind, file, title, alt, caption, _page_svg(buffer.getvalue(), file, alt))


@cache
def _figure_class() -> type[Figure]:
    """Figures that are laid out once and drawn once; matplotlib does both twice when it saves one, to the same end."""
    from matplotlib.backend_bases import RendererBase
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    class OnceDrawn(Figure):
        def draw(self, renderer: RendererBase) -> None:
            layout = self.get_layout_engine()
            if isinstance(layout, ConstrainedLayoutEngine):  # the first of two calls, of which nothing is kept
                layout.execute(self)
                self.set_layout_engine("none")
            else:
                super().draw(renderer)

    return OnceDrawn


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


def _page_svg(drawn: bytes, file: str, alt: str) -> Markup:
    root = ElementTree.fromstring(drawn)
    width, height = root.get("viewBox", "").split()[2:]
    _clean(root)
    prefix = f"f{hashlib.sha256(file.encode()).hexdigest()[:8]}-"
    _rename(root, prefix)
    for name in list(root.attrib):
        if name != "viewBox":
            del root.attrib[name]
    root.attrib.update(
        {
            "xmlns": "http://www.w3.org/2000/svg",
            "width": _short(width),
            "height": _short(height),
            "role": "img",
            "aria-label": visible(alt),
            "fill": "currentColor",
            "stroke-linejoin": "round",
            "stroke-linecap": "butt",
            "font-family": FONTS,
        }
    )
    return Markup(ElementTree.tostring(root, encoding="unicode", short_empty_elements=True) + "\n")


def _clean(element: ElementTree.Element) -> None:
    """Tags without their namespace, attributes in the place of styles, no group that groups nothing."""
    element.tag = element.tag.rpartition("}")[2]
    style = element.attrib.pop("style", "")
    for declaration in filter(None, map(str.strip, style.split(";"))):
        name, _, value = declaration.partition(":")
        element.set(name.strip(), value.strip())
    attributes = {}
    for name, value in element.attrib.items():
        key = name.rpartition("}")[2]
        if (key in _NOTHING and key != "id") or _NO_TURN.fullmatch(value):
            continue
        text = "currentColor" if value.lower() == INK else value
        if key in _COORDINATES:
            text = _NUMBER.sub(lambda match: _short(match.group()), " ".join(text.split()))
            text = re.sub(r" ?([A-Za-z]) ?", r"\1", text) if key == "d" else text
        if _DEFAULTS.get(key) != text:
            attributes[key] = text
    element.attrib.clear()
    element.attrib.update(attributes)
    children = []
    for child in element:
        _clean(child)
        invisible = child.tag == "path" and child.get("fill") == "none" and "stroke" not in child.attrib
        if child.tag in ("metadata", "style") or invisible:
            continue
        bare = child.tag == "g" and not set(child.attrib) - {"id"}
        children += list(child) if bare else [child]
    for child in children:
        child.tail = None
    element[:] = [child for child in children if child.tag not in ("g", "defs") or len(child)]
    if not (element.text or "").strip():
        element.text = None


def _rename(root: ElementTree.Element, prefix: str) -> None:
    """Identifiers that no other figure has, in their order, and only where something refers to them."""
    texts = [value for element in root.iter() for name, value in element.attrib.items() if name != "id"]
    wanted = {name for text in texts for name in _REFERENCE.findall(text) if "url(" in text or text.startswith("#")}
    names: dict[str, str] = {}
    for element in root.iter():
        name = element.attrib.pop("id", "")
        if name in wanted:
            names[name] = f"{prefix}{len(names)}"
            element.set("id", names[name])
    for element in root.iter():
        for key, value in element.attrib.items():
            if "url(#" in value or (key == "href" and value.startswith("#")):
                element.set(key, _REFERENCE.sub(lambda match: "#" + names[match.group(1)], value))


def _short(number: str) -> str:
    """A coordinate to a hundredth of a unit."""
    return f"{round(float(number), 2) + 0.0:.2f}".rstrip("0").rstrip(".")
