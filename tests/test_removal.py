"""A feature is removed with its room and its entry in the list, and the rest of the lab runs.

LAB_ALL_REMOVALS=1 pytest tests/test_removal.py   # each room in turn; CI does it every night
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lab import feature_list

ROOT = Path(__file__).parent.parent
FEATURES = ROOT / "lab/features"
ABOVE = ("report", "claims", "lessons")  # they may use other features, and go with them
NEEDED = ("measure",)  # it has the results of plain runs, which the samples are

CHECK = """
import importlib, pathlib, sys
import click.testing
removed = sys.argv[1].split(",")
for path in sorted(pathlib.Path("lab").rglob("*.py")):
    name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    if not name.startswith(("lab.engine", "lab.__main__")) and not name.endswith(".child"):
        importlib.import_module(name)
from lab.main import lab
run = click.testing.CliRunner().invoke
shown = run(lab, ["--help"])
assert shown.exit_code == 0, shown.output
commands = {line.split()[0] for line in shown.output.splitlines() if line.startswith("  ")}
assert commands.isdisjoint(removed), commands
if "show" in removed:
    sys.exit()
shown = run(lab, ["show", *map(str, sorted(pathlib.Path("results").glob("sample-*.jsonl")))])
assert shown.exit_code == 0, (shown.output[-2000:], shown.exception)
"""


def room_of(feature: feature_list.Feature) -> str | None:
    """The name of the file or folder in lab/features that holds a feature's command."""
    match = re.match(r"lab\.features\.(\w+)", feature.command)
    return match[1] if match else None


def rooms() -> list[str]:
    names = {room_of(feature) for feature in feature_list.FEATURES} - {None, *NEEDED}
    return sorted(str(name) for name in names)


def users_above(room: str) -> list[str]:
    """The rooms above the features that import a room, or each other."""
    removed = [room]
    for _ in ABOVE:
        for name in ABOVE:
            if name not in removed and any(imports(name, target) for target in removed):
                removed.append(name)
    return removed[1:]


def imports(name: str, target: str) -> bool:
    pattern = rf"features\.{target}\b|features import .*\b{target}\b"
    files = (FEATURES / name).rglob("*.py")
    return any(re.search(pattern, file.read_text()) for file in files)


def remove(package: Path, room: str) -> list[str]:
    """Delete a room and its entries in the list; returns the names of its commands."""
    folder = package / "features" / room
    if folder.is_dir():
        shutil.rmtree(folder)
    else:
        folder.with_suffix(".py").unlink(missing_ok=True)
    path = package / "feature_list.py"
    text = path.read_text()
    commands = []
    for feature in feature_list.FEATURES:
        if room_of(feature) == room:
            entry = rf'    Feature\(\n        name="{feature.name}",\n.*?\n    \),\n'
            text, n_removed = re.subn(entry, "", text, flags=re.DOTALL)
            assert n_removed == 1
            commands.append(feature.name)
    path.write_text(text)
    return commands


ORDINARY = ["stall", "quant", "report"]
"""A single file, a folder with lines of its own, and what the rooms above lean on."""


@pytest.mark.parametrize("room", rooms() if os.environ.get("LAB_ALL_REMOVALS") else ORDINARY)
def test_the_rest_of_the_lab_runs_without(room: str, tmp_path: Path) -> None:
    package = tmp_path / "lab"
    shutil.copytree(ROOT / "lab", package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("models", "prompts"):
        (tmp_path / name).symlink_to(ROOT / name)
    samples = tmp_path / "results"
    samples.mkdir()
    for name in ("smollm2-135m-amd-epyc", "batch-smollm2-135m-amd-epyc"):
        (samples / f"sample-{name}.jsonl").symlink_to(ROOT / f"results/sample-{name}.jsonl")
    commands = remove(package, room)
    for name in users_above(room):
        commands += remove(package, name)

    script = [sys.executable, "-c", CHECK, ",".join(commands)]
    done = subprocess.run(
        script,
        check=False,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stderr[-2000:]
