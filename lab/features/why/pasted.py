"""Figures in the output of other programs: one table of formats, and what each figure counts.

A decode rate may divide by the prompt's time too, may count the first token without its time, or may be an average
over a window. Each entry of formats.toml says how a format is recognized and where its values are. What a text
does not say stays None. Numbers that contradict each other are refused.
"""

from __future__ import annotations

import codecs
import csv
import io
import math
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.core.record import Record
from lab.core.request import RequestRecord
from lab.errors import LabError, printable
from lab.formats.llama_bench_rows import FLASH_ATTN, HEADS, QUANTIZATION, RATE, TEST
from lab.formats.markdown import cells_of
from lab.formats.numbers import number
from lab.formats.text import STDIN

NUMBER = r"(\d[\d.,]*\d|\d)"
DECODE = "decode"
PREFILL = "prefill"
WHOLE = "whole answer"
WINDOW = "window"
MIXED = "mixed"
UNKNOWN = "unknown"
"""What a rate counts: generated tokens over the time of decode, prompt tokens over that of prefill, generated tokens
over the time of both, an average over a logging window, prompt and generated tokens in one, or unknown."""

MOST_BYTES = 4_000_000
MOST_LINES = 50_000
MOST_SETUPS = 1_000
AGREE = 0.02  # share by which a printed rate may differ from that of its tokens and time, besides rounding


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One figure, what it counts, and what is known of its setup. None: unknown."""

    source: str
    tps: float
    counts: str
    n_prompt: int | None = None  # processed
    n_gen: int | None = None
    n_depth: int | None = None  # in the context before the prompt
    prefill_s: float | None = None
    decode_s: float | None = None
    n_steps: int | None = (
        None  # within decode_s; a rate that counts n_gen tokens over fewer steps looks faster
    )
    total_s: float | None = None
    model: str | None = None
    quantization: str | None = None
    device: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)  # keywords of AskedSettings
    spread: float | None = None  # the standard deviation of the figure's logarithm
    between: float | None = None  # that between sessions
    compute_tps: float | None = None  # of decode steps without sampling
    records: tuple[Record, ...] = ()  # of the lab
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
        before = (
            None
            if self.n_prompt is None and self.n_depth is None
            else (self.n_prompt or 0) + (self.n_depth or 0)
        )
        if self.is_prefill:
            what = "prefill" if self.n_prompt is None else f"prefill of {self.n_prompt:,} tokens"
            what += f" after {self.n_depth:,}" if self.n_depth else ""
        else:
            what = {WHOLE: "whole answer: ", WINDOW: "average over a window, "}.get(self.counts, "")
            what += "tokens" if self.n_gen is None else f"{self.n_gen:,} tokens"
            what += "" if before is None else f" after {before:,}"
        return printable(
            ", ".join(filter(None, (self.source, self.model_words, self.device, self.about, what)))
        )


def read(name: str) -> list[Setup]:
    """The figures of a file, of stdin (`-`), or of a text such as `35 tokens/s`. LabError where none is recognized."""
    try:
        if name == STDIN:
            data = sys.stdin.buffer.read(MOST_BYTES + 1)
        elif "\n" in name or any(re.search(form["sign"], name) for form in FORMATS):
            return parse(name)
        else:
            with Path(name).open("rb") as file:
                data = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else problem
        what = (
            f"{name[:100]!r} is neither a figure such as 35 tokens/s nor a readable file: {reason}."
        )
        raise LabError(what, f"Give a figure, - for stdin, or a file. {KNOWN}") from None
    wide = data[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    return parse(
        data.decode("utf-16" if wide else "utf-8-sig", "replace"),
        "stdin" if name == STDIN else name,
    )


def parse(text: str, name: str = "The text") -> list[Setup]:
    """The figures of a text. LabError if no format of FORMATS is recognized, or the figures contradict each other."""
    if len(text) > MOST_BYTES or text.count("\n") > MOST_LINES:
        what = f"{name} has over {MOST_LINES:,} lines or {MOST_BYTES:,} bytes."
        raise LabError(what, "Give only the lines with the figures.")
    for old, new in (
        ("\\_", "_"),
        ("\u00a0", " "),
        ("**", ""),
        ("\u00c2\u00b1", "\u00b1"),
        ("\r\n", "\n"),
        ("`", ""),
    ):
        text = text.replace(old, new)
    problems = list[str]()
    for form in FORMATS:
        if not re.search(form["sign"], text):
            continue
        try:
            figures = _bench(text) if form.get("is_llama_bench") else _figures(form, text)
            if found := [one for one in figures if 0 < one.tps < 1e9][:MOST_SETUPS]:
                return found
            problems.append(f"{form['name']}: its figures are incomplete")
        except (ArithmeticError, ValueError) as problem:
            problems.append(f"{form['name']}: {problem}")
            break
    why = f" It looks like {'; '.join(problems[:3])}." if problems else ""
    raise LabError(f"{name} has no figure that the lab can read.{printable(why)}", KNOWN)


def count(text: str) -> int:
    """A whole number, with or without commas. ValueError for another text."""
    if not re.fullmatch(r"\d{1,12}|\d{1,3}(,\d{3}){1,3}", text.strip()):
        raise ValueError(f"{text[:30]!r} is not a number of tokens")
    return int(text.replace(",", ""))


GO_UNITS = {
    "h": 3600,
    "ms": 1e-3,
    "m": 60,
    "\u00b5s": 1e-6,
    "\u03bcs": 1e-6,
    "us": 1e-6,
    "ns": 1e-9,
    "s": 1,
}
GO = rf"(\d+(?:\.\d+)?)({'|'.join(GO_UNITS)})"


def _fields(text: str, keys: Iterable[str]) -> list[dict[str, str]]:
    """Values of JSON-like fields, in objects: a key that comes again begins the next one."""
    found = [dict[str, str]()]
    value = r'(?:"([^"\n]{0,200})"|([-\d.eE+]{1,40}|true|false)(?=\s*[,}\]\n]))'
    for match in re.finditer(rf'(?<!\w)"?({"|".join(keys)})"?\s*[:=]\s*{value}', text):
        if match[1] in found[-1]:
            found.append({})
        found[-1][match[1]] = match[2] if match[2] is not None else match[3]
    return found


def _figures(form: Mapping[str, Any], text: str) -> Iterable[Setup]:
    """The figures of a text of a format of formats.toml."""
    rows: Iterable[dict[str, str]]
    if "find" in form:
        patterns = {
            key: re.compile(
                one.replace("NUMBER", NUMBER).replace("GO", f"((?:{GO})+)(?![\\w.])"), re.I
            )
            for key, one in form["find"].items()
        }
        found = (
            {key: one.search(part) for key, one in patterns.items()}
            for part in re.split(form["apart"], text)
        )
        rows = ({key: match[1] for key, match in one.items() if match} for one in found)
    else:
        names = form.get("json") or form["head"]
        given = _fields(text, names.values()) if "json" in form else _tables(text)
        rows = ({key: row[name] for key, name in names.items() if row.get(name)} for row in given)
    for row in rows:
        n_seq = count(row.get("at_once", "1")) or 1
        times = dict.fromkeys(("t_in", "t", "total"), 0.0)
        for key in times.keys() & row.keys():
            units = re.findall(GO, row[key])
            go_s = sum(float(n) * GO_UNITS[unit] for n, unit in units)
            times[key] = go_s if units else number(row[key]) * form.get("unit_s", 1.0)
        n_in, n = (count(row[key]) if key in row else 0 for key in ("n_in", "n"))
        r_in, r, r_all = (number(row[key]) if key in row else 0.0 for key in ("r_in", "r", "r_all"))
        if times["t"] > 1.001 * (times["total"] or math.inf):
            raise ValueError("decode took longer than everything")
        n_in = n_in or round(times["t_in"] * r_in)
        steps = form.get("steps")
        context = count(row.get("context", "0"))
        n_kv = row.get(
            "context_or_depth"
        )  # of llama-batched-bench that at the end, of llama-sweep-bench the depth
        depth = row.get("depth") or (None if n_kv is None else "0" if "at_once" in row else n_kv)
        answer_s = times["t"] or (n / r if steps == "fewer" and r else 0.0)
        n_steps = n if steps in ("all", "after") else n - 1
        draft = "speculative decoding" if row.get("draft", "0") != "0" else ""
        about: dict[str, Any] = {
            "n_prompt": n_in or None,
            "n_gen": n + (steps == "after") or None,
            "n_depth": count(depth)
            if depth
            else context - n - n_in
            if context >= n + n_in > 0
            else None,
            "prefill_s": times["t_in"]
            or (n_in / r_in if steps == "fewer" and r_in else None)
            or None,
            "decode_s": answer_s or None,
            "n_steps": n_steps or None if steps and n and answer_s else None,
            "total_s": times["total"] or None,
            "model": row.get("model"),
            "quantization": row.get("quantization"),
            "about": f"{n_seq} at once" if n_seq > 1 else draft,
        }
        for counts, tokens, seconds, rate in (
            (form.get("counts", DECODE), n * n_seq, times["t"], r),
            (form.get("counts_in", PREFILL), n_in * n_seq, times["t_in"], r_in),
            (WHOLE, n * n_seq, times["total"], r_all),
        ):
            computed = tokens / seconds if seconds else 0.0
            if rate and computed:
                is_fewer = (
                    steps == "either"
                    and tokens == n
                    and abs(rate - (n - 1) / seconds) < abs(rate - computed)
                )
                computed = (n - 1) / seconds if is_fewer else computed
                rounding = 0.006 + form.get("rounds_s", 0.0) * computed / seconds
                if abs(rate - computed) > AGREE * computed + rounding:
                    raise ValueError(
                        f"the rate of {counts} is {rate:g}, but its tokens and time give {computed:.4g}"
                    )
            tps = computed or rate if form.get("is_exact") else rate or computed
            needs_rate = counts == WHOLE or (counts == DECODE and steps == "either")
            if tps and (rate or not needs_rate):
                yield Setup(source=form["name"].partition("'")[0], counts=counts, tps=tps, **about)


def _tables(text: str) -> Iterable[dict[str, str]]:
    """The rows of Markdown tables, by their heads."""
    heads: list[str] = []
    for line in text.splitlines():
        cells = cells_of(line)
        if any(re.match(r"(?:t/s|S_TG)", cell) for cell in cells):
            heads = cells
        elif heads and len(cells) == len(heads):
            yield dict(zip(heads, cells, strict=True))
        elif heads and cells:
            raise ValueError("a row of the table has another number of columns than its head")


SETTINGS = {
    **{"n_batch": "batch", "n_ubatch": "ubatch", "n_threads": "threads"},
    **{
        "n_gpu_layers": "n_gpu_layers",
        "flash_attn": "flash_attn",
        "type_k": "cache_type_k",
        "type_v": "cache_type_v",
    },
}
"""llama-bench's columns, and the settings that they are."""


