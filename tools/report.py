"""Write a page about runs, sweeps and memory profiles: ``python tools/report.py checkpoints/digits
checkpoints/sweeps/try``.

One HTML file that needs no network: results, curves, images with predictions, differing settings,
head counts, memory. The default is ``report.html`` in the first folder. Exit codes: 0; 2 for bad
input.
"""

from functools import partial

from visionattn.command import leave, run

main = partial(run, "report")

if __name__ == "__main__":
    leave(main())
