"""Run the head-count ablation: one training configuration with several head counts, attentions,
forms, seeds and image sizes.
"""
