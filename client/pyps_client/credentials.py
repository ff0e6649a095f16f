"""What a caller shows servers: a token."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from pyps_wire.errors import BadRequest


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """A token, empty for none. Raises BadRequest for one that cannot be sent."""

    token: str = field(default="", repr=False)
    # The file that the token came from.
    token_file: str = ""

    def __post_init__(self) -> None:
        check_token(self.token, "token")

    def newest(self) -> Credentials:
        """With the token that its file holds now, or as they are where there is none to be had."""
        try:
            return replace(self, token=read_token(self.token_file)) if self.token_file else self
        except BadRequest:
            return self


def read_token(token_file: str | os.PathLike[str] | None, environment: Mapping[str, str] | None = None) -> str:
    """The first line of a file, or else PYPS_TOKEN; empty for none. Raises BadRequest for what cannot be sent."""
    if token_file is None:
        token = (os.environ if environment is None else environment).get("PYPS_TOKEN", "").strip()
        source = "PYPS_TOKEN"
    else:
        source = f"the token file {os.fspath(token_file)}"
        try:
            token = Path(token_file).read_text(encoding="utf-8").strip().partition("\n")[0].strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no text"
            raise BadRequest(f"{source} cannot be read: {reason}") from None
        if not token:
            raise BadRequest(f"{source} is empty; expected the servers' shared token")
    check_token(token, source)
    return token


def check_token(token: str, source: str) -> None:
    """Refuses a token that cannot be sent, with the name of where it came from."""
    if not (token.isascii() and token.isprintable()):
        raise BadRequest(f"{source} does not hold one line of printable ASCII characters")
