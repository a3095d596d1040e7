"""`lab models`: what can be measured, and getting, making, describing and removing it."""

from __future__ import annotations

import dataclasses

import click


@click.group(invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout instead of the table.")
@click.pass_context
def models(context: click.Context, as_json: bool) -> None:
    """List what can be measured; with a command: info, pull, make, remove.

    \b
    Every command that takes a model (SPEC) understands
      phi-3-mini                     a name of the list, or an alias such as phi3
      smollm2-135m:Q8_0              in another quantization, made here where the model is on disk
      path/to/model.gguf             any file
      hf:owner/repo/file.gguf[@rev]  a file on the hub
      hf:owner/repo:Q4_K_M           the file of that quantization
      synthetic:llama-3.2-3b:Q4_0    the shape, with random weights: nothing to download
    """
    if context.invoked_subcommand:
        return
    from lab.models.obtain import listing
    from lab.show import console

    rows = listing()
    if as_json:
        console.print_json([dataclasses.asdict(row) for row in rows])
        return
    console.console().print(console.models_table(rows))
    click.echo("\nShapes can be measured with random weights: --model synthetic:NAME. Any file: --model PATH.gguf")


@models.command()
@click.argument("spec")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout instead of the text.")
def info(spec: str, as_json: bool) -> None:
    """Describe a model from its file's header, without loading its weights."""
    from lab.core import cost, memory
    from lab.models import catalog
    from lab.models.obtain import obtain
    from lab.process.worker import Worker
    from lab.runner import limits
    from lab.show import console

    with Worker() as worker:
        file = obtain(catalog.parse(spec), worker, lambda what, done, total: None, fetch=False)
        model = worker.read_model(file.path, file.name, file.source)
    per_position, per_step = cost.kv_bytes_per_position(model), cost.weight_bytes_per_step(model)
    available = limits.memory_available()
    needed = {n: memory.of_length(model, n) for n in (1_000, 10_000, 128_000)}
    lengths = {n: need.kv_cache_bytes for n, need in needed.items()}
    fits = memory.longest(model, available)
    figures = {
        "path": str(file.path),
        "weight_bytes_per_decode_step": per_step,
        "kv_bytes_per_position": per_position,
        "kv_bytes": {str(n): n_bytes for n, n_bytes in lengths.items()},
        "compute_bytes": {str(n): need.compute_bytes for n, need in needed.items()},
        "uncounted": model.uncounted,
        "memory_available_bytes": available,
        "n_ctx_that_fits": fits,
    }
    if as_json:
        console.print_json({"model": dataclasses.asdict(model), **figures})
        return
    for line in console.describe_model(model, file.path, per_step, per_position, lengths, fits):
        click.echo(line)


@models.command()
@click.argument("specs", nargs=-1, required=True, metavar="SPEC...")
def pull(specs: tuple[str, ...]) -> None:
    """Download models into the standard hub cache; interrupted downloads go on where they were.

    HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE are honoured.
    """
    _obtain(specs)


@models.command()
@click.argument("specs", nargs=-1, required=True, metavar="SPEC...")
def make(specs: tuple[str, ...]) -> None:
    """Write models with random weights, or models in another quantization, into the lab's cache folder."""
    _obtain(specs)


@models.command()
@click.argument("specs", nargs=-1, required=True, metavar="SPEC...")
def remove(specs: tuple[str, ...]) -> None:
    """Delete what was downloaded or made of these models."""
    from lab.models import catalog
    from lab.models.obtain import remove as delete

    for text in specs:
        freed = delete(catalog.parse(text))
        click.echo(f"{text}: {freed / 1e6:,.0f} MB freed" if freed else f"{text}: was not there")


def _obtain(specs: tuple[str, ...]) -> None:
    from lab.models import catalog
    from lab.models.obtain import obtain
    from lab.process.worker import Worker
    from lab.show import console

    parsed = [catalog.parse(text) for text in specs]
    with Worker() as worker:
        for spec in parsed:
            with console.transfer(console.console(stderr=True)) as watch:
                file = obtain(spec, worker, watch)
            click.echo(f"{spec.text}  {file.path.stat().st_size / 1e6:,.0f} MB  {file.path}")
