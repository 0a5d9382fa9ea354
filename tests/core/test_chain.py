"""Content keys: the same everywhere, different for whatever differs, and hashed only when asked for."""

import hashlib
import hmac
import itertools
import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.base.errors import InputError
from stepwell.core.chain import MAX_TOKEN, Chain, Extra, as_tokens
from stepwell.core.key import Digest, Namespace

GOLDEN = json.loads((Path(__file__).parent / "golden_keys.json").read_text())
PLAIN = Namespace(4, model="m")

token_lists = st.lists(st.integers(0, MAX_TOKEN) | st.integers(0, 3), max_size=20)
extra_lists = st.lists(
    st.builds(
        Extra,
        start=st.integers(0, 20),
        count=st.integers(1, 12),
        kind=st.sampled_from(["media", "tenant"]),
        digest=st.binary(max_size=4),
    ),
    max_size=3,
)


class Counted(Chain):
    """Counts how many pages were hashed."""

    __slots__ = ()
    calls = 0

    @staticmethod
    def _hash(data):
        Counted.calls += 1
        return hashlib.sha256(data)


@pytest.fixture
def hashed():
    Counted.calls = 0
    return lambda: Counted.calls


def u64(number):
    return number.to_bytes(8, "little")


def sized(value):
    return u64(len(value)) + value


def written(name, value):
    """A field as docs and golden vectors have it, without our own code."""
    head = sized(name.encode())
    if value is None:
        return head + b"-"
    if isinstance(value, int):
        return head + b"i" + u64(value)
    if isinstance(value, str):
        return head + b"s" + sized(value.encode())
    rows = [sized(k.encode()) + sized(v.encode()) for k, v in value]
    return head + b"m" + u64(len(rows)) + sized(b"".join(rows))


def plain_keys(fields, tokens, extras=(), secret=None):
    """The keys of a prompt with nothing but hashlib: what another implementation would write."""
    message = b"stepwell key" + written("format", 1)
    for name in (
        "model",
        "revision",
        "adapter",
        "facts",
        "page_tokens",
        "tenant",
        "epoch",
        "process",
    ):
        value = fields.get(name, {"facts": (), "epoch": 0}.get(name))
        message += written(name, value)
    if secret is None:
        key = hashlib.sha256(message).digest()
    else:
        key = hmac.digest(secret, message, "sha256")
    root, keys = key, []
    size = fields["page_tokens"]
    for begin in range(0, len(tokens) - size + 1, size):
        data = key + b"".join(int(t).to_bytes(4, "little") for t in tokens[begin : begin + size])
        for start, count, kind, digest in sorted(extras):
            if start < begin + size and start + count > begin:
                where = (start - begin).to_bytes(8, "little", signed=True)
                data += where + u64(count) + sized(kind.encode()) + sized(digest)
        key = hashlib.sha256(data).digest()
        keys.append(key)
    return root, keys


def extras_of(case):
    return [(start, count, kind, bytes.fromhex(d)) for start, count, kind, d in case["extras"]]


def chain_of(case):
    fields = dict(case["namespace"])
    fields["facts"] = tuple(map(tuple, fields.get("facts", ())))
    secret = bytes.fromhex(case["secret"]) if case["secret"] else None
    extras = [Extra(*extra) for extra in extras_of(case)]
    return Chain(Namespace(**fields), case["tokens"], extras, secret)


@pytest.mark.parametrize("case", GOLDEN, ids=[case["name"] for case in GOLDEN])
def test_golden_keys_hold(case):
    """If this fails on purpose, raise FORMAT_VERSION and make new vectors."""
    chain = chain_of(case)
    assert [key.hex() for key in chain.keys(0, chain.pages)] == case["keys"]


