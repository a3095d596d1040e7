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
from tests.support.command import run_lab

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
            file=stream,
            width=width,
            soft_wrap=True,
            markup=False,
            emoji=False,
            highlight=False,
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
            texts[f"explain {width}"] = run_lab(
                "explain", path, "--no-plot", "--ceilings", folder
            )[1]
            texts[f"compare {width}"] = run_lab("compare", quiet, path)[1]
    texts["show json"] = run_lab("show", path, "--json")[1]
    code, texts["explain json"], texts["explain error"] = run_lab(
        "explain", path, "--json", "--no-plot", "--ceilings", folder
    )
    texts["compare json"] = run_lab("compare", quiet, path, "--json")[1]
    texts["export"] = run_lab("export", path, "--as", "csv")[1]
    page = folder / "page.html"
    assert run_lab("report", path, "-f", page)[0] == 0
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


class Wanted:
    """Collects what is wrong with what is shown of a plant."""

    def __init__(self, name: str, texts: dict[str, str]) -> None:
        self.name = name
        self.texts = texts
        self.wrong: list[str] = []
        self.rows = json.loads(texts["show json"])["rows"]
        self.tables = [key for key in texts if key.startswith("show ") and key[-1].isdigit()]

    def want(self, holds: bool, what: str) -> None:
        """Notes `what` if it does not hold."""
        if not holds:
            self.wrong.append(f"{self.name}: {what}")

    def want_not_firm(self, key: str) -> None:
        """A text may not state anything firmly."""
        text = " ".join(self.texts[key].split())
        firm = [pattern for pattern in FIRM if re.search(pattern, text)]
        self.want(not firm, f"{key} is firm: {firm}")

    def want_hollow_points(self, *pictures: str) -> None:
        """Disturbed runs are hollow points in the pictures."""
        for picture in pictures:
            is_hollow = "disturbed runs (hollow)" in self.texts[f"planted-{picture}"]
            self.want(is_hollow, f"the picture of {picture} has no hollow points")

    def want_marks(self, of_all: str, mark: str) -> None:
        """The line above a table says that all rows are disturbed, or each row has a mark."""
        for key in self.tables:
            text = self.texts[key]
            is_marked = of_all in text or text.count(mark) >= len(self.rows)
            self.want(is_marked, f"a row of {key} has no mark")

    def want_in_rows(self, doubt: str) -> None:
        """Every row of the JSON has a doubt."""
        has_doubt = all(doubt in row["doubts"] for row in self.rows)
        self.want(has_doubt, "JSON of show has no doubts")

    def neighbour(self) -> None:
        """What is shown where another process was busy all the time."""
        for key in self.texts:
            if key.split()[0] not in ("show", "explain", "compare", "page"):
                continue
            self.want_not_firm(key)
            is_prose = "json" not in key and "error" not in key
            says_what_to_do = "easure" in self.texts[key]
            self.want(says_what_to_do or not is_prose, f"{key} does not say what to do")
        self.want_in_rows("disturbed")
        self.want_marks("half or more disturbed (!!)", "!!")
        (document,) = json.loads(self.texts["explain json"])
        promises = document["levers"] or document["experiments"]
        self.want(not promises, "JSON of explain promises something")
        verdicts: set[str] = set()
        for line in json.loads(self.texts["compare json"])["comparisons"]:
            verdicts.update(row["verdict"] for row in line["rows"])
        self.want(verdicts == {"disturbed"}, f"compare claims {verdicts}")
        self.want_hollow_points("prefill", "decode")
        self.want("!!" in self.texts["planted-shares"], "the picture of shares has no mark")
        self.want("disturbed" in self.texts["predict"], "the prediction has no doubt")
        self.export()

    def one_of_six(self) -> None:
        """What is shown where another process was busy in one repeat."""
        self.want_in_rows("partly disturbed")
        self.want_marks("some disturbed (!)", f"{N_REPEATS}!")
        self.want_hollow_points("decode")
        self.export()

    def export(self) -> None:
        """The export says which runs were disturbed."""
        self.want("True" in self.texts["export"], "export has no disturbed runs")

    def loaded_ceilings(self) -> None:
        """What is shown where the ceilings were measured beside another process."""
        sentence = "were measured, another process used 1.9 cores"
        for key in self.texts:
            if key.startswith("explain"):
                self.want_not_firm(key)
        for key in ("explain 80", "explain json", "page", "predict"):
            text = " ".join(self.texts[key].split())
            self.want(sentence in text, f"{key} does not say")

    def quiet(self) -> None:
        """What is shown where nothing disturbed: firm sentences without marks."""
        limit = " limits prefill" in self.texts["explain 80"]
        prediction = "Predicted for " in self.texts["page"]
        self.want(limit and prediction, "a quiet sample is not firm")
        lines = self.texts["show 80"].splitlines()
        unmarked = " ".join(line for line in lines if "training length" not in line)
        is_unmarked = "tokens took" in self.texts["show 80"] and "!" not in unmarked
        self.want(is_unmarked, "a quiet sample is marked")


PLANTS = {
    "neighbour": Wanted.neighbour,
    "one of six": Wanted.one_of_six,
    "loaded ceilings": Wanted.loaded_ceilings,
    "quiet": Wanted.quiet,
}


def problems(name: str, texts: dict[str, str]) -> list[str]:
    """What is wrong with what is shown of a plant."""
    expectations = Wanted(name, texts)
    is_once = all(row["repeats"] == N_REPEATS for row in expectations.rows)
    expectations.want(is_once, "lines that occur twice were counted twice")
    if name in PLANTS:
        PLANTS[name](expectations)
    prediction = texts.get("predict", "extrapolated")
    expectations.want("extrapolated" in prediction, "the prediction does not extrapolate")
    return expectations.wrong


def main() -> None:
    contents = results.read([SAMPLE])
    wrong = []
    for name, lines in plants([*contents.records, *contents.ceilings]).items():
        with tempfile.TemporaryDirectory() as folder:
            mistakes = problems(name, shown_of(lines, Path(folder), SAMPLE))
        print(
            f"{name}: {'as wanted' if not mistakes else f'{len(mistakes)} wrong'}", flush=True
        )
        wrong += mistakes
    print("\n".join(wrong) or "Every figure carries its doubt.")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
