"""Exact bounds and small arithmetic of core and roofline, which mutants showed untested."""

import gzip

import pytest

from lab.core import files, shown
from lab.roofline.step_prediction import Remainder, piece_between


def test_packed_data_may_have_exactly_as_many_bytes_as_allowed() -> None:
    packed = gzip.compress(b"12345")
    assert files.unpacked(packed, 5) == b"12345"
    with pytest.raises(OSError, match="over 4 bytes"):
        files.unpacked(packed, 4)


def test_a_piece_of_prompts_has_the_outputs_of_the_tokens_that_end_in_it() -> None:
    """Two prompts of 10 tokens; each needs the logits of its last one."""
    prompts = [Remainder(0, 10, 1), Remainder(5, 10, 1)]
    first = piece_between(prompts, 0, 4)
    second = piece_between(prompts, 4, 12)
    assert (list(first.spans), first.n_outputs) == ([(4, 0)], 0)
    assert (list(second.spans), second.n_outputs) == ([(6, 4), (2, 5)], 1)
    assert piece_between(prompts, 12, 20).n_outputs == 1


def test_half_of_the_runs_are_too_many_and_no_runs_are_not_disturbed() -> None:
    assert shown.of_runs(4, 2, 4) == (shown.DISTURBED,)
    assert shown.of_runs(5, 2, 5) == (shown.PARTLY,)
    assert shown.of_runs(4, 0, 5) == (shown.FEW,)
    assert shown.of_runs(0, 0, 1) == (shown.FEW,)
