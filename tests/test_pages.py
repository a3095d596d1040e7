"""The pages: short where they must be, and naming only what is there: files, links, commands, functions, code."""

import contextlib
import io
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest

import lab
from lab.cli import main

ROOT = Path(__file__).parent.parent
PAGES = [
    "README.md",
    "lab/README.md",
    "lab/cli/README.md",
    "results/README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
]
GENERATED = ["lab/README.md", "lab/cli/README.md", "results/README.md"]
COMMANDS = [
    "python3 -m pip install uv && python3 -m uv run lab measure --prompt-len 10,1000,10000 --gen 200",
    "python3 -m pip install uv && python3 -m uv run pytest",
]
"""How anybody measures, and how anybody tests, from a fresh checkout."""


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def prose(page: str) -> str:
    """A page without its fenced blocks and comments."""
    return re.sub(r"^ *```.*?^ *```|<!--.*?-->", "", text_of(page), flags=re.MULTILINE | re.DOTALL)


def test_the_front_page_is_short() -> None:
    assert text_of("README.md").count("\n") <= 300


@pytest.mark.parametrize("command", COMMANDS)
def test_the_two_commands_stand_in_readme_and_workflow(command: str) -> None:
    assert f"\n\n    {command}\n\n" in text_of("README.md")
    assert f"run: {command}\n" in text_of(".github/workflows/test.yml")


def test_ci_ends_with_the_readmes_test_and_checks_all_that_is_generated() -> None:
    lines = text_of(".ci/run").splitlines()
    assert lines[-1] == COMMANDS[1]
    assert f"python3 -m uv run cog --check {' '.join(GENERATED)}" in lines
    assert [page for page in PAGES if "[[[cog" in text_of(page)] == GENERATED


def test_what_is_generated_is_up_to_date() -> None:
    check = [sys.executable, "-m", "cogapp", "--check", *GENERATED]
    done = subprocess.run(check, check=False, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"cog -r {' '.join(GENERATED)}\n{done.stdout}{done.stderr}"


def anchors(page: Path) -> set[str]:
    """The headings of a page as links name them: small letters, no punctuation, hyphens for spaces."""
    headings = re.findall(r"^#+ (.*)$", prose(str(page.relative_to(ROOT))), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    for link in links:
        if not link.startswith("https://"):
            path, _, anchor = link.partition("#")
            target = ((ROOT / page).parent / path).resolve() if path else ROOT / page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_exist(page: str) -> None:
    named = re.findall(r"(?<![\w/~.])(?:lab|tests|models|notebooks)/[\w./-]+\.\w+", text_of(page))
    modules = re.findall(r"\btests\.bench\.(\w+)", text_of(page))
    named += [f"tests/bench/{name}.py" for name in modules]
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_functions_that_are_named_exist(page: str) -> None:
    for name, file in re.findall(r"`(\w+)`\s+in\s+`(lab/[\w/]+\.py)`", prose(page)):
        assert re.search(rf"^( *def|class) {name}\b|^{name}\b", text_of(file), flags=re.MULTILINE), (name, file)
    for name in re.findall(r"\blab\.(\w+)\(", text_of(page)):
        assert name in lab._MODULES, name


def commands_in(page: str) -> list[str]:
    """Every `lab ...` of a page: lines of indented blocks, and in backticks."""
    lines = re.findall(r"^    (?:.*uv run (?:--no-sync )?)?(lab [a-z].*)$", prose(page), flags=re.MULTILINE)
    quoted = re.findall(r"`([^`\n]*\blab [a-z][^`\n]*)`", prose(page))
    return [part.strip() for line in [*lines, *quoted] for part in line.split("&&") if part.strip().startswith("lab ")]


def unknown_words(command: str) -> list[str]:
    """The first word that is no command, or the options that its command does not have."""
    words = shlex.split(command, comments=True)[1:]
    where: click.Command = main.lab
    while isinstance(where, click.Group) and words and not words[0].startswith(("-", ".")):
        if words[0] not in where.commands:
            return words[:1]
        where = where.commands[words.pop(0)]
    known = {name for parameter in where.params for name in parameter.opts} | {"--help", "--version"}
    asked = [part for word in words if word.startswith("-") for part in word.split() if re.match("--?[a-z]", part)]
    return [option for option in asked if option not in known]


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_options_exist(page: str) -> None:
    assert {command: unknown_words(command) for command in commands_in(page) if unknown_words(command)} == {}


def test_a_wrong_command_or_option_is_seen() -> None:
    assert len(commands_in("lab/cli/README.md")) > 30
    assert unknown_words("lab mesure --gen 3") == ["mesure"]
    assert unknown_words('lab ab "--threads 1" "--thread 2" --gen 3') == ["--thread"]
    assert unknown_words("lab models info smollm2-135m --jsn") == ["--jsn"]


def blocks(page: str) -> list[str]:
    """The Python blocks of a page, without the indentation of the list that they stand in."""
    found = re.findall(r"^( *)```python\n(.*?)^ *```", text_of(page), flags=re.MULTILINE | re.DOTALL)
    return [re.sub(rf"^{indent}", "", block, flags=re.MULTILINE) for indent, block in found]


def test_quoted_code_is_the_code() -> None:
    quoted = [block.partition("\n") for block in blocks("lab/README.md") if block.startswith("# lab/")]
    assert len(quoted) == 2
    for first, _, code in quoted:
        assert code in text_of(first.removeprefix("# "))


def test_the_figure_by_hand_is_the_figure_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    (script,) = [block for block in blocks("lab/README.md") if block.startswith("# runs as a script")]
    monkeypatch.chdir(ROOT)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(script, {})
    records = lab.read(["results/sample-smollm2-135m-amd-epyc.jsonl"]).records
    rows = lab.summary(lab.runs(records))
    (tpot,) = rows[rows.n_prompt == 1000].tpot_ms
    assert float(printed.getvalue()) == pytest.approx(tpot)
    assert f"TPOT {tpot:.2f} ms" in text_of("lab/README.md") and f"# {tpot:.2f}\n" in script


def test_the_first_hour_is_ten_files_of_at_most_2000_lines() -> None:
    table = text_of("lab/README.md").partition("## The first hour")[2].partition("## Every file")[0]
    rows = re.findall(r"^\| `(lab/[\w/]+\.py)` \| (\d+) \|", table, flags=re.MULTILINE)
    lines = {path: text_of(path).count("\n") for path, _ in rows}
    assert {path: int(n) for path, n in rows} == lines and len(lines) == 10
    assert f"| together | {sum(lines.values()):,} |" in table
    assert sum(lines.values()) <= 2000


def test_the_diagram_has_every_wing() -> None:
    page = text_of("lab/README.md")
    diagram, table = page.partition("```mermaid")[2].partition("```")[0], page.partition("| wing |")[2]
    for folder in (path for path in (ROOT / "lab").iterdir() if (path / "__init__.py").exists()):
        assert f'"{folder.name}/ : ' in diagram
        assert f"| `{folder.name}/` |" in table


def test_the_licence_is_named() -> None:
    project = tomllib.loads(text_of("pyproject.toml"))["project"]
    assert (project["license"], project["license-files"]) == ("MIT", ["LICENSE"])
    assert text_of("LICENSE").startswith("MIT License\n") and "Mini-lab contributors" in text_of("LICENSE")
