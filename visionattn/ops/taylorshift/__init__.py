"""TaylorShift: softmax attention with its exponential cut off after the square. Source: Nauen,
Palacio, Dengel 2024.
"""
