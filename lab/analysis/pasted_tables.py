"""Benchmark tables as people paste them into posts, read as rows of llama-bench's columns.

Reads the tables of llama-bench, of llama.cpp's scoreboards (a device per row, a test per column), of LocalScore and of
llama-batched-bench, in Markdown, HTML or columns separated by tabs, with any text around them. Lines above a table may
name the device and the model, a line below it the build. What the text does not say is None.

The layouts are those of llama.cpp's tools/llama-bench and tools/batched-bench, llamafile's localscore/printer.cpp, and
llama.cpp's discussions 15013, 15021, 10879 and 4167.
"""

from __future__ import annotations

import dataclasses
import html
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

Row = dict[str, Any]
Cells = Mapping[str, str]
"""The cells of a row by the heads of their columns."""

COLUMNS = {
    "model": "model_type",
    "backend": "backends",
    "ngl": "n_gpu_layers",
    "threads": "n_threads",
    "n_batch": "n_batch",
    "n_ubatch": "n_ubatch",
    "type_k": "type_k",
    "type_v": "type_v",
    "fa": "flash_attn",
    "rpk": "repack",
}
"""Heads of llama-bench's Markdown, and the columns of its JSON that they show. Other settings become the variant."""

DEFAULTS = {"n_batch": 2048, "n_ubatch": 512, "type_k": "f16", "type_v": "f16", "n_gpu_layers": -1}
"""llama-bench leaves out the columns of settings that have their default."""

DEVICES = (
    r"\bDevice (?P<number>\d+): (?P<name>.{1,100}?), (?:compute capability|gfx)",  # CUDA and ROCm
    r"\bggml_vulkan: (?P<number>\d+) = (?P<name>.{1,100}?) \(",
    r"\bggml_metal\w*: (?:GPU name|picking default device|found device): +(?P<name>(?!MTL\d).+)",
)
BUILD = r"\bbuild: *(?P<commit>[0-9a-f]{6,40})\b"
FLASH_ATTENTION = r"(?i)\b(?P<no>without|no|with) (?:flash[ -]?attention|fa)\b"
FILE = r"([^\s/\\\"'`|<>()]{1,200})\.gguf\b"
QUANTIZATION = r"(?:mostly |all )?((?:I?Q|TQ)\d\w*|BF16|F16|F32|MXFP4)(?: - (Small|Medium|Large|[\d.]+ bpw)| MoE)?$"
TEST = r"(?:pp *(\d*))?(?: *\+ *)?(?:tg *(\d*))?(?: *@ *d *(\d+))?"
UNIT = r"(?:tok(?:en)?s?|t)/s(?:ec)?|tps"
MOST = 100
"""Letters of a cell, or of a table's columns, that a sentence repeats."""

LENGTHS = {"pp": 512, "tg": 128}
ASSUMED = "the columns name no lengths: read as llama-bench's defaults, pp512 and tg128"


@dataclass(frozen=True)
class Said:
    """What the lines before a row say. `is_used` when a row was read since the last line on devices."""

    gpus: tuple[tuple[str, str], ...] = ()
    model: str | None = None
    titles: tuple[str, ...] = ()  # LocalScore's: the device and the model
    flash_attn: int | None = None  # of the next table
    settings: tuple[tuple[str, int], ...] = ()  # llama-batched-bench's
    is_used: bool = False

    def after(self, line: str) -> Said:
        """With what this line, which is no row of a table, says."""
        for found in filter(None, (re.search(pattern, line) for pattern in DEVICES)):
            device = found.groupdict().get("number") or "", found["name"].strip()
            known = () if self.is_used else self.gpus
            return dataclasses.replace(self, gpus=tuple(dict.fromkeys([*known, device])), is_used=False)
        if "n_kv_max = " in line:
            settings = tuple((name, int(value)) for name, value in re.findall(r"\b(\w+) = (-?\d+)\b", line))
            return dataclasses.replace(self, settings=settings)
        if title := re.fullmatch(r"\| *([^|]+?) *\|", line):
            return dataclasses.replace(self, titles=(*self.titles, title[1])[-2:])
        if heading := re.search(FLASH_ATTENTION, line):
            return dataclasses.replace(self, flash_attn=int(heading["no"].lower() == "with"))
        return self

    def row(self, test: tuple[int, int, int], rate: float, **known: Any) -> Row:
        """A test (n_prompt, n_gen, n_depth) and its rate as a row of llama-bench's columns."""
        n_prompt, n_gen, n_depth = test
        gpus = ", ".join(name.replace(",", "") for _, name in self.gpus)
        ns = round(1e9 * (n_prompt + n_gen) / rate)
        lengths = {"n_prompt": n_prompt, "n_gen": n_gen, "n_depth": n_depth, "avg_ns": ns}
        return {"gpu_info": gpus or None, "model_type": self.model, **DEFAULTS, **lengths, **known}


