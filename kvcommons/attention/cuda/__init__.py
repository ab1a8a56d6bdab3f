"""Partial attention, its merge and what lies between two layers' attention, as Triton kernels for GPUs."""
