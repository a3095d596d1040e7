"""Is the cost of choosing a token measured right, and does its law predict?

    python3 -m uv run python -m tests.bench.choose planted    # a delay of known length in a sampler
    python3 -m uv run python -m tests.bench.choose law        # vocabularies and windows held out
    python3 -m uv run python -m tests.bench.choose equal      # twenty pairs of equal chains
    python3 -m uv run python -m tests.bench.choose server     # the tokens of llama-server
    python3 -m uv run python -m tests.bench.choose budget     # the parts of a token's time

`planted` adds a sampler to every chain that waits for a known time: the difference to a sampler
that does not wait is compared with that time. `law` measures models with random weights whose
vocabularies and windows of penalties the law has not seen. `equal` counts how often two equal
chains are called different. `server` sends the same token ids, seed and settings to
llama-server: the one of the lab's llama.cpp if it is built (python -m tests.bench.llama_bench
llama-server), else the one of the xllamacpp wheel. Each prints its figures; the exit status is 1
if one misses its aim.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import math
import statistics
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lab
from lab.core import script as scripts
from lab.core.record import Record, Settings
from lab.core.sampling import chain
from lab.engine import sampling as engine_sampling
from lab.engine.bindings import llama_cpp
from lab.engine.llama import LlamaContext, Loaded, Logits, decode
from lab.features.choose import chains, planning
from lab.features.choose.chains import NamedChain
from lab.features.choose.command import execute
from lab.models import catalog
from lab.process.worker import Worker
from lab.roofline import choosing
from lab.runner.session import new_results_file
from tests.bench import llama_bench
from tests.support.records import SETTINGS
from tests.support.servers import llama_server, wheel_server

DELAYS_US = (50, 200, 1000, 5000)
AIM = 0.05
SHARE_INSIDE = 0.9
LEARNED = "32000,65536,128256,151936,262144"
HELD_OUT = (40960, 49152, 100352, 140000, 200000)
WINDOWS = (64, 256, 1024)
HELD_OUT_WINDOWS = (32, 128, 512)
N_PAIRS = 20
N_TOKENS = 48
SEED = 11
N_PROBS = 400
EXACT = (0, 3, 4)
"""Chains of SAMPLED that need only the logits of the most probable tokens, up to a constant."""
GREEDY_OPTIONS = {"temp": 0}
SAMPLED: tuple[dict[str, Any], ...] = (
    {"temp": 0.8},
    {"temp": 1.2, "top_k": 0},
    {"temp": 0.9, "repeat_penalty": 1.2},
    {"temp": 0.7, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"temp": 0.8, "min_p": 0.2, "top_p": 0.8, "samplers": "min_p;top_p;temperature"},
    {"temp": 0.9, "mirostat": 2},
)
"""Chains whose tokens are compared with those of llama-server."""

REQUEST_NAMES = {
    "temp": "temperature",
    "typical": "typical_p",
}
"""Names in a request to llama-server that differ from its options."""


# A sampler that waits


_callbacks: list[Any] = []  # llama.cpp keeps pointers to them


def waiting_sampler(delay_us: int) -> Any:
    """A sampler that changes nothing and returns after a time."""
    lib = llama_cpp()

    def wait(sampler: Any, candidates: Any) -> None:
        end_ns = time.perf_counter_ns() + 1000 * delay_us
        while time.perf_counter_ns() < end_ns:
            pass

    interface = lib.llama_sampler_i()
    interface.apply = lib.llama_sampler_i_apply(wait)
    interface.name = lib.llama_sampler_i_name(lambda sampler: b"wait")
    _callbacks.append(interface)
    return lib.llama_sampler_init(ctypes.pointer(interface), None)


def plant(context: LlamaContext | None, delay_us: int) -> bool:
    """In the child: begin every chain with a sampler that waits."""
    build = engine_sampling.new_chain

    def delayed(loaded: Loaded, sampling: Any) -> Any:
        lib = llama_cpp()
        outer = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        lib.llama_sampler_chain_add(outer, waiting_sampler(delay_us))
        lib.llama_sampler_chain_add(outer, build(loaded, sampling))
        return outer

    engine_sampling.new_chain = delayed
    return True


class PlantedWorker(Worker):
    """An engine whose samplers wait, in every child that it starts."""

    delay_us = 0

    def _spawn(self) -> None:
        super()._spawn()
        self.call(bool, "tests.bench.choose.plant", delay_us=self.delay_us)


def planted() -> bool:
    """Whether the delays are found."""
    medians = {delay_us: chosen_us(delay_us) for delay_us in (0, *DELAYS_US, 0)}
    are_found = []
    for delay_us in DELAYS_US:
        found_us = medians[delay_us] - medians[0]
        error = found_us / delay_us - 1
        are_found.append(abs(error) <= AIM)
        print(f"planted {delay_us:5} us   found {found_us:8.1f} us   {100 * error:+.1f} %")
    return all(are_found)


def chosen_us(delay_us: int) -> float:
    """Microseconds that the default chain takes for a token, with a planted delay."""
    with tempfile.TemporaryDirectory() as name:
        worker = PlantedWorker.__new__(PlantedWorker)
        worker.delay_us = delay_us
        Worker.__init__(worker)
        with worker:
            plan = planning.plan(worker, "1", ["--temp 0.8 --top-k 41"], 64, 12, 3, threads=1)
            records = run([plan], worker, Path(name))
    times = choosing.chain_times([record for record in records if record.run.is_timed])
    of_default = times[times.name == choosing.DEFAULT]
    return 1e6 * float(of_default.choose_s.median())


def run(plans: Sequence[Any], worker: Worker, folder: Path) -> list[Record]:
    """The records of plans."""
    path = new_results_file(plans[0], folder)
    return list(execute(plans, worker, path, lambda status: None))


# Held-out vocabularies and windows


def held_out() -> bool:
    """Whether the law predicts what it has not seen."""
    base = chains.without_texts(1)
    windows = [window_chain(window) for window in (*WINDOWS, *HELD_OUT_WINDOWS)]
    plain = [named for named in base if not named.name.startswith("penalties")]
    sizes = [*planning.sizes(LEARNED), *HELD_OUT]
    with tempfile.TemporaryDirectory() as name, Worker() as worker:
        plans = []
        for size in sizes:
            plans.append(
                planning.plan_of_size(
                    worker, size, Path(name), 16, 3, chains=[*plain, *windows], threads=1
                )
            )
        records = run(plans, worker, Path(name))
    times = choosing.chain_times([record for record in records if record.run.is_timed])
    medians = times.groupby(["name", "n_vocab"], as_index=False).agg(
        choose_s=("choose_s", "median"), window=("window", "first")
    )
    learned = times[~times.n_vocab.isin(HELD_OUT)]
    errors, are_inside = errors_of_vocabularies(medians, learned)
    is_good = shown("vocabularies held out", errors, are_inside)
    errors, are_inside = errors_of_windows(medians, learned)
    return shown("windows held out", errors, are_inside) and is_good


def window_chain(window: int) -> NamedChain:
    options = {"repeat_penalty": 1.1, "repeat_last_n": window}
    return NamedChain(f"penalties {window}", chain(options, 1))


def errors_of_vocabularies(medians: Any, learned: Any) -> tuple[list[float], list[bool]]:
    """Each chain's errors at vocabularies that its law has not seen."""
    errors: list[float] = []
    are_inside: list[bool] = []
    laws = choosing.laws(learned)
    for row in medians[medians.n_vocab.isin(HELD_OUT)].itertuples():
        law = laws[row.name]
        low, high = law.range(row.n_vocab)
        errors.append(law.seconds(row.n_vocab) / row.choose_s - 1)
        are_inside.append(low <= row.choose_s <= high)
    return errors, are_inside


