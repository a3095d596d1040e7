"""Hostile model files: a good GGUF file, changed where it hurts.

The file is taken apart (pairs, tensors, data), one thing is changed, and it is put together again. Some
changes break the format (a count that is too large); the deeper ones keep it consistent, so that they get
past the parser and reach whoever believes the numbers. The same seed gives the same files.
"""

from __future__ import annotations

import dataclasses
import math
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import gguf

STRING, ARRAY = 8, 9
WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of a number, by GGUF type
INTEGERS = (0, 1, 2, 3, 4, 5, 10, 11)
HUGE = (
    2**16,
    2**20,
    2**26,
    2**28,
    2**30,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**40,
    2**61,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
)
ABSURD = (0, 1, 2, 3, 7, 511, 513, 10**6, 2**24, 2**27, 2**28, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1)
FLOATS = (0.0, -1.0, 1e-45, 3e38, math.inf, -math.inf, math.nan)


@dataclass(frozen=True)
class Pair:
    """A key and its value; `raw` is the value as the file has it, after its type."""

    key: bytes
    kind: int
    raw: bytes


@dataclass(frozen=True)
class Tensor:
    name: bytes
    dims: tuple[int, ...]
    kind: int
    data: bytes


@dataclass(frozen=True)
class Parts:
    """A GGUF file taken apart."""

    pairs: tuple[Pair, ...]
    tensors: tuple[Tensor, ...]

    @property
    def arch(self) -> bytes:
        return next((pair.raw[8:] for pair in self.pairs if pair.key == b"general.architecture"), b"llama")


@dataclass(frozen=True)
class Field:
    """Where in a file a number of the header stands: `what` is magic, version, n_tensors, length, kind, offset, ..."""

    what: str
    start: int
    width: int


@dataclass(frozen=True)
class Layout:
    """The fields of a file's header in order, where the pairs, the tensor table and the data begin."""

    fields: tuple[Field, ...]
    table: int
    data: int


Mutation = Callable[[bytes, random.Random], tuple[str, bytes]]


def cases(original: bytes, seed: int, n: int, first: int = 0) -> Iterator[tuple[str, bytes]]:
    """n files made of `original`, each with a name (`kind: what was done`); the kinds take turns from `first` on."""
    mutations, names = kinds_of(scan(original), take_apart(original)), kinds()
    for number in range(first, first + n):
        kind = names[number % len(names)]
        what, mutated = mutations[kind](original, random.Random(f"{seed} {number} {kind}"))
        yield f"{kind}: {what}", mutated


def kinds_of(layout: Layout, parts: Parts) -> dict[str, Mutation]:
    """Every kind of mutation of a file with this layout and these parts."""

    def in_place(*what: str) -> list[Field]:
        found = [field for field in layout.fields if field.what in what]
        return found or [field for field in layout.fields if field.what == "length"]  # it may have no array

    def rebuilt(change: Callable[[Parts, random.Random], tuple[str, Parts]]) -> Mutation:
        def mutate(_: bytes, dice: random.Random) -> tuple[str, bytes]:
            what, changed = change(parts, dice)
            return what, put_together(changed)

        return mutate

    return {
        "cut in the pairs": lambda raw, dice: _cut(raw, dice, 0, layout.table),
        "cut in the table": lambda raw, dice: _cut(raw, dice, layout.table, layout.data),
        "cut in the data": lambda raw, dice: _cut(raw, dice, layout.data, len(raw) - 1),
        "flips in the first bytes": lambda raw, dice: _flip(raw, dice, 0, 64),
        "flips in the pairs": lambda raw, dice: _flip(raw, dice, 24, layout.table),
        "flips in the table": lambda raw, dice: _flip(raw, dice, layout.table, layout.data),
        "flips in the data": lambda raw, dice: _flip(raw, dice, layout.data, len(raw)),
        "counts": lambda raw, dice: _patch(raw, dice, in_place("version", "n_tensors", "n_kv"), HUGE),
        "lengths": lambda raw, dice: _patch(raw, dice, in_place("length"), HUGE),
        "array counts": lambda raw, dice: _patch(raw, dice, in_place("array count"), HUGE),
        "value types": lambda raw, dice: _patch(raw, dice, in_place("value type", "item type"), (*range(14), 2**31)),
        "dimensions": lambda raw, dice: _patch(raw, dice, in_place("dimension", "n_dims"), (*HUGE, 0, 1, 5)),
        "tensor types": lambda raw, dice: _patch(raw, dice, in_place("tensor type"), (*range(42), 2**31, 2**32 - 1)),
        "offsets": lambda raw, dice: _patch(raw, dice, in_place("offset"), (*HUGE, 0, 1, 32, 2**12, 2**64 - 32)),
        "array count and type": lambda raw, dice: _huge_array(raw, dice, layout),
        "very many": rebuilt(_very_many),
        "vocabulary size": rebuilt(_vocabulary_size),
        "hyperparameter": rebuilt(_absurd_value),
        "hyperparameter, again": rebuilt(_absurd_value),
        "key of another model": rebuilt(_added_key),
        "retyped value": rebuilt(_retyped_value),
        "retyped tensor": rebuilt(_retyped_tensor),
        "reshaped tensor": rebuilt(_reshaped_tensor),
        "missing tensor": rebuilt(_missing_tensor),
        "missing pair": rebuilt(_missing_pair),
        "duplicate": rebuilt(_duplicate),
        "architecture": rebuilt(_architecture),
        "tokenizer": rebuilt(_tokenizer),
        "alignment": rebuilt(_alignment),
        "two at once": rebuilt(_two_at_once),
    }


