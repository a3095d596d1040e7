"""Figures in the output of other programs: one table of formats, and what each figure counts.

A decode rate may divide by the prompt's time too, may count the first token without its time, or may be an average
over a window. Each entry of FORMATS says how a format is recognized and makes a `Setup` of every figure. What a text
does not say stays None. Numbers that contradict each other are refused.
"""

from __future__ import annotations

import codecs
import csv
import dataclasses
import io
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.core.record import Record
from lab.errors import LabError, printable
from lab.features.exchange.llama_bench_format import HEADS, STDIN

DECODE, PREFILL, WHOLE, WINDOW, MIXED, UNKNOWN = "decode", "prefill", "whole answer", "window", "mixed", "unknown"
"""What a rate counts: generated tokens over the time of decode, prompt tokens over that of prefill, generated tokens
over the time of both, an average over a logging window, prompt and generated tokens in one, or unknown."""

MOST_BYTES, MOST_LINES, MOST_SETUPS = 4_000_000, 50_000, 1_000
AGREE = 0.02
"""Share by which a printed rate may differ from the one computed from its tokens and time, besides rounding."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One figure, what it counts, and what is known of its setup. None: unknown.

    `n_steps` are the decode steps within `decode_s`; a rate that counts `n_gen` tokens over fewer steps looks faster.
    `settings` are keywords of AskedSettings. `records` are those of the lab. `spread` is the standard deviation of the
    figure's logarithm, `between` that between sessions, and `between_source` says how that is known.
    """

    source: str
    tps: float
    counts: str
    n_prompt: int | None = None  # processed
    n_gen: int | None = None
    n_depth: int | None = None  # in the context before the prompt
    prefill_s: float | None = None
    decode_s: float | None = None
    n_steps: int | None = None
    total_s: float | None = None
    model: str | None = None
    quantization: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    spread: float | None = None
    between: float | None = None
    between_source: str = ""
    n_runs: int | None = None
    compute_tps: float | None = None  # of decode steps without sampling, where that is known
    records: tuple[Record, ...] = ()
    about: str = ""

    @property
    def is_prefill(self) -> bool:
        return self.counts == PREFILL

    @property
    def label(self) -> str:
        """What the figure counts, in words."""
        n_gen = "unknown" if self.n_gen is None else f"{self.n_gen:,}"
        before = None if self.n_prompt is None and self.n_depth is None else (self.n_prompt or 0) + (self.n_depth or 0)
        if self.is_prefill:
            what = "prefill" if self.n_prompt is None else f"prefill of {self.n_prompt:,} tokens"
            what += f" after {self.n_depth:,}" if self.n_depth else ""
        else:
            what = {WHOLE: "whole answer: ", WINDOW: "average over a window, "}.get(self.counts, "")
            what += "tokens" if self.n_gen is None else f"{n_gen} tokens"
            what += "" if before is None else f" after {before:,}"
        is_named = self.quantization and self.quantization in (self.model or "")
        model = " ".join(filter(None, (self.model, None if is_named else self.quantization)))
        return printable(", ".join(filter(None, (self.source, model, self.about, what))))


