"""The coordinator of Sandblaster as a process: its calls to the servers, its flags, what it tells people.

`link` is its way to the servers, `remote_machine` and `remote_objective` are what `pyps.work.lbfgs` works with,
`memory` says what will be needed of the servers' memory, `drive` is the process from its start to its end.
"""
