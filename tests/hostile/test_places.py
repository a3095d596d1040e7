"""Ordinary places that a user did not choose: a home folder that may not be entered, or none, a
closed stream, a current folder that is gone."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from lab.core import files, results
from lab.errors import LabError
from lab.models import catalog, obtain
from lab.process.setup import LIB_VARIABLE
from lab.runner import as_options, builds
from tests.support.command import run_lab

SAMPLE = str(Path("results/sample-smollm2-135m-amd-epyc.jsonl").absolute())
ROOT = Path(__file__).parents[2]
LAB = shlex.join([sys.executable, "-P", "-m", "lab"])
WITHOUT_RIGHTS = ["setpriv", "--inh-caps=-all", "--bounding-set=-all"]
"""Runs a command for which root's files are as closed as for any user."""

WITHOUT_HOME = [
    *("setpriv", "--reuid", "4242", "--regid", "4242", "--clear-groups"),
    *("--inh-caps=+dac_override,+dac_read_search", "--ambient-caps"),
    *("+dac_override,+dac_read_search", "env", "-u", "HOME"),
]
"""Runs a command as a user that the system's list does not have, with no home folder."""

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs rights of POSIX")
is_root = os.name != "nt" and os.geteuid() == 0
can_change_user = is_root and shutil.which("setpriv") is not None
needs_users = pytest.mark.skipif(not can_change_user, reason="needs root and setpriv")


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[Path]:
    """A folder that may not be entered."""
    folder = tmp_path / "locked"
    folder.mkdir()
    folder.chmod(0)
    yield folder
    folder.chmod(0o700)


