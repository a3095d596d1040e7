"""What a text says of a setup besides its figures: commands, the start of logs, devices, builds.

A fact holds for the figures below it, until another start says otherwise; what programs print at
their end (build, devices, `ollama ps`) holds for the figures above it too.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lab.features.why import facts
from lab.features.why.facts import Fact
from lab.features.why.figure import Figure
from lab.features.why.readers import commands
from lab.features.why.readers.commands import (
    BENCH,
    KOBOLD,
    LLAMA,
    MLX,
    OLLAMA,
    SGLANG,
    TABBY,
    VLLM,
    StartedProgram,
)
from lab.features.why.readers.values import matched
from lab.formats import llama_bench_rows

ANY = ""  # a figure or a statement of no certain program
OF_SOURCE = (
    ("llama-bench", BENCH),
    ("vLLM", VLLM),
    ("SGLang", SGLANG),
    ("Ollama", OLLAMA),
    ("Kobold", KOBOLD),
    ("mlx", MLX),
    ("Tabby", TABBY),
    ("llama", LLAMA),
    ("ik_llama", LLAMA),
)
"""The program by the first letters of a figure's source."""

OF_LLAMA = (LLAMA, BENCH, OLLAMA, KOBOLD, ANY)
"""Programs that print the log of llama.cpp."""

ONLY_BELOW = (BENCH,)
"""llama-bench prints its build below the table: it is not of the next one."""

DEVICE_ID = "device_id"
DRAFT = "draft"
LOGS: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        OF_LLAMA,
        r"\bloading (?:draft|speculative) model[^\n]{0,40}?'?(?P<draft>[^'\n]{1,400}?\.gguf)\b",
    ),
    (
        OF_LLAMA,
        r"\b(?:loading model|loaded meta data with [^\n]{1,80} from) "
        r"'?(?P<model>[^'\n]{1,400}?\.gguf)\b",
    ),
    (
        OF_LLAMA,
        r"\b(?:threadpool init, |system[_ ]info: |, )n_threads = (?P<threads>\d{1,4})\b",
    ),
    (OF_LLAMA, r"\bn_threads_batch = (?P<threads_batch>\d{1,4})\b"),
    (OF_LLAMA, r"\bn_batch {0,8}= (?P<batch>\d{1,6})\b"),
    (OF_LLAMA, r"\bn_ubatch {0,8}= (?P<ubatch>\d{1,6})\b"),
    (OF_LLAMA, r"\bn_ctx {0,8}= (?P<n_ctx>\d{1,9})\b"),
    (OF_LLAMA, r"\bflash_attn {0,8}= (?P<flash_attn>\w{1,10})\b"),
    (OF_LLAMA, r"\bFlash Attention was auto, set to (?P<flash_attn>\w{1,10})"),
    (OF_LLAMA, r"\bn_gpu_layers {0,8}= (?P<n_gpu_layers>-?\d{1,6})\b"),
    (OF_LLAMA, r"\boffloaded (?P<offloaded>\d{1,4}/\d{1,4}) layers to GPU"),
    (
        OF_LLAMA,
        r"\bK \((?P<cache_type_k>\w{2,10})\): {1,9}[\d.]{1,12} MiB, "
        r"V \((?P<cache_type_v>\w{2,10})\)",
    ),
    (OF_LLAMA, r"\binitializing(?: slots)?, n_slots = (?P<parallel>\d{1,4})\b"),
    (
        OF_LLAMA,
        r"\bfile type {1,8}= (?:all )?"
        r"(?P<quantization>[A-Z][A-Z0-9_]{1,12}(?: - (?:Small|Medium|Large))?)",
    ),
    (OF_LLAMA, r"\bmodel params {1,8}= (?P<parameters>[\d.]{1,10} [KMBT])\b"),
    (OF_LLAMA, r"\bgeneral\.name(?: str)? {1,20}= (?P<title>[^\n]{1,100})"),
    (OF_LLAMA, r"\bsampler chain: (?P<sampling>[^\n]{1,300})"),
    ((OLLAMA,), r"\bBatchSize:(?P<batch>\d{1,6}) FlashAttention:(?P<flash_attn>\w{1,10})"),
    ((OLLAMA,), r"\bFlashAttention:\w{1,10} KvSize:(?P<n_ctx>\d{1,9})"),
    ((OLLAMA,), r"\bKvCacheType:(?P<cache_types>[a-z]\w{1,9})\b"),
    ((OLLAMA,), r"\bNumThreads:(?P<threads>\d{1,4})\b"),
    ((OLLAMA,), r'\benabling flash attention"?(?P<flash_attn>)'),
    (
        (VLLM,),
        r"\bLLM engine \(v?(?P<build>[\w.+-]{1,40})\) with config: model='(?P<model>[^'\n]{1,300})'"
        r"(?:, speculative_config=(?P<speculation>None|[^\n]{1,200}?)(?=, tokenizer=))?",
    ),
    ((VLLM,), r"\btensor_parallel_size=(?P<tensor_parallel_size>\d{1,3})\b"),
    ((VLLM,), r"\bquantization=(?P<quantization>[a-z]\w{1,30})\b"),
    ((VLLM,), r"\benforce_eager=(?P<enforce_eager>True|False)\b"),
    ((VLLM,), r"\bkv_cache_dtype=(?P<kv_cache_dtype>\w{2,20})\b"),
    ((VLLM,), r"\bvLLM (?:API server )?version:? v?(?P<build>\d[\w.+-]{1,40})"),
    ((SGLANG,), r"\bserver_args=ServerArgs\(model_path='(?P<model>[^'\n]{1,300})'"),
    ((KOBOLD,), r"\bWelcome to KoboldCpp - Version (?P<build>[\d.]{1,20}\d)"),
)
"""What programs print when they start, by the programs whose figures it is of."""