@pytest.mark.parametrize("case", GOLDEN, ids=[case["name"] for case in GOLDEN])
def test_golden_keys_are_what_plain_hashlib_gives(case):
    """Without this a vector could hold a mistake that was copied out of the code."""
    secret = bytes.fromhex(case["secret"]) if case["secret"] else None
    root, keys = plain_keys(case["namespace"], case["tokens"], extras_of(case), secret)
    assert (root.hex(), [key.hex() for key in keys]) == (case["root"], case["keys"])


def test_golden_prompts_have_different_keys_wherever_something_differs():
    last = [case["keys"][-1] for case in GOLDEN]
    assert len(set(last)) == len(GOLDEN) >= 14
    assert all(len(set(case["keys"])) == len(case["keys"]) for case in GOLDEN)


@given(token_lists, extra_lists, st.integers(1, 5), st.none() | st.binary(max_size=3))
def test_keys_are_what_plain_hashlib_gives(tokens, extras, page_tokens, secret):
    fields = {"page_tokens": page_tokens, "model": "m", "tenant": "t", "facts": (("a", "b"),)}
    chain = Chain(Namespace(**fields), tokens, extras, secret)
    simple = [(extra.start, extra.count, extra.kind, extra.digest) for extra in extras]
    root, keys = plain_keys(fields, tokens, simple, secret)
    assert chain.root == root
    assert chain.keys(0, chain.pages) == keys


SCRIPT = """
from stepwell.core.chain import Chain, Extra
from stepwell.core.key import Namespace
space = Namespace(4, model="m", adapter="lora", tenant="t", facts=(("a", "1"), ("b", "2")))
extras = [Extra(2, 9, "media", bytes(range(32))), Extra(0, 1, "tenant", b"x")]
chain = Chain(space, range(40), extras, b"secret")
print([key.hex() for key in chain.keys(0, 10)])
"""


def test_keys_are_equal_in_every_process():
    """Python's own hash differs from process to process; a key made of it would never be found."""
    runs = [
        subprocess.run(
            [sys.executable, *flags, "-c", SCRIPT],
            env=environment,
            capture_output=True,
            check=True,
            timeout=120,
            text=True,
        ).stdout
        for flags, environment in (
            ((), {"PYTHONHASHSEED": "1"}),
            ((), {"PYTHONHASHSEED": "2"}),
            (("-R",), {}),
        )
    ]
    fields = {
        "page_tokens": 4,
        "model": "m",
        "adapter": "lora",
        "tenant": "t",
        "facts": (("a", "1"), ("b", "2")),
    }
    extras = [(2, 9, "media", bytes(range(32))), (0, 1, "tenant", b"x")]
    _, keys = plain_keys(fields, range(40), extras, b"secret")
    assert runs == [f"{[key.hex() for key in keys]}\n"] * 3


def test_every_token_changes_the_key_of_its_page_and_of_all_after():
    tokens = list(range(12))
    before = Chain(PLAIN, tokens).keys(0, 3)
    for place in range(12):
        changed = tokens.copy()
        changed[place] = 999
        after = Chain(PLAIN, changed).keys(0, 3)
        page = place // 4
        assert after[:page] == before[:page]
        assert all(a != b for a, b in zip(after[page:], before[page:], strict=True))


def test_the_order_of_tokens_changes_the_key():
    assert Chain(PLAIN, [1, 2, 3, 4]).key(0) != Chain(PLAIN, [1, 2, 4, 3]).key(0)


@pytest.mark.parametrize("bit", range(32))
def test_no_bit_of_a_token_is_ignored(bit):
    assert Chain(PLAIN, [0, 0, 0, 1 << bit]).key(0) != Chain(PLAIN, [0, 0, 0, 0]).key(0)


def test_a_key_depends_on_all_pages_before():
    a, b = [1, 2, 3, 4], [5, 6, 7, 8]
    ab, ba = Chain(PLAIN, a + b), Chain(PLAIN, b + a)
    assert len({*ab.keys(0, 2), *ba.keys(0, 2)}) == 4
    assert Chain(PLAIN, a + a).key(0) != Chain(PLAIN, a + a).key(1)


