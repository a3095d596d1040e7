"""The pages: short where they must be, and naming only what is there: files, links, commands,
functions, code."""

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
from lab import main
from lab.core import sampling
from lab.core.asked_settings import flag

ROOT = Path(__file__).parent.parent
DOCS = sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))
PAGES = [
    "README.md",
    "INSTALL.md",
    "lab/README.md",
    "results/README.md",
    "notebooks/README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    *DOCS,
]
GENERATED = [page for page in PAGES if "[[[cog" in (ROOT / page).read_text()]
SAMPLES = sorted((ROOT / "results").glob("sample-*.jsonl"))
UV_RUN = "python3 -m pip install uv && python3 -m uv run"
COMMANDS = [
    f"{UV_RUN} lab measure --prompt-len 10,1000,10000 --gen 200",
    f"{UV_RUN} --group dev pytest",
]
"""How anybody measures, and how anybody tests, from a fresh checkout."""


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def prose(page: str) -> str:
    """A page without its fenced blocks and comments."""
    return re.sub(
        r"^ *```.*?^ *```|<!--.*?-->", "", text_of(page), flags=re.MULTILINE | re.DOTALL
    )


@pytest.mark.parametrize("page", DOCS)
def test_a_page_is_in_the_sites_contents_and_linked_from_the_front_page(page: str) -> None:
    assert f": {page}\n" in text_of("mkdocs.yml")
    assert f"({page})" in text_of("README.md")


@pytest.mark.parametrize("command", COMMANDS)
def test_the_two_commands_stand_in_readme_and_workflow(command: str) -> None:
    assert f"\n\n    {command}\n\n" in text_of("README.md")
    assert f"run: {command}\n" in text_of(".github/workflows/test.yml")


def test_ci_ends_with_the_readmes_test_and_builds_the_site() -> None:
    lines = text_of(".ci/run").splitlines()
    assert lines[-1] == COMMANDS[1]
    assert any(
        line.endswith("--only-group docs mkdocs build --strict --quiet") for line in lines
    )


def test_what_is_generated_is_up_to_date() -> None:
    check = [sys.executable, "-m", "cogapp", "--check", *GENERATED]
    done = subprocess.run(
        check,
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"cog -r {' '.join(GENERATED)}\n{done.stdout}{done.stderr}"


def anchors(page: Path) -> set[str]:
    """The headings of a page as links name them: small letters, no punctuation, hyphens for
    spaces."""
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
    named = re.findall(
        r"(?<![\w/~.])(?:lab|tests|models|notebooks)/[\w./-]+\.\w+", text_of(page)
    )
    modules = re.findall(r"\btests\.bench\.(\w+)", text_of(page))
    named += [f"tests/bench/{name}.py" for name in modules]
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_functions_that_are_named_exist(page: str) -> None:
    for name, file in re.findall(r"`(\w+)`\s+in\s+`(lab/[\w/]+\.py)`", prose(page)):
        assert re.search(
            rf"^( *def|class) {name}\b|^{name}\b", text_of(file), flags=re.MULTILINE
        ), (name, file)
    for name in re.findall(r"\blab\.(\w+)\(", text_of(page)):
        assert name in lab.PUBLIC, name


def commands_in(page: str) -> list[str]:
    """Every `lab ...` of a page: lines of indented blocks, and in backticks."""
    lines = re.findall(
        r"^    (?:.*uv run (?:--no-sync )?)?(lab [a-z].*)$", prose(page), flags=re.MULTILINE
    )
    quoted = re.findall(r"`([^`\n]*\blab [a-z][^`\n]*)`", prose(page))
    commands = []
    for line in (*lines, *quoted):
        for command in line.split("&&"):
            if command.strip().startswith("lab "):
                commands.append(command.strip())
    return commands


def unknown_words(command: str) -> list[str]:
    """The first word that is no command, or the options that its command does not have."""
    parts_of_command = shlex.split(command, comments=True)[1:]
    if "--" in parts_of_command:  # what follows is another program's
        parts_of_command = parts_of_command[: parts_of_command.index("--")]
    where: click.Command = main.lab
    while (
        isinstance(where, click.Group)
        and parts_of_command
        and not parts_of_command[0].startswith(("-", "."))
    ):
        if parts_of_command[0] not in where.commands:
            return parts_of_command[:1]
        where = where.commands[parts_of_command.pop(0)]
    flags = {"--help", "--version"}
    for option in where.params:
        flags |= {name.strip() for name in (*option.opts, *option.secondary_opts)}
    if where.name == "choose":  # whose chains are options in quotes
        flags |= {flag(name) for name in sampling.table()}
    unknown = []
    for word in parts_of_command:
        if word.startswith("-"):
            options = [part for part in word.split() if re.match("--?[a-z]", part)]
            unknown += [option for option in options if option not in flags]
    return unknown


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page != "CHANGELOG.md"]
)  # which names what went
def test_commands_and_options_exist(page: str) -> None:
    for command in commands_in(page):
        assert unknown_words(command) == [], command


def test_a_wrong_command_or_option_is_seen() -> None:
    assert len(commands_in("docs/measure.md")) > 10
    assert unknown_words("lab mesure --gen 3") == ["mesure"]
    assert unknown_words('lab ab "--threads 1" "--thread 2" --gen 3') == ["--thread"]
    assert unknown_words("lab models info smollm2-135m --jsn") == ["--jsn"]


def blocks(page: str) -> list[str]:
    """The Python blocks of a page, without the indentation of the list that they stand in."""
    matches = re.findall(
        r"^( *)```python\n(.*?)^ *```", text_of(page), flags=re.MULTILINE | re.DOTALL
    )
    return [re.sub(rf"^{indent}", "", block, flags=re.MULTILINE) for indent, block in matches]


def test_quoted_code_is_the_code() -> None:
    quoted = [
        block.partition("\n")
        for block in blocks("lab/README.md")
        if block.startswith("# lab/")
    ]
    assert len(quoted) == 2
    for first, _, code in quoted:
        assert code in text_of(first.removeprefix("# "))


def test_the_figure_by_hand_is_the_figure_of_the_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (script,) = [
        block for block in blocks("lab/README.md") if block.startswith("# runs as a script")
    ]
    monkeypatch.chdir(ROOT)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(script, {})
    records = lab.read(["results/sample-smollm2-135m-amd-epyc.jsonl"]).records
    rows = lab.summary(lab.runs(records))
    (tpot,) = rows[rows.n_prompt == 1000].tpot_ms
    assert float(printed.getvalue()) == pytest.approx(tpot)
    assert f"TPOT {tpot:.2f} ms" in text_of("lab/README.md")
    assert f"# {tpot:.2f}\n" in script


def test_the_table_has_every_folder() -> None:
    table = text_of("lab/README.md").partition("| folder |")[2]
    for folder in (
        path for path in (ROOT / "lab").iterdir() if (path / "__init__.py").exists()
    ):
        assert f"| `{folder.name}/` |" in table


def test_the_licence_is_named() -> None:
    project = tomllib.loads(text_of("pyproject.toml"))["project"]
    assert project["license"] == "MIT"
    assert project["license-files"] == ["LICENSE"]
    assert text_of("LICENSE").startswith("MIT License\n")
    assert "Mini-lab contributors" in text_of("LICENSE")
