"""Hostile model files: each ends in an error or a run, none in a hang or all the memory."""

import struct
from collections.abc import Iterator
from pathlib import Path

import psutil
from hypothesis import HealthCheck, given, settings, strategies as st

from lab.core import cost, memory, script as scripts
from lab.errors import LabError
from lab.process.worker import Worker, WorkerDied
from lab.runner import prompts
from lab.runner.plan import make_plan
from tests.support.command import run_lab


def u32(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}I", *numbers)


def u64(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def text(value: bytes) -> bytes:
    return u64(len(value)) + value


HEAD = b"GGUF"
ARCH = b"general.architecture"
WEIGHT = b"token_embd.weight"
EVIL = b"\x1b[2J\x1b[31mred\n\ntwo\nlines" + b"x" * 5_000
EDITS: dict[str, tuple[bytes, int, bytes]] = {
    # After these bytes of the good file, and so many more, these are written over it.
    "another magic": (b"", 0, b"GGML"),
    "version 2^31": (HEAD, 0, u32(2**31)),
    "no tensors": (HEAD, 4, u64(0)),
    "2^64 - 1 tensors": (HEAD, 4, u64(2**64 - 1)),
    "2^40 pairs": (HEAD, 12, u64(2**40)),
    "a key of 2^62 bytes": (HEAD, 20, u64(2**62)),
    "a value of 2^63 bytes": (ARCH, 4, u64(2**63)),
    "a value of no type": (ARCH, 0, u32(2**31)),
    "a number instead of a text": (ARCH, 0, u32(4)),
    "2^30 strings in an array": (ARCH, 0, u32(9, 8) + u64(2**30)),
    "2^30 bytes in an array": (ARCH, 0, u32(9, 0) + u64(2**30)),
    "an array of arrays": (ARCH, 0, u32(9, 9) + u64(2**20)),
    "another architecture": (ARCH, 12, b"gpt2\0"),
    "2^32 - 1 dimensions": (WEIGHT, 0, u32(2**32 - 1)),
    "dimensions that overflow": (WEIGHT, 4, u64(2**63, 2**63)),
    "dimensions of 0": (WEIGHT, 4, u64(0, 0)),
    "a tensor type that nobody knows": (WEIGHT, 20, u32(2**31 - 1)),
    "a tensor type that does not fit": (WEIGHT, 20, u32(18)),
    "an offset behind the end": (WEIGHT, 24, u64(2**64 - 32)),
    "an offset that is not aligned": (WEIGHT, 24, u64(1)),
    "a missing tensor": (b"output_norm.weigh", 0, b"x"),
}
NUMBERS = (0, 2**28, 2**32 - 1)
KEYS_OF_NUMBERS = (
    b".block_count",
    b".embedding_length",
    b".head_count",
    b".head_count_kv",
    b".vocab_size",
    b".context_length",
    b".feed_forward_length",
    b".key_length",
    b".rope.dimension_count",
    b".freq_base",
    b"layer_norm_rms_epsilon",
    b"general.file_type",
)


def edited(
    good: bytes,
    after: bytes,
    skip: int,
    new: bytes,
) -> bytes:
    """The file with `new` written over the bytes that come `skip` bytes after `after`."""
    start = good.index(after) + len(after) + skip
    return good[:start] + new + good[start + len(new) :]


def files(good: bytes) -> Iterator[tuple[str, bytes]]:
    """Every hostile file with its name."""
    for name, (after, skip, new) in EDITS.items():
        yield name, edited(good, after, skip, new)
    for key in KEYS_OF_NUMBERS:
        for number in NUMBERS:
            yield f"{key.decode()} of {number:,}", edited(good, key, 4, u32(number))
    for n in (0, 3, 24, 100, 600, len(good) // 2, len(good) - 1):
        yield f"cut after {n:,} bytes", good[:n]
    yield "100,000 tensors", with_many_tensors()
    twelve_million_empty_strings = u32(9, 8) + u64(3 << 22) + bytes(3 << 25)
    yield (
        "12 million strings",
        HEAD + u32(3) + u64(0, 1) + text(b"tags") + twelve_million_empty_strings,
    )
    tokens = text(b"tokenizer.ggml.tokens") + u32(9, 8) + u64(2) + text(b"a") + text(b"b")
    architecture = text(ARCH) + u32(8) + text(b"llama")
    yield "a vocabulary only", HEAD + u32(3) + u64(0, 2) + architecture + tokens
    yield "a long architecture", good.replace(text(b"llama"), text(EVIL), 1)


def with_many_tensors() -> bytes:
    table = bytearray()
    for i in range(100_000):
        table += text(b"t%07d" % i) + u32(1) + u64(8) + u32(0) + u64(32 * i)
    return HEAD + u32(3) + u64(100_000, 0) + bytes(table) + bytes(32 * 100_001)


def use(worker: Worker, path: Path) -> str:
    """What `lab models info` and `lab measure` do with a file; the error, or "" for a run."""
    try:
        model = worker.read_model(path, path.stem, "file")
        memory.kv_bytes_per_position(model)
        cost.weight_bytes_per_step(model)
        plan = make_plan(worker, "8", 2, 1, str(path), prompt=prompts.RANDOM, threads=1)
        if not plan.refused:
            vocabulary = worker.load(path, plan.settings)
            worker.new_context(plan.settings)
            ids = prompts.random_ids(8, vocabulary.n_vocab, vocabulary.bos, 1, 0)
            worker.run(scripts.run(ids, 2, 512), lambda progress: None)
    except LabError as problem:
        if isinstance(problem, WorkerDied):
            worker.restart()
        return problem.what
    worker.restart()  # it holds a model
    return ""


def private_bytes(worker: Worker) -> int:
    used = psutil.Process(worker._process.pid).memory_info()
    return int(used.rss - getattr(used, "shared", 0))


def test_each_is_refused_or_runs_in_time(
    mini: Path,
    tmp_path: Path,
    worker: Worker,
) -> None:
    path = tmp_path / "hostile.gguf"
    refusals = {}
    n_files = 0
    for name, raw in files(mini.read_bytes()):
        n_files += 1
        path.write_bytes(raw)
        refusal = use(worker, path)
        assert "exit status" not in refusal, name
        assert "Python frame" not in refusal, name
        assert private_bytes(worker) < 500_000_000, name
        if refusal:
            refusals[name] = refusal
    assert "holds only a vocabulary" in refusals["a vocabulary only"]
    assert "is truncated" in refusals[f"cut after {len(mini.read_bytes()) - 1:,} bytes"]
    assert len(refusals) > n_files / 2


def test_a_model_for_ten_million_tokens_is_read(
    mini: Path,
    tmp_path: Path,
    worker: Worker,
) -> None:
    path = tmp_path / "long.gguf"
    path.write_bytes(edited(mini.read_bytes(), b".context_length", 4, u32(10_485_760)))
    assert worker.read_model(path, "long", "file").n_ctx_train == 10_485_760


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    edits=st.lists(
        st.tuples(
            st.integers(0, 1_500),
            st.binary(min_size=1, max_size=8),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_bytes_anywhere_in_the_header(
    edits: list[tuple[int, bytes]], mini: Path, worker: Worker
) -> None:
    raw = bytearray(mini.read_bytes())
    for start, new in edits:
        raw[start : start + len(new)] = new
    path = mini.with_name("hostile.gguf")
    path.write_bytes(raw)
    try:
        worker.read_model(path, "hostile", "file")
    except LabError as problem:
        assert not isinstance(problem, WorkerDied)


def test_what_a_file_says_does_not_command_the_terminal(mini: Path, tmp_path: Path) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(mini.read_bytes().replace(text(b"llama"), text(EVIL), 1))
    measure = ("measure", "-m", path, "-r", "1", "--prompt", "random", "-o", tmp_path)
    for command in (("models", "info", path), measure):
        status, out, err = run_lab(*command)
        assert status == 1
        for part in ("\x1b", "two\nlines", "x" * 1000):
            assert part not in out + err
