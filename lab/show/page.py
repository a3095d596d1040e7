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
from typing import TYPE_CHECKING, Any

from lab.show.canvas import COLOURS, GRID, GUIDE, INK, PAPER, drawn

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FOLDER = Path(__file__).parent


def render(**parts: Any) -> str:
    """The template filled with these parts."""
    import jinja2

    script = (FOLDER / "explore.js").read_text(encoding="utf-8")
    numbers = itertools.count(1)
    loader = jinja2.FileSystemLoader(FOLDER)
    pages = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, loader=loader)
    text: str = pages.get_template("page.html.jinja").render(
        version=metadata.version("mini-lab"),
        draw=lambda picture: inline(picture.draw, f"picture-{next(numbers)}", picture.size),
        script={
            "text": script,
            "digest": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        },
        **parts,
    )
    return text


VARIABLES = {
    **{colour.lower(): f"var(--series-{number})" for number, colour in enumerate(COLOURS, 1)},
    INK: "var(--ink)",
    GUIDE: "var(--guide)",
    GRID: "var(--grid)",
    PAPER: "var(--paper)",
}
"""CSS variables of a page for the lab's colours."""

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # letters, not their outlines
    "svg.hashsalt": "mini-lab",
    "savefig.transparent": True,
    **dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK
    ),
}


def inline(draw: Callable[[Figure], Any], name: str, size: tuple[float, float]) -> str:
    """The figure that `draw` draws (inches: `size`), as an SVG element. `name` keeps its ids apart
    from others'."""
    import matplotlib

    file = io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure = drawn(draw, size)
        if len(figure.axes) == 1 and not figure.get_suptitle():  # the page has a heading of its own
            figure.axes[0].set_title("")
        figure.suptitle("")
        for ax in figure.axes:
            ax.patch.set_visible(False)
        figure.savefig(
            file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
        )
    text = file.getvalue()
    head, body = text[text.index("<svg") :].split(">", 1)
    head = re.sub(r' (width|height)="[^"]*"', "", head) + ">"
    body = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", body, flags=re.DOTALL)
    body = re.sub(r'\bid="', f'id="{name}-', body)
    body = re.sub(r'(href="#|url\(#)', rf"\1{name}-", body)
    body = re.sub(r"'DejaVu Sans'[^;\"]*sans-serif", "system-ui, sans-serif", body)
    for colour, variable in VARIABLES.items():
        body = body.replace(colour, variable)
    return head + re.sub(r"\n\s*", "\n", body)
