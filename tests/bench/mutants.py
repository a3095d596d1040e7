"""Do the tests notice a changed operator? A sample of mutants of lab/core and of the arithmetic of
lab/roofline, each run against the tests that call its function.

    python -m tests.bench.mutants 60 1             # so many, seed
    python -m tests.bench.mutants 60 1 calls.json  # keep which test calls what for the next one

First the tests that need no engine and no process run once, and the functions that each calls are
noted (at most a quarter of an hour). A mutant then meets the tests that call its function, the
quickest first, until one fails. A number or an operator outside functions meets the tests that call
any function of its module, and the module is imported again.

The mutator is written here: mutmut and cosmic-ray start pytest for each mutant, which takes several
seconds of imports; here each mutant is a fork of one process that has collected all tests.
"""

from __future__ import annotations

import ast
import functools
import gc
import importlib.abc
import importlib.util
import inspect
import itertools
import json
import os
import random
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, TypeGuard

import pytest

ROOT = Path(__file__).parents[2]
ARITHMETIC = (
    *("choosing", "conditioning", "datasheet", "explanation", "kernel_rates", "learning"),
    *("paged_prediction", "paging", "prediction", "step_kernels", "step_prediction"),
)
"""Of lab/roofline: modules that compute without measuring."""

MOST_CPU_S = 240  # of a mutant's tests; a mutant that makes them endless is killed
MOST_NOTES_S = 900  # of the tests without a mutant, those of the mutated modules first
MOST_TEST_S = 8  # slower tests are not run
MOST_TESTS_S = 15  # of the tests that a mutant meets, as long as they took without it
MOST_UNTRIED = 100  # tests that a mutant meets if none was seen to call its function
LARGE = 100  # a larger number is doubled: one more changes no result
SLOW_FIXTURES = {"embedded", "mini", "browser"}
SLOW_WORDS = (
    "Worker() as",
    "wheel_server",
    "subprocess",
    "nbformat",
    "run_process",
    "start_lab",
)
"""What tests with a real engine, a process or a server have; mutants are not run against them."""
SLOW_FILES = {
    "test_project.py",
    "test_removal.py",
    "test_notebooks.py",
    "test_pages.py",
    "test_real_servers.py",
}

Function = tuple[str, int]
"""A file of the lab and the first line of a function."""

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
    function_line: int | None  # the first line of its function; None: it runs at import


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
    function_lines = lines_of_functions(tree)
    file = path.relative_to(ROOT).as_posix()
    for number, node in enumerate(ast.walk(tree)):
        change = change_of(node)
        if change and id(node) not in ignored:
            line = getattr(node, "lineno", 0)
            yield Mutant(file, number, line, change, function_lines.get(id(node)))


def lines_of_functions(tree: ast.AST) -> dict[int, int]:
    """The first line of the innermost function around each node, by the node's id."""
    lines: dict[int, int] = {}
    for node in ast.walk(tree):  # from the outermost functions to the innermost
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(part.lineno for part in node.decorator_list)])
            for statement in node.body:
                lines |= dict.fromkeys(map(id, ast.walk(statement)), first)
    return lines


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
    for clear in clearers_of_caches():
        clear()
    changed = Changed(mutant)
    if mutant.function_line is None:
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


def clearers_of_caches() -> list[Callable[[], None]]:
    """Of the cached functions of the lab: a cached result hides which test calls a function."""
    return [
        cached.cache_clear
        for cached in gc.get_objects()
        if isinstance(cached, functools._lru_cache_wrapper)
        and str(getattr(cached, "__module__", "")).startswith(("lab.core", "lab.roofline"))
    ]


@dataclass
class Calls:
    """Of each test: how long it took, and which functions it called."""

    seconds: dict[str, float] = field(default_factory=dict)
    tests: dict[Function, list[str]] = field(default_factory=dict)  # by the called function
    tests_of_file: dict[str, list[str]] = field(default_factory=dict)

    def add(self, test: str, seconds: float, functions: Iterable[Function]) -> None:
        self.seconds[test] = seconds
        for function in functions:
            self.tests.setdefault(function, []).append(test)
            of_file = self.tests_of_file.setdefault(function[0], [])
            if test not in of_file[-1:]:
                of_file.append(test)

    def meeting(self, mutant: Mutant) -> list[str]:
        """The tests that a mutant meets, the quickest first."""
        if mutant.function_line is None:
            tests = self.tests_of_file.get(mutant.file, [])
        else:
            tests = self.tests.get((mutant.file, mutant.function_line), [])
        quickest = sorted(tests, key=lambda test: self.seconds[test])
        ends = itertools.accumulate(self.seconds[test] for test in quickest)
        return [test for test, end in zip(quickest, ends, strict=True) if end < MOST_TESTS_S]


class Tracer:
    """Notes which functions of the mutated files are called."""

    def __init__(self) -> None:
        self.files = {str(path): path.relative_to(ROOT).as_posix() for path in sources()}
        self.called: set[Function] = set()

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        file = self.files.get(code.co_filename)
        if file:
            self.called.add((file, code.co_firstlineno))


def is_slow(test: pytest.Function) -> bool:
    if test.path.name in SLOW_FILES or SLOW_FIXTURES.intersection(test.fixturenames):
        return True
    source = inspect.getsource(test.function)
    return any(word in source for word in SLOW_WORDS)


