"""Pastes with their truth: what programs print, written from true values, and how people paste it.

Nothing here is of the reader: a writer knows how its program counts (llama.cpp's server.cpp and
common/perf and tools/batched-bench, Ollama's api/types.go, KoboldCpp's log and koboldcpp.py,
TabbyAPI's common/gen_logging.py, vLLM's benchmarks/serve.py, SGLang's bench_serving.py) and what
its text says. A paste changes how a text looks, never what it says.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from lab.features.why.figure import (
    BOTH,
    DECODE,
    FIRST_FREE,
    MAYBE_FIRST,
    MIXED,
    MIXED_WINDOW,
    PREFILL,
    PROMPT,
    SERVED,
    STEPS,
    UNKNOWN,
    WHOLE,
    WINDOW,
)
from tests.support.pasted_samples import SAMPLES, Truth

N_PASTES = 260
PROSE = (
    "Is this normal for my card?",
    "I get this with the same prompt, build b1234, -fa 1 -ngl 99:",
    "EDIT: 2 runs, 16 GB of RAM, temperature 0.7, 8k context",
    "Thanks!",
)


@dataclass(frozen=True)
class Paste:
    """A text as somebody pastes it, the truth of its figures, and what a command says of them."""

    name: str
    text: str
    truths: tuple[Truth, ...]
    facts: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Request:
    """The true values of a request."""

    n_prompt: int  # processed
    n_cached: int
    n_gen: int
    prompt_ms: float
    gen_ms: float  # of n_gen - 1 steps

    @classmethod
    def drawn(cls, chance: random.Random) -> Request:
        n_prompt = chance.randint(2, 9000)
        n_gen = chance.randint(5, 120)
        return cls(
            n_prompt,
            chance.choice([0, 0, chance.randint(1, 5000)]),
            n_gen,
            round(n_prompt * chance.uniform(0.2, 30), 2),
            round((n_gen - 1) * chance.uniform(4, 150), 2),
        )

    @property
    def prefill_tps(self) -> float:
        return 1e3 * self.n_prompt / self.prompt_ms

    @property
    def n_context(self) -> int:
        return self.n_prompt + self.n_cached

    def decode_tps(self, counts: str) -> float:
        """Tokens per second where the first token counts, and where it does not."""
        n = self.n_gen if counts == FIRST_FREE else self.n_gen - 1
        return 1e3 * n / self.gen_ms


Writer = Callable[[random.Random], tuple[str, list[Truth]]]


def timing(
    label: str,
    ms: float,
    n: int,
    unit: str,
    n_counted: int,
) -> str:
    """A line of timings as llama.cpp prints it."""
    per_token = ms / n_counted
    tps = 1e3 * n_counted / ms
    return (
        f"{label} = {ms:10.2f} ms / {n:5d} {unit} "
        f"({per_token:8.2f} ms per token, {tps:8.2f} tokens per second)"
    )


def server_log(chance: random.Random) -> tuple[str, list[Truth]]:
    """Requests in llama-server's log; with a new or an old rate, and perhaps the releasing line."""
    lines = list[str]()
    truths = list[Truth]()
    for task in range(chance.randint(1, 3)):
        request = Request.drawn(chance)
        counts = chance.choice([STEPS, FIRST_FREE])
        has_release = chance.random() < 0.6
        n_counted = request.n_gen if counts == FIRST_FREE else request.n_gen - 1
        slot = f"slot print_timing: id {chance.randint(0, 3):2d} | task {task} | "
        prompt = timing(
            "prompt eval time", request.prompt_ms, request.n_prompt, "tokens", request.n_prompt
        )
        answer = timing("       eval time", request.gen_ms, request.n_gen, "tokens", n_counted)
        if chance.random() < 0.5:
            lines += [f"{slot}{prompt}", f"{slot}{answer}"]
        else:
            lines += [slot, prompt, answer]
        total_ms = request.prompt_ms + request.gen_ms
        lines.append(
            f"      total time = {total_ms:.2f} ms / {request.n_prompt + request.n_gen} tokens"
        )
        depth = None
        if has_release:
            depth = request.n_context
            n_end = request.n_context + request.n_gen - 1
            release = slot.replace("print_timing", "release").strip()
            lines.append(f"{release} stop processing: n_tokens = {n_end}, truncated = 0")
        cached = request.n_cached if has_release else None
        truths.append(Truth(request.prefill_tps, PREFILL, PROMPT, cached))
        truths.append(Truth(request.decode_tps(counts), DECODE, counts, depth))
    return "\n".join(lines) + "\n", truths


