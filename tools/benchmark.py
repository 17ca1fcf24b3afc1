"""Time and memory of operations and models: ``python tools/benchmark.py operations kernelized
sdpa --tokens 1024 4096``.

Other commands: ``models``; ``targets`` prints the figures to reach and what they come to here,
``papers`` redraws a figure of the papers, ``loader`` measures the data pipeline alone, ``gpu``
prints kernels and models on a GPU beside their floors. ``--help`` lists them, ``COMMAND --help``
their options. Every case is checked against its definition before it is timed, and times that are
compared come from one interleaved run. Exit codes: 0; 2 for bad input, and for ``gpu`` without a
GPU; 4 where rows of ``gpu`` are wrong or failed; 130 for Ctrl-C.
"""

from functools import partial

from visionattn.command import leave, run

main = partial(run, "benchmark")

if __name__ == "__main__":
    leave(main())
