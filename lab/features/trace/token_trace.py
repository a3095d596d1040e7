"""One token's way: what each operation of each layer takes of a prefill and of a decode step.

The engine stops after every operation (child.py). A stop costs time, which operations that compute nothing
(views) show, and the CPU's threads start and end at each: that is taken off every other operation. Then the sum of all
operations must be the time of the same step without stops; `Phase.off` says how far it is from that. Bytes and FLOPs
follow from the tensors' shapes and types. The ceiling of an operation is that of its kernel (lab ceilings).

Attention weights, layer by layer: a token asks (its query), and all tokens up to it answer (their keys). In prefill all
tokens ask at once, so the weights are a triangle; in decode only the new token asks, so they are one row. No step needs
the query of an earlier token, so the cache has keys and values only. K and V of a token depend on the tokens before it,
except in the first layer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import re
import statistics
import tomllib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from lab.app.help import Command
from lab.app.options import OUTPUT, SETTINGS, TOKENS, with_options
from lab.app.output import Output
from lab.app.reading import RESULTS
from lab.core import cost, shape
from lab.core.asked_settings import check_number
from lab.core.lists import grouped, join_and, plural
from lab.core.memory import device_of
from lab.core.payloads import SAMPLING, Attention, Looks, Part, Phase, TokenTrace
from lab.core.record import Ceilings, Device, Model, Record, Settings
from lab.core.results import save, unless_empty
from lab.errors import LabError
from lab.roofline import probing, step_kernels
from lab.roofline.explanation import TOO_LOW
from lab.app.server import given
from lab.features.trace.nodes import Node, StepTrace, Trace
from lab.models import catalog, obtain
from lab.process.worker import Worker
from lab.runner import prompts
from lab.runner.cases import Plan, run_without_steps
from lab.runner.plan import make_plan
from lab.runner.session import new_results_file
from lab.show import text_setup
from lab.show.canvas import COLOURS, GRID, GUIDE, PAPER, finish, grid
from lab.show.section import UNKNOWN, Columns, Context, Kind, Picture, Section, tabled
from lab.show.wording import digits, percent, seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ON_ONE_THREAD = ("GET_ROWS", "SET_ROWS", "SCALE")
"""Operations that the CPU never shares among threads (ggml_get_n_tasks of ggml-cpu.c)."""

PRODUCTS = ("MUL_MAT", "MUL_MAT_ID")
EMPTY = ("NONE", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE")
"""Operations of ggml that only look at a tensor in another way."""

OPERATIONS = tomllib.loads(Path(__file__).with_name("operations.toml").read_text(encoding="utf-8"))
"""Names of operations by the weights that they use and by what ggml calls them, and families of these names."""

ATTENTION = "attention"
COPIES = "copy between devices"
OUTSIDE = "outside operations"
OUTPUT_MATRIX = "last matrix"

_COPIED = re.compile(
    r"[^#]+#.+#\d+"
)  # how ggml's scheduler names what it copies to the device of the next operations
MOST_TOKENS = 32  # tokens of a text whose attention weights can still be drawn


FEED_FORWARD = "feed-forward"
PROJECTIONS = "Q, K, V and output"
SMALL = "norms and sums"
FAMILIES = {name: family for family, names in OPERATIONS["families"].items() for name in names}
"""Operations that share a colour and a sentence; the others are SMALL."""

OFF = 0.05  # a sum of the operations that is further than this from the step without stops makes the shares wrong
LETTER = 0.0065  # share of a row's width that a letter of an operation's name needs
N_COLUMNS = 6  # of the layers in the picture of attention weights


def trace(
    prompt_len: int = 200,
    gen: int = 8,
    repeat: int = 5,
    model: str = catalog.DEFAULT,
    *,
    results: str | Path = "results",
    out: str | Path = "results",
    watch: obtain.ShowTransfer = obtain.silently,
    **settings: Any,
) -> Record:
    """Trace prefill of a prompt and `gen` decode steps after it, `repeat` times, alternating with untraced ones.

        traced = lab.trace(200, threads=2).run.trace

    `results` is the folder with the ceilings. Keeps what it found in a results file in `out`. LabError for what does
    not fit into memory.
    """
    check_number("gen", gen, 1000)
    check_number("repeat", repeat, 1000)
    with Worker() as worker:
        plan = make_plan(worker, [prompt_len], gen + 1, 1, model, watch=watch, **settings)
        if plan.refused:
            raise LabError(
                " ".join(plan.refused.values()), "Use a shorter prompt or a smaller model."
            )
        asked = dataclasses.replace(plan.settings, n_batch=max(plan.settings.n_batch, prompt_len))
        vocabulary = worker.load(plan.file.path, asked)
        if plan.prompt.text is None:
            tokens = prompts.random_ids(
                prompt_len, vocabulary.n_vocab, vocabulary.bos, plan.seed, 0
            )
        else:
            ids = worker.tokenize(plan.prompt.text)
            tokens = prompts.cut(
                ids, prompt_len, prompts.offset(plan.seed, 0, len(ids)), vocabulary.bos
            )
        chosen = worker.new_context(asked)
        placed = worker.placement()
        sizes = {"tokens": list(tokens), "n_gen": gen, "n_rounds": repeat}
        traced = worker.call(Trace, "lab.features.trace.child.trace", **sizes)
    where = probing.place_of(plan.machine, plan.model, chosen, placed)
    known = probing.known(probing.kept(Path(results), lambda sentence: None), where)
    prefill, decode = (
        phase(name, steps, plan.model, chosen, known, plan.machine.devices)
        for name, steps in (("prefill", traced.prefill), ("decode", traced.decode))
    )
    seen = TokenTrace(prefill, decode, known.measured_at if known else None)
    return _kept(plan, chosen, out, prompt_len, gen + 1, trace=seen, placement=placed)


def attention(text: str, model: str = catalog.DEFAULT, **settings: Any) -> Attention:
    """The attention weights of a short text without flash attention, and how K and V depend on its first token.

        lab.attention("The cat sat on the mat").looks.changes

    The text's first token is replaced by its last other one. LabError for a text of fewer than 3 or over MOST_TOKENS
    tokens, or of equal ones.
    """
    return cast(Attention, look(text, model, **settings).run.attention)


def look(text: str, model: str, out: Path | None = None, **settings: Any) -> Record:
    """`attention` as a run, in a results file in `out` unless that is None."""
    if settings.get("flash_attn", "off") == "on":
        raise LabError(
            "Flash attention never writes the weights.", "Look at them with --flash-attn off."
        )
    settings["flash_attn"] = "off"
    with Worker() as worker:
        plan = make_plan(worker, [MOST_TOKENS], 1, 1, model, **settings)
        if plan.refused:
            raise LabError(" ".join(plan.refused.values()), "Use a smaller model.")
        sizes = {
            name: max(getattr(plan.settings, name), MOST_TOKENS) for name in ("n_ubatch", "n_batch")
        }
        asked = dataclasses.replace(plan.settings, **sizes)
        vocabulary = worker.load(plan.file.path, asked)
        own = worker.tokenize(text)
        tokens = own if vocabulary.bos is None else [vocabulary.bos, *own]
        if not 3 <= len(own) <= len(tokens) <= MOST_TOKENS:
            what = f"The text has {plural(len(own), 'token')} in {plan.model.name}."
            raise LabError(what, f"Give one of 3 to {MOST_TOKENS - 1}: 'The cat sat'.")
        chosen = worker.new_context(asked)
        replaced = len(tokens) - len(own)
        others = [token for token in own if token != own[0]]
        if not others:
            raise LabError(
                f"All tokens of the text {text!r} are equal.", "Give another one: 'The cat sat'."
            )
        changes = {"tokens": tokens, "replaced": replaced, "replacement": others[-1]}
        looks = worker.call(Looks, "lab.features.trace.child.look", **changes)
        pieces = worker.pieces()
        *texts, other = (
            pieces[token].decode(errors="replace") or f"<{token}>"
            for token in (*tokens, others[-1])
        )
    seen = Attention(text, tuple(texts), replaced, other, looks)
    return _kept(plan, chosen, out, len(tokens), 1, attention=seen)


def _kept(
    plan: Plan, settings: Settings, out: str | Path | None, n_prompt: int, n_gen: int, **found: Any
) -> Record:
    """A record of what was found, in a results file of its own unless there is no folder."""
    path = None if out is None else new_results_file(plan, Path(out))
    run = run_without_steps(n_prompt, n_gen, **found)
    record = Record(path.stem if path else "", plan.machine, plan.model, settings, run)
    if path:
        with unless_empty(path):
            save(path, record)
    return record


def phase(
    name: str,
    steps: StepTrace,
    model: Model,
    settings: Settings,
    ceilings: Ceilings | None = None,
    devices: Sequence[Device] = (),
) -> Phase:
    """Arithmetic on the stamps of steps: the cost of a stop taken off, and what moves between devices."""
    placed = [(node, device_of(node.buffer, devices)) for node in steps.nodes]  # CUDA0, CPU
    views = grouped((one for one in placed if one[0].op in EMPTY), lambda one: one[1])
    stops_ns = {
        device: statistics.median(node.ns for node, _ in own) for device, own in views.items()
    }
    usual_gap_ns = statistics.median(node.gap_ns for node in steps.nodes)
    by_device = (
        {one.device or probing.CPU: one for one in probing.each_device(ceilings)}
        if ceilings
        else {}
    )
    n_threads = settings.n_threads if steps.n_tokens == 1 else settings.n_threads_batch
    parts = list[Part]()
    copied = set[str]()
    layer = None
    for node, device in placed:
        operation, layer = place_of(node, layer)
        if arriving := [
            one for one in node.sources if _COPIED.fullmatch(one.name) and one.name not in copied
        ]:
            copied |= {one.name for one in arriving}
            gap_s = (node.gap_ns - usual_gap_ns) / 1e9
            parts.append(
                Part(COPIES, layer, device, sum(one.n_bytes for one in arriving), None, gap_s)
            )
        if node.op not in EMPTY:
            threads_ns = steps.threads_ns if device == "CPU" and node.op not in ON_ONE_THREAD else 0
            taken_s = (node.ns - stops_ns.get(device, 0) - threads_ns) / 1e9
            (n_bytes, flops) = cost_of(node)
            least_s = _least_s(node, steps, model, by_device.get(device), n_threads)
            held_s = 0.0 if least_s is None else taken_s
            parts.append(Part(operation, layer, device, n_bytes, flops, taken_s, least_s, held_s))
    for operation, nanoseconds in ((OUTSIDE, steps.outside_ns), (SAMPLING, steps.choosing_ns)):
        parts.append(Part(operation, None, "CPU", None, None, nanoseconds / 1e9))
    return Phase(
        name,
        steps.n_tokens,
        steps.n_past,
        tuple(summed(parts, lambda part: (part.layer, part.operation, part.device))),
        {name: ns / 1e9 for name, ns in stops_ns.items()},
        steps.untraced_ns / 1e9,
        len(steps.nodes),
        steps.n_steps,
        steps.threads_ns / 1e9 or None,
    )


def summed(parts: Sequence[Part], key: Callable[[Part], object]) -> list[Part]:
    """The sums of parts with equal keys, in the order in which they first appear; None only where nothing is known."""
    made = []
    for alike in grouped(parts, key).values():
        sums: dict[str, Any] = {}
        for name in ("n_bytes", "flops", "seconds", "least_s", "held_s", "n"):
            values = [value for part in alike if (value := getattr(part, name)) is not None]
            sums[name] = sum(values) if values else None
        made.append(dataclasses.replace(alike[0], **sums))
    return made


def _weight(node: Node) -> tuple[int | None, str] | None:
    """The layer and the plain name of the weights that an operation uses: (3, "attn_q"); None without weights."""
    for one in node.sources:
        if match := re.fullmatch(
            r"(?:blk\.(\d+)\.)?([\w.]+)\.(?:weight|bias|scale)", one.name.split("#")[-2:][0]
        ):
            return int(match[1]) if match[1] else None, match[2]
    return None


def place_of(node: Node, before: int | None) -> tuple[str, int | None]:
    """What an operation is for, and its layer, by its weights, else by names or by `before`, the layer before."""
    (layer, weights) = _weight(node) or (None, "")
    name = node.result.name
    if layer is None:
        in_name = re.search(r"(?:-|_l)(\d+)\b", name)
        layer = int(in_name[1]) if in_name else before if re.match(r"node_\d+", name) else None
    if "norm" in weights:
        operation = "norm"
    elif node.op == "GET_ROWS":
        operation = "embedding" if weights == "token_embd" else "select rows"
    elif weights:
        experts = ", experts" if weights.endswith("_exps") else ""
        plain = re.sub(r"_(exps|shexp)$", "", weights)
        operation = OPERATIONS["weights"].get(plain, f"other weights ({weights})") + experts
    elif name.startswith(("kq", "v_cont")):
        operation = ATTENTION
    else:
        operation = OPERATIONS["ops"].get(node.op, f"other ({node.op.lower()})")
    return operation, layer


def cost_of(node: Node) -> tuple[float, float | None]:
    """Bytes that an operation reads, of rows and experts only those that are used; FLOPs of products and attention."""
    first = node.sources[0]
    result = node.result
    n_bytes = float(sum(one.n_bytes for one in node.sources))
    flops = None
    if node.op == "SET_ROWS":  # the others are the positions, and the cache, which is written
        n_bytes = sum(one.n_bytes for one in node.sources[:2])
    elif node.op == "GET_ROWS":
        n_bytes -= first.n_bytes * (1 - math.prod(result.ne[1:]) / math.prod(first.ne[1:]))
    elif node.op == "FLASH_ATTN_EXT":
        keys, values = node.sources[1:3]
        flops = 2.0 * math.prod(first.ne[1:]) * keys.ne[1] * (keys.ne[0] + values.ne[0])
    elif node.op in PRODUCTS:
        flops = 2.0 * first.ne[0] * math.prod(result.ne)
        if node.op == "MUL_MAT_ID":
            matrix = _matrix(node)
            n_used, n_tokens = node.sources[2].ne[:2]
            n_bytes -= first.n_bytes * (
                1 - shape.n_experts_read(matrix, n_used, n_tokens) / matrix.n_expert
            )
    return n_bytes, flops


def _matrix(node: Node) -> shape.Matrix:
    one = node.sources[0]
    part = shape.EXPERTS if node.op == "MUL_MAT_ID" else shape.FEED_FORWARD
    return shape.Matrix(part, one.type, one.ne[1], one.ne[0], 1, one.ne[2])


def _least_s(
    node: Node, steps: StepTrace, model: Model, ceilings: Ceilings | None, n_threads: int
) -> float | None:
    """Seconds of an operation at the ceiling of its kernel; of attention only the positions that tokens see."""
    if ceilings is None:
        return None
    with contextlib.suppress(LabError):  # this kernel was not probed
        if node.op == "FLASH_ATTN_EXT":
            query, keys, values = node.sources[:3]
            seen = cost.attended(model, steps.n_tokens, steps.n_past) or []
            if (
                len(seen) == 1 and query.ne[1] == steps.n_tokens
            ):  # layers are alike, and see the whole prompt
                asked = keys.type, steps.n_tokens, n_threads, seen[0].n_positions
                each_s = step_kernels.attention_s_per_flop(ceilings, model, seen[0].heads, *asked)
                return 2 * query.ne[2] * seen[0].n_pairs * (keys.ne[0] + values.ne[0]) * each_s
        elif node.op in PRODUCTS and _weight(node):
            n_tokens = node.result.ne[1 + PRODUCTS.index(node.op)]
            n_bytes = cost_of(node)[0] - sum(one.n_bytes for one in node.sources[1:])
            return n_bytes * step_kernels.product_s_per_byte(
                ceilings, model, _matrix(node), n_tokens, n_threads
            )
    return None


def family(part: Part) -> str:
    """The family of an operation."""
    is_feed_forward = part.operation.startswith(("feed-forward", "router"))
    return FEED_FORWARD if is_feed_forward else FAMILIES.get(part.operation, SMALL)


def chapters(records: Sequence[Record], context: Context) -> list[Section]:
    """Runs of `lab trace`: parts for prefill and decode, or for attention weights; the sentences are with decode."""
    parts = list[Section]()
    data = list[dict[str, Any]]()
    for record in records:
        model = text_setup.model_label(record)
        row = {"session": record.session, "model": record.model.name}
        if traced := record.run.trace:
            parts += [_section(record, phase, traced) for phase in traced.phases]
            phases = [
                {**dataclasses.asdict(one), "sum_s": one.sum_s, "off": one.off}
                for one in traced.phases
            ]
            data.append(
                {**row, "phases": phases, "ceilings_measured_at": traced.ceilings_measured_at}
            )
        elif seen := record.run.attention:
            parts.append(shown_attention(seen, model))
            data.append({**row, **dataclasses.asdict(seen), "differs": seen.differs})
    question = parts[0].question or "Where does the time of a token go?"
    return [
        Section(
            "One token's way",
            name="trace",
            question=question,
            parts=parts,
            data=lambda: {"traces": data},
        )
    ]


def _section(record: Record, phase: Phase, traced: TokenTrace) -> Section:
    """A phase by operation, and how far the sum is from the step without stops."""

    def known(amount: float | None, unit: float) -> str:
        return UNKNOWN if amount is None or unit <= 0 else digits(amount / unit)

    def share(part: Part) -> str:
        return (
            percent(part.seconds / phase.total_s)
            if part.seconds >= 0.001 * phase.total_s
            else "< 0.1 %"
        )

    several = len({part.device for part in phase.parts}) > 1
    columns: Columns = (
        ("operation", lambda part: part.operation),
        ("device", lambda part: part.device if several else ""),
        ("count", lambda part: str(part.n)),
        ("MB read", lambda part: known(part.n_bytes, 1e6)),
        ("MFLOP", lambda part: known(part.flops, 1e6)),
        ("ms", lambda part: digits(1e3 * part.seconds)),
        ("share", share),
        ("GB/s", lambda part: known(part.n_bytes, 1e9 * part.seconds)),
        ("GFLOP/s", lambda part: known(part.flops, 1e9 * part.seconds)),
        (
            "of\nceiling",
            lambda p: percent(p.least_s / p.held_s) if p.least_s and p.held_s > 0 else UNKNOWN,
        ),
    )
    costs = join_and(
        [f"{seconds(cost)} for each stop on {name}" for name, cost in phase.stops_s.items()]
    )
    threads = (
        f" and {seconds(phase.threads_s)} for the start and end of the CPU's threads"
        if phase.threads_s
        else ""
    )
    off = (
        f"{phase.name.capitalize()}: {phase.n_stops:,} operations, {f'less {costs}{threads}, ' if costs else ''}"
        f"add up to {seconds(phase.sum_s)}, {percent(abs(phase.off))} {'more' if phase.off >= 0 else 'less'} than a "
        f"step without stops ({seconds(phase.untraced_s)})"
    )
    is_near = abs(phase.off) <= OFF
    is_last = phase is traced.decode
    notes = [f"{off}."] * is_near
    pictures = list[Picture]()
    if is_last:
        caption = "Above the layers, below them their operations, as wide as they take time."
        draws = partial(_draw, subject=text_setup.where([record]), traced=traced)
        pictures = [Picture("trace", caption, draws, (10, 7))]
        notes += ["The ceilings of these kernels are not known: lab ceilings"] * (
            not traced.ceilings_measured_at
        )
    doubt = f"{off}: too far for the shares to be right. Trace again while no other program runs."
    return Section(
        f"{phase.name.capitalize()} of {plural(phase.n_tokens, 'token')} by {text_setup.model_label(record)}",
        f"medians of {plural(phase.n_steps, 'step')}"
        + (f" after {phase.n_past:,} tokens" if phase.n_past else ""),
        name=phase.name,
        **tabled(columns, summed(phase.parts, lambda part: (part.operation, part.device))),
        notes=notes,
        warnings=[doubt] * (not is_near),
        sentences=sentences(traced) if is_last else (),
        pictures=pictures,
    )


def sentences(traced: TokenTrace) -> list[str]:
    """Where the time of a decode step goes, and what prefill does with its time."""
    prefill, decode = traced.phases
    taken = dict[str, float]()
    words = list[str]()
    for part in decode.parts:
        taken[family(part)] = taken.get(family(part), 0.0) + max(0.0, part.seconds)

    def share(name: str) -> str:
        return percent(taken.get(name, 0.0) / decode.total_s)

    words.append(
        f"Where do the {seconds(decode.total_s)} of a decode step after {plural(decode.n_past, 'token')} go? The "
        f"feed-forward takes {share(FEED_FORWARD)}, the matrices of Q, K, V and the attention's output "
        f"{share(PROJECTIONS)}, and the last matrix, which rates every token of the vocabulary, "
        f"{share(OUTPUT_MATRIX)}. Attention itself (rotation, reading and writing the cache) takes "
        f"{share('attention and cache')}, norms, activations and sums {share(SMALL)}, and what lies outside the "
        f"operations (inputs, sampling) {share('outside and sampling')}."
    )
    held = [part for part in decode.parts if part.least_s is not None]
    least_s = sum(part.least_s or 0 for part in held)
    held_s = sum(part.held_s for part in held)
    if 0 < held_s < least_s:
        words.append(f"Operations were faster than their ceiling, so {TOO_LOW}")
    elif least_s:
        words.append(
            f"At the ceilings of their kernels, {plural(sum(part.n for part in held), 'operation')} of the step would "
            f"take {seconds(least_s)} instead of {seconds(held_s)}."
        )
    flops, more = (sum(part.flops or 0 for part in phase.parts) for phase in (decode, prefill))
    if flops and more:
        longer = prefill.untraced_s / decode.untraced_s
        why = ": each matrix it reads serves all its tokens" if longer < more / flops else ""
        words.append(
            f"Prefill computes {digits(more / flops)} times the FLOPs of the decode step in {digits(longer)} times its "
            f"time{why}."
        )
    return words


def _draw(figure: Figure, subject: str, traced: TokenTrace) -> None:
    """Draws prefill, decode and a layer of decode: layers, below them their operations, as wide as they take time."""
    rows = [
        (f"{one.name} of {plural(one.n_tokens, 'token')}", list(one.parts)) for one in traced.phases
    ]
    if by_layer := grouped(traced.decode.parts, lambda part: part.layer):
        middle = sorted(by_layer.values(), key=lambda parts: sum(part.seconds for part in parts))[
            len(by_layer) // 2
        ]
        rows.append((f"layer {middle[0].layer} of that decode step", middle))
    axes = list(figure.subplots(len(rows), 1, squeeze=False)[:, 0])
    colours = dict(
        zip((FEED_FORWARD, *dict.fromkeys(FAMILIES.values()), SMALL), COLOURS, strict=False)
    )
    for ax, (title, parts) in zip(axes, rows, strict=True):
        at = 0.0
        total_ms = 1e3 * sum(max(0.0, part.seconds) for part in parts)
        in_order = summed(parts, lambda part: (part.layer, part.operation))
        is_alone = len({part.layer for part in parts}) == 1
        for number, (layer, own) in enumerate(
            itertools.groupby(in_order, key=lambda part: part.layer)
        ):
            fill, ink, start = (GRID, GUIDE, at) if number % 2 else (GUIDE, PAPER, at)
            for part in own:
                ms = 1e3 * max(0.0, part.seconds)
                ax.barh(
                    [0.35],
                    [ms],
                    left=at,
                    height=0.7,
                    color=colours[family(part)],
                    ec=PAPER,
                    lw=0.6 * is_alone,
                )
                if ms > LETTER * len(part.operation) * total_ms:
                    ax.text(
                        at + ms / 2,
                        0.35,
                        part.operation,
                        ha="center",
                        va="center",
                        fontsize=8,
                        color=PAPER,
                    )
                at += ms
            ax.barh([1], [at - start], left=start, color=fill, height=0.5, ec=PAPER, lw=0.4)
            if layer is not None and (layer % 5 == 0 or is_alone):
                ax.text(
                    (start + at) / 2, 1, str(layer), ha="center", va="center", fontsize=7, color=ink
                )
        ax.set_yticks([0.35, 1], ["operations", "layers"])
        ax.set(ylim=(0, 1.3), xlim=(0, at), xlabel="ms")
        ax.set_title(title, fontsize=9)
    for name in dict.fromkeys(family(part) for phase in traced.phases for part in phase.parts):
        axes[-1].barh([0], [0], color=colours[name], label=name)
    doubt = (
        " (! the operations do not add up)"
        if any(abs(phase.off) > OFF for phase in traced.phases)
        else ""
    )
    finish(
        axes,
        f"One token's way: layers above, their operations below\n{subject}{doubt}",
        is_apart=True,
    )
    for ax in axes:
        ax.grid(False)


def shown_attention(seen: Attention, model: str = "") -> Section:
    """What the last token attends to in each layer (of a model), and what K and V depend on."""
    of_model = f" in {model}" if model else ""
    looks = seen.looks
    layers = list(range(len(seen.looks.decode)))
    most = [row.index(max(row)) for row in looks.decode]
    columns: Columns = (
        ("layer", str),
        ("most on", lambda layer: repr(seen.tokens[most[layer]])),
        ("weight", lambda layer: percent(looks.decode[layer][most[layer]])),
        ("on the\nfirst", lambda layer: percent(looks.decode[layer][0])),
        ("on\nitself", lambda layer: percent(looks.decode[layer][-1])),
        ("K of later\nmoves by", lambda layer: percent(looks.changes[layer][0])),
        ("V of later\nmoves by", lambda layer: percent(looks.changes[layer][1])),
    )
    same = ", ".join(str(layer) for layer in layers if not any(looks.changes[layer]))
    differs = f"at most {percent(seen.differs)}" if seen.differs >= 0.001 else "less than 0.1 %"
    words = [
        "In prefill every token attends to itself and to those before it: a triangle. In decode only the new token "
        f"asks: one row, which differs from the last row of prefill by {differs}. It needs the "
        "keys and values of earlier tokens, and none of their queries: so the cache has keys and values.",
        f"With {seen.tokens[seen.replaced]!r} replaced by {seen.replacement!r}, K and V of the later tokens stay "
        f"exactly the same in {f'layer {same}' if same else 'no layer'}: elsewhere they depend on the tokens "
        "before, so a cached prefix must match from its first token on.",
    ]
    size = (11, 1 + 1.9 * math.ceil(len(layers) / N_COLUMNS))
    draws = partial(_weights, seen=seen, of_model=of_model)
    return Section(
        f"Attention of {seen.tokens[-1]!r}, the last of {plural(len(seen.tokens), 'token')}{of_model}",
        "means over the heads of each layer",
        name="attention",
        question=f"What does each token of {seen.text!r} attend to?",
        **tabled(columns, layers),
        sentences=words,
        pictures=[Picture("attention", "Attention weights, means over heads", draws, size)],
    )


def _weights(figure: Figure, seen: Attention, of_model: str) -> None:
    """Draws a matrix for each layer: the tokens that ask from top to bottom, those that they attend to across."""
    axes = grid(figure, len(seen.looks.prefill), N_COLUMNS, sharex=True, sharey=True)
    texts = [text.replace("\n", "\\n") for text in seen.tokens]
    middles = [i + 0.5 for i in range(len(texts))]
    size = 7 if len(texts) <= 10 else 4
    for layer, (ax, rows) in enumerate(zip(axes, seen.looks.prefill, strict=True)):
        until_now = [
            [w if i <= asks else math.nan for i, w in enumerate(row)]
            for asks, row in enumerate(rows)
        ]
        image = ax.pcolormesh(
            until_now, vmin=0, vmax=1, cmap="viridis"
        )  # shapes: a page shows no embedded images
        ax.set_title(f"layer {layer}", fontsize=8)
        ax.set_xticks(middles, texts, rotation=90, fontsize=size)
        ax.set_yticks(middles, texts, fontsize=size)
        ax.set_aspect("equal")
    axes[0].invert_yaxis()  # shared by all
    bar = figure.colorbar(image, ax=axes, shrink=0.3, label="weight")
    if bar.solids is not None:
        bar.solids.set_rasterized(False)
    figure.suptitle(
        f"What each token attends to{of_model} (the last row is that of decode)", fontsize=11
    )


@click.command(
    "trace", cls=Command, first=("model", "prompt-len", "gen", "repeat", "attention", "threads")
)
@with_options(
    click.option(
        "--prompt-len",
        "-p",
        type=TOKENS,
        default=200,
        show_default=True,
        help="Tokens of the prompt.",
    ),
    click.option(
        "--gen",
        "-n",
        default=8,
        show_default=True,
        help="Decode steps to trace after each prefill.",
    ),
    click.option(
        "--repeat",
        "-r",
        default=5,
        show_default=True,
        help="How often to trace prefill and these steps.",
    ),
    click.option(
        "--attention",
        "text",
        metavar="TEXT",
        help="Show what each token of this text attends to, layer by layer, instead.",
    ),
    *SETTINGS,
    click.option(
        "--ceilings",
        "results",
        default=RESULTS,
        show_default=True,
        help="Folder with the ceilings.",
    ),
    *OUTPUT,
)
def command(text: str | None, **asked: Any) -> None:
    """Show where the time of one token goes, operation by operation.

    \b
      lab trace                             # a prompt of 200 tokens
      lab trace -p 1000 -m llama-3.2-3b
      lab trace --attention "The cat sat on the mat"

    Follows a prefill and decode steps through llama.cpp. For each operation (norm, Q, K, V, attention, feed-forward,
    the last matrix, sampling) prints the bytes read, FLOPs, time, and the share of the kernel's ceiling (lab ceilings).

    The engine stops after each operation. Views, which compute nothing, show what a stop costs; that is taken off. The
    same steps also run without stops, and the output says how far the sum is from them. Keep the machine quiet.
    With several devices the copies between them are an operation of their own. The picture shows all layers. The
    results file keeps all figures, for lab show and lab report.
    """
    from lab.show import console

    unused = {
        "prompt_len": "--prompt-len",
        "gen": "--gen",
        "repeat": "--repeat",
        "results": "--ceilings",
    }
    output = Output.taken_from(asked)
    err = console.console(stderr=True)
    if text is not None:
        if found := join_and(
            [unused[name] for name in sorted(unused) if name in given(click.get_current_context())]
        ):
            what = f"--attention looks at its own text once and does not use {found}."
            raise LabError(what, f"Leave {found} out, or trace times without --attention.")
        asked = {name: value for name, value in asked.items() if name not in unused} | {
            "text": text
        }
    with console.transfer(err) as watch:
        record = (trace if text is None else look)(**asked, out=output.folder, watch=watch)
    for line in text_setup.describe(record.machine, record.model):
        err.print(line)
    output.finish([record], output.folder / f"{record.session}.jsonl")


KINDS = (
    Kind(
        "trace",
        lambda one: isinstance(one, Record) and one.run.is_traced and not one.run.quality,
        chapters,
    ),
)
