"""What nvcc made of the kernels: scripts/sass_report.py is the program, these are its parts.

build.py      compiles kernels/*.cu to cubins and disassembles them, with a cache
listing.py    the texts of cuobjdump and ptxas → kernels and instructions
loops.py      instructions → basic blocks, natural loops, and the path that an iteration takes
pressure.py   the path of a loop → cycles on each pipe of a multiprocessor, and the limit that follows
rules.py      what must hold for every kernel, and the exemptions
document.py   docs/machine-code.md, and its comparison with the committed one
"""
