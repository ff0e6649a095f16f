"""Settings as a line of text: "softsync:n=4" names a class of a registry and gives its fields.

Each class is a frozen dataclass. Its fields are its settings, of int, float, bool or str, all with defaults. Its
`__post_init__` refuses values out of range, and the default of a field that has no sensible one.
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
    """Return the object that the text names; raise InvalidArgument, with the names that there are, for any other."""
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
    # Cached: evaluating annotations takes longer than all the rest of a text.
    types = typing.get_type_hints(kind)
    return {field.name: types[field.name] for field in _settings(kind)}


def spell(name: str, thing: object) -> str:
    """Return the text that makes an equal object, without settings at their defaults."""
    return _named(name, spell_settings(thing))


def spell_settings(thing: object, *, always: Collection[str] = ()) -> str:
    """Return the text of which `build` makes an equal object, without settings at defaults unless named in `always`."""
    values = [(field, getattr(thing, field.name)) for field in _settings(thing)]
    return ",".join(
        f"{field.name}={spell_value(value)}"
        for field, value in values
        if value != field.default or field.name in always
    )


def spell_out(name: str, thing: object) -> str:
    """Return the text that makes an equal object, with all its settings, for people."""
    return _named(name, spell_settings(thing, always=[field.name for field in _settings(thing)]))


def example(kind: type) -> str:
    """Return a text with all settings of a class, for people: "softsync:n=4"."""
    values = [(field.name, field.metadata.get(_EXAMPLE, field.default)) for field in _settings(kind)]
    name: str = kind.name  # type: ignore[attr-defined]
    return _named(name, ",".join(f"{name}={spell_value(value)}" for name, value in values))


def _named(name: str, settings: str) -> str:
    return f"{name}:{settings}" if settings else name


def required(*, example: int, unset: int) -> Any:
    """Return a field without a sensible default: `unset` is refused, `example` is shown to people."""
    return dataclasses.field(default=unset, metadata={_EXAMPLE: example})


_EXAMPLE = "example"


def _settings(thing: object) -> list[dataclasses.Field[Any]]:
    """Return the fields that can be set; the others follow from them."""
    return [field for field in dataclasses.fields(thing) if field.init]  # type: ignore[arg-type]


def _parse(text: str, kind: type, *, what: str) -> Any:
    if kind is bool:
        yes, no = ("true", "on", "yes", "1"), ("false", "off", "no", "0")
        if text.lower() in yes + no:
            return text.lower() in yes
        raise InvalidArgument(f"{what} is {text!r}; expected true or false")
    try:
        return kind(text)
    except ValueError:
        expected = {int: "a whole number", float: "a number"}[kind]
        raise InvalidArgument(f"{what} is {text!r}; expected {expected}") from None


def spell_value(value: object) -> str:
    """Return the text of a value, which is read back exactly."""
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)
