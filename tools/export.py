"""Export a model for other runtimes: ``python tools/export.py
checkpoints/digits/best.safetensors --format onnx --output digits.onnx``.

Exit codes: 0; 2 for bad input, for a model that cannot be exported, and if the file does not give
the outputs of the model.
"""

from functools import partial

from visionattn.command import leave, run

main = partial(run, "export")

if __name__ == "__main__":
    leave(main())
