"""The project about itself: the order of its folders, one place for each library, and its help.
(Pages: test_pages.)"""

import ast
import dataclasses
import functools
import itertools
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

import lab
from lab import feature_list, main
from lab.app import help
from lab.core.record import Run
from tests.support.command import run_lab

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "lab"
LAYERS = [
    "core",
    "process",
    "engine",
    "models",
    "runner",
    "formats",
    "roofline",
    "remote",
    "show",
    "app",
]
"""The base, from bottom to top: a folder imports only from those before it."""

ABOVE_FEATURES = {"features.report", "features.claims", "features.lessons"}
"""They use other features, and nothing imports them."""

RUNNABLE = set(feature_list.by_name())

IMPORTERS = {  # the folders or files that may import a third-party library
    "httpx2": {"remote"},
    "h11": {"remote"},
    "aiohttp": {"features/recording"},
    "brotli": {"remote/compression"},
    "yarl": {"features/recording"},
    "psutil": {"features/doctor", "runner/machine", "runner/noise_watch"},
    "pynvml": {"runner/noise_watch"},
    "scipy": {"core/stats", "roofline", "show", "features"},
    "msgspec": {"core/bounds", "core/lines"},
    "llama_cpp": {"engine/bindings", "features/turns/child"},
    "numpy": {
        *("core/breaks", "core/phases", "core/stats", "engine", "models/synthetic"),
        *("roofline", "show", "features"),
    },
    "gguf": {"models/synthetic"},
    "huggingface_hub": {"models/hub"},
    "platformdirs": {"models/obtain", "runner/as_options"},
    "pandas": {
        *("core/drafts", "core/record", "formats", "roofline", "remote", "show", "app"),
        "features",
    },
    "matplotlib": {"show", "app", "features"},
    "IPython": {"runner/progress"},
    "jinja2": {"show/page", "features/turns/child"},
    "rich": {"show", "app", "features"},
    "click": {"app", "features", "main"},
}
FILES = sorted(
    path.relative_to(PACKAGE).with_suffix("").as_posix() for path in PACKAGE.rglob("*.py")
)
MODULES = {"lab." + name.removesuffix("/__init__").replace("/", "."): name for name in FILES}


@functools.cache
def imports(file: str) -> set[str]:
    """Every module that a file imports, at its top or inside a function; of the lab's as
    `lab.folder.module`."""
    names = set()
    for node in ast.walk(syntax_trees("lab")[f"lab/{file}.py"]):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            qualified = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = qualified & MODULES.keys()
            names |= modules or {node.module}
    return names


def room(name: str) -> str:
    """The folder of the base or the room of a module: `core`, `features.serve`."""
    _, *parts = name.split(".")
    return ".".join(parts[: 2 if parts[:1] == ["features"] else 1])


@functools.cache
def arrows() -> dict[str, set[str]]:
    """The folders and rooms that each folder and room imports."""
    targets_of: dict[str, set[str]] = {}
    for module, file in MODULES.items():
        home = room(module)
        imported = {room(name) for name in imports(file) if name in MODULES}
        targets_of.setdefault(home, set()).update(imported - {home, "errors", "feature_list"})
    return targets_of


@pytest.mark.parametrize("folder", LAYERS)
def test_a_folder_of_the_base_imports_only_from_those_below_it(folder: str) -> None:
    assert arrows()[folder] <= set(LAYERS[: LAYERS.index(folder)])


def test_only_what_runs_in_a_child_imports_the_engine() -> None:
    importers = [
        file for file in FILES if any(name.startswith("lab.engine.") for name in imports(file))
    ]
    assert not [
        file
        for file in importers
        if not file.startswith("engine/") and not file.endswith("/child")
    ]
    assert "engine.child" in (PACKAGE / "process/worker.py").read_text()


def test_no_feature_imports_another() -> None:
    leaning = {
        room_name: sorted(target for target in targets if target.startswith("features."))
        for room_name, targets in arrows().items()
        if room_name.startswith("features.") and room_name not in ABOVE_FEATURES
    }
    assert [room_name for room_name, targets in leaning.items() if targets] == []


def test_nothing_imports_the_rooms_above_the_features() -> None:
    for room_name, targets in arrows().items():
        if room_name not in {*ABOVE_FEATURES, "__init__"}:
            assert not targets & ABOVE_FEATURES, room_name


EVERYDAY_WORDS = {
    "ab",
    "ceilings",
    "measure",
    "models",
    "plot",
    "record",
    "show",
    "sweep",
    "words",
}
"""Names of features that the base uses for other things: a file mode, rates, a script."""

FEATURE_NAMES = RUNNABLE - EVERYDAY_WORDS