def read(text: str, device: str | None = None, model: str | None = None) -> tuple[list[Row], list[str]]:
    """Rows with the number of their `line`, and a sentence for each line of a table that could not be read.

    `device` and `model` name what the text does not.
    """
    lines = _lines(text)
    files = {found for line in lines for found in re.findall(FILE, line)}
    said = Said(model=files.pop() if len(files) == 1 else None)
    rows: list[Row] = []
    problems: list[str] = []
    heads: list[str] = []
    is_unknown, flash_attn = False, None
    for number, (line, following) in enumerate(zip_longest(lines, lines[1:], fillvalue=""), 1):
        if found := re.search(BUILD, line):
            for row in rows:
                row.setdefault("build_commit", found["commit"])
        cells = _cells(line)
        if len(cells) < 2 or any(re.search(pattern, line) for pattern in DEVICES):
            said, is_unknown = said.after(line), False
            continue
        if _is_rule(line) or is_unknown:
            continue
        named = [_head(cell) for cell in cells]
        has_unit = any(head.endswith("t/s") for head in named)
        if _reader(named) and not _ends_in_test(cells) and (has_unit or not heads or _is_rule(following)):
            heads = named
            flash_attn, said = said.flash_attn, dataclasses.replace(said, flash_attn=None)
            if _reader(heads) is _of_scoreboard and not any(re.search(r"(?:pp|tg) *\d", head) for head in heads):
                problems.append(f"line {number}: {ASSUMED}")
            continue
        if _is_rule(following) or (not heads and len(_cells(following)) == len(cells) > 2 and not _ends_in_test(cells)):
            heads, is_unknown = [], True
            problems.append(f"line {number}: an unknown kind of table (columns: {', '.join(cells)[:MOST]})")
            continue
        if "|" in line[1:] and line[0] != "|" and len(cells) != len(heads) and not _ends_in_test(cells):
            continue  # text, such as a shell's pipe
        try:
            made = _rows(heads, cells, dataclasses.replace(said, flash_attn=flash_attn))
        except ValueError as problem:
            problems.append(f"line {number} skipped: {problem}")
            continue
        said = dataclasses.replace(said, is_used=True)
        rows += [{**row, "line": number} for row in made if isinstance(row, dict)]
        problems += [f"line {number}, {problem}" for problem in made if isinstance(problem, str)]
    return [_named(row, device, model) for row in rows], problems + _unnamed(rows, device, model)


def _rows(heads: Sequence[str], cells: Sequence[str], said: Said) -> Sequence[Row | str]:
    """The tests of a row, or what is wrong with one of them; without a head for each cell, by llama-bench's last two.

    ValueError says what is wrong with the row.
    """
    reader = _reader(heads)
    if reader and len(heads) == len(cells):
        return reader(dict(zip(heads, cells, strict=True)), said)
    if _ends_in_test(cells):
        model = {"model": cells[0]} if len(cells) > 2 else {}
        return _of_llama_bench({**model, "test": cells[-2], "t/s": cells[-1]}, said)
    if not heads:
        return []  # text with bars in it
    raise ValueError(f"it has {len(cells)} columns, and the head of the table has {len(heads)}")


def _reader(heads: Sequence[str]) -> Callable[[Cells, Said], Sequence[Row | str]] | None:
    """What reads the rows below these heads."""
    names = set(heads)
    if heads[-2:] == ["test", "t/s"]:
        return _of_llama_bench
    if names >= {"test", "pp t/s", "tg t/s"}:
        return _of_localscore
    if names >= {"pp", "tg", "n_kv", "s_pp t/s", "s_tg t/s"}:
        return _of_batched_bench
    return _of_scoreboard if any(_column_test(head) for head in heads[1:]) else None


def _of_llama_bench(cells: Cells, said: Said) -> list[Row]:
    known: Row = {COLUMNS[head]: cell for head, cell in cells.items() if head in COLUMNS and cell}
    shown = {*COLUMNS, "size", "params", "test", "t/s"}
    others = [f"{head} {cell}" for head, cell in cells.items() if head not in shown]
    test, rate = _test(cells["test"]), _rate(cells["t/s"])
    if test is None:
        raise ValueError(f"{cells['test'][:MOST]!r} is not a test such as pp512 or tg128 @ d4096")
    if params := re.fullmatch(r"([\d.,]+) ([MB])", cells.get("params", "")):
        known["model_n_params"] = round(_number(params[1]) * {"M": 1e6, "B": 1e9}[params[2]])
    if re.fullmatch(r"(CPU|BLAS|,)+", str(known.get("backends"))):
        known |= {"gpu_info": "", "n_gpu_layers": 0}
    return [said.row(test, rate, **known, variant=", ".join(others) or None)]


