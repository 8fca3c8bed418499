"""Drafts: a request's text is the one that it has without them, and what they leave behind is as if never there."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmla
from jmla import SamplingParams, speculation
from jmla.decoding import BLOCK, Rows, Unread
from jmla.engine import Engine
from jmla.models import init_cache, trunk
from jmla.models.spec import PAGE_TOKENS
from jmla.sampling import DEFAULTS, History, RowParams
from tests.test_engine import (
    alone,
    check_all_back,
    check_tokens_are_those_of_a_request_alone,
    make,
    model,
    prompt,
)

slow = pytest.mark.slow
TAIL = 24  # tokens after which nothing taken back is left anywhere: more than a ring and its room


@slow
@pytest.mark.parametrize(("family", "drafts"), [("v4", 1), ("v4", 3), ("v4", 4), ("v32", 2), ("glm", 3)])
def test_g3_texts_are_those_without_drafts(family, drafts):
    """Greedy and drawn, with preemption and shared prefixes."""
    stats = check_tokens_are_those_of_a_request_alone(family, drafts=drafts)
    assert 0 < stats.accepted_tokens < stats.drafted_tokens


def test_g1_g2_ends_within_a_pass_count_what_is_given_out():
    """Of eight tokens asked for eight come, and a stop list in the middle of a pass ends the text there."""
    engine = make("v4", drafts=3)
    whole = engine.submit(prompt(40), sampling=SamplingParams(max_new_tokens=30, stop=[])).result().token_ids
    for count in (1, 2, 3, 8):
        handle = engine.submit(prompt(40), max_new_tokens=count)
        assert handle.result().token_ids == whole[:count]
        assert handle.accepted_tokens <= handle.drafted_tokens <= 3 * count
    for at in (3, 4, 5, 6, 7):
        ended = engine.submit(prompt(40), max_new_tokens=30, stop=[list(whole[at - 1 : at + 1])]).result()
        assert ended == alone("v4", prompt(40), SamplingParams(max_new_tokens=30, stop=[list(whole[at - 1 : at + 1])]))
        assert ended.finish_reason == "stop"
    made = engine.stats.made_tokens
    assert made == len(whole) + 1 + 2 + 3 + 8 + sum(
        len(alone("v4", prompt(40), SamplingParams(max_new_tokens=30, stop=[list(whole[a - 1 : a + 1])])).token_ids)
        for a in (3, 4, 5, 6, 7)
    )
    check_all_back(engine)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["v4", pytest.param("v32", marks=slow)])
def test_f12_f13_window_pages_stay_few_while_drafts_decode(family):
    """Of a row that decodes over a page's end two at most; all pages are free at the end, also after a cancellation."""
    engine = make(family, drafts=3)
    handles = [
        engine.submit(prompt(length), sampling=SamplingParams(max_new_tokens=90, stop=[])) for length in (200, 400)
    ]
    most = 0
    while engine.busy:
        engine.step()
        most = max([most, *(len(r.windows) for r in engine._running if r is not None)])
        if engine.stats.made_tokens > 60:
            handles[1].cancel()
    assert most <= 2
    assert handles[0].result() == alone(family, prompt(200), SamplingParams(max_new_tokens=90, stop=[]))
    assert len(handles[1].token_ids) < 90
    check_all_back(engine)


@pytest.mark.parametrize("family", ["v4", pytest.param("v32", marks=slow)])
def test_pages_that_drafts_ran_over_are_gone_on_from(family):
    """The end of a page that a pass of drafts has gone past is a resume point with the bits of a cold start."""
    engine = make(family, drafts=3)
    first = engine.submit(prompt(245), sampling=SamplingParams(max_new_tokens=40, stop=[])).result()
    text = np.concatenate([prompt(245), np.asarray(first.token_ids, np.int32)])
    ask = SamplingParams(max_new_tokens=6, logprobs=3)
    engine.submit(prompt(300, fork=0), sampling=ask).result()
    turn = np.concatenate([text[:270], prompt(20, fork=0)])
    handle = engine.submit(turn, sampling=ask)
    assert handle.result() == alone(family, turn, ask)
    assert handle.cached_tokens == PAGE_TOKENS
    check_all_back(engine)


@pytest.mark.slow
def test_debug_checks_find_nothing_at_the_end_of_a_cache():
    engine = make("v32", drafts=5, max_seq_len=64, pages=2)
    with jmla.debug_checks():
        done = engine.submit(prompt(52), sampling=SamplingParams(max_new_tokens=12, stop=[])).result()
    assert done == alone("v32", prompt(52), SamplingParams(max_new_tokens=12, stop=[]))


