"""Behaviours picked by a line of text: "softsync:n=4" names a class of a registry and gives its fields.

Each class is a frozen dataclass whose fields, all of int, float, bool or str and all with defaults, are its
settings; a field without a sensible default raises in `__post_init__`, and so does a value out of range.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any, TypeVar

from pyps_wire.errors import InvalidArgument

T = TypeVar("T")

# The largest count that a setting may ask for: no message takes much more.
COUNT_MAX = 2**31 - 1


def make(text: str, registry: Mapping[str, type[T]], *, what: str) -> T:
    """Return the object that the text names; InvalidArgument tells which names and settings there are."""
    name, _, rest = text.strip().partition(":")
    if name not in registry:
        raise InvalidArgument(f"{what} {name!r} is unknown; expected one of {', '.join(sorted(registry))}")
    return build(registry[name], rest, what=f"{what} {name!r}")


def build(kind: type[T], text: str, *, what: str) -> T:
    """Return a `kind` with the settings of "name=value,name=value"."""
    fields = _types_of(kind)  # type: ignore[arg-type]  # mypy takes a class of a variable type for unhashable
    settings: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        name, separator, value = (part.strip() for part in item.partition("="))
        if name not in fields or not separator:
            known = ", ".join(f"{field}=" for field in fields) or "no settings"
            raise InvalidArgument(f"{what} has no setting {item.strip()!r}; it has {known}")
        if name in settings:
            raise InvalidArgument(f"{what}: {name} is given twice")
        settings[name] = _parse(value, fields[name], what=f"{what}: {name}")
    return kind(**settings)


@cache
def _types_of(kind: type) -> Mapping[str, Any]:
    """Return the types of a class's settings; evaluating annotations takes longer than all the rest of a text."""
    types = typing.get_type_hints(kind)
    return {field.name: types[field.name] for field in _settings(kind)}


def spell(name: str, thing: object) -> str:
    """Return the text that makes an equal object; settings at their defaults are left out."""
    settings = spell_settings(thing)
    return f"{name}:{settings}" if settings else name


def spell_settings(thing: object, *, always: Collection[str] = ()) -> str:
    """Return the "name=value,name=value" of which `build` makes an equal object.

    Settings at their defaults are left out, but for those named in `always`.
    """
    values = [(field, getattr(thing, field.name)) for field in _settings(thing)]
    return ",".join(
        f"{field.name}={spell_value(value)}"
        for field, value in values
        if value != field.default or field.name in always
    )


def spell_out(name: str, thing: object) -> str:
    """Return the text that makes an equal object, with all its settings, for people."""
    settings = spell_settings(thing, always=[field.name for field in _settings(thing)])
    return f"{name}:{settings}" if settings else name


def example(kind: type) -> str:
    """Return a text that names such an object with all its settings, for people: "softsync:n=4"."""
    values = [(field.name, field.metadata.get(_EXAMPLE, field.default)) for field in _settings(kind)]
    settings = ",".join(f"{name}={spell_value(value)}" for name, value in values)
    name: str = kind.name  # type: ignore[attr-defined]
    return f"{name}:{settings}" if settings else name


def required(*, example: int, unset: int) -> Any:
    """Return a field without a sensible default: `unset` is refused, `example` is what people are shown."""
    return dataclasses.field(default=unset, metadata={_EXAMPLE: example})


_EXAMPLE = "example"


def _settings(thing: object) -> list[dataclasses.Field[Any]]:
    """Return the fields that can be set; others are worked out from them."""
    return [field for field in dataclasses.fields(thing) if field.init]  # type: ignore[arg-type]


def _parse(text: str, kind: type, *, what: str) -> Any:
    if kind is bool:
        words = {
            "true": True,
            "on": True,
            "yes": True,
            "1": True,
            "false": False,
            "off": False,
            "no": False,
            "0": False,
        }
        if text.lower() in words:
            return words[text.lower()]
        raise InvalidArgument(f"{what} is {text!r}; expected true or false")
    try:
        return kind(text)
    except ValueError:
        expected = {int: "a whole number", float: "a number"}[kind]
        raise InvalidArgument(f"{what} is {text!r}; expected {expected}") from None


def spell_value(value: object) -> str:
    """Return the text of one setting, from which exactly it is read back."""
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)
