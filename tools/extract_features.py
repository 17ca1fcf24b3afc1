"""Extract features of images with any model: ``python tools/extract_features.py --checkpoint PATH
--images FOLDER --output FOLDER``.

Writes one vector per image, or with ``--dense`` one map, as safetensors with an index of paths.
``--probe`` fits a linear probe and kNN on a labeled folder; with ``--dense`` it fits a linear probe
of patches on generated images with masks. The same command resumes a killed run. Exit codes: 0; 2
for bad input; 3 if no image fits into memory; 4 if a data loader process ended; 130 for Ctrl-C.
"""

from functools import partial

from visionattn.command import leave, run

main = partial(run, "features")

if __name__ == "__main__":
    leave(main())