def test_drafts_are_refused_where_there_is_no_block_and_out_of_range():
    bare = dataclasses.replace(model("v32"), spec=dataclasses.replace(model("v32").spec, drafting=False))
    with pytest.raises(ValueError, match=r"drafts=2 to be 0: the model was loaded without a draft"):
        Engine(bare, drafts=2)
    for wrong in (-1, BLOCK // 2, 1.5, True, None):
        with pytest.raises((ValueError, TypeError), match="drafts="):
            make("v32", drafts=wrong)


# ---- taking back


@functools.cache
def stepped(family):
    """Compiled prefills that look at all tokens."""
    return functools.partial(jmla.prefill, model(family), all_logits=True, return_hidden=True, donate=False)


def future(family, cache, hidden, tokens):
    """Logits of what follows, and all pools and states behind it; the draft block, which had read all tokens but the
    last, with its ``hidden``, reads it too."""
    batch = cache.batch
    np.testing.assert_array_equal(cache.lengths - cache.draft_lengths, 1)
    logits, more, cache = stepped(family)(tokens[:, :TAIL], np.full(batch, TAIL), cache)
    joined = np.concatenate([np.stack([rows[-1:] for rows in hidden]), more], axis=1)
    drafted, _, cache = jmla.draft(model(family), joined, tokens[:, : TAIL + 1], cache, donate=False)
    return np.asarray(logits), np.asarray(drafted), cache


@pytest.mark.parametrize("family", ["v4", pytest.param("v32", marks=slow), pytest.param("glm", marks=slow)])
def test_g4_a_state_after_tokens_were_taken_back_is_that_of_a_serial_run(family):
    """At every phase of the compressors' windows, after none to three of three wrong tokens were right."""
    cases = [(start, right) for start in range(8, 16) for right in range(4)]
    batch, net = len(cases), model(family)
    rng = np.random.default_rng(2)
    text = rng.integers(2, 96, (batch, 64)).astype(np.int32)
    starts, rights = (np.array(x) for x in zip(*cases, strict=True))
    kept = starts + 1 + rights
    given = np.zeros((batch, 20), np.int32)
    for row, (start, right) in enumerate(cases):
        given[row, : start + 4] = text[row, : start + 4]
        given[row, start + 1 + right : start + 4] = (text[row, start + 1 + right : start + 4] - 2 + 7) % 94 + 2

    def run(cache, tokens, begin, count):
        part = np.zeros((batch, 20), np.int32)
        for row in range(batch):
            part[row, : count[row]] = tokens[row, begin[row] : begin[row] + count[row]]
        return stepped(family)(part, count, cache)

    zeros = np.zeros(batch, int)
    serial = init_cache(net, batch, 256, rollback=3)
    _, hidden, serial = run(serial, text, zeros, kept)
    tried = init_cache(net, batch, 256, rollback=3)
    _, first, tried = run(tried, text, zeros, starts)
    _, second, tried = run(tried, given, starts, np.full(batch, 4))
    tried = jmla.rollback(tried, (3 - rights).tolist())
    np.testing.assert_array_equal(tried.lengths, serial.lengths)

    behind = np.zeros((batch, 64), np.int32)
    for row, count in enumerate(kept):
        behind[row, : 64 - count] = text[row, count:]
    states = []
    for cache, rows in (
        (serial, [h[:n] for h, n in zip(np.asarray(hidden), kept, strict=True)]),
        (
            tried,
            [
                np.concatenate([a[:s], b[: 1 + r]])
                for a, b, s, r in zip(np.asarray(first), np.asarray(second), starts, rights, strict=True)
            ],
        ),
    ):
        padded = np.zeros((batch, 20, *rows[0].shape[1:]), np.float32)
        following = np.zeros((batch, 20), np.int32)
        for row, part in enumerate(rows):
            padded[row, : len(part)] = part
            following[row, : len(part)] = text[row, 1 : len(part) + 1]
        _, _, cache = jmla.draft(net, padded, following, cache, lengths=kept - 1, donate=False)
        states.append(future(family, cache, rows, behind))
    (logits, drafted, one), (others, drafted_too, two) = states
    np.testing.assert_array_equal(logits, others)
    np.testing.assert_array_equal(drafted, drafted_too)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        np.testing.assert_array_equal(a, b)


def test_g5_what_is_taken_back_may_be_a_number_a_list_or_an_array():
    for family, room in (("v4", 2), ("v32", 512)):
        net = model(family)
        cache = init_cache(net, 2, 512, rollback=2)
        assert cache.rollback_room == room
        _, cache = jmla.prefill(net, prompt(10).reshape(2, 5), [5, 1], cache)
        for given, lengths in ((1, [4, 0]), ([0, 0], [5, 1]), (np.array([0, 2]), [5, 0]), (jnp.array([2, 1]), [3, 0])):
            np.testing.assert_array_equal(jmla.rollback(cache, given).lengths, lengths)
        np.testing.assert_array_equal(jax.jit(jmla.rollback)(cache, jnp.array([99, -5])).lengths, [max(5 - room, 0), 1])
        assert jmla.rollback(cache, [0, 1], draft_tokens=[1, 0]).draft_lengths.shape == (2,)
        for wrong, error, says in (
            ([], TypeError, r"tokens=\[\] to be an integer"),
            (1.5, TypeError, "tokens=1.5"),
            (-1, ValueError, r"tokens=-1 to be in 0\.\."),
            ([0, 600], ValueError, rf"to be in 0\.\.{room}"),
            ([1, 1, 1], ValueError, r"shape \(2,\)"),
        ):
            with pytest.raises(error, match=says):
                jmla.rollback(cache, wrong)
    with pytest.raises(ValueError, match=r"rollback=65 to be an integer in 0\.\.64"):
        init_cache(model("v4"), 1, 512, rollback=65)
    with pytest.raises(ValueError, match=r"to be in 0\.\.0"):
        jmla.rollback(init_cache(model("v4"), 1, 512), 1)


# ---- the loop, with guesses made here


@pytest.mark.slow
@pytest.mark.parametrize("family", ["v4", pytest.param("glm", marks=slow)])
def test_g3_g4_what_a_pass_accepts_and_leaves(family, monkeypatch):
    """Guesses that are right up to a place of each pass: the text, the counts, and the cache behind it."""
    net, drafts, start = model(family), 3, 13
    lengths = np.array([start + row for row in range(4)])
    tokens = np.zeros((4, 16), np.int32)
    for row, length in enumerate(lengths):
        tokens[row, :length] = prompt(length)
    told, _, _ = jmla.generate_tokens(net, tokens, lengths, jax.random.key(0), max_new_tokens=28, eos=())
    wanted = [np.asarray(told)[row, n : n + 28] for row, n in enumerate(lengths)]
    right = jnp.array([[0, 1, 2, 3], [3, 2, 1, 0], [1, 1, 3, 0], [2, 0, 3, 3]])  # of each row in each pass
    truth = jnp.asarray(np.stack(wanted))

    def guessed(model, cache, rows, unread, params, count):
        at = rows.made[:, None] + jnp.arange(count)
        good = jnp.take_along_axis(truth, jnp.minimum(at, truth.shape[1] - 1), 1)
        made = jnp.cumsum(right + 1, 1) - (right + 1)  # tokens before each pass, the first one aside
        this = jnp.argmax(made == (rows.made - 1)[:, None], axis=1)
        correct = right[jnp.arange(4), this]
        _, _, cache = models_draft(model, unread, cache, rows)
        return cache, jnp.where(jnp.arange(count) < correct[:, None], good, (good - 2 + 5) % 94 + 2)

    def models_draft(model, unread, cache, rows):
        counts = jnp.where(rows.active, unread.counts, 0)
        return jmla.draft(model, unread.hidden, unread.tokens, cache, lengths=counts, donate=False)

    monkeypatch.setattr(speculation, "_propose", guessed)
    cache = init_cache(net, 4, 256, rollback=drafts)
    logits, hidden, cache = stepped(family)(tokens, lengths, cache)
    following = np.roll(tokens, -1, 1)
    _, _, cache = jmla.draft(net, hidden, following, cache, lengths=lengths - 1, donate=False)
    row = np.arange(4)
    first = np.array([w[0] for w in wanted])
    assert (np.argmax(logits[row, lengths - 1], -1) == first).all()
    unread = Unread.empty(net.spec, 4, drafts + 1).behind_a_prompt(hidden[row, lengths - 1], jnp.asarray(first))
    rows = Rows(
        jnp.asarray(first),
        jnp.ones(4, jnp.int32),
        jnp.ones(4, bool),
        jnp.full(4, 40),
        History.start(jnp.asarray(tokens), jnp.asarray(lengths), 96),
        unread,
    )
    block = jax.jit(speculation.speculative_block)
    params = RowParams.pack([DEFAULTS] * 4)
    cache, rows, made, (counts, checked, hits) = block(
        net, cache, rows, params, jnp.array([-1]), jnp.ones(4, bool), jnp.array(False), jnp.int32(4)
    )
    expected = 4 + np.asarray(right).sum(1)
    np.testing.assert_array_equal(counts, expected)
    np.testing.assert_array_equal(hits, np.asarray(right).sum(1))
    # Those behind the first wrong guess were not looked at.
    np.testing.assert_array_equal(checked, np.minimum(np.asarray(right) + 1, drafts).sum(1))
    for r in range(4):
        np.testing.assert_array_equal(made[0][r, : counts[r]], wanted[r][1 : 1 + counts[r]])
    np.testing.assert_array_equal(cache.lengths, lengths + expected)
    np.testing.assert_array_equal(cache.draft_lengths + rows.unread.counts, cache.lengths)

    fresh = init_cache(net, 4, 256, rollback=drafts)
    width = 64
    text, after = np.zeros((4, width), np.int32), np.zeros((4, width), np.int32)
    held = np.asarray(cache.lengths)
    for r in range(4):
        said = np.concatenate([prompt(lengths[r]), wanted[r]])
        text[r, : held[r]] = said[: held[r]]
        after[r, : TAIL + 1] = np.concatenate([said, prompt(60)])[held[r] : held[r] + TAIL + 1]
    _, hidden, fresh = stepped(family)(text, held, fresh)
    follow = np.roll(text, -1, 1)
    _, _, fresh = jmla.draft(net, hidden, follow, fresh, lengths=held - 1, donate=False)
    left = rows.unread
    _, _, cache = jmla.draft(net, left.hidden, left.tokens, cache, lengths=left.counts - 1, donate=False)
    last = [np.asarray(hidden[r, : held[r]]) for r in range(4)]
    got, want = future(family, cache, last, after), future(family, fresh, last, after)
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_array_equal(got[1], want[1])
    for a, b in zip(jax.tree.leaves(got[2]), jax.tree.leaves(want[2]), strict=True):
        np.testing.assert_array_equal(a, b)


# ---- what further draft steps attend


def test_g8_g9_g11_g12_a_draft_block_chooses_for_itself_and_further_steps_share_its_choice():
    net = model("glm")
    ids = prompt(30)[None]
    cache = init_cache(net, 1, 256)
    _, hidden, cache = jmla.prefill(net, ids, [30], cache, return_hidden=True)
    args = (hidden[:, :29], ids[:, 1:30], cache)
    logits, carried, chosen, cache1 = jmla.draft(net, *args, return_selected=True, donate=False)
    assert chosen.shape == (1, 29, net.config.index_topk)

    other = jax.tree.map(lambda x: x, net.params)  # G8: with weights of its own
    other["draft"]["layer"]["index_q"] = -other["draft"]["layer"]["index_q"]
    turned = dataclasses.replace(net, params=other)
    unlike, _, unlike_chosen, _ = jmla.draft(turned, *args, return_selected=True, donate=False)
    assert (np.asarray(chosen) != np.asarray(unlike_chosen)).any()
    assert (np.asarray(logits) != np.asarray(unlike)).any()

    # G9: a further step attends what the first one chose; G11: its key is written whether or not it chooses.
    step = (carried[:, -1], ids[:, 5], cache1)
    shared = jmla.draft(net, *step, selected=chosen[:, -1], return_selected=True, donate=False)
    alone_ = jmla.draft(net, *step, return_selected=True, donate=False)
    np.testing.assert_array_equal(shared[2], chosen[:, -1])
    assert (np.asarray(alone_[2]) != np.asarray(shared[2])).any()
    np.testing.assert_array_equal(shared[3].pools["index"], alone_[3].pools["index"])
    assert (np.asarray(shared[3].pools["index"]) != np.asarray(cache1.pools["index"])).any()

    # G12: where nothing was chosen, nothing is attended, whatever an earlier step chose; nothing is kept between calls.
    none = jmla.draft(net, *step, selected=np.full((1, net.config.index_topk), -1), return_selected=True, donate=False)
    assert (np.asarray(none[2]) == -1).all()
    again = jmla.draft(net, *step, return_selected=True, donate=False)
    np.testing.assert_array_equal(again[0], alone_[0])
    with pytest.raises(ValueError, match=r"positions in 0\.\.255, or -1"):
        jmla.draft(net, *step, selected=np.full((1, net.config.index_topk), 2**32))


def test_g9_the_engine_shares_where_the_config_says_so(monkeypatch):
    """Three drafts: the first step chooses, the other two attend that; with another config each chooses."""
    seen = {}
    real = trunk.run_draft

    def spied(ctx, params, hidden, store, chosen=None):
        seen.setdefault(ctx.spec.config.model_type, []).append(chosen is not None)
        return real(ctx, params, hidden, store, chosen)

    monkeypatch.setattr(trunk, "run_draft", spied)
    for family in ("glm", "v32"):
        net = model(family)
        rows = Rows.empty(net.spec, 2, 3)
        cache = init_cache(net, 2, 256, rollback=3)
        params = RowParams.pack([DEFAULTS] * 2)
        jax.clear_caches()
        jax.jit(functools.partial(speculation._propose, count=3)).lower(net, cache, rows, rows.unread, params)
    assert seen == {"glm_moe_dsa": [False, True], "deepseek_v32": [False, False]}


def test_selected_is_checked():
    net, v4 = model("v32"), model("v4")
    hidden, cache = np.zeros((1, 32), np.float32), init_cache(net, 1, 256)
    for wrong, error in ((np.zeros((1, 5), np.int32), ValueError), (np.zeros((1, 6), np.float32), TypeError)):
        with pytest.raises(error, match="selected"):
            jmla.draft(net, hidden, [3], cache, selected=wrong)
    streams = np.zeros((1, 4, 32), np.float32)
    for option in ({"selected": np.zeros((1, 6), np.int32)}, {"return_selected": True}):
        with pytest.raises(ValueError, match="V4's draft block attends a window alone"):
            jmla.draft(v4, streams, [3], init_cache(v4, 1, 256), **option)


# ---- the bundled model


@functools.cache
def bundled():
    return jmla.load("jmla-tiny-v4", deterministic=True)


HELD_OUT = (
    "def read_config(path):\n    with open(path) as file:\n        for line in file:\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "import unittest\n\nclass TestQueue(unittest.TestCase):\n    def test_empty(self):\n",
    "    if not isinstance(value, int):\n        raise TypeError(",
)


@slow
def test_more_than_half_of_the_drafts_are_right_and_none_changes_the_text():
    engine = Engine(bundled(), max_requests=4, max_seq_len=512, drafts=3)
    for hot in (0.0, 1.0):
        ask = SamplingParams(max_new_tokens=96, temperature=hot, seed=3)
        got = engine.generate(list(HELD_OUT), sampling=ask)
        assert got == jmla.generate(bundled(), list(HELD_OUT), sampling=ask)
        if not hot:
            first = Engine(bundled(), max_requests=4, max_seq_len=512, drafts=1)
            first.generate(list(HELD_OUT), sampling=ask)
            assert first.stats.accepted_tokens > 0.5 * first.stats.drafted_tokens
            assert engine.stats.accepted_tokens > 0.5 * engine.stats.drafted_tokens


@slow
@pytest.mark.timeout(3600)
def test_what_is_drawn_with_drafts_has_the_distribution_of_what_is_drawn_without():
    """20,000 draws each, of seeds of their own: the third tokens by chi-square, those that are rare together."""
    counts = []
    model = jmla.load("jmla-tiny-v4")  # fast mode, in which requests are served
    for drafts, base in ((0, 1), (3, 2)):
        engine = Engine(model, max_requests=64, max_seq_len=256, drafts=drafts)
        drawn = np.zeros(engine._model.spec.config.vocab_size, int)
        for part in range(20):
            ask = SamplingParams(max_new_tokens=3, temperature=1.0, seed=base * 1000 + part, n=1000, stop=[])
            done = engine.generate(["def f(self):\n    return "], sampling=ask)[0]
            for choice in done.choices:
                drawn[choice.token_ids[-1]] += 1
        counts.append(drawn)
    assert counts[0].sum() == counts[1].sum() == 20_000
    both = counts[0] + counts[1]
    common = both >= 20
    table = np.array([np.append(c[common], c[~common].sum()) for c in counts])
    total = table.sum(0)
    statistic = np.sum((table[0] - table[1]) ** 2 / np.maximum(total, 1))
    freedom = np.count_nonzero(total) - 1
    print(f"chi-square {statistic:.1f} of {freedom} degrees of freedom")
    assert freedom > 20
    assert statistic < freedom + 3.1 * np.sqrt(2 * freedom)  # one time in a thousand, by the normal approximation