@pytest.mark.parametrize("folder", ["core", "runner", "show"])
def test_the_base_names_no_feature(folder: str) -> None:
    for path in sorted((PACKAGE / folder).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert node.value not in FEATURE_NAMES, (path.name, node.lineno, node.value)


LOOKS = {"exists", "is_file", "is_dir", "iterdir", "glob", "rglob", "expanduser"}


def test_paths_are_looked_at_in_one_place() -> None:
    """`Path.exists` and others fail in a folder that may not be entered: lab/core/files.py."""
    for file, tree in syntax_trees("lab").items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in LOOKS:
                is_ours = isinstance(node.value, ast.Name) and node.value.id == "files"
                assert is_ours or file == "lab/core/files.py", f"{file}:{node.lineno}"


def test_a_run_has_at_most_twenty_fields() -> None:
    assert len(dataclasses.fields(Run)) <= 20


@pytest.mark.parametrize("file", FILES)
def test_third_party_libraries_are_imported_in_one_place(file: str) -> None:
    libraries = (
        {name.split(".")[0] for name in imports(file)} - set(sys.stdlib_module_names) - {"lab"}
    )
    assert libraries <= IMPORTERS.keys()
    places = {file, *(file.rsplit("/", n)[0] for n in range(1, file.count("/") + 1))}
    assert all(places & IMPORTERS[library] for library in libraries), libraries


def test_commands_are_quoted_in_one_place() -> None:
    assert [file for file in FILES if "shlex" in imports(file)] == ["core/shell"]


@pytest.mark.parametrize("file", FILES)
def test_a_file_begins_with_its_idea(file: str) -> None:
    assert ast.get_docstring(ast.parse((PACKAGE / f"{file}.py").read_text()))


@pytest.mark.parametrize(
    "folder", sorted({path.parent for path in PACKAGE.rglob("*.py")} - {PACKAGE})
)
def test_a_folder_begins_with_its_docstring_and_nothing_else(folder: Path) -> None:
    (only,) = ast.parse((folder / "__init__.py").read_text()).body
    assert isinstance(only, ast.Expr)


PUBLIC = sorted(lab.PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_function_has_an_example(name: str) -> None:
    function = getattr(lab, name)
    assert f"lab.{name}(" in (function.__doc__ or ""), name


def test_python_m_lab_is_lab() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lab", "--version"], check=True, capture_output=True, text=True
    )
    assert done.stdout.startswith("mini-lab ")


def test_help_loads_nothing_heavy() -> None:
    heavy = "numpy pandas matplotlib llama_cpp psutil rich scipy huggingface_hub httpx2 h11"
    code = (
        "import sys; from lab.main import lab; lab(['--help'], standalone_mode=False);"
        f"loaded = set('{heavy}'.split()) & set(sys.modules); assert not loaded, loaded"
    )
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
    )


def commands(group: click.Group, path: str = "lab") -> dict[str, click.Command]:
    """Every command by its full name, commands of groups included."""
    by_name: dict[str, click.Command] = {}
    for name, command in group.commands.items():
        full_name = f"{path} {name}"
        by_name[full_name] = command
        if isinstance(command, click.Group):
            by_name |= commands(command, full_name)
    return by_name


@pytest.mark.parametrize("name", sorted(commands(main.lab)))
def test_every_command_and_option_explains_itself(name: str) -> None:
    command = commands(main.lab)[name]
    assert command.help
    assert f"## `{name}`" in (ROOT / "docs/reference.md").read_text()
    for parameter in command.params:
        assert parameter.param_type_name == "argument" or getattr(parameter, "help", None), (
            parameter.name
        )


def long_options(command: click.Command) -> set[str]:
    """The names of a command's options, without their dashes."""
    options = [option for option in command.params if isinstance(option, click.Option)]
    return {max(option.opts, key=len).removeprefix("--") for option in options}


@pytest.mark.parametrize("name", sorted(commands(main.lab)))
def test_the_help_of_a_command_has_purpose_examples_and_options_in_groups(name: str) -> None:
    command = commands(main.lab)[name]
    if isinstance(command, click.Group):
        return
    assert isinstance(command, help.Command)
    options = long_options(command)
    grouped = list(itertools.chain.from_iterable(help.GROUPS.values()))
    assert len(grouped) == len(set(grouped))
    assert len(options) < help.MOST_UNGROUPED or (
        4 <= len(command.first) <= 6 and set(command.first) <= options
    )
    purpose, examples = command.paragraphs[:2]
    assert "\n" not in purpose
    assert purpose.count(".") <= 1 + purpose.count("llama.cpp")
    mark, *lines = examples.splitlines()
    assert mark == "\b"
    assert 2 <= len(lines) <= 3
    assert all(len(line) <= 78 for line in lines)
    short = run_lab(*name.split()[1:], "--help")[1]
    assert (
        sum(line.lstrip().startswith("-") for line in short.splitlines()) <= help.MOST + 2
    )  # and the two of the help
    shown = run_lab(*name.split()[1:], "--help-all")[1] if "--help-all" in short else short
    assert all(f"--{option} " in shown for option in (*options, "help"))


