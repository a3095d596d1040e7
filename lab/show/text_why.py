"""Ceilings, explanations and predictions as text."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from lab.analysis import wording
from lab.core import shown
from lab.core.lists import grouped
from lab.core.record import Ceilings, Model, Rate, Record
from lab.process.wire import ATTENTION, DOWNLOAD, PLAIN_ATTENTION, UPLOAD
from lab.runner.plan import join
from lab.show.console import grid_of
from lab.show.plot_why import FEW
from lab.why import advice, plain_read, probing, roofline, where
from lab.why.advice import BatchLever, ExperimentLever, Lever, PrefixLever, SpeculationLever
from lab.why.datasheet import Device
from lab.why.prediction import Answer, Prediction
from lab.why.roofline import Explained
from lab.why.step_kernels import Kernels


def print_ceilings(ceilings: Ceilings, out: Console) -> None:
    """Prints a table of the kernels' best rates, and where the roofline bends."""
    days = probing.age_days(ceilings)
    age = "today" if days < 1 else f"{days:.0f} days ago"
    label = where.device_label(ceilings.machine, where.measured_on(ceilings))
    out.print(f"\nCeilings of {label}, measured {ceilings.measured_at} ({age})")
    grid = grid_of("kernel", "type", "shape", "buffer", "tokens", "threads", "GB/s", "GFLOP/s")
    for rate in sorted(ceilings.rates, key=lambda rate: (rate.op, rate.type, -rate.n_threads, *_size(rate))):
        flops = wording.digits(probing.gflops(rate)) if rate.flops else "-"
        counts = (str(rate.n_tokens), "-" if ceilings.on_gpu else str(rate.n_threads))
        grid.add_row(rate.op, rate.type, _shape(rate), rate.buffer, *counts, wording.digits(probing.gbps(rate)), flops)
    out.print(grid)
    best = roofline.roof(ceilings)
    out.print(
        f"Best: {wording.digits(best.gbps)} GB/s and {wording.digits(best.gflops)} GFLOP/s: work of more than "
        f"{wording.digits(best.ridge)} FLOPs per byte is limited by arithmetic, other work by memory traffic."
    )
    for sentence in of_copies(ceilings):
        out.print(sentence)
    for other in ceilings.others or ():
        print_ceilings(other, out)


def of_copies(ceilings: Ceilings) -> list[str]:
    """Sentences on copies to and from a device, and on what is not known of one behind a server."""
    name, sentences, words = where.measured_on(ceilings), list[str](), list[str]()
    for op, direction in ((UPLOAD, "To"), (DOWNLOAD, "from")):
        copies = sorted((rate for rate in ceilings.rates if rate.op == op), key=lambda rate: rate.n_bytes)
        if copies:
            of_few = f"{copies[0].n_bytes:,} bytes in {wording.seconds(min(copies[0].times_ns) / 1e9)}"
            subject = where.label(name) if direction == "To" else "it"
            words.append(f"{direction} {subject}: {wording.digits(probing.gbps(copies[-1]))} GB/s, {of_few}")
    if words:
        sentences.append(f"{'; '.join(words)}.")
    device = where.device(ceilings.machine, name)
    if device is not None and where.is_remote(device):
        most = max(rate.n_bytes for rate in ceilings.rates) / 1e6
        sentences.append(
            f"What is behind a server is not known, nor its caches: passes went through up to {most:,.0f} MB. Where a "
            "cache there holds as much, memory is slower than this says."
        )
    return sentences


def _size(rate: Rate) -> tuple[int, ...]:
    return rate.rows, rate.columns, rate.n_tokens, rate.n_positions or 0


