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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from lab.core.record import Record
from lab.core.request import RequestRecord
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
    `settings` are keywords of AskedSettings. `records` and `requests` are those of the lab. `spread` is the standard
    deviation of the figure's logarithm, `between` that between sessions, and `between_source` its source.
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
    device: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    spread: float | None = None
    between: float | None = None
    between_source: str = ""
    round_trip_s: float = 0.0  # of HTTP, to a server
    compute_tps: float | None = None  # of decode steps without sampling, where that is known
    records: tuple[Record, ...] = ()
    requests: tuple[RequestRecord, ...] = ()
    about: str = ""

    @property
    def is_prefill(self) -> bool:
        return self.counts == PREFILL

    @property
    def model_words(self) -> str:
        """The model and its quantization."""
        is_named = self.quantization and self.quantization.lower() in (self.model or "").lower()
        return " ".join(filter(None, (self.model, None if is_named else self.quantization)))

    @property
    def label(self) -> str:
        """What the figure counts, in words."""
        before = None if self.n_prompt is None and self.n_depth is None else (self.n_prompt or 0) + (self.n_depth or 0)
        if self.is_prefill:
            what = "prefill" if self.n_prompt is None else f"prefill of {self.n_prompt:,} tokens"
            what += f" after {self.n_depth:,}" if self.n_depth else ""
        else:
            what = {WHOLE: "whole answer: ", WINDOW: "average over a window, "}.get(self.counts, "")
            what += "tokens" if self.n_gen is None else f"{self.n_gen:,} tokens"
            what += "" if before is None else f" after {before:,}"
        return printable(", ".join(filter(None, (self.source, self.model_words, self.device, self.about, what))))