def _of_scoreboard(cells: Cells, said: Said) -> list[Row | str]:
    chip = next(iter(cells.values())).replace(",", "")
    cores = next((cell for head, cell in cells.items() if "gpu cores" in head and cell), None)
    commit = re.fullmatch(r"[0-9a-f]{6,40}", cells.get("commit") or cells.get("build") or "")
    known = {
        "gpu_info": f"{chip} {cores} GPU cores" if cores else chip,
        "flash_attn": said.flash_attn,
        "build_commit": commit and commit[0],
    }
    tests: list[Row | str] = []
    for head, cell in cells.items():
        column = _column_test(head)
        if column and not re.fullmatch(r"-*|n/?a|\?", cell, re.IGNORECASE):  # an empty cell was not measured
            quantization, test = column
            own = {"quantization": quantization} if quantization else {}
            try:
                tests.append(said.row(test, _rate(cell), **known, **own))
            except ValueError as problem:
                tests.append(f"column {head}: {problem}")
    return tests


def _of_localscore(cells: Cells, said: Said) -> list[Row]:
    done, _, of_all = cells.get("tokens processed", "").partition("/")
    if done.strip() != of_all.strip():
        return []  # the progress of a row that is printed again
    test = _test(cells["test"])
    if test is None or not test[0] or not test[1]:
        raise ValueError(f"{cells['test'][:MOST]!r} is not a test such as pp1024+tg16")
    known = {"variant": "LocalScore (llamafile)", "build_commit": None}
    if len(said.titles) == 2:
        known |= {"gpu_info": said.titles[0].rpartition(" - ")[0].replace(",", ""), "model_type": said.titles[1]}
    return [
        said.row((test[0], 0, 0), _rate(cells["pp t/s"]), **known),
        said.row((0, test[1], test[0]), _rate(cells["tg t/s"]), **known),
    ]


def _of_batched_bench(cells: Cells, said: Said) -> list[Row]:
    """Also of ik_llama.cpp's llama-sweep-bench, which has no column B, and both tests after N_KV tokens."""
    n_seq = cells.get("b", "1")
    n_prompt, n_gen, n_depth = int(_number(cells["pp"])), int(_number(cells["tg"])), 0
    if n_seq != "1":
        raise ValueError(f"{n_seq} sequences were decoded together; results of one sequence (B = 1) can be imported")
    after = n_prompt
    if "b" not in cells:
        n_depth = after = int(_number(cells["n_kv"]))
    known: Row = {name: value for name, value in said.settings if name in (*DEFAULTS, "n_threads", "flash_attn")}
    known |= {"build_commit": None}
    of_gen = [said.row((0, n_gen, after), _rate(cells["s_tg t/s"]), **known)] if n_gen else []
    return [said.row((n_prompt, 0, n_depth), _rate(cells["s_pp t/s"]), **known), *of_gen]