def _shape(rate: Rate) -> str:
    """The shape of a probe: a matrix, its experts, or heads and how far they look back."""
    if rate.op in (ATTENTION, PLAIN_ATTENTION):
        positions = f" over {rate.n_positions:,}" if rate.n_positions else ""
        return f"{rate.rows} heads of {rate.columns}{positions}"
    experts = f", {rate.n_expert_used} of {rate.n_expert}" if rate.n_expert else ""
    if rate.op in (UPLOAD, DOWNLOAD):
        return f"{rate.n_bytes:,} bytes"
    return "-" if rate.op == plain_read.READ else f"{rate.rows} x {rate.columns}{experts}"


def print_explained(
    label: str,
    rows: Sequence[Explained],
    best: roofline.Roof,
    ceilings: Ceilings,
    levers: Sequence[Lever | ExperimentLever],
    out: Console,
) -> None:
    """Prints each phase's time, FLOPs, bytes, share of its ceiling and limit, the roof that judged it; then levers."""
    out.print()
    out.print(Text(label, style="bold"))
    out.print(
        f"Roof: {wording.digits(best.gflops)} GFLOP/s, {wording.digits(best.gbps)} GB/s, ridge at "
        f"{wording.digits(best.ridge)} FLOPs per byte (ceilings of {ceilings.measured_at})"
    )
    for sentence in probing.doubt_words(ceilings):
        out.print(Text(f"{shown.MARK} ", style="yellow") + Text(sentence))
    grid = grid_of(
        "prompt\ntokens",
        "gen",
        "phase",
        "measured\nms",
        "GFLOP",
        "MB",
        "FLOPs\nper byte",
        "GFLOP/s",
        "GB/s",
        "% of\nceiling",
        "limit",
    )
    for row in rows:
        figures = (row.flops / 1e9, row.n_bytes / 1e6, row.intensity, row.gflops, row.gbps)
        measured = f"{wording.digits(1e3 * row.measured_s)}{shown.mark(row.doubts)}"
        of_ceiling = ">100" if shown.ABOVE in row.doubts else f"{100 * row.of_ceiling:.0f}"
        limit = row.limit if shown.is_firm(row.doubts) else "not sure"
        lengths = f"{row.n_prompt:,}", f"{row.n_gen:,}"
        grid.add_row(*lengths, row.phase, measured, *map(wording.digits, figures), of_ceiling, limit)
    out.print(grid)
    for sentence in [*map(where_it_went, rows), *verdicts(rows), *map(advice_of, levers)]:
        out.print(sentence)


def where_it_went(row: Explained) -> str:
    """A sentence with the parts of a phase's time, in percent; of several devices the parts of each."""
    shares = _kinds(row.kernels)
    if row.shares:
        shares = [
            (f"{share.device} {name}", part) for share in row.shares for name, part in _kinds(share.kernels) if part
        ]
        shares += [] if row.between_s is None else [("between devices", row.between_s)]
    shares.append(("rest", max(0.0, row.measured_s - row.least_s)))
    percents = ", ".join(f"{name} {100 * part / row.measured_s:.0f} %" for name, part in shares)
    if row.overlaps:
        percents += " (the devices work at the same time)"
    if shown.ABOVE in row.doubts:
        percents = f"less time than its kernels' least; {TOO_LOW}"
    of_doubt = ", ".join(kind for kind in row.doubts if kind != shown.FEW)
    outside = f"choosing tokens {wording.seconds(row.choosing_s)}, harness {wording.seconds(row.harness_s)}"
    unit = " a token" if row.phase == "decode" else ""
    doubt = f" ({of_doubt})" if of_doubt else ""
    return f"{row.phase} at {row.n_prompt:,}{doubt}: {percents}; outside of it {outside}{unit}."


def _kinds(kernels: Kernels) -> list[tuple[str, float]]:
    return [("layers", kernels.layers_s), ("output matrix", kernels.head_s), ("attention", kernels.attention_s)]


def caveat(record: Record) -> str | None:
    """A sentence where ceilings do not fit a record's settings; else None."""
    settings = record.settings
    if settings.split_mode == "tensor":
        return "All devices work at each layer at once; these shares are counted as if each had whole layers."
    if settings.override_tensor:
        return "Tensors that --override-tensor moved are counted where their layer lies."
    if settings.type_k != settings.type_v:
        return "The ceiling of attention is that of a cache of one type."
    return None


