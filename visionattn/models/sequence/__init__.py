"""One image on several processes: each computes the tokens of some rows of patches.

``parallelize`` makes a model of this package take part in it; ``traffic.py`` counts what is sent.
"""

from visionattn.models.sequence.model import RowParallel, parallelize

__all__ = ["RowParallel", "parallelize"]