def read(name: str) -> list[Setup]:
    """The figures of a file, of stdin (`-`), or of a text such as `35 tokens/s`. LabError where none is recognized."""
    try:
        if name == STDIN:
            data = sys.stdin.buffer.read(MOST_BYTES + 1)
        elif "\n" in name or any(re.search(form.sign, name) for form in FORMATS):
            return parse(name)
        else:
            with Path(name).open("rb") as file:
                data = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else problem
        what = f"{name[:100]!r} is neither a figure such as 35 tokens/s nor a readable file: {reason}."
        raise LabError(what, f"Give a figure, - for stdin, or a file. {KNOWN}") from None
    wide = data[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    return parse(data.decode("utf-16" if wide else "utf-8-sig", "replace"), "stdin" if name == STDIN else name)


def parse(text: str, name: str = "The text") -> list[Setup]:
    """The figures of a text. LabError if no format of FORMATS is recognized, or the figures contradict each other."""
    if len(text) > MOST_BYTES or text.count("\n") > MOST_LINES:
        raise LabError(
            f"{name} has over {MOST_LINES:,} lines or {MOST_BYTES:,} bytes.", "Give only the lines with the figures."
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
    raise LabError(f"{name} has no figure that the lab can read.{printable(why)}", KNOWN)


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


def _agree(printed: float, computed: float, what: str, rounding: float = 0.006) -> None:
    """ValueError if a printed figure differs from the computed one by more than rounding explains."""
    if abs(printed - computed) > AGREE * computed + rounding:
        raise ValueError(f"{what} is {printed:g}, but its tokens and time give {computed:.4g}")


Phase = tuple[Any, Any, Any]
"""Tokens, time and printed rate of a phase, as texts or numbers; None: unknown."""


def _answer(
    source: str, prefill: Phase, decode: Phase, unit_s: float = 1.0, rounds_s: float = 0.0, **more: Any
) -> Iterable[Setup]:
    """The decode and the prefill figure of an answer. Times are in units of `unit_s`, printed to `rounds_s` seconds."""
    phases = []
    for given in (decode, prefill):
        tokens, time, rate = (one if one else None for one in given)
        n = count(tokens) if isinstance(tokens, str) else tokens
        seconds, rate = (number(one) if isinstance(one, str) else one for one in (time, rate))
        phases.append((n, seconds * unit_s if seconds else None, rate))
    (n_gen, decode_s, _), (n_prompt, prefill_s, _) = phases
    about = {"n_prompt": n_prompt, "n_gen": n_gen, "prefill_s": prefill_s, "decode_s": decode_s, **more}
    for counts, (n, seconds, rate) in zip((DECODE, PREFILL), phases, strict=True):
        computed = n / seconds if n and seconds else None
        if rate and computed and seconds:
            _agree(rate, computed, f"the {counts} rate", 0.006 + rounds_s * computed / seconds)
        if tps := rate or computed:
            yield Setup(source=source, counts=counts, tps=tps, **about)


NUMBER = r"(\d[\d.,]*\d|\d)"
GO_UNITS = {"h": 3600, "ms": 1e-3, "m": 60, "\u00b5s": 1e-6, "\u03bcs": 1e-6, "us": 1e-6, "ns": 1e-9, "s": 1}
GO = rf"(\d+(?:\.\d+)?)({'|'.join(GO_UNITS)})"


def _bare(text: str) -> Iterable[Setup]:
    """A figure in words, such as 35 tokens/s."""
    if match := re.fullmatch(BARE, text):
        try:
            yield Setup(source="a bare figure", tps=number(match[1]), counts=UNKNOWN)
        except ValueError as problem:
            raise LabError(f"{text.strip()!r} is ambiguous: {problem}.", "Write it with a decimal point.") from None


def _fields(text: str, keys: str) -> list[dict[str, str]]:
    """Values of JSON-like fields, in objects: a key that comes again begins the next one."""
    found = [dict[str, str]()]
    value = r'(?:"([^"\n]{0,200})"|([-\d.eE+]{1,40}|true|false)(?=\s*[,}\]\n]))'
    for match in re.finditer(rf'(?<!\w)"?({"|".join(keys.split())})"?\s*[:=]\s*{value}', text):
        if match[1] in found[-1]:
            found.append({})
        found[-1][match[1]] = match[2] if match[2] is not None else match[3]
    return found


def _ollama(text: str) -> Iterable[Setup]:
    for part in re.split(r"(?=total duration:)", text):

        def phase(label: str, part: str = part) -> Phase:
            tokens, duration, rate = (
                re.search(rf"(?<!prompt )\b{label} {name}:\s*{value}", part, re.I)
                for name, value in (
                    ("count", rf"{NUMBER}\s*token"),
                    ("duration", rf"((?:{GO})+)(?![\w.])"),
                    ("rate", rf"{NUMBER} *tok"),
                )
            )
            units = re.findall(GO, duration[1]) if duration else []
            seconds = sum(float(n) * GO_UNITS[unit] for n, unit in units)
            return tokens and tokens[1], seconds, rate and rate[1]

        yield from _answer("Ollama", phase("prompt eval"), phase("eval"))


def _ollama_api(text: str) -> Iterable[Setup]:
    for one in _fields(text, "total_duration prompt_eval_count prompt_eval_duration eval_count eval_duration"):
        if number(one.get("eval_duration", "0")) > 1.001 * number(one.get("total_duration", "1e99")):
            raise ValueError("decode took longer than everything")
        prompt, answer = (
            (one.get(f"{name}_count"), one.get(f"{name}_duration"), None) for name in ("prompt_eval", "eval")
        )
        yield from _answer("Ollama API", prompt, answer, 1e-9)


def _logs(text: str) -> Iterable[Setup]:
    """Timings that llama.cpp and its relatives print, of a server or of llama-cli."""
    line = rf"(prompt |generation )?eval time\s*=\s*{NUMBER} ms\s*/\s*(\d{{1,12}}) (tokens?|runs?)"
    line += rf"(?:\s*\(\s*{NUMBER} ms per tok(?:en)?(?:,\s*{NUMBER} tokens per second)?)?"
    source = "llama-cli" if re.search(r"llama_(perf_context_)?print(_timings)?:", text) else "llama-server"
    nothing: Phase = (None, None, None)
    prompt = nothing
    lines = list(re.finditer(line, text))
    for match, after in zip(lines, [*lines[1:], None], strict=False):
        kind, ms, n, per_token = match[1], number(match[2]), count(match[3]), match[5] and number(match[5])
        if kind == "prompt ":
            if per_token:
                _agree(per_token, ms / n, "ms per token of the prompt")
            prompt = n, ms, None
            if after is None or after[1] == "prompt ":
                yield from _answer(source, prompt, nothing, 1e-3)
            continue
        before, prompt = prompt, nothing
        if not ms or not n:
            yield from _answer(source, before, nothing, 1e-3)
            continue
        if not per_token:
            raise ValueError("the line of the decode time is cut off")
        is_runs = match[4].startswith("run") and kind is None
        is_new = not is_runs and n > 1 and abs(per_token - ms / (n - 1)) < abs(per_token - ms / n)
        counted = n - 1 if is_new else n
        _agree(per_token, ms / counted, "ms per token")
        if match[6]:
            _agree(number(match[6]), 1e3 * counted / ms, "the decode rate")
        own = "llama-cli" if is_runs else "ik_llama.cpp" if kind else "llama-server"
        steps: dict[str, Any] = {"n_gen": n + 1 if is_runs else n, "n_steps": (n if is_runs else n - 1) or None}
        yield from _answer(own, before, (counted, ms, None), 1e-3, **steps)


def _timings(text: str) -> Iterable[Setup]:
    keys = "cache_n prompt_n prompt_ms prompt_per_second predicted_n predicted_ms predicted_per_second draft_n"
    for one in _fields(text, keys):
        n, ms, rate = (one.get(f"predicted_{name}") for name in ("n", "ms", "per_second"))
        about = "" if one.get("draft_n", "0") == "0" else "speculative decoding"
        more: dict[str, Any] = {"n_depth": count(one["cache_n"]) if "cache_n" in one else None, "about": about}
        if n and ms and rate:
            tokens, steps = (
                count(n),
                number(rate) * number(ms) / 1e3,
            )  # old rates count the first token, new ones do not
            if min(abs(steps - tokens), abs(steps - tokens + 1)) > AGREE * tokens / 2 + 0.01:
                raise ValueError("the decode rate contradicts its tokens and time")
            more |= {"n_steps": tokens - 1 or None, "decode_s": number(ms) / 1e3}
        prompt = one.get("prompt_n"), one.get("prompt_ms"), one.get("prompt_per_second")
        yield from _answer("llama-server", prompt, (n, None, rate), 1e-3, **more)


def _lm_studio(text: str) -> Iterable[Setup]:
    keys = "prompt_tokens completion_tokens tokens_per_second time_to_first_token generation_time arch quant"
    for one in _fields(text, keys):
        if "tokens_per_second" in one:  # of decode; its time to the first token may be that of a cached prompt
            prompt = one.get("prompt_tokens"), one.get("time_to_first_token"), None
            more: dict[str, Any] = {"model": one.get("arch"), "quantization": one.get("quant")}
            if "generation_time" in one:
                more["decode_s"] = number(one["generation_time"])
            answer = _answer(
                "LM Studio", prompt, (one.get("completion_tokens"), None, one["tokens_per_second"]), **more
            )
            yield from (each for each in answer if each.counts == DECODE)
    rates = list(re.finditer(rf"(?<![\d.,]){NUMBER}\s*tok/sec", text))
    for rate, after in zip(rates, [*rates[1:], None], strict=False):
        part = text[rate.end() : after.start() if after else None]
        tokens = re.search(rf"(?<![\d.,]){NUMBER}\s*tokens?\b", part)
        first = re.search(rf"(?<![\d.,]){NUMBER}\s*s(?:ec)?\s*to first", part)
        yield from _answer("LM Studio", (None, first and first[1], None), (tokens and tokens[1], None, rate[1]))


def _kobold(text: str) -> Iterable[Setup]:
    for part in re.split(r"(?=(?:CtxLimit|ContextLimit)\s*:)", text):
        timed = []
        for name in ("Process(?:ing)?", "Generat(?:e|ion)", "Total"):
            pattern = rf"{name}:\s*{NUMBER}\s*s\s*\((?:{NUMBER}\s*ms/T\s*=\s*)?{NUMBER}\s*T/s\)"
            match = re.search(pattern, part)
            timed.append((number(match[1]), number(match[3])) if match else (None, None))
        (prompt_s, rate_in), (s, rate), (total_s, of_all) = timed
        amount, limit = re.search(r"Am(?:oun)?t:\s*(\d{1,9})/", part), re.search(r"Limit:\s*(\d{1,9})/", part)
        n = count(amount[1]) if amount else None
        n_in = round(prompt_s * rate_in) if prompt_s and rate_in else None  # only what was processed
        n_depth = count(limit[1]) - n - n_in if limit and n and n_in else None
        more: dict[str, Any] = {"n_depth": n_depth if n_depth is None or n_depth >= 0 else None, "total_s": total_s}
        yield from _answer("KoboldCpp", (n_in, prompt_s, rate_in), (n, s, rate), rounds_s=0.006, **more)
        if of_all:
            about: dict[str, Any] = {"n_prompt": n_in, "n_gen": n, "prefill_s": prompt_s, "decode_s": s, **more}
            yield Setup(source="KoboldCpp", counts=WHOLE, tps=of_all, **about)


def _vllm(text: str) -> Iterable[Setup]:
    pattern = rf"Avg prompt throughput: {NUMBER} tokens/s, Avg generation throughput: {NUMBER} tokens/s"
    for match in re.finditer(rf"{pattern}(?:, Running: (\d{{1,6}}) reqs)?", text):
        about = f"{match[3]} requests at once" if match[3] and match[3] != "1" else ""
        yield Setup(source="vLLM", counts=WINDOW, tps=number(match[2]), about=about)


def _mlx(text: str) -> Iterable[Setup]:
    rate = rf"(\d{{1,12}}) tokens, {NUMBER} tokens-per-sec"
    prompts, answers = re.findall(rf"Prompt: {rate}", text), re.findall(rf"Generation: {rate}", text)
    if prompts and answers and len(prompts) != len(answers):
        raise ValueError("prompts and answers differ in number")
    sizes = re.search(r"prompt_tokens=(\d{1,9}), generation_tokens=(\d{1,9})", text) or ("", "", "")
    for trial in _fields(text, "prompt_tps generation_tps"):
        if len(trial) == 2:
            prompts.append((sizes[1], trial["prompt_tps"]))
            answers.append((sizes[2], trial["generation_tps"]))
    for (n_in, rate_in), (n, tps) in zip_longest(prompts, answers, fillvalue=("", "")):
        steps: dict[str, Any] = {"n_steps": count(n) - 1 or None, "decode_s": count(n) / number(tps)} if n else {}
        prefill_s = count(n_in) / number(rate_in) if n_in else None
        yield from _answer("mlx_lm", (n_in, prefill_s, rate_in), (n, None, tps), **steps)


def _webui(text: str) -> Iterable[Setup]:
    pattern = rf"Output generated in {NUMBER} seconds \({NUMBER} tokens/s, (\d{{1,9}}) tokens(?:, context (\d{{1,9}}))?"
    for match in re.finditer(pattern, text):
        seconds, n, tps = number(match[1]), count(match[3]), number(match[2])
        _agree(tps, n / seconds, "the rate")
        n_in = count(match[4]) if match[4] else None
        yield Setup(source="text-generation-webui", counts=WHOLE, tps=tps, n_gen=n, n_prompt=n_in, total_s=seconds)


def _localscore(text: str) -> Iterable[Setup]:
    kinds = {"gen_tps": DECODE, "avg_gen_tps": MIXED, "prompt_tps": PREFILL, "avg_prompt_tps": MIXED}
    for one in _fields(text, " ".join(reversed(kinds))):
        for key in kinds.keys() & one.keys():
            yield Setup(source="LocalScore", counts=kinds[key], tps=number(one[key]), about=key)


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


SETTINGS = {"n_batch": "batch", "n_ubatch": "ubatch", "n_threads": "threads", "n_gpu_layers": "n_gpu_layers"}
SETTINGS |= {"type_k": "cache_type_k", "type_v": "cache_type_v", "flash_attn": "flash_attn"}
"""llama-bench's columns, and the settings that they are."""

FLASH_ATTN = {"0": "off", "false": "off", "1": "on", "true": "on"}
QUANTIZATION = r"\b((?:I?Q|TQ)\d\w*|BF16|F16|F32|MXFP4)\b"


def _bench_setup(row: Mapping[str, Any], test: Iterable[int], tps: str, spread: str | None) -> Setup:
    """A test of llama-bench; `row` has llama-bench's columns, with default values left out in Markdown."""
    (n_prompt, n_gen, n_depth), rate = test, number(tps)
    settings: dict[str, Any] = {}
    for name, own in SETTINGS.items():
        value = str(row.get(name) or "").strip().lower()
        if name == "flash_attn" and value:
            settings[own] = FLASH_ATTN.get(value, "auto")
        elif name.startswith("type_") and value:
            settings[own] = value
        elif re.fullmatch(r"-?\d{1,6}", value):
            settings[own] = int(value)
    model = str(row.get("model_type") or row.get("Model") or "")[:100]
    quantization = re.search(QUANTIZATION, model)
    counts = MIXED if n_prompt and n_gen else PREFILL if n_prompt else DECODE
    return Setup(
        source="llama-bench",
        counts=counts,
        tps=rate,
        n_prompt=n_prompt,
        n_gen=n_gen or None,
        n_depth=n_depth,
        n_steps=n_gen or None,
        compute_tps=rate if counts == DECODE else None,
        model=model or None,
        quantization=quantization[1] if quantization else None,
        device=row.get("GPU") or row.get("gpu_info") or None,
        settings=settings,
        spread=number(spread) / rate if spread and rate else None,
    )


def _bench(text: str) -> Iterable[Setup]:
    test = r"(?:pp *(\d{1,9}))?(?: *\+ *)?(?:tg *(\d{1,9}))?(?: *@ *(?:d|pp) *(\d{1,9}))?"
    for cells in _tables(text):
        row = {HEADS.get(head, {"Microbatch size": "n_ubatch"}.get(head, head)): cell for head, cell in cells.items()}
        sizes = re.fullmatch(test, cells.get("test", cells.get("Test", "-")))
        for head, cell in cells.items():
            if head.startswith("t/s") and sizes and (sizes[1] or sizes[2]):
                rate = re.fullmatch(rf"{NUMBER}(?:\s*(?:\u00b1|\+/?-)\s*{NUMBER})?", cell)
                if not rate:
                    raise ValueError(f"{cell[:40]!r} is not a rate")
                made = _bench_setup(row, (int(size or 0) for size in sizes.groups()), rate[1], rate[2])
                yield dataclasses.replace(made, about=head.replace("t/s", "build") if head != "t/s" else "")


def _bench_rows(text: str) -> Iterable[Setup]:
    keys = f"model_type gpu_info {' '.join(SETTINGS)} n_prompt n_gen n_depth avg_ts stddev_ts"
    rows: Iterable[Mapping[str, Any]] = _fields(text, keys)
    if "build_commit," in text.replace('"', ""):
        rows = csv.DictReader(io.StringIO(text))
    for row in rows:
        if row.get("avg_ts") and (row.get("n_prompt") or row.get("n_gen")):
            sizes = [count(str(row.get(key) or "0")) for key in ("n_prompt", "n_gen", "n_depth")]
            yield _bench_setup(row, sizes, str(row["avg_ts"]), row.get("stddev_ts"))


def _batched(text: str) -> Iterable[Setup]:
    for cells in _tables(text):
        if "S_TG t/s" in cells:
            n_in, n, n_kv, n_seq = (count(cells.get(head, "1" * (head == "B"))) for head in ("PP", "TG", "N_KV", "B"))
            is_sweep = "B" not in cells
            source = "llama-sweep-bench" if is_sweep else "llama-batched-bench"
            more: dict[str, Any] = {"n_prompt": n_in, "n_gen": n, "n_steps": n, "n_depth": n_kv if is_sweep else 0}
            prompt, answer = ((cells.get(f"T_{name} s", ""), cells.get(f"S_{name} t/s", "")) for name in ("PP", "TG"))
            about = f"{n_seq} sequences" if n_seq > 1 else ""
            both = (n_in * n_seq, *prompt), (n * n_seq, *answer)
            yield from _answer(source, *both, rounds_s=0.0006, about=about, **more)


@dataclass(frozen=True)
class Format:
    """A format: its name, a pattern that only such texts contain, and how its figures are read."""

    name: str
    sign: str
    parse: Callable[[str], Iterable[Setup]]


PER_S = r"(?:\s*(?:tokens?|tok|t)\s*(?:/|per|p)\s*s(?:ec(?:ond)?)?\.?|\s*tps)"
BARE = rf"(?i)\s*~?\s*([\d.,]{{1,20}}){PER_S}\s*"
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
    Format("a bare figure", rf"\A{BARE[4:]}\Z", _bare),
)
KNOWN = f"Known formats: {', '.join(form.name for form in FORMATS)}."
