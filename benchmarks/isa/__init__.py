"""Compiled AMD kernels without an AMD GPU: compile, count, model, report."""
