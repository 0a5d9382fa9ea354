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


def prompt_boundaries(
    tokens: int, cached: int, parted: int, grid: int, last: tuple[int, int]
) -> tuple[int, ...]:
    """Boundaries of a prompt to keep.

    Args:
        tokens: length of the prompt.
        cached: tokens that it reuses; only what is beyond can be kept.
        parted: tokens after which it leaves what is known, or 0.
        grid: tokens from one possible boundary to the next.
        last: how many of the last boundaries, and tokens that are always computed again.

    Returns:
        Positions, ascending, multiples of `grid`, in `(cached, tokens]`.
    """
    count, replay_tokens = last
    end = tokens // grid * grid
    wanted = {end - step * grid for step in range(count)}
    wanted.add(max(0, tokens - replay_tokens) // grid * grid)
    wanted.add(parted // grid * grid)
    return tuple(sorted(position for position in wanted if position > cached))


def answer_boundary(before: int, after: int, grid: int) -> int | None:
    """The last boundary in `(before, after]`, if there is one."""
    position = after // grid * grid
    return position if position > before else None