WHY = {
    roofline.ARITHMETIC: "arithmetic (how fast the machine multiplies)",
    roofline.TRAFFIC: "memory traffic (how fast the machine reads)",
    roofline.ATTENTION: "attention (looking back at the tokens before took most of the time; what changes that is "
    "flash attention on or off, and the type of the KV cache)",
    roofline.KERNEL: "the kernel of its quantization (other kernels here read and multiply faster)",
    roofline.OVERHEAD: "overhead (most of the time was in none of the large kernels)",
}


def verdicts(rows: Sequence[Explained]) -> list[str]:
    """Sentences on what limited each phase, and what share of its ceiling it reached; one for each limit."""
    by_limit = grouped([row for row in rows if shown.is_firm(row.doubts)], lambda row: (row.phase, row.limit))
    sentences = []
    for (phase, limit), alike in by_limit.items():
        what = "Reading a prompt of" if phase == "prefill" else "Writing after a prompt of"
        lengths = join(sorted({row.n_prompt for row in alike}))
        shares = ", ".join(f"{100 * row.of_ceiling:.0f} %" for row in alike)
        if len(alike) > FEW:
            ends = sorted(row.of_ceiling for row in alike)
            lengths = f"{alike[0].n_prompt:,} to {alike[-1].n_prompt:,}"
            shares = f"{100 * ends[0]:.0f} to {100 * ends[-1]:.0f} %"
        sentences.append(f"{what} {lengths} tokens was limited by {WHY[limit]}: {shares} of what its kernels can do.")
    if disturbed := [row for row in rows if shown.DISTURBED in row.doubts]:
        phases = " and ".join(dict.fromkeys(row.phase for row in disturbed))
        lengths = join(sorted({row.n_prompt for row in disturbed}))
        sentences.append(
            f"The runs of {lengths} prompt tokens were disturbed: what limited {phases}, and what would make it "
            "faster, cannot be told from them. Measure again while no other program runs."
        )
    if any(shown.ABOVE in row.doubts for row in rows):
        sentences.append(f"Nothing is faster than its ceiling, so predicted gains are not sure: {TOO_LOW}.")
    return sentences


TOO_LOW = "the ceiling was measured too low; measure again: lab ceilings --again"


def advised(rows: Sequence[Explained], records: Sequence[Record], ceilings: Ceilings) -> list[str]:
    """Sentences on all levers of one setup: other settings first, then the experiments."""
    of_settings = advice.levers(rows, records[0], ceilings)
    return [advice_of(lever) for lever in (*of_settings, *advice.experiments(rows, records, ceilings))]


def advice_of(lever: Lever | ExperimentLever) -> str:
    """A sentence on a change: the gain that the ceilings predict, and the command to try it."""
    how = f" Try: {lever.command}" if lever.command else ""
    if isinstance(lever, Lever) and not lever.is_promised:
        return f"Worth a trial: {lever.change}. Attention on it was not probed, so no gain is predicted.{how}"
    return f"Predicted: {_gains_of(lever)}.{how}"


def _gains_of(lever: Lever | ExperimentLever) -> str:
    if isinstance(lever, BatchLever):
        return (
            f"{lever.n_seq} sequences decoded together: {lever.total_gain:.2f}x the tokens per second in all, each "
            f"{lever.user_share:.2f}x, after prompts of {lever.n_prompt:,}"
        )
    if isinstance(lever, PrefixLever):
        saved, of = wording.seconds(lever.saved_s), wording.seconds(lever.ttft_s)
        return (
            f"{lever.n_prefix:,} of {lever.n_prefix + lever.n_suffix:,} prompt tokens cached: first token "
            f"{lever.gain:.2f}x as fast ({saved} of {of} saved)"
        )
    if isinstance(lever, SpeculationLever):
        return _gain_of_guesses(lever)
    gains = [
        f"{phase} {gain:.2f}x as fast"
        for phase, gain in (
            (f"prefill of {lever.prefill_at:,} tokens", lever.prefill_gain),
            (f"decode after {lever.decode_at:,}", lever.decode_gain),
        )
        if gain
    ]
    return f"{lever.change}: {', '.join(gains)}"


