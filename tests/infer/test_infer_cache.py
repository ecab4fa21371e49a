"""Blocks of keys and values: who holds them, and how equal ones are found."""

from __future__ import annotations

import random

import pytest

from zero2all.infer.cache import BLOCK, SCRATCH, BlockPool, block_keys

KEYS = block_keys(range(4 * BLOCK))


def test_a_key_stands_for_all_tokens_up_to_the_end_of_its_block():
    other_beginning = block_keys([99, *range(1, 4 * BLOCK)])
    assert len(KEYS) == 4
    assert block_keys(range(4 * BLOCK + 5)) == KEYS  # a block that is not full has no key
    assert not set(KEYS) & set(other_beginning)
    assert block_keys(range(4 * BLOCK), KEYS[:3]) == KEYS


def test_blocks_that_are_held_are_never_given_out():
    pool = BlockPool(5)
    held = pool.take(3)
    assert SCRATCH not in held
    assert pool.take(2) is None
    assert set(pool.take(1)) & set(held) == set()
    pool.release(held)
    assert pool.free == 3


def test_equal_content_is_found_as_far_as_it_is_equal():
    pool = BlockPool(9)
    first = pool.take(3)
    for block, key in zip(first, KEYS, strict=False):
        pool.note(block, key)
    assert pool.find([*KEYS[:2], b"another"]) == first[:2]
    assert pool.find([b"another", KEYS[1]]) == []
    pool.release(first[:2])
    pool.release(first)
    assert pool.free == 8


def test_what_nobody_holds_stays_findable_until_its_memory_is_needed():
    pool = BlockPool(4)
    blocks = pool.take(3)
    for block, key in zip(blocks, KEYS, strict=False):
        pool.note(block, key)
    pool.release(blocks)
    assert pool.find(KEYS[:3]) == blocks
    pool.release(blocks)
    taken = pool.take(1)
    assert taken == blocks[2:]  # the end goes before the beginning
    assert pool.find(KEYS[:3]) == blocks[:2]


def test_a_second_block_with_the_same_content_does_not_replace_the_first():
    pool = BlockPool(4)
    one, two = pool.take(2)
    pool.note(one, KEYS[0])
    pool.note(two, KEYS[0])
    pool.release([two])
    assert pool.take(2)[0] == two
    assert pool.find(KEYS[:1]) == [one]


@pytest.mark.parametrize("seed", range(5))
def test_random_use_loses_no_block(seed):
    draw, pool, held = random.Random(seed), BlockPool(30), []
    texts = [block_keys([draw.randrange(2) for _ in range(BLOCK * 3)]) for _ in range(12)]
    for _ in range(400):
        if held and draw.random() < 0.5:
            pool.release(held.pop(draw.randrange(len(held))))
            continue
        keys = draw.choice(texts)
        known = pool.find(keys)
        more = pool.take(len(keys) - len(known))
        if more is None:
            pool.release(known)
            continue
        for block, key in zip([*known, *more], keys, strict=True):
            pool.note(block, key)
        held.append(known + more)
        assert len({block for each in held for block in each}) == 29 - pool.free
    for blocks in held:
        pool.release(blocks)
    assert pool.free == 29
