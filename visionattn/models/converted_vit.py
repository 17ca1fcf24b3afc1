"""``converted_vit``: a model whose body is that of another ViT. ``from_softmax`` states all of it;
without arguments it is what the class is.
"""

from visionattn.models.registration import one_cfg, register_one

default_cfgs = one_cfg("converted_vit")
register_one(__name__, "converted_vit")
