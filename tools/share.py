"""A checkpoint as timm and transformers load it: ``python tools/share.py
checkpoints/digits/best.safetensors --to FOLDER``, or ``--to hf-hub:ORG/NAME`` to upload it.

The folder is new, and there whole or not at all. Exit codes: 0; 2 for bad input, and where the hub
refuses; 130 for Ctrl-C.
"""

from functools import partial

from visionattn.command import leave, run

main = partial(run, "share")

if __name__ == "__main__":
    leave(main())
