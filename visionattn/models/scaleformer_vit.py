"""``scaleformer_vit_*``: kernelized attention with the joint 2-D relative position. Source:
Scaleformer, on a grid.
"""

from visionattn.models.entry_points import LOCAL, PIXEL, family_cfgs, register, register_family

default_cfgs = family_cfgs(
    "scaleformer_vit", pixel="scaleformer_vit_pixel", paper_ids="arXiv:2006.16236"
)
register_family(
    __name__,
    "scaleformer_vit",
    attention="kernelized",
    **LOCAL,
)
_pixel = PIXEL | dict(attention="kernelized")
register(__name__, "scaleformer_vit_pixel", _pixel)
