"""Sections as one HTML page: the template page.html.jinja filled with values.

Values come from outside, so the template escapes all of them; only the lab's own drawings are inserted unescaped. The
content security policy allows the page's own script (explore.js) and no other.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
from importlib import metadata
from pathlib import Path
from typing import Any

from lab.show import svg

FOLDER = Path(__file__).parent


def render(**parts: Any) -> str:
    """The template filled with these parts."""
    import jinja2

    script, numbers = (FOLDER / "explore.js").read_text(encoding="utf-8"), itertools.count(1)
    loader = jinja2.FileSystemLoader(FOLDER)
    pages = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, loader=loader)
    text: str = pages.get_template("page.html.jinja").render(
        version=metadata.version("mini-lab"),
        draw=lambda picture: svg.inline(picture.draw, f"picture-{next(numbers)}", picture.size),
        script={"text": script, "digest": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()},
        **parts,
    )
    return text
