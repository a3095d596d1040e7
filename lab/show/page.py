"""Sections as one HTML page: the template page.html.jinja filled with values.

Values come from outside, so the template escapes all of them; only the lab's own drawings are
inserted unescaped. The content security policy allows the page's own script (explore.js) and no
other.
"""

from __future__ import annotations

import base64
import hashlib
import io
import itertools
import re
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from lab.show.canvas import COLOURS, GRID, GUIDE, INK, PAPER, drawn, own_style
from lab.show.section import Picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FOLDER = Path(__file__).parent

VARIABLES = {
    **{colour.lower(): f"var(--series-{number})" for number, colour in enumerate(COLOURS, 1)},
    INK: "var(--ink)",
    GUIDE: "var(--guide)",
    GRID: "var(--grid)",
    PAPER: "var(--paper)",
}
"""CSS variables of a page for the lab's colours."""

STYLE: dict[str, object] = {
    "svg.fonttype": "none",  # letters, not their outlines
    "svg.hashsalt": "mini-lab",
    "savefig.transparent": True,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}
NO_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))


def render(**parts: object) -> str:
    """The template filled with these parts."""
    import jinja2

    script = (FOLDER / "explore.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    numbers = itertools.count(1)

    def draw(picture: Picture) -> str:
        return inline(picture.draw, f"picture-{next(numbers)}", picture.size)

    loader = jinja2.FileSystemLoader(FOLDER)
    templates = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, loader=loader
    )
    page: str = templates.get_template("page.html.jinja").render(
        version=metadata.version("mini-lab"),
        draw=draw,
        script={"text": script, "digest": digest},
        **parts,
    )
    return page


def inline(draw: Callable[[Figure], object], name: str, size: tuple[float, float]) -> str:
    """The figure that `draw` draws (`size` in inches), as an SVG element.

    `name` keeps its ids apart from those of other pictures.
    """
    file = io.StringIO()
    figure = drawn(draw, size, STYLE)
    _remove_title(figure)
    for ax in figure.axes:
        ax.patch.set_visible(False)
    with own_style(STYLE):
        figure.savefig(file, format="svg", metadata=NO_METADATA)
    svg = file.getvalue()
    head, body = svg[svg.index("<svg") :].split(">", 1)
    head = re.sub(r' (width|height)="[^"]*"', "", head)
    body = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", body, flags=re.DOTALL)
    body = re.sub(r'\bid="', f'id="{name}-', body)
    body = re.sub(r'(href="#|url\(#)', rf"\1{name}-", body)
    body = re.sub(r"'DejaVu Sans'[^;\"]*sans-serif", "system-ui, sans-serif", body)
    for colour, variable in VARIABLES.items():
        body = body.replace(colour, variable)
    body = re.sub(r"\n\s*", "\n", body)
    return f"{head}>{body}"


def _remove_title(figure: Figure) -> None:
    """Remove the title of a figure, since the page has a heading; panels keep theirs."""
    if len(figure.axes) == 1 and not figure.get_suptitle():
        figure.axes[0].set_title("")
    figure.suptitle("")