def kinds() -> list[str]:
    """The names of every kind of mutation."""
    return list(kinds_of(Layout((), 0, 0), Parts((), ())))


def scan(raw: bytes) -> Layout:
    """Where everything is in the header of a good file."""
    fields = [Field("magic", 0, 4), Field("version", 4, 4), Field("n_tensors", 8, 8), Field("n_kv", 16, 8)]
    at = 24

    def number(what: str, width: int) -> int:
        nonlocal at
        fields.append(Field(what, at, width))
        at += width
        return int.from_bytes(raw[at - width : at], "little")

    def skip(what: str, unit: int = 1) -> None:
        nonlocal at
        n_bytes = unit * number(what, 8)
        at += n_bytes

    def value(kind: int) -> None:
        if kind == STRING:
            skip("length")
        elif kind == ARRAY:
            item = number("item type", 4)
            if item in WIDTHS:
                skip("array count", WIDTHS[item])
            else:
                for _ in range(number("array count", 8)):
                    value(item)
        else:
            number("value", WIDTHS[kind])

    n_tensors, n_kv = (int.from_bytes(raw[i : i + 8], "little") for i in (8, 16))
    for _ in range(n_kv):
        skip("length")
        value(number("value type", 4))
    table = at
    for _ in range(n_tensors):
        skip("length")
        for _ in range(number("n_dims", 4)):
            number("dimension", 8)
        number("tensor type", 4)
        number("offset", 8)
    return Layout(tuple(fields), table, _padded(at, 32))


def take_apart(raw: bytes) -> Parts:
    """The pairs and tensors of a good file."""
    n_tensors, n_kv = struct.unpack_from("<QQ", raw, 8)
    at, data = 24, scan(raw).data

    def text() -> bytes:
        nonlocal at
        start = at + 8
        at = start + int.from_bytes(raw[at:start], "little")
        return raw[start:at]

    pairs, tensors = [], []
    for _ in range(n_kv):
        key, start = text(), at + 4
        at = _end_of_value(raw, start)
        pairs.append(Pair(key, int.from_bytes(raw[start - 4 : start], "little"), raw[start:at]))
    for _ in range(n_tensors):
        name, (n_dims,) = text(), struct.unpack_from("<I", raw, at)
        *dims, kind, offset = struct.unpack_from(f"<{n_dims}QIQ", raw, at + 4)
        at += 4 + 8 * n_dims + 12
        start = data + offset
        tensors.append(Tensor(name, tuple(dims), kind, raw[start : start + tensor_bytes(dims, kind)]))
    return Parts(tuple(pairs), tuple(tensors))