def _gain_of_guesses(lever: SpeculationLever) -> str:
    """What guessing ahead gains depends on how many of the guesses are right, which the ceilings do not say."""
    ahead = f"{lever.n_draft} token{'s' * (lever.n_draft > 1)} guessed ahead"
    best = "" if lever.best_n_draft == lever.n_draft else f"{lever.best_n_draft} ahead are "
    return (
        f"{ahead}: faster only if more than {100 * lever.least_acceptance:.0f} % of the guesses are right; with "
        f"{100 * lever.acceptance:.0f} % right, {best}{lever.gain:.2f}x as fast (if guessing takes no time)"
    )


def print_predictions(answer: Answer, out: Console) -> None:
    """Prints for each length the limits, the expected ranges and the memory, then what they rest on."""
    model = answer.model
    out.print(Text(f"{model.name} {model.quantization or ''} on {answer.where}", style="bold"))
    grid = grid_of(
        "prompt\ntokens",
        "prefill s\nlimit",
        "expected",
        "TPOT ms\nlimit",
        "expected",
        "tokens/s",
        "E2E s",
        "memory\nGB",
        "note",
    )
    for row in answer.rows:
        tpot_ms = 1e3 * row.tpot_s[0], 1e3 * row.tpot_s[1]
        times = (
            "-" if row.prefill_limit_s is None else wording.digits(row.prefill_limit_s),
            _span(row.prefill_s),
            wording.digits(1e3 * row.tpot_limit_s),
            _span(tpot_ms),
            _span((1e3 / tpot_ms[1], 1e3 / tpot_ms[0])),
            _span(row.e2e_s),
        )
        note = f"does not fit: {row.misfit}" if row.misfit else ", ".join(row.doubts)
        needed = wording.digits(answer.needed[row.n_prompt] / 1e9)
        grid.add_row(f"{row.n_prompt:,}", *(["-"] * len(times) if row.misfit else times), needed, note)
    out.print(grid)
    for row in answer.rows:
        for sentence in row.beyond:
            out.print(f"{row.n_prompt:,} tokens: {sentence}.")
    out.print(answer.basis)


def print_devices(
    model: Model, n_prompt: int, n_gen: int, rows: Sequence[tuple[Device, Prediction, bool | None]], out: Console
) -> None:
    """Prints what the same request takes on several devices, one row per device."""
    label = f"{model.name} {model.quantization or ''}, {n_prompt:,} tokens in and {n_gen:,} out"
    out.print(Text(label, style="bold"))
    grid = grid_of("name", "GB/s", "TFLOP/s", "prefill s", "tokens/s", "E2E s", "note")
    for device, row, fits in rows:
        times = _span(row.prefill_s), _span((1 / row.tpot_s[1], 1 / row.tpot_s[0])), _span(row.e2e_s)
        tflops = "-" if device.tflops is None else wording.digits(device.tflops)
        shown_times = ["-"] * len(times) if row.misfit else times
        grid.add_row(device.name, wording.digits(device.gbps), tflops, *shown_times, _note(device, row, fits))
    out.print(grid)


def _note(device: Device, row: Prediction, fits: bool | None) -> str:
    fitting = "" if fits else "memory not known" if fits is None else row.misfit
    doubts = ", ".join(kind for kind in row.doubts if kind != shown.ASSUMED)  # that of all, which stands below
    return "; ".join(filter(None, [fitting, row.rests_on and f"from {row.rests_on}", doubts]))


def _span(ends: tuple[float, float]) -> str:
    return "-" if ends[0] != ends[0] else f"{wording.digits(ends[0])}-{wording.digits(ends[1])}"