@dataclass(frozen=True)
class PenaltyLaw:
    """The law of the penalties: between two windows the cost follows their logarithm."""

    by_window: tuple[tuple[int, choosing.ChoosingLaw], ...]

    def seconds(self, n_vocab: int, window: int) -> float:
        points: list[tuple[float, float]] = []
        for size, of_window in self.by_window:
            points.append((math.log(size), math.log(of_window.seconds(n_vocab))))
        smallest = self.by_window[0][0]
        largest = self.by_window[-1][0]
        at = min(max(window, smallest), largest)
        return math.exp(choosing.on_line(points, math.log(at)))

    def range(self, n_vocab: int, window: int) -> tuple[float, float]:
        """From the cost with the next smaller window to that with the next larger one, each with
        its range: between two windows the cost can jump.
        """
        windows = [size for size, _ in self.by_window]
        smaller = max((size for size in windows if size <= window), default=windows[0])
        larger = min((size for size in windows if size >= window), default=windows[-1])
        ends_s = sorted((self.seconds(n_vocab, smaller), self.seconds(n_vocab, larger)))
        half = max(of_window.half for _, of_window in self.by_window)
        return ends_s[0] * math.exp(-half), ends_s[1] * math.exp(half)


def penalty_law(times: Any) -> PenaltyLaw | None:
    """The law of the chains with penalties; None without any."""
    alone = times[(times.n_seq == 1) & times.window.notna()]
    by_window: list[tuple[int, choosing.ChoosingLaw]] = []
    for window, rows in alone.groupby("window"):
        by_window.append((int(window), choosing.law(rows)))
    return PenaltyLaw(tuple(by_window)) if by_window else None


