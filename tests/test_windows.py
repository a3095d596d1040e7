"""What of Windows can be checked elsewhere: imports and commands without what it lacks, encodings, paths.

Nothing here replaces a run on Windows: native libraries, processes, file locks and links are not seen.
"""

import ast
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lab.core import results
from tests.conftest import MODEL, make_record
from tests.test_project import FILES, PACKAGE, ROOT

SAMPLE = ROOT / "results/sample-smollm2-135m-amd-epyc.jsonl"

AS_ON_WINDOWS = """
import importlib, os, pathlib, pkgutil, platform, runpy, select, signal, socket, sys, warnings

import lab

names = [module.name for module in pkgutil.walk_packages(lab.__path__, "lab.") if module.name != "lab.__main__"]
sys.argv = ["lab", "show", sys.argv[1]]
for name in names:
    importlib.import_module(name)
import matplotlib.pyplot, pandas, psutil, rich, scipy.stats  # these look at the system when they are imported
for name in list(sys.modules):
    if name.partition(".")[0] == "lab":
        del sys.modules[name]

for name in ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "posix", "readline", "syslog"):
    sys.modules[name] = None
missing = {
    os: "fork forkpty sched_getaffinity sched_setaffinity getloadavg getuid geteuid getgid uname setsid killpg getpgid "
        "nice mkfifo statvfs pread pwrite posix_fadvise wait4 chown fchmod",
    signal: "SIGKILL SIGHUP SIGSTOP SIGCONT SIGUSR1 SIGUSR2 SIGALRM SIGCHLD SIGPIPE SIGQUIT SIGBUS alarm setitimer",
    select: "poll epoll",
    socket: "AF_UNIX",
}
for module, attributes in missing.items():
    for attribute in attributes.split():
        if hasattr(module, attribute):
            delattr(module, attribute)
sys.modules[pathlib.Path.__module__].WindowsPath = pathlib.PosixPath  # a real one cannot be made here
platform.system = lambda: "Windows"
os.name, sys.platform = "nt", "win32"
warnings.filterwarnings("error", category=EncodingWarning, module=r"lab(\\.|$)")

for name in names:
    importlib.import_module(name)
from lab.features.measure.measuring import parse_variant
from lab.process import spawning
from lab.runner import machine

assert parse_variant(r'--lib C:\\llama.cpp\\bin --threads 2') == {"lib": r"C:\\llama.cpp\\bin", "threads": 2}
assert parse_variant(r'--lib "C:\\Program Files\\llama.cpp"') == {"lib": r"C:\\Program Files\\llama.cpp"}
assert "0xc0000005" in spawning.cause_of_death("It", 0xC0000005, [])
assert machine.own_cores() is None
assert machine.default_threads() >= 1 and machine.describe().n_cores_usable == psutil.cpu_count()
runpy.run_module("lab", run_name="__main__")
"""


def test_every_module_imports_and_works_without_what_windows_lacks() -> None:
    command = [sys.executable, "-X", "warn_default_encoding", "-c", AS_ON_WINDOWS, str(SAMPLE)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    assert "prefill" in done.stdout and "decode" in done.stdout


def default_encodings(source: str) -> list[int]:
    """The lines that read or write text in the encoding of whatever system they run on."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or "formatter" in ast.unparse(node.func):  # click's write_text writes help
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        named = {keyword.arg: keyword.value for keyword in node.keywords}
        modes = [value for value in (*node.args, named.get("mode")) if isinstance(value, ast.Constant)]
        is_text = {
            "read_text": True,
            "write_text": True,
            "open": (not node.args and not modes) or any(set(str(mode.value)) <= set("rwax+t") for mode in modes),
            "fdopen": not any("b" in str(mode.value) for mode in modes),
            "TextIOWrapper": True,
            "run": bool({"text", "universal_newlines"} & named.keys()),
            "Popen": bool({"text", "universal_newlines"} & named.keys()),
            "check_output": bool({"text", "universal_newlines"} & named.keys()),
        }
        if is_text.get(name) and "encoding" not in named:
            lines.append(node.lineno)
    return lines


@pytest.mark.parametrize("file", FILES)
def test_text_names_its_encoding(file: str) -> None:
    assert default_encodings((PACKAGE / f"{file}.py").read_text(encoding="utf-8")) == []


def test_data_on_stdout_is_whole_whatever_its_encoding(tmp_path: Path) -> None:
    name = "模型 é"
    file = tmp_path / "a.jsonl"
    results.save(file, make_record(model=dataclasses.replace(MODEL, name=name)))
    answers = []
    for command in (["export", str(file), "--format", "csv", "--table", "runs"], ["show", str(file), "--json"]):
        done = subprocess.run(
            [sys.executable, "-m", "lab", *command],
            env={**os.environ, "PYTHONIOENCODING": "cp1252"},
            capture_output=True,
            check=True,
        )
        answers.append(done.stdout)
    assert name in answers[0].decode("utf-8")
    assert name in str(json.loads(answers[1]))