def cli_log(chance: random.Random) -> tuple[str, list[Truth]]:
    """llama-cli's last lines: a fresh context, steps as `runs`."""
    request = Request.drawn(chance)
    n_steps = request.n_gen - 1
    name = chance.choice(
        ["llama_perf_context_print: ", "llama\\_perf\\_context\\_print: ", ""]
    )
    prompt = timing(
        "prompt eval time", request.prompt_ms, request.n_prompt, "tokens", request.n_prompt
    )
    answer = timing("       eval time", request.gen_ms, n_steps, "runs  ", n_steps)
    text = f"{name}       load time =  1234.56 ms\n{name}{prompt}\n{name}{answer}\n"
    truths = [
        Truth(request.prefill_tps, PREFILL, PROMPT, 0, 1),
        Truth(request.decode_tps(STEPS), DECODE, STEPS, request.n_prompt, 1),
    ]
    return text, truths


def ik_log(chance: random.Random) -> tuple[str, list[Truth]]:
    """ik_llama.cpp's log, whose rate counts the first token."""
    request = Request.drawn(chance)
    prompt = timing(
        "prompt eval time     ",
        request.prompt_ms,
        request.n_prompt,
        "tokens",
        request.n_prompt,
    )
    answer = timing(
        "generation eval time", request.gen_ms, request.n_gen, "runs  ", request.n_gen
    )
    begin = "INFO [           print_timings] "
    truths = [
        Truth(request.prefill_tps, PREFILL, PROMPT),
        Truth(request.decode_tps(FIRST_FREE), DECODE, FIRST_FREE),
    ]
    return f"{begin}{prompt} | tid=1\n{begin}{answer} | tid=1\n", truths


def timings(chance: random.Random) -> tuple[str, list[Truth]]:
    """llama-server's timings in JSON, whole or as a fragment."""
    request = Request.drawn(chance)
    counts = chance.choice([STEPS, FIRST_FREE])
    fields: dict[str, float] = {
        "prompt_n": request.n_prompt,
        "prompt_ms": request.prompt_ms,
        "prompt_per_second": request.prefill_tps,
        "predicted_n": request.n_gen,
        "predicted_ms": request.gen_ms,
        "predicted_per_second": request.decode_tps(counts),
    }
    has_cache = chance.random() < 0.7
    if has_cache:
        fields = {"cache_n": request.n_cached, **fields}
    text = json.dumps(fields, indent=chance.choice([None, 2]))
    if chance.random() < 0.5:
        text = text.strip("{}")
    depth = request.n_context if has_cache else None
    cached = request.n_cached if has_cache else None
    truths = [
        Truth(request.prefill_tps, PREFILL, PROMPT, cached),
        Truth(request.decode_tps(counts), DECODE, counts, depth),
    ]
    return text, truths


def ollama(chance: random.Random) -> tuple[str, list[Truth]]:
    """ollama run --verbose, in lines or in one, perhaps with the prompt cached."""
    request = Request.drawn(chance)
    prompt_tps = round(request.prefill_tps, 2)
    gen_tps = round(request.decode_tps(FIRST_FREE), 2)
    lines = ["total duration:       4m3.3s", "load duration:        67.7549ms"]
    truths = [Truth(gen_tps, DECODE, MAYBE_FIRST)]
    if chance.random() < 0.8:
        lines += [
            f"prompt eval count:    {request.n_prompt} token(s)",
            f"prompt eval duration: {request.prompt_ms}ms",
            f"prompt eval rate:     {prompt_tps:.2f} tokens/s",
        ]
        truths.append(Truth(prompt_tps, PREFILL, PROMPT))
    lines += [
        f"eval count:           {request.n_gen} token(s)",
        f"eval duration:        {request.gen_ms / 1e3:.6f}s",
        f"eval rate:            {gen_tps:.2f} tokens/s",
    ]
    if chance.random() < 0.3:
        bold = [f"**{line.replace(':', ':**', 1)}" for line in lines]
        return "\n".join(bold) + "\n", truths
    separator = chance.choice(["\n", "\n", " "])
    return separator.join(lines) + "\n", truths


