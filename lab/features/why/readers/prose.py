"""Models and devices that people name in words: in headings, captions and sentences of a text.

A name holds only if it is the only one of the text, or the nearest one in a heading above a
figure. Lines of logs, tables and commands are not prose.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from lab.features.why import facts
from lab.features.why.facts import Fact
from lab.features.why.figure import Figure
from lab.features.why.readers import commands, meaning

HEADING = re.compile(r"\s{0,9}(?:#{1,6}\s|\S.{0,120}:\s{0,9}$)")
NEAR_LINES = 2  # above a figure: a caption
LONGEST_LINE = 400
MOST_LINES = 1_000  # of prose: more is another text
OF_LOG = re.compile(
    r"\||\b(?:INFO|WARN|DEBUG|ERROR|slot|srv)\b|\bms\b|[\w.]{2,} {0,9}= |T/s\)|\[\d|: {4}|\w\(\)"
    r"|\d / \d+ tokens|^\W{0,9}\d{1,4}\.\d\d\.\d{3}\.\d{3} [A-Z] "
)
VERSUS = re.compile(
    r"\b(?:vs\.?|versus|than|instead|compared?|unlike|previous|expect\w*|should|would|faster"
    r"|slower|better|want|buy|upgrade|another|friend|like|you|your|some(?:one|body)|people|others|he|she|they|his|her"
    r"|their)\b",
    re.I,
)
OF_MODEL_IN_COMMAND = re.compile(r"\s(?:-m|--model|-hf|run|serve|--hf-repo)\s")
SENTENCE = re.compile(r"(?<=[.!?])\s")
NUMBER_OF = r"(?:\d{1,2} ?[x*\u00d7] ?|dual |two )?"
GPU = re.compile(
    rf"\b(?P<name>{NUMBER_OF}(?:(?:NVIDIA|GeForce|Tesla|AMD|Radeon|Apple|Intel) ){{0,2}}(?:"
    r"(?:RTX|GTX) ?(?:PRO ?|A)?\d{4}(?: ?(?:Ti|SUPER|Ada))*(?: Laptop)?(?: GPU)?"
    r"|RX ?\d{4}(?: ?(?:XTX|XT|GRE))?|[5-9]\d[0-7]0 ?(?:XTX|XT|GRE)"
    r"|Tesla[ -][PVTKM]\d{2,3}|[AH][1-9]00|H200|L40S?|GH200|B200"
    r"|P40|P100|V100|A6000|MI\d{2,3}X?|M[1-9] (?:Max|Ultra|Pro)|Arc [AB]\d{3}|DGX Spark"
    r"|Jetson (?:AGX )?Orin(?: Nano| NX)?|Adreno(?:\(TM\))? X?\d[\w-]{1,8}"
    r"|Ryzen AI MAX\+? ?\d{3}|GeForce \d{4}(?: ?(?:Ti|SUPER))*)(?: \d{1,3} ?GB)?)(?![\w%]| hours)",
    re.I,
)
BARE_GPU = re.compile(
    r"\b(?:on|with|using|a|an|my|the|one|single)\s(?P<name>(?:a |my |one |the )?"
    r"[2345]0[5-9]0(?: ?(?:Ti|SUPER))*)(?=[\s:,.)]|$)(?! ?(?:tokens?|MHz|MB|MiB|t/s|tok|ms))",
    re.I,
)
FAMILY = (
    r"qwen|llama|gemma|mi[sx]tral|ministral|phi|deepseek|gpt-?oss|glm|granite|nemotron|devstral"
    r"|minimax|kimi|codestral|magistral|tinyllama|smollm|wizardlm|yi|command-r|olmo|exaone|ernie"
)
WORD = r"[\w.-]{0,40}"
MODEL = re.compile(
    rf"(?<![\w./-])(?P<name>(?:[\w.-]{{2,40}}/)?(?={WORD}(?:{FAMILY}))"
    r"[A-Za-z][\w.]*(?:[-_][\w.]+)*(?::\d[\w.-]{1,30})?"
    r"(?:(?: \d(?:\.\d)?)? \d{1,3}(?:\.\d)?B(?: A\d{1,2}B)?)?)"
    r"(?:[ ,(`]{1,3}(?P<quantization>(?:UD-)?I?Q[2-8]_\w{1,6}|BF16|F16|FP8|MXFP4|NVFP4|AWQ"
    r"|GPTQ)\b)?",
    re.I,
)
SIZED = re.compile(r"(?:^|[^A-Za-z0-9])[a-z]?\d{1,4}(?:\.\d{1,2})?b(?:$|[^a-z0-9])", re.I)


@dataclass(frozen=True)
class Named:
    """What a line of prose names."""

    line: int
    facts: dict[str, Fact]
    is_heading: bool
    is_compared: bool = False  # with others, so that it is not certainly of the figures


def with_prose(
    figures: Sequence[Figure], text: str, headings: Collection[int | None] = ()
) -> list[Figure]:
    """The figures with the names in words, where nothing else gives a model or a device;
    `headings` are the lines above logs and tables.
    """
    lacking = [
        name
        for name in (facts.MODEL, facts.HARDWARE)
        if any(name not in figure.facts for figure in figures)
    ]
    if not lacking:
        return list(figures)
    of_figures = {figure.line for figure in figures if "\n" in text}
    named = named_in(text, of_figures, headings)
    completed = list[Figure]()
    for figure in figures:
        added = dict[str, Fact]()
        for name in lacking:
            if name not in figure.facts:
                added |= nearest(named, name, figure.line or 1)
        if facts.QUANTIZATION in figure.facts:
            added.pop(facts.QUANTIZATION, None)
        completed.append(replace(figure, facts={**figure.facts, **added}))
    return completed


def nearest(named: Sequence[Named], name: str, line: int) -> dict[str, Fact]:
    """The only name of a kind, or the one of the heading or caption above a line."""
    of_kind = [each for each in named if name in each.facts]
    values = {str(each.facts[name].value).lower() for each in of_kind}
    of_kind = [each for each in of_kind if not each.is_compared]
    above = [each for each in of_kind if each.line <= line]
    if len(values) == 1 and of_kind:
        return of_name((above or of_kind)[-1], name)
    if above and (above[-1].is_heading or line - above[-1].line <= NEAR_LINES):
        return of_name(above[-1], name)
    return {}


def of_name(named: Named, name: str) -> dict[str, Fact]:
    """The fact of a name, a model's with its quantization."""
    names = (name, facts.QUANTIZATION) if name == facts.MODEL else (name,)
    return {each: named.facts[each] for each in names if each in named.facts}


