"""Where a prompt first differs from an earlier one, and in which way."""

from __future__ import annotations

import difflib
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lab.features.recording import breaks
from lab.features.recording.prompts import Block, Blocks
from lab.remote.chat_bodies import ASSISTANT

LEAST_CUT = 8  # characters by which a shortened text is shorter
KEYS = "its keys"
LINES = "its lines"
WORDS = "its words"
AROUND = 12  # characters that are shown around a change
MOST_SHOWN = 40

DAYS = "Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun"
MONTHS = (
    "Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|"
    "Sept?(?:ember)?|Oct(?:ober)?|Nov(?:ember)?|Dec(?:ember)?"
)
NAMES = rf"\b(?:(?:{DAYS})(?:day)?|{MONTHS})\b"
WHAT_CHANGED = {
    "a date and time": r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d+)?)?Z?",
    "a time of day": r"\d{1,2}:\d\d(:\d\d(\.\d+)?)?Z?",
    "a date": rf"\d{{4}}-\d\d-\d\d|\d{{1,2}}[./]\d{{1,2}}[./]\d{{2,4}}|(?=.*{NAMES})"
    rf"({NAMES}|\d{{1,4}}(st|nd|rd|th)?)([,. ]+({NAMES}|\d{{1,4}}(st|nd|rd|th)?))*",
    "a number": r"[-+]?\d+([.,]\d+)*",
    "an identifier": r"(?=[^\s]*\d)[0-9a-zA-Z_-]{8,}",
}
"""Names of texts that programs change, by pattern; the first that matches counts."""

CLOCKS = ("a date and time", "a time of day", "a date")


@dataclass(frozen=True)
class Difference:
    """The first difference of a prompt from an earlier one."""

    kind: str
    block: Block  # the block of the new prompt; of a removed block, the earlier prompt's
    character: int  # of the block, from 0
    n_same: int  # blocks before it
    n_aligned: int
    """Blocks of the new prompt up to the last that the earlier prompt has too: what follows is new.
    """
    what: str = ""  # what kind of text changed, such as "a time of day"
    excerpt: str = ""  # the change with the text around it


def common_prefix(first: str, second: str) -> int:
    """How many characters two texts share at their beginnings."""
    low = 0
    high = min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def common_suffix(first: str, second: str) -> int:
    """How many characters two texts share at their ends."""
    return common_prefix(first[::-1], second[::-1])


def n_same_blocks(earlier: Sequence[Block], blocks: Sequence[Block]) -> int:
    """How many blocks two prompts share at their beginnings."""
    n_same = 0
    for before, block in zip(earlier, blocks, strict=False):
        if before.identity != block.identity:
            break
        n_same += 1
    return n_same


def shared_characters(earlier: Blocks, blocks: Blocks) -> int:
    """How many characters two prompts share at their beginnings."""
    n_same = n_same_blocks(earlier, blocks)
    shared = sum(len(block.text) for block in blocks[:n_same])
    if n_same < min(len(earlier), len(blocks)):
        before = earlier[n_same]
        block = blocks[n_same]
        if block.corresponds_to(before):
            shared += common_prefix(before.text, block.text)
    return shared


def is_branch(earlier: Blocks, blocks: Blocks) -> bool:
    """Whether a prompt differs only in how the last block of the earlier one ends: another
    question at the same place, without the answer to the first one. All that both have stands
    before it."""
    n_same = n_same_blocks(earlier, blocks)
    if n_same != len(earlier) - 1 or n_same >= len(blocks):
        return False
    before = earlier[n_same]
    later = blocks[n_same:]
    if not later[0].corresponds_to(before) or before in later:
        return False
    if any(block.role == ASSISTANT for block in later):
        return False
    n_prefix = common_prefix(before.text, later[0].text)
    return common_suffix(before.text[n_prefix:], later[0].text[n_prefix:]) < LEAST_CUT


def difference(earlier: Blocks, blocks: Blocks) -> Difference | None:
    """The first difference; None if one prompt begins with the whole other."""
    n_same = n_same_blocks(earlier, blocks)
    if n_same in (len(earlier), len(blocks)):
        return None
    before = earlier[n_same]
    block = blocks[n_same]
    kind, shown_block = kind_of_blocks(earlier[n_same:], blocks[n_same:])
    is_same_part = block.corresponds_to(before)
    is_within = kind in (breaks.CHANGED, breaks.SHORTENED, breaks.REORDERED) and is_same_part
    character = common_prefix(before.text, block.text) if is_within else 0
    return Difference(
        kind=kind,
        block=shown_block,
        character=character,
        n_same=n_same,
        n_aligned=n_same + n_aligned(earlier[n_same:], blocks[n_same:]),
        what=what_differs(before, block, kind),
        excerpt=excerpt(before.text, block.text) if is_within else start_of(shown_block.text),
    )


def what_differs(before: Block, block: Block, kind: str) -> str:
    """What kind of text changed, or which parts of a block came in another order."""
    if kind == breaks.CHANGED:
        return what_changed(before.text, block.text)
    is_within = before.text != block.text and in_order(before.text) == in_order(block.text)
    if kind != breaks.REORDERED or not is_within:
        return ""
    if is_json(block.text):
        return KEYS
    return LINES if len(block.text.splitlines()) > 1 else WORDS


def is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict | list)
    except (ValueError, RecursionError):  # of JSON that is nested too deeply
        return False


def matcher(
    earlier: Sequence[Block], blocks: Sequence[Block]
) -> difflib.SequenceMatcher[tuple[str, ...]]:
    """The alignment of two lists of blocks by their texts."""
    return difflib.SequenceMatcher(
        None,
        [block.identity for block in earlier],
        [block.identity for block in blocks],
        autojunk=False,
    )


