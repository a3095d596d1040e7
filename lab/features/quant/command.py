"""The command that weighs quality against speed: quant."""

from __future__ import annotations

from typing import Any

import click

from lab.cli.help import Command
from lab.cli.options import ENGINE, OUTPUT, SEED, SHARE, TOKENS, with_options
from lab.core.lists import plural
from lab.core.record import Record
from lab.errors import LabError
from lab.features.running import Output, collect, introduce


@click.command(cls=Command, first=("cache-type", "text", "budget", "until", "blocks"))
@click.argument("files", nargs=-1, metavar="[REFERENCE FILE...]")
@with_options(
    click.option("--cache-type", default="", help="Compare these cache types of one file: f16,q8_0,q4_0."),
    click.option(
        "--text", metavar="TEXT", help="A text file, or some of the lab's own: code,dialogue.  [default: the lab's own]"
    ),
    click.option("--budget", default="10min", show_default=True, help="Time to spend on quality, such as 2min or 1h."),
    click.option(
        "--until", type=SHARE, default="5%", show_default=True, help="Stop when each divergence is known to this share."
    ),
    click.option(
        "--blocks", default=10, show_default=True, help="Blocks that measure speed; each runs every file twice."
    ),
    click.option(
        "--prompt-len", "-p", type=TOKENS, default=256, show_default=True, help="Prompt tokens of runs for speed."
    ),
    click.option("--gen", "-n", type=TOKENS, default=32, show_default=True, help="Tokens that they generate."),
    click.option("--csv", type=click.Path(dir_okay=False), metavar="FILE", help="Also write the table to a CSV file."),
    click.option("--yes", is_flag=True, help="Download what a name of the catalog needs without asking."),
    *ENGINE,
    SEED,
    *OUTPUT,
)
def quant(files: tuple[str, ...], cache_type: str, prompt_len: int, csv: str | None, yes: bool, **asked: Any) -> None:
    """Show what quantizations cost in quality and gain in speed.

    \b
      lab quant                           # the embedded model, requantized
      lab quant model-F16.gguf model-Q8_0.gguf model-Q4_K_M.gguf
      lab quant llama-3.2-1b              # the catalog's files, downloaded

    The first file is the reference. All files predict the same text, in chunks of 512 tokens: the table shows how far
    each one's predictions are from the reference's (mean Kullback-Leibler divergence), and how often both find the same
    token most likely. The reference against itself with other settings shows the noise floor. Chunks are added until
    the divergences are known to --until, the text ends or the --budget is spent. Then the speeds are measured in
    blocks, as lab ab does.

    The output names the files that no other one beats in both. It does not say how well a model does a task. Files of
    other models are refused. Files that do not fit into memory together run one after the other, and the divergences
    are then known within bounds. A FILE is a SPEC: see lab models --help.
    """
    from lab.features.exchange import llama_bench_format
    from lab.features.measure import text_results
    from lab.features.quant import comparing, figures
    from lab.process.worker import Worker
    from lab.runner.session import new_results_file
    from lab.show import console

    output, err = Output.taken_from(asked), console.console(stderr=True)
    if (sizes := comparing.missing(files)) and not (yes or cache_type):
        listed = ", ".join(f"{spec} {n_bytes / 1e9:.1f} GB" for spec, n_bytes in sizes.items())
        total = f"{plural(len(sizes), 'file')}, {sum(sizes.values()) / 1e9:.1f} GB"
        click.confirm(f"Download {total}: {listed}?", abort=True, err=True)
    with Worker() as worker, console.transfer(err) as transferring:
        made = comparing.plan(worker, files, cache_type, **asked, prompt_len=[prompt_len], watch=transferring)
    introduce(list(made.plans.values()), err, err)
    path = new_results_file(made.reference, output.folder)

    def finished(record: Record) -> str:
        if not (quality := record.run.quality):
            return text_results.finished(record)
        mean, *_ = figures.mean(quality.chunks, figures.divergence)
        return f"{record.run.variant}: mean divergence {mean:.3g} in {plural(len(quality.chunks), 'chunk')}"

    records, problem = collect(lambda watch: comparing.execute(made, path, watch), path, err, describe=finished)
    if csv and any(record.run.quality for record in records):
        try:
            llama_bench_format.harmless(figures.quant_table(records)).to_csv(csv, index=False)
        except OSError as failed:
            raise LabError(f"{csv} cannot be written: {failed.strerror}.", "Choose another --csv.") from None
    output.end(records, path, problem)
