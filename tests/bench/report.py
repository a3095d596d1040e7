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


def main(rounds: int = 7) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lab = [sys.executable, "-m", "lab"]
        session = ["-p", "10,100,1000", "-n", "200", "-r", "6", "--no-plot"]
        subprocess.run(
            [*lab, "measure", *session, "-o", str(folder)], check=True, stdout=subprocess.DEVNULL
        )
        subprocess.run(
            [*lab, "ceilings", "-o", str(folder)],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        (results,) = [
            path for path in folder.glob("*.jsonl") if not path.name.startswith("ceilings")
        ]
        page = folder / "report.html"
        times = []
        for _ in range(rounds):
            start = time.perf_counter()
            command = [
                *lab,
                "report",
                str(results),
                "-o",
                str(page),
                "--ceilings",
                str(folder),
            ]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            times.append(time.perf_counter() - start)
        print(
            f"report   median {statistics.median(times):.2f} s ({min(times):.2f} to {max(times):.2f}, n = {rounds})"
        )
        print(
            f"size     {page.stat().st_size / 1e6:.2f} MB, of a results file of {results.stat().st_size / 1e6:.2f} MB"
        )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
