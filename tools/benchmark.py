"""Measure time and memory of operations and models: ``python tools/benchmark.py operations
kernelized sdpa --tokens 1024 4096``.

Other commands: ``models``; ``targets`` (performance targets and the values on this machine);
``papers`` (figures of the papers); ``loader`` (the data pipeline without a model); ``gpu`` (kernels
and models on a GPU). ``COMMAND --help`` lists the options. Each case is checked against its
definition before it is timed, and cases that are compared are timed in one interleaved run. Exit
codes: 0; 2 for bad input, and for ``gpu`` without a GPU; 4 if rows of ``gpu`` are wrong or failed;
130 for Ctrl-C.
"""

from functools import partial

from visionattn.command import leave, run

main = partial(run, "benchmark")

if __name__ == "__main__":
    leave(main())
