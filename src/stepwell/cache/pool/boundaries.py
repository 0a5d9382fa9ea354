"""Which boundaries are kept: where a later request will want to go on.

Owns: the choice of positions. Must not know: frames, indexes. A window group needs its last pages there, a
state group a state taken exactly there.

Kept are: the deepest boundary that the same prompt could reuse again, the last few of the prompt (a
follow-up begins with all of it, or parts near its end), the last few of the answer, and the place where the
prompt parts from what is known: whoever shares a system prompt parts there too. Without the first of these,
a follow-up that is shorter than `replay_tokens` would find nothing.

Source: states at chosen boundaries of a prompt, and where requests part, are SGLang's and vLLM's caches for
recurrent models (2025).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Boundaries:
    """Where boundaries can be, and how many are kept.

    Attributes:
        grid: tokens from one possible boundary to the next.
        count: how many of the last boundaries of a prompt, and of an answer.
        replay_tokens: at the end of a prompt, always computed again.
    """

    grid: int
    count: int
    replay_tokens: int

    def of_prompt(self, tokens: int, cached: int, parted: int) -> tuple[int, ...]:
        """Boundaries of a prompt to keep.

        Args:
            tokens: length of the prompt.
            cached: tokens that it reuses; only what is beyond can be kept.
            parted: tokens after which it leaves what is known, or 0.

        Returns:
            Positions, ascending, multiples of `grid`, in `(cached, tokens]`.
        """
        wanted = {self._at(tokens) - step * self.grid for step in range(self.count)}
        wanted.add(self._at(max(0, tokens - self.replay_tokens)))
        wanted.add(self._at(parted))
        return tuple(sorted(position for position in wanted if position > cached))

    def of_answer(self, before: int, after: int) -> int | None:
        """The last boundary in `(before, after]`, if there is one."""
        position = self._at(after)
        return position if position > before else None

    def _at(self, tokens: int) -> int:
        return tokens // self.grid * self.grid
