"""Command lines in a text: the program that they start, its model and its settings.

A command may be indented, quoted, behind a shell's prompt, in a compose file, or over several
lines. Variables of the environment that stand for options are read like them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lab.core import shell
from lab.features.why import facts
from lab.features.why.facts import Fact
from lab.features.why.readers import meaning
from lab.features.why.readers.meaning import FACT_NAMES, FILE, NEGATED, TABLE

LLAMA = "llama.cpp"
BENCH = "llama-bench"
OLLAMA = "Ollama"
VLLM = "vLLM"
SGLANG = "SGLang"
KOBOLD = "KoboldCpp"
MLX = "mlx_lm"
TABBY = "TabbyAPI"

NO_SHORT_OPTIONS = (VLLM, SGLANG, MLX, OLLAMA, TABBY)
"""Programs whose options with one dash are not those of llama.cpp: -m is no model."""

STARTS: list[tuple[str, str]] = [(start, name) for name, start in TABLE["starts"].items()]
NAMES = "|".join(f"(?P<p{number}>{start})" for number, (start, _) in enumerate(STARTS))
START = re.compile(
    rf"(?:^|[\s'\"/\\=:>(\[])(?:{NAMES})(?:\.exe|\.py)?['\"]?(?=[\s,\]]|$)", re.I
)
LIST_START = re.compile(
    r"^\W{0,20}(?:command|args|cmd|entrypoint|extra_?args)['\"]?\s{0,3}[:=]", re.I
)
IMAGE = re.compile(r"^\W{0,20}image['\"]?\s{0,3}[:=]", re.I)
OPTION = re.compile(r"-{1,2}[A-Za-z][\w-]{0,40}(?:=.{0,300})?$", re.S)
BEFORE = re.compile(r"^(?:\s{0,40}(?:>|[\w.-]{1,40}\s{1,9}\||[-*\u2022](?=\s)))*\s{0,40}")
"""Marks of quotes, a prefix of docker, and bullets, before a line's own words."""

ENVIRONMENT = re.compile(
    r"\b(LLAMA_ARG_[A-Z_]{1,40}|OLLAMA_(?:FLASH_ATTENTION|KV_CACHE_TYPE|NUM_PARALLEL"
    r"|CONTEXT_LENGTH))[\"']?\s{0,3}[=:]\s{0,3}[\"']?([\w./:-]{1,200})"
)
LLAMA_ARG = "LLAMA_ARG_"
DEVICES = re.compile(
    r"\b((?:CUDA|HIP|ROCR|GGML_VK)_VISIBLE_DEVICES|HSA_OVERRIDE_GFX_VERSION)[\"']?\s{0,3}="
    r"\s{0,3}[\"']?(\d[\d.]{0,12}(?:, ?\d{1,2}){0,15})"
)
"""Variables that choose devices for any program, and their values."""

PYTHON_SETTING = re.compile(
    r"['\"]?\b([a-z][a-z_]{1,40})['\"]?\s?[:=]\s?('[^'\n]{0,300}'|\"[^\"\n]{0,300}\"|[{\w.-]{1,40})"
)
NOT_SET = ("None", "False", "''", "'auto'", "'none'")
SWITCHES_OF_OLLAMA = ("--verbose", "--nowordwrap", "--insecure", "--hidethinking")
ENDS = ("&&", "||", "|", ";", "&", ">", ">>", "<", "2>&1", "<<")
MOST_LINES = 80
MOST_LETTERS = 10_000

SAMPLERS = re.compile(
    r"-{1,2}(temp|temperature|top-?[kpn]|min-?p|typical|samplers|sampling-seq|mirostat.*|dry-.*|xtc-.*"
    r"|(?:repeat|repetition|presence|frequency)-penalty|rep_?pen.*|dynatemp.*)$"
)
DRAFTS = re.compile(
    r"(?:-md|-hfd|-hfrd|-ngld|-cd|-devd|-mtp|--model-draft|--hf-repo-draft|--draft.*|--spec-.*"
    r"|--speculative-.*|--num-speculative-tokens|--lookup.*|--gpu-layers-draft)$"
)
NOT_OF_SPEED = re.compile(
    r"(?:-[a-z]|-hff|-ld|-mu|-mm|-lv|-pg|-cnv|-no-cnv|-sp|-oe?|-f[a-z]?|--(?:host|port|alias|jinja|chat-template.*|chat-format|clip-model-path|api-key.*"
    r"|log-.*|no-log.*|verbos.*|prompt.*|file|n-predict|predict|seed|metrics|props|slots|no-webui|webui.*"
    r"|served-model-name|trust-remote-code|mmproj.*|hf-file|hf-token|timeout|path|color|conversation"
    r"|reasoning.*|tool-call.*|enable-auto-tool-choice|special|ignore-eos|no-warmup|simple-io|max-tokens"
    r"|rm|name|gpus|runtime|ipc|restart|volume|publish|env|network|download-dir|skiplauncher|quiet"
    r"|repetitions|output.*|progress|delay|tokens|help|version|list-devices|help|system-prompt.*|tokenizer.*"
    r"|ollama-engine|usecublas|usevulkan|usecuda|numa|prio.*|n-prompt|n-gen|n-depth|endpoint.*|single-turn))$"
)
"""Options that do not change the speed of a step, or say only what was asked."""

