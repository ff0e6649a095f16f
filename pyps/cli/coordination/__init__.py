"""The coordinator of Sandblaster as a process.

settings.py     its settings, which are the flags of commands
link.py         its connections to the servers
coordinator.py  the process from start to end: memory plan, instructions, passes, output
"""