def errors_of_windows(medians: Any, learned: Any) -> tuple[list[float], list[bool]]:
    """The errors of windows, and of vocabularies too, that the penalties' law has not seen."""
    errors: list[float] = []
    are_inside: list[bool] = []
    law = penalty_law(learned[~learned.window.isin(HELD_OUT_WINDOWS)])
    assert law is not None
    for row in medians[medians.window.isin(HELD_OUT_WINDOWS)].itertuples():
        low, high = law.range(row.n_vocab, int(row.window))
        errors.append(law.seconds(row.n_vocab, int(row.window)) / row.choose_s - 1)
        are_inside.append(low <= row.choose_s <= high)
    return errors, are_inside


def shown(what: str, errors: Sequence[float], are_inside: Sequence[bool]) -> bool:
    """Print errors; whether they are within the aims."""
    sizes = [abs(error) for error in errors]
    median = statistics.median(sizes)
    inside = sum(are_inside) / len(are_inside)
    print(
        f"{what}: {len(errors)} predictions, median error {100 * median:.1f} %, maximum "
        f"{100 * max(sizes):.1f} %, {100 * inside:.0f} % inside the range"
    )
    return median <= AIM and inside >= SHARE_INSIDE


# Equal chains


def equal() -> bool:
    """Whether equal chains are never called different."""
    sampling = chain({"temp": 0.8}, 1)
    pair = [NamedChain("first", sampling), NamedChain("second", sampling)]
    n_different = 0
    with tempfile.TemporaryDirectory() as name, Worker() as worker:
        for number in range(N_PAIRS):
            plan = planning.plan_of_size(
                worker, 49152, Path(name), 12, 6, number + 1, pair, threads=1
            )
            records = run([plan], worker, Path(name))
            times = choosing.chain_times([record for record in records if record.run.is_timed])
            ratio = choosing.ratio(times, "first", "second")
            is_different = choosing.differs(ratio)
            n_different += is_different
            print(f"pair {number + 1:2}: {ratio}  {'different' if is_different else ''}")
    print(f"equal chains called different: {n_different} of {N_PAIRS}")
    return n_different == 0


# The tokens of llama-server


def server() -> bool:
    """Whether seeded chains choose llama-server's tokens.

    With the llama-server of the same llama.cpp the answers are compared. The one of the wheel is
    another build, whose logits differ: there the lab's chain follows the server's answer, and
    chooses at each of its places, once with the lab's logits, once with those of the server.
    """
    path = catalog.embedded_path()
    is_same_build = llama_bench.is_built("llama-server")
    start = llama_server if is_same_build else wheel_server
    print(f"same build: {is_same_build}")
    counts: Counter[str] = Counter()
    with Worker() as worker:
        worker.load(path, SETTINGS)
        prompt = worker.tokenize("The lighthouse keeper wrote a letter about the storm, and")
        options = ("--threads", "1", "--ctx-size", "512", "--parallel", "1")
        with start(path, *options) as real:
            url = real.url.removesuffix("/v1")
            print_logit_differences(worker, url, prompt)
            for number, asked in enumerate(SAMPLED):
                counts += compared(worker, url, prompt, asked, number in EXACT)
    print(
        f"equal answers: {counts['answers']} of {len(SAMPLED)}; along the server's answers "
        f"{counts['followed']} of {counts['places']} places equal, with another seed "
        f"{counts['wrong seed']}; with the server's logits {counts['exact']} of "
        f"{counts['exact places']}"
    )
    if is_same_build and counts["answers"] < len(SAMPLED):
        return False
    return counts["exact"] == counts["exact places"]


def compared(
    worker: Worker, url: str, prompt: list[int], asked: dict[str, Any], is_exact: bool
) -> Counter[str]:
    """How many places of the server's answer the lab's chain chooses too."""
    answer = answer_of_server(url, prompt, asked, n_probs=N_PROBS)
    theirs = list(answer["tokens"])
    ours = tokens_of_lab(worker, prompt, asked)
    difference = first_difference(ours, theirs)
    followed = tokens_along(worker, prompt, theirs, asked, SEED)
    wrong = tokens_along(worker, prompt, theirs, asked, SEED + 1)
    counts = Counter(
        {
            "answers": int(difference is None),
            "places": len(theirs),
            "followed": n_common(followed, theirs),
            "wrong seed": n_common(wrong, theirs),
        }
    )
    if is_exact:
        exact = tokens_of_logits(worker, prompt, answer, asked)
        counts["exact"] = n_common(exact, theirs)
        counts["exact places"] = len(theirs)
    print(f"{asked}: {in_words(difference, ours, theirs)}; {dict(counts)}")
    return counts