EXPRESSION = re.compile(
    r"(?:-ot|--override-tensors?)[= ]{1,3}(?:\"[^\"\n]{0,300}\"|'[^'\n]{0,300}'|\S{1,300})"
)
BACKSLASH = "\x1a"  # of an expression, which is no path of Windows
FLAGS = {name for name in FACT_NAMES if name.startswith("-")}
DEFAULTS_OF_LLAMA = {
    "batch": 2048,
    "ubatch": 512,
    "cache_type_k": "f16",
    "cache_type_v": "f16",
}
LIKE_A_MODEL = re.compile(r"(?!-)\S{0,200}[\d:/]")
"""A word that can be a model's name, and is not the next one of a sentence."""


@dataclass(frozen=True)
class StartedProgram:
    """What a command says: the line where it begins, the program ("": unknown), the facts."""

    line: int
    program: str
    facts: Mapping[str, Fact]


def commands(text: str) -> Iterator[StartedProgram]:
    """The commands of a text in order, and lines of options alone."""
    lines = text.split("\n")
    program_of_image = ""
    number = 0
    while number < len(lines):
        line = lines[number][:MOST_LETTERS]
        start = START.search(line)
        if IMAGE.search(line) and start:
            program_of_image = program_of(start)
            number += 1
            continue
        settings = python_settings(line, number + 1)
        if settings:
            yield settings
            number += 1
            continue
        block = ""
        program = ""
        n_lines = 1
        if start:
            block, n_lines = block_from(lines, number, line[start.end() :].lstrip("'\","))
            program = program_of(start)
        elif LIST_START.search(line):
            _, _, rest = re.sub(LIST_START, "\0", line, count=1).partition("\0")
            block, n_lines = block_from(lines, number, rest)
            inner = START.search(block)
            program = program_of(inner) if inner else program_of_image
            block = block[inner.end() :] if inner else block
        elif is_of_options(line):
            block, n_lines = block_from(lines, number, own_words(line))
        read = facts_of(words_of(block), program, number + 1) if block else {}
        if read:
            yield StartedProgram(number + 1, program, read)
            number += n_lines
        else:
            number += 1
    yield from variables(lines)


def python_settings(line: str, number: int) -> StartedProgram | None:
    """Settings that a server prints as Python writes them: Namespace(model='x', dtype='auto')."""
    for begin, program in TABLE["python_settings"]["begin"]:
        match = re.search(begin, line)
        if not match:
            continue
        tokens = list[str]()
        for name, value in PYTHON_SETTING.findall(line[match.end() :]):
            flag = normal(f"--{name}")
            is_of_speed = name in TABLE["python_settings"]["names"] or flag in FACT_NAMES
            if is_of_speed and value not in NOT_SET:
                tokens += [flag] if value == "True" else [flag, value.strip("'\"")]
        read = facts_of(tokens, program, number)
        return StartedProgram(number, program, read) if read else None
    return None


def variables(lines: list[str]) -> Iterator[StartedProgram]:
    """Variables of the environment that stand for options."""
    for number, line in enumerate(lines, 1):
        read = dict[str, Fact]()
        program = LLAMA
        for match in ENVIRONMENT.finditer(line[:MOST_LETTERS]):
            if match[1].startswith(LLAMA_ARG):
                flag = "--" + match[1].removeprefix(LLAMA_ARG).lower().replace("_", "-")
                read |= facts_of([flag, match[2]], "", number)
            else:
                program = OLLAMA
                read |= facts_of_option(match[1], match[2], "", number)
        if read:
            yield StartedProgram(number, f"{program}, environment", read)
        chosen = dict(DEVICES.findall(line[:MOST_LETTERS]))
        if chosen:
            values = {name: value.replace(" ", "") for name, value in chosen.items()}
            yield StartedProgram(number, ", environment", facts.stated(values, number))


def program_of(start: re.Match[str]) -> str:
    """The program that a command starts."""
    for number, (_, program) in enumerate(STARTS):
        if start[f"p{number}"] is not None:
            return program
    return ""


def own_words(line: str) -> str:
    """A line without marks of quotes, bullets and prefixes."""
    return line[:MOST_LETTERS][BEFORE.match(line).end() :] if line else ""  # type: ignore[union-attr]


def is_of_options(line: str) -> bool:
    """Whether a line has two options of llama.cpp or more, as people name them in a sentence."""
    tokens = line[:400].replace("`", " ").replace(",", " ").split()
    return sum(word.partition("=")[0] in FLAGS for word in tokens) >= 2


