"""Tiny models with random weights and a vocabulary of any size, to measure its cost alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from lab.core.files import exists
from lab.models import catalog, synthetic
from lab.models.catalog import Dimensions

MULTIPLE = 32  # weights in a block of Q8_0
STEM = "random-vocabulary-"
SHARPNESS = 5.0
"""Standard deviation of the logits. Those of trained models leave few likely tokens; with 1, as
random weights have it, top-p would keep and sort most of the vocabulary."""

BASE = "llama-3.2-1b"  # of the catalog, for the architecture
WIDTH = 64


def shape(n_vocab: int) -> Dimensions:
    """A layer of the architecture of Llama, as narrow as possible."""
    return dataclasses.replace(
        catalog.entries()[BASE].shape,
        n_layer=1,
        n_embd=WIDTH,
        n_head=2,
        n_head_kv=1,
        head_dim=32,
        n_ff=WIDTH,
        n_vocab=n_vocab,
        n_ctx_train=4096,
        n_rot=None,
        tied_embeddings=True,
    )


def make(folder: Path, n_vocab: int) -> Path:
    """The model's file, written in about a second."""
    path = folder / f"{STEM}{n_vocab}.gguf"
    if not exists(path):
        synthetic.write(shape(n_vocab), "Q8_0", path, sharpness=SHARPNESS)
    return path


def is_random(path: Path) -> bool:
    """Whether a file is one of these."""
    return path.name.startswith(STEM)
