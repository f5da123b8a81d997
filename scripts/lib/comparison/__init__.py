"""The parts of scripts/compare_pytorch.py.

processes.py  groups of processes with a time limit: all end, whatever happens
measured.py   stands between this Python and a command, to measure the command's memory alone
parts.py      configuration, shared initial weights, the peer's ranks, minillm
checks.py     whether both did the same training
report.py     medians, the table, the JSON document
"""
