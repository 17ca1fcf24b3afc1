"""TaylorShift: attention with the exponential of softmax replaced by its second-order Taylor
polynomial. Source: Nauen, Palacio, Dengel 2024.
"""
