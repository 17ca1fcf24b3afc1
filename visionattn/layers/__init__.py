"""Modules with parameters, built from the operations."""

from visionattn.layers.attention_layer import Attention
from visionattn.layers.block import Block
from visionattn.layers.position_tables import RelativeTables

__all__ = ["Attention", "Block", "RelativeTables"]
