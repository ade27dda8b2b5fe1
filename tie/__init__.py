"""TIE, The Inference Engine: a node that serves language models and keeps nothing of what it served."""

__version__ = "0.1.0"
