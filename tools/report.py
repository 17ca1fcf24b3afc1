"""A page about runs, sweeps and memory profiles: ``python tools/report.py checkpoints/digits
checkpoints/sweeps/try``.

One file of HTML that needs no network: results, curves, images with predictions, settings that
differ, head counts, memory. It is ``report.html`` in the first folder unless ``--output`` says
otherwise. Exit codes: 0; 2 for bad input.
"""

from functools import partial

from visionattn.command import leave, run

main = partial(run, "report")

if __name__ == "__main__":
    leave(main())
