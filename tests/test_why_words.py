"""Names in words, tables that people write, and the odd lines of programs."""
# ruff: noqa: E501 (samples are as programs print them)

from pathlib import Path

import pytest

from lab.errors import LabError
from lab.features.why import facts, pairing
from lab.features.why.answer import answer
from lab.features.why.figure import DECODE, PREFILL, UNKNOWN, Figure
from lab.features.why.readers import text as reader
from lab.features.why.section import sentences

LOG = "eval time =    9950.00 ms /   200 tokens (   49.75 ms per token,    20.10 tokens per second)\n"


def decode_of(text: str) -> Figure:
    """The last decode figure of a text."""
    return [figure for figure in reader.parse(text) if figure.phase in (DECODE, UNKNOWN)][-1]


NAMED = [
    ("### RTX 3060 12GB\n", None, None, "RTX 3060 12GB"),
    ("Tiny-Qwen3-4B Q5_K_M on a 4090:\n", "Tiny-Qwen3-4B", "Q5_K_M", "RTX 4090"),
    ("I run `acme/granite-9.1-3b` here. Nothing else.\n", "granite-9.1-3b", None, None),
    ("My machine has 2x RTX 3090 and much memory.\n", None, None, "2x RTX 3090"),
    ("GPT-OSS 20B on the M4 Max\n", "GPT-OSS 20B", None, "M4 Max"),
    ("Gemma 9 26B (Q8_0), Radeon RX 7900 XTX\n", "Gemma 9 26B", "Q8_0", "Radeon RX 7900 XTX"),
    ("**Llama-99-8B-IQ4_XS** with a Tesla P40\n", "Llama-99-8B-IQ4_XS", "IQ4_XS", "Tesla P40"),
]


@pytest.mark.parametrize(("prose", "model", "quantization", "device"), NAMED)
def test_names_in_words_are_read(
    prose: str, model: str | None, quantization: str | None, device: str | None
) -> None:
    for text in (prose + "\n" + LOG, LOG + "\n" + prose):
        figure = decode_of(text)
        assert (figure.model, figure.quantization, figure.device) == (
            model,
            quantization,
            device,
        )


ORDINARY = Path(__file__).parent / "data" / "ordinary_sentences.txt"


def test_ordinary_sentences_name_no_model_and_no_device() -> None:
    sentences_of_people = ORDINARY.read_text(encoding="utf-8").splitlines()
    assert len(sentences_of_people) >= 100
    for sentence in sentences_of_people:
        for text in (f"{sentence}\n\n{LOG}", f"{LOG}\n{sentence}\n"):
            figure = decode_of(text)
            assert (figure.model, figure.device) == (None, None), sentence


def test_each_figure_has_the_heading_above_it() -> None:
    text = f"## RTX 3060\n{LOG}\nSome words.\n\n## RTX 4090\n{LOG}"
    assert [figure.device for figure in reader.parse(text)] == ["RTX 3060", "RTX 4090"]


def test_a_command_says_more_than_words() -> None:
    text = f"Llama-99-8B is slow!\n./llama-server -m /m/tiny-2B-Q4_0.gguf\n{LOG}"
    assert decode_of(text).model == "tiny-2B-Q4_0"


def test_a_figure_in_a_sentence_names_its_setup() -> None:
    figure = decode_of("Tiny-Qwen3-4B Q5_K_M on a 4090: 77 t/s")
    assert (figure.tps, figure.model, figure.device) == (77.0, "Tiny-Qwen3-4B", "RTX 4090")


@pytest.mark.parametrize(
    "sentence",
    [
        "I expected it to run at 80 t/s",
        "30-35 tokens/s",
        "20 t/s here: 30 t/s",
        "it should do: 50 t/s",
        "between 20 and 30 t/s",
        "Accepted throughput: 50 tokens/s",
    ],
)
def test_other_rates_in_a_sentence_are_no_figure(sentence: str) -> None:
    with pytest.raises(LabError):
        reader.read(sentence)


STATED = {
    "my 3090 gets 25 tok/s with qwen3 32b q4_k_m": (25.0, "qwen3 32b", "RTX 3090"),
    "25 tok/s qwen3 32b q4_k_m on a 3090": (25.0, "qwen3 32b", "RTX 3090"),
    "about 41.2 t/s (gemma 3 12b, M4 Pro)": (41.2, "gemma 3 12b", "M4 Pro"),
    "RTX 4090 here, 92 tokens per second": (92.0, None, "RTX 4090"),
    "35 tok/sec 500 tokens": (35.0, None, None),
    "I see 7.5 tps with everything on the CPU": (7.5, None, None),
}


@pytest.mark.parametrize("words", STATED)
def test_words_on_the_command_line_are_a_side_with_their_only_rate(words: str) -> None:
    (figure,) = reader.read(words)
    assert (figure.tps, figure.model, figure.device) == STATED[words]


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("others get 35", "'35 t/s' B"),
        ("12", "'12 t/s' B"),
        ("9.5 with a 3090", "-"),
        ("35 t/s before, 30 t/s after", "one measured rate"),
        ("it should be 57 t/s", "'57 t/s' B"),
        ("run-12.txt", "Known formats"),
    ],
)
def test_other_words_are_told_what_to_write(words: str, hint: str) -> None:
    with pytest.raises(LabError, match="neither a figure") as problem:
        reader.read(words)
    assert hint in problem.value.hint


def rates(text: str) -> list[tuple[float, str, int | None]]:
    return [(figure.tps, figure.phase, figure.n_gen) for figure in reader.parse(text)]


def test_a_table_that_a_person_wrote_is_read_by_its_heads() -> None:
    text = (
        "| Build | PP512 (t/s) | TG128 (t/s) |\n|---|---|---|\n| b7001 | 1,200 | 61.5 |\n"
        "| b7002 | 900 \u00b1 3 | 60.5 |\n| diff | -25% | -1.6% |\n"
    )
    figures = reader.parse(text)
    assert [figure.tps for figure in figures] == [1200.0, 61.5, 900.0, 60.5]
    assert facts.value_of(figures[2].facts, facts.BUILD) == "b7002"
    assert (figures[0].n_prompt, figures[1].n_gen, figures[1].depth) == (512, 128, 0)


def test_other_tables_that_people_write() -> None:
    assert rates(
        "| Backend | pp512 | tg128 |\n| --- | --- | --- |\n| ROCm | 1900.72 \u00b1 3 t/s | 58.38 t/s |\n"
    ) == [(1900.72, PREFILL, None), (58.38, DECODE, 128)]
    assert rates(
        "| Test | Before (t/s) | After (t/s) | Diff |\n|---|--:|--:|--:|\n| tg64 | 51.5 | 53.5 | +4% |\n"
    ) == [(51.5, DECODE, 64), (53.5, DECODE, 64)]
    assert rates(
        "| Engine | 30K prompt processing | 30K token generation |\n|---|---|---|\n| MLX | 82.5s | 25 t/s |\n"
    ) == [(25.0, DECODE, None)]
    assert rates(
        "Context | prompt tok/s | gen tok/s | memory GB\n--- | --- | --- | ---\n4096 | 199.5 | 13.5 | 40\n"
    ) == [(199.5, PREFILL, None), (13.5, DECODE, None)]


@pytest.mark.parametrize(
    "text",
    [
        "| Model | Size | Date |\n|---|---|---|\n| a | 20 | 2026 |\n",
        "| GPU | tg speedup | pp time |\n|---|---|---|\n| a | 2.0 | 30 |\n",
        "| Engine | TTFT (ms) | generation time (s) |\n|---|---|---|\n| a | 20 | 30 |\n",
        "| Prompt | Generation |\n|---|---|\n| 20 | 30 |\n",
    ],
)
def test_other_columns_are_no_rates(text: str) -> None:
    with pytest.raises(LabError):
        reader.parse(text)


def test_a_short_option_of_another_program_is_no_model() -> None:
    text = (
        "mlx_lm.generate --model someone/Tiny-3B-4bit --prompt - -m 256 < a.txt\n"
        "Prompt: 100 tokens, 500.000 tokens-per-sec\nGeneration: 256 tokens, 50.000 tokens-per-sec\n"
    )
    assert decode_of(text).model == "Tiny-3B-4bit"


def test_switches_of_ollama_stand_before_the_model() -> None:
    text = "$ ollama run --verbose tiny:3b hi\neval count:  40 token(s)\neval duration:  2s\neval rate:  20.00 tokens/s\n"
    assert decode_of(text).model == "tiny:3b"


def test_the_benchmark_of_koboldcpp_states_its_setup() -> None:
    text = (
        "Benchmark Completed - v9.78 Results:\nFlags: NoAVX2=False Threads=7 FlashAttention=True KvCache=1\n"
        "Backend: koboldcpp_cublas.dll\nLayers: 33\nModel: tiny-3B.i1-IQ4_XS\nMaxCtx: 2048\nGenAmount: 100\n-----\n"
        "ProcessingTime: 2.000s\nProcessingSpeed: 974.00T/s\nGenerationTime: 5.000s\nGenerationSpeed: 20.00T/s\n"
        "TotalTime: 7.000s\nOutput:  1 1 1 1\n-----\n"
    )
    figure = decode_of(text)
    expected = {"threads": 7, "flash_attn": "on", "n_gpu_layers": 33, "cache_type_k": "q8_0"}
    assert {name: facts.value_of(figure.facts, name) for name in expected} == expected
    assert (figure.model, facts.value_of(figure.facts, facts.BUILD)) == (
        "tiny-3B.i1-IQ4_XS",
        "9.78",
    )


