"""`pyps demo`: four workers train on real images through two servers, watched from their start to their end.

`command` is the command itself; `progress` asks the servers how it goes, `scores` rates the parameters
that they hold, `screen` shows both, `picture` draws them.
"""

from pyps.cli.demo.command import demo

__all__ = ["demo"]
