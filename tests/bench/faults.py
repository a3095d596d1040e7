"""Libraries that die in native code: does `lab measure` name the cause, go on where it can, and lose nothing?

    python3 -m uv run python -m tests.bench.faults [FAULT ...]

Each fault of tests/faults.py is planted in a copy of the installed libraries; `native` is libggml-cpu built from the
same source for sapphirerapids, which a CPU without AMX refuses before SIGILL can come (5 minutes on two
cores; kept in the user's cache folder). Each command is run once, as a user would.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from lab.core import results
from lab.core.record import OK
from lab.models import synthetic
from tests import faults, miniature
from tests.bench import llama_bench
from tests.conftest import run_process

EXPECTED = {
    "kernel": "A plain matrix product",
    "repacked": "continues with --no-repack",
    "flash": "continues with --flash-attn off",
    "threads": "continues with --threads 1",
    "mapped": "continues with --no-mmap",
    "long": "A small job crashes in the same way",
    "two": "A small job crashes in the same way",
    "once": "did not repeat",
    "load": "A small job crashes in the same way",
    "start": "do not run here",
    "native": "needs AMX_INT8, which this CPU does not have",
}
"""What is to be read of each."""

N_RUNS = {"repacked": 2, "flash": 2, "threads": 2, "mapped": 2, "once": 2, "long": 1}
"""Of the two runs that were asked for: how many are to be measured all the same; the others none."""


def native(folder: Path) -> Path:
    """The installed libraries with a libggml-cpu for sapphirerapids."""
    libraries = faults.copied(folder / "native")
    built = llama_bench.source().parent / "sapphirerapids"
    flags = ("-DGGML_NATIVE=OFF", "-DBUILD_SHARED_LIBS=ON", "-DCMAKE_BUILD_TYPE=Release", "-DLLAMA_BUILD_COMMON=OFF")
    march = [f"-DCMAKE_{language}_FLAGS=-march=sapphirerapids" for language in ("C", "CXX")]
    commands: list[list[str | Path]] = [
        ["cmake", "-S", llama_bench.source(), "-B", built, *flags, *march],
        ["cmake", "--build", built, "--target", "ggml-cpu", "-j2"],
    ]
    for command in commands:
        subprocess.run(["nice", "-n", "10", *command], check=True, stdout=subprocess.DEVNULL)
    (library,) = {path.resolve() for path in built.glob("bin/libggml-cpu.so*")}
    for name in libraries.glob("libggml-cpu.so*"):
        shutil.copy(library, name)
    return libraries


def main() -> None:
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = folder / "mini.gguf"
        synthetic.write(miniature.entry("llama").shape, "Q4_0", model)
        for fault in sys.argv[1:] or EXPECTED:
            libraries = native(folder) if fault == "native" else faults.plant(fault, folder)
            out = folder / "results" / fault
            asked = ("-p", "8,40", "-n", 4, "-r", 1, "-t", 2, "--no-plot", "--lib", libraries, "-o", out)
            status, shown, err = run_process("measure", "-m", model, "--prompt", "random", *asked, timeout_s=300)
            records = results.read([out]).records if out.exists() and any(out.iterdir()) else ()
            n_runs = sum(record.run.status == OK and not record.run.warmup for record in records)
            is_right = EXPECTED[fault] in shown + err and n_runs == N_RUNS.get(fault, 0) and status == 1
            wrong += not is_right
            words = next((line for line in (shown + err).splitlines() if EXPECTED[fault] in line), err.strip())
            print(f"{fault}: {'right' if is_right else 'WRONG'}, {n_runs} of 2 runs\n    {words}", flush=True)
    print(f"{wrong} wrong")


if __name__ == "__main__":
    main()