def _lines(text: str) -> list[str]:
    """The lines with plain dashes, spaces and signs, without colours; rows of HTML tables as rows with bars."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|[\u200b\u200e\u200f\ufeff]", "", text)
    text = re.sub(r"(?is)<tr\b(?:(?!<tr\b).)*?</tr *>", _bars, text)
    text = html.unescape(re.sub(r"(?is)<sup>[^<]{0,50}</sup>", "", text)) if "<" in text or "&" in text else text
    text = re.sub(r"[\u2010-\u2015\u2212]", "-", text).replace("\u00c2\u00b1", "\u00b1")
    return [re.sub(r"[^\S\t]", " ", line).strip(" ").lstrip("> ") for line in text.splitlines()]


def _bars(row: re.Match[str]) -> str:
    cells = re.findall(r"(?is)<t[hd]\b[^>]*>(.*?)(?=</?t[hdr]\b)", row[0])
    words = [" ".join(re.sub(r"<[^<>]*>", "", cell).split()).replace("|", "/") for cell in cells]
    return f"| {' | '.join(words)} |" + "\n" * row[0].count("\n")


def _cells(line: str) -> list[str]:
    if "|" not in line:
        return [_plain(cell) for cell in line.split("\t")] if line.count("\t") > 1 else []
    inner = re.sub(r"^\s*\||\|\s*$", "", line)
    return [_plain(cell.replace("\\|", "|")) for cell in re.split(r"(?<!\\)\|", inner)]


def _plain(cell: str) -> str:
    """Without links, emphasis, tags, and marks before the words."""
    cell = re.sub(r"\[([^\[\]]*)\]\([^()]*\)", r"\1", cell)
    return re.sub(r"[*`]|<[^<>]*>|^[\s\u2600-\u27bf\U0001f300-\U0001faff\ufe0f]+", "", cell).strip()


def _is_rule(line: str) -> bool:
    """Whether it is the line between the head and the rows of a table."""
    return "|" in line and "-" in line and not re.sub(r"[-|:+ ]", "", line)


def _head(cell: str) -> str:
    """The head of a column in small letters, its unit as t/s."""
    return re.sub(rf"(?<![\w/])(?:{UNIT})$", "t/s", re.sub(r"[\[\]()]", "", cell).lower().strip())


def _test(cell: str) -> tuple[int, int, int] | None:
    """`pp512`, `tg128 @ d4096` or `pp512+tg128` as n_prompt, n_gen, n_depth."""
    found = re.fullmatch(TEST, cell.strip(), re.IGNORECASE)
    lengths = found and tuple(int(length or 0) for length in found.groups())
    return (lengths[0], lengths[1], lengths[2]) if lengths and (lengths[0] or lengths[1]) else None


def _column_test(head: str) -> tuple[str | None, tuple[int, int, int]] | None:
    """The quantization, where it is named, and the test of a scoreboard's column, such as `q8_0 pp t/s`."""
    words = head.removesuffix("t/s").strip()
    found = re.fullmatch(r"(?:((?:iq|q|tq)\d\w*|bf16|f16|f32|mxfp4) +)?((pp|tg) *\d*(?: *@ *d *\d+)?)", words)
    if not found or not (found[1] or head != words or found[2] != found[3]):
        return None
    test = _test(found[2]) or _test(found[2].replace(found[3], f"{found[3]}{LENGTHS[found[3]]}"))
    return (found[1] and found[1].upper(), test) if test else None


def _ends_in_test(cells: Sequence[str]) -> bool:
    return len(cells) > 1 and _test(cells[-2]) is not None and re.match(r"\d", cells[-1]) is not None


def _rate(cell: str) -> float:
    """Tokens per second in a cell such as `1,234.56 ± 7.8 t/s`."""
    words = re.sub(rf"(?i)\s*\(?(?:\u00b1|\+/?-).*|\s*(?:{UNIT})\s*$", "", cell)
    try:
        rate = _number(words)
    except ValueError:
        raise ValueError(f"{cell[:MOST]!r} is not a rate in tokens/s") from None
    if rate <= 0:
        raise ValueError(f"{cell!r} is not a rate above 0")
    return rate


def _number(words: str) -> float:
    """A number with a point or a comma before its decimals, and commas, points or spaces between thousands."""
    words = words.strip()
    if re.fullmatch(r"\d{1,3}([, ]\d{3})+(\.\d+)?", words):
        words = re.sub("[, ]", "", words)
    elif re.fullmatch(r"\d{1,3}([. ]\d{3})+,\d+|\d+,\d+", words):
        words = re.sub("[. ]", "", words).replace(",", ".")
    if not re.fullmatch(r"\d+(\.\d+)?", words):
        raise ValueError(f"{words!r} is not a number")
    return float(words)


def _named(row: Row, device: str | None, model: str | None) -> Row:
    """With a device, a name of the model and its quantization; `device` and `model` are what the text does not name."""
    words, device = row["model_type"] or model or "unknown model", device and device.replace(",", "")
    found = re.search(QUANTIZATION, words)
    size = f"_{found[2][0]}" if found and found[2] in ("Small", "Medium", "Large") else ""
    known: Row = {"model_name": words[: found.start()].strip(" -.") if found else words}
    if "quantization" in row:
        known |= {"model_type": f"{known['model_name']} {row['quantization']}"}
    elif found:
        known |= {"quantization": found[1] + size}
    if row["gpu_info"] == "":
        known |= {"cpu_info": device}
    elif row["gpu_info"] is None:
        known |= {"gpu_info": device or " ".join(filter(None, ("unknown", row.get("backends"), "device")))}
    return {**row, **known}


def _unnamed(rows: Sequence[Row], device: str | None, model: str | None) -> list[str]:
    """Sentences on the first row without a device, and the first without a model."""
    sentences = []
    for column, option, is_given in (("gpu_info", "device", device), ("model_type", "model", model)):
        line = next((row["line"] for row in rows if not row[column]), None)
        if line and not is_given:
            sentences.append(f"line {line}: the text does not name the {option}; name it with --{option}")
    return sentences
