"""How long a report takes and how large it is: `python -m tests.bench.report [ROUNDS]`.

Measures a session of 3 lengths with 6 repeats (10, 100 and 1,000 tokens in, 200 out) and the
ceilings once, then times the whole command `lab report`, start of Python included.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SESSION = ("-p", "10,100,1000", "-n", "200", "-r", "6", "--no-plot")


def lab(*arguments: str | Path) -> float:
    """The seconds that a command of the lab takes."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "lab", *map(str, arguments)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main(rounds: int = 7) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lab("measure", *SESSION, "-o", folder)
        (results,) = folder.glob("*.jsonl")
        lab("ceilings", "-o", folder)
        page = folder / "report.html"
        times = [
            lab("report", results, "-f", page, "--ceilings", folder) for _ in range(rounds)
        ]
        page_mb = page.stat().st_size / 1e6
        results_mb = results.stat().st_size / 1e6
    median = statistics.median(times)
    extremes = f"{min(times):.2f} to {max(times):.2f}, n = {rounds}"
    print(f"report   median {median:.2f} s ({extremes})")
    print(f"size     {page_mb:.2f} MB, of a results file of {results_mb:.2f} MB")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