def read(name: str) -> list[Setup]:
    """The figures of a file, of stdin (`-`), or in words such as `35 tokens/s`. LabError where none is recognized."""
    if bare := _bare(name):
        return bare
    path = Path(name)
    try:
        if name != STDIN and path.is_dir():
            raise LabError(f"{name} is a folder.", "Name a file.")
        if name == STDIN:
            data = sys.stdin.buffer.read(MOST_BYTES + 1)
        else:
            with path.open("rb") as file:
                data = file.read(MOST_BYTES + 1)
        text = data.decode(
            "utf-16" if data[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig", "replace"
        )
    except (OSError, ValueError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else problem
        raise LabError(
            f"{name!r} is neither a readable file nor a figure: {reason}.",
            'Give a file, - for stdin, or "35 tokens/s".',
        ) from None
    what = "The pasted text" if name == STDIN else name
    if len(data) > MOST_BYTES:
        raise LabError(f"{what} has over {MOST_BYTES:,} bytes.", "Give only the lines with the figures.")
    return parse(text, what)


def parse(text: str, name: str = "The text") -> list[Setup]:
    """The figures of a text. LabError if no format of FORMATS is recognized, or the figures contradict each other."""
    if len(text) > MOST_BYTES or text.count("\n") > MOST_LINES:
        raise LabError(
            f"{name} has over {MOST_LINES:,} lines or {MOST_BYTES:,} bytes.", "Give the lines with the figures."
        )
    for old, new in (("\\_", "_"), ("\u00a0", " "), ("**", ""), ("\u00c2\u00b1", "\u00b1"), ("\r\n", "\n"), ("`", "")):
        text = text.replace(old, new)
    problems = list[str]()
    for form in FORMATS:
        if not re.search(form.sign, text):
            continue
        try:
            found = [one for one in form.parse(text) if 0 < one.tps < 1e9][:MOST_SETUPS]
        except (ArithmeticError, ValueError) as problem:
            problems.append(f"{form.name}: {problem}")
            continue
        if found:
            return found
        problems.append(f"{form.name}: its figures are incomplete")
    why = f" It looks like {'; '.join(problems[:3])}." if problems else ""
    raise LabError(f"{name} has no figure that the lab can read.{printable(why)}", f"Known formats: {names()}.")


def names() -> str:
    """The names of all formats."""
    return ", ".join(form.name for form in FORMATS)


def number(text: str) -> float:
    """A number with a decimal point or comma. ValueError where a comma could be either."""
    text = text.strip()
    if re.fullmatch(r"\d{1,3}(,\d{3})+\.\d+", text):
        return float(text.replace(",", ""))
    if re.fullmatch(r"\d+,\d{3}", text) and not text.startswith("0"):
        raise ValueError(f"{text} could be a decimal or thousands")
    if re.fullmatch(r"\d+,\d+", text):
        return float(text.replace(",", "."))
    if not re.fullmatch(r"\d+(\.\d+)?([eE][+-]?\d{1,2})?", text):
        raise ValueError(f"{text[:30]!r} is not a number")
    return float(text)


def count(text: str) -> int:
    """A whole number, with or without commas. ValueError for another text."""
    if not re.fullmatch(r"\d{1,12}|\d{1,3}(,\d{3}){1,3}", text.strip()):
        raise ValueError(f"{text[:30]!r} is not a number of tokens")
    return int(text.replace(",", ""))


def _agree(printed: float, computed: float, what: str, rounding: float = 0.0) -> float:
    """The printed rate. ValueError if it differs from the computed one by more than rounding explains."""
    if abs(printed - computed) > AGREE * computed + rounding:
        raise ValueError(f"{what} is {printed:g}, but its tokens and time give {computed:.4g}")
    return printed


def _bare(text: str) -> list[Setup]:
    """A figure in words, such as 35 tokens/s."""
    match = re.fullmatch(
        r"\s*~?\s*([\d.,]{1,20})\s*(?:tokens?|tok|t)\s*(?:/|per|p)\s*s(?:ec(?:ond)?)?\.?\s*", text, re.I
    )
    match = match or re.fullmatch(r"\s*([\d.,]{1,20})\s*tps\s*", text, re.I)
    if not match:
        return []
    try:
        return [Setup(source="a bare figure", tps=number(match[1]), counts=UNKNOWN)]
    except ValueError as problem:
        raise LabError(f"{text.strip()!r} is ambiguous: {problem}.", "Write it with a decimal point.") from None


NUMBER = r"(\d[\d.,]*\d|\d)"
GO = r"((?:\d+(?:\.\d+)?(?:h|ms|m|\u00b5s|\u03bcs|us|ns|s))+)(?![\w.])"


def _go_seconds(text: str) -> float:
    """The seconds of a duration as Go prints it, such as 3m24.6s."""
    units = {"h": 3600, "m": 60, "s": 1, "ms": 1e-3, "\u00b5s": 1e-6, "\u03bcs": 1e-6, "us": 1e-6, "ns": 1e-9}
    return sum(
        float(n) * units[unit] for n, unit in re.findall(r"(\d+(?:\.\d+)?)(h|ms|m|\u00b5s|\u03bcs|us|ns|s)", text)
    )


def _ollama(text: str) -> Iterable[Setup]:
    parts = re.split(r"(?=total duration:)", text)
    for part in [one for one in parts if "eval" in one]:

        def value(label: str, pattern: str, part: str = part) -> str | None:
            own = "" if label.startswith("prompt") else "(?<!prompt )"
            match = re.search(rf"{own}\b{label}:\s*{pattern}", part, re.I)
            return match[1] if match else None

        n, s, rate = (
            value("eval count", rf"{NUMBER}\s*token"),
            value("eval duration", GO),
            value("eval rate", f"{NUMBER} *tok"),
        )
        n_in, s_in = value("prompt eval count", rf"{NUMBER}\s*token"), value("prompt eval duration", GO)
        rate_in = value("prompt eval rate", f"{NUMBER} *tok")
        yield from _two(
            "Ollama",
            (n_in and count(n_in), s_in and _go_seconds(s_in), rate_in and number(rate_in)),
            (n and count(n), s and _go_seconds(s), rate and number(rate)),
        )


def _two(
    source: str, prefill: Sequence[Any], decode: Sequence[Any], n_depth: int | None = None, **more: Any
) -> Iterable[Setup]:
    """The decode and prefill figures of an answer, each from tokens, seconds and printed rate, falsy if unknown."""
    (n_in, s_in, _), (n, s, _) = ([one or None for one in each] for each in (prefill, decode))
    about = {"n_prompt": n_in, "n_gen": n, "prefill_s": s_in, "decode_s": s, "n_depth": n_depth, **more}
    for counts, (tokens, seconds, rate) in ((DECODE, decode), (PREFILL, prefill)):
        computed = tokens / seconds if tokens and seconds else None
        if tps := rate or computed:
            if rate and computed:
                _agree(rate, computed, f"the {counts} rate", 0.006)
            yield Setup(source=source, counts=counts, tps=tps, **about)


def _fields(text: str, keys: str) -> list[dict[str, str]]:
    """Values of JSON-like fields, in objects: a key that comes again begins the next one."""
    found = [dict[str, str]()]
    alternatives = "|".join(keys.split())
    pattern = (
        rf'(?<!\w)"?({alternatives})"?\s*[:=]\s*(?:"([^"\n]{{0,200}})"|([-\d.eE+]{{1,40}}|true|false)(?=\s*[,}}\]\n]))'
    )
    for match in re.finditer(pattern, text):
        if match[1] in found[-1]:
            found.append({})
        found[-1][match[1]] = match[2] if match[2] is not None else match[3]
    return found


def _ollama_api(text: str) -> Iterable[Setup]:
    for one in _fields(
        text, "total_duration load_duration prompt_eval_count prompt_eval_duration eval_count eval_duration"
    ):
        n, ns = one.get("eval_count"), one.get("eval_duration")
        n_in, ns_in = one.get("prompt_eval_count"), one.get("prompt_eval_duration")
        total = one.get("total_duration")
        if total and ns and number(ns) > 1.001 * number(total):
            raise ValueError("decode took longer than everything")
        yield from _two(
            "Ollama API",
            (n_in and count(n_in), ns_in and number(ns_in) / 1e9, None),
            (n and count(n), ns and number(ns) / 1e9, None),
        )


def _logs(text: str) -> Iterable[Setup]:
    """Timings that llama.cpp and its relatives print, of a server or of llama-cli."""
    line = rf"(prompt |generation )?eval time\s*=\s*{NUMBER} ms\s*/\s*(\d{{1,12}}) (tokens?|runs?)"
    line += rf"(?:\s*\(\s*{NUMBER} ms per tok(?:en)?(?:,\s*{NUMBER} tokens per second)?)?"
    is_cli, prompt = bool(re.search(r"llama_(perf_context_)?print(_timings)?:", text)), None
    for match in re.finditer(line, text):
        ms, n = number(match[2]), count(match[3])
        per_token = match[5] and number(match[5])
        if match[1] == "prompt ":
            if per_token:
                _agree(per_token, ms / n, "ms per token of the prompt", 0.006)
            prompt = (n, ms / 1e3)
            if ms:
                yield Setup(
                    source="llama-cli" if is_cli else "llama-server",
                    counts=PREFILL,
                    tps=1e3 * n / ms,
                    n_prompt=n,
                    prefill_s=ms / 1e3,
                )
            continue
        if not ms or not n:
            prompt = None
            continue
        if not per_token:
            raise ValueError("the line of the decode time is cut off")
        is_runs = match[4].startswith("run") and match[1] is None
        n_steps = n if is_runs else n - 1
        is_new = not is_runs and n > 1 and abs(per_token - ms / (n - 1)) < abs(per_token - ms / n)
        counted = n - 1 if is_new else n
        _agree(per_token, ms / counted, "ms per token", 0.006)
        if match[6]:
            _agree(number(match[6]), 1e3 * counted / ms, "the decode rate", 0.006)
        yield Setup(
            source="llama-cli" if is_runs else "ik_llama.cpp" if match[1] else "llama-server",
            counts=DECODE,
            tps=1e3 * counted / ms,
            n_prompt=prompt and prompt[0],
            prefill_s=prompt and prompt[1],
            n_gen=n + 1 if is_runs else n,
            decode_s=ms / 1e3,
            n_steps=n_steps or None,
        )
        prompt = None


def _timings(text: str) -> Iterable[Setup]:
    keys = "cache_n prompt_n prompt_ms prompt_per_second predicted_n predicted_ms predicted_per_second draft_n"
    for one in _fields(text, keys):
        n, ms, rate = (one.get(f"predicted_{name}") for name in ("n", "ms", "per_second"))
        n_in, ms_in, rate_in = (one.get(f"prompt_{name}") for name in ("n", "ms", "per_second"))
        about: dict[str, Any] = {"about": "speculative decoding"} if one.get("draft_n", "0") != "0" else {}
        depth = count(one["cache_n"]) if "cache_n" in one else None
        if n_in and ms_in and rate_in:
            _agree(number(rate_in), 1e3 * count(n_in) / number(ms_in), "the prompt rate")
        n_steps = None
        if n and ms and rate:
            tokens, steps = count(n), number(rate) * number(ms) / 1e3
            n_steps = tokens - 1
            if min(abs(steps - tokens), abs(steps - tokens + 1)) > AGREE * tokens / 2 + 0.01:
                raise ValueError("the decode rate contradicts its tokens and time")
        both = list(
            _two(
                "llama-server",
                (
                    n_in and count(n_in),
                    ms_in and number(ms_in) / 1e3,
                    None if n_in and ms_in else rate_in and number(rate_in),
                ),
                (n and count(n), None, rate and number(rate)),
                depth,
                **about,
            )
        )
        seconds = number(ms) / 1e3 if ms else None
        yield from (dataclasses.replace(each, decode_s=seconds, n_steps=n_steps or None) for each in both)


def _lm_studio(text: str) -> Iterable[Setup]:
    keys = "prompt_tokens completion_tokens tokens_per_second time_to_first_token generation_time arch quant"
    for one in _fields(text, keys):
        if "tokens_per_second" in one:
            n_in, n = (count(one[key]) if one.get(key) else None for key in ("prompt_tokens", "completion_tokens"))
            yield Setup(
                source="LM Studio",
                counts=DECODE,
                tps=number(one["tokens_per_second"]),
                n_prompt=n_in,
                n_gen=n,
                prefill_s=number(one["time_to_first_token"]) if "time_to_first_token" in one else None,
                decode_s=number(one["generation_time"]) if "generation_time" in one else None,
                model=one.get("arch"),
                quantization=one.get("quant"),
            )
    rates = list(re.finditer(rf"(?<![\d.,]){NUMBER}\s*tok/sec", text))
    for i, rate in enumerate(rates):
        part = text[rate.end() : rates[i + 1].start() if i + 1 < len(rates) else None]
        tokens = re.search(rf"(?<![\d.,]){NUMBER}\s*tokens?\b", part)
        first = re.search(rf"(?<![\d.,]){NUMBER}\s*s(?:ec)?\s*to first", part)
        yield Setup(
            source="LM Studio",
            counts=DECODE,
            tps=number(rate[1]),
            n_gen=count(tokens[1]) if tokens else None,
            prefill_s=number(first[1]) if first else None,
        )


def _kobold(text: str) -> Iterable[Setup]:
    def timed(part: str, name: str) -> tuple[float | None, float | None]:
        match = re.search(rf"{name}:\s*{NUMBER}\s*s\s*\((?:{NUMBER}\s*ms/T\s*=\s*)?{NUMBER}\s*T/s\)", part)
        return (number(match[1]), number(match[3])) if match else (None, None)

    for part in re.split(r"(?=(?:CtxLimit|ContextLimit)\s*:)", text):
        prefill, decode, total = (timed(part, name) for name in ("Process(?:ing)?", "Generat(?:e|ion)", "Total"))
        amount, limit = re.search(r"Am(?:oun)?t:\s*(\d{1,9})/", part), re.search(r"Limit:\s*(\d{1,9})/", part)
        n = count(amount[1]) if amount else None
        n_all = count(limit[1]) if limit else None
        if n and decode[0] and decode[1]:
            _agree(decode[1], n / decode[0], "Generate's rate", 0.006 * n / decode[0] ** 2)
        n_in = round(prefill[0] * prefill[1]) if prefill[0] and prefill[1] else None
        n_depth = n_all - n - n_in if n_all and n and n_in and n_all >= n + n_in else None
        about = {"n_prompt": n_in, "n_gen": n, "prefill_s": prefill[0], "decode_s": decode[0], "total_s": total[0]}
        for counts, (_, rate) in ((DECODE, decode), (PREFILL, prefill), (WHOLE, total)):
            if rate:
                yield Setup(source="KoboldCpp", counts=counts, tps=rate, n_depth=n_depth, **about)  # type: ignore[arg-type]


def _vllm(text: str) -> Iterable[Setup]:
    pattern = rf"Avg prompt throughput: {NUMBER} tokens/s, Avg generation throughput: {NUMBER} tokens/s"
    pattern += r"(?:, Running: (\d{1,6}) reqs)?"
    for match in re.finditer(pattern, text):
        about = f"{match[3]} requests at once" if match[3] and match[3] != "1" else ""
        yield Setup(source="vLLM", counts=WINDOW, tps=number(match[2]), about=about)


def _mlx(text: str) -> Iterable[Setup]:
    rate = rf"(\d{{1,12}}) tokens, {NUMBER} tokens-per-sec"
    prompts, answers = re.findall(rf"Prompt: {rate}", text), re.findall(rf"Generation: {rate}", text)
    if prompts and answers and len(prompts) != len(answers):
        raise ValueError("prompts and answers differ in number")
    sizes = re.search(r"prompt_tokens=(\d{1,9}), generation_tokens=(\d{1,9})", text)
    for n_trial in _fields(text, "prompt_tps generation_tps"):
        if {"prompt_tps", "generation_tps"} <= n_trial.keys():
            prompts.append((sizes[1] if sizes else "", n_trial["prompt_tps"]))
            answers.append((sizes[2] if sizes else "", n_trial["generation_tps"]))
    for i in range(max(len(prompts), len(answers))):
        n_in, rate_in = prompts[i] if prompts else ("", "")
        n, tps = answers[i] if answers else ("", "")
        n_prompt = count(n_in) if n_in else None
        first_s = n_prompt / number(rate_in) if n_prompt and number(rate_in) else None
        n_gen = count(n) if n else None
        steps = n_gen - 1 if n_gen and n_gen > 1 else None
        more: dict[str, Any] = {"n_prompt": n_prompt, "n_gen": n_gen, "prefill_s": first_s, "n_steps": steps}
        if tps and number(tps):
            more["decode_s"] = n_gen / number(tps) if n_gen else None
            yield Setup(source="mlx_lm", counts=DECODE, tps=number(tps), **more)
        if rate_in:
            yield Setup(source="mlx_lm", counts=PREFILL, tps=number(rate_in), **more)


def _webui(text: str) -> Iterable[Setup]:
    pattern = rf"Output generated in {NUMBER} seconds \({NUMBER} tokens/s, (\d{{1,9}}) tokens(?:, context (\d{{1,9}}))?"
    for match in re.finditer(pattern, text):
        seconds, n = number(match[1]), count(match[3])
        tps = _agree(number(match[2]), n / seconds, "the rate", 0.006)
        n_in = count(match[4]) if match[4] else None
        yield Setup(source="text-generation-webui", counts=WHOLE, tps=tps, n_gen=n, n_prompt=n_in, total_s=seconds)


def _localscore(text: str) -> Iterable[Setup]:
    for one in _fields(text, "avg_prompt_tps avg_gen_tps prompt_tps gen_tps"):
        for key, counts in (
            ("gen_tps", DECODE),
            ("avg_gen_tps", MIXED),
            ("prompt_tps", PREFILL),
            ("avg_prompt_tps", MIXED),
        ):
            if key in one:
                yield Setup(source="LocalScore", counts=counts, tps=number(one[key]), about=key)


def _tables(text: str) -> Iterable[dict[str, str]]:
    """The rows of Markdown tables, by their heads."""
    heads: list[str] = []
    for line in text.splitlines():
        inner = re.fullmatch(r"[> \t]*\|(.{1,10000})\|\s*", line)
        if not inner or not re.sub(r"[-|:+ ]", "", inner[1]):
            continue
        cells = [cell.strip() for cell in inner[1].replace("\\|", "/").split("|")]
        if any(re.match(r"(?:t/s|S_TG)", cell) for cell in cells):
            heads = cells
        elif heads and len(cells) == len(heads):
            yield dict(zip(heads, cells, strict=True))
        elif heads:
            raise ValueError("a row of the table has another number of columns than its head")


SETTINGS = {
    "n_batch": "batch",
    "n_ubatch": "ubatch",
    "n_threads": "threads",
    "type_k": "cache_type_k",
    "type_v": "cache_type_v",
}
SETTINGS |= {"n_gpu_layers": "n_gpu_layers", "flash_attn": "flash_attn"}
QUANTIZATION = r"\b((?:I?Q|TQ)\d\w*|BF16|F16|F32|MXFP4)\b"


def _bench_setup(
    row: Mapping[str, Any], test: tuple[int, int, int], tps: float, spread: float | None, source: str
) -> Setup:
    """A test of llama-bench; `row` has llama-bench's columns, with default values left out in Markdown."""
    n_prompt, n_gen, n_depth = test
    settings: dict[str, Any] = {}
    for name, own in SETTINGS.items():
        value = str(row.get(name) if row.get(name) is not None else "").strip().lower()
        if name == "flash_attn" and value:
            settings[own] = {"0": "off", "false": "off", "1": "on", "true": "on"}.get(value, "auto")
        elif value and (re.fullmatch(r"-?\d{1,6}", value) or name.startswith("type_")):
            settings[own] = value if name.startswith("type_") else int(value)
    model = str(row.get("model_type") or row.get("Model") or "")
    quantization = re.search(QUANTIZATION, model)
    counts = MIXED if n_prompt and n_gen else PREFILL if n_prompt else DECODE
    return Setup(
        source=source,
        counts=counts,
        tps=tps,
        n_prompt=n_prompt,
        n_gen=n_gen or None,
        n_depth=n_depth,
        n_steps=n_gen or None,
        compute_tps=tps if counts == DECODE else None,
        model=model[:100] or None,
        quantization=quantization[1] if quantization else None,
        settings=settings,
        spread=spread / tps if spread and tps else None,
    )


def _bench(text: str) -> Iterable[Setup]:
    test = r"(?:pp *(\d{1,9}))?(?: *\+ *)?(?:tg *(\d{1,9}))?(?: *@ *(?:d|pp) *(\d{1,9}))?"
    for cells in _tables(text):
        named = {HEADS.get(head, head): cell for head, cell in cells.items()}
        named |= {"n_ubatch": cells["Microbatch size"]} if "Microbatch size" in cells else {}
        match = re.fullmatch(test, cells.get("test", cells.get("Test", "-")))
        if not match or not (match[1] or match[2]):
            continue
        sizes = (int(match[1] or 0), int(match[2] or 0), int(match[3] or 0))
        for head, cell in cells.items():
            if not head.startswith("t/s"):
                continue
            rate = re.fullmatch(rf"{NUMBER}(?:\s*(?:\u00b1|\+/?-)\s*{NUMBER})?", cell)
            if not rate:
                raise ValueError(f"{cell[:40]!r} is not a rate")
            made = _bench_setup(named, sizes, number(rate[1]), number(rate[2]) if rate[2] else None, "llama-bench")
            yield (
                made if head == "t/s" else dataclasses.replace(made, about=f"build {head.removeprefix('t/s').strip()}")
            )


def _bench_rows(text: str) -> Iterable[Setup]:
    keys = f"model_type {' '.join(SETTINGS)} n_prompt n_gen n_depth avg_ts stddev_ts"
    rows: Iterable[Mapping[str, Any]] = _fields(text, keys)
    if "build_commit," in text.replace('"', ""):
        rows = csv.DictReader(io.StringIO(text))
    for row in rows:
        if row.get("avg_ts") and (row.get("n_prompt") or row.get("n_gen")):
            n_prompt, n_gen, n_depth = (count(str(row.get(key) or "0")) for key in ("n_prompt", "n_gen", "n_depth"))
            sizes = n_prompt, n_gen, n_depth
            spread = row.get("stddev_ts")
            yield _bench_setup(
                row, sizes, number(str(row["avg_ts"])), number(str(spread)) if spread else None, "llama-bench"
            )


def _batched(text: str) -> Iterable[Setup]:
    for cells in _tables(text):
        if "S_TG t/s" not in cells:
            continue
        n_in, n, n_kv = (count(cells.get(head, "")) for head in ("PP", "TG", "N_KV"))
        n_seq, is_sweep = count(cells.get("B", "1")), "B" not in cells
        s_in, rate_in, s, rate = (
            number(cells.get(f"{head}", "")) for head in ("T_PP s", "S_PP t/s", "T_TG s", "S_TG t/s")
        )
        source = "llama-sweep-bench" if is_sweep else "llama-batched-bench"
        about = f"{n_seq} sequences" if n_seq > 1 else ""
        for counts, tokens, seconds, tps in ((DECODE, n * n_seq, s, rate), (PREFILL, n_in * n_seq, s_in, rate_in)):
            if tokens and seconds:
                _agree(tps, tokens / seconds, "the rate", 0.0006 * tokens / seconds**2)
                depth = n_kv if is_sweep else 0
                yield Setup(
                    source=source, counts=counts, tps=tps, n_prompt=n_in, n_gen=n, n_depth=depth, prefill_s=s_in,
                    decode_s=s, n_steps=n, about=about,
                )  # fmt: skip


@dataclass(frozen=True)
class Format:
    """A format: its name, a pattern that only such texts contain, and how its figures are read."""

    name: str
    sign: str
    parse: Callable[[str], Iterable[Setup]]


FORMATS = (
    Format("llama-bench (JSON, CSV)", r"avg_ts", _bench_rows),
    Format("llama-bench (Markdown)", r"\|\s*[Tt]est\s*\|\s*t/s", _bench),
    Format("llama-batched-bench and llama-sweep-bench", r"\|\s*S_TG t/s", _batched),
    Format("ollama --verbose", r"(?i)\beval (?:rate|count|duration):", _ollama),
    Format("Ollama API", r'(?<!\w)"?eval_count"?\s*[:=]', _ollama_api),
    Format("llama-server and llama-cli logs", r"eval time\s*=", _logs),
    Format("llama-server timings", r"\bpredicted_(?:n|per_second)\b", _timings),
    Format("LM Studio", r"\btokens_per_second\b|tok/sec", _lm_studio),
    Format("KoboldCpp", r"\d\s*T/s\)", _kobold),
    Format("vLLM log", r"Avg generation throughput:", _vllm),
    Format("mlx_lm", r"tokens-per-sec\b|\bgeneration_tps\b", _mlx),
    Format("text-generation-webui", r"Output generated in", _webui),
    Format("LocalScore", r"\b(?:avg_)?gen_tps\b", _localscore),
    Format("a bare figure", r"\A.{1,60}\s*\Z", _bare),
)
