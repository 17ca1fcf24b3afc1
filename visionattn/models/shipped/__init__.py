"""Models whose weights come with the package, under their own names:
``timm.create_model("scaleformer_vit_digits", pretrained=True)`` needs no network.

Each file in this folder is the ``best.safetensors`` of a run, named after its model. It holds
everything that is registered here: architecture, classes and images. To ship another model, copy
its file here as ``FAMILY_TASK.safetensors``. ``docs/pretrained.md`` describes each model.
"""

from pathlib import Path

from timm.layers import to_2tuple
from timm.models import generate_default_cfgs

from visionattn.models import scaleformer_vit, taylorshift_vit  # noqa: F401  files name those
from visionattn.models.entry_points import images_cfg, model_cfg, register
from visionattn.models.weights import described, read_metadata

FILES = {path.stem: path for path in sorted(Path(__file__).parent.glob("*.safetensors"))}
"""The file of weights for each name."""
_KNOWN = {name: described(read_metadata(path), path) for name, path in FILES.items()}

default_cfgs = generate_default_cfgs(
    {
        name: model_cfg(
            file=str(FILES[name]), **images_cfg(spec, to_2tuple(args.get("patch_size", 16)))
        )
        for name, (_, args, spec) in _KNOWN.items()
    }
)

for _name, (_, _args, _) in _KNOWN.items():
    register(__name__, _name, _args)
