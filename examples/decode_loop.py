"""An engine in forty lines: three prompts that share a prefix, prompts in pieces, then generation.

The model is the fingerprint model, whose KV proves itself; a real one would read `view` in every layer. The
rules that an engine has to keep are beside the calls.
"""

from __future__ import annotations

from stepwell import Busy, Namespace, PagePool, PoolSettings, Ready
from stepwell.testing.fingerprint import Fingerprint, geometry

PIECE, ANSWER = 5, 4
capacity = 64 * geometry().page_bytes(4)
pool = PagePool(geometry(), PoolSettings(page_tokens=4, capacity_bytes=capacity), device="numpy")
model, space = Fingerprint(), Namespace(page_tokens=4, model="digest-of-the-weights")

shared = list(range(100, 112))
for name, prompt in {"a": [*shared, 1, 2], "b": [*shared, 3], "c": [*shared, 4, 5, 6]}.items():
    answer = pool.open(name, prompt, space)
    # Busy means later, NeverFits means never; both took nothing. There is room enough here.
    assert isinstance(answer, Ready), answer
    tokens, done = list(prompt), answer.cached  # computing begins behind what is cached
    while True:
        # A piece of the prompt, of any size; when it is used up, the token that was generated last.
        piece = tokens[done : done + PIECE]
        view = pool.bind({name: len(piece)})
        following = model.step(view, [piece])[0]
        pool.commit(name, piece)  # the pages that are full now can be reused by anybody
        done += len(piece)
        if done < len(tokens):
            continue
        tokens.append(following)
        if len(tokens) == len(prompt) + ANSWER:
            break  # the KV of the last token is never needed
        if isinstance(pool.extend(name, 1), Busy):
            break  # a real engine closes its youngest request here and opens it again later
    pool.close(name)  # sealed pages stay, until others need their frames
    print(f"{name}: {answer.cached} of {len(prompt)} tokens reused, answer {tokens[len(prompt) :]}")
