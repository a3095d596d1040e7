"""GuideLLM, AIPerf, vllm bench serve and llama-benchy, each run once against a server of this machine.

Each is looked for in an environment of its own, and is passed over where it is not there:

    python3 -m uv venv ~/.cache/mini-lab/tools/NAME
    python3 -m uv pip install --python ~/.cache/mini-lab/tools/NAME/bin/python PACKAGE

with guidellm, aiperf and llama-benchy. vLLM as a whole needs 10 GB; its client needs no more than `--no-deps vllm`,
torch, pandas and what its imports ask for one after the other. They reach 127.0.0.1 only: their tokenizer is a folder
and no name, the book of llama-benchy comes from a server of this process, and their home folder is a temporary one.
"""

from __future__ import annotations

import functools
import http.server
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ.get("MINI_LAB_TOOLS", Path.home() / ".cache" / "mini-lab" / "tools"))
TIMEOUT_S = 300

VLLM_MAIN = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""The same as `vllm bench serve`, without importing what only a server needs."""


class ToolMissing(Exception):
    """A tool is not installed, or failed: why."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a tool is to do: one streamed chat for each prompt, `n_gen` tokens each, so many at a time."""

    url: str  # ends with /v1
    model: str
    prompts: tuple[str, ...]
    n_prompt: int  # tokens of a prompt, for llama-benchy, which makes its own
    n_gen: int
    n_at_once: int
    tokenizer: Path
    extra: Mapping[str, Any] = field(default_factory=dict)  # fields of the body

    @property
    def root(self) -> str:
        return self.url.removesuffix("/v1")

    @property
    def body(self) -> dict[str, Any]:
        return {"ignore_eos": True, **self.extra}


Run = Callable[[Work, Path], dict[str, Any]]