def ollama_api(chance: random.Random) -> tuple[str, list[Truth]]:
    """The last object of Ollama's API, in nanoseconds."""
    request = Request.drawn(chance)
    fields = {
        "total_duration": round(1e6 * (request.prompt_ms + request.gen_ms)) + 999,
        "prompt_eval_count": request.n_prompt,
        "prompt_eval_duration": round(1e6 * request.prompt_ms),
        "eval_count": request.n_gen,
        "eval_duration": round(1e6 * request.gen_ms),
    }
    truths = [
        Truth(request.prefill_tps, PREFILL, PROMPT),
        Truth(request.decode_tps(FIRST_FREE), DECODE, MAYBE_FIRST),
    ]
    return json.dumps(fields), truths


def lm_studio(chance: random.Random) -> tuple[str, list[Truth]]:
    """LM Studio: its API, or the line below an answer."""
    request = Request.drawn(chance)
    tps = round(request.decode_tps(FIRST_FREE), 2)
    if chance.random() < 0.5:
        text = f"{tps} tok/sec \u2022 {request.n_gen} tokens \u2022 0.06s to first token\n"
        return text, [Truth(tps, DECODE, MAYBE_FIRST)]
    document = {
        "usage": {"prompt_tokens": request.n_context, "completion_tokens": request.n_gen},
        "stats": {"tokens_per_second": tps, "time_to_first_token": 0.1},
    }
    return json.dumps(document), [Truth(tps, DECODE, MAYBE_FIRST, request.n_context)]


def kobold(chance: random.Random) -> tuple[str, list[Truth]]:
    """KoboldCpp's line; Process counts the tokens that were not cached."""
    request = Request.drawn(chance)
    prompt_s = request.prompt_ms / 1e3
    gen_s = request.gen_ms / 1e3
    prefill_tps = round(request.prefill_tps, 2)
    decode_tps = round(request.decode_tps(FIRST_FREE), 2)
    whole_tps = round(request.n_gen / (prompt_s + gen_s), 2)
    text = (
        f"CtxLimit:{request.n_context + request.n_gen}/16384, Amt:{request.n_gen}/512, "
        f"Init:0.00s, Process:{prompt_s:.2f}s ({prefill_tps:.2f}T/s), "
        f"Generate:{gen_s:.2f}s ({decode_tps:.2f}T/s), "
        f"Total:{prompt_s + gen_s:.2f}s ({whole_tps:.2f}T/s)\n"
    )
    cached = None  # rounded time and rate leave several numbers of processed tokens
    if 0.006 * (prefill_tps + prompt_s) < 0.5:
        cached = request.n_cached
    truths = [
        Truth(prefill_tps, PREFILL, PROMPT, cached),
        Truth(decode_tps, DECODE, MAYBE_FIRST, request.n_context),
        Truth(whole_tps, BOTH, WHOLE, request.n_context),
    ]
    return text, [truth for truth in truths if truth.tps > 0]


def vllm(chance: random.Random) -> tuple[str, list[Truth]]:
    """vLLM's log: averages over windows, of decode alone or with prefill in them."""
    lines = list[str]()
    rates = list[float]()
    is_pure = chance.random() < 0.6
    n_running = chance.choice([1, 1, 2, 7])
    for second in range(chance.randint(1, 3)):
        tps = round(chance.uniform(3, 900), 1)
        lines.append(
            f"INFO 08-01 07:18:{second}4 [loggers.py:122] Engine 000: Avg prompt throughput: "
            f"{0 if is_pure else 300}.0 tokens/s, Avg generation throughput: {tps} tokens/s, "
            f"Running: {n_running} reqs, Waiting: 0 reqs, GPU KV cache usage: 67.5%"
        )
        rates.append(tps)
    counts = WINDOW if is_pure else MIXED_WINDOW
    mean_tps = sum(rates) / len(rates)
    return "\n".join(lines) + "\n", [Truth(mean_tps, DECODE, counts, None, n_running)]


