"""`lab speculate`: draft n tokens, verify them in one step. Does it pay?

A step of n + 1 positions reads the weights once, like a step of one. If n tokens are drafted, the
model verifies them all in one step and keeps those that it would have chosen. The text stays the
same; the speed depends on three figures:

- L, tokens per step: how many drafted tokens are accepted
- c, the cost of a drafted token: a step of the draft model over a step of the model (0 for lookup
  in the text)
- v(n), the cost of verifying: a step of n + 1 positions over a step of one. If memory traffic is
  the limit, v is about 1; if arithmetic is, as on most CPUs, v is larger

Speed-up = L / (n c + v(n)). The curve v(n) and c are measured in separate steps, which are
forgotten again. Acceptance comes from the runs with the longest drafts. The speed-up of every other
draft length is predicted from these. Leviathan et al. (2023) assume v = 1.
"""

from __future__ import annotations

from typing import Unpack

import click

from lab.app.collection import Results
from lab.app.experiment import Experiment
from lab.app.options import MODEL, gen_option, lengths_option
from lab.core.arguments import Numbers, StrPath, Texts
from lab.core.keywords import CommonSettings
from lab.core.record import Record
from lab.features.speculate import curve, speed_ups
from lab.features.speculate.planning import DEFAULT_TEXTS, plan
from lab.features.speculate.setup import NAME
from lab.models import catalog
from lab.runner.progress import Watch


class SpeculateSettings(CommonSettings, total=False):
    device: Texts | None
    mmap: bool | None


def speculate(
    draft: str | None = None,
    draft_len: Numbers = "1,2,4,8",
    prompt_len: Numbers = "256",
    gen: int = 128,
    repeat: int | None = None,
    model: str = catalog.DEFAULT,
    *,
    prompt: Texts | None = None,
    out: StrPath = "results",
    watch: Watch = None,
    **settings: Unpack[SpeculateSettings],
) -> Results[Record]:
    """Generate with and without drafted tokens, in blocks; returns a record per run.

        lab.speculate("lookup", "2,4", gen=64)

    `draft` is "lookup" (the default: what followed the same words earlier in the text) or a model:
    a smaller one with the same vocabulary, or the same one in a smaller quantization. A block is a
    fresh engine, a text of each kind (`prompt`, by default code, table, story and dialogue), and
    every draft length and no drafts in random order. For a model with random weights only the times
    of steps are measured. LabError for impossible values.
    """
    options = {
        "draft": draft,
        "draft_len": draft_len,
        "prompt_len": prompt_len,
        "gen": gen,
        "repeat": repeat,
        "model": model,
        "prompt": prompt,
    }
    return Results(EXPERIMENT.measure({**options, **settings}, out, watch))


OPTIONS = (
    click.option(
        "--draft",
        metavar="lookup|SPEC",
        help="Where drafts come from: lookup (what followed the same words before) or a model.  "
        "[default: lookup]",
    ),
    click.option(
        "--draft-len",
        "-l",
        default="1,2,4,8",
        show_default=True,
        help="Lengths of the draft in tokens: 1,2,4 or 1-8.",
    ),
    lengths_option("256", "Prompt tokens."),
    gen_option(128, "Tokens to generate."),
    click.option(
        "--repeat",
        "-r",
        type=int,
        help="Blocks, each with a fresh engine and other prompts.  [default: 6]",
    ),
    click.option(
        "--prompt",
        metavar="TEXT",
        help=f"Kinds of text, or a text file.  [default: {DEFAULT_TEXTS}]",
    ),
    MODEL,
)

EXPERIMENT = Experiment(
    name=NAME,
    chapter="Speculative decoding",
    about="""Measure what speculative decoding costs and gains.

    \b
      lab speculate --draft lookup --draft-len 1-8
      lab speculate --draft smollm2-135m:Q4_0 --prompt code,story

    Generates with and without drafts, in blocks. For each kind of text the command shows how many
    drafted tokens are accepted, what verification costs, the speed-up over plain decoding with its
    interval, the prediction from the times of single steps, and the bottleneck if it does not pay.
    The tokens match plain decoding except at near-ties, which are counted. With random weights only
    the steps are timed.
    """,
    plan=plan,
    options=OPTIONS,
    main_options=("model", "draft", "draft-len", "prompt-len", "gen", "repeat"),
    tables=(speed_ups.TABLE, curve.TABLE),
)

command = EXPERIMENT.as_command()
KINDS = (EXPERIMENT.as_kind(),)
