"""`lab import`: results of llama-bench as a results file of the lab."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from lab.app.help import Command
from lab.app.options import out_option
from lab.app.reading import note
from lab.errors import printable


@click.command("import", cls=Command)
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option(
    "--device", "-d", metavar="NAME", help="The device, for a table that does not name it."
)
@out_option("Folder for the results files.")
def command(files: tuple[str, ...], device: str | None, out: str) -> None:
    """Import results of llama-bench.

    \b
      lab import bench.json                    # llama-bench -o json|jsonl|csv|sql
      lab import post.txt --device "RTX 4090"  # a text with Markdown tables
      lab import -                             # paste it, then press Ctrl-D

    Names every test and every line of a table that it cannot read. llama-bench reports times of
    whole tests, so a run has one step, and of Markdown tables only the mean is kept. What
    llama-bench does not report stays unknown.
    """
    from lab.core.files import STDIN
    from lab.core.lines import to_json
    from lab.core.results import free_path, write_whole
    from lab.formats import llama_bench_import

    for name in files:
        records, skipped = llama_bench_import.read(name, device)
        for sentence in skipped:
            note(f"{name}: {sentence}")
        stem = "pasted" if name == STDIN else Path(name).stem
        target = free_path(Path(out), f"imported-{stem}")
        lines = [
            to_json(dataclasses.replace(record, session=target.stem)) + "\n"
            for record in records
        ]
        write_whole(target, "".join(lines).encode(), "The file")
        click.echo(printable(f"{target}  {len(records)} samples"))