def sglang(chance: random.Random) -> tuple[str, list[Truth]]:
    """SGLang's batches of decode, of equally many requests."""
    n_running = chance.choice([1, 2, 8])
    tokens = n_running * chance.randint(20, 9000)
    tps = round(chance.uniform(10, 900), 2)
    line = (
        f"[2026-02-01 10:00:00 TP0] Decode batch, #running-req: {n_running}, #token: {tokens}, "
        "token usage: 0.05, cuda graph: True, "
        f"gen throughput (token/s): {tps:.2f}, #queue-req: 0, "
    )
    truth = Truth(tps, DECODE, WINDOW, tokens // n_running, n_running)
    return f"{line}\n{line}\n", [truth]


def progress(chance: random.Random) -> tuple[str, list[Truth]]:
    """llama-server's lines of progress of an answer that goes on."""
    tps = round(chance.uniform(2, 90), 2)
    lines = list[str]()
    for n_decoded in (40, 100, 160):
        lines.append(
            f"0.20.000.001 I slot print_timing: id  0 | task 77 | n_decoded = {n_decoded:6d}, "
            f"tg = {tps:6.2f} t/s, tg_3s = {tps:6.2f} t/s"
        )
    return "\n".join(lines) + "\n", [Truth(tps, DECODE, MAYBE_FIRST)]


def kobold_of_2026(chance: random.Random) -> tuple[str, list[Truth]]:
    """KoboldCpp's newer line, which counts the processed tokens."""
    request = Request.drawn(chance)
    prompt_s = request.prompt_ms / 1e3
    gen_s = request.gen_ms / 1e3
    prefill_tps = round(request.prefill_tps, 2)
    decode_tps = round(request.decode_tps(FIRST_FREE), 2)
    text = (
        f"CtxLimit:{request.n_context + request.n_gen}/16384, Init:0.00s, "
        f"Processed:{request.n_prompt} in {prompt_s:.2f}s ({prefill_tps:.2f}T/s), "
        f"Generated:{request.n_gen}/512 in {gen_s:.2f}s ({decode_tps:.2f}T/s), "
        f"Total:{prompt_s + gen_s:.2f}s\n"
    )
    return text, [
        Truth(prefill_tps, PREFILL, PROMPT, request.n_cached),
        Truth(decode_tps, DECODE, MAYBE_FIRST, request.n_context),
    ]


def llama_swap(chance: random.Random) -> tuple[str, list[Truth]]:
    """llama-swap's table of activity."""
    request = Request.drawn(chance)
    prefill_tps = round(request.prefill_tps, 2)
    decode_tps = round(request.decode_tps(FIRST_FREE), 2)
    text = (
        "Time | Cached | Prompt | Generated | Prompt Speed | Gen Speed | Duration\n"
        "-- | -- | -- | -- | -- | -- | --\n"
        f"now | {request.n_cached:,} | {request.n_prompt:,} | {request.n_gen} | "
        f"{prefill_tps:.2f} t/s | {decode_tps:.2f} t/s | 9.00s |\n"
    )
    return text, [
        Truth(prefill_tps, PREFILL, PROMPT, request.n_cached),
        Truth(decode_tps, DECODE, MAYBE_FIRST, request.n_context),
    ]


def mlx(chance: random.Random) -> tuple[str, list[Truth]]:
    """mlx_lm.generate, and mlx_lm.benchmark with a batch."""
    request = Request.drawn(chance)
    prefill_tps = round(request.prefill_tps, 3)
    decode_tps = round(request.decode_tps(FIRST_FREE), 3)
    n_streams = chance.choice([1, 1, 4])
    counts = FIRST_FREE if n_streams == 1 else MAYBE_FIRST
    truths = [
        Truth(prefill_tps, PREFILL, PROMPT, 0, n_streams),
        Truth(decode_tps, DECODE, counts, request.n_prompt, n_streams),
    ]
    if n_streams == 1:
        text = (
            f"Prompt: {request.n_prompt} tokens, {prefill_tps:.3f} tokens-per-sec\n"
            f"Generation: {request.n_gen} tokens, {decode_tps:.3f} tokens-per-sec\n"
        )
        return text, truths
    text = (
        f"Timing with prompt_tokens={request.n_prompt}, generation_tokens={request.n_gen}, "
        f"batch_size={n_streams}.\n"
        f"Trial 1:  prompt_tps={prefill_tps:.3f}, generation_tps={decode_tps:.3f}, peak_memory=9\n"
    )
    return text, truths


def webui(chance: random.Random) -> tuple[str, list[Truth]]:
    """text-generation-webui, whose rate divides by the time of prefill too."""
    request = Request.drawn(chance)
    total_s = round((request.prompt_ms + request.gen_ms) / 1e3 + 1, 2)
    tps = round(request.n_gen / total_s, 2)
    text = (
        f"18:52:50-790912 INFO     Output generated in {total_s:.2f} seconds ({tps:.2f} tokens/s, "
        f"{request.n_gen} tokens, context {request.n_context}, seed 1221920105)\n"
    )
    return text, [Truth(tps, BOTH, WHOLE, request.n_context)]


def llama_bench(chance: random.Random) -> tuple[str, list[Truth]]:
    """llama-bench's Markdown, JSON or CSV, with several tests."""
    form = chance.choice(["md", "json", "csv"])
    rows = list[dict[str, object]]()
    truths = list[Truth]()
    lines = ["| model | size | params | backend | threads | test | t/s |"]
    lines.append("| --- | ---: | ---: | --- | ---: | ---: | ---: |")
    for kind in chance.sample(["pp", "tg", "both"], chance.randint(1, 3)):
        n_prompt = 0 if kind == "tg" else 2 ** chance.randint(5, 12)
        n_gen = 0 if kind == "pp" else 2 ** chance.randint(4, 8)
        depth = chance.choice([0, 0, chance.randint(1, 32) * 256])
        tps = round(chance.uniform(2, 4000), 2)
        phase = {
            "pp": PREFILL,
            "tg": DECODE,
            "both": BOTH,
        }[kind]
        counts = {
            "pp": PROMPT,
            "tg": STEPS,
            "both": MIXED,
        }[kind]
        truths.append(Truth(tps, phase, counts, depth, 1))
        test = {"pp": f"pp{n_prompt}", "tg": f"tg{n_gen}", "both": f"pp{n_prompt}+tg{n_gen}"}[
            kind
        ]
        at = f" @ d{depth}" if depth else ""
        lines.append(
            f"| llama 7B Q4_0 | 3.56 GiB | 6.74 B | CPU | 8 | {test}{at} | {tps} \u00b1 0.5 |"
        )
        rows.append(
            {
                "build_commit": "0c1e570",
                "model_type": "llama 7B Q4_0",
                "n_threads": 8,
                "n_gpu_layers": -1,
                "n_prompt": n_prompt,
                "n_gen": n_gen,
                "n_depth": depth,
                "avg_ts": tps,
                "stddev_ts": 0.5,
            }
        )
    if form == "md":
        return "\n".join(lines) + "\n\nbuild: 0c1e570 (1)\n", truths
    if form == "json":
        return json.dumps(rows, indent=2), truths
    head = ",".join(rows[0])
    table = [",".join(f'"{value}"' for value in row.values()) for row in rows]
    return "\n".join([head, *table]) + "\n", truths


def batched_bench(chance: random.Random) -> tuple[str, list[Truth]]:
    """llama-batched-bench with several sequences, or llama-sweep-bench."""
    n_prompt = 2 ** chance.randint(5, 11)
    n_gen = 2 ** chance.randint(4, 7)
    prefill_tps = round(chance.uniform(50, 4000), 2)
    decode_tps = round(chance.uniform(2, 300), 2)
    if chance.random() < 0.5:
        n_kv = 512 * chance.randint(0, 60)
        prefill_s = n_prompt / prefill_tps
        decode_s = n_gen / decode_tps
        text = (
            "|    PP |     TG |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |\n"
            "|-------|--------|--------|----------|----------|----------|----------|\n"
            f"| {n_prompt} | {n_gen} | {n_kv} | {prefill_s:.3f} | {prefill_tps} | {decode_s:.3f} | "
            f"{decode_tps} |\n"
        )
        return text, [
            Truth(prefill_tps, PREFILL, PROMPT, n_kv, 1),
            Truth(decode_tps, DECODE, STEPS, n_kv, 1),
        ]
    n_streams = chance.choice([1, 2, 4, 8])
    n_kv = n_streams * (n_prompt + n_gen)
    prefill_s = n_prompt * n_streams / prefill_tps
    decode_s = n_gen * n_streams / decode_tps
    text = (
        "|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |\n"
        f"| {n_prompt} | {n_gen} | {n_streams} | {n_kv} | {prefill_s:.3f} | {prefill_tps} | "
        f"{decode_s:.3f} | {decode_tps} |\n"
    )
    return text, [
        Truth(prefill_tps, PREFILL, PROMPT, 0, n_streams),
        Truth(decode_tps, DECODE, STEPS, n_prompt, n_streams),
    ]


def batched_lines(chance: random.Random) -> tuple[str, list[Truth]]:
    """llama-batched-bench as JSON lines; in some runs all sequences share their prompt."""
    lines = list[str]()
    truths = list[Truth]()
    n_prompt = 2 ** chance.randint(5, 11)
    n_gen = 2 ** chance.randint(4, 7)
    is_shared = chance.random() < 0.3
    for n_streams in (1, 4):
        n_prompts = 1 if is_shared else n_streams
        prefill_tps = chance.uniform(50, 4000)
        decode_tps = chance.uniform(2, 300)
        row = {
            "n_kv_max": 65536,
            "n_batch": 2048,
            "n_ubatch": 512,
            "flash_attn": 1,
            "is_pp_shared": int(is_shared),
            "n_gpu_layers": -1,
            "n_threads": 8,
            "n_threads_batch": 8,
            "pp": n_prompt,
            "tg": n_gen,
            "pl": n_streams,
            "n_kv": n_prompts * n_prompt + n_streams * n_gen,
            "t_pp": round(n_prompts * n_prompt / prefill_tps, 6),
            "speed_pp": round(prefill_tps, 6),
            "t_tg": round(n_streams * n_gen / decode_tps, 6),
            "speed_tg": round(decode_tps, 6),
        }
        lines.append(json.dumps(row))
        truths.append(Truth(prefill_tps, PREFILL, PROMPT, 0, n_prompts))
        truths.append(Truth(decode_tps, DECODE, STEPS, n_prompt, n_streams))
    return "\n".join(lines) + "\n", truths


def tabby(chance: random.Random) -> tuple[str, list[Truth]]:
    """TabbyAPI's line, as wide as its terminal; perhaps with drafts, or with a prompt cut off."""
    request = Request.drawn(chance)
    prefill_tps = round(request.prefill_tps, 2)
    decode_tps = round(request.decode_tps(FIRST_FREE), 2)
    total_s = round((request.prompt_ms + request.gen_ms) / 1e3, 2)
    is_cut = chance.random() < 0.2
    has_drafts = chance.random() < 0.3
    text = (
        f"INFO:     Metrics (ID: {chance.getrandbits(64):016x}): {request.n_gen} tokens "
        f"generated in {total_s} seconds (Queue: 0.0 s, Process: {request.n_cached} cached "
        f"tokens and {request.n_prompt} new tokens at {prefill_tps} T/s, Generate: "
        f"{decode_tps} T/s, Context: {request.n_context} tokens"
    )
    text += ", Draft: 10 / 20 tokens accepted (50.0%))" if has_drafts else ")"
    text += " <-- Not accurate (truncated)" if is_cut else ""
    if chance.random() < 0.3:
        text = text.replace(" seconds (", " seconds\n(").replace(" new tokens", " new\ntokens")
    truths = [Truth(prefill_tps, PREFILL, PROMPT, request.n_cached)]
    depth = None if is_cut else request.n_context
    truths.append(Truth(decode_tps, DECODE, MAYBE_FIRST, depth))
    return text + "\n", truths


def serving_benchmark(chance: random.Random) -> tuple[str, list[Truth]]:
    """The block of vLLM's and of SGLang's benchmark of a server."""
    n_gen = chance.randint(500, 90_000)
    duration_s = round(chance.uniform(5, 900), 2)
    served_tps = round(n_gen / duration_s, 2)
    tpot_ms = round(chance.uniform(4, 200), 2)
    most_at_once = chance.choice([None, 1, 1, 16])
    is_sglang = chance.random() < 0.5
    has_tpot = not is_sglang or chance.random() < 0.5
    rows = list[tuple[str, object]]()
    if is_sglang:
        rows += [("Backend:", "sglang"), ("Traffic request rate:", "inf")]
    if most_at_once is not None:
        name = "Max request concurrency:" if is_sglang else "Maximum request concurrency:"
        rows.append((name, most_at_once))
    elif is_sglang:
        rows.append(("Max request concurrency:", "not set"))
    rows += [
        ("Successful requests:", 100),
        ("Benchmark duration (s):", f"{duration_s:.2f}"),
        ("Total input tokens:", 12345),
        ("Total generated tokens:", n_gen),
    ]
    if is_sglang:
        rows.append(("Total generated tokens (retokenized):", n_gen - 7))
    rows += [
        ("Request throughput (req/s):", "1.50"),
        ("Output token throughput (tok/s):", f"{served_tps:.2f}"),
        ("Peak output token throughput (tok/s):", f"{2 * served_tps:.2f}"),
        ("Total Token throughput (tok/s):", f"{5 * served_tps:.2f}"),
        ("Mean TTFT (ms):", "321.00"),
    ]
    truths = [Truth(served_tps, BOTH, SERVED, None, 1 if most_at_once == 1 else None)]
    if has_tpot:
        rows += [
            ("Mean TPOT (ms):", f"{tpot_ms:.2f}"),
            ("Median TPOT (ms):", f"{tpot_ms:.2f}"),
        ]
        truths.append(
            Truth(1000 / tpot_ms, DECODE, STEPS, None, 1 if most_at_once == 1 else None)
        )
    rows += [("Mean ITL (ms):", f"{tpot_ms + 1:.2f}"), ("P99 ITL (ms):", "99.00")]
    lines = [" Serving Benchmark Result ".center(50, "=")]
    for name, value in rows:
        lines.append(f"{name:<40} {value!s:<10}")
    return "\n".join([*lines, "=" * 50]) + "\n", truths


def kobold_benchmark(chance: random.Random) -> tuple[str, list[Truth]]:
    """KoboldCpp with --benchmark: the prompt fills the context but for the answer."""
    n_context = 1024 * chance.randint(1, 16)
    n_gen = chance.choice([50, 100, 200])
    prompt_s = round((n_context - n_gen) / chance.uniform(30, 2000), 3)
    gen_s = round(n_gen / chance.uniform(3, 100), 3)
    prefill_tps = round((n_context - n_gen) / prompt_s, 2)
    decode_tps = round(n_gen / gen_s, 2)
    text = (
        "Benchmark Completed - v1.80 Results:\n======\nFlags: NoAVX2=False Threads=7\n"
        "Timestamp: 2025-01-02 03:04:05.678901+00:00\nBackend: koboldcpp_default.so\n"
        f"Layers: 0\nModel: some-model.Q4_K_M\nMaxCtx: {n_context}\nGenAmount: {n_gen}\n"
        f"-----\nProcessingTime: {prompt_s:.3f}s\nProcessingSpeed: {prefill_tps:.2f}T/s\n"
        f"GenerationTime: {gen_s:.3f}s\nGenerationSpeed: {decode_tps:.2f}T/s\n"
        f"TotalTime: {prompt_s + gen_s:.3f}s\nOutput:  1 1 1 1\n-----\n"
    )
    return text, [
        Truth(prefill_tps, PREFILL, PROMPT, 0, 1),
        Truth(decode_tps, DECODE, MAYBE_FIRST, n_context - n_gen, 1),
    ]


def bare(chance: random.Random) -> tuple[str, list[Truth]]:
    """A figure alone."""
    tps = round(chance.uniform(1, 99), 1)
    unit = chance.choice(["tokens/s", "tok/s", "t/s", "tok/sec", "tokens per second"])
    return f"{tps} {unit}", [Truth(tps, UNKNOWN, UNKNOWN)]


WRITERS: dict[str, Writer] = {
    "llama-server log": server_log,
    "llama-cli": cli_log,
    "ik_llama.cpp": ik_log,
    "timings": timings,
    "Ollama": ollama,
    "Ollama API": ollama_api,
    "LM Studio": lm_studio,
    "KoboldCpp": kobold,
    "vLLM": vllm,
    "mlx_lm": mlx,
    "text-generation-webui": webui,
    "llama-bench": llama_bench,
    "llama-batched-bench": batched_bench,
    "llama-batched-bench, JSON lines": batched_lines,
    "TabbyAPI": tabby,
    "a benchmark of a server": serving_benchmark,
    "SGLang": sglang,
    "llama-server's progress": progress,
    "KoboldCpp of 2026": kobold_of_2026,
    "llama-swap": llama_swap,
    "KoboldCpp's benchmark": kobold_benchmark,
    "a bare figure": bare,
}


def command(chance: random.Random) -> tuple[str, dict[str, object]]:
    """A command of llama.cpp as people write it, and what it states."""
    name = f"some-{chance.choice(['1B', '8B', '30B-A3B'])}-{chance.choice(['Q4_0', 'Q8_0'])}"
    options = {
        "n_gpu_layers": ("-ngl", "--n-gpu-layers"),
        "threads": ("-t", "--threads"),
        "ubatch": ("-ub", "--ubatch-size"),
        "n_cpu_moe": ("-ncmoe", "--n-cpu-moe"),
    }
    tokens = [chance.choice(["-m", "--model"]), f"/models/{name}.gguf"]
    stated: dict[str, object] = {"model": name, "quantization": name.rpartition("-")[2]}
    for setting in chance.sample(list(options), chance.randint(0, 4)):
        value = chance.randint(1, 60)
        tokens += [chance.choice(options[setting]), str(value)]
        stated[setting] = value
    if chance.random() < 0.5:
        value_of_fa = chance.choice(["on", "off"])
        tokens += ["-fa", value_of_fa]
        stated["flash_attn"] = value_of_fa
    begin = chance.choice(
        ["./", "$ ", "user@box:~/llama.cpp$ ./build/bin/", "    ", "CUDA=0 "]
    )
    kind = chance.choice(["line", "line", "lines", "list", "folded"])
    if kind == "list":
        items = "\n".join(f'      - "{token}"' for token in tokens)
        return f"    image: ghcr.io/x/llama.cpp:server\n    command:\n{items}\n", stated
    if kind == "folded":
        pairs = "\n".join(
            f"      {' '.join(tokens[place : place + 2])}"
            for place in range(0, len(tokens), 2)
        )
        return f"    image: ghcr.io/x/llama.cpp:server\n    command: >\n{pairs}\n", stated
    separator = " \\\n  " if kind == "lines" else " "
    pieces = [" ".join(tokens[place : place + 2]) for place in range(0, len(tokens), 2)]
    return f"{begin}llama-server {separator.join(pieces)}\n", stated


OF_LLAMA = ("llama-server log", "llama-server's progress", "timings")


def as_pasted(
    text: str,
    name: str,
    chance: random.Random,
) -> str:
    """The text as somebody pastes it; what it says stays the same."""
    kinds = ["plain", "windows", "colours", "spaces", "no end"]
    is_csv = "build_commit,model_type" in text
    if name != "a bare figure":
        kinds += ["prose", "fenced"]
    if name != "a bare figure" and not is_csv:
        kinds.append("quoted")
    kind = chance.choice(kinds)
    if kind == "windows":
        return text.replace("\n", "\r\n")
    if kind == "colours":
        return f"\x1b[32m{text}\x1b[0m"
    if kind == "spaces":
        return text.replace(" ", "\u00a0")
    if kind == "no end":
        return text.rstrip("\n")
    if kind == "prose":
        return f"{chance.choice(PROSE)}\n\n{text}\n{chance.choice(PROSE)}\n"
    if kind == "fenced":
        return f"```\n{text}\n```\n"
    if kind == "quoted":
        return "".join(f"> {line}\n" for line in text.splitlines())
    return text


def pastes(seed: int = 1) -> Iterator[Paste]:
    """N_PASTES pastes: the samples written by hand, then written and mutated ones."""
    chance = random.Random(seed)
    for sample in SAMPLES:
        yield Paste(sample.name, sample.text, sample.truths)
    for number in range(N_PASTES - len(SAMPLES)):
        name = list(WRITERS)[number % len(WRITERS)]
        text, truths = WRITERS[name](chance)
        stated: dict[str, object] = {}
        if name in OF_LLAMA and chance.random() < 0.7:
            line, stated = command(chance)
            text = f"{line}\n{text}"
        text = as_pasted(text, name, chance)
        if name != "a bare figure" and chance.random() < 0.3:  # two programs in one post
            second = chance.choice(list(WRITERS))
            if second not in (name, "a bare figure"):
                more, more_truths = WRITERS[second](chance)
                text = f"{text}\n\nand the other one:\n{more}"
                truths = [*truths, *more_truths]
                name = f"{name} and {second}"
        yield Paste(name, text, tuple(truths), stated)
