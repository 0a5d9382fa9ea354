"""Runs a Hugging Face decoder for one step over the pool.

Owns: the model's attention setting while it lives. Must not know: requests, queues. Neighbours: `engine`
gives it a view and tokens, `attention` is what the model calls back.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AttentionInterface

from stepwell.base.errors import GeometryError, MisuseError
from stepwell.cache.pool.view import KVView
from stepwell.engine import attention

AttentionInterface.register(attention.NAME, attention.packed_attention)


def _give_back(model: Any, implementation: str, training: bool) -> None:
    model.set_attn_implementation(implementation)
    model.train(training)


class Runner:
    """One model, whose attention goes through the pool until `close`.

    Args:
        model: a causal language model of transformers; until `close` it is in evaluation mode.

    Raises:
        MisuseError: the model's attention goes through another runner.
    """

    def __init__(self, model: Any) -> None:
        before = model.config._attn_implementation
        if before == attention.NAME:
            raise MisuseError("the model belongs to another engine", remedy="close that one first")
        # Also when nobody closes: a model that stays ours for ever could never be used again.
        self._give_back = weakref.finalize(self, _give_back, model, before, model.training)
        self.model = model.eval()
        model.set_attn_implementation(attention.NAME)

    def close(self) -> None:
        """Gives the model back as it was."""
        self._give_back()

    def run(self, view: KVView, tokens: Sequence[int], keep: Sequence[int]) -> torch.Tensor:
        """Computes one step.

        Args:
            view: of the step; its buffers are written.
            tokens: ids of all requests, one after the other; T of them.
            keep: which of the T need logits.

        Returns:
            Shape [len(keep), vocabulary], float32.

        Raises:
            GeometryError: a layer did not come through the attention hook.
        """
        plan = attention.StepPlan.of(view)
        device = self.model.device
        with torch.inference_mode():
            logits = self.model(
                input_ids=torch.tensor([tokens], device=device),
                position_ids=view.positions[None],
                use_cache=False,
                logits_to_keep=torch.tensor(keep, dtype=torch.int64, device=device),
                step=plan,
            ).logits[0]
        expected = set(view.buffers[0].group.layers)
        if plan.layers_seen != expected:
            missing = sorted(expected - plan.layers_seen)
            raise GeometryError(
                f"layers {missing} did not come through the attention hook",
                remedy="use a model whose layers all go through transformers' AttentionInterface",
            )
        return logits.float()
