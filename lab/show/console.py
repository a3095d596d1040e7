"""What the lab prints: descriptions, tables and progress, coloured on a terminal and plain elsewhere."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lab.analysis import wording
from lab.core.record import Machine, Model, Record
from lab.models.obtain import Listed
from lab.runner import machine
from lab.runner.plan import Plan, join
from lab.runner.progress import ShowStatus, Status, duration

if TYPE_CHECKING:
    from rich.progress import Progress


def console(stderr: bool = False) -> Console:
    """A console that takes every text as it is (names and errors come from outside), 100 columns in a pipe."""
    stream = sys.stderr if stderr else sys.stdout
    plain: dict[str, Any] = {"markup": False, "emoji": False, "highlight": False, "force_jupyter": False}
    if not stream.isatty():  # a notebook claims to know colours
        plain |= {"width": 100, "force_terminal": False}
    return Console(stderr=stderr, soft_wrap=True, **plain)


def print_json(value: object) -> None:
    """One JSON document on stdout; NaN becomes null."""
    print(json.dumps(_without_nan(value), indent=2, ensure_ascii=False))


def describe(here: Machine, model: Model | None = None) -> list[str]:
    """Machine, build and model in a line each."""
    return [f"{name:8} {what}" for name, what in facts(here, model).items()]


def facts(here: Machine, model: Model | None = None) -> dict[str, str]:
    """What is to be known of a machine, its build, and a model. What a record does not tell is left out."""
    ram = f", {here.ram_bytes / 1e9:.0f} GB" if here.ram_bytes else ""
    kind = ", virtual machine" if here.virtual else ""
    power = f", on {here.power}" if here.power else ""
    system = f"; {here.os}" if here.os else ""
    offload = ", ".join(f"{device.description} ({device.name})" for device in machine.accelerators(here.devices))
    commit = f" (llama.cpp {here.llama_cpp_commit})" if here.llama_cpp_commit else ""
    computes_on = offload or "the CPU (no GPU in this build)"
    found = {"machine": f"{machine.label(here)}{ram}{kind}{power}{system}"}
    if here.llama_cpp_python:
        found["build"] = f"llama-cpp-python {here.llama_cpp_python}{commit}; computes on {computes_on}"
    if model:
        parts = [
            f"{model.name} {model.quantization or ''}".strip(),
            f"{model.n_bytes / 1e6:,.0f} MB" if model.n_bytes else "",
            model.arch or "",
            f"{model.n_layer} layers" if model.n_layer else "",
            f"trained for {model.n_ctx_train:,} tokens" if model.n_ctx_train else "",
        ]
        found["model"] = f"{', '.join(part for part in parts if part)} ({model.source})"
    return found


def plan_table(plan: Plan) -> Table:
    """What a plan would measure, and the memory that it would take."""
    grid = grid_of("prompt tokens", "runs", "KV cache MB", "memory MB", "note")
    for n in plan.lengths:
        memory = plan.memory(n)
        grid.add_row(
            f"{n:,}",
            "0" if n in plan.refused else f"{plan.n_repeat}",
            "unknown" if memory.kv_cache_bytes is None else wording.digits(memory.kv_cache_bytes / 1e6),
            wording.digits(memory.total_bytes / 1e6),
            plan.refused.get(n, ""),
        )
    return grid


def models_table(rows: Sequence[Listed]) -> Table:
    """What can be measured: a size after ~ is that of a download."""
    grid = grid_of("name", "quantization", "MB", "on disk", "from", "what it is")
    for row in rows:
        size = "-" if row.n_bytes is None else f"{'' if row.on_disk else '~'}{row.n_bytes / 1e6:,.0f}"
        on_disk = "yes" if row.on_disk else "no"
        grid.add_row(row.spec, row.quantization or "-", size, on_disk, row.source, row.about)
    return grid


def describe_model(
    model: Model,
    path: Path,
    bytes_per_step: int | None,
    kv_per_position: float | None,
    kv_bytes: dict[int, int | None],
    n_ctx_fits: int | None,
) -> list[str]:
    """A model in lines: file, shape, tensors, and what it needs per token and per context."""

    def megabytes(n: float | None) -> str:
        return "unknown" if n is None else f"{wording.digits(n / 1e6)} MB"

    heads = f"{model.n_head} heads of {model.head_dim}, {model.n_head_kv} for keys and values"
    tied = {True: "tied to the embedding", False: "of its own", None: "unknown"}[model.tied_embeddings]
    types = ", ".join(f"{kind} {megabytes(n)}" for kind, n in sorted(model.tensor_bytes.items(), key=lambda kv: -kv[1]))
    cache = ", ".join(f"{megabytes(n_bytes)} at {n:,}" for n, n_bytes in kv_bytes.items())
    position = "unknown" if kv_per_position is None else f"{kv_per_position:,.0f}"
    reason = f" ({model.uncounted})" if model.uncounted else ""
    fits = f"unknown{reason}" if n_ctx_fits is None else f"a context of up to about {n_ctx_fits:,} tokens"
    return [
        f"name      {model.name} {model.quantization or ''} ({model.source})",
        f"file      {path}, {megabytes(model.n_bytes)}",
        f"shape     {model.arch}: {model.n_layer} layers, {model.n_embd} wide, feed-forward {model.n_ff}, {heads}",
        f"tokens    vocabulary of {model.n_vocab}, output matrix {tied}, trained for {model.n_ctx_train}",
        f"tensors   {types}",
        f"decode    reads {megabytes(bytes_per_step)} of weights per step",
        f"KV cache  {position} bytes per position (F16): {cache}",
        f"fits      {fits} in the memory that is free now",
    ]


def print_plan(plan: Plan, as_json: bool) -> None:
    """What `--dry-run` shows."""
    if as_json:
        lengths = [
            {"n_prompt": n, "memory": dataclasses.asdict(plan.memory(n)), "refused": plan.refused.get(n)}
            for n in plan.lengths
        ]
        settings = dataclasses.asdict(plan.settings)
        print_json({"lengths": lengths, "n_gen": plan.n_gen, "repeat": plan.n_repeat, "settings": settings})
        return
    out = console()
    out.print(f"\nPlan: {plan.n_repeat} rounds, {plan.n_gen:,} tokens generated per run; memory is an estimate")
    out.print(plan_table(plan))
    out.print(
        ", ".join(f"{name} {value}" for name, value in dataclasses.asdict(plan.settings).items() if value is not None)
    )


@contextmanager
def transfer(err: Console) -> Iterator[Callable[[str, int, int | None], None]]:
    """Shows bytes being downloaded or written, with rate and time left; nothing where nothing is."""
    started: dict[str, tuple[float, int]] = {}
    told: dict[str, float] = {}

    def watch(what: str, done: int, total: int | None) -> None:
        now = time.monotonic()
        since, first = started.setdefault(what, (now, done))
        finished = total is not None and done >= total
        if now - told.get(what, -1e9) < (0.5 if err.is_terminal else 10) and not finished:
            return
        told[what] = now
        rate = (done - first) / (now - since) if now > since else 0.0
        size = f" of {total / 1e6:,.0f}" if total is not None else ""
        left = f", {duration((total - done) / rate)} left" if total is not None and rate and not finished else ""
        speed = f" at {rate / 1e6:,.0f} MB/s" if rate else ""
        line = f"{what}: {done / 1e6:,.0f}{size} MB{speed}{left}"
        err.print(f"\r\x1b[2K{line}" if err.is_terminal else line, end="" if err.is_terminal else "\n")

    yield watch
    if started and err.is_terminal:
        err.print()


@contextmanager
def progress(
    err: Console, stream_to: Console | None, describe_run: Callable[[Record], str], in_blocks: bool = False
) -> Iterator[tuple[ShowStatus, Any]]:
    """Shows statuses as they come: a bar on a terminal, a line per run elsewhere, or the streamed text.

    `describe_run` puts a finished run into words; `in_blocks` the engine starts so often that it is told once.
    Yields two functions: one takes each Status, the other each finished Record.
    """
    if err.is_terminal and stream_to is None:
        with _bar(err) as bar:
            task = bar.add_task("starting", total=1.0, left="")
            yield lambda status: _move(bar, task, status), lambda record: None
        return
    latest = Status("starting")
    n_finished = 0

    def watch(status: Status) -> None:
        nonlocal latest
        if stream_to and status.doing in ("prefill", "decode"):
            if (status.n_prompt, status.repeat) != (latest.n_prompt, latest.repeat) or latest.doing == "warming up":
                head = f"\n--- {status.n_prompt:,} prompt tokens, repeat {(status.repeat or 0) + 1}"
                stream_to.print(Text(head, style="bold"))
            stream_to.print(status.text, end="")
        elif status.doing not in ("prefill", "decode", latest.doing) and (not n_finished or not in_blocks):
            err.print(f"{status.doing} ...")
        latest = status

    def finished(record: Record) -> None:
        nonlocal n_finished
        if record.run.warmup:
            return
        n_finished += 1
        if stream_to:
            stream_to.print()
        left = f"; about {duration(latest.left_s)} left" if latest.left_s else ""
        err.print(f"{describe_run(record)}{left}")

    yield watch, finished


def refused_lengths(plan: Plan) -> str:
    """A warning for lengths that will not be tried."""
    return f"{join(list(plan.refused))} prompt tokens will not be tried: " + " ".join(plan.refused.values())


def _bar(err: Console) -> Progress:
    from rich.progress import BarColumn, Progress, TextColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[left]}"),
        console=err,
        transient=True,
        auto_refresh=False,  # a redraw takes a core's time: only when there is news
    )


def _move(bar: Progress, task: Any, status: Status) -> None:
    left = f"{duration(status.left_s)} left" if status.left_s is not None else ""
    done = 0.0 if status.left_s is None else status.elapsed_s / max(1e-9, status.elapsed_s + status.left_s)
    bar.update(task, description=status.words, completed=done, left=left, refresh=True)


def grid_of(*headings: str) -> Table:
    """A plain table: texts to the left, numbers to the right."""
    grid = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        is_text = heading in (
            "note",
            "name",
            "from",
            "what it is",
            "figure",
            "verdict",
            "kernel",
            "type",
            "buffer",
            "phase",
            "limit",
        )
        grid.add_column(heading, justify="left" if is_text else "right", overflow="fold")
    return grid


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
