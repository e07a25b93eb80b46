"""The memory plan: the peak of GPU memory of a training step, from a model's config.json and the settings alone.

`architecture`, `states`, `activations`, `moments`, `plan` and `gpus` need the standard library only, and take sections
as whatever has their attributes. No weights are read. All sizes are bytes. The formulas, their sources and what they
were checked against: docs/performance.md.
"""
