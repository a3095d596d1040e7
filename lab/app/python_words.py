"""Messages in the words of Python: `--gen 0` of a command is `gen=0` of a function.

Messages are written once, for the command line; a public function translates what it raises.
"""

from __future__ import annotations

import inspect
import re

from lab.core.asked_settings import table
from lab.errors import LabError

ARGUMENTS = {"break": "breaks", "m": "model", "p": "prompt_len", "n": "gen", "r": "repeat"}
"""Names of options whose argument has another name, and short options of examples."""

SHOWN = re.compile(r"\blab show(?: RESULTS)?\b(?! -)")
"""The command in whose place Python has a table."""

WORDS = "on|off|auto|none|here|random|step|end|default|sleep"
VALUE = rf"[A-Z][A-Z_]+\b|\"[^\"]*\"|'[^']*'|[^\s,;()]*[\d%=][^\s;()]*|(?:{WORDS})(?=[.,;)]| or |$)"
OPTION = rf"(?<![\w-])--?(?P<name>[a-z][a-z-]*)(?: (?P<value>{VALUE}))?"
ONE_OPTION = re.compile(OPTION)
ITEM = r"--?[a-z][a-z-]*|[^\s;:]*[A-Z0-9%\"](?:[^\s;:]*[^\s;:.,)])?"
COMMAND = rf"\blab (?P<command>[a-z-]+)(?P<rest>(?: (?:{ITEM}))*)"
EITHER = re.compile(f"{COMMAND}|{OPTION}")
PLAIN_VALUE = re.compile(r"-?\d+(\.\d+)?|[A-Z][A-Z_]+|\".*\"|'.*'")


def translated(problem: LabError) -> LabError:
    """The same error of the same class, in the words of Python."""
    translation = type(problem).__new__(type(problem))
    translation.__dict__.update(problem.__dict__)
    LabError.__init__(translation, in_python(problem.what), in_python(problem.hint))
    return translation


def in_python(text: str) -> str:
    """A message with calls and arguments for commands and options."""
    return EITHER.sub(_translated_part, SHOWN.sub("lab.runs(records)", text))


def _translated_part(match: re.Match[str]) -> str:
    return _call(match) if match["command"] else _argument(match)


def _argument(match: re.Match[str]) -> str:
    """An option with its value as an argument; without a value, the name of the argument."""
    name = match["name"]
    is_off = name.startswith("no-") and name[3:].replace("-", "_") in table()
    if is_off:
        name = name.removeprefix("no-")
    argument = ARGUMENTS.get(name, name.replace("-", "_"))
    if is_off:
        return f"{argument}=False"
    if not match["value"]:
        return argument
    value = match["value"].rstrip(".,:")
    end = match["value"][len(value) :]
    written = value if PLAIN_VALUE.fullmatch(value) else f'"{value}"'
    return f"{argument}={written}{end}"


def _call(match: re.Match[str]) -> str:
    """A command as a call of the public function of its name; others are left as they are."""
    import lab

    name = match["command"]
    options = list(ONE_OPTION.finditer(match["rest"]))
    has_others = ONE_OPTION.sub("", match["rest"]).split()
    if name not in lab.PUBLIC or has_others:
        return match[0]
    calls = [_argument(option) for option in options]
    possible = {*inspect.signature(getattr(lab, name)).parameters, *table()}
    if not all("=" in call and call.partition("=")[0] in possible for call in calls):
        return match[0]
    return f"lab.{name}({', '.join(calls)})"
