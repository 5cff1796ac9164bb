"""Captions of the mini world as tokens, without any download: every word is a fixed random vector.

The mini transformer has the text cross-attention of the real one; this encoder gives it something true to read (the
colours of the room) at no cost. The vector of a word depends on the word alone, so no vocabulary file is needed.
"""

import hashlib
import re
from functools import lru_cache

import numpy as np
import torch

TOKENS = 16
TEXT_DIM = 32


@lru_cache(maxsize=4096)
def _word_vector(word: str) -> np.ndarray:
    seed = int.from_bytes(hashlib.sha256(word.encode()).digest()[:8], "little")
    return np.random.default_rng(seed).standard_normal(TEXT_DIM).astype(np.float32)


def encode_caption(caption: str) -> torch.Tensor:
    """Return the caption's tokens, float32 [16, 32]; shorter captions are padded with zeros, longer ones cut."""
    words = re.findall(r"[a-z0-9]+", caption.lower())[:TOKENS]
    tokens = np.zeros((TOKENS, TEXT_DIM), np.float32)
    for position, word in enumerate(words):
        tokens[position] = _word_vector(word)
    return torch.from_numpy(tokens)
