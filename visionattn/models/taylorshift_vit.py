"""``taylorshift_vit_*``: TaylorShift with the joint 2-D position; ``taylorshift_abs_vit_*`` and the
pixel model: as published.

The published models have a learned absolute position, a class token and an initial temperature of
1. Source: Nauen, Palacio and Dengel 2024, "TaylorShift".
"""

from visionattn.models.entry_points import LOCAL, PIXEL, family_cfgs, register, register_family

PAPER = "arXiv:2403.02920"
PUBLISHED = dict(
    relative="none",
    pos_embed="learn",
    temperature_init=1.0,
    global_pool="token",
    value_conv=0,
    output_gate=False,
)

default_cfgs = family_cfgs("taylorshift_vit", pixel="taylorshift_vit_pixel", paper_ids=PAPER)
default_cfgs |= family_cfgs("taylorshift_abs_vit", paper_ids=PAPER)

register_family(
    __name__,
    "taylorshift_vit",
    head_dim=32,
    attention="taylorshift",
    **LOCAL,
)
register_family(__name__, "taylorshift_abs_vit", attention="taylorshift", **PUBLISHED)
_pixel = PIXEL | dict(attention="taylorshift") | PUBLISHED
register(__name__, "taylorshift_vit_pixel", _pixel)
