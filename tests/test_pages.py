"""The pages: short where they must be, and naming only what is there: files, links, commands,
functions, code."""

import ast
import contextlib
import io
import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest

import lab
from lab import main
from lab.core import sampling
from lab.core.asked_settings import flag
from lab.core.record import Record
from lab.roofline import probing
from lab.show import sweep_laws
from tests.bench import pictures
from tests.support.command import run_lab

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
PLAIN = [
    "README.md",
    "INSTALL.md",
    "results/README.md",
    "lab/README.md",
    "notebooks/README.md",
    *DOCS,
]
"""Pages that follow the rules of "Write plainly" in CONTRIBUTING.md."""

PRINTED = sorted((ROOT / "lab").rglob("*.py"))
"""Files whose strings and docstrings follow them too."""

STUMBLES = r"""(?ix)\b(
    is\ no\ (name|text|noise|path|number|error|stream)  | so\ (many|much|few)\b(?!\ that)
    | of\ (which|whom)\b  | rests?\ on  | the\ begin\b  | nothing\ is\ claimed  | given\ up
    | by\ itself  | likewise  | as\ of\b  | neither\ is  | differs?\ from\ itself
    | all\ of\ it\b  | until\ now  | do\ not\ trust  | lack\ of\ room  | says?\ of\ (its|it)\b
    | off\ by\ [\d.]+\s?%  | \d+%\ (of|at)\b
)"""
"""Phrases that readers stumbled over."""

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


@pytest.mark.parametrize("page", PLAIN)
def test_phrases_that_readers_stumbled_over_do_not_come_back(page: str) -> None:
    match = re.search(STUMBLES, prose(page))
    assert match is None, match


