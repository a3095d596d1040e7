"""The notebooks run in full, and their outputs stored in them.

    python -m tests.bench.notebooks [NAME...]

Prints how long each takes (with its measuring) and how large it then is. Run it after a change of
the notebooks, of the records' schema, or of anything that the notebooks show; nothing else may run
meanwhile. Notebook 7 measures llama.cpp's RPC with a library that is compiled here, if it can be.
"""

import os
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from tests import rpc_library

FOLDER = Path(__file__).parents[2] / "notebooks"


def run(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    start = time.monotonic()
    client = NotebookClient(
        notebook,
        timeout=900,
        resources={"metadata": {"path": str(FOLDER)}},
        coalesce_streams=True,
        record_timing=False,
    )
    client.execute()
    nbformat.write(notebook, path)  # type: ignore[no-untyped-call]
    seconds = time.monotonic() - start
    megabytes = path.stat().st_size / 1e6
    print(f"{path.name}: {seconds:.0f} s, {megabytes:.2f} MB", flush=True)


def main(*names: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        if rpc_library.source() is not None:
            os.environ["LAB_RPC_LIB"] = str(rpc_library.build(Path(folder)))
        for path in sorted(FOLDER.glob("*.ipynb")):
            if path.name.startswith(names or ("",)):
                run(path)


if __name__ == "__main__":
    main(*sys.argv[1:])
