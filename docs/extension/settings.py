"""Every option as Markdown: its meaning, its default, and the answer to a wrong value, all taken from the code."""

from __future__ import annotations

import dataclasses
import html
import inspect
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir
from typing import Any

import refusals
import torch
import typer

from pyps.cli.main import app
from pyps_client.launch import Launch
from pyps_client.torch import RemoteOptimizer

# Wrong in turn, until one is refused: most texts may be any word, few may be this sign.
_WORDS = ("nonsense", "?")


def commands() -> str:
    """A chapter a command, an entry an option."""
    with tempfile.TemporaryDirectory() as empty, chdir(empty):
        return "\n\n".join(_chapter(words, command) for words, command in walk(typer.main.get_command(app), ()))


def walk(command: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields all commands with the words that call them."""
    if not hasattr(command, "list_commands"):
        yield words, command
        return
    for name in command.list_commands(None):
        yield from walk(command.get_command(None, name), (*words, name))


def _chapter(words: Sequence[str], command: Any) -> str:
    context = typer.Context(command, info_name=words[-1])
    name = f"pyps {' '.join(words)}"
    usage = f"```\n{name} {' '.join(command.collect_usage_pieces(context))}\n```"
    parts = [f"## {name}", usage, command.help, f"```{{program}} {name}\n```"]
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    # Something for each, so that what is refused is the option.
    given = ["--", *(each.name for each in arguments)] if arguments else []
    without = refusals.of_command([*words, *given], {})
    parts += [
        f"`{name}`\n: {escaped(meaning)}" for name, meaning in (each.get_help_record(context) for each in arguments)
    ]
    for option in command.params:
        if option in arguments or option.hidden:
            continue
        record, meaning = option.get_help_record(context)
        sentence = _of_option(words, option, record, meaning, given, without)
        heading = re.sub(r" / ", ", ", record)
        parts.append(f"````{{option}} {heading}\n\n{escaped(meaning)}\n{_when_wrong(*sentence)}````")
    return "\n\n".join(parts)


def _of_option(
    words: Sequence[str], option: Any, record: str, meaning: str, given: Sequence[str], without: str
) -> tuple[str, str]:
    """Return a wrong value for the option and the error that it gets; empty where the error is the same without it."""
    flag = option.opts[0]
    tries: list[tuple[list[str], dict[str, str]]]
    if option.is_flag:
        tries = [([flag], {})]
        tries += [([], {variable: "maybe"}) for variable in re.findall(r"env: (PYPS_\w+)", meaning)]
    elif re.search(r"INTEGER|NUMBER|\b(int|float)\b", record):
        tries = [([flag, f"{(getattr(option, 'min', None) or 0) - 1:g}"], {}), ([flag, "nonsense"], {})]
    else:
        tries = [([flag, word], {}) for word in _WORDS]
    for arguments, variables in tries:
        sentence = refusals.of_command([*words, *arguments, *given], variables)
        if sentence not in ("", without):
            return " ".join([*arguments, *("=".join(each) for each in variables.items())]), sentence
    return "", ""


def launch() -> str:
    """Return an entry for each setting of Launch, with its variable."""

    def refused(name: str, value: Any) -> str:
        variables = {"PYPS_SERVERS": "127.0.0.1", f"PYPS_{name.upper()}": value}
        return refusals.of_call(lambda: Launch(environment=variables))

    defaults = {each.name: each.default for each in dataclasses.fields(Launch) if each.init}
    return _entries(
        Launch.__doc__ or "",
        defaults,
        refused,
        variable=lambda name: f"variable: PYPS_{name.upper()}",
        given=lambda name, wrong: f"PYPS_{name.upper()}={wrong}",
    )


def options() -> str:
    """Return an entry for each keyword of RemoteOptimizer, after the model and its optimizer."""
    model = torch.nn.Linear(1, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)

    def refused(name: str, value: Any) -> str:
        # The setting's type is checked first, then its value.
        keywords: Any = {name: value}
        return refusals.of_call(lambda: RemoteOptimizer(model, sgd, "127.0.0.1:7610", **keywords))

    made = RemoteOptimizer.__init__
    keywords = list(inspect.signature(made).parameters.values())[3:]
    defaults = {each.name: each.default for each in keywords}
    return _entries(
        made.__doc__ or "", defaults, refused, variable=lambda _: "", given=lambda name, wrong: f"{name}={wrong!r}"
    )


def _entries(
    explained: str,
    defaults: dict[str, Any],
    refused: Callable[[str, Any], str],
    *,
    variable: Callable[[str], str],
    given: Callable[[str, str], str],
) -> str:
    """Settings in the order of the docstring that explains them."""
    paragraphs = [
        text.partition(": ")
        for text in re.findall(r"^ *((?:`\w+`(?:, )?)+: .*(?:\n +(?!`\w+`[,:])\S.*)*)", explained, re.M)
    ]
    leading = {name for names, _, _ in paragraphs for name in re.findall(r"`(\w+)`", names)}
    parts = []
    for heading, _, meaning in paragraphs:
        # Some are explained in another's paragraph.
        others = [name for name in re.findall(r"`(\w+)`", meaning) if name in defaults.keys() - leading]
        names = [*re.findall(r"`(\w+)`", heading), *others]
        lines = [re.sub(r"\s+", " ", meaning)]
        for name in names:
            facts = [
                "required" if defaults[name] is dataclasses.MISSING else f"default: {_shown(defaults[name])}",
                variable(name),
            ]
            wrong, sentence = next(((given(name, w), s) for w in _WORDS if (s := refused(name, w))), ("", ""))
            lines.append(f"\n`{name}` [{'; '.join(filter(None, facts))}]\n{_when_wrong(wrong, sentence)}")
            defaults.pop(name)
        parts.append(
            "{}\n: {}".format(", ".join(f"`{name}`" for name in names), "\n".join(lines).replace("\n", "\n  "))
        )
    assert not defaults, f"no word explains {', '.join(defaults)}"
    return "\n\n".join(parts)


def _shown(default: object) -> str:
    return "none" if default in (None, "") else f"{default}"


def _when_wrong(wrong: str, sentence: str) -> str:
    """The answer to what was given, folded up: who reads what an option is for need not pass it."""
    if not sentence:
        return ""
    given = f"<details><summary><small><code>{html.escape(wrong)}</code> is answered</small></summary>"
    return f"\n{given}\n\n*{escaped(sentence)}*\n\n</details>\n"


def escaped(text: str) -> str:
    """Plain text as Markdown that shows it."""
    return re.sub(r"([*_<\[\]])", r"\\\1", text)
