"""Everything that the lab says of the committed samples, as files: held side by side before and
after a rewrite.

    python3 -m uv run python -m tests.bench.golden FOLDER [WORD...]

A file each: the help of every command; tables, JSON, exports, comparisons, predictions,
explanations and pages of the samples; refused options. Nothing here measures, so two runs of the
same code give equal files, whatever the machine does. With WORDs only the files whose names hold
one of them. Compare with `diff -r BEFORE AFTER`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from lab.main import lab as cli
from tests.support.command import run_lab

SAMPLES = sorted(Path("results").glob("sample-*.jsonl"))
EPYC = "results/sample-smollm2-135m-amd-epyc.jsonl"
XEON = "results/sample-smollm2-135m-intel-xeon.jsonl"
TO_COMPARE = "results/sample-to-compare-smollm2-135m-amd-epyc.jsonl"
ENGINE = [path for path in SAMPLES if "server" not in path.name]
REFUSED = (
    "measure -p x",
    "measure -p 10 -n 0",
    "measure -m no-such-model",
    "measure --repeat 0",
    "measure --budget 1min",
    "measure --url http://127.0.0.1:9 -p 10",
    "batch -s 0",
    "turns --turn 100",
    "stall --chunk 0",
    "speculate --draft nothing",
    "ab",
    "show /nonexistent",
    "compare results/sample-smollm2-135m-amd-epyc.jsonl",
    "predict -m llama-3.2-3b -d no-such-device",
    "plot /nonexistent",
    "claims --only 99",
    "export results --as md",
)


def commands(out: Path) -> Iterator[tuple[str, ...]]:
    """Each command line as words; pages are written to `out`."""
    for name, command in sorted(cli.commands.items()):
        yield (name, "--help")
        for subcommand in sorted(getattr(command, "commands", {})):
            yield (name, subcommand, "--help")
    for path in map(str, [*SAMPLES, "results"]):
        yield ("show", path)
        yield ("show", "--json", path)
        yield ("report", path, "-f", str(out / f"page-{Path(path).stem}.html"))
        yield ("export", path, "--as", "csv", "--table", "runs")
        yield ("export", path, "--as", "csv", "--table", "steps")
    for path in map(str, ENGINE):
        yield ("explain", path)
        yield ("explain", "--json", path)
        yield ("predict", "--ceilings", path, "-m", "llama-3.2-3b", "-d", "here")
    for paths in ((EPYC, XEON), (EPYC, TO_COMPARE), (XEON, TO_COMPARE, EPYC), ("results",)):
        yield ("compare", *paths)
        yield ("compare", "--json", *paths)
    yield ("predict", "-m", "llama-3.2-3b", "-d", "rtx-4090", "-p", "10,1000")
    yield ("predict", "-m", "phi-3-mini", "-d", "rtx-4090", "--json")
    for kind in ("apple", "laptop", "desktop"):
        yield ("predict", "-m", "llama-3.2-3b", "-d", kind)
        yield ("predict", "-m", "phi-3-mini", "-d", kind, "--json")
    yield ("export", EPYC, "--as", "json")
    yield ("models",)
    yield ("models", "--json")
    yield ("models", "info", "llama-3.2-3b")
    for line in REFUSED:
        yield tuple(line.split())


def main() -> None:
    out = Path(sys.argv[1])
    only = sys.argv[2:]
    out.mkdir(parents=True, exist_ok=True)
    os.environ["COLUMNS"] = "100"
    for arguments in commands(out):
        in_name = [argument for argument in arguments if str(out) not in argument]
        name = re.sub(r"[^\w.,-]+", "_", " ".join(in_name)).strip("_")
        if only and not any(part in name for part in only):
            continue
        code, stdout, stderr = run_lab(*arguments)
        text = f"exit status {code}\n{stdout}\n---- stderr ----\n{stderr}"
        (out / f"{name}.txt").write_text(text.replace(str(out), "OUT"))
        print(".", end="", flush=True)
    for page in out.glob("*.html"):  # without the records that it carries
        text = re.sub(r"[A-Za-z0-9+/=]{200,}", "DATA", page.read_text())
        page.write_text(re.sub(r"(?<=>)(?=<)", "\n", text))
    print()


if __name__ == "__main__":
    main()
