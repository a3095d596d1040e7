"""Texts that programs print, with what is true of their figures: written by hand from real
posts."""
# ruff: noqa: E501 (samples are as programs print them)

from __future__ import annotations

from dataclasses import dataclass

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
    SEVERAL_LENGTHS,
    STEPS,
    UNKNOWN,
    WHOLE,
)


@dataclass(frozen=True)
class Truth:
    """What a text says of a figure; None: it does not say it."""

    tps: float
    phase: str
    counts: str
    depth: int | None = None
    n_streams: int | None = None


@dataclass(frozen=True)
class Sample:
    """A text, and the truth of each of its figures in any order."""

    name: str
    text: str
    truths: tuple[Truth, ...]


def prefill(
    tps: float,
    depth: int | None = None,
    n_streams: int | None = None,
) -> Truth:
    return Truth(tps, PREFILL, PROMPT, depth, n_streams)


def decode(
    tps: float, counts: str, depth: int | None = None, n_streams: int | None = None
) -> Truth:
    return Truth(tps, DECODE, counts, depth, n_streams)


SERVER_LOG = """\
slot print_timing: id  0 | task 0 |
prompt eval time = 1302678.24 ms / 31293 tokens (   41.63 ms per token,    24.02 tokens per second)
       eval time =   89470.04 ms /   615 tokens (  145.48 ms per token,     6.87 tokens per second)
      total time = 1392148.28 ms / 31908 tokens
"""
CACHED_LOG = """\
slot print_timing: id  0 | task 0 |
prompt eval time =      50.24 ms /     1 tokens (   50.24 ms per token,    19.90 tokens per second)
       eval time =    1934.06 ms /    32 tokens (   60.44 ms per token,    16.55 tokens per second)
      total time =    1984.30 ms /    33 tokens
slot      release: id  0 | task 0 | stop processing: n_tokens = 905, truncated = 0
"""
TWO_SLOTS = """\
0.58.295 I slot print_timing: id  0 | task 3 | prompt eval time =    1000.00 ms /   100 tokens (   10.00 ms per token,   100.00 tokens per second)
0.58.296 I slot print_timing: id  1 | task 4 | prompt eval time =    4000.00 ms /   200 tokens (   20.00 ms per token,    50.00 tokens per second)
0.58.297 I slot print_timing: id  0 | task 3 |        eval time =    2000.00 ms /    51 tokens (   40.00 ms per token,    25.00 tokens per second)
0.58.298 I slot print_timing: id  1 | task 4 |        eval time =    1000.00 ms /    11 tokens (  100.00 ms per token,    10.00 tokens per second)
0.58.299 I slot      release: id  1 | task 4 | stop processing: n_tokens = 210, truncated = 0
0.58.299 I slot      release: id  0 | task 3 | stop processing: n_tokens = 350, truncated = 0
"""
BENCH_HEAD = """\
| model                          |       size |     params | backend    | threads |            test |                  t/s |
| ------------------------------ | ---------: | ---------: | ---------- | ------: | --------------: | -------------------: |
"""
COMPARED = """\
| GPU | Model | Microbatch size | Test | t/s master | t/s PR | Speedup |
| --- | --- | ---: | --- | ---: | ---: | ---: |
| RTX 3090 | llama 8B Q4_0 | 512 | pp512@d32768 | 1216.05 | 1301.22 | 1.07 |
"""
SAMPLES = (
    Sample(
        "ollama",
        "total duration:       4.3363202s\nload duration:        67.7549ms\n"
        "prompt eval count:    32 token(s)\n"
        "prompt eval duration: 535.0053ms\nprompt eval rate:     59.81 tokens/s\n"
        "eval count:           61 token(s)\neval duration:        3.7321777s\n"
        "eval rate:            16.34 tokens/s\n",
        (decode(16.34, MAYBE_FIRST), prefill(59.81)),
    ),
    Sample(
        "ollama in one line",
        "total duration: 3m24.6020313s load duration: 15.0067ms prompt eval count: 7 "
        "token(s) prompt eval duration: "
        "999ms prompt eval rate: 7.01 tokens/s eval count: 356 token(s) eval duration: "
        "3m23.587s eval rate: 1.75 "
        "tokens/s\n",
        (decode(1.75, MAYBE_FIRST), prefill(7.01)),
    ),
    Sample(
        "ollama with bold labels",
        "- **prompt eval rate:** 59.81 tokens/s\n- **eval rate:** 16.34 tokens/s\n",
        (decode(16.34, MAYBE_FIRST), prefill(59.81)),
    ),
    Sample(
        "ollama, the prompt cached",
        "total duration: 4.1s\neval count: 61 token(s)\neval duration: 3.7321777s\n"
        "eval rate: 16.34 tokens/s\n",
        (decode(16.34, MAYBE_FIRST),),
    ),
    Sample(
        "ollama api",
        '"total_duration":5043500667,"load_duration":5025959,"prompt_eval_count":26,"pr'
        'ompt_eval_duration":325953000,'
        '"eval_count":290,"eval_duration":4709213000\n',
        (decode(61.5814, MAYBE_FIRST), prefill(79.7662)),
    ),
    Sample("server, old", SERVER_LOG, (prefill(24.022), decode(6.8738, FIRST_FREE))),
    Sample(
        "server, cached", CACHED_LOG, (prefill(19.9045, 873), decode(16.5455, FIRST_FREE, 874))
    ),
    Sample(
        "server, released before its timings",
        "".join(
            CACHED_LOG.splitlines(keepends=True)[-1:]
            + CACHED_LOG.splitlines(keepends=True)[:-1]
        ),
        (prefill(19.9045, 873), decode(16.5455, FIRST_FREE, 874)),
    ),
    Sample(
        "server, its context was shifted",
        CACHED_LOG.replace("truncated = 0", "truncated = 1"),
        (prefill(19.9045), decode(16.5455, FIRST_FREE)),
    ),
    Sample(
        "server's own api",
        '{"content":"...","tokens_predicted":32,"tokens_evaluated":911,"tokens_cached":'
        '942,"timings":{"prompt_n":39,'
        '"prompt_ms":19.041,"prompt_per_second":2048.21,"predicted_n":32,"predicted_ms":200.184,'
        '"predicted_per_second":154.8575}}',
        (decode(154.8575, STEPS, 911), prefill(2048.21, 872)),
    ),
    Sample(
        "server, new",
        "1.00.958.295 I slot print_timing: id  0 | task 0 | prompt eval time =   "
        "13556.62 ms /  2342 tokens (    5.79 "
        "ms per token,   172.76 tokens per second)\n"
        "1.00.958.301 I slot print_timing: id  0 | task 0 |        eval time =   "
        "41133.71 ms /   861 tokens (   47.83 "
        "ms per token,    20.91 tokens per second)\n"
        "1.00.958.302 I slot print_timing: id  0 | task 0 |       total time =   "
        "54690.33 ms /  3203 tokens\n",
        (prefill(172.757), decode(20.9074, STEPS)),
    ),
    Sample(
        "server, two slots mixed",
        TWO_SLOTS,
        (
            prefill(100, 200),
            decode(25, STEPS, 300),
            prefill(50, 0),
            decode(10, STEPS, 200),
        ),
    ),
    Sample(
        "server, speculative",
        SERVER_LOG.replace(
            "      total",
            "draft acceptance rate = 0.71988 ( 2390 accepted /  3320 generated)\n      total",
        ),
        (prefill(24.022), decode(6.8738, FIRST_FREE)),
    ),
    Sample(
        "ik_llama.cpp",
        "INFO [           print_timings] prompt eval time     =  152804.51 ms / 35736 "
        "tokens (    4.28 ms per token,   "
        '233.87 tokens per second) | tid="139666309812224" timestamp=1752894767 '
        "id_slot=0 id_task=0 "
        "t_prompt_processing=152804.508 n_prompt_tokens_processed=35736 t_token=4.275926460711887\n"
        "INFO [           print_timings] generation eval time =  189234.22 ms /   905 "
        "runs   (  209.10 ms per toke...\n",
        (prefill(233.867), decode(4.78243, FIRST_FREE)),
    ),
    Sample(
        "timings, rates alone",
        '"prompt_n": 9825,"prompt_per_second": 91.88938979076052,"predicted_n": '
        '407,"predicted_per_second": '
        "7.717271190351537\n",
        (decode(7.717271, MAYBE_FIRST), prefill(91.88939)),
    ),
    Sample(
        "timings, rates alone, cut off and with decimal commas",
        '"prompt_n": 9825,"prompt_per_second": 91,88938979076052,"predicted_n": '
        '407,"predicted_per_second": 7,71727119',
        (decode(7.717271, MAYBE_FIRST), prefill(91.88939)),
    ),
    Sample(
        "timings, old",
        '"cache_n":0,"prompt_n":34,"prompt_ms":110.645,"prompt_per_token_ms":3.254,"pro'
        'mpt_per_second":307.289,'
        '"predicted_n":64,"predicted_ms":1302.927,"predicted_per_token_ms":20.358,"pred'
        'icted_per_second":49.120}\n',
        (decode(49.12, FIRST_FREE, 34), prefill(307.289, 0)),
    ),
    Sample(
        "timings, new, cached",
        '"cache_n":872,"prompt_n":39,"prompt_ms":19.041,"prompt_per_second":2048.21,"pr'
        'edicted_n":32,"predicted_ms":'
        '200.184,"predicted_per_token_ms":6.457548387096774,"predicted_per_second":154.'
        "8575310714143}\n",
        (decode(154.8575, STEPS, 911), prefill(2048.21, 872)),
    ),
    Sample(
        "timings, a stream",
        'data: {"timings":{"cache_n":0,"prompt_n":39,"prompt_ms":19.041,"predicted_n":1'
        ',"predicted_ms":0.01}}\n'
        'data: {"timings":{"cache_n":0,"prompt_n":39,"prompt_ms":19.041,"predicted_n":2'
        ',"predicted_ms":6.4}}\n'
        'data: {"timings":{"cache_n":0,"prompt_n":39,"prompt_ms":19.041,"prompt_per_sec'
        'ond":2048.21,"predicted_n":32,'
        '"predicted_ms":200.184,"predicted_per_second":154.8575}}\n',
        (decode(154.8575, STEPS, 39), prefill(2048.21, 0)),
    ),
    Sample(
        "llama-cli without decode",
        "llama\\_perf\\_context\\_print:        load time =   63917.91 ms\n"
        "llama_perf_context_print: prompt eval time =  735270.12 ms / 36352 tokens (   "
        "20.23 ms per token,    49.44 "
        "tokens per second)\n"
        "llama_perf_context_print:        eval time =       0.00 ms /     1 runs   (   "
        " 0.00 ms per token,      inf "
        "tokens per second)\n"
        "llama_perf_context_print:       total time =  736433.40 ms / 36353 tokens\n",
        (prefill(49.4403, 0, 1),),
    ),
    Sample(
        "llama-cli",
        "llama_perf_context_print: prompt eval time =   81388.87 ms / 32163 tokens (   "
        " 2.53 ms per token,   395.18 "
        "tokens per second)\n"
        "llama_perf_context_print:        eval time =   24015.13 ms /   802 runs   (   "
        "29.94 ms per "
        "token,    33.40 tokens per second)\n",
        (prefill(395.177, 0, 1), decode(33.3956, STEPS, 32163, 1)),
    ),
    Sample(
        "llama-cli's footer",
        "> hi\nHello!\n\n[ Prompt: 19.5 t/s | Generation: 11.8 t/s ]\n",
        (
            Truth(19.5, PREFILL, PROMPT, None, 1),
            decode(11.8, MAYBE_FIRST, None, 1),
        ),
    ),
    Sample(
        "lm studio api",
        '"usage":{"prompt_tokens":24,"completion_tokens":53,"total_tokens":77},"stats":'
        '{"tokens_per_second":'
        '51.43709529007664,"time_to_first_token":0.111,"generation_time":0.954,"stop_re'
        'ason":"eosFound"},"model_info":'
        '{"arch":"granite","quant":"Q4_K_M","format":"gguf","context_length":4096}\n',
        (decode(51.4371, MAYBE_FIRST, 24),),
    ),
    Sample(
        "lm studio",
        "28.92 tok/sec\n•\n877 tokens • 0.06s to first token • Stop reason: EOS Token Found\n",
        (decode(28.92, MAYBE_FIRST),),
    ),
    Sample(
        "koboldcpp",
        "CtxLimit:48/8152, Amt:31/512, Init:0.00s, Process:0.23s (13.8ms/T = "
        "72.65T/s), Generate:1.05s (33.9ms/T = "
        "29.47T/s), Total:1.29s (24.11T/s)\n",
        (
            decode(29.47, MAYBE_FIRST, 17),
            prefill(72.65, 0),
            Truth(24.11, BOTH, WHOLE, 17),
        ),
    ),
    Sample(
        "koboldcpp, cached",
        "CtxLimit:2048/8152, Amt:31/512, Init:0.00s, Process:0.23s (72.65T/s), "
        "Generate:1.05s (29.47T/s), "
        "Total:1.29s (24.11T/s)\n",
        (
            decode(29.47, MAYBE_FIRST, 2017),
            prefill(72.65, 2000),
            Truth(24.11, BOTH, WHOLE, 2017),
        ),
    ),
    Sample(
        "vllm",
        "INFO 08-01 07:18:24 [loggers.py:122] Engine 000: Avg prompt throughput: "
        "22639.7 tokens/s, Avg generation "
        "throughput: 34.2 tokens/s, Running: 1 reqs, Waiting: 0 reqs, GPU KV cache usage: 67.5%\n",
        (decode(34.2, MIXED_WINDOW, None, 1),),
    ),
    Sample(  # the format of common/gen_logging.py of TabbyAPI
        "tabbyapi",
        "INFO:     Metrics (ID: 6d3f2c): 120 tokens generated in 13.1 seconds (Queue: 0.0 s, "
        "Process: 256 cached tokens and 1000 new tokens at 333.33 T/s, Generate: 12.0 T/s, "
        "Context: 1256 tokens)\n",
        (prefill(333.33, 256), decode(12.0, MAYBE_FIRST, 1256)),
    ),
    Sample(  # the format of vllm/benchmarks/serve.py
        "vllm bench serve",
        "============ Serving Benchmark Result ============\n"
        "Successful requests:                     32        \n"
        "Maximum request concurrency:             8         \n"
        "Benchmark duration (s):                  200.00    \n"
        "Total input tokens:                      65536     \n"
        "Total generated tokens:                  32000     \n"
        "Output token throughput (tok/s):         160.00    \n"
        "Peak output token throughput (tok/s):    220.00    \n"
        "Total Token throughput (tok/s):          487.68    \n"
        "---------------Time to First Token----------------\n"
        "Mean TTFT (ms):                          800.00    \n"
        "-----Time per Output Token (excl. 1st token)------\n"
        "Mean TPOT (ms):                          40.00     \n"
        "Median TPOT (ms):                        39.50     \n"
        "==================================================\n",
        (Truth(160.0, BOTH, SERVED), decode(25.0, STEPS)),
    ),
    Sample(  # the format of python/sglang/bench_serving.py
        "sglang bench_serving, one at a time",
        "============ Serving Benchmark Result ============\n"
        "Backend:                                 sglang    \n"
        "Traffic request rate:                    inf       \n"
        "Max request concurrency:                 1         \n"
        "Benchmark duration (s):                  100.00    \n"
        "Total generated tokens:                  3000      \n"
        "Total generated tokens (retokenized):    2990      \n"
        "Output token throughput (tok/s):         30.00     \n"
        "Concurrency:                             1.00      \n"
        "---------------Inter-Token Latency----------------\n"
        "Mean ITL (ms):                           25.00     \n"
        "==================================================\n",
        (Truth(30.0, BOTH, SERVED, None, 1),),
    ),
    Sample(  # what koboldcpp.py prints with --benchmark
        "koboldcpp's benchmark",
        "Benchmark Completed - v1.80 Results:\n======\nFlags: Threads=4\n"
        "Backend: koboldcpp_default.so\nLayers: 0\nModel: a-model\nMaxCtx: 2048\n"
        "GenAmount: 100\n-----\nProcessingTime: 19.480s\nProcessingSpeed: 100.00T/s\n"
        "GenerationTime: 10.000s\nGenerationSpeed: 10.00T/s\nTotalTime: 29.480s\n"
        "Output:  1 1 1 1\n-----\n",
        (prefill(100.0, 0, 1), decode(10.0, MAYBE_FIRST, 1948, 1)),
    ),
    Sample(  # the format of llama-batched-bench --output-format jsonl
        "llama-batched-bench, JSON lines",
        '{"n_kv_max": 4096, "n_batch": 2048, "n_ubatch": 512, "flash_attn": 1, '
        '"is_pp_shared": 0, "n_gpu_layers": -1, "n_threads": 2, "n_threads_batch": 2, '
        '"pp": 128, "tg": 32, "pl": 4, "n_kv": 640, "t_pp": 2.000000, '
        '"speed_pp": 256.000000, "t_tg": 4.000000, "speed_tg": 32.000000, '
        '"t": 6.000000, "speed": 106.666667}\n',
        (prefill(256.0, 0, 4), decode(32.0, STEPS, 128, 4)),
    ),
    Sample(
        "mlx_lm",
        "Prompt: 15777 tokens, 69.450 tokens-per-sec\n"
        "Generation: 480 tokens, 5.792 tokens-per-sec\n"
        "Peak memory: 464.764 GB\n",
        (decode(5.792, FIRST_FREE, 15777, 1), prefill(69.45, 0, 1)),
    ),
    Sample(
        "mlx_lm.benchmark",
        "Timing with prompt_tokens=512, generation_tokens=1000, batch_size=4.\n"
        "Trial 1:  prompt_tps=1518.240, generation_tps=101.587, peak_memory=21.408, "
        "total_time=10.267\n",
        (
            decode(101.587, MAYBE_FIRST, 512, 4),
            prefill(1518.24, 0, 4),
        ),
    ),
    Sample(
        "text-generation-webui",
        "18:52:50-790912 INFO     Output generated in 51.24 seconds (6.67 tokens/s, "
        "342 tokens, context 7323, seed "
        "1221920105)\n",
        (Truth(6.67, BOTH, WHOLE, 7323),),
    ),
    Sample(
        "llama-bench",
        "| model                          |       size |     params | backend    | ngl "
        "| n_ubatch | fa | mmap | dio |"
        "            test |                  t/s |\n"
        "| --- | ---: | ---: | --- | --: | --: | -: | -: | -: | --: | --: |\n"
        "| gpt-oss 20B MXFP4 MoE          |  11.27 GiB |    20.91 B | CUDA       |  99 "
        "|     2048 |  1 |    0 |   1 | "
        "pp2048 @ d32768 |      2689.42 \u00b1 18.89 |\nbuild: 11fb327bf (7941)\n",
        (prefill(2689.42, 32768, 1),),
    ),
    Sample(
        "llama-bench, several rows",
        BENCH_HEAD
        + "| llama 256M Q4_1 | 92.10 MiB | 134.52 M | CPU | 2 | pp512 | 400.00 \u00b1 1.00 |\n"
        + "| llama 256M Q4_1 | 92.10 MiB | 134.52 M | CPU | 2 | tg32 | 120.00 \u00b1 1.00 |\n"
        + "| llama 256M Q4_1 | 92.10 MiB | 134.52 M | CPU | 2 | tg32 @ d872 | 100.00 ± "
        "1.00 |\n",
        (
            prefill(400, 0, 1),
            decode(120, STEPS, 0, 1),
            decode(100, STEPS, 872, 1),
        ),
    ),
    Sample(
        "llama-bench, both phases",
        "| test | t/s |\n| pp4096+tg128 | 900.10 +/- 3.10 |\n",
        (Truth(900.1, BOTH, MIXED, 0, 1),),
    ),
    Sample(
        "llama-bench in one line",
        "| model | test | t/s | | --- | --- | --- | | llama 7B Q4_0 | pp512 | 2345.67 "
        "± 8.90 | | llama 7B Q4_0 | "
        "tg128 | 78.90 \u00b1 0.12 |",
        (prefill(2345.67, 0, 1), decode(78.9, STEPS, 0, 1)),
    ),
    Sample(
        "llama-bench json",
        '[{"model_type": "llama 1B Q4_0", "n_batch": 2048, "n_ubatch": 512, '
        '"n_threads": 8, "type_k": "f16", "type_v": '
        '"f16", "n_gpu_layers": -1, "flash_attn": 0, "n_prompt": 0, "n_gen": 128, '
        '"n_depth": 0, "avg_ts": 289.1, '
        '"stddev_ts": 2.5}]\n',
        (decode(289.1, STEPS, 0, 1),),
    ),
    Sample(
        "llama-bench csv",
        "build_commit,backends,model_type,n_threads,n_gpu_layers,n_prompt,n_gen,n_depth"
        ",avg_ts,stddev_ts\n"
        '"0c1e570","CPU","llama 1B Q4_0","8","-1","0","128","64","289.1","2.5"\n',
        (decode(289.1, STEPS, 64, 1),),
    ),
    Sample("two builds", COMPARED, (prefill(1216.05, 32768, 1), prefill(1301.22, 32768, 1))),
    Sample(
        "batched",
        "|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s "
        "|      T s |    S t/s |\n"
        "|  4096 |     32 |    1 |   4128 |    0.907 |  4513.91 |    0.407 |    78.54 "
        "|    1.315 |  3139.56 |\n"
        "|   128 |     32 |    4 |    640 |    0.512 |  1000.00 |    0.623 |   205.46 "
        "|    1.135 |   563.88 |\n",
        (
            decode(78.54, STEPS, 4096, 1),
            prefill(4513.91, 0, 1),
            decode(205.46, STEPS, 128, 4),
            prefill(1000, 0, 4),
        ),
    ),
    Sample(
        "sweep",
        "|    PP |     TG |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |\n"
        "|   512 |    128 |  32256 |    0.715 |   715.85 |    4.090 |    31.30 |\n",
        (decode(31.3, STEPS, 32256, 1), prefill(715.85, 32256, 1)),
    ),
    Sample(
        "localscore",
        '{"avg_prompt_tps": 1200.5, "avg_gen_tps": 44.1}\n',
        (
            Truth(44.1, DECODE, SEVERAL_LENGTHS, None, 1),
            Truth(1200.5, PREFILL, SEVERAL_LENGTHS, None, 1),
        ),
    ),
    Sample("bare", "35 tokens/s\n", (Truth(35, UNKNOWN, UNKNOWN),)),
    Sample("bare, not of LM Studio", "35 tok/sec", (Truth(35, UNKNOWN, UNKNOWN),)),
    Sample("bare with a comma", "~ 28,9 tok/s", (Truth(28.9, UNKNOWN, UNKNOWN),)),
)