def block_from(lines: list[str], number: int, first: str) -> tuple[str, int]:
    """The words of a command that may go on below, and how many lines it has."""
    previous = first.rstrip()
    is_list = not first.strip(" |>-[")
    parts = [] if is_list else [first]
    n_lines = 1
    for line in lines[number + 1 : number + MOST_LINES]:
        line_text = own_words(line)
        tokens = line_text.strip(" \t\"',[]")
        goes_on = previous.endswith(("\\", "^")) or OPTION.match(tokens.partition(" ")[0])
        is_item = is_list and bool(re.match(r"[\s>]{0,40}(?:- |[\"'])", line))
        if not line_text.strip() or START.search(line) or not (goes_on or is_item):
            break
        parts.append(line_text)
        previous = line_text.rstrip()
        n_lines += 1
    return " ".join(part.rstrip().rstrip("\\^") for part in parts), n_lines


def words_of(block: str) -> list[str]:
    """The words of a command, up to the end of its part of a pipe."""
    text = re.sub(r"([\"'])\s{0,9},", r"\1 ", block)
    if not re.search(r"[\"']\s{0,3}[\[{]", text):  # of a list, not of an expression in a word
        text = re.sub(r"(?<![^\s\"',(\[])\[|\](?![^\s\"',\]])", " ", text)
    text = EXPRESSION.sub(lambda match: match[0].replace("\\", BACKSLASH), text)
    try:
        tokens = shell.split(text.replace("\\:", ":").replace("\\", "/"))  # a path of Windows
    except ValueError:
        tokens = text.replace('"', " ").replace("'", " ").split()
    remaining = list[str]()
    for written in tokens:
        word = written.replace(BACKSLASH, "\\")
        if word in ENDS:
            break
        head, semicolon, _ = word.partition(";")
        if semicolon and "=" not in word and "{" not in word:
            remaining.append(head)
            break
        remaining.append(word.rstrip(",:\"'") or word)
    return remaining


def pairs_of(tokens: list[str]) -> Iterator[tuple[str, str | None]]:
    """The options of a command with their values; None for an option without one."""
    place = 0
    while place < len(tokens):
        word = tokens[place]
        place += 1
        if not OPTION.match(word):
            continue
        flag, sign, value = word.partition("=")
        if sign:
            yield normal(flag), value
        elif place < len(tokens) and not OPTION.match(tokens[place]):
            yield normal(flag), tokens[place]
            place += 1
        else:
            yield normal(flag), None


def normal(flag: str) -> str:
    """An option as llama.cpp writes it."""
    return flag.lower().replace("_", "-") if flag.startswith("--") else flag


def facts_of(tokens: list[str], program: str, line: int) -> dict[str, Fact]:
    """The facts of a command's words; none if it has no option and no model."""
    read = dict[str, Fact]()
    texts: dict[str, list[str]] = {facts.SAMPLING: [], facts.SPECULATION: []}
    read |= facts.stated(meaning.name_of_model(argument_of(tokens, program)), line)
    for flag, value in pairs_of(tokens):
        if program == BENCH and value and "," in value:
            continue  # a list of tests
        kind = kind_of_option(flag)
        if kind:
            texts[kind].append(f"{flag.lstrip('-')} {value or ''}".strip())
        else:
            read |= facts_of_option(flag, value, program, line)
    if texts[facts.SAMPLING]:
        read[facts.SAMPLING] = Fact(", ".join(texts[facts.SAMPLING]), line)
    drafts = ", ".join(texts[facts.SPECULATION])
    if drafts and not drafts.endswith(" none"):
        read[facts.SPECULATION] = Fact("drafts", line, shown=f"drafts ({drafts.rstrip(' {')})")
    if read and program:
        read = {**implied(program), **read, facts.COMMAND: Fact(program, line)}
    if program == OLLAMA and "batch" in read:
        read["ubatch"] = read["batch"]
    return read


def argument_of(tokens: list[str], program: str) -> str:
    """The model that a command names without an option; "" if it names none so."""
    own = [word for word in tokens if word not in SWITCHES_OF_OLLAMA]
    if program in (OLLAMA, VLLM) and own and LIKE_A_MODEL.match(own[0]):
        return own[0]
    return own[-1] if program == KOBOLD and own and FILE.search(own[-1]) else ""


def kind_of_option(flag: str) -> str:
    """The fact that several options make together; "" for any other option."""
    if SAMPLERS.match(flag):
        return facts.SAMPLING
    return facts.SPECULATION if DRAFTS.match(flag) else ""


def facts_of_option(flag: str, value: str | None, program: str, line: int) -> dict[str, Fact]:
    """The facts of one option; none for one that does not change the speed."""
    is_short = not flag.startswith("--") and flag != "-tp"
    if is_short and program in NO_SHORT_OPTIONS:
        return {}
    name = FACT_NAMES.get(flag)
    if name and (flag in NEGATED or flag.startswith("--no-")):
        return {name: Fact(False, line, shown="off")}
    if name:
        return meaning.facts_of(name, value, line)
    if program and not NOT_OF_SPEED.match(flag):
        return meaning.facts_of(flag.lstrip("-"), value, line)
    return {}


def implied(program: str) -> dict[str, Fact]:
    """What the documented defaults of a program say where its command does not."""
    values = dict[str, object]()
    if program in (LLAMA, BENCH):
        values |= DEFAULTS_OF_LLAMA
    if program in (LLAMA, VLLM, SGLANG, MLX):
        values[facts.SPECULATION] = facts.NO_DRAFTS
    return facts.defaults(values)