ENDS: tuple[tuple[tuple[str, ...], str], ...] = (
    ((LLAMA, BENCH, ANY), r"\bbuild: {0,9}(?P<build>\d{2,6}) \([0-9a-f]{6,40}\)"),
    (ONLY_BELOW, r"\bbuild: {0,9}[0-9a-f]{6,40} \((?P<build>\d{1,6})\)"),
    (
        (LLAMA, OLLAMA, VLLM, SGLANG),
        r"[\"']model[\"'] {0,3}: {0,3}[\"'](?P<tag>[^\"'\n]{2,200})[\"']",
    ),
    ((LLAMA, BENCH, ANY), r"\bversion: (?P<build>\d{3,6}) \([0-9a-f]{6,40}\)"),
    ((LLAMA, ANY), r"\bb(?P<build>\d{4,6})-[0-9a-f]{7,10}\b"),
    ((LLAMA, BENCH, ANY), r"\bbuild b(?P<build>\d{4,6})\b"),
    (
        (OLLAMA,),
        r"\(version (?P<build>\d[\w.+-]{1,30})\)|\bollama version is (?P<build2>[\w.]{1,30}\d)",
    ),
    (
        (OLLAMA,),
        r"^\W{0,9}(?P<tag>[\w./:-]{2,100}) {1,60}(?P<file_id>[0-9a-f]{12}) {1,60}"
        r"[\d.]{1,8} [KMGT]B {1,60}"
        r"(?P<placement>\d{1,3}%(?:/\d{1,3}%)? (?:CPU/GPU|GPU|CPU))"
        r"(?: {1,60}(?P<n_ctx>\d{2,9})\b)?",
    ),
    (
        (),
        r"\bDevice (?P<device_id>\d{1,3}): (?P<hardware>[^\n,]{1,100}?), "
        r"(?:compute capability|gfx)",
    ),
    ((), r"\bggml_vulkan: (?P<device_id>\d{1,3}) = (?P<hardware>[^\n]{1,100}?) \("),
    (
        (),
        r"\bggml_metal\w{0,20}: (?:GPU name|picking default device|named device): +"
        r"(?P<hardware>(?!MTL\d)[^\n]{1,100})",
    ),
    (
        (),
        r"(?:using device|- ) ?(?:CUDA|ROCm|Vulkan|SYCL|MTL|Metal)(?P<device_id>\d{1,3}) "
        r"\((?P<hardware>[^\n()]{1,80}(?:\([^\n()]{1,20}\)[^\n()]{0,40})?)\)",
    ),
    (
        (),
        r"- (?:CUDA|ROCm|Vulkan|SYCL|MTL)(?P<device_id>\d{1,3}) {0,9}: "
        r"(?P<hardware>[^\n]{1,80}?) \(\d{2,9} MiB",
    ),
    (
        (),
        r"\binference compute\"? id=(?P<device_id>[\w-]{1,60}) [^\n]{0,200}\b(?:description|name)="
        r"\"(?P<hardware>[^\"\n]{1,80})\"",
    ),
    (
        (),
        r"\| {1,4}(?P<device_id>\d{1,2}) {2,4}"
        r"(?P<hardware>(?:NVIDIA|Tesla|Quadro) [^\n|]{1,60}?) {1,20}O(?:n|ff) ",
    ),
    (
        (),
        r"^\W{0,9}(?:GPUs?|Hardware|Graphics card)\W{0,4}: {0,9}\W{0,4}(?P<hardware>[^\n]{3,80})",
    ),
)
"""The same of what may stand above the figures or below them; (): of any program."""

