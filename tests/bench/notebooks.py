"""The notebooks run in full in one session, and their outputs stored in them.

    python -m tests.bench.notebooks [NAME...]

They run in a new folder with the committed samples and the sessions of notebook 9 only, so what
they measure is of this session. A notebook with a disturbed measurement runs once more. Prints how
long each takes (with its measuring) and how large it then is. Run it after a change of the
notebooks, of the records' schema, or of anything that the notebooks show; nothing else may run
meanwhile. Notebook 7 measures llama.cpp's RPC with a library that is compiled here, if it can be.
"""

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

from tests.support import rpc_library

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "notebooks"
DISTURBED = ("No conclusions", "!!", "Unreliable")
"""What a stored output must not say."""


def outputs_text(notebook: Any) -> str:
    """All texts below the cells of a notebook."""
    texts: list[str] = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            texts.append(output.get("text", ""))
            texts.append(output.get("data", {}).get("text/plain", ""))
    return "\n".join(texts)


def disturbances(notebook: Any) -> list[str]:
    """The words in the outputs that say that a measurement is not to be relied on."""
    text = outputs_text(notebook)
    return [words for words in DISTURBED if words in text]


def checkout(folder: Path) -> Path:
    """A folder for notebooks with their sessions, beside one with the committed samples."""
    shutil.copytree(FOLDER / "faults", folder / "notebooks" / "faults")
    (folder / "results").mkdir()
    for sample in (ROOT / "results").glob("sample-*.jsonl"):
        shutil.copy(sample, folder / "results")
    return folder / "notebooks"


def run(path: Path, folder: Path) -> None:
    """Run a notebook in `folder`, at most twice, and store its outputs."""
    for _attempt in range(2):
        notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
        start = time.monotonic()
        client = NotebookClient(
            notebook,
            timeout=900,
            resources={"metadata": {"path": str(folder)}},
            coalesce_streams=True,
            record_timing=False,
        )
        client.execute()
        seconds = time.monotonic() - start
        doubts = disturbances(notebook)
        note = f", disturbed: {', '.join(doubts)}" if doubts else ""
        nbformat.write(notebook, path)  # type: ignore[no-untyped-call]
        megabytes = path.stat().st_size / 1e6
        print(f"{path.name}: {seconds:.0f} s, {megabytes:.2f} MB{note}", flush=True)
        if not doubts:
            return


def main(*names: str) -> None:
    with tempfile.TemporaryDirectory(prefix="lab-notebooks-") as temporary:
        if rpc_library.source() is not None:
            os.environ["LAB_RPC_LIB"] = str(rpc_library.build(Path(temporary)))
        folder = checkout(Path(temporary))
        for path in sorted(FOLDER.glob("*.ipynb")):
            if path.name.startswith(names or ("",)):
                run(path, folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
