"""Draws the committed pictures of results/ anew from their samples.

    python3 -m uv run python -m tests.bench.pictures   # after a change of the code that draws

A picture is called like its sample, and `lab plot` or `lab explain` draws it. tests/test_pages.py
compares the pixels. `published-predicted.png` has its own command (tests/bench/published.py);
`sample-report.png` is a photo of a browser.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from tests.support.command import run_lab

RESULTS = Path(__file__).parents[2] / "results"
BY_EXPLAIN = ("roofline",)
"""The endings of pictures that `lab explain` draws."""


def committed() -> list[Path]:
    """The pictures that are drawn from a committed sample."""
    pictures = sorted(RESULTS.glob("sample-*.png"))
    return [
        path
        for path in pictures
        if (RESULTS / f"{path.stem.rpartition('-')[0]}.jsonl").exists()
    ]


def draw(folder: Path, pictures: list[Path]) -> list[Path]:
    """Draws these pictures into a folder; their paths there, in the same order."""
    commands = {}
    for picture in pictures:
        sample, _, ending = picture.stem.rpartition("-")
        commands[sample, "explain" if ending in BY_EXPLAIN else "plot"] = (
            RESULTS / f"{sample}.jsonl"
        )
    for (_, command), sample_file in commands.items():
        alone = shutil.copy(
            sample_file, folder
        )  # beside the sample may be ceilings of somebody's machine
        status, _out, err = run_lab(command, alone, "-o", folder)
        assert status == 0, err
    return [folder / picture.name for picture in pictures]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        pictures = committed()
        for drawn, picture in zip(draw(Path(folder), pictures), pictures, strict=True):
            shutil.copy(drawn, picture)
            print(picture.name)


if __name__ == "__main__":
    main()
