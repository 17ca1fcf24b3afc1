"""Train and measure a configuration over head counts: ``python tools/sweep_heads.py --base
configs/digits.yaml --heads 2 4 8``.

Other axes are attentions, forms, seeds and image sizes. The same command resumes an earlier sweep.
Exit codes: 0; 2 for bad input, and if every training failed; 3 if ``--jobs`` parallel trainings do
not fit into memory; 4 if some failed, after the table; 130 for Ctrl-C.
"""

from functools import partial

from visionattn.command import leave, run

main = partial(run, "sweep")

if __name__ == "__main__":
    leave(main())
