"""Modules with parameters, built from the operations."""

from visionattn.layers.attention import Attention
from visionattn.layers.block import Block
from visionattn.layers.position import RelativeTables

__all__ = ["Attention", "Block", "RelativeTables"]
