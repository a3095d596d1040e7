"""Options that several commands share, and their types."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import click
from click.core import ParameterSource

from lab.errors import LabError

CACHE_TYPES = ("f16", "bf16", "f32", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")


class Share(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """A share: `2%`, or `0.02`."""

    name = "percent"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value).strip()
        try:
            share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            share = -1.0
        if not 0 <= share < 1:
            self.fail(f"{value!r} is not a share. Write 2% or 0.02.", param, ctx)
        return share


class Layers(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """How many layers: a whole number, or `auto`."""

    name = "n"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        text = str(value).strip().lower()
        if text == "auto":
            return text
        try:
            return int(text)
        except ValueError:
            self.fail(f"{value!r} is not a number of layers. Write a whole number, or auto.", param, ctx)


def _cache_type(letter: str, about: str) -> Callable[..., Any]:
    """The option --cache-type-k or --cache-type-v."""
    kinds = click.Choice(CACHE_TYPES)
    names = f"--cache-type-{letter}", f"-ct{letter}"
    return click.option(*names, type=kinds, default="f16", show_default=True, metavar="TYPE", help=about)


MODEL = click.option("--model", "-m", default="smollm2-135m", show_default=True, help="A SPEC: see lab models.")
PROMPT = click.option(
    "--prompt",
    default="text",
    show_default=True,
    help="text (all of the lab's own), some of these (code,table,story), random, or a text file.",
)
DEVICE = click.option("--device", "-dev", help="Devices for layers, by name (lab machine), or none.  [default: all]")
LIB = click.option(
    "--lib", metavar="FOLDER", help="Run the llama.cpp libraries in this folder instead of those installed."
)
RPC = click.option(
    "--rpc", "-rpc", metavar="HOST:PORT", help="Use the devices of RPC servers (lab rpc-server), with commas."
)
ENGINE = [
    click.option("--threads", "-t", type=int, help="Threads for decode.  [default: fast physical cores]"),
    click.option("--threads-batch", type=int, help="Threads for prefill.  [default: as --threads]"),
    click.option("--batch", "-b", default=2048, show_default=True, help="Largest batch; caps --ubatch."),
    click.option("--ubatch", "-u", default=512, show_default=True, help="Tokens per prefill step."),
    click.option(
        "--n-gpu-layers",
        "-ngl",
        type=Layers(),
        help="Layers on devices, the output as one: 0 for none, auto for as many as fit.  [default: all]",
    ),
    click.option(
        "--flash-attn",
        "-fa",
        type=click.Choice(["on", "off", "auto"]),
        default="auto",
        show_default=True,
        help="Flash attention.",
    ),
    _cache_type("k", "Type of the K cache: " + ", ".join(CACHE_TYPES) + "."),
    _cache_type("v", "Type of the V cache, likewise."),
    DEVICE,
    click.option(
        "--split-mode",
        "-sm",
        type=click.Choice(["none", "layer", "tensor"]),
        help="How several devices share a model: whole layers each, or a part of every tensor.  [default: layer]",
    ),
    click.option("--tensor-split", "-ts", help="Shares of the devices, such as 3,1.  [default: by free memory]"),
    click.option("--main-gpu", "-mg", type=int, help="With --split-mode none: which device.  [default: 0]"),
    click.option("--n-cpu-moe", "-ncmoe", type=int, help="Keep the experts of so many layers on the CPU."),
    click.option(
        "--override-tensor",
        "-ot",
        metavar="PATTERN=BUFFER",
        help="Put tensors whose name matches a regular expression into a buffer: ffn_.*_exps=CPU. Several with commas.",
    ),
    click.option(
        "--kv-offload/--no-kv-offload", " /-nkvo", default=None, help="KV cache on the devices.  [default: on]"
    ),
    click.option(
        "--op-offload/--no-op-offload",
        " /-nopo",
        default=None,
        help="Prefill on a device with weights in RAM too.  [default: on, with layers on a device]",
    ),
    click.option("--mmap/--no-mmap", default=None, help="Map the file into memory.  [default: llama.cpp's choice]"),
    click.option(
        "--repack/--no-repack",
        " /-nr",
        default=None,
        help="Weights of the CPU in layouts of its own kernels (CPU_REPACK, AMX).  [default: on]",
    ),
    RPC,
    LIB,
    click.option(
        "--prefill-wait",
        type=click.Choice(["step", "end"]),
        help="Wait for each prefill step, or only for the last.  [default: step; end on RPC servers, and where devices "
        "work as a pipeline]",
    ),
]
"""How llama.cpp runs a model."""


def unified(default: str) -> Callable[..., Any]:
    """The option --kv-unified with this default."""
    return click.option(
        "--kv-unified",
        type=click.Choice(["on", "off"]),
        default=default,
        show_default=True,
        help="One KV cache for all sequences, instead of one each.",
    )


SETTINGS, UNIFIED = ([MODEL, PROMPT, *ENGINE, unified(default)] for default in ("off", "on"))
"""With a cache for each sequence, as llama.cpp has it; with one for all, where sequences share what they have."""

SEED = click.option("--seed", default=1, show_default=True, help="Of the order of runs and of the prompts.")
OUTPUT = [
    click.option("--out", "-o", default="results", show_default=True, help="Folder for the results and plots."),
    click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout instead of the table."),
    click.option("--no-plot", is_flag=True, help="Draw no plots."),
    click.option("--report", is_flag=True, help="Write a page for the browser at the end, as lab report does."),
]
AT_LEAST = click.option(
    "--at-least", type=Share(), default="1%", show_default=True, help="Claim no difference smaller than this."
)
DRY_RUN = click.option("--dry-run", is_flag=True, help="Show the plan and its estimated memory, and measure nothing.")
UNTIL = [
    click.option(
        "--until",
        type=Share(),
        metavar="SHARE",
        help="As many rounds as bring every median within this of the truth in 95 % of sessions, such as 2%.",
    ),
    click.option("--max-repeats", default=30, show_default=True, help="With --until: at most so many rounds."),
    click.option("--max-minutes", type=float, help="With --until: no new round after so many minutes."),
]


def with_options(*options: Callable[..., Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that gives a command these options, in this order."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


class WithVariants(click.Command):
    """A command whose arguments may be options in quotes, such as "--threads 2"."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Click takes what begins with a dash for an option: a space before it makes it an argument."""
        return super().parse_args(ctx, [f" {arg}" if re.match(r"--?[\w-]+\s", arg) else arg for arg in args])


def parse_variant(text: str) -> dict[str, Any]:
    """The settings that a variant of `lab ab` names, such as `--threads 1 --flash-attn off`. LabError if it cannot."""

    from lab.runner import as_options

    @with_options(*SETTINGS)
    def variant(**_: Any) -> None: ...

    command = click.command(add_help_option=False)(variant)
    try:
        context = command.make_context("variant", as_options.words(text))
    except (click.ClickException, ValueError) as problem:
        message = problem.format_message() if isinstance(problem, click.ClickException) else str(problem)
        raise LabError(
            f"The variant {text!r} is not understood: {message}", "Write it as options: --threads 2"
        ) from None
    return {
        name: value
        for name, value in context.params.items()
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }
