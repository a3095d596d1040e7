"""The results of `lab bisect` as sections: the answer, the builds, what changed between them."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from lab.core.lines import Lines
from lab.core.lists import plural
from lab.core.stats import Ratio
from lab.features.bisect import changes, issue, picture
from lab.features.bisect.figures import Bisected, NeighbourPair, is_mine, of_sessions, pairs
from lab.features.bisect.lines import DECODE, PREFILL
from lab.features.bisect.search import AGAIN, FAST, GOOD, SLOW
from lab.features.bisect.sentences import answer, is_found, sentences
from lab.show import console, text_setup
from lab.show.cells import LONG_TEXT, TEXT, Cell, Column, stacked
from lab.show.section import (
    UNKNOWN,
    WIDE,
    Columns,
    Context,
    Kind,
    Picture,
    Section,
    print_section,
    tabled,
)

OF_BISECT = (
    "Each block has runs of each build, up to six, in a process of its own, in random order; their "
    "median counts. The table has each build's time over that of the good end, block by block. All "
    "verdicts and intervals hold together with 95 %."
)
CAPTION = (
    "The builds in order: how many times as long each figure takes as in the good end. Bars are "
    "intervals that hold together with 95 %; a build whose bar is above 1 is slower."
)


class BuildRow(NamedTuple):
    """A row of the table: a build of the series that was measured or left out."""

    result: Bisected
    place: int

    def ratio(self, figure: str) -> Cell | str:
        if self.place == GOOD:
            return "1"
        ratio = self.result.search.ratio_to_good(self.place, figure)
        if ratio is None:
            return UNKNOWN
        return stacked(f"{ratio.estimate:.2f}", f"{ratio.low:.2f}-{ratio.high:.2f}")


def chapters(lines: Lines, context: Context) -> list[Section]:
    """Searches for a slower build, a part for each session."""
    results = [result for result in of_sessions(lines, context.runs) if GOOD in result.records]
    if not results:
        return []
    parts = [section(result, context) for result in results]
    return [
        Section(
            "Which build became slower",
            name="bisect",
            question="Which build of llama.cpp became slower?",
            words=[OF_BISECT] if context.is_page else [],
            parts=parts,
        )
    ]


KINDS = (Kind("bisect", is_mine, chapters),)


def section(result: Bisected, context: Context = Context()) -> Section:  # noqa: B008  (frozen)
    """What a session found: the answer, the builds, what changed, the text for an issue."""
    rows = [BuildRow(result, place) for place in shown_places(result)]
    lines = [line for line in sentences(result) if line != answer(result)]
    for fast, slow in compared(result):
        lines += changes.sentences(result, fast, slow)
    has_details = context.details or context.is_page
    parts = []
    if has_details:
        parts.append(Section("Text for an issue", facts={"Markdown": issue.text(result)}))
    return Section(
        text_setup.where([result.records[GOOD]]),
        about_of(result),
        name=f"bisect-{result.asked.session}",
        question=f"Did llama.cpp become slower, and in which of {len(result.asked.builds)} builds?",
        answer=answer(result),
        **tabled(COLUMNS, rows),
        warnings=warnings(result),
        sentences=[*lines, changes.not_covered()],
        notes=[OF_BISECT] if context.details else [],
        parts=parts,
        pictures=[Picture("bisect", CAPTION, partial(picture.draw, result), WIDE)],
        data=lambda: {"searches": [document(result)]},
    )


def compared(result: Bisected) -> list[tuple[int, int]]:
    """The builds whose differences are told: the neighbours, or else the ends."""
    neighbours = [(pair.fast, pair.slow) for pair in pairs(result)]
    return neighbours or [(GOOD, result.search.bad)]


def about_of(result: Bisected) -> str:
    run = result.records[GOOD].run
    n_blocks = plural(len(result.search.blocks), "block")
    return f"{run.n_prompt:,} prompt tokens, {run.n_gen:,} generated; {n_blocks}"


def shown_places(result: Bisected) -> list[int]:
    return sorted({*result.records, *result.search.dropped})


def warnings(result: Bisected) -> list[str]:
    if not result.is_disturbed:
        return []
    return [
        f"{result.n_disturbed} of {plural(result.n_runs, 'run')} were disturbed by other programs. "
        "Repeat the search while no other program runs."
    ]


def n_blocks_of(row: BuildRow) -> str:
    return str(sum(row.place in block.times for block in row.result.search.blocks))


def commit_of(row: BuildRow) -> str:
    record = row.result.records.get(row.place)
    return (record.machine.llama_cpp_commit if record else None) or UNKNOWN


def resolved_of(name: str, row: BuildRow) -> str:
    record = row.result.records.get(row.place)
    return changes.resolved(record)[name] if record else UNKNOWN


def verdict_of(row: BuildRow) -> str:
    """What the search made of a build, figure by figure."""
    search = row.result.search
    if row.place in search.dropped:
        return "does not run"
    if row.place in (GOOD, search.bad):
        return "good end" if row.place == GOOD else "bad end"
    texts = []
    for figure in search.figures:
        verdict = search.verdicts.get((figure, row.place))
        if verdict == SLOW:
            texts.append(f"{figure} slower")
        elif verdict == FAST:
            texts.append(f"{figure} not yet slower")
        elif row.place in search.unclear.get(figure, ()):
            texts.append(f"{figure} not clear")
    return ", ".join(texts) or UNKNOWN


COLUMNS: Columns[BuildRow] = (
    Column("name", lambda row: row.result.label(row.place), TEXT),
    Column("llama.cpp", commit_of),
    Column("blocks", n_blocks_of),
    Column("prefill\ntimes as long", lambda row: row.ratio(PREFILL)),
    Column("decode\ntimes as long", lambda row: row.ratio(DECODE)),
    Column("verdict", verdict_of, LONG_TEXT),
    Column("flash\nattention", partial(resolved_of, "flash attention")),
    Column("weights in", partial(resolved_of, "weights in")),
)


def document(result: Bisected) -> dict[str, object]:
    """A session for JSON; what is unknown is None."""
    search = result.search
    return {
        "session": result.asked.session,
        "subject": text_setup.where([result.records[GOOD]]),
        "good": result.label(GOOD),
        "bad": result.label(search.bad),
        "builds": list(result.asked.builds),
        "at_least": result.asked.at_least,
        "ends": dict(search.ends),
        "again": {
            figure: as_json(search.ends_ratio(AGAIN, figure)) for figure in search.figures
        },
        "found": is_found(result),
        "finished": result.is_finished,
        "pairs": [pair_document(result, pair) for pair in pairs(result)],
        "tried": [build_document(result, place) for place in shown_places(result)],
        "n_blocks": len(search.blocks),
        "n_disturbed": result.n_disturbed,
        "n_runs": result.n_runs,
        "compiler": result.asked.compiler,
        "sentences": sentences(result),
        "issue_text": issue.text(result),
    }


def pair_document(result: Bisected, pair: NeighbourPair) -> dict[str, object]:
    proven = {figure: as_json(result.search.proven.get(figure)) for figure in pair.figures}
    return {
        "fast": result.label(pair.fast),
        "slow": result.label(pair.slow),
        "left_out": [result.label(place) for place in range(pair.fast + 1, pair.slow)],
        "ratio": proven,
        "changed": changes.sentences(result, pair.fast, pair.slow),
    }


def build_document(result: Bisected, place: int) -> dict[str, object]:
    search = result.search
    record = result.records.get(place)
    ratios = {
        figure: as_json(search.ratio_to_good(place, figure)) for figure in search.figures
    }
    return {
        "build": result.label(place),
        "commit": record.machine.llama_cpp_commit if record else None,
        "problem": search.dropped.get(place),
        "ratio": None if place == GOOD else ratios,
        "settings": changes.resolved(record) if record else None,
    }


def as_json(ratio: Ratio | None) -> dict[str, float] | None:
    if ratio is None:
        return None
    return {"estimate": ratio.estimate, "low": ratio.low, "high": ratio.high}


def show_bisected(result: Bisected) -> None:
    """Print what `lab bisect` found: the answer, the builds, what changed, text for an issue.

        lab.show_bisected(lab.bisect("0.3.20", "0.3.36"))

    `result` is what `lab.bisect` returned.
    """
    print_section(section(result, Context(details=True)), console.console())