def put_together(parts: Parts) -> bytes:
    """The file of these parts, with offsets that fit."""
    head = [b"GGUF", struct.pack("<IQQ", 3, len(parts.tensors), len(parts.pairs))]
    head += [_text(pair.key) + struct.pack("<I", pair.kind) + pair.raw for pair in parts.pairs]
    data: list[bytes] = []
    offset = 0
    for tensor in parts.tensors:
        head.append(_text(tensor.name) + struct.pack("<I", len(tensor.dims)))
        head.append(struct.pack(f"<{len(tensor.dims)}QIQ", *tensor.dims, tensor.kind, offset))
        padded = _padded(len(tensor.data), 32)
        data += [tensor.data, bytes(padded - len(tensor.data))]
        offset += padded
    whole = b"".join(head)
    return b"".join([whole, bytes(_padded(len(whole), 32) - len(whole)), *data])


def shrunk(original: bytes, n_blocks: int) -> bytes:
    """The same model with its first blocks only: the same header, but for them, and a fraction of the data."""
    parts = take_apart(original)
    count = parts.arch + b".block_count"
    pairs = [_replace(pair, struct.pack("<I", n_blocks)) if pair.key == count else pair for pair in parts.pairs]
    tensors = [t for t in parts.tensors if not t.name.startswith(b"blk.") or int(t.name.split(b".")[1]) < n_blocks]
    return put_together(Parts(tuple(pairs), tuple(tensors)))


def tensor_bytes(dims: Sequence[int], kind: int) -> int:
    """Bytes of a tensor, 0 for a type that is not known."""
    try:
        n_weights, n_block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
    except (KeyError, ValueError):
        return 0
    return math.prod(dims) // n_weights * n_block_bytes


def _end_of_value(raw: bytes, at: int) -> int:
    """Where the value ends whose type is in the four bytes before `at`."""
    kind = int.from_bytes(raw[at - 4 : at], "little")
    if kind in WIDTHS:
        return at + WIDTHS[kind]
    if kind == STRING:
        return at + 8 + int.from_bytes(raw[at : at + 8], "little")
    item, count = struct.unpack_from("<IQ", raw, at)
    at += 12
    if item in WIDTHS:
        return at + int(WIDTHS[item] * count)
    for _ in range(count):
        at += 8 + int.from_bytes(raw[at : at + 8], "little")
    return at


def _cut(raw: bytes, dice: random.Random, first: int, last: int) -> tuple[str, bytes]:
    at = dice.randint(first, last)
    return f"after {at:,} bytes", raw[:at]


def _flip(raw: bytes, dice: random.Random, first: int, last: int) -> tuple[str, bytes]:
    changed = bytearray(raw)
    places = sorted(dice.randrange(first, last) for _ in range(dice.choice((1, 1, 2, 8, 64))))
    for at in places:
        changed[at] ^= dice.choice((1, 0x80, 0xFF, dice.randrange(1, 256)))
    return f"{len(places)} from byte {places[0]:,}", bytes(changed)


def _patch(raw: bytes, dice: random.Random, fields: Sequence[Field], values: Sequence[int]) -> tuple[str, bytes]:
    field, value = dice.choice(fields), dice.choice(values)
    return f"{field.what} at byte {field.start:,} becomes {value:,}", _written(raw, field, value)


def _huge_array(raw: bytes, dice: random.Random, layout: Layout) -> tuple[str, bytes]:
    """The first value becomes an array of very many items: a parser that makes room for them is in trouble."""
    key = layout.fields[4]
    at = key.start + 8 + int.from_bytes(raw[key.start : key.start + 8], "little")
    item, count = dice.choice((*WIDTHS, STRING, STRING)), dice.choice((2**27, 2**28, 2**29, 2**30, 2**30 - 1))
    return f"{count:,} items of type {item}", raw[:at] + struct.pack("<IIQ", ARRAY, item, count) + raw[at + 12 :]


