"""The directive `made`, which puts onto a page what the code itself tells: settings, names, errors."""

from __future__ import annotations

import importlib
import inspect
import re
from textwrap import dedent
from typing import Any

import settings
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.ext.autodoc.mock import mock
from sphinx.util.docutils import SphinxDirective

from pyps_client.launch import Launch
from pyps_wire import errors

# Each public name is described in the first of these modules that exports it.
MODULES = (
    *("pyps_client", "pyps_client.torch", "pyps_client.data"),
    *(f"pyps_client.integrations.{trainer}" for trainer in ("transformers", "lightning", "accelerate")),
    "pyps.ray",
)
# The pages can be made without Ray.
with mock(["ray"]):
    for each in MODULES:
        importlib.import_module(each)


def names() -> str:
    """A chapter a module, an entry a public name that is neither an error nor settings."""
    seen: set[int] = set()
    parts = []
    for module in map(importlib.import_module, MODULES):
        parts.append(f"## {module.__name__}\n\n{module.__doc__}")
        for name in module.__all__:
            value = getattr(module, name)
            if name == "__version__" or _is_error(value) or value is Launch or id(value) in seen:
                continue
            seen.add(id(value))
            kind = "class" if inspect.isclass(value) else "function"
            parts.append(_autodoc(kind, f"{module.__name__}.{name}", ":members:" if kind == "class" else ""))
    return "\n\n".join(parts)


def error_tree() -> str:
    """Return the tree of errors as their module draws it, and an entry for each public error."""
    tree, _, prose = dedent(inspect.cleandoc(errors.__doc__ or "").partition("\n\n")[2]).partition("\n\n")
    public = importlib.import_module(MODULES[0])
    entries = [
        _autodoc("exception", f"{MODULES[0]}.{name}", ":show-inheritance:")
        for name in public.__all__
        if _is_error(getattr(public, name))
    ]
    return "\n\n".join([f"```text\n{dedent(tree)}\n```", prose.partition("\nA server ends")[0], *entries])


def _is_error(value: object) -> bool:
    return inspect.isclass(value) and issubclass(value, errors.PypsError)


def _autodoc(kind: str, name: str, option: str) -> str:
    return f"```{{eval-rst}}\n.. auto{kind}:: {name}\n   {option}\n```"


MADE = {
    "commands": settings.commands,
    "launch": settings.launch,
    "options": settings.options,
    "names": names,
    "errors": error_tree,
}


class Made(SphinxDirective):  # type: ignore[misc]
    """```{made} commands```: the Markdown of that name."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Make the text again in each build: no file shows Sphinx that the code has changed."""
        self.env.note_reread()
        made: list[nodes.Node] = self.parse_text_to_nodes(MADE[self.arguments[0]](), allow_section_headings=True)
        return made


def _as_text(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Turn a docstring into what Sphinx reads: examples, and a paragraph for each name in backquotes."""
    text: list[str] = []
    within = False
    for line in lines:
        example = line.startswith("    ")
        if example and not within:
            text += ["::", ""]
        elif re.match(r"(`\w+`(, )?)+: ", line) and text and text[-1]:
            text.append("")
        within = example or (within and not line)
        text.append(line if example else _plain(line))
    lines[:] = text


def _plain(line: str) -> str:
    """The line with its stars and underscores, but for those of lists and of names in backquotes."""
    bullet, text = ("* ", line[2:]) if line.startswith("* ") else ("", line)
    pieces = text.split("`")
    pieces[::2] = [re.sub(r"\*|_(?!\w)", r"\\\g<0>", piece) for piece in pieces[::2]]
    return bullet + re.sub(r"\bdocs/([\w-]+)\.md\b", r":doc:`/\1`", "`".join(pieces))


def setup(app: Sphinx) -> dict[str, bool]:
    """Tells Sphinx of the directive."""
    app.add_directive("made", Made)
    app.connect("autodoc-process-docstring", _as_text)
    return {"parallel_read_safe": True}
