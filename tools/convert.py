"""Convert a timm ViT to a model of visionattn: ``python tools/convert.py vit_small_patch16_224
--softmax-blocks 9 11 --output FILE``.

Exit codes: 0; 2 for bad input.
"""

from functools import partial

from visionattn.command import leave, run

main = partial(run, "convert")

if __name__ == "__main__":
    leave(main())
