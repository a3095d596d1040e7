"""Pages in a real browser."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from lab.core.record import Record
from tests.support.records import make_record, make_run

EVIL = (
    "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&amp;{{ 7 * 7 }} $\\frac$ "
    "]]> --> </svg>"
)


class Page(HTMLParser):
    """The tags and the text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.text = " ".join(self.text.split())

    def handle_starttag(
        self,
        tag: str,
        attrs: list[tuple[str, str | None]],
    ) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += f" {data}"

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def session(**changes: Any) -> list[Record]:
    """A warm-up, and two runs of each of three lengths."""
    command = ("measure", "--prompt-len", "10,100,1000", "--gen", "5", "--repeat", "2")
    changes.setdefault("command", command)
    records = [make_record(make_run(10, 2, warmup=True), **changes)]
    for n_prompt in (10, 100, 1000):
        for repeat in range(2):
            run = make_run(n_prompt, 5, repeat, prefill_ms=1 + n_prompt / 1000)
            records.append(make_record(run, **changes))
    return records


NOT_FREE = {"kind", "status", "type", "part", "tensor_bytes"}  # fields without free text


def evil(value: Any) -> Any:
    """The same record with every free text in it replaced."""
    if isinstance(value, str):
        return EVIL
    if isinstance(value, tuple):
        return tuple(map(evil, value))
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    replaced: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        if field.name not in NOT_FREE:
            replaced[field.name] = evil(getattr(value, field.name))
    return dataclasses.replace(value, **replaced)


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
CHROMEDRIVER = shutil.which("chromedriver")
MUST = bool(os.environ.get("LAB_NEED_CHROMIUM"))
OPTIONS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync --hide-scrollbars"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if not (CHROMIUM and CHROMEDRIVER):
        if MUST:
            pytest.fail(
                "LAB_NEED_CHROMIUM is set, and there is no chromium or no chromedriver"
            )
        pytest.skip(
            "there is no chromium with its chromedriver (Debian: chromium, chromium-driver)"
        )
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for option in OPTIONS.split():
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(CHROMEDRIVER))
    yield driver
    driver.quit()


def look(
    browser: Any,
    path: Path,
    width: int,
    scheme: str,
) -> dict[str, Any]:
    """Open a page, and measure it as a reader sees it."""
    from selenium.webdriver.support.wait import WebDriverWait

    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    screen = {
        "width": width,
        "height": 800,
        "deviceScaleFactor": 1,
        "mobile": width < 500,
    }
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    browser.get(path.as_uri())
    is_read = "return document.URL === arguments[0] && document.readyState === 'complete'"
    wait = WebDriverWait(browser, 60)  # get() may return early
    wait.until(lambda driver: driver.execute_script(is_read, path.as_uri()))
    seen: dict[str, Any] = browser.execute_script(
        """
        const numbers = text => text.match(/[0-9.]+/g).slice(0, 3).map(Number);
        const colour = (element, name) => numbers(getComputedStyle(element)[name]);
        const text = [...document.querySelectorAll('svg text')];
        return {
          overflow: document.documentElement.scrollWidth - innerWidth,
          paper: colour(document.body, 'backgroundColor'),
          ink: colour(document.body, 'color'),
          letters: text.length ? colour(text[0], 'fill') : null,
          smallest: Math.min(...text.map(each => each.getBoundingClientRect().height)),
          scripts: document.scripts.length,
        };
        """
    )
    return seen


def contrast(ink: list[float], paper: list[float]) -> float:
    """The contrast of two colours by the Web Content Accessibility Guidelines.

    It is 1 to 21; from 4.5 upwards text can be read.
    """
    low, high = sorted((luminance(ink), luminance(paper)))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: list[float]) -> float:
    red, green, blue = map(linear, colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def linear(value: float) -> float:
    """A value of sRGB (0 to 255) as a share of the light."""
    if value <= 10:
        return value / 255 / 12.92
    return float(((value / 255 + 0.055) / 1.055) ** 2.4)
