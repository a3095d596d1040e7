"""One name for one thing in the options of all commands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import click
import pytest

from lab.core.asked_settings import flag, table
from lab.features.ab import parse_variant
from lab.main import hint_of, lab as cli

REFUSED = {
    "--repeat": ("--blocks", "--rounds", "--runs", "--repetitions"),
    "--sequences": ("--users", "--streams", "--concurrency", "--parallel"),
    "--ceilings": ("--results",),
    "--budget": ("--max-minutes", "--duration", "--max-time"),
    "--prompt": ("--text",),
    "--as": ("--format",),
    "--file": ("--output", "--page"),
}
"""The name of a thing, and the names that it does not have."""

TWO_SHORT_NAMES = {
    "--device": {"-d", "-dev"},
    "--model": {"-m", "-hf"},
    "--ubatch": {"-u", "-ub"},
}
"""A device of the datasheets, and llama.cpp's name of a device; llama.cpp's name of a model on the
hub; llama.cpp's own spelling of -u."""

MOST_COMMANDS = 0.9  # an option that so many commands of an engine have, all of them have
NOT_HERE = {
    "quant": {"--model"},  # its files are arguments
    "start": {
        "--settings",
        *(flag(name) for name, setting in table().items() if not setting.changes_start),
    },
}


def all_commands() -> Iterator[tuple[str, click.Command]]:
    """Every command and subcommand with its name."""
    for name, command in cli.commands.items():
        yield name, command
        if isinstance(command, click.Group):
            for subname, subcommand in command.commands.items():
                yield f"{name} {subname}", subcommand


COMMANDS = dict(all_commands())


def options_of(command: click.Command) -> Mapping[str, click.Option]:
    """The options of a command by their long names (that of a switch: without no-)."""
    options = {}
    for option in command.params:
        if isinstance(option, click.Option):
            options[max(option.opts, key=len)] = option
    return options


def short_names(option: click.Option) -> set[str]:
    return {
        name
        for name in (*option.opts, *option.secondary_opts)
        if name.startswith("-") and not name.startswith("--")
    }


@pytest.mark.parametrize("name", REFUSED)
def test_a_thing_has_one_name(name: str) -> None:
    users = [command for command in COMMANDS.values() if name in options_of(command)]
    assert users
    for command_name, command in COMMANDS.items():
        assert not set(REFUSED[name]) & set(options_of(command)), command_name


def test_an_option_has_one_long_name() -> None:
    for command_name, command in COMMANDS.items():
        for option in options_of(command).values():
            long_names = [name for name in option.opts if name.startswith("--")]
            assert len(long_names) == 1, (command_name, option.opts)


def test_an_option_has_the_same_short_name_in_all_commands() -> None:
    short_by_name = dict[str, set[str]]()
    long_by_short = dict[str, set[str]]()
    for command in COMMANDS.values():
        for name, option in options_of(command).items():
            short_by_name.setdefault(name, set()).update(short_names(option) or {""})
            for short in short_names(option):
                long_by_short.setdefault(short, set()).add(name)
    assert len(short_by_name) > 80
    differing = {name: names for name, names in short_by_name.items() if len(names) > 1}
    assert differing.pop("--mmap", {""}) == {""}
    assert differing == TWO_SHORT_NAMES
    for short, names in long_by_short.items():
        assert len(names) == 1, short


def test_out_is_a_folder_and_file_a_file() -> None:
    for command_name, command in COMMANDS.items():
        options = options_of(command)
        if "--out" in options:
            assert "older" in str(options["--out"].help), command_name
        if "--file" in options:
            assert options["--file"].metavar == "FILE", command_name


def test_what_most_commands_of_an_engine_have_all_have() -> None:
    engines = {
        name: options_of(command)
        for name, command in COMMANDS.items()
        if "--threads" in options_of(command) and name != "rpc-server"
    }
    assert len(engines) > 12
    counts = dict[str, int]()
    for options in engines.values():
        for option in options:
            counts[option] = counts.get(option, 0) + 1
    common = {name for name, n in counts.items() if n >= MOST_COMMANDS * len(engines)}
    common -= {"--help-all"}  # only a command with many options has it
    assert {"--json", "--threads", "--ubatch"} <= common
    for name, options in engines.items():
        assert common - set(options) == NOT_HERE.get(name, set()) & common, name


def test_who_writes_results_takes_the_options_of_output() -> None:
    for name, command in COMMANDS.items():
        options = set(options_of(command))
        if "--report" in options:
            assert {"--out", "--no-plot", "--json"} <= options, name
        if "--out" in options and "--file" not in options and name != "import":
            assert "--json" in options or name == "plot", name


