"""Runs a Hugging Face decoder for one step over the pool.

Owns: the model's attention setting while it lives, and the choice of lane. Must not know: requests, queues.
Neighbours: `engine` gives it a view and tokens, `attention` and `recurrent` are what the model calls back.

Two lanes: models of attention layers alone run *packed*, the tokens of all requests in one row. Models with
recurrent layers run *unpacked*, one request a row, since a recurrence would run on from one request into
the next without an error; a call then takes requests that compute equally many tokens.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface

from stepwell.base.errors import GeometryError, MisuseError
from stepwell.cache.pool.buffers import KVBuffers
from stepwell.cache.pool.view import KVView
from stepwell.core.geometry import Geometry, Rule
from stepwell.engine import attention
from stepwell.engine.recurrent import StepCache
from stepwell.move.fence import PASSED, Fence
from stepwell.move.lane import recorded

AttentionInterface.register(attention.NAME, attention.packed_attention)


def _give_back(model: Any, implementation: str, training: bool) -> None:
    model.set_attn_implementation(implementation)
    model.train(training)


@dataclass(frozen=True, slots=True)
class Computed:
    """What one call of the model gave.

    Attributes:
        logits: of the tokens that were to be kept; shape [kept, vocabulary], float32.
        states: states after the call, not yet written; None in the packed lane.
    """

    logits: torch.Tensor
    states: StepCache | None

    def save(self) -> None:
        """The step counts: writes the states into the pool."""
        if self.states is not None:
            self.states.save()


class Runner:
    """One model, whose attention goes through the pool until `close`.

    Args:
        model: a causal language model of transformers; until `close` it is in evaluation mode.
        geometry: of the model.
        planes: of the pool.

    Raises:
        MisuseError: the model's attention goes through another runner.
    """

    def __init__(self, model: Any, geometry: Geometry, planes: Sequence[KVBuffers]) -> None:
        before = model.config._attn_implementation
        if before == attention.NAME:
            raise MisuseError("the model belongs to another engine", remedy="close that one first")
        # Also when nobody closes: a model that stays ours for ever could never be used again.
        self._give_back = weakref.finalize(self, _give_back, model, before, model.training)
        self.model = model.eval()
        model.set_attn_implementation(attention.NAME)
        self.packed = all(group.rule is not Rule.STATE for group in geometry.groups)
        self._places = {
            layer: (plane, number)
            for plane, buffers in enumerate(planes)
            for number, layer in enumerate(buffers.layers)
        }
        self._layers = 1 + max(layer for group in geometry.groups for layer in group.layers)
        # The gated norm of Falcon-H1 in transformers mixes the rows of a batch of single tokens.
        self._alone = bool(getattr(model.config, "mamba_rms_norm", False))

    def close(self) -> None:
        """Gives the model back as it was."""
        self._give_back()

    def calls(self, counts: Mapping[str, int]) -> list[dict[str, int]]:
        """Cuts a step into calls of the model; each request is in one of them, in order.

        Args:
            counts: tokens that each request computes.
        """
        if self.packed:
            return [dict(counts)]
        if self._alone:
            return [{name: count} for name, count in counts.items()]
        by_count: dict[int, dict[str, int]] = {}
        for name, count in counts.items():
            by_count.setdefault(count, {})[name] = count
        return list(by_count.values())

    def fence(self) -> Fence:
        """What tells that the device has done everything that was launched so far."""
        return PASSED if self.model.device.type == "cpu" else recorded()

    def run(self, view: KVView, tokens: Sequence[int], keep: Sequence[int]) -> Computed:
        """Computes one call.

        Args:
            view: of the call; its KV buffers are written, its states are not yet.
            tokens: ids of all requests, one after the other; T of them.
            keep: which of the T need logits, ascending.

        Raises:
            GeometryError: a layer did not come through the attention hook, or a state is not where the
                geometry says.
        """
        device = self.model.device
        together = device.type != "cpu"
        plan = attention.StepPlan.of(view, self._places, together=together)
        rows = 1 if self.packed else len(view.batch)
        states = None if self.packed else StepCache(self._layers, view.states)
        ids = torch.tensor(tokens, device=device).reshape(rows, -1)
        columns = sorted({index % ids.shape[1] for index in keep})
        with torch.inference_mode():
            logits = self.model(
                input_ids=ids,
                position_ids=view.positions.reshape(rows, -1),
                past_key_values=states,
                use_cache=False,
                logits_to_keep=torch.tensor(columns, dtype=torch.int64, device=device),
                step=plan,
            ).logits
        expected = set(self._places)
        if plan.layers_seen != expected:
            missing = sorted(expected - plan.layers_seen)
            raise GeometryError(
                f"layers {missing} did not come through the attention hook",
                remedy="use a model whose layers all go through transformers' AttentionInterface",
            )
        if states is not None:
            states.check()
        place = {column: number for number, column in enumerate(columns)}
        kept = [
            index // ids.shape[1] * len(columns) + place[index % ids.shape[1]] for index in keep
        ]
        return Computed(logits.flatten(0, 1)[kept].float(), states)
