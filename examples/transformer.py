"""A small transformer that guesses the next character: the model that model_parallel.py splits."""

from __future__ import annotations

import torch
from char_lm import CHARACTERS, LENGTH
from torch import nn
from torch.nn import functional

WIDTH, HEADS, BLOCKS = 64, 4, 4


class Transformer(nn.Module):
    """Scores of the next character after each of some characters; a stage of that if layers are removed."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CHARACTERS, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH - 1, WIDTH) / 10)
        # Blocks are named by numbers: a stage has the names of the whole model.
        self.blocks = nn.ModuleDict({str(number): Block() for number in range(BLOCKS)})
        self.norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, CHARACTERS)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """(examples, characters) to (examples, characters, CHARACTERS); a stage begins or ends with states."""
        if self.embedding is not None:
            states = self.embedding(states) + self.positions
        for block in self.blocks.values():
            states = block(states)
        return states if self.output is None else self.output(self.norm(states))


class Block(nn.Module):
    """Attention to the characters so far, then two dense layers; each adds to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.dense_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.join = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        normed = self.attention_norm(states)
        # -1: as many heads as this process has.
        heads = [
            layer(normed).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        ]
        attended = functional.scaled_dot_product_attention(*heads, is_causal=True)
        states = states + self.join(attended.transpose(1, 2).flatten(2))
        return states + self.down(functional.gelu(self.up(self.dense_norm(states))))
