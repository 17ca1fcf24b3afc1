"""Prints parameters and operations of a forward of every model as a Markdown table, with timm's ViT
for comparison: ``python docs/figures/model_table.py``, half a minute.
"""

import timm
import torch

import visionattn  # noqa: F401  registers the models
from visionattn.cli.tables import markdown
from visionattn.lab.measure import count_flops

FAMILIES = ("scaleformer_vit", "taylorshift_vit", "taylorshift_abs_vit")
MODELS = {f"{family}_{size}": {} for family in FAMILIES for size in "tsbl"}
for size in ("tiny", "small", "base", "large"):
    MODELS[f"vit_{size}_patch16_224"] = {"dynamic_img_size": True}

rows = []
for name, args in MODELS.items():
    with torch.device("meta"):
        model = timm.create_model(name, **args)
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    row = {"model": f"timm {name}" if args else name, "parameters (M)": f"{millions:.1f}"}
    for px in (224, 1024, 4096):
        row[f"GFLOP at {px}"] = f"{count_flops(model, px, px) / 1e9:,.1f}"
    rows.append(row)
print(markdown(rows))