@pytest.mark.parametrize("path", PRINTED, ids=lambda path: path.name)
def test_nor_do_they_in_strings_and_docstrings_of_what_is_printed(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = " ".join(node.value.split())
            assert not re.search(STUMBLES, text), text


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


def sample(name: str) -> list[Record]:
    return list(lab.read([ROOT / "results" / f"sample-{name}.jsonl"]).records)


def tpot_by_length(records: list[Record]) -> Any:
    """Milliseconds a token by prompt length."""
    return lab.summary(lab.runs(records)).set_index("n_prompt").tpot_ms


def test_the_front_pages_figures_are_the_samples() -> None:
    rows = lab.summary(lab.runs(sample("smollm2-135m-amd-epyc"))).set_index("n_prompt")
    page = " ".join(text_of("README.md").split())
    decode = 1 - rows.prefill_share[10]
    prefill = rows.prefill_share[10000]
    assert f"10 tokens, decode of 200 tokens takes {decode:.0%}".replace("%", " %") in page
    assert f"10,000 tokens, prefill takes {prefill:.0%}".replace("%", " %") in page


def test_the_commands_figures_are_the_samples() -> None:
    page = " ".join(text_of("docs/measure.md").split())
    rows = lab.summary(lab.runs(sample("sweep-smollm2-135m-amd-epyc")))
    prefill = sweep_laws.prefill_law(rows)
    decode = sweep_laws.decode_law(rows)
    assert prefill
    assert prefill.c
    assert decode
    token_ms = 1e3 * prefill.b
    growth_ms = 2e6 * prefill.c
    growth = f"and {growth_ms:.2f} ms more for every 1,000 tokens before it"
    assert f"costs {token_ms:.1f} ms, {growth}" in page
    a_token = 1e3 * decode.a
    more = 1e6 * decode.b
    assert (
        f"generated token costs {a_token:.1f} ms, and {more:.1f} ms more for every 1,000 positions"
        in page
    )


def test_the_ceilings_on_the_page_are_the_samples() -> None:
    page = " ".join(text_of("docs/limits.md").split())
    contents = lab.read([ROOT / "results/sample-smollm2-135m-amd-epyc.jsonl"])
    (best,) = contents.ceilings
    rows = lab.explain(contents.records, best)
    (reached_gflops,) = rows[(rows.phase == "prefill") & (rows.n_prompt == 1000)].gflops
    (ceiling_gflops,) = {
        probing.gflops(rate)
        for rate in best.rates
        if (rate.op, rate.type, rate.n_tokens, rate.n_threads) == ("mul_mat", "Q4_0", 512, 2)
    }
    reached = f"({reached_gflops:.0f} GFLOP/s with attention)"
    assert f"{reached}, where Q4_0 has a ceiling of {ceiling_gflops:.0f}." in page


def test_shared_heads_are_the_samples_and_theirs_is_another_machine() -> None:
    page = " ".join(text_of("results/README.md").split())
    llama = sample("synthetic-llama-3.2-3b-q4_0-amd-epyc")
    phi = sample("synthetic-phi-3-mini-q4_0-amd-epyc")
    llama_ms = tpot_by_length(llama)
    phi_ms = tpot_by_length(phi)
    assert f"a token in {phi_ms[10]:.0f} ms and Llama 3.2 3B in {llama_ms[10]:.0f} ms" in page
    after_2048 = f"{phi_ms[2048]:.0f} ms against {llama_ms[2048]:.0f} ms"
    assert f"After 2,048 tokens it is {after_2048}" in page
    phi_gb = (phi[0].model.n_bytes or 0) / 1e9
    llama_gb = (llama[0].model.n_bytes or 0) / 1e9
    assert f"({phi_gb:.2f} and {llama_gb:.2f} GB)" in page
    machines = {record.machine for record in (*llama, *phi)}
    samples_of_texts = [
        path for path in SAMPLES if not re.search("synthetic|turns", path.name)
    ]
    machines_of_texts = {record.machine for record in lab.read(samples_of_texts).records}
    assert len(machines) == 1
    assert not machines & machines_of_texts
    assert "samples with random weights come from **another machine** than all others" in page


def predicted(*asked: object) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(run_lab("predict", *asked, "--json")[1])["rows"]
    return rows


def test_the_table_of_datasheets_is_what_the_command_says() -> None:
    page = text_of("results/README.md")
    command = "-m llama-3.2-3b:Q4_K_M -p 1 -n 2 -d"
    assert f"`lab predict {command} DEVICE`" in page
    published = {
        "rtx-4090": 334.7,
        "rtx-3080-ti": 263,
        "rtx-3060": 123,
        "m4": 41,
        "ryzen-ai-max-395": 88,
        "gb10": 98,
    }
    for name, rate in {
        **published,
        "raspberry-pi-5": 4.9,
    }.items():  # tokens/s, from geerlingguy/ai-benchmarks
        (row,) = predicted(*command.split(), name)
        low, high = (f"{1 / seconds:.3g}" for seconds in row["tpot_s"][::-1])
        reached = 100 * rate * row["tpot_limit_s"]
        assert f"| {rate:g} | {low} to {high} | {reached:.0f} % |" in page, name


def test_the_quoted_numbers_are_what_the_command_says() -> None:
    page = text_of("results/README.md")
    a100 = "-m", "llama-2-7b:F16", "-d", "a100-80gb", "-n", 200, "-p"
    empty, short, long = predicted(*a100, "1,1000,100000")

    def share(
        row: dict[str, Any],
        of_peak: float = 1,
        token: dict[str, Any] | None = None,
    ) -> str:
        prefill = row["prefill_limit_s"] / of_peak
        decode = 199 * (token or row)["tpot_limit_s"]
        return f"{100 * prefill / (prefill + decode):.0f} %"

    by_bandwidth = " / ".join(f"{gbps / 35:.1f}" for gbps in (1008, 936, 2039, 800))
    assert f"| bandwidth over bytes: {by_bandwidth} |" in page
    read_gb = 2039 * empty["tpot_limit_s"]
    assert f"reads {read_gb:.1f} GB a token: {1 / empty['tpot_limit_s']:.0f}." in page
    cache_gb = 2039 * (long["tpot_limit_s"] - empty["tpot_limit_s"])
    assert f"each token also reads {cache_gb:.0f} GB of cache" in page
    at_limits = f"{share(short)} if both ran at the A100's limits"
    assert f"| {at_limits}; {share(short, 0.3)} if prefill reached 30 %" in page
    assert f"| {share(long)} at the limits" in page
    assert f"{share(long, token=empty)} if that is left out" in page
    ridge = 312e12 / 2.039e12
    assert (
        f"on an A100 {ridge:.0f} sequences in F16, {ridge * 18 / 32 / 2:.0f} in Q4_0" in page
    )


@pytest.mark.parametrize(
    "sample", sorted({path.stem.rpartition("-")[0] for path in pictures.committed()})
)
def test_a_committed_picture_is_what_the_code_draws(sample: str, tmp_path: Path) -> None:
    """With the matplotlib that drew it to a few pixels, with another one nearly."""
    import matplotlib
    import numpy as np
    from PIL import Image

    old = [path for path in pictures.committed() if path.stem.rpartition("-")[0] == sample]
    for path, drawn in zip(old, pictures.draw(tmp_path, old), strict=True):
        before = Image.open(path)
        after = Image.open(drawn)
        assert before.size == after.size, path
        changed = np.abs(np.asarray(before, float) - np.asarray(after, float)).max(axis=2) > 25
        is_same = matplotlib.__version__ in before.info["Software"]
        assert changed.mean() < (3e-5 if is_same else 0.05), (
            f"draw {path.name} anew: python -m tests.bench.pictures"
        )
