"""Does every figure carry its doubt? Plants what makes figures doubtful, and reads everything that
is shown of them.

    python3 -m uv run python -m tests.bench.doubt

Planted in the records of a quiet sample, so that it runs in about a minute: a neighbour on all
cores for a whole session, one disturbed run of six, every line twice, ceilings of an interrupted
session, ceilings of a loaded machine. Read are show, explain, compare, predict, export, report and
the pictures (their SVG), as JSON and on terminals of 60, 80 and 100 columns. Wanted: no firm
sentence, no number without its mark, no gain promised from what is doubtful; and of the quiet
sample itself all of its sentences.
"""

from __future__ import annotations

import dataclasses
import html
import io
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from lab.core import results
from lab.core.record import OK, Ceilings, Noise, NoiseReading, NoiseSamples, Record
from lab.features.predict import tables
from lab.roofline import learning
from lab.roofline.prediction import Here
from lab.show import console
from lab.show.section import print_section
from tests.conftest import run_lab

SAMPLE = Path("results/sample-smollm2-135m-amd-epyc.jsonl")
N_REPEATS = 6
WIDTHS = (60, 80, 100)

FIRM = (
    r" limits (prefill|decode)",
    r"Predicted for ",
    r"(?<!about )(?<![\d.])\d+(\.\d+)?x as fast",
    r"is (slower|faster) than",
    r"is the fastest",
    r"Prefill of [\d,]+ tokens took",
    r"each token cost",
)
"""What only firm sentences have."""

Lines = list[Record | Ceilings]


def neighbour(record: Record) -> Record:
    """The run, beside other processes that kept all cores busy all the time."""
    run = record.run
    ms = max(300, round((run.steps.end_ns[-1] - run.steps.start_ns[0]) / 1e6) + 1)
    nothing = NoiseReading()
    samples = NoiseSamples((ms,), others_ms=(ms * (record.machine.n_cores_usable or 1),))
    return dataclasses.replace(
        record, run=dataclasses.replace(run, noise=Noise(nothing, nothing, samples))
    )


def six(lines: Lines) -> Lines:
    """Six repeats of each run, as far as they go."""
    timed = [
        line
        for line in lines
        if isinstance(line, Record) and line.run.status == OK and not line.run.warmup
    ]
    by_length: dict[int, list[Record]] = {}
    for record in timed:
        by_length.setdefault(record.run.n_prompt, []).append(record)
    more: Lines = [line for line in lines if isinstance(line, Ceilings)]
    for records in by_length.values():
        for repeat in range(N_REPEATS):
            run = dataclasses.replace(records[repeat % len(records)].run, repeat=repeat)
            more.append(
                dataclasses.replace(
                    records[0],
                    session="planted",
                    run=run,
                )
            )
    return more


def change(
    lines: Lines, plant: Callable[[Record], Record], repeats: Sequence[int] = range(99)
) -> Lines:
    """The lines, with something planted in the timed runs of these repeats."""
    return [
        plant(line)
        if isinstance(line, Record) and not line.run.warmup and line.run.repeat in repeats
        else line
        for line in lines
    ]


def loaded(lines: Lines) -> Lines:
    message = "another process used 1.9 cores"
    return [
        dataclasses.replace(line, disturbed=message) if isinstance(line, Ceilings) else line
        for line in lines
    ]


def plants(lines: Lines) -> dict[str, Lines]:
    """Everything that is planted, by its name."""
    many = six(lines)
    return {
        "quiet": many,
        "neighbour": change(many, neighbour),
        "one of six": change(many, neighbour, [2]),
        "loaded ceilings": loaded(many),
    }


