"""The project about itself: the order of its rooms, its doors, its help and its README."""

import ast
import subprocess
import sys
from pathlib import Path

import click
import pytest

from lab import cli

ROOT = Path(__file__).parent.parent
ROOMS = [
    "errors",
    "readings",
    "record",
    "results",
    "phases",
    "stats",
    "noise",
    "cost",
    "machine",
    "catalog",
    "hubcache",
    "hubwords",
    "hub",
    "synthetic",
    "prompts",
    "loop",
    "native",
    "kernels",
    "header",
    "engine",
    "child",
    "worker",
    "models",
    "shapes",
    "plan",
    "reproduce",
    "progress",
    "notebook",
    "bench",
    "measure",
    "trial",
    "table",
    "laws",
    "ceilings",
    "roofline",
    "levers",
    "predict",
    "compare",
    "exchange",
    "style",
    "plot",
    "plot_why",
    "svg",
    "terminal",
    "printing",
    "printing_why",
    "report",
    "lesson",
    "cli_options",
    "cli_results",
    "cli_models",
    "cli_measure",
    "cli_compare",
    "cli_explain",
    "cli",
]
DOORS = {  # who may import a third-party library
    "psutil": {"machine"},
    "pynvml": {"machine"},
    "scipy": {"stats"},
    "llama_cpp": {"native"},
    "numpy": {"stats", "kernels", "ceilings", "engine", "table", "synthetic"},
    "gguf": {"synthetic"},
    "huggingface_hub": {"hub"},
    "pandas": {"table", "laws", "compare", "plot", "printing", "report", "lesson"},
    "matplotlib": {"style", "plot", "plot_why", "svg"},
    "IPython": {"notebook"},
    "jinja2": {"report"},
    "rich": {"terminal", "printing", "printing_why", "cli_measure"},
    "click": {"cli_options", "cli_results", "cli_models", "cli_measure", "cli_compare", "cli_explain", "cli"},
}


def imports(room: str) -> set[str]:
    """Every module that a room imports, at its top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / "lab" / f"{room}.py").read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"lab.{alias.name}" for alias in node.names} if node.module == "lab" else {node.module}
    return found


def test_every_file_is_a_room() -> None:
    assert {path.stem for path in (ROOT / "lab").glob("*.py")} == {*ROOMS, "__init__"}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_from_rooms_above_it(room: str) -> None:
    above = {f"lab.{name}" for name in ROOMS[: ROOMS.index(room)]}
    assert {name for name in imports(room) if name.startswith("lab.")} <= above


@pytest.mark.parametrize("room", ROOMS)
def test_third_party_libraries_have_one_door(room: str) -> None:
    libraries = {name.split(".")[0] for name in imports(room)} - set(sys.stdlib_module_names) - {"lab"}
    assert libraries <= DOORS.keys()
    assert all(room in DOORS[library] for library in libraries)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_is_small_and_begins_with_its_idea(room: str) -> None:
    text = (ROOT / "lab" / f"{room}.py").read_text()
    assert ast.get_docstring(ast.parse(text))
    assert text.count("\n") <= 300


def test_help_loads_nothing_heavy() -> None:
    heavy = "numpy pandas matplotlib llama_cpp psutil rich scipy huggingface_hub"
    code = (
        "import sys; from lab.cli import lab; lab(['--help'], standalone_mode=False);"
        f"loaded = set('{heavy}'.split()) & set(sys.modules); assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def commands(group: click.Group, path: str = "lab") -> dict[str, click.Command]:
    """Every command by its full name, commands of groups included."""
    found: dict[str, click.Command] = {}
    for name, command in group.commands.items():
        found[f"{path} {name}"] = command
        if isinstance(command, click.Group):
            found |= commands(command, f"{path} {name}")
    return found


@pytest.mark.parametrize("name", sorted(commands(cli.lab)))
def test_every_command_and_option_explains_itself(name: str) -> None:
    command = commands(cli.lab)[name]
    assert command.help
    assert f"### `{name}`" in (ROOT / "README.md").read_text()
    for parameter in command.params:
        assert parameter.param_type_name == "argument" or getattr(parameter, "help", None), parameter.name


def test_readme_help_is_the_help() -> None:
    subprocess.run([sys.executable, "-m", "cogapp", "--check", "README.md"], check=True, cwd=ROOT)


def test_readme_names_every_room_in_reading_order() -> None:
    readme = (ROOT / "README.md").read_text()
    places = [readme.index(f"`lab/{room}.py`") for room in ROOMS]
    assert places == sorted(places)


def test_committed_samples_are_readable_and_small() -> None:

    from lab import results

    samples = sorted((ROOT / "results").glob("sample-*.jsonl"))
    assert samples
    for sample in samples:
        reading = results.read([sample])
        assert reading.records and not reading.skipped
        assert sample.stat().st_size < 200_000


def test_no_registry_host_and_no_lock_file_is_committed() -> None:
    listed = subprocess.run(["git", "ls-files"], check=False, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    assert not {"uv.lock", "poetry.lock"} & set(listed.stdout.split())
