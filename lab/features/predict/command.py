"""The command that predicts: which device suits a model, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from lab.app.help import Command
from lab.app.options import (
    DETAILS,
    DEVICE,
    MODEL,
    SETTINGS,
    TOKENS,
    Unstored,
    as_json_option,
    with_options,
)
from lab.app.reading import RESULTS, note
from lab.core.files import is_dir
from lab.errors import LabError
from lab.models import catalog

if TYPE_CHECKING:
    from lab.roofline.prediction import Prediction


RANKED_LENGTHS = "1000"
EXPLAINED_LENGTHS = "1000,10000"
"""Default prompt lengths, for a ranking and for devices that are named."""

FIRST = ("model", "device", "quantizations", "prompt-len", "gen", "slo")


@click.command(cls=Command, first=FIRST)
@with_options(
    click.option(
        "--model",
        "-m",
        "-hf",
        default=[catalog.DEFAULT],
        show_default=catalog.DEFAULT,
        multiple=True,
        help="A model: any tool's name of it, a .gguf file (see lab models --help). Several: -m"
        " again, or commas.",
    ),
    click.option(
        "--prompt-len",
        "-p",
        help="Prompt lengths.  [default: 1000, and 1000,10000 for devices that are named]",
    ),
    click.option(
        "--gen", "-n", type=TOKENS, default=200, show_default=True, help="Tokens to generate."
    ),
    click.option(
        "--sequences",
        "-s",
        default=1,
        show_default=True,
        help="Users whose answers are decoded together.",
    ),
    click.option(
        "--device",
        "-d",
        multiple=True,
        help="A device by its name, or in words (gbps=51.2 cores=8 avx2); a kind to rank (laptop,"
        " apple, ...); here: this machine; datasheet.toml: what the notebooks measured."
        " Several: -d again, or commas.",
    ),
    click.option(
        "--backend", help="llama.cpp's backend: cpu, cuda, metal, vulkan, rocm, sycl."
    ),
    click.option(
        "--quantizations", is_flag=True, help="One table of a model's quantizations."
    ),
    click.option(
        "--describe", is_flag=True, help="Ask for the facts of a device, one by one."
    ),
    click.option(
        "--check",
        metavar="PATH",
        help="Compare the runs in results with their predictions.",
    ),
    click.option("--all", "shows_all", is_flag=True, help="Rank all devices."),
    DETAILS,
    click.option(
        "--measured",
        multiple=True,
        metavar="MODEL=RATE",
        help="Tokens/s that you measured on the device: it narrows all ranges."
        " For a prompt: MODEL=pp:RATE.",
    ),
    click.option(
        "--gbps",
        type=float,
        help="The device's memory bandwidth, such as fewer filled channels leave.",
    ),
    click.option(
        "--memory",
        metavar="SIZE",
        help="With less memory on this machine (--device here), such as 8GB.",
    ),
    click.option("--slo", metavar="LIMITS", help="Limits to keep, such as ttft=2s,tpot=50ms."),
    *(option for option in SETTINGS if option not in (DEVICE, MODEL)),
    click.option(
        "--ceilings",
        default=RESULTS,
        show_default=True,
        help="Folder with the ceilings, and with runs to learn from.",
    ),
    as_json_option(),
    click.option(
        "--no-plot", cls=Unstored, is_flag=True, help="Draw no plots; this command draws none."
    ),
)
def predict(
    model: tuple[str, ...],
    device: tuple[str, ...],
    backend: str | None,
    quantizations: bool,
    describe: bool,
    check: str | None,
    details: bool,
    gen: int,
    prompt_len: str | None,
    shows_all: bool,
    slo: str | None,
    ceilings: str,
    as_json: bool,
    no_plot: bool,
    sequences: int,
    measured: tuple[str, ...],
    gbps: float | None,
    memory: str | None,
    **options: Any,
) -> None:
    """Predict a model's speed: which device suits it, and why.

    \b
      lab predict -m llama-3.1-8b                           # which machine?
      lab predict -m qwen3:8b -d "mac mini m4" -d rtx-3060  # side by side
      lab predict -m gpt-oss:20b -d "13900K, DDR5-6400"     # one, explained

    Needs no model file: a name is enough. Without --device it shows devices that people choose
    from, with 90 % ranges, and this machine with its measured times or a prediction from its
    ceilings; --all ranks all devices, --device KIND those of a kind.

    For a device that --device names it prints what to expect for each prompt length. On this
    machine the range is wider for prompts longer than those measured here and for other models,
    quantizations or settings. For another device it is learned from what others published: narrow
    where the device or its family has rows, wide where nothing is known or something had to be
    assumed; the output says what would narrow it most. A rate of your own narrows it:
    --measured llama-3.1-8b:Q4_0=38. A processor takes --threads.

    With --memory the model may be larger than this machine's memory: its file is mapped, and read
    again for each token. How long that takes is what lab start --memory measured here.
    """
    from lab.features.predict import (
        checking,
        describing,
        quantizing,
        ranking,
        slo as slo_limits,
        tables,
    )
    from lab.roofline.prediction import HERE
    from lab.runner import builds
    from lab.show import console
    from lab.show.section import print_section, print_sections

    check_folder(ceilings)
    out = console.console()
    if check is not None:
        print_section(checking.section(check), out)
        return
    unusable = builds.problem_of_variable()
    if unusable and options["lib"] is None:
        note(f"{unusable.what} The installed libraries are used.")
    models = ",".join(model)
    names = ",".join([*device, describing.device_of_answers()] if describe else device) or None
    is_ranking = ranking.ranks(names)
    lengths = prompt_len or (RANKED_LENGTHS if is_ranking else EXPLAINED_LENGTHS)
    if quantizations:
        models = quantizing.with_quantizations(models, names)
        lengths = prompt_len or RANKED_LENGTHS
    limits = slo_limits.parse_slo(slo) if slo else None
    with console.transfer(console.console(stderr=True)) as watch:
        rows = ranking.predict(
            lengths,
            gen,
            models,
            names,
            sequences=sequences,
            slo=limits,
            ceilings=ceilings,
            measured=measured,
            gbps=gbps,
            backend=backend,
            memory=memory,
            watch=watch,
            **options,
        )
    if as_json:
        console.print_json({"rows": [document(row) for row in rows]})
        return
    specs = ranking.names_of_models(models)
    if quantizations:
        print_section(quantizing.section(rows), out)
        return
    shown = tables.Display(limits, is_ranking, shows_all, details, bool(names))
    first, *further = tables.sections(rows, shown, specs)
    print_section(first, out)
    print_sections(further, out)
    is_here = any(row.name == HERE for row in rows)
    if names is None and details and not is_here:
        note(ranking.missing_here(specs[0], ceilings, options))


def check_folder(ceilings: str) -> None:
    """LabError for a named folder that does not exist."""
    if ceilings != RESULTS and not is_dir(ceilings):
        raise LabError(
            f"There is no folder {ceilings}.",
            "Name the one with your results: --ceilings FOLDER",
        )


def document(row: Prediction) -> dict[str, object]:
    """A row of the JSON. What does not fit has no times."""
    from lab.features.predict import wording

    times = {
        "prefill_limit_s": row.prefill.limit_s,
        "prefill_s": row.prefill_s,
        "tpot_limit_s": row.token.limit_s,
        "tpot_s": row.tpot_s,
        "prefill_expected_s": row.prefill.expected_s,
        "tpot_expected_s": row.token.expected_s,
        "e2e_s": row.e2e_s,
    }
    if row.shortage is not None:
        times = dict.fromkeys(times)
    return {
        "model": row.model.name,
        "quantization": row.model.quantization,
        "n_prompt": row.n_prompt,
        "n_gen": row.n_gen,
        **times,
        "beyond": wording.beyond(row.extrapolations),
        "doubts": row.doubts,
        "misfit": wording.misfit(row.shortage),
        "needed_bytes": row.needed_bytes,
        "memory_bytes": row.memory_bytes,
        "room": row.room,
        "users": row.users,
        "name": row.name,
        "about": row.about,
        "basis": wording.basis(row),
        "is_measured": row.is_measured,
        "chance": row.chance,
    }