def test_the_oldest_line_of_koboldcpp_counts_its_tokens() -> None:
    text = (
        "koboldcpp.exe --threads 4 tiny-3B.q4_K_M.bin\nProcessing Prompt [BLAS] (90 / 90 tokens)\n"
        "Generating (120 / 200 tokens)\nTime Taken - Processing:9.0s (100ms/T), Generation:30.0s (250ms/T), Total:39.0s (3.1T/s)\n"
    )
    figure = decode_of(text)
    assert figure.tps == pytest.approx(4.0)
    assert figure.model == "tiny-3B.q4_K_M"


def test_averages_of_mlx_count_where_no_trial_stands() -> None:
    average = "Averages: prompt_tps=400.000, generation_tps=80.000, peak_memory=1.000\n"
    trial = "Trial 1:  prompt_tps=401.000, generation_tps=81.000, peak_memory=1.000, total_time=1.000\n"
    assert [each.tps for each in reader.parse(f"Pre: {average}")] == [400.0, 80.0]
    assert [each.tps for each in reader.parse(trial + average)] == [401.0, 81.0]


def test_a_window_in_which_a_request_ended_is_left_out() -> None:
    line = "[{}] Decode batch. #running-req: {}, #token: {}, token usage: 0.01, gen throughput (token/s): {}, #queue-req: 0\n"
    windows = [(2, 800, 300), (2, 880, 302), (1, 450, 250), (1, 490, 180), (1, 530, 182)]
    text = "".join(line.format(n, *window) for n, window in enumerate(windows))
    assert [figure.tps for figure in reader.parse(text)] == [301.0, 181.0]


def answer_text(a: str, b: str, details: bool = False) -> str:
    """The sentences on two texts."""
    sides = pairing.nearest(reader.read(a), reader.read(b), False)
    return " ".join(sentences(answer(*sides), details=details))


WINDOW = "INFO 05-05 05:05:05 [loggers.py:9] Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 55.0 tokens/s, Running: 1 reqs, Waiting: 0 reqs\n"
DRAFTS = "INFO 05-05 05:05:05 [metrics.py:9] SpecDecoding metrics: Mean acceptance length: 1.80, Accepted throughput: 20.00 tokens/s, Drafted throughput: 40.00 tokens/s, Accepted: 200 tokens, Drafted: 400 tokens\n"


def test_what_one_side_says_is_not_called_unknown_of_both() -> None:
    text = answer_text("30 tokens/s", WINDOW + DRAFTS)
    assert "B drafts (1.8 tokens a step); A does not say." in text
    assert "Ask about A and B: Which model file" in text
    assert "concurrency" in text.partition("(of A)")[0].rpartition("(of A and B)")[2]


def test_a_side_is_asked_only_for_what_it_lacks() -> None:
    fast = LOG.replace("9950", "4975").replace("20.10", "40.20").replace("49.75", "24.88")
    text = answer_text(f"### RTX 3060 12GB\n{LOG}", fast, details=True)
    asked = text[text.index("Ask about") :]
    assert "Ask about B: Which device?" in asked
    assert asked.count("Which device?") == 1


def test_who_gives_a_command_is_not_asked_for_it() -> None:
    slow = f"./llama-cli -m /m/tiny-2B-Q4_0.gguf -ngl 12\n{LOG}"
    fast = LOG.replace("9950", "4975").replace("20.10", "40.20").replace("49.75", "24.88")
    text = answer_text(
        slow, f"./llama-cli -m /m/tiny-2B-Q4_0.gguf -ngl 20\n{fast}", details=True
    )
    assert "Which command line" not in text
    assert "Ask about A and B: Which program" in text


def test_the_only_lever_that_differs_is_the_likely_cause() -> None:
    slow = f"./llama-cli -m /m/tiny-2B-Q4_0.gguf -c 8000 -t 6\n{LOG}"
    fast = "./llama-cli -m /m/tiny-2B-Q4_0.gguf -c 8000 -t 6 -fa\neval time =    2487.50 ms /   200 tokens (   12.44 ms per token,    80.40 tokens per second)\n"
    text = answer_text(slow, fast)
    assert (
        "The likely cause is flash_attn on in B, not named in A's command: not measured."
        in text
    )


def test_an_option_of_one_program_is_no_difference_from_another() -> None:
    mlx = (
        "mlx_lm.generate --model acme/Tiny-3B-4bit --prompt hi\n"
        "Prompt: 100 tokens, 500.000 tokens-per-sec\nGeneration: 256 tokens, 50.000 tokens-per-sec\n"
    )
    text = answer_text(mlx, f"./llama-cli -m /m/Tiny-3B-Q4_0.gguf -c 8000\n{LOG}")
    assert "not named in" not in text
    assert "ubatch" not in text
