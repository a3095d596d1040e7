"""Draws the committed pictures of results/ anew from their samples.

    python3 -m uv run python -m pages.pictures          # after a change of the code that draws
    python3 -m uv run python -m pages.pictures check    # with the matplotlib that drew them

A picture is called like its sample, and `lab plot` or `lab explain` draws it. Pixels depend on the
version of matplotlib: one job of .github/workflows/test.yml compares them with the pinned one.
`published-predicted.png` has its own command (tests/bench/published.py);
`sample-report.png` is a photo of a browser.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from tests.support.command import run_lab

RESULTS = Path(__file__).parents[1] / "results"
VISIBLE = 25  # of 255: a pixel that differs by more has changed
MOST_CHANGED = 3e-5  # of all pixels: rounding of another processor
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


def share_of_changed_pixels(before: Path, after: Path) -> float:
    import numpy as np
    from PIL import Image

    pixels = [np.asarray(Image.open(path), float) for path in (before, after)]
    if pixels[0].shape != pixels[1].shape:
        return 1.0
    return float((np.abs(pixels[0] - pixels[1]).max(axis=2) > VISIBLE).mean())


def main(task: str = "draw") -> None:
    n_changed = 0
    with tempfile.TemporaryDirectory() as folder:
        pictures = committed()
        for drawn, picture in zip(draw(Path(folder), pictures), pictures, strict=True):
            is_changed = share_of_changed_pixels(picture, drawn) > MOST_CHANGED
            n_changed += is_changed
            print(picture.name, "changed" if is_changed else "same")
            if task == "draw":
                shutil.copy(drawn, picture)
    if task == "check" and n_changed:
        sys.exit(f"{n_changed} pictures are not what the code draws: python -m pages.pictures")


if __name__ == "__main__":
    main(*sys.argv[1:2])
