"""Names of builds: a version, a build number, a date; which kind a text is, and which comes first.

People keep builds in folders named after a release (llama-b9518-bin-ubuntu-x64), a build number
(build-9518), a version (v0.3.20), a date (2026-05-23) or a commit. Only commits have no order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

VERSION = re.compile(
    r"(?:llama[-_.]cpp[-_.]python)?(?:==|[-_ @=])?v?(\d{1,3}(?:\.\d{1,4}){2})"
    r"(?:\.tar\.gz|-[\w.-]+\.whl)?",
    re.IGNORECASE,
)
BUILD_NUMBER = re.compile(r"(?<![a-z0-9])b[-_]?(\d{3,5})(?![a-z0-9])", re.IGNORECASE)
AFTER_A_WORD = re.compile(
    r"(?<![a-z0-9])(?:build|version|release|rev|llama[-_. ]?cpp|llama)[-_: ]*"
    r"(\d{3,5})(?![a-z0-9.]|-\d)",
    re.IGNORECASE,
)
IN_BRACKETS = re.compile(r"\((\d{3,5})\)")
FIRST_DIGITS = re.compile(r"^r?(\d{3,5})(?=$|[-_. ](?!\d))", re.IGNORECASE)
DATE = re.compile(r"(?<!\d)(20\d\d)[-_.]?([01]\d)[-_.]?([0-3]\d)(?!\d)")
DOTTED = re.compile(r"(?<![\d.])v?(\d{1,4}(?:[._-]\d{1,4}){1,3})(?![\d.])", re.IGNORECASE)
COMMIT = re.compile(r"(?<![0-9a-z])[0-9a-f]{7,40}(?![0-9a-z])", re.IGNORECASE)
ARCHIVE = (".zip", ".tar.gz", ".tgz", ".tar.xz", ".tar.zst", ".7z")

Place = tuple[int, ...]
Order = Callable[[str], Place | None]


def version_of(text: str) -> str | None:
    """The version of llama-cpp-python that a text names, such as `v0.3.20`; None: it names none."""
    match = VERSION.fullmatch(text.strip())
    return match[1] if match else None


def build_number(name: str) -> Place | None:
    """The build number of llama.cpp in a name, as llama.cpp's releases and programs write it."""
    for pattern in (BUILD_NUMBER, AFTER_A_WORD, IN_BRACKETS, FIRST_DIGITS):
        match = pattern.search(name.strip())
        if match:
            return (int(match[1]),)
    return None


def date(name: str) -> Place | None:
    """The date in a name: year, month, day."""
    match = DATE.search(name)
    return tuple(map(int, match.groups())) if match else None


def dotted_number(name: str) -> Place | None:
    """The first dotted number in a name, such as that of a version or a short date."""
    match = DOTTED.search(name)
    return tuple(map(int, re.split("[._-]", match[1]))) if match else None


def order_of(names: Sequence[str]) -> Order | None:
    """What says in which order these builds were made; None: their names do not say it.

    It must tell them all apart.
    """
    for order in (build_number, date, dotted_number):
        places = [order(name) for name in names]
        places_known = [place for place in places if place is not None]
        has_one_length = len(set(map(len, places_known))) == 1
        if len(set(places_known)) == len(names) and has_one_length:
            return order
    return None


def flavour(name: str) -> str:
    """A name without what differs from release to release: `llama-#-bin-ubuntu-x64`."""
    without_commit = COMMIT.sub("#", name.strip())
    for pattern in (BUILD_NUMBER, AFTER_A_WORD, IN_BRACKETS, FIRST_DIGITS, DATE, DOTTED):
        if pattern.search(without_commit):
            return pattern.sub("#", without_commit, count=1).lower()
    return without_commit.lower()