OF_LLAMA_CPP: dict[str, dict[str, Any]] = {
    "-t 2": {"threads": 2},
    "-tb 2": {"threads_batch": 2},
    "-b 512": {"batch": 512},
    "-ub 1": {"ubatch": 1},
    "-ub 512": {"ubatch": 512},
    "-u 64": {"ubatch": 64},
    "-ngl 99": {"n_gpu_layers": 99},
    "-ngl 0": {"n_gpu_layers": 0},
    "-ngl auto": {"n_gpu_layers": "auto"},
    "-fa on": {"flash_attn": "on"},
    "-fa off": {"flash_attn": "off"},
    "-fa auto": {"flash_attn": "auto"},
    "-fa 1": {"flash_attn": "on"},
    "-fa 0": {"flash_attn": "off"},
    "-fa ON": {"flash_attn": "on"},
    "-fa enabled": {"flash_attn": "on"},
    "-fa false": {"flash_attn": "off"},
    "-ctk q8_0": {"cache_type_k": "q8_0"},
    "-ctk Q8_0": {"cache_type_k": "q8_0"},
    "-ctv f16": {"cache_type_v": "f16"},
    "-ctk q4_0 -ctv q4_0": {"cache_type_k": "q4_0", "cache_type_v": "q4_0"},
    "-dev CUDA0,CUDA1": {"device": "CUDA0,CUDA1"},
    "-dev none": {"device": "none"},
    "-sm none": {"split_mode": "none"},
    "-sm row": {"split_mode": "row"},
    "-mg 1": {"main_gpu": 1},
    "-ts 3,1": {"tensor_split": "3,1"},
    "-ts 3/1": {"tensor_split": "3/1"},
    "-ncmoe 12": {"n_cpu_moe": 12},
    "-ot ffn_.*_exps=CPU": {"override_tensor": "ffn_.*_exps=CPU"},
    "-nkvo": {"kv_offload": False},
    "-nopo": {"op_offload": False},
    "-nr": {"repack": False},
    "--no-mmap": {"mmap": False},
    "--no-repack": {"repack": False},
    "--no-kv-offload": {"kv_offload": False},
    "--flash-attn on": {"flash_attn": "on"},
    "--rpc 127.0.0.1:50052": {"rpc": "127.0.0.1:50052"},
}
"""What people write for llama-server and llama-bench, as the settings that it means."""


@pytest.mark.parametrize("text", OF_LLAMA_CPP)
def test_the_options_of_llama_cpp_are_taken(text: str) -> None:
    assert parse_variant(text) == OF_LLAMA_CPP[text]
    measure = COMMANDS["measure"]
    asked = measure.make_context("measure", text.split()).params
    for name, value in OF_LLAMA_CPP[text].items():
        assert asked[name] == value
    if " " in text:  # a word alone is an option of lab ab itself
        variants = COMMANDS["ab"].make_context("ab", [text, "-t 1"]).params["variants"]
        assert text in [variant.strip() for variant in variants]


@pytest.mark.parametrize("command", ["measure", "predict", "tune", "ceilings", "batch"])
def test_a_model_of_the_hub_is_named_as_for_llama_cpp(command: str) -> None:
    context = COMMANDS[command].make_context(command, ["-hf", "owner/repo:Q4_K_M"])
    models = context.params["model"]
    assert "owner/repo:Q4_K_M" in (models, *models)


@pytest.mark.parametrize(
    ("message", "hint"),
    [
        ("No such option '-c'.", "--prompt-len 32k"),
        ("No such option '--ctx-size'.", "--prompt-len 32k"),
        ("No such option '--n-predict'. (Did you mean '--no-plot'?)", "--gen 300"),
        ("No such option '--parallel'.", "lab batch --sequences"),
        ("Invalid value for '--threads' / '-t': '6,12' is not a valid integer.", '"-t 12"'),
        ("Missing argument 'VARIANT VARIANT...'.", '"-t 12"'),
        ("Got unexpected extra argument (100)", "commas"),
        ("Got unexpected extra arguments (1k 10k)", "commas"),
        ("Got unexpected extra argument (phi-3-mini)", "--model phi-3-mini"),
        ("Got unexpected extra argument (rtx-4090)", "--device rtx-4090"),
        ("Got unexpected extra argument (model.gguf)", "--model"),
        ("Got unexpected extra argument (qwen3:8b)", "--model"),
        ("Got unexpected extra argument (https://example.org/v1)", "--url"),
        ("Got unexpected extra argument (localhost:11434)", "--url"),
        ("Got unexpected extra argument (10.0.0.7:8080)", "--url"),
        ("Got unexpected extra argument (results/a.jsonl)", "lab show"),
        ("Missing argument 'RESULTS...'.", "results/FILE.jsonl"),
        ("Missing argument 'FILE...'.", "lab import"),
        ("Missing argument 'SPEC...'.", "lab models"),
        ("Missing option '--good'.", "--bad"),
        ("Missing option '--url'.", "lab record --url"),
        ("No such command 'bench'. Did you mean 'batch'?", "lab measure"),
        ("No such command 'pull'.", "lab models"),
        ("No such command 'serve'.", "--url"),
        ("No such command 'perplexity'.", "lab quant"),
        ("No such command 'devices'.", "lab doctor"),
        ("No such option '-d'.", "--prompt-len 4096"),
        ("No such option '--gpu'. (Did you mean one of: '--rpc', '--url'?)", "--device none"),
    ],
)
def test_what_people_type_first_gets_a_hint(message: str, hint: str) -> None:
    assert hint in (hint_of(message) or "")
    assert hint_of("No such option '--nothing'.") is None
