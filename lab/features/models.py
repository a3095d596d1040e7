"""`lab models`: what can be measured, and getting, making, describing and removing it."""

from __future__ import annotations

import dataclasses

import click

from lab.app.help import Group
from lab.app.options import as_json_option
from lab.core import shell


@click.group(cls=Group, invoke_without_command=True)
@as_json_option()
@click.pass_context
def models(context: click.Context, as_json: bool) -> None:
    """List models; subcommands: info, make, pull, remove.

    \b
    Every command that takes a model (SPEC) accepts
      phi-3-mini                     a name of the list, or an alias such as phi3
      smollm2-135m:Q8_0              in another quantization, made from the file on disk
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
        console.print_json(rows)
        return
    grid = console.Grid("name", "quantization", "MB", "on disk", "from", "what it is")
    for row in rows:  # ~ is the size of a download
        size = (
            "-"
            if row["n_bytes"] is None
            else f"{'' if row['on_disk'] else '~'}{row['n_bytes'] / 1e6:,.0f}"
        )
        on_disk = "yes" if row["on_disk"] else "no"
        grid.add_row(
            row["spec"], row["quantization"] or "-", size, on_disk, row["source"], row["about"]
        )
    console.console().print(grid)
    click.echo(
        "\nTo measure a shape with random weights: --model synthetic:NAME. To measure any file: --model PATH.gguf"
    )


@models.command()
@click.argument("spec")
@as_json_option("text")
def info(spec: str, as_json: bool) -> None:
    """Describe a model: its shape, its sizes, and the context that fits into memory.

    \b
      lab models info smollm2-135m
      lab models info path/to/model.gguf

    Reads the header of its file and loads no weights. Without a file, it describes the model from its shape.
    """
    from lab.core import cost, memory
    from lab.errors import LabError, printable
    from lab.models import catalog, obtain
    from lab.process.worker import Worker
    from lab.runner import machine
    from lab.show import console
    from lab.show.text_setup import megabytes

    wanted = catalog.parse(spec, or_shape=True)
    file = obtain.locate(wanted)
    entry = wanted.entry
    if file is None and entry is None:
        raise LabError(
            f"{spec} is not on this machine.", f"Get it first: {obtain.how_to_get(wanted)}"
        )
    with Worker() as worker:
        model = (
            worker.read_model(file.path, file.name, file.source)
            if file
            else obtain.find(worker, spec)
        )
    path = printable(str(file.path)) if file else None
    each = memory.kv_bytes_per_position(model)
    weights = cost.weight_bytes_per_step(model)
    fits = memory.longest(model, machine.memory_available())
    caches = {str(n): memory.of_length(model, n).kv_cache_bytes for n in (1_000, 10_000, 128_000)}
    if as_json:
        figures = {
            "weight_bytes_per_decode_step": weights,
            "kv_bytes_per_position": each,
            "kv_bytes": caches,
        }
        console.print_json(
            {"model": dataclasses.asdict(model), "path": path, **figures, "n_ctx_that_fits": fits}
        )
        return
    sizes = sorted(model.tensor_bytes.items(), key=lambda one: -one[1])
    cache = ", ".join(f"{megabytes(n_bytes)} MB at {int(n):,}" for n, n_bytes in caches.items())
    unknown = f"unknown{f' ({model.uncounted})' if model.uncounted else ''}"
    tied = {True: "tied to the embedding", False: "separate", None: "unknown"}[
        model.tied_embeddings
    ]
    heads = f"{model.n_head} heads of {model.head_dim}, {model.n_head_kv} for keys and values"
    lines = {
        "name": f"{model.name} {model.quantization or ''} ({model.source})",
        "file": f"{path or 'not on this machine'}, {megabytes(model.n_bytes)} MB",
        "shape": f"{model.arch}: {model.n_layer} layers, {model.n_embd} wide, feed-forward {model.n_ff}, {heads}",
        "tokens": f"vocabulary of {model.n_vocab}, output matrix {tied}, trained for {model.n_ctx_train}",
        "tensors": ", ".join(f"{kind} {megabytes(n)} MB" for kind, n in sizes),
        "decode": f"reads {megabytes(weights)} MB of weights per step",
        "KV cache": f"{'unknown' if each is None else f'{each:,.0f}'} bytes per position (F16): {cache}",
        "fits": f"{unknown if fits is None else f'a context of about {fits:,} tokens'} in the currently free memory",
    }
    if entry and not file:
        n_bytes = entry.n_bytes if wanted.quantization in (None, entry.quantization) else None
        size = f" (a download of about {n_bytes / 1e6:,.0f} MB)" if n_bytes else ""
        if wanted.source != catalog.SYNTHETIC:
            lines["get it"] = f"{obtain.how_to_get(wanted)}{size}"
        lines["make it"] = shell.lab(
            "models", "make", f"synthetic:{entry.name}:{model.quantization}"
        )
        lines["make it"] += (
            f" (random weights, to measure its speed; the shape is from {entry.shape_source})"
        )
    click.echo("\n".join(f"{name:9} {text}" for name, text in lines.items()))


@models.command()
@click.argument("specs", nargs=-1, required=True, metavar="SPEC...")
def pull(specs: tuple[str, ...]) -> None:
    """Download models into the standard hub cache, with a check of their sha256.

    \b
      lab models pull llama-3.2-3b
      lab models pull hf:owner/repo:Q4_K_M

    Respects HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE.
    """
    _obtain(specs)


@models.command()
@click.argument("specs", nargs=-1, required=True, metavar="SPEC...")
def make(specs: tuple[str, ...]) -> None:
    """Write models with random weights, or in another quantization.

    \b
      lab models make synthetic:llama-3.2-3b:Q4_0
      lab models make smollm2-135m:Q8_0

    The files go into the lab's cache folder.
    """
    _obtain(specs)


@models.command()
@click.argument("specs", nargs=-1, required=True, metavar="SPEC...")
def remove(specs: tuple[str, ...]) -> None:
    """Delete the downloaded or generated files of these models.

    \b
      lab models remove llama-3.2-3b
      lab models remove synthetic:llama-3.2-3b:Q4_0
    """
    from lab.models import catalog, obtain

    for text in specs:
        freed = obtain.remove(catalog.parse(text))
        click.echo(
            f"{text}: {freed / 1e6:,.0f} MB freed" if freed else f"{text}: not on this machine"
        )


def _obtain(specs: tuple[str, ...]) -> None:
    from lab.errors import printable
    from lab.models import catalog, obtain
    from lab.process.worker import Worker
    from lab.show import console

    parsed = [catalog.parse(text) for text in specs]
    with Worker() as worker:
        for spec in parsed:
            with console.transfer(console.console(stderr=True)) as watch:
                file = obtain.obtain(spec, worker, watch)
            click.echo(
                printable(f"{spec.text}  {file.path.stat().st_size / 1e6:,.0f} MB  {file.path}")
            )