def n_aligned(earlier: Sequence[Block], blocks: Sequence[Block]) -> int:
    """The blocks of `blocks` that are no new tail: up to the last one that `earlier` has, or that
    stands for one of its blocks."""
    last = 0
    for tag, start, end, new_start, new_end in matcher(earlier, blocks).get_opcodes():
        if tag == "equal":
            last = new_end
        elif tag == "replace":
            n_replaced = min(end - start, new_end - new_start)
            for offset in range(n_replaced):
                before, block = earlier[start + offset], blocks[new_start + offset]
                if block.corresponds_to(before) and similar(before.text, block.text):
                    last = new_start + offset + 1
    return last


def kind_of_blocks(earlier: Sequence[Block], blocks: Sequence[Block]) -> tuple[str, Block]:
    """How two lists differ that differ in their first block, and the block to name.

    The new tail does not count: an answer there may repeat the text of a block that was removed.
    """
    n_before_tail = max(1, n_aligned(earlier, blocks))
    n_old = Counter(block.identity for block in earlier)
    n_new = Counter(block.identity for block in blocks[:n_before_tail])
    before = earlier[0]
    block = blocks[0]
    if is_cut_at_front(earlier, blocks):
        return breaks.REMOVED, before
    is_kept = n_new[before.identity] >= n_old[before.identity]
    is_known = n_old[block.identity] >= n_new[block.identity]
    if is_kept and is_known:
        return breaks.REORDERED, block
    tag, start, end, new_start, new_end = next(
        code for code in matcher(earlier, blocks).get_opcodes() if code[0] != "equal"
    )
    if tag == "insert" or (is_kept and not is_known):
        return breaks.INSERTED, block
    if tag == "delete":
        return breaks.REMOVED, before
    is_one_for_one = end - start == new_end - new_start
    if block.corresponds_to(before) and (is_one_for_one or similar(before.text, block.text)):
        return kind_of_texts(before.text, block.text), block
    if is_known or end - start > new_end - new_start or not block.corresponds_to(before):
        return breaks.REMOVED, before
    return breaks.CHANGED, block


def is_cut_at_front(earlier: Sequence[Block], blocks: Sequence[Block]) -> bool:
    """Whether blocks were removed from the front of `earlier`, and an answer was appended.

    The answer may repeat a text that was removed, which would look like another order.
    """
    for n_removed in range(1, len(earlier)):
        n_left = len(earlier) - n_removed
        if n_same_blocks(earlier[n_removed:], blocks) == n_left:
            return is_answered(blocks[n_left:])
    return False


def is_answered(tail: Sequence[Block]) -> bool:
    """Whether blocks begin with an answer of the model, and go on with something else."""
    later = [block for block in tail if block.index != tail[0].index]
    return bool(later) and tail[0].role == ASSISTANT and later[0].role != ASSISTANT


def similar(first: str, second: str) -> bool:
    """Whether two texts share at least half of the shorter one, at their beginnings and ends, or
    have the same parts in another order."""
    if in_order(first) == in_order(second):
        return True
    n_prefix = common_prefix(first, second)
    n_shared = n_prefix + common_suffix(first[n_prefix:], second[n_prefix:])
    return 2 * n_shared >= min(len(first), len(second))


def kind_of_texts(before: str, text: str) -> str:
    """How two texts differ: the same parts in another order, a part cut out, or another change."""
    if in_order(before) == in_order(text):
        return breaks.REORDERED
    cut, put = changed_parts(before, text)
    if len(cut) - len(put) >= max(LEAST_CUT, len(cut) / 2):
        return breaks.SHORTENED
    return breaks.CHANGED


def in_order(text: str) -> list[str]:
    """The lines of a text, or the items of JSON, in an order of their own."""
    try:
        parsed = json.loads(text)
        items = parsed if isinstance(parsed, list) else [parsed]
        return sorted(json.dumps(item, sort_keys=True) for item in items)
    except (ValueError, RecursionError):  # of JSON that is nested too deeply
        lines = text.splitlines()
        return sorted(lines) if len(lines) > 1 else sorted(re.split(r"[\s,;]+", text))


def changed_parts(before: str, text: str) -> tuple[str, str]:
    """What stood between the common beginning and end of two texts, before and now."""
    start = common_prefix(before, text)
    n_end = common_suffix(before[start:], text[start:])
    return before[start : len(before) - n_end], text[start : len(text) - n_end]


def what_changed(before: str, text: str) -> str:
    """What kind of text changed, if it is of a kind that programs change; otherwise "". Of several
    changes, the first counts: the cache is lost from there."""
    start = common_prefix(before, text)
    n_end = common_suffix(before[start:], text[start:])
    for old_end, new_end in ((len(before) - n_end, len(text) - n_end), (start, start)):
        old = word_around(before, start, old_end)
        new = word_around(text, start, new_end)
        for name, pattern in WHAT_CHANGED.items():
            if re.fullmatch(pattern, old) and re.fullmatch(pattern, new):
                return name
    return ""


def word_around(text: str, start: int, end: int) -> str:
    """The word with the characters from `start` to `end`; a date and its time are one word."""
    while start > 0 and not text[start - 1].isspace():
        start -= 1
    while end < len(text) and not text[end].isspace():
        end += 1
    return text[start:end].strip("()[]{}<>.,;\"'")


def excerpt(before: str, text: str) -> str:
    """The change in its place: `08:0[0:00 -> 3:27]Z`."""
    start = common_prefix(before, text)
    cut, put = changed_parts(before, text)
    lead = text[max(0, start - AROUND) : start]
    end = start + len(put)
    return f"{lead}[{start_of(cut)} -> {start_of(put)}]{text[end : end + AROUND]}"


def start_of(text: str) -> str:
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 3]}..."
