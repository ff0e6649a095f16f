"""What is known of a run from outside: servers' answers, their history, and what holds the run back.

answer.py      one server's answers, and what several servers say of a worker
recent.py      the newest steps and waits, worker by worker
verdict.py     the sentence on what holds the run back now
staleness.py   the law (L - 1)/c, and what each policy takes of gradients that old
history.py     answers over time, bounded, as JSON
watch.py       the threads that ask
replay.py      the history of a run from its update log
"""
