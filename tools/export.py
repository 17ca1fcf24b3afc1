"""A model as a file that runs elsewhere: ``python tools/export.py
checkpoints/digits/best.safetensors --format onnx --output digits.onnx``.

Exit codes: 0; 2 for bad input, for what cannot be exported, and where the file does not give what
the model gives.
"""

from functools import partial

from visionattn.command import leave, run

main = partial(run, "export")

if __name__ == "__main__":
    leave(main())
