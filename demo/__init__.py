"""The demo model: a small Llama that remembers what it is told, and the scripts that make it.

``MODEL_DIR`` is the folder with the weights, the tokenizer and the model card. Importing this package
does not import torch.
"""

from pathlib import Path

MODEL_DIR = Path(__file__).parent / "model"

__all__ = ["MODEL_DIR"]
