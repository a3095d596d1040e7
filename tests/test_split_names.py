"""The names of a split model's parts, and which are missing."""

from pathlib import Path

import pytest

from lab.core import split_files
from lab.errors import LabError


def part(number: int, count: int = 6) -> str:
    return f"m-{number:05}-of-{count:05}.gguf"


def test_a_part_names_all_from_the_first_to_the_last() -> None:
    expected = ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf")
    assert split_files.names_of(part(1, 2)) == expected
    assert split_files.names_of(part(2, 2)) == expected
    assert split_files.names_of(part(1, 1)) == (part(1, 1),)
    for name in (part(0, 2), part(3, 2), "m-0001-of-0002.gguf", "m.gguf"):
        assert split_files.names_of(name) == (name,)


def test_only_parts_after_the_first_are_later() -> None:
    assert not split_files.is_later(part(1))
    assert split_files.is_later(part(2))
    assert not split_files.is_later("m.gguf")
    assert split_files.first_of(Path("folder") / part(3)) == Path("folder") / part(1)


def test_a_stem_has_neither_folder_nor_suffix_nor_part() -> None:
    assert split_files.stem(f"folder/{part(2)}") == "m"
    assert split_files.stem("folder/m.Q4_0.gguf") == "m.Q4_0"
    assert split_files.stem("m.GGUF") == "m"
    assert split_files.stem("m.bin") == "m.bin"


def test_up_to_four_missing_parts_are_named(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / part(number)).touch()
    path = tmp_path / part(1)
    with pytest.raises(LabError, match="one of 6 parts") as raised:
        split_files.paths_of(path)
    assert f"Missing: {part(3)}, {part(4)}, {part(5)}, {part(6)}." in raised.value.what
    with pytest.raises(LabError):
        split_files.check_beside(tmp_path / part(5))
    (tmp_path / part(2)).unlink()
    with pytest.raises(LabError, match=r"part|Missing") as raised:
        split_files.paths_of(path)
    assert f"{part(2)}, {part(3)}, {part(4)}, {part(5)} and 1 more." in raised.value.what


def test_one_file_is_no_part_of_missing_ones(tmp_path: Path) -> None:
    assert split_files.paths_of(tmp_path / "m.gguf") == (tmp_path / "m.gguf",)
    split_files.check_beside(tmp_path / part(2))  # none of them is there
    (tmp_path / "m.gguf").touch()
    split_files.check_beside(tmp_path / "m.gguf")
    for number in (1, 2):
        (tmp_path / part(number, 2)).touch()
    both = tuple(tmp_path / part(number, 2) for number in (1, 2))
    assert split_files.paths_of(both[1]) == both
    assert split_files.models_in(tmp_path) == [both[0], tmp_path / "m.gguf"]