def run_in_shell(
    command: str, folder: Path, launcher: list[str] | None = None, **changes: str
) -> subprocess.CompletedProcess[str]:
    """A line of a shell in a folder."""
    return subprocess.run(
        [*(launcher or []), "sh", "-c", command],
        cwd=folder,
        env={**os.environ, **changes},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


IN_ONE_PROCESS = """
import json, shlex, sys
from tests.support.command import run_lab
print(json.dumps([run_lab(*shlex.split(line)[1:]) for line in json.loads(sys.argv[1])]))
"""


def run_in_one_process(
    lines: list[str], folder: Path, launcher: list[str], before: str = ":", **changes: str
) -> dict[str, tuple[int, str, str]]:
    """The status, stdout and stderr of each of these commands, in a Python that is started after
    `before`."""
    program = shlex.join([sys.executable, "-P", "-c", IN_ONE_PROCESS, json.dumps(lines)])
    ended = run_in_shell(
        f"{before}; {program}", folder, launcher, PYTHONPATH=str(ROOT), **changes
    )
    assert ended.returncode == 0, ended.stderr
    return dict(zip(lines, json.loads(ended.stdout), strict=True))


UNSEEN = ("x" * 300, "a\0b", "x" * 5000, "nowhere/x.gguf", "")


@pytest.mark.parametrize("name", UNSEEN[:-1])
def test_a_path_that_cannot_be_is_not_there(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    assert not files.exists(path)
    assert not files.is_file(path)
    assert not files.is_dir(path)
    assert files.listed(path, "*.jsonl") == []


@pytest.mark.parametrize("text", ["x" * 300 + ".gguf", "a\0b.gguf", "/" + "x" * 5000])
def test_a_path_that_no_system_has_is_refused_with_its_reason(text: str) -> None:
    with pytest.raises(LabError, match="cannot be read"):
        catalog.parse(text)


ORDINARY_NAMES = [
    *("a", "A", "1", "_", "x.y", ".hidden", "a-b", "a_b", "a+b", "a=b", "a,b", "a;b", "a@b"),
    *("a#b", "a%b", "a&b", "a!b", "a'b", "(a)", "[a]", "{a}", "a~"),
    *("~a", "a b", " a", "a ", "a  b", "a\tb", "-a", "--a", "a.", "a..b", "...", "$a", "`a`"),
    *("results", "Results", "my results", "out.d", "2026-11-28", "20261128T205026Z", "v1.2.3"),
    *("Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf", "qwen2.5-0.5b-instruct-q4_k_m.gguf"),
    *("gpt-oss-20b-mxfp4.gguf", "ggml-model-f16.gguf", "model-00001-of-00003.gguf"),
    *("mmproj-model-f16.gguf", "phi-3-mini-4k-instruct.Q8_0.gguf", "gemma-3-4b-it-IQ3_M.gguf"),
    *("DeepSeek-R1-0528-Qwen3-8B-UD-Q4_K_XL.gguf", "tinyllama-1.1b.Q2_K.GGUF", "a.gguf"),
    *("sha256-dde5aa3fc5ffc17176b5e8bdc82f587b24b2678c6c66101bf7da77af9f7ccdff", "tmp.abc123"),
    *("Modelle", "Gr\u00f6\u00dfe", "r\u00e9sultats", "\u6a21\u578b", "\u30e2\u30c7\u30eb"),
    *(
        "\u043c\u043e\u0434\u0435\u043b\u0438",
        "\u0645\u0644\u0641",
        "\u0928\u092e\u0942\u0928\u093e",
    ),
    *("e\u0301", "\u00e9", "\U0001f999", "a\u200bb", "\u00a0", "C:", "C_models", "a:b", "a|b"),
    *("nul", "con", "aux", "lib", "bin", "build", "models--org--repo", "snapshots", "blobs"),
    *("x" * 100, "x" * 200, "x" * 250, "\u00e4" * 120, "(copy)", "copy (2)", "a (1).gguf"),
    *(
        "New Folder",
        "Program Files",
        "OneDrive - Firma",
        "iCloud~com~apple",
        ".cache",
        ".config",
    ),
    *("None", "null", "true", "0", "00", "1e9", "inf", "nan", "-", "+", "=", "@", "^", "a^b"),
]


@pytest.mark.parametrize("name", ORDINARY_NAMES)
def test_an_ordinary_name_is_seen(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    folder.mkdir()
    path = folder / f"{name}.gguf"[-200:]
    assert not files.exists(path)
    path.write_bytes(b"GGUF")
    assert files.exists(path)
    assert files.is_file(path)
    assert files.is_dir(folder)
    assert files.obstacle(path) is None
    assert files.obstacle(folder) is None
    assert files.expanded(path) == path
    assert files.listed(folder, "*") == [path]
    assert catalog.parse(str(path)).path == path


def test_a_hundred_names_were_tried() -> None:
    assert len(set(ORDINARY_NAMES)) > 100


def test_a_home_folder_of_another_user_is_as_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A home whose name is too long cannot be examined either, by any user."""
    home = tmp_path / ("x" * 300)
    monkeypatch.setenv("MINI_LAB_CACHE", str(home / "models"))
    monkeypatch.setenv(as_options.FOLDER, str(home / "settings"))
    assert obtain.listing()
    assert obtain.locate(catalog.parse("synthetic:smollm2-135m")) is None
    with pytest.raises(LabError, match="no settings named fast"):
        as_options.settings("fast")


@pytest.mark.parametrize("is_expanded", [True, False])
def test_a_user_without_a_home_folder_is_told_what_to_set(
    is_expanded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find() -> Path:
        if is_expanded:
            return Path("~/.cache/mini-lab")  # as older versions of platformdirs
        raise RuntimeError("could not determine the home directory")

    with pytest.raises(LabError, match="no home folder") as problem:
        files.user_folder(find, "MINI_LAB_CACHE")
    assert "MINI_LAB_CACHE" in problem.value.hint


NEEDS_NO_HOME = (
    "lab models",
    "lab models info llama-3.2-3b",
    "lab predict -m llama-3.1-8b -d rtx-4090",
    f"lab show {SAMPLE}",
    f"lab plot {SAMPLE} --out pictures",
    "lab measure --dry-run -p 10 -n 4 -t 1",
)
REFUSED = {
    "lab measure --settings fast --dry-run": "settings",
    "lab models make synthetic:smollm2-135m:Q4_0": "MINI_LAB_CACHE",
    "lab measure -m '~/x.gguf' --dry-run": "x.gguf",
    "lab measure --lib '~/x' --dry-run": "--lib",
    "lab measure --prompt '~/x.txt' --dry-run": "x.txt",
    "lab measure --grammar-file '~/x.gbnf' --dry-run": "x.gbnf",
    "lab show '~/x.jsonl'": "x.jsonl",
    "lab show '~'": "",
    "lab why '~/x.jsonl' '~/y.jsonl' --budget 0": "x.jsonl",
}


def check_all(folder: Path, launcher: list[str], **changes: str) -> None:
    """The commands that need no home folder run, and the others are refused with a sentence."""
    outcomes = run_in_one_process([*NEEDS_NO_HOME, *REFUSED], folder, launcher, **changes)
    for line in NEEDS_NO_HOME:
        status, _, err = outcomes[line]
        assert status == 0, (line, err)
    for line, word in REFUSED.items():
        status, _, err = outcomes[line]
        assert status == 1, line
        assert err.startswith("Error: "), (line, err)
        assert word.lower() in err.lower(), line
    assert not (folder / "~").exists()


@pytest.mark.skipif(is_root and not can_change_user, reason="root may enter every folder")
def test_commands_run_with_a_home_folder_that_may_not_be_entered(
    locked: Path, tmp_path: Path
) -> None:
    check_all(tmp_path, WITHOUT_RIGHTS if is_root else [], HOME=str(locked))


@needs_users
def test_commands_run_without_any_home_folder(tmp_path: Path) -> None:
    check_all(tmp_path, WITHOUT_HOME)


@pytest.mark.skipif(is_root and not can_change_user, reason="root may enter every folder")
def test_what_may_not_be_read_is_named_with_the_reason(locked: Path, tmp_path: Path) -> None:
    lines = [
        f"lab show {locked}",
        f"lab show {locked}/x.jsonl",
        f"lab measure -m {locked}/x.gguf --dry-run",
        f"lab measure --lib {locked} --dry-run",
        f"lab why {SAMPLE} {locked}/x.jsonl --budget 0",
    ]
    launcher = WITHOUT_RIGHTS if is_root else []
    for line, (status, _, err) in run_in_one_process(lines, tmp_path, launcher).items():
        assert status == 1
        assert "Permission denied" in err, (line, err)


@pytest.mark.skipif(is_root and not can_change_user, reason="root may enter every folder")
def test_a_current_folder_that_may_not_be_entered_hides_no_model(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    lines = ["lab models info llama-3.2-3b", f"lab plot {SAMPLE} --out {tmp_path}/pictures"]
    launcher = WITHOUT_RIGHTS if is_root else []
    try:
        outcomes = run_in_one_process(lines, inside, launcher, before="chmod 0 .")
    finally:
        inside.chmod(0o700)
    assert [(status, err) for status, _, err in outcomes.values()] == [(0, "")] * 2


def test_a_current_folder_that_is_gone(shallow: Path, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    plan = f"lab turns --dry-run -t 1 -m {shallow}"
    lines = ["lab models", f"lab plot {SAMPLE} --out {tmp_path}", plan]
    outcomes = run_in_one_process(lines, gone, [], before="rmdir ../gone")
    assert [status for status, _, _ in outcomes.values()] == [0] * 3, outcomes
    err = "".join(err for _, _, err in outcomes.values())
    assert re.fullmatch(r"Time: about .* as fast as this machine is now\n", err)


@pytest.mark.parametrize("closed", ["2>&-", ">&-", "<&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_ends_no_command(closed: str, shallow: Path, tmp_path: Path) -> None:
    line = f"{LAB} measure -m {shallow} -p 5 -n 2 -r 1 -t 1 --no-plot"
    ended = run_in_shell(f"{line} {closed}", tmp_path)
    assert ended.returncode == 0, ended.stderr
    (path,) = (tmp_path / "results").glob("*.jsonl")
    assert not results.read([path]).skipped
    assert ("E2E" in ended.stdout) == (">&-" not in closed.replace("2>&-", ""))


def test_an_error_without_stderr_has_its_status_and_leaves_stdout_alone(
    tmp_path: Path,
) -> None:
    for words in ("show nowhere.jsonl", "nowhere", "why - 2"):
        ended = run_in_shell(f"{LAB} {words} 2>&- <&-", tmp_path)
        assert ended.returncode == 1
        assert not ended.stdout


ENVIRONMENTS = (
    ("COLUMNS=0", "LINES=0", "TERM=xterm-256color", "NO_COLOR=1", "LANG=C", "TZ=nowhere"),
    ("COLUMNS=1", "LINES=-1", "-u TERM", "FORCE_COLOR=1", "LC_ALL=C PYTHONIOENCODING=ascii"),
    ("COLUMNS=-5", "TERM=", "LC_ALL=POSIX PYTHONUTF8=0", "XDG_CONFIG_HOME=relative"),
    ("COLUMNS=wide", "PYTHONIOENCODING=latin-1", "PYTHONWARNINGS=always", "HOME="),
    ("COLUMNS=", "LC_ALL=tr_TR.UTF-8", "HOME=/", "TMPDIR=/proc/nowhere"),
    ("COLUMNS=\u00b2", "LANG=xx_YY.nonsense", "XDG_CACHE_HOME=relative"),
    ("TERM=dumb", "LAB_SETTINGS=", "XDG_CACHE_HOME="),
    ("-i PATH=/bin",),
    ("MPLBACKEND=nonsense", "MPLCONFIGDIR=/proc/nowhere"),
    ("MPLBACKEND=module://x.y",),
)
"""What does not depend on each other is set together."""


def wrong_with(settings: Iterable[str], folder: Path) -> str:
    """What a command says that fails where this is set."""
    command = "plot --out ." if any("MPL" in setting for setting in settings) else "show"
    options = sorted(settings, key=lambda setting: not setting.startswith("-"))
    line = f"env {' '.join(options)} {LAB} {command} {shlex.quote(SAMPLE)}"
    ended = run_in_shell(line, folder)
    return ended.stderr if ended.returncode or "Traceback" in ended.stderr else ""


@pytest.mark.parametrize("settings", ENVIRONMENTS)
def test_an_odd_environment_is_no_reason_to_fail(
    settings: tuple[str, ...], tmp_path: Path
) -> None:
    if problem := wrong_with(settings, tmp_path):
        alone = [setting for setting in settings if wrong_with([setting], tmp_path)]
        pytest.fail(f"{alone or settings}: {problem}")


def test_the_variable_of_the_libraries_is_named_when_it_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LIB_VARIABLE, str(tmp_path))
    with pytest.raises(
        LabError, match=f"^{LIB_VARIABLE}={tmp_path}: .* no libllama"
    ) as problem:
        builds.folder_of(None)
    assert "unset it" in problem.value.hint
    assert builds.folder_of(builds.INSTALLED) is None
    assert builds.name_of(builds.INSTALLED) is None
    monkeypatch.setenv(LIB_VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(LabError, match=f"^{LIB_VARIABLE}=.*no such folder"):
        builds.folder_of(None)


def test_a_prediction_needs_no_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LIB_VARIABLE, str(tmp_path / "nowhere"))
    status, out, err = run_lab("predict", "-m", "llama-3.1-8b", "-d", "rtx-4090", "--details")
    assert status == 0
    assert "memory 1,008 GB/s" in out
    assert f"Note: {LIB_VARIABLE}=" in err
    status, _, err = run_lab(
        "predict", "-m", "llama-3.1-8b", "-d", "rtx-4090", "--lib", tmp_path
    )
    assert status == 1
    assert err.startswith("Error: --lib ")