def by_subject(tests: Iterable[pytest.Function]) -> list[pytest.Function]:
    """First the tests of files that import mutated modules and little else of the lab: of each
    module the best file, then the others."""
    modules = {path.relative_to(ROOT).with_suffix("").as_posix() for path in sources()}
    shares: dict[Path, float] = {}
    best: dict[str, Path] = {}
    tests = list(tests)
    for path in sorted({test.path for test in tests}):
        names = imported(ast.parse(path.read_text(encoding="utf-8")))
        files = [name.replace(".", "/") for name in names if name.startswith("lab.")]
        files = [file for file in files if (ROOT / f"{file}.py").exists()]
        shares[path] = len(modules.intersection(files)) / max(1, len(files))
        for module in modules.intersection(files):
            if module not in best or shares[path] > shares[best[module]]:
                best[module] = path

    def order(test: pytest.Function) -> tuple[bool, float, str]:
        return test.path not in best.values(), -shares[test.path], str(test.path)

    return sorted(tests, key=order)


def importing(mutant: Mutant, tests: Sequence[pytest.Function]) -> list[pytest.Function]:
    """The tests of files that import the mutated module: where no test was seen to call it."""
    module = mutant.file.removesuffix(".py").replace("/", ".")
    paths = {
        path
        for path in {test.path for test in tests}
        if module in imported(ast.parse(path.read_text(encoding="utf-8")))
    }
    return [test for test in tests if test.path in paths]


def imported(tree: ast.Module) -> set[str]:
    """The modules that a file imports, and the names that it takes from them."""
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return modules


def run_test(item: pytest.Item, following: pytest.Item | None) -> bool:
    """Whether a test passes."""
    item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
    return item.session.testsfailed == 0


def note_calls(items: Sequence[pytest.Function], path: Path) -> bool:
    """Run each test and write a line of its name, its seconds and the functions that it calls."""
    tracer = Tracer()
    clearers = clearers_of_caches()
    end = time.monotonic() + MOST_NOTES_S
    with path.open("a", encoding="utf-8") as file:
        for item, following in itertools.zip_longest(items, items[1:]):
            if time.monotonic() > end:
                break
            for clear in clearers:
                clear()
            tracer.called.clear()
            began = time.perf_counter()
            threading.settrace(tracer)
            sys.settrace(tracer)
            passed = run_test(item, following)
            sys.settrace(None)
            seconds = time.perf_counter() - began
            item.session.testsfailed = 0
            if passed:  # a test that fails without a mutant kills none
                line = json.dumps([item.nodeid, seconds, sorted(tracer.called)])
                print(line, file=file, flush=True)
    return True


def read_calls(path: Path) -> Calls:
    calls = Calls()
    if not path.exists():
        return calls
    for line in path.read_text(encoding="utf-8").splitlines():
        test, seconds, functions = json.loads(line)
        calls.add(test, seconds, [(file, first) for file, first in functions])
    return calls


def in_fork(act: Callable[[], bool]) -> bool:
    """What a function answers in a process of its own; False if the process dies."""
    child = os.fork()
    if child == 0:
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        os._exit(0 if act() else 1)
    return os.waitpid(child, 0)[1] == 0


def survives(mutant: Mutant, items: Sequence[pytest.Function]) -> bool:
    """Whether all tests pass with it."""
    if not items:
        return True
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_CPU_S, MOST_CPU_S))
    try:
        apply(mutant)
    except Exception:  # the module cannot be imported
        return False
    if mutant.function_line is None:
        tests = [item.nodeid for item in items]
        return pytest.main(["-x", "-n", "0", "-p", "no:cacheprovider", *tests]) == 0
    return all(map(run_test, items, [*items[1:], None]))


class Trial:
    """Instead of running the collected tests, runs a sample of mutants against them."""

    def __init__(self, n: int, seed: int, calls_path: Path) -> None:
        self.n = n
        self.seed = seed
        self.calls_path = calls_path

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = [
            item
            for item in session.items
            if isinstance(item, pytest.Function) and not is_slow(item)
        ]
        items = by_subject(items)
        noted = read_calls(self.calls_path).seconds
        new = [item for item in items if item.nodeid not in noted]
        in_fork(functools.partial(note_calls, new, self.calls_path))
        calls = read_calls(self.calls_path)
        every = [mutant for path in sources() for mutant in mutants_of(path)]
        sample = random.Random(self.seed).sample(every, self.n)
        by_name = {item.nodeid: item for item in items}
        n_killed = 0
        for number, mutant in enumerate(sample, 1):
            tests = [by_name[test] for test in calls.meeting(mutant) if test in by_name]
            tests = tests or importing(mutant, items)[:MOST_UNTRIED]
            began = time.monotonic()
            survived = in_fork(functools.partial(survives, mutant, tests))
            n_killed += not survived
            how = f"survived {len(tests)} tests" if survived else "killed"
            line = f"{number}: {mutant.file}:{mutant.line} {mutant.change} {how}"
            print(f"{line}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        share = 100 * n_killed / self.n
        print(
            f"{self.n} of {len(every)} mutants (seed {self.seed}): {share:.0f} % killed "
            "(goal 90 %)",
            file=sys.stderr,
        )
        return True


def main(n: str, seed: str, calls: str | None = None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(int(n), int(seed), Path(calls or f"{folder}/calls.json"))
        options = ["-n", "0", "-s", "-p", "no:cacheprovider", f"--timeout={MOST_TEST_S}"]
        pytest.main([*options, "tests"], plugins=[trial])


if __name__ == "__main__":
    main(*sys.argv[1:4])