def print_logit_differences(worker: Worker, url: str, prompt: list[int]) -> None:
    """How far the logarithms of probabilities are apart, along the server's greedy answer."""
    answer = answer_of_server(url, prompt, GREEDY_OPTIONS, n_probs=1)
    theirs = [place["logprob"] for place in answer["completion_probabilities"]]
    tokens = list(answer["tokens"])
    place = first_difference(tokens_of_lab(worker, prompt, GREEDY_OPTIONS), tokens)
    print(f"greedy: {'equal' if place is None else f'differ from token {place} on'}")
    ours = worker.call(
        list[float], "tests.bench.choose.log_probabilities", prompt=prompt, tokens=tokens
    )
    differences = [abs(a - b) for a, b in zip(ours, theirs, strict=False)]
    print(
        f"logarithms of probabilities differ by {statistics.median(differences):.4f} (median), "
        f"{max(differences):.4f} at most, in {len(differences)} places"
    )


def tokens_along(
    worker: Worker, prompt: list[int], answer: list[int], asked: dict[str, Any], seed: int
) -> list[int]:
    """The lab's choice at each place of an answer."""
    worker.new_context(settings_of(asked, seed))
    return worker.call(list[int], "tests.bench.choose.choices", prompt=prompt, tokens=answer)


def tokens_of_logits(
    worker: Worker, prompt: list[int], answer: dict[str, Any], asked: dict[str, Any]
) -> list[int]:
    """The lab's choice at each place of an answer, with the server's logits."""
    ids: list[list[int]] = []
    logits: list[list[float]] = []
    for place in answer["completion_probabilities"]:
        ids.append([row["id"] for row in place["top_logprobs"]])
        logits.append([row["logprob"] for row in place["top_logprobs"]])
    worker.new_context(settings_of(asked, SEED))
    return worker.call(
        list[int],
        "tests.bench.choose.choices_of_logits",
        prompt=prompt,
        tokens=list(answer["tokens"]),
        ids=ids,
        logits=logits,
    )


def choices_of_logits(
    context: LlamaContext,
    prompt: list[int],
    tokens: list[int],
    ids: list[list[int]],
    logits: list[list[float]],
) -> list[int]:
    """In the child: as `choices`, with logits of the most probable tokens, all others far below."""
    import numpy as np

    sampling = context.settings.sampling
    assert sampling is not None
    candidates = engine_sampling.Candidates(context.loaded.n_vocab)
    samplers = engine_sampling.Chain(context, sampling, prompt, candidates)
    chosen: list[int] = []
    for place, token in enumerate(tokens):
        row = np.full(context.loaded.n_vocab, -1e9, dtype=np.float32)
        row[ids[place]] = logits[place]
        candidates.fill(row)
        chosen.append(candidates.chosen_by(samplers.pointer))
        llama_cpp().llama_sampler_accept(samplers.pointer, token)
    samplers.free()
    return chosen


def choices(context: LlamaContext, prompt: list[int], tokens: list[int]) -> list[int]:
    """In the child: the tokens that the context's chain chooses along an answer."""
    lib = llama_cpp()
    sampling = context.settings.sampling
    assert sampling is not None
    candidates = engine_sampling.Candidates(context.loaded.n_vocab)
    samplers = engine_sampling.Chain(context, sampling, prompt, candidates)
    chosen: list[int] = []
    for logits, token in zip(logits_along(context, prompt, tokens), tokens, strict=True):
        candidates.fill(logits)
        chosen.append(candidates.chosen_by(samplers.pointer))
        lib.llama_sampler_accept(samplers.pointer, token)
    samplers.free()
    return chosen


def log_probabilities(
    context: LlamaContext, prompt: list[int], tokens: list[int]
) -> list[float]:
    """In the child: the logarithm of each token's probability along an answer."""
    import numpy as np

    values: list[float] = []
    for logits, token in zip(logits_along(context, prompt, tokens), tokens, strict=True):
        exact = np.asarray(logits, dtype=np.float64)
        total = np.log(np.exp(exact - exact.max()).sum()) + exact.max()
        values.append(float(exact[token] - total))
    return values