def _bench(text: str) -> Iterable[Setup]:
    """Tests of llama-bench; Markdown leaves out columns with defaults."""
    of_flash_attn = {"true": "on", "false": "off"} | {
        str(value): name for name, value in FLASH_ATTN.items()
    }
    rows: Iterable[Mapping[str, Any]] = _tables(text)
    if "build_commit," in text.replace('"', ""):
        rows = csv.DictReader(io.StringIO(text))
    elif "avg_ts" in text:
        own = (
            "model_type",
            "gpu_info",
            *SETTINGS,
            "n_prompt",
            "n_gen",
            "n_depth",
            "avg_ts",
            "stddev_ts",
        )
        rows = _fields(text, own)
    for cells in rows:
        row = {HEADS.get(head, head): cell for head, cell in cells.items()}
        test = re.fullmatch(TEST, cells.get("test", "-"))
        sizes = (
            test.groups() if test else [row.get(key) for key in ("n_prompt", "n_gen", "n_depth")]
        )
        n_prompt, n_gen, n_depth = (count(str(size or 0)) for size in sizes)
        settings: dict[str, Any] = {}
        for name, setting in SETTINGS.items():
            value = str(row.get(name) or "").strip().lower()
            if name == "flash_attn" and value:
                settings[setting] = of_flash_attn.get(value, "auto")
            elif value and (name.startswith("type_") or re.fullmatch(r"-?\d{1,6}", value)):
                settings[setting] = value if name.startswith("type_") else int(value)
        if row.get("avg_ts"):
            row["t/s"] = (
                f"{row['avg_ts']}+-{row['stddev_ts']}" if row.get("stddev_ts") else row["avg_ts"]
            )
        if "t/s" not in row or not (n_prompt or n_gen):
            continue
        rate = re.fullmatch(RATE, row["t/s"])
        if not rate:
            raise ValueError(f"{row['t/s'][:40]!r} is not a rate")
        model = str(row.get("model_type") or "")[:100]
        quantization = re.search(QUANTIZATION, model)
        counts = MIXED if n_prompt and n_gen else PREFILL if n_prompt else DECODE
        yield Setup(
            source="llama-bench",
            counts=counts,
            tps=number(rate[1]),
            n_prompt=n_prompt,
            n_gen=n_gen or None,
            n_depth=n_depth,
            n_steps=n_gen or None,
            compute_tps=number(rate[1]) if counts == DECODE else None,
            model=model or None,
            quantization=quantization[1] if quantization else None,
            device=row.get("gpu_info") or None,
            settings=settings,
            spread=number(rate[2]) / number(rate[1]) if rate[2] and number(rate[1]) else None,
        )


FORMATS = tomllib.loads(Path(__file__).with_name("formats.toml").read_text(encoding="utf-8"))[
    "format"
]
KNOWN = f"Known formats: {', '.join(form['name'] for form in FORMATS)}."
