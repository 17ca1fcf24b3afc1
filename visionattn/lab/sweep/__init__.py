"""The head-count ablation: one training configuration at many head counts, attentions, forms, seeds
and image sizes.
"""
