"""Can every command that the lab prints be pasted? Of all golden outputs, not only of those in the
tests.

    python -m tests.bench.golden FOLDER             # the outputs, as files
    python -m tests.bench.printed_commands FOLDER   # every command: its parser, and its plan

A plan is made with `--dry-run`, so nothing is measured. A model that is not on this machine has no
plan; that is said, and is no problem of the command.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.printed import (
    PrintedCommand,
    can_be_planned,
    commands_in,
    problem_of,
    problem_of_plan,
)

NOT_HERE = "is not on this machine"


def printed_in(folder: Path) -> dict[str, PrintedCommand]:
    """The commands in all files of a folder, each once."""
    by_text = dict[str, PrintedCommand]()
    for path in sorted(folder.iterdir()):
        if path.suffix == ".txt":
            for printed in commands_in(path.read_text(encoding="utf-8")):
                by_text.setdefault(printed.text, printed)
    return by_text


def main() -> None:
    n_planned = 0
    n_without_model = 0
    problems = list[str]()
    by_text = printed_in(Path(sys.argv[1]))
    for text, printed in by_text.items():
        problem = problem_of(printed)
        if not problem and can_be_planned(printed):
            n_planned += 1
            problem = problem_of_plan(printed)
            if NOT_HERE in problem:
                n_without_model += 1
                problem = ""
        if problem:
            problems.append(f"{text}: {problem} ({printed.line})")
    for problem in problems:
        print(problem)
    print(
        f"{len(by_text)} commands, {n_planned} of them planned "
        f"({n_without_model} without their model): {len(problems)} refused (goal 0)"
    )


if __name__ == "__main__":
    main()