def named_in(
    text: str, of_figures: set[int | None], headings: Collection[int | None]
) -> list[Named]:
    """The sentences that name a model or a device."""
    named = list[Named]()
    n_lines = 0
    for number, line in enumerate(text.split("\n"), 1):
        is_prose = len(line) <= LONGEST_LINE and not OF_LOG.search(line)
        is_command = commands.START.search(line) and OF_MODEL_IN_COMMAND.search(line)
        if number in of_figures or not is_prose or is_command:
            continue
        n_lines += bool(line.strip())
        if n_lines > MOST_LINES:
            break
        is_heading = number in headings or bool(HEADING.match(line))
        for sentence in SENTENCE.split(line):
            models = models_of(sentence, number)
            devices = devices_of(sentence, number)
            is_compared = bool(VERSUS.search(sentence)) or max(len(models), len(devices)) > 1
            for found in models + devices:
                named.append(Named(number, found, is_heading, is_compared))
    return named


def devices_of(sentence: str, line: int) -> list[dict[str, Fact]]:
    """The devices that a sentence names, each as a fact."""
    names = dict.fromkeys(match["name"] for match in GPU.finditer(sentence))
    names = names or dict.fromkeys(match["name"] for match in BARE_GPU.finditer(sentence))
    devices = list[dict[str, Fact]]()
    for name in names:
        plain = re.sub(r"^(?:a|my|one|the) ", "", name, flags=re.I)
        if plain[:4].isdigit():  # only AMD's end so
            plain = f"{'RX' if plain.endswith(('XT', 'XTX', 'GRE')) else 'RTX'} {plain}"
        devices.append({facts.HARDWARE: Fact(plain, line)})
    return devices


def models_of(sentence: str, line: int) -> list[dict[str, Fact]]:
    """The models that a sentence names, each with its quantization if that stands behind it."""
    models = dict[str, dict[str, Fact]]()
    for match in MODEL.finditer(sentence):
        if not SIZED.search(match["name"]) and not match["quantization"]:
            continue
        read = facts.stated(meaning.name_of_model(match["name"].rstrip(".:,")), line)
        if match["quantization"]:
            read[facts.QUANTIZATION] = Fact(match["quantization"], line)
        models[match["name"].lower()] = read
    return list(models.values())
