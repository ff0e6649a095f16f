"""The coordinator of Sandblaster as a process.

`link` is its way to the servers, `remote` what `pyps.lbfgs.optimizer` works with, `progress` what people hear, `flags`
what it may be told, `drive` the process from its start to its end.
"""
