"""`lab models`: what can be measured, and getting, making, describing and removing it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Never, TypedDict

import click

from lab.app.help import CommandGroup
from lab.app.options import DETAILS, as_json_option
from lab.core import shell
from lab.core.attention import attention_layers
from lab.core.lists import plural

if TYPE_CHECKING:
    from lab.core.attention import AttentionLayers
    from lab.core.record import Model
    from lab.models.catalog import Spec
    from lab.models.obtain import ModelRow

CACHE_LENGTHS = (1_000, 10_000, 128_000)  # contexts whose KV cache `info` describes
FEW = 7  # models of the list without --details


@click.group(cls=CommandGroup, invoke_without_command=True)
@as_json_option()
@DETAILS
@click.option(
    "--found", is_flag=True, help="The files of Ollama, LM Studio, llama.cpp and the hub."
)
@click.pass_context
def models(context: click.Context, as_json: bool, details: bool, found: bool) -> None:
    """List models; subcommands: info, make, pull, remove.

    \b
    Every command that takes a model (SPEC) accepts
      phi-3-mini                     a name of the list, or an alias such as phi3
      smollm2-135m:Q8_0              in another quantization, made from the file on disk
      path/to/model.gguf             any file, or a part of a split one, or their folder
      hf:owner/repo/file.gguf[@rev]  a file on the hub
      hf:owner/repo:Q4_K_M           the file of that quantization; hf:owner/repo lists them
      llama3.2:3b, owner/repo:Q4_0   as Ollama and llama.cpp write it
      ollama:llama3.2:3b             a model of Ollama on this machine, where it lies
      synthetic:llama-3.2-3b:Q4_0    the shape, with random weights: nothing to download
    """
    if context.invoked_subcommand:
        return
    if found:
        _show_found(as_json)
        return
    from lab.models.obtain import listing
    from lab.show import console
    from lab.show.cells import LONG_TEXT, TEXT, Column

    rows = listing()
    if as_json:
        console.print_json(rows)
        return
    columns: list[Column[Never]] = [
        Column("name", kind=TEXT),
        Column("quantization"),
        Column("size\nMB", priority=2),
        Column("on disk"),
        Column("from", kind=TEXT),
        *([Column("what it is", kind=LONG_TEXT)] if details else []),
    ]
    shown = rows if details else first_of(rows)
    grid = console.Grid(*columns)
    for row in shown:
        cells = (
            row["spec"],
            row["quantization"] or "-",
            _size_cell(row["n_bytes"], row["on_disk"]),
            "yes" if row["on_disk"] else "no",
            row["source"],
            row["about"],
        )
        grid.add_row(*cells[: len(columns)])
    console.console().print(grid)
    if not details:
        click.echo(f"{len(rows) - len(shown)} more, and what each is: lab models --details")
    click.echo(
        "\nTo measure a shape with random weights: --model synthetic:NAME. "
        "To measure any file: --model PATH.gguf\n"
        "Files of Ollama, LM Studio and llama.cpp on this machine: lab models --found"
    )


def first_of(rows: Sequence[ModelRow]) -> Sequence[ModelRow]:
    """Some of the models, those on the disk first."""
    return sorted(rows, key=lambda row: not row["on_disk"])[:FEW]


def _show_found(as_json: bool) -> None:
    """List the files of other tools, by the names that --model takes."""
    from lab.errors import printable
    from lab.models import hub, stores
    from lab.show import console

    models = stores.found()
    for file in hub.pulled():
        models.append(stores.StoredModel(file.name, "hub", file.path, file.n_bytes))
    if as_json:
        rows = []
        for model in models:
            row = dataclasses.asdict(model)
            path = row.pop("path")
            rows.append({**row, "path": printable(str(path)) if path else None})
        console.print_json(rows)
        return
    for folder in stores.unreadable():
        click.echo(f"This user may not read {printable(str(folder))}.", err=True)
    for model in models:
        size = "-" if model.n_bytes is None else f"{model.n_bytes / 1e6:,.0f}"
        click.echo(f"{size:>9} MB  {model.tool:9}  {shell.join(model.spec)}")
        if model.problem:
            click.echo(f"{'':25}cannot be measured: {printable(model.problem)}")
    if models:
        click.echo("\nTo measure one: lab measure -m NAME")
    else:
        click.echo(
            "No model files of Ollama, LM Studio, llama.cpp or the hub on this machine."
        )


def _size_cell(n_bytes: int | None, on_disk: bool) -> str:
    """MB of a file; ~ is the size of a download."""
    if n_bytes is None:
        return "-"
    size = f"{n_bytes / 1e6:,.0f}"
    return size if on_disk else f"~{size}"


@models.command()
@click.argument("spec")
@as_json_option("text")
def info(spec: str, as_json: bool) -> None:
    """Describe a model: its shape, its sizes, and the context that fits into memory.

    \b
      lab models info smollm2-135m
      lab models info path/to/model.gguf

    Reads the header of its file and loads no weights. Without a file, it describes the model from
    its shape.
    """
    from lab.core import cost, memory
    from lab.errors import printable
    from lab.models import catalog, obtain
    from lab.process.worker import Worker
    from lab.runner import machine
    from lab.show import console

    parsed = catalog.parse(spec, or_shape=True)
    file = obtain.locate(parsed)
    err = console.console(stderr=True)
    with Worker() as worker, console.transfer(err) as watch:
        model = obtain.find(worker, spec, watch, machine.memory_available())
        system_info = worker.build.system_info
    path = printable(str(file.path)) if file else None
    figures: ModelSizes = {
        "weight_bytes_per_decode_step": cost.weight_bytes_per_step(model),
        "kv_bytes_per_position": memory.kv_bytes_per_position(model),
        "kv_bytes": {n: memory.of_length(model, n).kv_cache_bytes for n in CACHE_LENGTHS},
        "n_ctx_that_fits": memory.longest(
            model, machine.memory_available(), system_info=system_info
        ),
    }
    if as_json:
        console.print_json({"model": dataclasses.asdict(model), "path": path, **figures})
        return
    lines = _description(model, path, figures)
    if file is None:
        lines |= _how_to_have(parsed, model)
    for name, text in lines.items():
        click.echo(f"{name:9} {text}")


class ModelSizes(TypedDict):
    """What a model takes, in bytes, and the context that fits; None where unknown."""

    weight_bytes_per_decode_step: int | None
    kv_bytes_per_position: float | None
    kv_bytes: dict[int, float | None]
    n_ctx_that_fits: int | None


def _description(model: Model, path: str | None, figures: ModelSizes) -> dict[str, str]:
    """The lines that describe a model, by their names."""
    from lab.show.text_plan import megabytes

    by_size = sorted(model.tensor_bytes.items(), key=lambda item: item[1], reverse=True)
    tensors = ", ".join(f"{kind} {megabytes(n_bytes)} MB" for kind, n_bytes in by_size)
    caches = [f"{megabytes(n)} MB at {length:,}" for length, n in figures["kv_bytes"].items()]
    each = figures["kv_bytes_per_position"]
    per_position = "unknown" if each is None else f"{each:,.0f}"
    output = {True: "tied to the embedding", False: "separate", None: "unknown"}
    weights = megabytes(figures["weight_bytes_per_decode_step"])
    return {
        "name": f"{model.name} {model.quantization or ''} ({model.source})",
        "file": f"{path or 'not on this machine'}, {megabytes(model.n_bytes)} MB",
        "shape": (
            f"{model.arch}: {counted(model.n_layer)} layers, {counted(model.n_embd)} wide, "
            f"feed-forward {counted(model.n_ff)}, {_attention(model)}"
        ),
        "tokens": (
            f"vocabulary of {counted(model.n_vocab)}, "
            f"output matrix {output[model.tied_embeddings]}, "
            f"trained for {counted(model.n_ctx_train)}"
        ),
        "tensors": tensors,
        "decode": f"reads {weights} MB of weights per step",
        "KV cache": f"{per_position} bytes per position (F16): {', '.join(caches)}",
        "fits": f"{_what_fits(model, figures['n_ctx_that_fits'])} in the currently free memory",
    }


def _attention(model: Model) -> str:
    """The heads of the layers; of several kinds of layers each kind, and how many have a state."""

    groups = attention_layers(model) or ()
    kinds = [_heads(group) for group in groups]
    n_recurrent = 0
    for n_values in model.states or ():
        if n_values:
            n_recurrent += 1
    if n_recurrent:
        kinds.append(f"{n_recurrent} layers with a state")
    if not groups or kinds == [_heads(groups[0])]:
        return (
            f"{counted(model.n_head)} heads of {counted(model.head_dim)}, "
            f"{counted(model.n_head_kv)} for keys and values"
        )
    return "; ".join(kinds)


def _heads(group: AttentionLayers) -> str:
    """The heads of layers of a kind."""
    window = ""
    if group.is_chunked:
        window = f" in chunks of {group.window:,}"
    elif group.window:
        window = f" with a window of {group.window:,}"
    cache = "" if group.has_cache else ", which read the cache of another layer"
    return (
        f"{group.n_layer} layers{window}: {group.n_head} heads of {group.head_dim},"
        f" {group.n_head_kv} for keys and values{cache}"
    )


def counted(value: int | None) -> str:
    """A number of a shape with its thousands separated."""
    return "unknown" if value is None else f"{value:,}"


def _what_fits(model: Model, n_ctx: int | None) -> str:
    if n_ctx is not None:
        return f"a context of about {plural(n_ctx, 'token')}"
    if model.uncounted:
        return f"unknown ({model.uncounted})"
    return "unknown"


def _how_to_have(spec: Spec, model: Model) -> dict[str, str]:
    """The lines on getting or making a model of the catalog that is not on this machine."""
    from lab.models import catalog, obtain

    entry = spec.entry
    if entry is None:
        return {}
    lines = {}
    if spec.source != catalog.SYNTHETIC:
        lines["get it"] = obtain.how_to_get(spec)
        if entry.n_bytes and spec.quantization in (None, entry.quantization):
            lines["get it"] += f" (a download of about {entry.n_bytes / 1e6:,.0f} MB)"
    command = shell.lab("models", "make", f"synthetic:{entry.name}:{model.quantization}")
    lines["make it"] = (
        f"{command} (random weights, to measure its speed; the shape is from {entry.shape_source})"
    )
    return lines


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

    The files go into the lab's cache folder. Nothing is downloaded: lab models pull does that.
    """
    from lab.errors import LabError
    from lab.models import catalog, obtain

    for spec in map(catalog.parse, specs):
        if obtain.locate(spec) is None and not obtain.is_made_here(spec):
            size = ""
            if spec.entry and spec.entry.n_bytes:
                size = f" (about {spec.entry.n_bytes / 1e6:,.0f} MB)"
            raise LabError(
                f"{spec.text} is not made here, it is a download{size}.",
                f"Download it: {obtain.how_to_get(spec)}",
            )
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
        freed_bytes = obtain.remove(catalog.parse(text))
        if freed_bytes:
            click.echo(f"{text}: {freed_bytes / 1e6:,.0f} MB freed")
        else:
            click.echo(f"{text}: not on this machine")


def _obtain(specs: tuple[str, ...]) -> None:
    """Pull or make the models, and print where their files are."""
    from lab.errors import printable
    from lab.models import catalog, obtain
    from lab.process.worker import Worker
    from lab.runner.machine import memory_available
    from lab.show import console

    parsed = [catalog.parse(text) for text in specs]
    with Worker() as worker:
        for spec in parsed:
            with console.transfer(console.console(stderr=True)) as watch:
                obtain.drop_damaged(spec, worker, watch)
                file = obtain.obtain(spec, worker, watch, memory_available())
            megabytes = file.n_bytes / 1e6
            click.echo(printable(f"{spec.text}  {megabytes:,.0f} MB  {file.path}"))