def guidellm(work: Work, folder: Path) -> dict[str, Any]:
    """The benchmark in GuideLLM's report."""
    rows = [{"prompt": prompt, "output_tokens_count": work.n_gen} for prompt in work.prompts]
    (folder / "guidellm.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    backend = {"kind": "openai_http", "target": work.root, "model": work.model, "extras": {"body": work.body}}
    arguments = [
        *("run", "--backend", json.dumps(backend)),
        *("--profile", json.dumps({"kind": "concurrent", "streams": [work.n_at_once]})),
        *("--constraint", json.dumps({"kind": "max_requests", "count": len(work.prompts)})),
        *("--tokenizer", json.dumps({"kind": "hf_auto", "model": str(work.tokenizer)})),
        *("--data", json.dumps({"kind": "json_file", "path": str(folder / "guidellm.jsonl")})),
        *("--output", json.dumps({"kind": "json", "path": str(folder / "guidellm.json")})),
        "--disable-console",
    ]
    _call("guidellm", ["guidellm", *arguments], folder, {"HF_HUB_OFFLINE": "1"})
    (benchmark,) = json.loads((folder / "guidellm.json").read_text())["benchmarks"]
    answer: dict[str, Any] = benchmark
    return answer


def aiperf(work: Work, folder: Path, *options: str) -> dict[str, Any]:
    """AIPerf's profile_export_aiperf.json."""
    (folder / "aiperf.jsonl").write_text("".join(json.dumps({"text": prompt}) + "\n" for prompt in work.prompts))
    arguments = [
        *("profile", "-m", work.model, "-u", work.root, "--endpoint-type", "chat", "--streaming"),
        *("--tokenizer", str(work.tokenizer), "--concurrency", str(work.n_at_once)),
        *("--input-file", str(folder / "aiperf.jsonl"), "--custom-dataset-type", "single_turn"),
        *("--dataset-sampling-strategy", "sequential", "--request-count", str(len(work.prompts))),
        *("--extra-inputs", json.dumps({"max_completion_tokens": work.n_gen, **work.body})),
        *("--output-artifact-dir", str(folder / "aiperf"), "--ui", "none", "--no-gpu-telemetry", "--no-server-metrics"),
    ]
    # A folder as tokenizer is refused where HF_HUB_OFFLINE is set; without it nothing is fetched for one.
    _call("aiperf", ["aiperf", *arguments, *options], folder, {"HF_ENDPOINT": "http://127.0.0.1:9"})
    answer: dict[str, Any] = json.loads((folder / "aiperf" / "profile_export_aiperf.json").read_text())
    return answer


def aiperf_per_chunk(work: Work, folder: Path) -> dict[str, Any]:
    """AIPerf with the server's counts of tokens in each chunk."""
    return aiperf(work, folder, "--use-server-token-count", "--per-chunk-usage")


def vllm(work: Work, folder: Path) -> dict[str, Any]:
    """The result file of `vllm bench serve`."""
    (folder / "vllm.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in work.prompts))
    arguments = [
        *("--backend", "openai-chat", "--base-url", work.root, "--endpoint", "/v1/chat/completions"),
        *("--model", work.model, "--tokenizer", str(work.tokenizer), "--dataset-name", "custom"),
        *("--dataset-path", str(folder / "vllm.jsonl"), "--custom-output-len", str(work.n_gen), "--skip-chat-template"),
        *("--disable-shuffle", "--num-prompts", str(len(work.prompts)), "--max-concurrency", str(work.n_at_once)),
        *(
            "--ignore-eos",
            "--extra-body",
            json.dumps(dict(work.extra)),
            "--disable-tqdm",
            "--ready-check-timeout-sec=0",
        ),
        *("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "99,100"),
        *("--save-result", "--result-filename", str(folder / "vllm.json")),
    ]
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    _call("vllm", ["python", "-c", VLLM_MAIN, *arguments], folder, environment)
    answer: dict[str, Any] = json.loads((folder / "vllm.json").read_text())
    return answer


def llama_benchy(work: Work, folder: Path) -> dict[str, Any]:
    """The benchmark in llama-benchy's report. A "run" of it is a burst of `n_at_once` requests."""
    (folder / "book.txt").write_text(" ".join(work.prompts * 40))
    n_runs = max(1, len(work.prompts) // work.n_at_once)
    with _files(folder) as address:
        arguments = [
            *("--base-url", work.url, "--model", work.model, "--tokenizer", str(work.tokenizer)),
            *("--pp", str(work.n_prompt), "--tg", str(work.n_gen), "--exact-tg", "--runs", str(n_runs)),
            *("--concurrency", str(work.n_at_once), "--skip-coherence", "--latency-mode", "none"),
            *("--book-url", f"{address}/book.txt", "--format", "json", "--save-result", str(folder / "benchy.json")),
            *(["--no-cache"] if "cache_prompt" in work.extra else []),
        ]
        _call("llama-benchy", ["llama-benchy", *arguments], folder, {"HF_HUB_OFFLINE": "1"})
    (benchmark,) = json.loads((folder / "benchy.json").read_text())["benchmarks"]
    answer: dict[str, Any] = benchmark
    return answer


TOOLS: dict[str, Run] = {"GuideLLM": guidellm, "AIPerf": aiperf, "vllm bench": vllm, "llama-benchy": llama_benchy}


def word_tokenizer(folder: Path, words: Sequence[str]) -> Path:
    """A tokenizer for which each word is a token, as for the null server, as a folder."""
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys(["<unk>", "word", "Warmup", ".", *words]))}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"}
    parts = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    whole = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": model}
    return _tokenizer(folder, {**parts, **whole})


def _tokenizer(folder: Path, parsed: Mapping[str, Any]) -> Path:
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(parsed))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "model_max_length": 100_000}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def gguf_tokenizer(model: Path) -> Path:
    """The tokenizer of a GGUF file as a folder, made once by the transformers library in vLLM's environment."""
    code = (
        "import sys; from transformers import AutoTokenizer as A; "
        "A.from_pretrained(sys.argv[1], gguf_file=sys.argv[2]).save_pretrained(sys.argv[3])"
    )
    made = FOLDER / f"tokenizer-{model.stem}"
    if not made.exists():
        names = [str(model.parent), model.name, str(made)]
        _call("vllm", ["python", "-c", code, *names], FOLDER, {"HF_HUB_OFFLINE": "1"})
    return made


def _call(tool: str, command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
    """Run a program of a tool's environment to its end. ToolMissing with its last lines where it fails."""
    program = FOLDER / tool / "bin" / command[0]
    if not program.exists():
        raise ToolMissing(f"{tool} is not installed")
    own = {
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "LANG": "C.UTF-8",
    }
    run = subprocess.Popen(
        [str(program), *command[1:]],
        cwd=folder,
        env={**own, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        out, _ = run.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise ToolMissing(f"{tool} did not end within {TIMEOUT_S} s") from None
    finally:
        with suppress(ProcessLookupError):  # also what it has left behind
            os.killpg(run.pid, signal.SIGKILL)
    if run.returncode:
        last = " | ".join(line.strip() for line in out.splitlines()[-6:] if line.strip())
        raise ToolMissing(f"{tool} ended with status {run.returncode}: {last[-600:]}")


@contextmanager
def _files(folder: Path) -> Iterator[str]:
    """The address of a server of this process for the files of a folder."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