@contextmanager
def as_wide_as(width: int) -> Iterator[None]:
    """A terminal of so many columns."""

    def of_width(stderr: bool = False, details: str = "") -> Console:
        stream = sys.stderr if stderr else sys.stdout
        return Console(
            file=stream, width=width, soft_wrap=True, markup=False, emoji=False, highlight=False
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(console, "console", of_width)
        yield


def predicted(lines: Lines) -> str:
    """What `lab predict` would print on the machine of the lines."""
    records = [line for line in lines if isinstance(line, Record)]
    ceilings = next(line for line in lines if isinstance(line, Ceilings))
    learned = learning.learn(records, ceilings, "none")
    model = records[-1].model
    settings = records[-1].settings
    here = Here(model, settings, ceilings, learned)
    rows = [here.request(n_prompt, 200) for n_prompt in (1000, 60_000)]
    out = Console(
        width=100,
        soft_wrap=True,
        file=io.StringIO(),
    )
    with out.capture() as printed:
        print_section(tables.explanation(rows), out)
    return printed.get()


def shown_of(
    lines: Lines,
    folder: Path,
    quiet: Path,
) -> dict[str, str]:
    """All that is shown of the lines, by what shows it."""
    path = folder / "planted.jsonl"
    results.save(path, *lines)
    results.save(path, *lines)  # each line twice: it must count once
    texts: dict[str, str] = {}
    for width in WIDTHS:
        with as_wide_as(width):
            texts[f"show {width}"] = run_lab("show", path)[1]
            texts[f"explain {width}"] = run_lab("explain", path, "--no-plot", "--ceilings", folder)[
                1
            ]
            texts[f"compare {width}"] = run_lab("compare", quiet, path, "--no-plot")[1]
    texts["show json"] = run_lab("show", path, "--json")[1]
    code, texts["explain json"], texts["explain error"] = run_lab(
        "explain", path, "--json", "--no-plot", "--ceilings", folder
    )
    texts["compare json"] = run_lab("compare", quiet, path, "--json", "--no-plot")[1]
    texts["export"] = run_lab("export", path, "--format", "csv")[1]
    page = folder / "page.html"
    assert run_lab("report", path, "-o", page)[0] == 0
    text = page.read_text()
    texts["page"] = html.unescape(
        re.sub(r"<[^>]+>", " ", text[: text.index('id="mini-lab-records"')])
    )
    run_lab("plot", path, "-o", folder)
    if not code:
        run_lab("explain", path, "-o", folder, "--ceilings", folder)
        texts["predict"] = predicted(lines)
    for svg in sorted(folder.glob("planted-*.svg")):
        texts[svg.stem] = " ".join(
            re.findall(r"<!-- (.*?) -->", svg.read_text())
        )  # matplotlib draws letters as paths
    return texts


def problems(name: str, texts: dict[str, str]) -> list[str]:
    """What is wrong with what is shown of a plant."""
    wrong: list[str] = []

    def want(holds: bool, what: str) -> None:
        if not holds:
            wrong.append(f"{name}: {what}")

    def firm(text: str) -> list[str]:
        return [pattern for pattern in FIRM if re.search(pattern, " ".join(text.split()))]

    tables = [key for key in texts if key.startswith("show ") and key[-1].isdigit()]
    rows = json.loads(texts["show json"])["rows"]
    want(
        all(row["repeats"] == N_REPEATS for row in rows),
        "lines that occur twice were counted twice",
    )
    if name == "neighbour":
        for key in (
            key for key in texts if key.split()[0] in ("show", "explain", "compare", "page")
        ):
            want(not firm(texts[key]), f"{key} is firm: {firm(texts[key])}")
            want(
                "json" in key or "error" in key or "easure" in texts[key],
                f"{key} does not say what to do",
            )
        want(all("disturbed" in row["doubts"] for row in rows), "JSON of show has no doubts")
        want(all(texts[key].count("!!") >= len(rows) for key in tables), "a row has no mark")
        (document,) = json.loads(texts["explain json"])
        want(
            not document["levers"] and not document["experiments"],
            "JSON of explain promises something",
        )
        verdicts = [
            row["verdict"]
            for line in json.loads(texts["compare json"])["comparisons"]
            for row in line["rows"]
        ]
        want(set(verdicts) == {"disturbed"}, f"compare claims {set(verdicts)}")
        want(
            "disturbed runs (hollow)" in texts["planted-prefill"],
            "the picture of prefill has no hollow points",
        )
        want(
            "disturbed runs (hollow)" in texts["planted-decode"],
            "the picture of decode has no hollow points",
        )
        want("!!" in texts["planted-where"], "the picture of where has no mark")
        want("disturbed" in texts["predict"], "the prediction has no doubt")
    if name == "one of six":
        want(all("partly disturbed" in row["doubts"] for row in rows), "JSON of show has no doubts")
        want(all(f"{N_REPEATS}!" in texts[key] for key in tables), "a row has no mark")
        want(
            "disturbed runs (hollow)" in texts["planted-decode"],
            "the picture of decode has no hollow points",
        )
    if name in ("neighbour", "one of six"):
        want("True" in texts["export"], "export has no disturbed runs")
    if name == "loaded ceilings":
        for key in (key for key in texts if key.startswith("explain")):
            want(not firm(texts[key]), f"{key} is firm: {firm(texts[key])}")
        for key in ("explain 80", "explain json", "page", "predict"):
            want(
                "were measured, another process used 1.9 cores" in " ".join(texts[key].split()),
                f"{key} does not say",
            )
    want(
        "extrapolated" in texts.get("predict", "extrapolated"),
        "the prediction does not say that it extrapolates",
    )
    if name == "quiet":
        is_firm = " limits prefill" in texts["explain 80"] and "Predicted for " in texts["page"]
        want(is_firm, "a quiet sample is not firm")
        lines = [line for line in texts["show 80"].splitlines() if "training length" not in line]
        want(
            "tokens took" in texts["show 80"] and "!" not in " ".join(lines),
            "a quiet sample is marked",
        )
    return wrong


def main() -> None:
    contents = results.read([SAMPLE])
    wrong = []
    for name, lines in plants([*contents.records, *contents.ceilings]).items():
        with tempfile.TemporaryDirectory() as folder:
            mistakes = problems(name, shown_of(lines, Path(folder), SAMPLE))
        print(f"{name}: {'as wanted' if not mistakes else f'{len(mistakes)} wrong'}", flush=True)
        wrong += mistakes
    print("\n".join(wrong) or "Every figure carries its doubt.")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
