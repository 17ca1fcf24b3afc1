"""Features of images by any model: ``python tools/extract_features.py --checkpoint PATH --images
FOLDER --output FOLDER``.

One vector per image, or with ``--dense`` one map, as safetensors with an index of paths;
``--probe`` fits a linear probe and kNN on a labelled folder, and with ``--dense`` a linear probe of
patches against the masks of drawn images. The same command resumes a killed run.
Exit codes: 0; 2 for bad input; 3 where no image fits into memory; 4 where a process that reads
images ended; 130 for Ctrl-C.
"""

from functools import partial

from visionattn.command import leave, run

main = partial(run, "features")

if __name__ == "__main__":
    leave(main())
