"""Do the tests notice a changed operator? A sample of mutants of lab/core and of the arithmetic of
lab/roofline, each run against the tests that execute its line.

    uv pip install --python .venv/bin/python pytest-cov
    pytest --cov=lab --cov-context=test --cov-report=     # once: which test executes which line
    python -m tests.bench.mutants 150 1                   # so many, seed: 10 to 20 minutes

The mutator is written here: mutmut and cosmic-ray start pytest for each mutant, which takes several
seconds of imports; here each mutant is a fork of one process that has imported the libraries.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.util
import itertools
import os
import random
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ARITHMETIC = (
    *("choosing", "conditioning", "datasheet", "explanation", "kernel_rates", "learning"),
    *("paged_prediction", "paging", "prediction", "step_kernels", "step_prediction"),
)
"""Of lab/roofline: modules that compute without measuring."""

MOST_S = 240  # of a mutant's tests; a mutant that makes them endless is killed
FIRST_TESTS = 60  # of those that execute the line; all of them run if these pass
SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Div,
    ast.Mod: ast.Mult,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
SWAPPED_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutant:
    """The node of a file (in the order of ast.walk) that is changed, and what is written for it."""

    file: str
    node: int
    line: int
    change: str


def sources() -> list[Path]:
    core = sorted((ROOT / "lab/core").glob("*.py"))
    return [*core, *(ROOT / f"lab/roofline/{name}.py" for name in ARITHMETIC)]


def annotations(tree: ast.AST) -> set[int]:
    """The ids of nodes that are not executed, or only say a type."""
    ids: set[int] = set()
    for node in ast.walk(tree):
        for name in ("annotation", "returns"):
            part = getattr(node, name, None)
            if isinstance(part, ast.AST):
                ids |= set(map(id, ast.walk(part)))
    return ids


def mutants_of(path: Path) -> Iterator[Mutant]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    ignored = annotations(tree)
    for number, node in enumerate(ast.walk(tree)):
        if id(node) not in ignored and (change := change_of(node)):
            file = path.relative_to(ROOT).as_posix()
            yield Mutant(file, number, getattr(node, "lineno", 0), change)


def change_of(node: ast.AST) -> str | None:
    """What a mutation of a node would do; None: it is not mutated."""
    if isinstance(node, (ast.BinOp, ast.BoolOp, ast.AugAssign)):
        operator = node.op
    elif isinstance(node, ast.Compare):
        operator = node.ops[0]
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return "not x -> x"
    elif isinstance(node, ast.Name) and node.id in SWAPPED_NAMES:
        return f"{node.id} -> {SWAPPED_NAMES[node.id]}"
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return f"{node.value} -> {node.value + 1}"
    else:
        return None
    new = SWAPPED.get(type(operator))
    return new and f"{type(operator).__name__} -> {new.__name__}"


def changed_tree(mutant: Mutant) -> ast.Module:
    tree = ast.parse((ROOT / mutant.file).read_text(encoding="utf-8"))
    node: Any = next(itertools.islice(ast.walk(tree), mutant.node, None))
    if isinstance(node, ast.Compare):
        node.ops[0] = SWAPPED[type(node.ops[0])]()  # type: ignore[assignment]
    elif isinstance(node, ast.UnaryOp):
        node.op = ast.UAdd()
        node.operand = ast.Call(ast.Name("bool", ast.Load()), [node.operand], [])
    elif isinstance(node, ast.Name):
        node.id = SWAPPED_NAMES[node.id]
    elif isinstance(node, ast.Constant):
        node.value += 1
    else:
        node.op = SWAPPED[type(node.op)]()
    return ast.fix_missing_locations(tree)


class Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the mutant's module from its changed tree."""

    def __init__(self, mutant: Mutant) -> None:
        self.path = ROOT / mutant.file
        self.name = mutant.file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        self.tree = changed_tree(mutant)

    def find_spec(self, name: str, *_: Any) -> Any:
        if name != self.name:
            return None
        return importlib.util.spec_from_file_location(name, self.path, loader=self)

    def create_module(self, spec: Any) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self.tree, str(self.path), "exec"), module.__dict__)


def tests_by_line(file: str) -> dict[int, set[str]]:
    """The tests that execute each line of a file."""
    from coverage import CoverageData  # type: ignore[import-not-found, unused-ignore]

    data = CoverageData(os.environ.get("COVERAGE_FILE", ".coverage"))
    data.read()
    lines: dict[int, set[str]] = {}
    for line, contexts in data.contexts_by_lineno(str(ROOT / file)).items():
        lines[line] = {re.sub(r"\|\w+$", "", context) for context in contexts} - {""}
    return lines


def tests_of(mutant: Mutant, chance: random.Random) -> list[str]:
    """The tests that execute a mutant's line; of one outside functions, those of its file."""
    lines = tests_by_line(mutant.file)
    tests = lines.get(mutant.line) or set[str]().union(*lines.values())
    ordered = sorted(tests)
    chance.shuffle(ordered)
    return ordered


def is_killed(mutant: Mutant, tests: Sequence[str]) -> bool:
    """Whether a test fails in a process of its own."""
    child = os.fork()
    if child == 0:
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        signal.alarm(MOST_S)
        sys.meta_path.insert(0, Changed(mutant))
        status = pytest.main(["-x", "-n", "0", "-p", "no:cacheprovider", *tests])
        os._exit(int(status))
    return os.waitpid(child, 0)[1] != 0


def main(n: int, seed: int) -> None:
    for library in ("matplotlib.pyplot", "pandas", "scipy.stats", "msgspec", "rich.console"):
        importlib.import_module(library)  # once for all forks
    chance = random.Random(seed)
    every = [mutant for path in sources() for mutant in mutants_of(path)]
    survivors = []
    began = time.monotonic()
    for number, mutant in enumerate(chance.sample(every, n), 1):
        tests = tests_of(mutant, chance)
        first = tests[:FIRST_TESTS]
        killed = bool(tests) and (is_killed(mutant, first) or is_killed(mutant, tests))
        if not killed:
            survivors.append(mutant)
            print(f"survived: {mutant.file}:{mutant.line} {mutant.change}", flush=True)
        minutes = (time.monotonic() - began) / 60
        print(f"{number} of {n}, {minutes:.1f} min", file=sys.stderr, flush=True)
    share = 100 * (n - len(survivors)) / n
    print(f"{n} of {len(every)} mutants (seed {seed}): {share:.0f} % killed (goal 90 %)")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