def logits_along(context: LlamaContext, prompt: list[int], answer: list[int]) -> Iterator[Any]:
    """The logits of the last token before each token of an answer."""
    lib = llama_cpp()
    lib.llama_memory_clear(lib.llama_get_memory(context.pointer), False)
    logits = Logits(context, False)
    new = prompt
    for token in answer:
        ids = (ctypes.c_int32 * len(new))(*new)
        decode(context, lib.llama_batch_get_one(ids, len(new)))
        yield logits.row(-1)
        new = [token]


def n_common(ours: Sequence[int], theirs: Sequence[int]) -> int:
    return sum(token == other for token, other in zip(ours, theirs, strict=False))


def settings_of(asked: dict[str, Any], seed: int) -> Settings:
    return dataclasses.replace(
        SETTINGS,
        n_ctx=512,
        n_ubatch=512,
        n_threads=1,
        n_threads_batch=1,
        sampling=chain(asked, seed),
    )


def tokens_of_lab(worker: Worker, prompt: list[int], asked: dict[str, Any]) -> list[int]:
    worker.new_context(settings_of(asked, SEED))
    outcome = worker.run(scripts.run(prompt, N_TOKENS, 512), lambda progress: None)
    end = outcome.end_of_generation_at
    return list(outcome.token_ids if end is None else outcome.token_ids[:end])


def answer_of_server(
    url: str, prompt: list[int], asked: dict[str, Any], **others: Any
) -> dict[str, Any]:
    request: dict[str, Any] = {
        "prompt": prompt,
        "n_predict": N_TOKENS,
        "seed": SEED,
        "return_tokens": True,
        "cache_prompt": False,
        **others,
    }
    for name, value in asked.items():
        request[REQUEST_NAMES.get(name, name)] = value
    if "samplers" in asked:
        request["samplers"] = asked["samplers"].split(";")
    data = json.dumps(request).encode()
    headers = {"Content-Type": "application/json"}
    with urllib.request.urlopen(
        urllib.request.Request(f"{url}/completion", data, headers), timeout=120
    ) as answer:
        parsed: dict[str, Any] = json.load(answer)
    return parsed


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    for place, (token, other) in enumerate(zip(ours, theirs, strict=False)):
        if token != other:
            return place
    return None


def in_words(difference: int | None, ours: Sequence[int], theirs: Sequence[int]) -> str:
    n_common = min(len(ours), len(theirs))
    if difference is None:
        return f"equal, {n_common} tokens"
    return (
        f"differ from token {difference} on: {ours[difference]}, server {theirs[difference]}"
    )


# The parts of a token's time


def budget() -> bool:
    """Whether compute, choosing and the time between steps add up to TPOT."""
    from lab.core import phases

    worst = 0.0
    with tempfile.TemporaryDirectory() as name:
        for asked in ({}, {"temp": 0.8}, {"top_k": 0}, {"mirostat": 2}):
            records = lab.measure("128", gen=48, repeat=3, out=name, threads=1, **asked)
            for record in records:
                if not record.run.is_timed:
                    continue
                sums = parts_of(record)
                tpot_ns = phases.tpot_ns(record.run)
                assert tpot_ns is not None
                worst = max(worst, abs(sum(sums) / tpot_ns - 1))
            compute, choose, between = sums
            print(
                f"{asked or 'greedy'}: compute {compute / 1e3:.0f} us, choose "
                f"{choose / 1e3:.0f} us, between {between / 1e3:.1f} us"
            )
    print(f"the parts and TPOT differ by at most {100 * worst:.2f} %")
    return worst <= 0.02


def parts_of(record: Record) -> tuple[float, float, float]:
    """Means of compute, choosing, and between steps over the decode steps, in ns."""
    steps = record.run.steps.frame()
    between = steps.start_ns - steps.end_ns.shift()
    is_decode = steps.kind == "decode"
    decodes = steps[is_decode]
    return (
        float((decodes.ready_ns - decodes.start_ns).mean()),
        float((decodes.end_ns - decodes.ready_ns).mean()),
        float(between[is_decode].mean()),
    )


BENCHES: dict[str, Callable[[], bool]] = {
    "planted": planted,
    "law": held_out,
    "equal": equal,
    "server": server,
    "budget": budget,
}


def main() -> None:
    names = sys.argv[1:] or list(BENCHES)
    are_good = []
    for name in names:
        print(f"\n{name}", flush=True)
        are_good.append(BENCHES[name]())
    sys.exit(not all(are_good))


if __name__ == "__main__":
    main()
