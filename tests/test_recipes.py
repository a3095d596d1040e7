"""The recipe of CONTRIBUTING.md for an experiment, followed in a copy of the lab: it names every file that changes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent

EXPERIMENT = '''"""`lab echo`: the same prompt several times, one after the other in one sequence."""

from lab.core import phases
from lab.core.levers import Echo
from lab.drawing import canvas
from lab.core.script import run
from lab.experiments.common import cell, listed, numbers
from lab.experiments.experiment import REPEAT, Experiment, Option, Table, for_plan, public
from lab.models import catalog
from lab.runner.cases import Case
from lab.runner.plan import make_plan, with_cases


def plan(worker, /, times="1,2", gen=4, repeat=None, model=catalog.DEFAULT, **settings):
    """Prefill a prompt that repeats itself.

    lab.echo("1,2")
    """
    made = make_plan(worker, "8", gen, repeat, model, **for_plan(settings))
    return with_cases(made, [Case(8 * n, gen, lever=Echo(n)) for n in numbers("--times", times, 99)], write)


def write(case, text, settings):
    return run(text(0, 8) * case.lever.n_times, case.n_gen, settings.n_ubatch)


def draw(rows, records, prediction, subject, figure):
    ax = figure.subplots()
    canvas.runs(ax, [(record.run.echo.n_times, phases.prefill_ns(record.run), record) for record in records])
    canvas.finish([ax], subject)


def rows(records, prediction):
    return [record.run.echo for record in records if record.run.echo]


TABLE = Table(
    name="echo",
    question="Does repetition cost anything?",
    title="prompts that repeat themselves",
    caption="Prefill over repetitions.",
    columns=(("times", lambda row: cell(row.n_times)),),
    rows=rows,
    conclude=lambda rows, records, prediction: (["Yes."], {}),
    draw=draw,
)

EXPERIMENT = Experiment(
    name="echo",
    chapter="Echoes",
    about="Prefill a prompt that repeats itself.",
    lever=Echo,
    plan=plan,
    options=(Option("times", "Repetitions."), Option("gen", "Tokens.", "n"), REPEAT),
    again=lambda runs: {"times": listed(run.echo.n_times for run in runs)},
    tables=(TABLE,),
)

echo = public("echo", plan)
'''

CHANGES = {
    "lab/core/levers.py": [
        (
            "def in_chunks(",
            """@dataclass(frozen=True)
class Echo:
    kv_unified: ClassVar[str | None] = None

    n_times: int

    @property
    def words(self):
        return f"{self.n_times} times"


def in_chunks(""",
        ),
        ("| Speculation\n", "| Speculation | Echo\n"),
    ],
    "lab/core/record.py": [
        ("import LEVERS, Batch,", "import LEVERS, Echo, Batch,"),
        ("    batch: Batch | None = None\n", "    batch: Batch | None = None\n    echo: Echo | None = None\n"),
    ],
    "lab/core/lever_figures.py": [
        ("from lab.core.levers import", "from lab.core.levers import Echo,"),
        ("NAMES = {", 'NAMES = {\n    "echo_s": "an echo",'),
        ("FIGURES = {", 'FIGURES = {Echo: lambda run: {"echo_s": run.echo.n_times}, '),
    ],
    "lab/experiments/known.py": [
        ("from lab.experiments import", "from lab.experiments import echoing,"),
        ("EXPERIMENTS = (", "EXPERIMENTS = (echoing.EXPERIMENT, "),
    ],
    "lab/__init__.py": [
        ("if TYPE_CHECKING:", "if TYPE_CHECKING:\n    from lab.experiments.echoing import echo as echo"),
    ],
}
"""What the recipe asks for, besides the experiment's file: in each file the text before and after."""

USE = """
import sys
from pathlib import Path
import lab
from lab.analysis import table
from lab.analysis.spread import name_of
from lab.core import results
from lab.drawing import canvas
from lab.experiments.echoing import plan
from lab.runner.session import execute, new_results_file
from lab.show import levers, reproduce
from tests.conftest import FakeWorker, run_lab

folder, worker = Path(sys.argv[1]), FakeWorker()
assert Path(lab.__file__).is_relative_to(folder)
model = folder / "tiny.gguf"
model.write_bytes(b"GGUF")
made = plan(worker, "1,3", 4, 2, str(model))
path = new_results_file(made, folder)
for _ in execute(made, worker, path, lambda status: None):
    pass
records = [record for record in results.read([path]).records if record.run.is_timed]
assert [record.run.echo.n_times for record in records].count(3) == 2
assert set(table.runs(records).echo_s) == {1, 3}
assert name_of(("echo_s", 8, None, None)) == "an echo at 8"
(section,) = levers.sections(records)
assert section.sentences[0] == "Yes." and len(section.cells) == 4
assert canvas.drawn(section.pictures[0].draw, (8, 5)).axes
assert reproduce.command(records).startswith("lab echo --times 1,3 --repeat 2")
assert lab.echo.__name__ == "echo"
assert "--times" in run_lab("echo", "--help")[1] and "  echo " in run_lab("--help")[1]
print("whole")
"""


def recipe(title: str) -> str:
    return (ROOT / "CONTRIBUTING.md").read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]


def test_the_recipe_for_an_experiment_names_every_file_and_is_enough(tmp_path: Path) -> None:
    named = re.findall(r"(?m)^\| `(lab/[\w/]+\.py)`", recipe("Add an experiment"))
    assert {*CHANGES} == {*named}
    for folder in ("lab", "models", "prompts"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name, edits in CHANGES.items():
        text = (tmp_path / name).read_text()
        for before, after in edits:
            assert before in text, (name, before)
            text = text.replace(before, after, 1)
        (tmp_path / name).write_text(text)
    (tmp_path / "lab/experiments/echoing.py").write_text(EXPERIMENT)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", USE, str(tmp_path)],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.stdout.endswith("whole\n"), done.stderr
