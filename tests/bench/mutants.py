"""Do the tests notice a changed operator? A sample of mutants of lab/core and of the arithmetic of
lab/roofline, each run against the test files that import its module.

    python -m tests.bench.mutants 150 1        # so many, seed: about 20 minutes on two quiet cores
    python -m tests.bench.mutants 150 1 2      # against two test files each: quicker, more survive

The mutator is written here: mutmut and cosmic-ray start pytest for each mutant, which takes several
seconds of imports; here each mutant is a fork of one process that has imported all of it.
"""

from __future__ import annotations

import ast
import functools
import gc
import importlib.abc
import importlib.util
import itertools
import os
import random
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeGuard

import pytest

ROOT = Path(__file__).parents[2]
ARITHMETIC = (
    *("choosing", "conditioning", "datasheet", "explanation", "kernel_rates", "learning"),
    *("paged_prediction", "paging", "prediction", "step_kernels", "step_prediction"),
)
"""Of lab/roofline: modules that compute without measuring."""

MOST_CPU_S = 240  # of a mutant's tests; a mutant that makes them endless is killed
LARGE = 100  # a larger number is doubled: one more changes no result
SLOW = (
    "embedded: Path",
    "mini: Path",
    "Worker() as",
    "wheel_server",
    "subprocess",
    "nbformat",
)
"""What test files with a real engine or server have; mutants are not run against them."""

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
    is_in_function: bool


def sources() -> list[Path]:
    core = sorted((ROOT / "lab/core").glob("*.py"))
    return [*core, *(ROOT / f"lab/roofline/{name}.py" for name in ARITHMETIC)]


def not_executed(tree: ast.AST) -> set[int]:
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
    ignored = not_executed(tree)
    bodies = in_functions(tree)
    file = path.relative_to(ROOT).as_posix()
    for number, node in enumerate(ast.walk(tree)):
        change = change_of(node)
        if change and id(node) not in ignored:
            line = getattr(node, "lineno", 0)
            yield Mutant(file, number, line, change, id(node) in bodies)


def in_functions(tree: ast.AST) -> set[int]:
    """The ids of the nodes that run when a function is called."""
    ids: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            for statement in node.body:
                ids |= set(map(id, ast.walk(statement)))
    return ids


def change_of(node: ast.AST) -> str | None:
    """What a mutation of a node would do; None: it is not mutated."""
    operator: ast.AST
    if isinstance(node, (ast.BinOp, ast.BoolOp, ast.AugAssign)):
        operator = node.op
    elif isinstance(node, ast.Compare):
        operator = node.ops[0]
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return "not x -> x"
    elif isinstance(node, ast.Name) and node.id in SWAPPED_NAMES:
        return f"{node.id} -> {SWAPPED_NAMES[node.id]}"
    elif isinstance(node, ast.Constant) and is_number(node.value):
        return f"{node.value} -> {changed_number(node.value)}"
    else:
        return None
    new = SWAPPED.get(type(operator))
    return f"{type(operator).__name__} -> {new.__name__}" if new else None


def is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def changed_number(value: Any) -> Any:
    return value + 1 if abs(value) < LARGE else 2 * value


def changed_tree(mutant: Mutant) -> ast.Module:
    tree = ast.parse((ROOT / mutant.file).read_text(encoding="utf-8"))
    node: Any = next(itertools.islice(ast.walk(tree), mutant.node, None))
    if isinstance(node, ast.Compare):
        operators: list[Any] = node.ops
        operators[0] = SWAPPED[type(node.ops[0])]()
    elif isinstance(node, ast.UnaryOp):
        node.op = ast.UAdd()
        node.operand = ast.Call(ast.Name("bool", ast.Load()), [node.operand], [])
    elif isinstance(node, ast.Name):
        node.id = SWAPPED_NAMES[node.id]
    elif isinstance(node, ast.Constant):
        node.value = changed_number(node.value)
    else:
        node.op = SWAPPED[type(node.op)]()
    return ast.fix_missing_locations(tree)


class Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the mutant's module from its changed tree."""

    def __init__(self, mutant: Mutant) -> None:
        self.path = ROOT / mutant.file
        self.name = mutant.file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        self.code = compile(changed_tree(mutant), str(self.path), "exec")

    def find_spec(self, name: str, *_: Any) -> Any:
        if name != self.name:
            return None
        return importlib.util.spec_from_file_location(name, self.path, loader=self)

    def create_module(self, spec: Any) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        exec(self.code, module.__dict__)


def codes_of(code: CodeType) -> Iterator[CodeType]:
    """The code of every function in a module's code."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from codes_of(constant)


def apply(mutant: Mutant) -> None:
    """Change the imported functions; what runs at import is imported again, with its users."""
    changed = Changed(mutant)
    if not mutant.is_in_function:
        sys.meta_path.insert(0, changed)
        for name in list(sys.modules):
            if name.partition(".")[0] in ("lab", "tests"):
                del sys.modules[name]
        return
    new = {(code.co_qualname, code.co_firstlineno): code for code in codes_of(changed.code)}
    for function in gc.get_objects():
        if isinstance(function, FunctionType):
            old = function.__code__
            if old.co_filename == str(changed.path):
                function.__code__ = new.get((old.co_qualname, old.co_firstlineno), old)


@functools.cache
def importers() -> dict[str, list[str]]:
    """The test files that import each module, those that import little else first."""
    files: dict[str, list[tuple[int, str]]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        modules = imported(ast.parse(text))
        is_slow = any(word in text for word in SLOW)
        for module in () if is_slow else modules:
            file = path.relative_to(ROOT).as_posix()
            files.setdefault(module, []).append((len(modules), file))
    return {
        module: [file for _, file in sorted(of_module)] for module, of_module in files.items()
    }


def imported(tree: ast.Module) -> set[str]:
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("lab"):
            modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return modules


def tests_of(mutant: Mutant, most_files: int) -> list[str]:
    """The test files of a mutant's module: of its name, then those that import it."""
    module = mutant.file.removesuffix(".py").replace("/", ".")
    own = f"tests/test_{module.rpartition('.')[2]}.py"
    files = [own] if (ROOT / own).exists() else []
    files += [file for file in importers().get(module, []) if file != own]
    if not files:
        files = [file for user in users_of(module) for file in importers().get(user, [])]
    return list(dict.fromkeys(files))[:most_files]


def users_of(module: str) -> list[str]:
    """The modules of the lab that import one that no test imports."""
    users = []
    for path in sorted((ROOT / "lab").rglob("*.py")):
        if module in imported(ast.parse(path.read_text(encoding="utf-8"))):
            users.append(
                path.relative_to(ROOT).as_posix().removesuffix(".py").replace("/", ".")
            )
    return users


def is_killed(mutant: Mutant, tests: Sequence[str]) -> bool:
    """Whether a test fails in a process of its own."""
    child = os.fork()
    if child == 0:
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        resource.setrlimit(resource.RLIMIT_CPU, (MOST_CPU_S, MOST_CPU_S))
        apply(mutant)
        status = pytest.main(["-x", "-n", "0", "-p", "no:cacheprovider", *tests])
        os._exit(int(status))
    return os.waitpid(child, 0)[1] != 0


def main(n: int, seed: int, most_files: int = 8) -> None:
    every = [mutant for path in sources() for mutant in mutants_of(path)]
    sample = random.Random(seed).sample(every, n)
    files = sorted({file for mutant in sample for file in tests_of(mutant, most_files)})
    pytest.main(["-n", "0", "-q", "-q", "--collect-only", *files])  # forks have the imports
    survivors = []
    began = time.monotonic()
    for number, mutant in enumerate(sample, 1):
        tests = tests_of(mutant, most_files)
        if not tests or not is_killed(mutant, tests):
            survivors.append(mutant)
            print(f"survived: {mutant.file}:{mutant.line} {mutant.change}", flush=True)
        minutes = (time.monotonic() - began) / 60
        print(f"{number} of {n}, {minutes:.1f} min", file=sys.stderr, flush=True)
    share = 100 * (n - len(survivors)) / n
    print(f"{n} of {len(every)} mutants (seed {seed}): {share:.0f} % killed (goal 90 %)")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
