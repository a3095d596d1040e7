"""Measure files of one model: how far their predictions are from the first one's, and how fast they are.

Quality: every engine evaluates the same chunks of text, chunk after chunk. The reference writes its logits of a chunk
to a file, each candidate compares its own with them, and the next chunk overwrites them, so the file stays small. A
chunk has 512 tokens, and its second half is scored, as llama-perplexity does. For some chunks the reference is compared
with itself under other settings: what is below this noise floor cannot be told apart. Speed: blocks with fresh engines
that take turns, as in `lab ab`.

Models that do not fit into memory together run one after the other. The reference then keeps of each position only its
largest logits and sums of the rest (about 3 MB a chunk), and the divergences are known within bounds.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from lab.cli.help import Command
from lab.cli.options import ENGINE, OUTPUT, SEED, TOKENS, with_options
from lab.core.asked_settings import CACHE_TYPES, check_number
from lab.core.lists import plural
from lab.core.payloads import Divergence, Quality
from lab.core.record import QUANT, Record, Settings
from lab.core.results import save, unless_empty
from lab.errors import LabError
from lab.features import experiment
from lab.features.compare import side_by_side
from lab.features.quant import figures
from lab.features.running import Output, collect, introduce
from lab.features.tune.tuning import seconds_of
from lab.models import catalog, obtain
from lab.process.worker import Worker
from lab.runner import progress, prompts
from lab.runner.cases import Plan, run_without_steps, utc_now
from lab.runner.progress import ShowStatus, Status
from lab.runner.session import new_results_file

N_CHUNK, FIRST, MOST_CHUNKS = 512, 256, 1000
"""Tokens of a chunk, the first position that is scored (llama-perplexity's defaults), and chunks cut from a text."""

EMBEDDED = ("F16", "Q8_0", "Q4_K_M", "Q4_0", "Q3_K_M")
"""Quantizations of the embedded model that are compared where no file is named. It is a Q4_1 itself."""

MIN_CHUNKS, UNTIL, N_FLOOR, MOST_APART = 16, 0.05, 8, 200
"""Chunks before the intervals may end the measurement, the half width that ends it, chunks of the noise floor, and the
most that are kept of a reference that runs alone (0.6 GB)."""

KINDS = {
    "prose": ("manual", "story", "more/prose"),
    "code": ("code", "table", "more/code"),
    "dialogue": ("dialogue", "more/dialogue"),
    "other languages": ("german", "spanish"),
}
"""The lab's own texts by their kind; no prompt is cut from those in `more/`."""

Chunk = tuple[str, list[int]]
"""The kind of text, and the tokens."""

CHILD = "lab.features.quant.child"
N_BLOCKS, BUDGET, FLOOR = 10, "10min", "noise floor"


@dataclass(frozen=True)
class QuantPlan:
    """The plans by variant (the first is the reference), and the texts by kind. `apart`: one engine after the other."""

    plans: dict[str, Plan]
    texts: dict[str, str]
    text: str
    budget_s: float
    blocks: int
    apart: bool = False


def plan(
    worker: Worker,
    /,
    *files: str,
    cache_type: str | Sequence[str] = (),
    text: str | None = None,
    budget: str | float = BUDGET,
    blocks: int = N_BLOCKS,
    prompt_len: int = 256,
    gen: int = 32,
    **settings: Any,
) -> QuantPlan:
    """Compare files of one model with the first one, in quality and speed. Returns the records.

        records = lab.quant("model-F16.gguf", "model-Q8_0.gguf", "model-Q4_K_M.gguf")
        lab.quant_table(records)  # DataFrame, one row a file

    Without files: the embedded model, requantized. With `cache_type`: one file with these types of its cache. LabError
    for files that are not of one model, and for a text that is too short.
    """
    given = [one.strip() for one in (cache_type.split(",") if isinstance(cache_type, str) else cache_type)]
    types = [one for one in given if one]
    if unknown := [one for one in types if one not in CACHE_TYPES]:
        raise LabError(f"{unknown[0]!r} is not a cache type.", f"Use some of {', '.join(CACHE_TYPES)}.")
    if types and len(files) > 1:
        raise LabError(f"--cache-type compares one file, and {len(files)} are named.", "Name one.")
    chosen = list(files) if types else [file for file, _ in expanded(files)]
    first, *more = compared = types or chosen
    if not more:
        example = "--cache-type f16,q8_0,q4_0" if types else f"lab quant {first}:Q8_0 {first}:Q4_K_M"
        hint = f"Name at least two, the reference first: {example}"
        raise LabError(f"There is nothing to compare {first} with.", hint)
    if len(set(compared)) < len(compared):
        raise LabError("A file or type is named twice.", "Name each once.")
    check_number("blocks", blocks, 1000)
    budget_s, texts = seconds_of(budget), {kind: prompts.own_text(names) for kind, names in KINDS.items()}
    if text is not None:
        try:
            source = prompts.source(text)
        except LabError as problem:
            what = problem.what.replace("prompt file", "text")
            raise LabError(what, "Give a UTF-8 text, or leave --text out.") from None
        if source.text is None:
            raise LabError("Random tokens say nothing about quality.", "Give a text, or leave --text out.")
        texts = {source.name: source.text}
    asked = {"prompt_len": [prompt_len], "gen": gen, **settings}
    variants: list[dict[str, Any]] = [{"model": one} for one in chosen]
    if types:
        asked["model"] = chosen[0] if chosen else catalog.DEFAULT
        variants = [{"cache_type_k": one, "cache_type_v": one} for one in types]
    plans = side_by_side.plan(worker, side_by_side.named(variants), blocks, may_be_apart=True, **asked)
    name, *others = plans
    for other in others:
        paths = plans[name].file.path, plans[other].file.path
        if paths[0] != paths[1] and (how := worker.vocabularies_differ(*paths)):
            raise LabError(f"{name} and {other} have different vocabularies: {how}.", "Compare files of one model.")
    plans = {key: replace(one, part=QUANT) for key, one in plans.items()}
    return QuantPlan(plans, texts, text or "", budget_s, blocks, bool(side_by_side.too_large(plans)))


def carry_out(make: Callable[[Worker], QuantPlan], out: str | Path, watch: ShowStatus | None) -> list[Record]:
    """Plan and measure."""
    with Worker() as worker:
        made = make(worker)
    path = new_results_file(next(iter(made.plans.values())), Path(out))
    with contextlib.nullcontext(watch) if watch else progress.in_notebook() as look:
        return list(execute(made, path, look))


quant = experiment.public("quant", plan, carry_out=carry_out)


def expanded(files: Sequence[str]) -> list[tuple[str, int]]:
    """The files to compare, with the bytes of those that a name of the catalog stands for (0 for others)."""
    if list(files) in ([], [catalog.DEFAULT]):
        return [(f"{catalog.DEFAULT}:{kind}", 0) for kind in EMBEDDED]
    if len(files) == 1 and (own := catalog.entries().get(files[0])) and own.repo and own.quantizations:
        return [(f"hf:{own.repo}:{kind}", n_bytes) for kind, n_bytes in own.quantizations.items()]
    return [(file, 0) for file in files]


def missing(files: Sequence[str]) -> dict[str, int]:
    """What would have to be downloaded of the quantizations that a name of the catalog stands for: bytes by SPEC."""
    return {spec: n_bytes for spec, n_bytes in expanded(files) if n_bytes and not obtain.locate(catalog.parse(spec))}


def execute(made: QuantPlan, path: Path, watch: ShowStatus) -> Iterator[Record]:
    """Measure quality, then speed; yields each record after it is in `path`. After Ctrl-C whole chunks are kept."""
    name, *others = made.plans
    found: dict[str, list[Divergence]] = {one: [] for one in (*others, FLOOR)}
    own_settings = ((key, one.settings) for key, one in made.plans.items())
    settings = {key: replace(one, n_ctx=N_CHUNK, n_batch=max(one.n_batch, N_CHUNK)) for key, one in own_settings}
    began, started_at, pieces = time.monotonic(), utc_now(), list[Chunk]()
    groups, n = ([[key] for key in made.plans], MOST_APART) if made.apart else ([list(made.plans)], MOST_CHUNKS)

    def is_over(i: int, group: Sequence[str], share: float) -> bool:
        """Whether this share of the budget is spent, or the divergences of the group are known well enough."""
        means = [figures.mean(found[key], figures.divergence) for key in group if key != name and i >= MIN_CHUNKS]
        is_narrow = means and all(high - mean <= UNTIL * abs(mean) for mean, _, high in means)
        return i >= 2 and bool(is_narrow or time.monotonic() - began > share * made.budget_s)

    def keep(key: str, own: Sequence[Divergence]) -> Record:
        """Append the record of a candidate, or of the noise floor, to `path`."""
        is_floor, kinds = key == FLOOR, tuple(kind for kind, _ in pieces[: len(own)])
        of, used = made.plans[name if is_floor else key], elsewhere(settings[name]) if is_floor else settings[key]
        quality = Quality(name, made.text, kinds, tuple(own), is_floor, made.budget_s)
        run = run_without_steps(N_CHUNK, 0, started_at=started_at, variant=key, part=QUANT, quality=quality)
        record = Record(path.stem, of.machine, of.model, used, run)
        save(path, record)
        return record

    try:
        with unless_empty(path), tempfile.TemporaryDirectory(prefix="mini-lab-") as folder:
            for number, group in enumerate(groups, 1):
                with contextlib.ExitStack() as stack:
                    watch(Status("loading the models"))
                    workers = {key: stack.enter_context(Worker()) for key in group}
                    for key, worker in workers.items():
                        worker.use(made.plans[key].lib)
                        bos = worker.load(made.plans[key].file.path, settings[key]).bos
                        own = chunks(made.texts, worker.tokenize, bos, N_CHUNK)
                        if pieces and own != pieces:
                            raise LabError(f"{key} splits the text into other tokens.", "Compare files of one model.")
                        pieces, settings[key] = own, worker.new_context(settings[key])
                    n = min(n, len(pieces))
                    for i, (_, tokens) in enumerate(pieces[:n]):
                        if is_over(i, group, number / len(groups)):
                            n = i if name in group else n  # the reference's chunks bound those of later groups
                            break
                        watch(Status(f"quality: chunk {i + 1} of at most {n}"))
                        todo = {
                            "tokens": tokens,
                            "first": FIRST,
                            "path": Path(folder, f"{i}.npz" if made.apart else "logits"),
                        }
                        for key, worker in workers.items():
                            if key != name:
                                found[key].append(worker.call(Divergence, f"{CHILD}.diverge", **todo))
                                continue
                            worker.call(type(None), f"{CHILD}.keep", **todo)
                            if i < N_FLOOR:
                                worker.new_context(elsewhere(settings[name]))
                                found[FLOOR].append(worker.call(Divergence, f"{CHILD}.diverge", **todo))
                                worker.new_context(settings[name])
    except (KeyboardInterrupt, LabError):
        n = min(len(found[key]) for key in others)  # whole chunks
        for key in found if n > 1 else ():
            keep(key, found[key][:n])
        raise
    for key, measured in found.items():
        yield keep(key, measured)
    yield from side_by_side.execute(made.plans, made.blocks, path, watch, apart=made.apart)


def elsewhere(settings: Settings) -> Settings:
    """Other settings that should not change predictions: half the ubatch, and flash attention on or off."""
    on = (settings.flash_attn_resolved or settings.flash_attn) == "on"
    needs_it = settings.type_v not in ("f16", "bf16", "f32")  # llama.cpp: a quantized V needs flash attention
    flash_attn = settings.flash_attn if needs_it else "off" if on else "on"
    n_ubatch = max(1, min(settings.n_ubatch, N_CHUNK) // 2)
    return replace(settings, n_ubatch=n_ubatch, flash_attn=flash_attn, flash_attn_resolved=None)


def chunks(
    texts: Mapping[str, str], tokenize: Callable[[str], list[int]], bos: int | None, n_chunk: int
) -> list[Chunk]:
    """All whole chunks of texts by their kind, in an order in which every beginning has the kinds in proportion.

    If the model adds BOS before a text, it stands before each text and replaces the first token of each chunk. LabError
    for fewer than 2 chunks.
    """
    placed, n_tokens = list[tuple[float, Chunk]](), 0
    for kind, text in texts.items():
        ids = ([] if bos is None else [bos]) + tokenize(text)
        n_tokens, n = n_tokens + len(ids), min(len(ids) // n_chunk, MOST_CHUNKS)
        for i in range(n):
            tokens = ids[i * n_chunk : (i + 1) * n_chunk]
            placed.append(((i + 0.5) / n, (kind, tokens if bos is None else [bos, *tokens[1:]])))
    if len(placed) < 2:
        hint = f"Give a longer one: 16 chunks ({16 * n_chunk:,} tokens) show differences of more than 10 %."
        raise LabError(f"The text has {n_tokens:,} tokens, too few for two chunks of {n_chunk}.", hint)
    return [chunk for _, chunk in sorted(placed, key=lambda one: one[0])]


@click.command("quant", cls=Command, first=("cache-type", "text", "budget", "blocks"))
@click.argument("files", nargs=-1, metavar="[REFERENCE FILE...]")
@with_options(
    click.option("--cache-type", default="", help="Compare these cache types of one file: f16,q8_0,q4_0."),
    click.option("--text", metavar="TEXT", help="A text file, or the lab's own: code,dialogue.  [default: all]"),
    click.option("--budget", default=BUDGET, show_default=True, help="Time to spend on quality, such as 2min or 1h."),
    click.option("--blocks", default=N_BLOCKS, show_default=True, help="Blocks for speed; each runs every file twice."),
    click.option("--prompt-len", "-p", type=TOKENS, default=256, show_default=True, help="Prompt tokens of its runs."),
    click.option("--gen", "-n", type=TOKENS, default=32, show_default=True, help="Tokens that they generate."),
    click.option("--csv", type=click.Path(dir_okay=False), metavar="FILE", help="Also write the table to a CSV file."),
    click.option("--yes", is_flag=True, help="Download what a name of the catalog needs without asking."),
    *ENGINE,
    SEED,
    *OUTPUT,
)
def command(files: tuple[str, ...], cache_type: str, csv: str | None, yes: bool, **asked: Any) -> None:
    """Show what quantizations cost in quality and gain in speed.

    \b
      lab quant                           # the embedded model, requantized
      lab quant model-F16.gguf model-Q8_0.gguf model-Q4_K_M.gguf
      lab quant llama-3.2-1b              # the catalog's files, downloaded

    The first file is the reference. All files predict the same text, in chunks of 512 tokens: the table shows how far
    each one's predictions are from the reference's (mean Kullback-Leibler divergence), and how often both find the same
    token most likely. The reference against itself with other settings shows the noise floor. Chunks are added until
    the divergences are known to 5 %, the text ends or the --budget is spent. Then the speeds are measured in blocks, as
    lab ab does.

    The output names the files that no other one beats in both. It does not say how well a model does a task. Files of
    other models are refused. Files that do not fit into memory together run one after the other, and the divergences
    are then known within bounds. A FILE is a SPEC: see lab models --help.
    """
    from lab.features.exchange import llama_bench_format
    from lab.features.measure import text_results
    from lab.show import console

    output, err = Output.taken_from(asked), console.console(stderr=True)
    if (sizes := missing(files)) and not (yes or cache_type):
        listed = ", ".join(f"{spec} {n_bytes / 1e9:.1f} GB" for spec, n_bytes in sizes.items())
        total = f"{plural(len(sizes), 'file')}, {sum(sizes.values()) / 1e9:.1f} GB"
        click.confirm(f"Download {total}: {listed}?", abort=True, err=True)
    with Worker() as worker, console.transfer(err) as transferring:
        made = plan(worker, *files, cache_type=cache_type, **asked, watch=transferring)
    introduce(list(made.plans.values()), err, err)
    path = new_results_file(next(iter(made.plans.values())), output.folder)

    def finished(record: Record) -> str:
        if not (quality := record.run.quality):
            return text_results.finished(record)
        mean, *_ = figures.mean(quality.chunks, figures.divergence)
        return f"{record.run.variant}: mean divergence {mean:.3g} in {plural(len(quality.chunks), 'chunk')}"

    records, problem = collect(lambda watch: execute(made, path, watch), path, err, describe=finished)
    if csv and any(record.run.quality for record in records):
        try:
            llama_bench_format.harmless(figures.quant_table(records)).to_csv(csv, index=False)
        except OSError as failed:
            raise LabError(f"{csv} cannot be written: {failed.strerror}.", "Choose another --csv.") from None
    output.finish(records, path, problem)