def test_the_first_screen_of_the_help_says_what_matters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    command = main.lab.commands["measure"]
    assert isinstance(command, help.Command)
    screen = run_lab("measure", "--help")[1].splitlines()[:24]
    assert max(map(len, screen)) <= 80
    for line in (*command.paragraphs[0].splitlines(), *command.paragraphs[1].splitlines()[1:]):
        assert line.strip() in map(str.strip, screen)
    for flag in ("--model", "--prompt-len", "--gen", "--repeat", "--report", "--url"):
        assert any(flag in line.partition("  ")[2] for line in screen), flag


@pytest.mark.parametrize("feature", feature_list.FEATURES, ids=lambda feature: feature.name)
def test_the_list_of_features_says_what_their_help_begins_with(
    feature: feature_list.Feature,
) -> None:
    assert main.lab.commands[feature.name].get_short_help_str(200) == feature.help


def test_committed_samples_are_readable_and_small() -> None:

    from lab.core import results

    samples = sorted((ROOT / "results").glob("sample-*.jsonl"))
    assert samples
    for sample in samples:
        reading = results.read([sample])
        assert reading.all_lines
        assert not reading.skipped
        # A whole lab quant has 240 runs, and the divergence of each position.
        most_bytes = 1_600_000 if "quant" in sample.name else 220_000
        assert sample.stat().st_size < most_bytes


def test_no_registry_host_and_no_lock_file_is_committed() -> None:
    listed = subprocess.run(
        ["git", "ls-files"], check=False, cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    assert not {"uv.lock", "poetry.lock"} & set(listed.stdout.split())


def test_no_command_has_two_options_of_one_name() -> None:
    for name, command in main.lab.commands.items():
        flags = [
            flag
            for option in command.params
            for flag in (*option.opts, *option.secondary_opts)
            if flag.strip()
        ]
        assert len(flags) == len(set(flags)), name


def test_test_modules_are_no_libraries() -> None:
    """What several tests share is in tests/support/ (or a benchmark that they try)."""
    importers = []
    for file, tree in syntax_trees("tests").items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                *folders, name = node.module.split(".")
                is_test = name == "conftest" or name.startswith("test_")
                if folders[:1] == ["tests"] and is_test:
                    importers.append(f"{file}:{node.lineno}")
    assert importers == []


@functools.cache
def syntax_trees(folder: str) -> dict[str, ast.Module]:
    """The parsed files of a folder by their path from the root."""
    trees = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        trees[path.relative_to(ROOT).as_posix()] = ast.parse(path.read_text(encoding="utf-8"))
    return trees


def test_sizes_of_text_in_pictures_are_decided_in_one_place() -> None:
    literal = []
    for file, tree in syntax_trees("lab").items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.keyword):
                continue
            is_literal = isinstance(node.value, ast.Constant)
            if is_literal and node.arg in ("fontsize", "labelsize"):
                literal.append(f"{file}:{node.value.lineno}")
    assert literal == []


WRITTEN_ONCE = {
    r"status [!=]= OK\b.*\bwarmup": {"core/record", "show/table"},  # Run.is_timed, table.timed
    r"disturbed.*mean\(\).*0\.5": set[str](),  # shown.is_unreliable
    r"FAILED or .*crashes": {"runner/cases"},
    r"sys\.exit\(130": set[str](),  # EXIT_INTERRUPTED in errors.py
    r"^AT_LEAST = 0\.01": {"show/comparison"},
    r"repeat\b.*(default|int) ?= ?3\b": set[str](),  # DEFAULT_REPEAT
}
"""What is decided in one place, by how it would be written elsewhere."""


@pytest.mark.parametrize("pattern", WRITTEN_ONCE)
def test_a_rule_is_written_in_one_place(pattern: str) -> None:
    places = set()
    for file in FILES:
        text = (PACKAGE / f"{file}.py").read_text(encoding="utf-8")
        if re.search(pattern, text, re.MULTILINE):
            places.add(file)
    assert places == WRITTEN_ONCE[pattern]


def test_a_class_name_stands_for_one_thing() -> None:
    files_of: dict[str, set[str]] = {}
    for file, tree in syntax_trees("lab").items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                files_of.setdefault(node.name, set()).add(file)
    repeated = {name: sorted(files) for name, files in files_of.items() if len(files) > 1}
    assert repeated == {}
