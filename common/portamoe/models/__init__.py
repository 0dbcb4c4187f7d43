"""Whole blocks of models, built from the library's pieces."""
