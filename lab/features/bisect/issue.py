"""The text for an issue: what was compared, a table, what stayed the same, and the command."""

from __future__ import annotations

from lab.app import command_words
from lab.features.bisect import changes
from lab.features.bisect.figures import Bisected, pairs
from lab.features.bisect.lines import FIGURES
from lab.features.bisect.search import GOOD
from lab.features.bisect.sentences import ratio_text, sentences
from lab.show import text_plan


def text(result: Bisected) -> str:
    """Markdown that can be pasted."""
    lines = [*sentences(result), "", *table(result), ""]
    record = result.records.get(GOOD)
    if record is not None:
        facts = text_plan.facts(record.machine, record.model)
        facts.pop("build", None)
        facts["run"] = run_text(result)
        facts["settings"] = ", ".join(
            f"{name} {value}" for name, value in changes.resolved(record).items()
        )
    else:
        facts = {}
    if result.asked.compiler:
        facts["compiler"] = result.asked.compiler
    lines += [f"- {name}: {value}" for name, value in facts.items()]
    for pair in pairs(result):
        for sentence in changes.sentences(result, pair.fast, pair.slow):
            lines.append(f"- {sentence}")
    command = command_words.line([result.asked])
    if command:
        lines += ["", f"Repeat: `{command}`"]
    lines.append("")
    lines.append(
        "Ratios are times over those of the first build, block by block in alternating order; a "
        "block has a fresh process of each build. All intervals hold together with 95 %."
    )
    return "\n".join(lines)


def run_text(result: Bisected) -> str:
    run = result.records[GOOD].run
    return f"{run.n_prompt:,} prompt tokens, {run.n_gen:,} generated"


def table(result: Bisected) -> list[str]:
    """A Markdown table with a row for each build that was measured."""
    figures = [figure for figure in FIGURES if figure in result.search.figures]
    lines = [
        f"| build | llama.cpp | {' | '.join(f'{figure}, times as long' for figure in figures)} |",
        f"| --- | --- |{' --- |' * len(figures)}",
    ]
    for place in sorted(result.records):
        commit = result.records[place].machine.llama_cpp_commit or "-"
        cells = [cell(result, place, figure) for figure in figures]
        label = result.label(place).replace("|", " ")
        lines.append(f"| {label} | {commit} | {' | '.join(cells)} |")
    return lines


def cell(result: Bisected, place: int, figure: str) -> str:
    if place == GOOD:
        return "1"
    return ratio_text(result.search.ratio_to_good(place, figure))
