"""What can be checked without Windows: imports and commands without what it lacks, encodings,
paths.

Nothing here replaces a run on Windows: native libraries, processes, file locks and links are not
seen.
"""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

from lab.core import results
from tests.support.records import MODEL, make_record

ROOT = Path(__file__).parent.parent

SAMPLE = ROOT / "results/sample-smollm2-135m-amd-epyc.jsonl"

AS_ON_WINDOWS = """
import importlib, os, pathlib, pkgutil, platform, runpy, select, signal, socket, sys, warnings

import lab

names = [module.name for module in pkgutil.walk_packages(lab.__path__, "lab.")]
names.remove("lab.__main__")
sys.argv = ["lab", "show", sys.argv[1]]
for name in names:
    importlib.import_module(name)
# These look at the system when they are imported:
import matplotlib.pyplot, pandas, psutil, rich, scipy.stats
for name in list(sys.modules):
    if name.partition(".")[0] == "lab":
        del sys.modules[name]

for name in "fcntl resource pwd grp termios tty pty posix readline syslog".split():
    sys.modules[name] = None
missing = {
    os: "fork forkpty sched_getaffinity sched_setaffinity getloadavg getuid geteuid getgid uname "
        "setsid killpg getpgid nice mkfifo statvfs pread pwrite posix_fadvise wait4 chown fchmod",
    signal: "SIGKILL SIGHUP SIGSTOP SIGCONT SIGUSR1 SIGUSR2 SIGALRM SIGCHLD SIGPIPE SIGQUIT SIGBUS "
            "alarm setitimer",
    select: "poll epoll",
    socket: "AF_UNIX",
}
for module, attributes in missing.items():
    for attribute in attributes.split():
        if hasattr(module, attribute):
            delattr(module, attribute)
# A real WindowsPath cannot be made here.
sys.modules[pathlib.Path.__module__].WindowsPath = pathlib.PosixPath
platform.system = lambda: "Windows"
os.name, sys.platform = "nt", "win32"
warnings.filterwarnings("error", category=EncodingWarning, module=r"lab(\\.|$)")

for name in names:
    importlib.import_module(name)
from lab.features.ab import parse_variant
from lab.process import spawning
from lab.runner import machine

folder = r"C:\\llama.cpp\\bin"
assert parse_variant(f"--lib {folder} --threads 2") == {"lib": folder, "threads": 2}
folder = r"C:\\Program Files\\llama.cpp"
assert parse_variant(f'--lib "{folder}"') == {"lib": folder}
assert "0xc0000005" in spawning.cause_of_death("It", 0xC0000005, [])
assert machine.own_cores() is None
assert machine.default_threads() >= 1
assert machine.describe().n_cores_usable == psutil.cpu_count()
runpy.run_module("lab", run_name="__main__")
"""


def test_every_module_imports_and_works_without_what_windows_lacks() -> None:
    command = [sys.executable, "-X", "warn_default_encoding", "-c", AS_ON_WINDOWS, str(SAMPLE)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        check=False,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr
    assert "prefill" in done.stdout
    assert "decode" in done.stdout


def test_data_on_stdout_is_whole_whatever_its_encoding(tmp_path: Path) -> None:
    name = "模型 é"
    file = tmp_path / "a.jsonl"
    results.save(file, make_record(model=dataclasses.replace(MODEL, name=name)))
    answers = []
    export = ["export", str(file), "--as", "csv", "--table", "runs"]
    for command in (export, ["show", str(file), "--json"]):
        done = subprocess.run(
            [sys.executable, "-m", "lab", *command],
            env={**os.environ, "PYTHONIOENCODING": "cp1252"},
            capture_output=True,
            check=True,
        )
        answers.append(done.stdout)
    assert name in answers[0].decode("utf-8")
    assert name in str(json.loads(answers[1]))
