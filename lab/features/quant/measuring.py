"""Measure quality chunk by chunk, then speed in blocks.

Every engine evaluates the same chunks of text, chunk after chunk. The reference writes its logits
of a chunk to a file, each candidate compares its own with them, and the next chunk overwrites them.
A chunk has 512 tokens, and its second half is scored, as llama-perplexity does. With --cache it is
as long as asked, each prediction is scored, and its parts are kept apart by their depth. For some
chunks the reference is compared with itself under other settings: below this noise floor nothing
can be told apart. Speed: blocks with fresh engines that take turns, as in `lab ab`.

The budget covers the whole command, from the planning on. Quality leaves time for FEWEST_BLOCKS of
speed; how long they take is estimated from the first chunk.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Unpack

from lab.app.collection import Results
from lab.app.command_words import words_of_values
from lab.core import asked_settings, stats, stored_command
from lab.core.arguments import StrPath, Texts, Time
from lab.core.files import expanded
from lab.core.keywords import CommonSettings
from lab.core.lists import plural
from lab.core.record import Record, Settings
from lab.core.results import save, unless_empty
from lab.errors import LabError
from lab.features.quant import planning, texts
from lab.features.quant.figures import joined, mean, mean_kl, undecided_pairs
from lab.features.quant.lines import Divergence, QualityLine, QuantLine, Stretch
from lab.features.quant.planning import QuantPlan
from lab.features.quant.texts import Chunk
from lab.process.setup import bounded
from lab.process.worker import Worker
from lab.runner import progress, trial
from lab.runner.cases import utc_now
from lab.runner.progress import ShowStatus, Status, Watch, duration
from lab.runner.session import new_results_file

CHILD = "lab.features.quant.child"
N_CHUNK = 512  # tokens
FIRST_SCORED = 256
MIN_CHUNKS = 16  # before it may be enough: they part what differs 1.6 times
NARROW = 0.1  # half width of an interval of a single candidate, as a share, that is enough
MIN_LONG_CHUNKS = 6  # the same with --cache
CHUNKS_OF_BLOCK = 3  # a block computes about as much as these chunks
LONG_CHUNKS_OF_BLOCK = 1.7  # with --cache: each variant warms up and runs at each depth
N_FLOOR = 8  # chunks of the noise floor
N_LONG_FLOOR = 1  # the same with --cache
MOST_FLOOR_BYTES = 4_000_000_000  # of a chunk's logits, which the floor needs all at once
FLOOR = "noise floor"
QUALITY_SHARE = 0.6  # of the budget; the rest is for speed
FEWEST_BLOCKS = 2  # of speed, whatever the budget
FEWEST_LONG_BLOCKS = 1  # the same with --cache


class QuantSettings(CommonSettings, total=False):
    device: Texts | None
    mmap: bool | None


def quant(
    *files: StrPath,
    cache: Texts = "",
    prompt: Texts | None = None,
    budget: Time | None = None,
    repeat: int = planning.BLOCKS,
    prompt_len: int | None = None,
    gen: int = planning.GEN,
    out: StrPath = "results",
    watch: Watch = None,
    **settings: Unpack[QuantSettings],
) -> Results[QuantLine]:
    """Compare files of one model with the first one, in quality and speed.

        lines = lab.quant("model-F16.gguf", "model-Q8_0.gguf", "model-Q4_K_M.gguf")
        lab.quant_table(lines)  # DataFrame, one row a file

    Returns the lines of the results file: qualities, then runs. Without files: the embedded model,
    requantized. With `cache`: each file with these types of its cache, such as "f16,q8_0:q4_0", in
    texts of `prompt_len` tokens. LabError for files that are not of one model, for types that
    llama.cpp refuses, and for a text that is too short.
    """
    options: dict[str, Any] = {
        "cache": cache,
        "prompt": None if prompt is None else ",".join(asked_settings.parts(prompt)),
        "budget": budget,
        "repeat": repeat,
        "prompt_len": prompt_len,
        "gen": gen,
        **settings,
    }
    from lab.features.quant.command import command

    names = [str(expanded(file)) for file in files]
    with Worker() as worker:
        plan = planning.plan(worker, *names, **options)
    path = new_results_file(plan.plans[plan.reference], Path(out))
    words = words_of_values(command, {**options, "files": names})
    with progress.shown_to(watch) as show, stored_command.storing(words):
        return Results(execute(plan, path, show))


def execute(plan: QuantPlan, path: Path, watch: ShowStatus) -> Iterator[QualityLine | Record]:
    """Measure quality, then speed; yields each line after it is in `path`.

    After Ctrl-C the chunks that all candidates have scored are kept.
    """
    scoring = Scoring(plan, path.stem)
    try:
        with unless_empty(path):
            scoring.run(watch)
    except (KeyboardInterrupt, LabError):
        for line in scoring.whole_lines():
            save(path, line)
        raise
    for line in scoring.lines():
        save(path, line)
        yield line
    yield from speeds(plan, path, watch)


def speeds(plan: QuantPlan, path: Path, watch: ShowStatus) -> Iterator[Record]:
    """The runs of a trial, until the blocks are measured or a further one would exceed the
    budget."""
    blocks = trial.Blocks(
        plan.repeat,
        n_turns=1 if plan.depth else trial.N_TURNS,
        budget_s=plan.end - time.monotonic(),
        fewest=fewest_blocks(plan),
    )

    def show(status: Status) -> None:
        watch(replace(status, announcement=""))

    yield from trial.execute(plan.plans, blocks, path, show)


def fewest_blocks(plan: QuantPlan) -> int:
    """The blocks of speed that are made whatever the budget."""
    return FEWEST_LONG_BLOCKS if plan.depth else FEWEST_BLOCKS


@dataclass
class Scoring:
    """The chunks that candidates and the noise floor have scored."""

    plan: QuantPlan
    session: str
    load_s: float = 0.0  # to load all models
    chunk_s: float = 0.0  # a chunk for all of them, the slowest so far
    n_vocab: int = 0
    started_at: str = field(default_factory=utc_now)
    scores: dict[str, list[Divergence]] = field(default_factory=dict)  # of whole chunks
    parts: dict[str, list[Divergence]] = field(default_factory=dict)  # by depth, with --cache
    items: dict[str, list[Divergence]] = field(default_factory=dict)  # of tokens that decide
    settings: dict[str, Settings] = field(default_factory=dict)
    cache_logs: dict[str, tuple[str, ...]] = field(default_factory=dict)
    chunks: list[Chunk] = field(default_factory=list)
    deciding: list[Chunk] = field(default_factory=list)

    def run(self, watch: ShowStatus) -> None:
        """Score chunks until the intervals are narrow, the text ends or the time is over."""
        for lists in (self.scores, self.parts, self.items):
            lists.update({name: [] for name in (*self.plan.candidates, FLOOR)})
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mini-lab-"))
            watch(Status("loading the models"))
            began = time.monotonic()
            workers = {}
            for name in self.plan.plans:
                workers[name] = stack.enter_context(Worker())
                self.load(name, workers[name])
            self.load_s = time.monotonic() - began
            for number, chunk in enumerate(self.chunks):
                if self.is_enough(number):
                    return
                watch(Status(f"quality: chunk {number + 1} of at most {len(self.chunks)}"))
                began = time.monotonic()
                self.score(chunk, number, workers, Path(folder))
                self.chunk_s = max(self.chunk_s, time.monotonic() - began)
                if number == 0:
                    watch(Status("quality", note=self.estimate()))
                    self.score_deciding(workers, Path(folder), watch)

    def load(self, name: str, worker: Worker) -> None:
        """Load a file, and cut the text, which must give the same tokens in each file."""
        plan = self.plan.plans[name]
        wide = replace(
            plan.settings,
            n_ctx=self.n_chunk,
            n_batch=max(plan.settings.n_batch, min(self.n_chunk, texts.N_STRETCH)),
        )
        worker.use(replace(plan.setup, wait=bounded(plan.setup.wait)))
        vocabulary = worker.load(plan.file.path, wide)
        self.n_vocab = vocabulary.n_vocab
        pieces = texts.chunks(self.plan.texts, worker.tokenize, vocabulary.bos, self.n_chunk)
        if self.chunks and pieces != self.chunks:
            raise LabError(
                f"{name} splits the text into other tokens.", "Compare files of one model."
            )
        self.chunks = pieces
        self.settings[name] = worker.new_context(wide)
        if self.plan.depth:
            self.cache_logs[name] = worker.call(tuple[str, ...], f"{CHILD}.cache_log")
            if name == self.plan.reference:
                self.deciding = texts.deciding_chunks(
                    "\n\n".join(self.plan.texts.values()),
                    worker.tokenize,
                    worker.pieces(),
                    vocabulary.bos,
                    self.n_chunk,
                )

    @property
    def n_chunk(self) -> int:
        """Tokens of a chunk."""
        return self.plan.depth or N_CHUNK

    def score(
        self, chunk: Chunk, number: int, workers: dict[str, Worker], folder: Path
    ) -> None:
        """Score a chunk: from FIRST_SCORED on, or with --cache from the beginning, by depth."""
        if self.plan.depth:
            stretches = texts.parts_by_depth(chunk.tokens)
        else:
            scored = range(FIRST_SCORED, len(chunk.tokens) - 1)
            stretches = texts.stretches(chunk.tokens, [len(chunk.tokens)], scored)
        divergences = self.divergences(stretches, self.has_floor(number), workers, folder)
        for name, parts in divergences.items():
            self.scores[name].append(joined(parts))
            self.parts[name] += parts

    def score_deciding(
        self, workers: dict[str, Worker], folder: Path, watch: ShowStatus
    ) -> None:
        for chunk in self.deciding:
            watch(Status(f"quality: {chunk.text}"))
            divergences = self.divergences(texts.parts_by_item(chunk), False, workers, folder)
            for name, items in divergences.items():
                self.items[name] += items

    def has_floor(self, number: int) -> bool:
        """Whether the noise floor of a chunk is measured: of the first ones, as far as their logits
        fit on the disk."""
        if not self.plan.depth:
            return number < N_FLOOR
        chunk_bytes = 4 * self.n_vocab * self.n_chunk
        return number < N_LONG_FLOOR and chunk_bytes <= MOST_FLOOR_BYTES

    def divergences(
        self,
        parts: Sequence[Sequence[Stretch]],
        has_floor: bool,
        workers: dict[str, Worker],
        folder: Path,
    ) -> dict[str, list[Divergence]]:
        """The divergence of each candidate, and of the floor, in each part with scored positions.

        All evaluate a stretch before the next one, so that one file holds its logits; for the
        floor, which needs the reference's engine, there is a file for each.
        """
        reference = workers[self.plan.reference]
        names = [*self.plan.candidates, *([FLOOR] if has_floor else [])]
        scored: dict[str, list[list[Divergence]]] = {
            name: [[] for _ in parts] for name in names
        }
        evaluated: list[tuple[int, Stretch, Path]] = []
        for place, part in enumerate(parts):
            for stretch in part:
                path = folder / f"logits-{len(evaluated) if has_floor else 0}"
                evaluated.append((place, stretch, path))
                reference.call(type(None), f"{CHILD}.keep", stretch=stretch, path=path)
                for name in self.plan.candidates:
                    scored[name][place] += diverge(workers[name], stretch, path)
        if has_floor:
            settings = self.settings[self.plan.reference]
            reference.new_context(other_settings(settings, self.n_chunk))
            for place, stretch, path in evaluated:
                scored[FLOOR][place] += diverge(reference, stretch, path)
            reference.new_context(settings)
        return {
            name: [joined(stretches) for stretches in by_part if stretches]
            for name, by_part in scored.items()
        }

    @property
    def block_s(self) -> float:
        """The estimated time of a block of speed: it loads all models anew."""
        n_chunks = LONG_CHUNKS_OF_BLOCK if self.plan.depth else CHUNKS_OF_BLOCK
        return self.load_s + n_chunks * self.chunk_s

    def estimate(self) -> str:
        """How long the command will take, after the first chunk."""
        n_chunks = len(self.chunks)
        spent_s = time.monotonic() - self.plan.began
        n_left = n_chunks - 1 + len(self.deciding)
        left_s = n_left * self.chunk_s + self.plan.repeat * self.block_s
        most_s = min(spent_s + left_s, self.plan.budget_s)
        n_blocks = fewest_blocks(self.plan)
        least_s = spent_s + (1 + len(self.deciding)) * self.chunk_s + n_blocks * self.block_s
        if least_s > self.plan.budget_s:
            blocks = plural(n_blocks, "block")
            return (
                f"The budget is too short for two chunks and {blocks}: they take "
                f"about {duration(least_s)} in all."
            )
        return (
            f"At most about {duration(most_s)} in all: {duration(self.chunk_s)} for each of at "
            f"most {n_chunks} chunks, then about {duration(self.block_s)} for each of at most "
            f"{plural(self.plan.repeat, 'block')}."
        )

    def is_enough(self, n_scored: int) -> bool:
        """Whether the time for quality is over, or what must be told apart is."""
        if n_scored < 2:
            return False
        if self.is_late():
            return True
        if n_scored < (MIN_LONG_CHUNKS if self.plan.depth else MIN_CHUNKS):
            return False
        scores = {name: self.scores[name] for name in self.plan.candidates}
        if len(scores) > 1:
            return undecided_pairs(scores) == []
        return all(map(is_narrow, scores.values()))

    def is_late(self) -> bool:
        """Whether a further chunk would take time from speed."""
        budget_s = self.plan.budget_s
        reserved_s = max(
            (1 - QUALITY_SHARE) * budget_s, fewest_blocks(self.plan) * self.block_s
        )
        return time.monotonic() + self.chunk_s > self.plan.end - reserved_s

    def lines(self) -> list[QualityLine]:
        lines = []
        for name, scores in self.scores.items():
            if scores:  # a floor may be missing
                lines.append(self.line(name, len(scores)))
        return lines

    def whole_lines(self) -> list[QualityLine]:
        """The lines of the chunks that every candidate has scored; none for fewer than two."""
        counts = [len(self.scores.get(name, ())) for name in self.plan.candidates]
        n_whole = min(counts)
        if n_whole < 2:
            return []
        lines = []
        for name, scores in self.scores.items():
            if scores:
                lines.append(self.line(name, min(n_whole, len(scores))))
        return lines

    def line(self, name: str, n_chunks: int) -> QualityLine:
        """The line of a candidate, or of the floor, with its first chunks."""
        is_floor = name == FLOOR
        variant = self.plan.reference if is_floor else name
        settings = self.settings[variant]
        if is_floor:
            settings = other_settings(settings, self.n_chunk)
        plan = self.plan.plans[variant]
        depths = texts.bin_ends(self.plan.depth) if self.plan.depth else []
        n_parts = len(depths) or 1
        chunks = self.parts[name] if depths else self.scores[name]
        kinds = [chunk.text for chunk in self.chunks[:n_chunks] for _ in range(n_parts)]
        item_texts = [chunk.text for chunk in self.deciding for _ in chunk.items]
        items = self.items.get(name, [])
        return QualityLine(
            session=self.session,
            machine=plan.machine,
            model=plan.model,
            settings=settings,
            started_at=self.started_at,
            variant=name,
            reference=self.plan.reference,
            text=self.plan.prompt,
            texts=tuple(kinds),
            chunks=tuple(chunks[: n_chunks * n_parts]),
            depths=tuple(depths * n_chunks),
            items=tuple(items),
            item_texts=tuple(item_texts[: len(items)]),
            cache_log=self.cache_logs.get(variant, ()),
            is_floor=is_floor,
            budget_s=self.plan.budget_s,
            command=stored_command.command(),
        )


def diverge(worker: Worker, stretch: Stretch, path: Path) -> tuple[Divergence, ...]:
    """The divergence of a stretch; nothing for one without scored positions."""
    answer = tuple[Divergence, ...]
    return worker.call(answer, f"{CHILD}.diverge", stretch=stretch, path=path)


def is_narrow(scores: list[Divergence]) -> bool:
    divergences = [mean_kl(score) for score in scores]
    half_width = stats.mean_half_width(divergences)
    return half_width <= NARROW * abs(mean(divergences))


def other_settings(settings: Settings, n_chunk: int) -> Settings:
    """Settings that should not change predictions: half the ubatch, flash attention on or off."""
    flash_attn = settings.flash_attn
    if settings.can_be_plain:
        flash_attn = "off" if settings.uses_flash else "on"
    n_ubatch = max(1, min(settings.n_ubatch, n_chunk, texts.N_STRETCH) // 2)
    return replace(
        settings, n_ubatch=n_ubatch, flash_attn=flash_attn, flash_attn_resolved=None
    )
