"""The model: what a folder says, its weights, slices cut at attention, sampling, tokens and chat.

`weights`, `slices`, `sampling` and `synthetic` import torch; the others do not, for the router needs them.
"""
