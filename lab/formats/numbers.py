"""Numbers as programs print them: with decimal points or commas, thousands, units of time."""

from __future__ import annotations

import re

NUMBER = r"\d[\d.,]{0,30}"
"""A number in a pattern; `number` or `count` says what it is."""

MOST_TOKENS = 10**12
GO_UNITS_S = {
    "h": 3600.0,
    "ms": 1e-3,
    "m": 60.0,
    "\u00b5s": 1e-6,
    "\u03bcs": 1e-6,
    "us": 1e-6,
    "ns": 1e-9,
    "s": 1.0,
}
GO_PART = rf"\d{{1,12}}(?:\.\d{{1,12}})?(?:{'|'.join(GO_UNITS_S)})"
GO_DURATION = rf"(?:{GO_PART}){{1,6}}"
"""A duration as Go prints it, such as 3m24.6s or 535.0053ms."""


def number(text: str) -> float:
    """A number with a decimal point or comma. ValueError where a comma could be either."""
    text = text.strip().rstrip(".,")
    if re.fullmatch(r"\d{1,3}(,\d{3})+\.\d+", text):
        return float(text.replace(",", ""))
    if re.fullmatch(r"\d{1,3}(\.\d{3})+,\d+", text):
        return float(text.replace(".", "").replace(",", "."))
    if re.fullmatch(r"[1-9]\d*,\d{3}", text):
        raise ValueError(f"{text} could be a decimal or thousands")
    if re.fullmatch(r"\d+,\d+", text):
        return float(text.replace(",", "."))
    if not re.fullmatch(r"\d+(\.\d+)?([eE][+-]?\d{1,2})?", text):
        raise ValueError(f"{text[:30]!r} is not a number")
    return float(text)


def count(text: str) -> int:
    """A number of tokens, perhaps with thousands separated. ValueError for another text."""
    text = text.strip().rstrip(".,")
    if not re.fullmatch(r"\d{1,12}|\d{1,3}([.,])\d{3}(\1\d{3}){0,2}", text):
        raise ValueError(f"{text[:30]!r} is not a number of tokens")
    return int(text.replace(",", "").replace(".", ""))


def go_seconds(text: str) -> float:
    """Seconds of a duration as Go prints it."""
    seconds = 0.0
    for part in re.finditer(rf"(\d[\d.]*)({'|'.join(GO_UNITS_S)})", text):
        seconds += float(part[1]) * GO_UNITS_S[part[2]]
    return seconds
