"""Write a checkpoint that timm and transformers load: ``python tools/share.py
checkpoints/digits/best.safetensors --to FOLDER``; ``--to hf-hub:ORG/NAME`` uploads it.

FOLDER is new, and written completely or not at all. Exit codes: 0; 2 for bad input, and if the hub
refuses; 130 for Ctrl-C.
"""

from functools import partial

from visionattn.command import leave, run

main = partial(run, "share")

if __name__ == "__main__":
    leave(main())
