"""Hostile model files get an error or a normal result: never a hang, a traceback, or all the memory."""

from pathlib import Path

from lab.process.worker import Worker
from lab.runner import prompts
from tests.bench import hostile_files
from tests.conftest import run_lab
from tests.hostile import gguf as hostile


def hard_cases(parts: hostile.Parts) -> list[tuple[str, hostile.Parts]]:
    """Whole and consistent files that would each take hours, or all the memory, of whoever believes them."""

    def with_pairs(*pairs: hostile.Pair) -> hostile.Parts:
        return hostile.Parts((*parts.pairs, *pairs), parts.tensors)

    many_tensors = tuple(hostile.Tensor(b"t%07d" % i, (8,), 0, bytes(32)) for i in range(100_000))
    strings = (3 << 22).to_bytes(8, "little") + bytes(3 << 25)
    vocabulary = tuple(pair for pair in parts.pairs if not pair.key.endswith(b"vocab_size"))
    size = hostile.Pair(parts.arch + b".vocab_size", 4, (1 << 28).to_bytes(4, "little"))
    return [
        ("many tensors", hostile.Parts(parts.pairs, (*parts.tensors, *many_tensors))),
        ("many strings", with_pairs(hostile.Pair(b"general.tags", hostile.ARRAY, b"\x08\0\0\0" + strings))),
        ("large vocabulary", hostile.Parts((*vocabulary, size), parts.tensors)),
    ]


def test_the_file_is_taken_apart_and_put_together(tmp_path: Path) -> None:
    for _, original, _ in hostile_files.originals(tmp_path):
        assert hostile.put_together(hostile.take_apart(original)) == original
        assert list(hostile.cases(original, 1, 5)) == list(hostile.cases(original, 1, 5))


def test_a_sample_of_every_kind(tmp_path: Path) -> None:
    found = hostile_files.outcomes(40, 1, tmp_path)
    assert {hostile_files.kind(outcome) for outcome in found} == set(hostile.kinds())
    bad = [hostile_files.line(outcome) for outcome in found if outcome.result not in hostile_files.GOOD]
    assert not bad, "\n".join(bad)


def test_headers_that_ask_for_hours_or_all_the_memory(tmp_path: Path) -> None:
    original = hostile_files.tiny(tmp_path)
    path = tmp_path / "hostile.gguf"
    with Worker() as worker:
        for what, parts in hard_cases(hostile.take_apart(original)):
            path.write_bytes(hostile.put_together(parts))
            outcome = hostile_files.attempt(worker, what, path, prompts.RANDOM)
            assert outcome.stage == "read_model", hostile_files.line(outcome)
            assert outcome.result == hostile_files.REFUSED and outcome.seconds < 15, hostile_files.line(outcome)


def test_what_a_file_says_does_not_command_the_terminal(tmp_path: Path) -> None:
    parts = hostile.take_apart(hostile_files.tiny(tmp_path))
    arch = b"\x1b[2J\x1b[31mred\n\ntwo\nlines" + b"x" * 5000
    value = len(arch).to_bytes(8, "little") + arch
    pairs = tuple(
        hostile.Pair(pair.key, pair.kind, value) if pair.key == b"general.architecture" else pair
        for pair in parts.pairs
    )
    path = tmp_path / "hostile.gguf"
    path.write_bytes(hostile.put_together(hostile.Parts(pairs, parts.tensors)))
    for command in (("models", "info", path), ("measure", "-m", path, "-r", "1", "--prompt", "random", "-o", tmp_path)):
        _, out, err = run_lab(*command)
        for text in (out, err):
            assert "\x1b" not in text and "two\nlines" not in text and "x" * 1000 not in text
