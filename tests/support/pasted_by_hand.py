"""Pastes written by hand after real posts, each with something that a reader can get wrong."""
# ruff: noqa: E501 (samples are as programs print them)

from __future__ import annotations

from lab.features.why.figure import (
    BOTH,
    DECODE,
    FIRST_FREE,
    MAYBE_FIRST,
    MIXED,
    PREFILL,
    PROMPT,
    STEPS,
    UNKNOWN,
    WHOLE,
    WINDOW,
)
from tests.support.pasted_samples import Sample, Truth, decode, prefill

OLLAMA_CACHED = """\
total duration:       4.1s
eval count:           61 token(s)
eval duration:        3.7321777s
eval rate:            16.34 tokens/s
"""
PERF = """\
llama_perf_context_print: prompt eval time =      54.21 ms /    32 tokens (    1.69 ms per token,   590.30 tokens per second)
llama_perf_context_print:        eval time =    1021.88 ms /   127 runs   (    8.05 ms per token,   124.28 tokens per second)
"""
TIMINGS_WITHOUT_CACHE = (
    '{"timings":{"prompt_n":34,"prompt_ms":110.645,"prompt_per_second":307.289,"predicted_n":64,'
    '"predicted_ms":1302.927,"predicted_per_second":49.120}}\n'
)
TIMINGS_WITH_CACHE = (
    '{"timings":{"cache_n":872,"prompt_n":39,"prompt_ms":19.041,"prompt_per_second":2048.21,'
    '"predicted_n":32,"predicted_ms":200.184,"predicted_per_second":154.8575}}\n'
)
BY_HAND = (
    Sample(
        "vllm, several windows, idle ones between them",
        "INFO 02-01 12:00:00 metrics.py:455] Avg prompt throughput: 103.1 tokens/s, "
        "Avg generation throughput: 0.0 tokens/s, Running: 2 reqs, Swapped: 0 reqs, "
        "Pending: 0 reqs, GPU KV cache usage: 0.5%, CPU KV cache usage: 0.0%.\n"
        "INFO 02-01 12:00:10 metrics.py:455] Avg prompt throughput: 0.0 tokens/s, Avg "
        "generation throughput: 63.7 tokens/s, Running: 2 reqs, Swapped: 0 reqs, "
        "Pending: 0 reqs, GPU KV cache usage: 0.5%, CPU KV cache usage: 0.0%.\n",
        (decode(63.7, WINDOW, None, 2),),
    ),
    Sample(
        "lm studio, a German window",
        "28,92 tok/sec\n•\n877 tokens\n•\n0,06 s to first token\n•\nStop reason: EOS Token Found",
        (decode(28.92, MAYBE_FIRST),),
    ),
    Sample(
        "a rate and a number of tokens, of no known program",
        "35 tok/sec 500 tokens\n",
        (),
    ),
    Sample(
        "tokens_per_second of an unknown program",
        '{"model": "exo", "tokens_per_second": 35.25, "total_tokens": 500}',
        (Truth(35.25, UNKNOWN, UNKNOWN),),
    ),
    Sample(
        "gen_tps of an unknown script",
        '{"gen_tps": 35.25, "batch": 8}',
        (Truth(35.25, UNKNOWN, UNKNOWN),),
    ),
    Sample(
        "llama-cpp-python with a cached prefix",
        "Llama.generate: 872 prefix-match hit, remaining 32 prompt tokens to eval\n" + PERF,
        (prefill(590.297, 872, 1), decode(124.2807, STEPS, 904, 1)),
    ),
    Sample(
        "llama-cli in a conversation",
        "== Running in interactive mode. ==\n - Press Ctrl+C to interject at any time.\n\n"
        "> hi\nHello!\n\n> and now?\nWell.\n\n" + PERF,
        (prefill(590.297), decode(124.2807, STEPS)),
    ),
    Sample(
        "llama-perplexity",
        "perplexity: calculating perplexity over 16 chunks, n_ctx=512, "
        "batch_size=2048, n_seq=4\nFinal estimate: PPL = 9.1234 +/- 0.05\n"
        "llama_perf_context_print: prompt eval time =    5000.00 ms /  8192 tokens (   "
        " 0.61 ms per token,  1638.40 tokens per second)\n"
        "llama_perf_context_print:        eval time =       0.00 ms /     1 runs   (   "
        " 0.00 ms per token,      inf tokens per second)\n",
        (prefill(1638.4),),
    ),
    Sample(
        "common_perf_print with samplers",
        "common_perf_print:    sampling time =      38.61 ms\n"
        "common_perf_print:    samplers time =      17.02 ms /   160 tokens\n"
        "common_perf_print:        load time =     612.30 ms\n"
        + PERF.replace("llama_perf_context_print", "common_perf_print")
        + "common_perf_print:       total time =    1124.40 ms /   159 tokens\n"
        "common_perf_print:    graphs reused =        126\n",
        (prefill(590.297, 0, 1), decode(124.2807, STEPS, 32, 1)),
    ),
    Sample(
        "llama_print_timings of 2023 with its sampling rate",
        "llama_print_timings:      sample time =    38.61 ms /   128 runs   (    0.30 "
        "ms per token,  3315.12 tokens per second)\n"
        + PERF.replace("llama_perf_context_print", "llama_print_timings"),
        (prefill(590.297, 0, 1), decode(124.2807, STEPS, 32, 1)),
    ),
    Sample(
        "llama-server of early 2024, whose log is JSON",
        '{"function":"print_timings","level":"INFO","line":264,"msg":"prompt eval time '
        "    =     200.00 ms /    10 tokens (   20.00 ms per token,    50.00 tokens "
        'per second)","n_prompt_tokens_processed":10}\n'
        '{"function":"print_timings","level":"INFO","line":278,"msg":"generation eval '
        "time =    2000.00 ms /   100 runs   (   20.00 ms per token,    50.00 tokens "
        'per second)","n_decoded":100}\n',
        (prefill(50), decode(50, FIRST_FREE)),
    ),
    Sample(
        "a log that begins within an answer",
        "       eval time =    2000.00 ms /    51 tokens (   39.22 ms per token,    "
        "25.50 tokens per second)\n"
        "      total time =    2500.00 ms /    99 tokens\n"
        "prompt eval time =    1000.00 ms /   100 tokens (   10.00 ms per token,   "
        "100.00 tokens per second)\n"
        "       eval time =    3000.00 ms /    61 tokens (   49.18 ms per token,    "
        "20.33 tokens per second)\n"
        "      total time =    4000.00 ms /   161 tokens\n",
        (decode(25.5, FIRST_FREE), prefill(100), decode(20.3333, FIRST_FREE)),
    ),
    Sample(
        "a log with German decimals behind the prefix of docker",
        "llama-1  | slot print_timing: id  0 | task 7 | \n"
        "llama-1  | prompt eval time =   13556,62 ms /  2342 tokens (    5,79 ms per "
        "token,   172,76 tokens per second)\n"
        "llama-1  |        eval time =   41133,71 ms /   861 tokens (   47,83 ms per "
        "token,    20,91 tokens per second)\n",
        (prefill(172.757), decode(20.9075, STEPS)),
    ),
    Sample(
        "a log that names the whole prompt before its timings",
        "slot update_slots: id  0 | task 0 | new prompt, n_ctx_slot = 4096, n_keep = "
        "0, task.n_tokens = 905\n"
        "slot update_slots: id  0 | task 0 | n_tokens = 872, memory_seq_rm [872, end)\n"
        "slot print_timing: id  0 | task 0 | \n"
        "prompt eval time =     330.00 ms /    33 tokens (   10.00 ms per token,   "
        "100.00 tokens per second)\n"
        "       eval time =    2000.00 ms /    51 tokens (   39.22 ms per token,    "
        "25.50 tokens per second)\n",
        (prefill(100, 872), decode(25.5, FIRST_FREE, 905)),
    ),
    Sample(
        "the same in words of 2024",
        "slot update_slots: id  0 | task 0 | new prompt, n_ctx_slot = 4096, n_keep = "
        "0, n_prompt_tokens = 905\n"
        "slot update_slots: id  0 | task 0 | kv cache rm [872, end)\n"
        "slot update_slots: id  0 | task 0 | prompt processing progress, n_past = 905, "
        "n_tokens = 33, progress = 0.036464\n"
        "prompt eval time =     330.00 ms /    33 tokens (   10.00 ms per token,   "
        "100.00 tokens per second)\n"
        "       eval time =    2000.00 ms /    51 tokens (   39.22 ms per token,    "
        "25.50 tokens per second)\n",
        (prefill(100, 872), decode(25.5, FIRST_FREE, 905)),
    ),
    Sample(
        "ollama, two answers, the first one cut off",
        "eval rate:            16.34 tokens/s\n\nprompt eval count:    32 token(s)\n"
        "prompt eval rate:     59.81 tokens/s\n"
        "eval count:           48 token(s)\neval rate:            20.10 tokens/s\n",
        (decode(16.34, MAYBE_FIRST), prefill(59.81), decode(20.1, MAYBE_FIRST)),
    ),
    Sample(
        "ollama, a cached answer and one that is not",
        OLLAMA_CACHED
        + "total duration: 9s\nprompt eval count: 26 token(s)\nprompt eval duration: 500ms\n"
        "prompt eval rate: 52.00 tokens/s\neval count: 100 token(s)\neval duration: 8s\n"
        "eval rate: 12.50 tokens/s\n",
        (decode(16.34, MAYBE_FIRST), prefill(52), decode(12.5, MAYBE_FIRST)),
    ),
    Sample(
        "ollama's answer as Python prints it",
        "model='llama3.1' created_at='2025-01-01T00:00:00Z' done=True "
        "done_reason='stop' total_duration=5043500667 load_duration=5025959 "
        "prompt_eval_count=26 prompt_eval_duration=325953000 eval_count=290 "
        "eval_duration=4709213000",
        (decode(61.5814, MAYBE_FIRST), prefill(79.7662)),
    ),
    Sample(
        "open webui's window",
        "response_token/s: 61.58\nprompt_token/s: 79.77\ntotal_duration: 5043500667\n"
        "load_duration: 5025959\nprompt_eval_count: 26\nprompt_tokens: 26\n"
        "prompt_eval_duration: 325953000\neval_count: 290\ncompletion_tokens: 290\n"
        "eval_duration: 4709213000\napproximate_total: 0h0m5s\n",
        (decode(61.5814, MAYBE_FIRST), prefill(79.7662)),
    ),
    Sample(
        "timings of two servers, only the second one with its cache",
        TIMINGS_WITHOUT_CACHE + TIMINGS_WITH_CACHE,
        (
            prefill(307.289),
            decode(49.12, FIRST_FREE),
            prefill(2048.21, 872),
            decode(154.8575, STEPS, 911),
        ),
    ),
    Sample(
        "timings of two servers without their brackets",
        TIMINGS_WITHOUT_CACHE.replace("{", "").replace("}", "")
        + TIMINGS_WITH_CACHE.replace("{", "").replace("}", ""),
        (
            prefill(307.289),
            decode(49.12, FIRST_FREE),
            prefill(2048.21, 872),
            decode(154.8575, STEPS, 911),
        ),
    ),
    Sample(
        "timings of two answers, only the second one with its usage",
        TIMINGS_WITHOUT_CACHE
        + '{"usage":{"completion_tokens":64,"prompt_tokens":934},"timings":{"prompt_n":34'
        ',"prompt_ms":100.0,"prompt_per_second":340.0,"predicted_n":64,"predicted_ms":1'
        '400.0,"predicted_per_second":45.714}}\n',
        (
            prefill(307.289),
            decode(49.12, FIRST_FREE),
            prefill(340, 900),
            decode(45.714, FIRST_FREE, 934),
        ),
    ),
    Sample(
        "timings as Python prints a dictionary",
        "{'cache_n': 872, 'prompt_n': 39, 'prompt_ms': 19.041, 'prompt_per_second': "
        "2048.21, 'predicted_n': 32, 'predicted_ms': 200.184, 'predicted_per_second': "
        "154.8575}",
        (decode(154.8575, STEPS, 911), prefill(2048.21, 872)),
    ),
    Sample(
        "mlx_lm's batch",
        "[batch_generate] Finished processing 4/4 ...\n"
        "[batch_generate] Prompt: 1234 tokens, 500.000 tokens-per-sec\n"
        "[batch_generate] Generation: 400 tokens, 80.000 tokens-per-sec\n"
        "[batch_generate] Peak memory: 4.200 GB\n",
        (decode(80, MAYBE_FIRST), prefill(500)),
    ),
    Sample(
        "mlx_lm in one line, with thousands",
        "Prompt: 1,024 tokens, 231.122 tokens-per-sec Generation: 100 tokens, 45.120 "
        "tokens-per-sec",
        (decode(45.12, FIRST_FREE, 1024, 1), prefill(231.122, 0, 1)),
    ),
    Sample(
        "koboldcpp of 2025",
        "Processing Prompt [BLAS] (1062 / 1062 tokens)\nGenerating (120 / 512 tokens)\n"
        "(EOS token triggered! ID:2)\n"
        "[12:30:04] CtxLimit:1182/8192, Amt:120/512, Init:0.03s, Process:3.15s "
        "(337.14T/s), Generate:9.73s (12.33T/s), Total:12.88s\n",
        (prefill(337.14), decode(12.33, MAYBE_FIRST, 1062)),
    ),
    Sample(
        "koboldcpp's benchmark with a prompt of the user's",
        "MaxCtx: 2048\nGenAmount: 100\n-----\nProcessingTime: 19.480s\n"
        "ProcessingSpeed: 100.00T/s\nGenerationTime: 10.000s\nGenerationSpeed: 10.00T/s\n"
        "TotalTime: 29.480s\nOutput: Once upon a time there was\n-----\n",
        (prefill(100, None, 1), decode(10, MAYBE_FIRST, None, 1)),
    ),
    Sample(
        "tabbyapi, longer than it can have been",
        "Metrics (ID: 6d3f2c): 120 tokens generated in 1.1 seconds (Queue: 0.0 s, Process: "
        "0 cached tokens and 1000 new tokens at 333.33 T/s, Generate: 12.0 T/s)\n",
        (),
    ),
    Sample(
        "koboldcpp, two answers in one line",
        "CtxLimit:48/8152, Amt:31/512, Process:0.23s (72.65T/s), Generate:1.05s "
        "(29.47T/s), Total:1.29s (24.11T/s) "
        "CtxLimit:148/8152, Amt:20/512, Process:0.40s (200.00T/s), Generate:1.00s "
        "(20.00T/s), Total:1.40s (14.29T/s)",
        (
            decode(29.47, MAYBE_FIRST, 17),
            prefill(72.65, 0),
            Truth(24.11, BOTH, WHOLE, 17),
            decode(20, MAYBE_FIRST, 128),
            prefill(200),
            Truth(14.29, BOTH, WHOLE, 128),
        ),
    ),
    Sample(
        "llama-bench with columns that few know",
        "| model | size | params | backend | ngl | n_cpu_moe | type_k | type_v | fa | "
        "ts | sm | mmap | test | t/s |\n"
        "| --- | --- | --- | --- | --: | --: | --: | --: | --: | --- | --- | --: | --: | --: |\n"
        "| qwen3moe 30B.A3B Q4_K - Medium | 17.28 GiB | 30.53 B | CUDA,RPC | 99 | 12 | "
        "q8_0 | q8_0 | 1 | 1.00/2.00 | layer | 0 | pp512+tg128 @ d4096 | 210.10 ± 1.00 |\n"
        "| qwen3moe 30B.A3B Q4_K - Medium | 17.28 GiB | 30.53 B | CUDA,RPC | 99 | 12 | "
        "q8_0 | q8_0 | 1 | 1.00/2.00 | layer | 0 | tg128 @ d4096 | 45,10 ± 0,20 |\n",
        (Truth(210.1, BOTH, MIXED, 4096, 1), decode(45.1, STEPS, 4096, 1)),
    ),
    Sample(
        "llama-bench of 2023, without bars at the ends",
        "model | backend | ngl | test | t/s\n--- | --- | --- | --- | ---\n"
        "LLaMA 7B mostly Q4_0 | CUDA | 99 | pp 512 | 2345.67 +- 8.90\n"
        "LLaMA 7B mostly Q4_0 | CUDA | 99 | tg 128 | 78.90 +- 0.12\n",
        (prefill(2345.67, 0, 1), decode(78.9, STEPS, 0, 1)),
    ),
    Sample(
        "llama-bench, a rate with thousands and an entity",
        "| model | test | t/s |\n| --- | --- | --- |\n"
        "| llama 7B Q4_0 | pp512 | 12,345.67 &plusmn; 8.90 |\n",
        (prefill(12345.67, 0, 1),),
    ),
    Sample(
        "llama-bench behind the prefix of docker",
        "bench-1  | | model | size | params | backend | threads | test | t/s |\n"
        "bench-1  | | --- | ---: | ---: | --- | ---: | ---: | ---: |\n"
        "bench-1  | | llama 256M Q4_1 | 92.10 MiB | 134.52 M | CPU | 2 | tg32 @ d872 | "
        "100.00 ± 1.00 |\n",
        (decode(100, STEPS, 872, 1),),
    ),
    Sample(
        "llama-bench json lines of two depths",
        '{"model_type": "llama 1B Q4_0", "n_threads": 8, "n_prompt": 0, "n_gen": 128, '
        '"n_depth": 0, "avg_ts": 289.1, "stddev_ts": 2.5}\n'
        '{"model_type": "llama 1B Q4_0", "n_threads": 8, "n_prompt": 0, "n_gen": 128, '
        '"n_depth": 8192, "avg_ts": 101.5, "stddev_ts": 0.5}\n',
        (decode(289.1, STEPS, 0, 1), decode(101.5, STEPS, 8192, 1)),
    ),
    Sample(
        "llama-bench json of two versions, the first without depth",
        '[{"model_type": "llama 1B Q4_0", "n_prompt": 0, "n_gen": 128, "avg_ts": 289.1}]\n'
        '[{"n_depth": 8192, "model_type": "llama 1B Q4_0", "n_prompt": 0, "n_gen": '
        '128, "avg_ts": 101.5}]\n',
        (Truth(289.1, DECODE, STEPS, None, 1), decode(101.5, STEPS, 8192, 1)),
    ),
    Sample(
        "llama-cli's footers of two turns",
        "> hi\nHello!\n\n[ Prompt: 19,5 t/s | Generation: 11,8 t/s ]\n\n> more\nNo.\n\n"
        "[ Prompt: 25,5 t/s | Generation: 11,2 t/s ]\n",
        (
            Truth(19.5, PREFILL, PROMPT, None, 1),
            decode(11.8, MAYBE_FIRST, None, 1),
            Truth(25.5, PREFILL, PROMPT, None, 1),
            decode(11.2, MAYBE_FIRST, None, 1),
        ),
    ),
    Sample(
        "batched bench with a shared prompt",
        "|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s "
        "|      T s |    S t/s |\n"
        "|   128 |     32 |    4 |    256 |    0.128 |  1000.00 |    0.623 |   205.46 "
        "|    0.751 |   340.88 |\n",
        (decode(205.46, STEPS, 128, 4), prefill(1000, 0, 1)),
    ),
    Sample("a German bare figure", "ca. 28,9 Tokens/s", (Truth(28.9, UNKNOWN, UNKNOWN),)),
    Sample("a bare range", "30-35 tokens/s", ()),
    Sample("a rate of requests", "35 requests/s", ()),
    Sample("time per token", "eval: 35 ms/token", ()),
)
"""What a text does not say has no place in its truth: a sample without truths is refused."""