@pytest.mark.parametrize("page_tokens", [1, 2])
def test_pages_that_a_weak_hash_takes_for_one_another_differ(page_tokens):
    """31 * h + t gives pages (1, 0) and (0, 31) one key; sums and xors confuse orders."""
    space = Namespace(page_tokens, model="m")
    prompts = [(1, 0), (0, 31), (0, 1), (31, 0), (0, 0), (1, 1), (2, 0), (0, 2)]
    last = [Chain(space, prompt).key(2 // page_tokens - 1) for prompt in prompts]
    assert len(set(last)) == len(prompts)


def test_the_namespace_and_the_secret_change_every_key():
    tokens = range(8)
    spaces = [PLAIN, Namespace(4, model="n"), Namespace(4, model="m", tenant="t")]
    keys = [key for space in spaces for key in Chain(space, tokens).keys(0, 2)]
    keys += Chain(PLAIN, tokens, secret=b"s").keys(0, 2)
    keys += Chain(PLAIN, tokens, secret=b"").keys(0, 2)
    assert len(set(keys)) == 10


def test_page_tokens_change_the_key_of_equal_pages():
    one, two = Namespace(2, model="m"), Namespace(4, model="m")
    assert Chain(one, [1, 2, 3, 4]).key(1) != Chain(two, [1, 2, 3, 4]).key(0)


@pytest.mark.parametrize(
    "other",
    [
        Extra(1, 2, "tenant", b"d"),
        Extra(1, 2, "media", b"e"),
        Extra(1, 3, "media", b"d"),
        Extra(2, 2, "media", b"d"),
        Extra(1, 2, "mediad", b""),
        Extra(1, 2, "", b"mediad"),
    ],
    ids=str,
)
def test_whatever_differs_in_an_extra_changes_the_key(other):
    tokens = range(4)
    keys = {
        Chain(PLAIN, tokens, extras).key(0)
        for extras in ([Extra(1, 2, "media", b"d")], [other], [], [other, other])
    }
    assert len(keys) == 4


def test_an_extra_changes_its_pages_and_all_after_but_none_before():
    tokens = range(16)
    before = Chain(PLAIN, tokens).keys(0, 4)
    after = Chain(PLAIN, tokens, [Extra(4, 4, "media", b"d")]).keys(0, 4)
    assert after[0] == before[0]
    assert all(a != b for a, b in zip(after[1:], before[1:], strict=True))


@pytest.mark.parametrize(
    ("start", "count", "pages"),
    [
        (0, 1, [0]),
        (3, 1, [0]),
        (3, 2, [0, 1]),
        (4, 4, [1]),
        (2, 9, [0, 1, 2]),
        (12, 9, [3]),
        (16, 1, []),
    ],
)
def test_an_extra_touches_exactly_the_pages_of_its_tokens(start, count, pages):
    chain = Chain(PLAIN, range(16), [Extra(start, count, "media", b"d")])
    assert [page for page in range(4) if chain.extras_of(page)] == pages
    assert chain.extra_pages(0, 4) == pages
    assert chain.extra_pages(1, 3) == [page for page in pages if 1 <= page < 3]


def test_an_extra_before_its_page_is_told_from_one_on_it():
    """The second page sees the same image at another place of it."""
    keys = {
        Chain(PLAIN, [7] * 8, [Extra(start, 6, "media", b"d")]).extras_of(1) for start in range(3)
    }
    assert len(keys) == 3


@given(token_lists, extra_lists, st.randoms(use_true_random=False))
def test_the_order_in_which_extras_are_given_does_not_matter(tokens, extras, rng):
    shuffled = extras.copy()
    rng.shuffle(shuffled)
    one, other = Chain(PLAIN, tokens, extras), Chain(PLAIN, tokens, shuffled)
    assert one.keys(0, one.pages) == other.keys(0, other.pages)


@pytest.mark.parametrize("dtype", ["int64", "uint32", "<u4", ">u4", ">i8", "uint64", "int32"])
def test_the_form_of_the_input_does_not_matter(dtype):
    tokens = [0, 1, 70_000, 2**31 - 1] * 2
    expected = Chain(PLAIN, tokens).keys(0, 2)
    array = np.array(tokens, np.int64).astype(dtype)
    assert Chain(PLAIN, array).keys(0, 2) == expected
    strided = np.repeat(array, 2)[::2]
    assert not strided.flags.c_contiguous
    assert Chain(PLAIN, strided).keys(0, 2) == expected


@pytest.mark.parametrize("form", [tuple, iter, lambda ids: (one for one in ids), list])
def test_any_iterable_of_ids_will_do(form):
    assert Chain(PLAIN, form(range(4))).key(0) == Chain(PLAIN, np.arange(4)).key(0)


@given(token_lists, st.lists(st.integers(0, 20), max_size=4), st.booleans())
def test_appending_in_pieces_gives_the_keys_of_the_whole(tokens, cuts, ask_between):
    bounds = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    chain = Chain(PLAIN)
    for begin, end in itertools.pairwise(bounds):
        chain.append(tokens[begin:end])
        if ask_between:
            chain.keys(0, chain.pages)
    whole = Chain(PLAIN, tokens)
    assert len(chain) == len(tokens)
    assert chain.tokens.tolist() == tokens
    assert chain.keys(0, chain.pages) == whole.keys(0, whole.pages)
    assert chain.page_rows(0, chain.pages).tolist() == whole.page_rows(0, whole.pages).tolist()


def test_extras_reach_tokens_that_are_appended_later():
    extras = [Extra(5, 6, "media", b"d")]
    chain = Chain(PLAIN, range(6), extras)
    chain.key(0)
    chain.append(range(6, 12))
    assert chain.keys(0, 3) == Chain(PLAIN, range(12), extras).keys(0, 3)


def test_pages_are_rows_of_tokens():
    chain = Chain(PLAIN, range(14))
    assert (len(chain), chain.pages) == (14, 3)
    assert chain.page_rows(1, 3).tolist() == [[4, 5, 6, 7], [8, 9, 10, 11]]
    assert chain.page_rows(2, 2).shape == (0, 4)


@given(st.integers(0, 30))
def test_only_full_pages_count(count):
    assert Chain(PLAIN, range(count)).pages == count // 4


def test_a_chain_keeps_no_view_of_its_callers_tokens():
    array = np.arange(4, dtype=np.uint32)
    chain = Chain(PLAIN, array)
    array[0] = 9
    assert chain.tokens.tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        chain.tokens[0] = 9


def test_the_first_key_costs_one_hash(hashed):
    """A prompt whose first page is unknown must not be hashed whole."""
    chain = Counted(PLAIN, range(4000))
    chain.key(0)
    assert hashed() == 1
    chain.key(0)
    assert hashed() == 1
    chain.key(2)
    assert hashed() == 3
    chain.keys(1, 6)
    assert hashed() == 6
    chain.append(range(8))
    chain.keys(0, 6)
    assert hashed() == 6


def test_keys_with_extras_are_lazy_too(hashed):
    chain = Counted(PLAIN, range(400), [Extra(0, 300, "media", b"d")])
    chain.key(1)
    assert hashed() == 2


def test_making_a_chain_hashes_no_page(hashed):
    Counted(PLAIN, range(400)).fork()
    assert hashed() == 0


def test_a_fork_keeps_the_keys_found_so_far(hashed):
    chain = Counted(PLAIN, range(40))
    expected = chain.keys(0, 5)
    twin = chain.fork()
    assert type(twin) is Counted
    assert twin.keys(0, 5) == expected
    assert hashed() == 5
    assert twin.keys(5, 10) == chain.keys(5, 10)


@given(token_lists, token_lists, token_lists, extra_lists)
def test_a_fork_goes_its_own_way(tokens, mine, its, extras):
    chain = Chain(PLAIN, tokens, extras)
    chain.keys(0, chain.pages)
    twin = chain.fork()
    chain.append(mine)
    twin.append(its)
    chain.append(its)
    for one, expected in ((chain, tokens + mine + its), (twin, tokens + its)):
        fresh = Chain(PLAIN, expected, extras)
        assert one.tokens.tolist() == expected
        assert one.keys(0, one.pages) == fresh.keys(0, fresh.pages)


def test_keys_found_after_a_fork_are_not_shared():
    """A chain that has grown has room at its end, which a fork must not share."""
    chain = Chain(PLAIN, [1, 2])
    chain.append([3])
    assert len(chain._data) > 3
    twin = chain.fork()
    chain.append([4])
    twin.append([5])
    assert chain.key(0) == Chain(PLAIN, [1, 2, 3, 4]).key(0)
    assert twin.key(0) == Chain(PLAIN, [1, 2, 3, 5]).key(0)


@pytest.mark.parametrize("page", [2, 3, 100])
def test_the_key_of_a_page_that_is_not_full_is_refused(page):
    chain = Chain(PLAIN, range(11))
    with pytest.raises(InputError, match=f"page {page}"):
        chain.key(page)
    with pytest.raises(InputError, match=f"page {page}"):
        chain.keys(0, page + 1)
    assert len(chain.keys(0, 2)) == 2


def test_a_page_before_the_first_is_refused():
    """Python's negative indexes would give the last key that happens to be known."""
    chain = Chain(PLAIN, range(8))
    with pytest.raises(InputError, match="-1"):
        chain.key(-1)
    chain.keys(0, 2)
    with pytest.raises(InputError, match="-1"):
        chain.key(-1)


def test_an_unknown_adapter_gives_tokens_but_no_keys():
    chain = Chain(Namespace(4, model="m", adapter=Digest.UNKNOWN), range(8))
    chain.append([8])
    assert chain.tokens.tolist() == list(range(9))
    assert chain.pages == 2
    for one in (chain, chain.fork()):
        with pytest.raises(InputError, match="adapter_unknown"):
            one.key(0)


@pytest.mark.parametrize(
    ("tokens", "named"),
    [
        ([1, 2, -1], "-1"),
        ([1, 2**32], str(2**32)),
        ([2**70], str(2**70)),
        ([5, -(2**70)], str(-(2**70))),
        ([2**63], str(2**63)),
        (np.array([3, -7], np.int64), "-7"),
        (np.array([2**63], np.uint64), str(2**63)),
    ],
)
def test_a_token_out_of_range_is_refused_by_value_and_place(tokens, named):
    chain = Chain(PLAIN, range(4))
    for call in (as_tokens, lambda ids: Chain(PLAIN, ids), chain.append):
        with pytest.raises(InputError) as caught:
            call(tokens)
        assert f"token {len(tokens) - 1} is {named};" in str(caught.value)
    assert len(chain) == 4


@pytest.mark.parametrize(
    "tokens",
    [
        [1.0, 2.0],
        [1, 2.5],
        ["1", "2"],
        "12",
        [[1, 2], [3, 4]],
        [[1], [2, 3]],
        [True, False],
        [None],
        [1, None],
        [1, "a"],
        np.zeros(3, np.float32),
        np.zeros(3, np.bool_),
        np.zeros((2, 2), np.int64),
        np.zeros((0, 4), np.int64),
        np.int64(5),
        np.array(["a"]),
        np.array([1, 2.5], object),
        np.array([True], object),
    ],
    ids=repr,
)
def test_what_is_no_flat_list_of_integers_is_refused(tokens):
    with pytest.raises(InputError, match="tokens"):
        as_tokens(tokens)


@pytest.mark.parametrize("tokens", [[], (), np.empty(0), np.empty(0, np.int64), iter([])])
def test_no_tokens_are_tokens(tokens):
    assert as_tokens(tokens).shape == (0,)
    assert Chain(PLAIN, tokens).pages == 0


def test_the_largest_token_is_taken():
    assert as_tokens([0, MAX_TOKEN]).tolist() == [0, MAX_TOKEN]
    assert as_tokens(np.array([0, MAX_TOKEN], object)).tolist() == [0, MAX_TOKEN]


@pytest.mark.parametrize(("start", "count"), [(-1, 1), (0, 0), (3, -1)])
def test_an_extra_that_covers_nothing_is_refused(start, count):
    with pytest.raises(InputError, match=f"{count} tokens from {start}"):
        Extra(start, count, "media", b"")


def test_random_prompts_have_no_key_in_common_unless_a_prefix():
    rng = random.Random(7)
    seen = {}
    for _ in range(300):
        tokens = [rng.randrange(3) for _ in range(12)]
        for page, key in enumerate(Chain(PLAIN, tokens).keys(0, 3)):
            assert seen.setdefault(key, tokens[: 4 * (page + 1)]) == tokens[: 4 * (page + 1)]


# Digests of another engine


FOREIGN = [b"\x01" * 32, b"\x02" * 32, b"x"]


def foreign_keys(root, digests):
    """What another implementation would write."""
    foreign = hashlib.sha256(b"stepwell foreign key" + root).digest()
    return [hashlib.sha256(foreign + sized(digest)).digest() for digest in digests]


def test_foreign_keys_are_what_plain_hashlib_gives():
    root, _ = plain_keys({"page_tokens": 4, "model": "m"}, [])
    chain = Chain.foreign(PLAIN, FOREIGN)
    assert chain.keys(0, 3) == foreign_keys(root, FOREIGN)
    secret, _ = plain_keys({"page_tokens": 4, "model": "m"}, [], secret=b"s")
    assert Chain.foreign(PLAIN, FOREIGN, b"s").keys(0, 3) == foreign_keys(secret, FOREIGN)


def test_a_golden_vector_holds_foreign_keys():
    """They name what lies on disks of other machines: they change with a format version only."""
    assert [key.hex() for key in Chain.foreign(PLAIN, FOREIGN).keys(0, 3)] == [
        "94bc6d87d1b5956e7f86105a19630ca0d94238fcc708085106685dab90e1c4fd",
        "d4b2c7a243881d68eb3c4f687bd16d223f06b387ef102c2713fc22a2bc173df2",
        "e0e041f4d6da16456f1da3237db53f85dbc9ef0b55beb6912aec2cf3aaaa1a1f",
    ]


def test_no_foreign_key_is_one_of_tokens():
    """Not even where the digests are our own keys, or bytes of tokens."""
    tokens = Chain(PLAIN, range(12))
    own = tokens.keys(0, 3)
    raw = [row.tobytes() for row in tokens.page_rows(0, 3)]
    seen = {tokens.root, *own}
    for digests in (own, raw, [own[0], raw[1]], [tokens.root]):
        chain = Chain.foreign(PLAIN, digests)
        keys = {chain.root, *chain.keys(0, chain.pages)}
        assert len(keys) == len(digests) + 1
        assert not keys & {tokens.root, *own}
        seen |= keys
    assert len(seen) > 4 + 6


def test_digests_cannot_run_into_each_other_or_into_the_root():
    digests = [b"a", b"a\0", b"\0a", b"aa", b"a" * 1024]
    keys = Chain.foreign(PLAIN, digests).keys(0, 5)
    assert len(set(keys)) == 5


def test_the_namespace_and_the_secret_change_every_foreign_key():
    spaces = [
        PLAIN,
        Namespace(4, model="n"),
        Namespace(4, model="m", tenant="t"),
        Namespace(8, model="m"),
    ]
    keys = [key for space in spaces for key in Chain.foreign(space, FOREIGN).keys(0, 3)]
    for secret in (b"", b"s"):
        keys += Chain.foreign(PLAIN, FOREIGN, secret).keys(0, 3)
    assert len(set(keys)) == 3 * 6


def test_one_digest_has_one_key_wherever_it_stands():
    """It covers what is before it, so it says by itself what the page is."""
    assert Chain.foreign(PLAIN, FOREIGN[1:]).keys(0, 2) == Chain.foreign(PLAIN, FOREIGN).keys(1, 3)


def test_nobody_knows_the_tokens_of_a_foreign_chain():
    chain = Chain.foreign(PLAIN, FOREIGN)
    assert (chain.opaque, len(chain), chain.pages) == (True, 12, 3)
    assert not Chain(PLAIN, range(4)).opaque
    assert not chain.page_rows(0, 3).any()
    for call in (lambda: chain.tokens, lambda: chain.append([1]), lambda: chain.append([])):
        with pytest.raises(InputError, match="foreign digests"):
            call()
    assert len(chain) == 12


@pytest.mark.parametrize(
    "digests",
    [
        [b""],
        [b"a", b""],
        [b"a", b"a"],
        [b"a", b"b", b"a"],
        [b"a" * 1025],
        ["a"],
        [None],
        [1],
        [[1]],
        [bytearray(b"a")],
        b"ab",
    ],
    ids=repr,
)
def test_digests_that_are_none_or_come_twice_are_refused(digests):
    with pytest.raises(InputError, match="digests"):
        Chain.foreign(PLAIN, digests)


def test_a_fork_of_a_foreign_chain_goes_its_own_way():
    chain = Chain.foreign(PLAIN, FOREIGN)
    twin = chain.fork()
    assert twin.opaque
    assert twin.keys(0, 3) == chain.keys(0, 3)
    twin.truncate(7)
    assert (twin.pages, twin.keys(0, 1)) == (1, chain.keys(0, 1))
    assert (chain.pages, len(chain.keys(0, 3))) == (3, 3)
    with pytest.raises(InputError, match="page 1"):
        twin.key(1)
    with pytest.raises(InputError, match="foreign digests"):
        twin.append([1])


@pytest.mark.parametrize("tokens", range(13))
def test_a_foreign_chain_that_is_cut_keeps_its_full_pages(tokens):
    chain = Chain.foreign(PLAIN, FOREIGN)
    expected = chain.keys(0, tokens // 4)
    chain.truncate(tokens)
    assert chain.pages == tokens // 4
    assert chain.keys(0, chain.pages) == expected
    with pytest.raises(InputError, match="full pages"):
        chain.key(chain.pages)
    with pytest.raises(InputError, match="-1"):
        chain.key(-1)


def test_no_digests_make_a_chain_without_pages():
    chain = Chain.foreign(PLAIN, [])
    assert (chain.pages, chain.opaque, chain.keys(0, 0)) == (0, True, [])


def test_an_unknown_adapter_gives_no_foreign_keys_either():
    chain = Chain.foreign(Namespace(4, model="m", adapter=Digest.UNKNOWN), FOREIGN)
    assert chain.pages == 3
    for one in (chain, chain.fork()):
        with pytest.raises(InputError, match="adapter_unknown"):
            one.key(0)


# Excerpts; what they answer is in test_excerpt.py


def test_an_excerpt_hashes_no_page_behind_it(hashed):
    chain = Counted(PLAIN, range(400), [Extra(0, 300, "media", b"d")])
    excerpt = chain.excerpt(2, 5)
    assert hashed() == 5
    chain.excerpt(2, 5)
    excerpt.excerpt(3, 4)
    assert hashed() == 5
    assert excerpt.own == tuple(chain.keys(2, 5))


def test_an_excerpt_of_a_chain_without_keys_is_refused():
    with pytest.raises(InputError, match="adapter_unknown"):
        Chain(Namespace(4, model="m", adapter=Digest.UNKNOWN), range(8)).excerpt(0, 1)
