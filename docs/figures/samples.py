"""How many generated digits ``scaleformer_vit_digits`` recognizes as the requested class: the table
of ``docs/generation.md``.

    python docs/figures/samples.py checkpoints/digits_generate/best.safetensors 1 0.8 0.5
"""

import sys

import numpy as np

import visionattn

COUNT = 500
checkpoint, *temperatures = sys.argv[1:]
wanted = np.arange(COUNT) % 10  # classes take turns
for temperature in map(float, temperatures):
    found = visionattn.generate(checkpoint, COUNT, temperature=temperature, seed=0)
    images = list(found.images.permute(0, 2, 3, 1).numpy())
    classes = visionattn.predict("scaleformer_vit_digits", images).classes
    share = np.mean([int(names[0]) == label for names, label in zip(classes, wanted, strict=True)])
    error = (share * (1 - share) / COUNT) ** 0.5
    print(f"temperature {temperature:g}: {share:.1%} readable (standard error {error:.1%})")