def _absurd_value(parts: Parts, dice: random.Random) -> tuple[str, Parts]:
    """A number of the header becomes 0, negative, or much too large."""
    places = [i for i, pair in enumerate(parts.pairs) if pair.kind in WIDTHS]
    shape = [i for i in places if parts.pairs[i].key.startswith(parts.arch + b".")]
    index = dice.choice(shape if shape and dice.random() < 0.8 else places)
    pair = parts.pairs[index]
    if pair.kind in (6, 12):
        real = dice.choice(FLOATS)
        changed = struct.pack("<f" if pair.kind == 6 else "<d", real)
        return f"{_shown(pair.key)} becomes {real}", _with_pair(parts, index, _replace(pair, changed))
    own = int.from_bytes(pair.raw, "little")
    value = dice.choice((*ABSURD, own + 1, own * 2, own * 1024, own // 2, max(own - 1, 0)))
    changed = _number(value, len(pair.raw))
    return f"{_shown(pair.key)} becomes {value:,}", _with_pair(parts, index, _replace(pair, changed))


def _added_key(parts: Parts, dice: random.Random) -> tuple[str, Parts]:
    """A key that other models have, with an absurd value."""
    own = (
        b"vocab_size", b"expert_count", b"expert_used_count", b"attention.key_length", b"attention.value_length",
        b"attention.sliding_window", b"rope.dimension_count", b"rope.scaling.original_context_length",
        b"leading_dense_block_count", b"attention.head_count_kv", b"attention.head_count", b"pooling_type",
        b"nextn_predict_layers", b"ssm.state_size", b"ssm.inner_size", b"embedding_length_out",
        b"attention.kv_lora_rank", b"attention.shared_kv_layers", b"decoder_block_count", b"n_deepstack_layers",
    )  # fmt: skip
    common = (
        b"split.count", b"split.no", b"split.tensors.count", b"general.file_type", b"general.quantization_version",
        b"tokenizer.ggml.bos_token_id", b"tokenizer.ggml.eos_token_id", b"tokenizer.ggml.token_type_count",
        b"tokenizer.ggml.padding_token_id", b"tokenizer.ggml.eot_token_id",
    )  # fmt: skip
    key = parts.arch + b"." + dice.choice(own) if dice.random() < 0.7 else dice.choice(common)
    kind, value = dice.choice((4, 4, 4, 5, 10, 11)), dice.choice(ABSURD)
    raw = _number(value, WIDTHS[kind])
    others = tuple(pair for pair in parts.pairs if pair.key != key)
    return f"{_shown(key)} is {value:,}, type {kind}", _with_pairs(parts, (*others, Pair(key, kind, raw)))


def _retyped_value(parts: Parts, dice: random.Random) -> tuple[str, Parts]:
    """A pair of another type than it should have, whole in itself."""
    index, kind = dice.randrange(len(parts.pairs)), dice.choice((*WIDTHS, STRING, ARRAY, ARRAY))
    if kind == STRING:
        raw = _text(dice.choice((b"", b"30", b"\xff\xfe\x00nonsense", b"x" * 100_000)))
    elif kind == ARRAY:
        item, count = dice.choice((4, 5, 6, STRING)), dice.choice((0, 1, 2, 30, 600, 10_000))
        unit = _text(b"a") if item == STRING else dice.choice((b"\0\0\0\0", b"\1\0\0\0", b"\xff\xff\xff\xff"))
        raw = struct.pack("<IQ", item, count) + unit * count
    else:
        raw = dice.randbytes(WIDTHS[kind]) if dice.random() < 0.5 else b"\xff" * WIDTHS[kind]
    pair = parts.pairs[index]
    what = f"{_shown(pair.key)} from type {pair.kind} to {kind}"
    return what, _with_pair(parts, index, Pair(pair.key, kind, raw))


def _retyped_tensor(parts: Parts, dice: random.Random) -> tuple[str, Parts]:
    """A tensor of another type, with as many bytes as that type needs."""
    index, kind = dice.randrange(len(parts.tensors)), int(dice.choice(list(gguf.GGML_QUANT_SIZES)))
    tensor = parts.tensors[index]
    size = tensor_bytes(tensor.dims, kind)
    changed = dataclasses.replace(tensor, kind=kind, data=(tensor.data + bytes(size))[:size])
    return f"{_shown(tensor.name)} from type {tensor.kind} to {kind}", _with_tensor(parts, index, changed)


def _reshaped_tensor(parts: Parts, dice: random.Random) -> tuple[str, Parts]:
    """A tensor of another shape, with as many bytes as that shape needs."""
    index = dice.randrange(len(parts.tensors))
    tensor = parts.tensors[index]
    dims, way = list(tensor.dims), dice.randrange(5)
    if way == 0:
        dims.reverse()
    elif way == 1:
        dims.append(1)
    elif way == 2:
        dims[-1] = dice.choice((0, 1, dims[-1] // 2, dims[-1] - 1))
    elif way == 3:
        dims[0] = dims[0] // 2 if len(dims) > 1 else 1
    else:
        dims = [math.prod(dims)]
    size = tensor_bytes(dims, tensor.kind)
    changed = dataclasses.replace(tensor, dims=tuple(dims), data=(tensor.data + bytes(max(0, size)))[:size])
    return f"{_shown(tensor.name)} from {tensor.dims} to {tuple(dims)}", _with_tensor(parts, index, changed)


def _missing_tensor(parts: Parts, dice: random.Random) -> tuple[str, Parts]:
    gone = dice.choice([*parts.tensors, *parts.tensors[:2]])
    if dice.random() < 0.1:
        return "all of them", dataclasses.replace(parts, tensors=())
    return _shown(gone.name), dataclasses.replace(parts, tensors=tuple(t for t in parts.tensors if t is not gone))


def _missing_pair(parts: Parts, dice: random.Random) -> tuple[str, Parts]:
    gone = dice.choice(parts.pairs)
    return _shown(gone.key), _with_pairs(parts, tuple(pair for pair in parts.pairs if pair is not gone))


def _duplicate(parts: Parts, dice: random.Random) -> tuple[str, Parts]:
    """A key, a tensor's name, or a whole tensor, twice."""
    pair, tensor, index = dice.choice(parts.pairs), dice.choice(parts.tensors), dice.randrange(len(parts.tensors))
    way = dice.randrange(3)
    if way == 0:
        return f"pair {_shown(pair.key)}", _with_pairs(parts, (*parts.pairs, pair))
    if way == 1:
        twin = dataclasses.replace(parts.tensors[index], name=tensor.name)
        return f"name {_shown(tensor.name)}", _with_tensor(parts, index, twin)
    return f"tensor {_shown(tensor.name)}", dataclasses.replace(parts, tensors=(*parts.tensors, tensor))


def _architecture(parts: Parts, dice: random.Random) -> tuple[str, Parts]:
    """Another architecture, its keys renamed with it; or a name that is none."""
    strange = (b"", b"\x1b[2J\x1b[31mred", b"\xff\xfe", b"llama\0x", b"%s%n", b"x" * 3_000_000, b"[bold]x[/]", b"\n\n")
    known = sorted(name.encode() for name in gguf.MODEL_ARCH_NAMES.values())
    new, old = dice.choice(known if dice.random() < 0.7 else strange), parts.arch
    pairs = []
    for pair in parts.pairs:
        key = new + pair.key.removeprefix(old) if pair.key.startswith(old + b".") else pair.key
        pairs.append(Pair(key[:60_000], pair.kind, _text(new) if key == b"general.architecture" else pair.raw))
    return _shown(new), _with_pairs(parts, tuple(pairs))


def _tokenizer(parts: Parts, dice: random.Random) -> tuple[str, Parts]:
    """A vocabulary that does not fit: its kind, its tokens, its merges, its types."""
    models = (b"llama", b"gpt2", b"bert", b"t5", b"rwkv", b"plamo2", b"none", b"no_vocab", b"\xff", b"")
    keys = [b"model", b"pre", b"tokens", b"tokens", b"token_type", b"merges", b"scores", b"added_tokens"]
    name = dice.choice(keys)
    key = b"tokenizer.ggml." + name
    if name in (b"model", b"pre"):
        value = dice.choice(models if name == b"model" else (b"llama-bpe", b"gpt-4o", b"qwen2", b"no-such", b"default"))
        new, what = Pair(key, STRING, _text(value)), _shown(value)
    elif name in (b"token_type", b"scores"):
        count, item = dice.choice((0, 1, 1000, 49_152)), dice.choice((5, 6))
        new, what = Pair(key, ARRAY, struct.pack("<IQ", item, count) + b"\xff" * 4 * count), f"{count} times -1 or NaN"
    else:
        token = dice.choice((b"", b"a", b"a b", b"\xff\xff", b" ", b"a" * 2000, b"\xc4\xa0 x"))
        count = dice.choice((0, 1, 5, 300, 2000 if len(token) > 100 else 49_152))
        new = Pair(key, ARRAY, struct.pack("<IQ", STRING, count) + _text(token) * count)
        what = f"{count} times {_shown(token)}"
    others = tuple(pair for pair in parts.pairs if pair.key != key)
    return f"{_shown(key)} is {what}", _with_pairs(parts, (*others, new))


def _very_many(parts: Parts, dice: random.Random) -> tuple[str, Parts]:
    """Very many small things, and all of them are there: pairs, tensors, items."""
    way = dice.randrange(4)
    if way == 0:
        pairs = tuple(Pair(b"key%07d" % i, 0, b"\0") for i in range(200_000))
        return "200,000 pairs", _with_pairs(parts, (*parts.pairs, *pairs))
    if way == 1:
        tensors = tuple(Tensor(b"tensor%06d" % i, (8,), 0, bytes(32)) for i in range(100_000))
        return "100,000 tensors", dataclasses.replace(parts, tensors=(*parts.tensors, *tensors))
    item, unit, count = (STRING, 8, 3 << 23) if way == 2 else (0, 1, 1 << 27)
    array = Pair(b"general.tags", ARRAY, struct.pack("<IQ", item, count) + bytes(unit * count))
    return f"{count:,} items of type {item}", _with_pairs(parts, (*parts.pairs, array))


def _vocabulary_size(parts: Parts, dice: random.Random) -> tuple[str, Parts]:
    """A vocabulary without tokens, of any size that the header says."""
    size = dice.choice((0, 1, 2**24, 2**25, 2**26, 2**27, 2**28, 2**31 - 1, 2**31, 2**32 - 1))
    keys = (parts.arch + b".vocab_size", b"tokenizer.ggml.model")
    pairs = tuple(pair for pair in parts.pairs if pair.key not in keys)
    added = (Pair(keys[0], 4, struct.pack("<I", size)), Pair(keys[1], STRING, _text(b"no_vocab")))
    return f"{size:,}", _with_pairs(parts, (*pairs, *added))


def _alignment(parts: Parts, dice: random.Random) -> tuple[str, Parts]:
    value = dice.choice((0, 1, 3, 8, 16, 64, 4096, 2**20, 2**30, 2**31, 2**32 - 1))
    pair = Pair(b"general.alignment", 4, struct.pack("<I", value))
    return f"{value:,}", _with_pairs(parts, (*parts.pairs, pair))


def _two_at_once(parts: Parts, dice: random.Random) -> tuple[str, Parts]:
    ways = (_absurd_value, _added_key, _retyped_value, _reshaped_tensor, _retyped_tensor, _tokenizer, _architecture)
    first, second = dice.sample(ways, 2)
    one, parts = first(parts, dice)
    two, parts = second(parts, dice)
    return f"{one}; {two}", parts


def _written(raw: bytes, field: Field, value: int) -> bytes:
    return raw[: field.start] + _number(value, field.width) + raw[field.start + field.width :]


def _number(value: int, width: int) -> bytes:
    """The lowest bytes of a number."""
    return (value & ((1 << 8 * width) - 1)).to_bytes(width, "little")


def _replace(pair: Pair, raw: bytes) -> Pair:
    return dataclasses.replace(pair, raw=raw)


def _with_pair(parts: Parts, index: int, pair: Pair) -> Parts:
    return _with_pairs(parts, (*parts.pairs[:index], pair, *parts.pairs[index + 1 :]))


def _with_pairs(parts: Parts, pairs: tuple[Pair, ...]) -> Parts:
    return dataclasses.replace(parts, pairs=pairs)


def _with_tensor(parts: Parts, index: int, tensor: Tensor) -> Parts:
    return dataclasses.replace(parts, tensors=(*parts.tensors[:index], tensor, *parts.tensors[index + 1 :]))


def _text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def _shown(name: bytes) -> str:
    return ascii(name.decode(errors="replace"))[1:-1][:60]


def _padded(n: int, alignment: int) -> int:
    return -(-n // alignment) * alignment
