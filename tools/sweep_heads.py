"""The head-count ablation: ``python tools/sweep_heads.py --base configs/digits.yaml --heads 2 4
8``.

Trains and measures one configuration over head counts, attentions, forms, seeds and image sizes.
The same command goes on where an earlier one ended. Exit codes: 0; 2 for bad input, and where every
cell failed; 4 where some did, after the tables; 130 for Ctrl-C.
"""

from functools import partial

from visionattn.command import leave, run

main = partial(run, "sweep")

if __name__ == "__main__":
    leave(main())
