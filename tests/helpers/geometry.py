"""Geometries as tests write them."""

from visionattn.data.geometry import Fit, Geometry


def square(px: int, fit: Fit = "crop") -> Geometry:
    """Images of ``px`` x ``px`` pixels."""
    return Geometry(fit, (px, px))