TRIMMED = re.compile(r"[\s*|]+$|, driver.*$", re.I)
OF_SERVER = ("parallel", facts.SAMPLING)  # also below the start of a draft model
OF_MODEL = (facts.FILE_ID, facts.PLACEMENT)
KEPT = (facts.HARDWARE, facts.BUILD)
"""What a new start leaves as it was."""


@dataclass(frozen=True)
class Statement:
    """Facts of a line, and the programs whose figures they are of; () for any program."""

    line: int
    programs: Sequence[str]
    facts: Mapping[str, Fact]
    is_end: bool = False
    device_id: str | None = None
    draft: str | None = None


@dataclass
class Known:
    """What is known of a program's setup at a line of the text."""

    facts: dict[str, Fact] = field(default_factory=dict)
    devices: dict[str, Fact] = field(default_factory=dict)
    drafts: set[str] = field(default_factory=set)
    has_command: bool = False
    is_of_draft: bool = False
    has_figure: bool = False  # since the last start

    def begin(self, command: StartedProgram) -> None:
        """A command starts a program: what earlier ones said no longer holds."""
        unchanged = {name: fact for name, fact in self.facts.items() if name in KEPT}
        model = facts.value_of(command.facts, facts.MODEL)
        if model and model == facts.value_of(self.facts, facts.MODEL):
            of_model = {name: self.facts.get(name) for name in OF_MODEL}
            unchanged |= {name: fact for name, fact in of_model.items() if fact}
        if command.program == OLLAMA:  # a client: the settings of its server stay
            names = set(self.facts) - {facts.MODEL, facts.QUANTIZATION, *OF_MODEL}
            unchanged |= {name: self.facts[name] for name in names}
        self.facts = {**unchanged, **command.facts}
        self.has_command = True
        self.is_of_draft = False
        self.has_figure = False

    def learn(self, statement: Statement) -> None:
        """Take the facts of a line, unless they are of a draft model."""
        if statement.draft:
            self.drafts.add(statement.draft)
            self.is_of_draft = True
            self.facts.setdefault(facts.SPECULATION, Fact("drafts", statement.line))
        new = dict(statement.facts)
        model = new.get(facts.MODEL)
        if model and not statement.is_end:
            self.is_of_draft = model.value in self.drafts
            if self.has_figure and not self.is_of_draft:
                unchanged = {name: fact for name, fact in self.facts.items() if name in KEPT}
                self.facts = unchanged
                self.has_figure = False
        if facts.HARDWARE in new:
            fact = new.pop(facts.HARDWARE)
            if self.has_figure and statement.device_id in ("0", None):
                self.devices = {}
            self.devices.setdefault(statement.device_id or "", fact)
            self.facts[facts.HARDWARE] = hardware_of(self.devices)
        if statement.is_end and self.has_command:  # a name that a server gives to its file
            model = new.pop(facts.MODEL, None)
            new.pop(facts.QUANTIZATION, None)
        if not model and facts.QUANTIZATION in self.facts:  # the file's name is more exact
            new.pop(facts.QUANTIZATION, None)
        if self.is_of_draft:
            new = {name: fact for name, fact in new.items() if name in OF_SERVER}
        self.facts |= new


def hardware_of(devices: Mapping[str, Fact]) -> Fact:
    """The devices as one fact: 2x NVIDIA GeForce RTX 3090."""
    counts = Counter(fact.value for fact in devices.values())
    names = [name if n == 1 else f"{n}x {name}" for name, n in counts.items()]
    first = next(iter(devices.values()))
    return Fact(", ".join(names), first.line)


def program_of(figure: Figure) -> str:
    """The program whose commands and logs are of a figure."""
    for begin, program in OF_SOURCE:
        if figure.source.startswith(begin):
            return program
    return ANY


def with_setups(figures: Sequence[Figure], text: str) -> list[Figure]:
    """The figures, in order of their lines, with what the text says of their setups."""
    statements = list(statements_of(text))
    ends = [statement for statement in statements if statement.is_end]
    started = list(commands.commands(text))
    completed = list[Figure]()
    states = dict[str, Known]()
    events: list[tuple[int, int, StartedProgram | Statement | Figure]] = []
    events += [(command.line, 0, command) for command in started]
    events += [(statement.line, 1, statement) for statement in statements]
    events += [(figure.line or 0, 2, figure) for figure in figures]
    for program in {program_of(figure) for figure in figures}:
        states[program] = Known()
    for _, _, event in sorted(events, key=lambda each: each[:2]):
        if isinstance(event, Figure):
            program = program_of(event)
            now = states[program]
            now.has_figure = True
            facts_below = {**said_below(event, program, ends, started, now), **now.facts}
            completed.append(with_facts(event, facts_below))
            continue
        for program, now in states.items():
            if isinstance(event, Statement):
                if event.programs == ONLY_BELOW:
                    continue
                if not event.programs or program in event.programs:
                    now.learn(event)
            elif event.program == program or (not program and event.program):
                now.begin(event)
            elif is_addition(event, program):
                now.facts |= event.facts
    return completed


