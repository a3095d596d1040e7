"""llama-server, llama-cli and llama-bench of the lab's own llama.cpp take the command lines that the lab writes.

    python3 -m uv run python -m tests.bench.option_names

Builds the three programs once (tests/bench/llama_bench.py). Each option of lab/runner/other_tools.py has to be in the
help of its program, and each program has to run the embedded model with the line that has all of them but devices and
RPC servers. A wrong option has to be refused.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from typing import Any

from lab.core.record import Settings
from lab.models import catalog
from lab.runner.other_tools import BENCH, LLAMA, OPTIONS, command_lines
from tests.bench import llama_bench
from tests.servers import llama_server

COLUMNS = {"llama-server": LLAMA, "llama-cli": LLAMA, "llama-bench": BENCH}
UNKNOWN = {"llama-cli": {"--kv-unified"}}
"""Options of the column that a program lacks, and that the lab does not write for it."""

TO_END = {"llama-cli": ("--prompt", "Hello", "--single-turn", "--no-warmup"), "llama-bench": ("-r", "1")}
"""What ends a program by itself."""

N_PROMPT, N_GEN, LIMIT_S = 16, 4, 300
CHOSEN = Settings(
    n_ctx=N_PROMPT + N_GEN,
    n_batch=64,
    n_ubatch=32,
    n_threads=1,
    n_threads_batch=1,
    n_gpu_layers=0,
    flash_attn="on",
    type_k="q8_0",
    type_v="q8_0",
    prompt="text",
    split_mode="layer",
    tensor_split=(1.0,),
    main_gpu=0,
    n_cpu_moe=1,
    override_tensor=("ffn_.*_exps=CPU",),
    kv_offload=False,
    op_offload=False,
    mmap=False,
    repack=False,
)


def answer(*command: str) -> subprocess.CompletedProcess[str]:
    pipes: Any = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    return subprocess.run(command, env=llama_bench.environment(), timeout=LIMIT_S, check=False, **pipes)


def absent(name: str) -> set[str]:
    """The options of the table that are not in the program's help."""
    words = set(answer(str(llama_bench.program(name)), "--help").stdout.replace(",", " ").split())
    return (
        {option for row in OPTIONS.values() for option in (row[COLUMNS[name]] or "").split()}
        - words
        - UNKNOWN.get(name, set())
    )


def runs(name: str, *more: str) -> bool:
    """Whether the program runs the embedded model with the lab's line and more options."""
    lines = {line.tool: line.text for line in command_lines(str(catalog.embedded_path()), CHOSEN, N_PROMPT, N_GEN)}
    _, *words = shlex.split(lines[name])
    if name == "llama-server":
        try:
            with llama_server(catalog.embedded_path(), *words, *more):
                return True
        except RuntimeError as problem:
            print(problem)
            return False
    done = answer(str(llama_bench.program(name)), *words, *more, *TO_END[name])
    if done.returncode:
        print(done.stderr[-1000:])
    return done.returncode == 0


def main() -> int:
    wrong = 0
    for name in COLUMNS:
        checks = {
            "options in its help": not absent(name),
            "runs with the lab's line": runs(name),
            "refuses a wrong option": not runs(name, "--no-such-option"),
        }
        for what, is_good in checks.items():
            print(f"{name:13} {what:26} {'yes' if is_good else 'NO'}", flush=True)
            wrong += not is_good
    return wrong


if __name__ == "__main__":
    sys.exit(main())