def is_addition(command: StartedProgram, program: str) -> bool:
    """Whether options alone, or variables of the environment, are of a program."""
    if not command.program:
        return program in (LLAMA, BENCH, ANY)
    of, comma, _ = command.program.partition(",")
    return bool(comma) and of == program


def said_below(
    figure: Figure,
    program: str,
    statements: Sequence[Statement],
    started: Sequence[StartedProgram],
    now: Known,
) -> dict[str, Fact]:
    """What is said below a figure: what programs print at their end, and the only command."""
    facts_below = dict[str, Fact]()
    line = figure.line or 0
    later = [
        command.line
        for command in started
        if command.line > line and (command.program == program or not program)
    ]
    end = later[0] if later and now.has_command else None
    below = Known()
    for statement in statements:
        is_of_program = not statement.programs or program in statement.programs
        if is_of_program and line < statement.line:
            if end is not None and statement.line > end:
                break
            first = {
                name: fact
                for name, fact in statement.facts.items()
                if name not in below.facts or name == facts.HARDWARE
            }
            below.learn(replace(statement, facts=first))
    facts_below |= below.facts
    if not now.has_command and len(later) == 1:
        facts_below |= next(command.facts for command in started if command.line == later[0])
    return facts_below


def with_facts(figure: Figure, facts_below: Mapping[str, Fact]) -> Figure:
    """The figure with the facts of its text; its own are nearer."""
    merged = dict(facts_below)
    title = merged.pop("title", None)
    if title:
        merged.setdefault(facts.MODEL, title)
    merged |= figure.facts
    n_streams = figure.n_streams
    parallel = merged.pop("parallel", None)
    if parallel and n_streams is None and parallel.value == 1:
        n_streams = 1
    elif parallel:
        merged["parallel"] = parallel
    return replace(figure, facts=merged, n_streams=n_streams)


def statements_of(text: str) -> Iterator[Statement]:
    """What the lines of logs say, in order."""
    statements = list[Statement]()
    for patterns, is_end in ((LOGS, False), (ENDS, True)):
        for programs, pattern in patterns:
            for line, match in matched(text, re.compile(pattern, re.M)):
                statements.append(statement_of(match, line, programs, is_end))
    yield from sorted(statements, key=lambda statement: statement.line)


def statement_of(
    match: re.Match[str], line: int, programs: Sequence[str], is_end: bool
) -> Statement:
    """The facts of a match: its named groups, each by its meaning."""
    read = dict[str, Fact]()
    for name, written in match.groupdict().items():
        if written is not None and name not in (DEVICE_ID, DRAFT):
            read |= fact_of(name, written.strip(), line)
    groups = match.groupdict()
    draft = groups.get(DRAFT)
    if draft:
        draft = commands.name_of_model(draft).get(facts.MODEL)
    return Statement(line, programs, read, is_end, groups.get(DEVICE_ID), draft)


def fact_of(name: str, written: str, line: int) -> dict[str, Fact]:
    """The fact of a group."""
    if name in (facts.MODEL, "tag"):
        return facts.stated(commands.name_of_model(written), line)
    if name == facts.QUANTIZATION:
        return facts.stated({name: llama_bench_rows.model_of(written)[1] or written}, line)
    if name == facts.PARAMETERS:
        return facts.stated({name: llama_bench_rows.params_of(written)}, line)
    if name == facts.HARDWARE:
        return facts.stated({name: TRIMMED.sub("", written).replace(",", "")}, line)
    if name == "offloaded":
        layers, _, total = written.partition("/")
        value = None if layers == total else int(layers)
        return {"n_gpu_layers": Fact(value, line, shown=written)}
    if name == "cache_types":
        return facts.stated(dict.fromkeys(commands.CACHE_TYPES, written), line)
    if name == facts.SPECULATION:
        is_off = written == "None"
        return {name: Fact(facts.NO_DRAFTS if is_off else "drafts", line)}
    if name == "build2":
        name = facts.BUILD
    if name in (facts.BUILD, facts.SAMPLING, facts.FILE_ID, facts.PLACEMENT, "title"):
        return facts.stated({name: written}, line)
    return commands.fact_of_setting(name, written, line)
