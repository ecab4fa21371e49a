"""Rows, shards and documents are those the loader reads."""

import pytest

from zero2all.packed.bestfit import open_best_fit
from zero2all.packed.loader import LoaderOptions, read_batch
from zero2all.tokenizer import load_tokenizer
from zero2all.train.guards.documents import Texts, rows_of_step, samples_of_step

SEQ_LEN = 32


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_every_row_is_the_one_the_loader_reads_and_lies_in_its_shard(sharded_work, open_data, packing):
    data = open_data(sharded_work, packing=packing)
    assert max(len(split.shards) for split in data.splits) > 2
    shards_seen = set()
    for first_token in range(0, 60 * SEQ_LEN, 6 * SEQ_LEN):
        batch = read_batch(data, first_token, 6, LoaderOptions(documents=True))
        rows = rows_of_step(data, first_token, 6)
        assert rows.sources.tolist() == batch.sources.tolist()
        for row in range(6):
            split, sample = data.splits[rows.sources[row]], int(rows.samples[row])
            if packing == "concat":
                assert split.read(sample * SEQ_LEN, SEQ_LEN + 1).tolist() == batch.tokens[row].tolist()
                middle = sample * SEQ_LEN + SEQ_LEN // 2
            else:
                index = open_best_fit(split, SEQ_LEN)
                middle = int(index.starts[int(index.rows[sample])])
            low, high = split.shard_starts[rows.shards[row]], split.shard_starts[rows.shards[row] + 1]
            assert low <= middle < high
            shards_seen.add((split.name, int(rows.shards[row])))
    assert len(shards_seen) > 4


def test_the_documents_of_a_step_are_decoded_with_their_names(sharded_work, open_data):
    data = open_data(sharded_work)
    tokenizer = load_tokenizer(sharded_work.tokenizer)

    def decode(ids):
        return tokenizer.decode(ids, skip_control=False)

    for first_token in (0, 80 * SEQ_LEN, 400 * SEQ_LEN + 16 * 8):
        batch = read_batch(data, first_token, 4)
        shown = samples_of_step(data, first_token, 4, Texts(sharded_work.corpus, decode, None), losses={1: 2.5})
        assert [sample.row for sample in shown] == [0, 1, 2, 3]
        assert [sample.loss for sample in shown] == [None, 2.5, None, None]
        for row, sample in enumerate(shown):
            assert "".join(one.text for one in sample.documents) == decode(batch.tokens[row].tolist())
            assert sample.source == data.splits[batch.sources[row]].name
            assert all(one.gid is not None and one.origin for one in sample.documents)
            assert sum(one.tokens for one in sample.documents) == batch.tokens.shape[1]
    assert {sample.stage for sample in shown} == {"late"}


def test_long_documents_are_shortened_and_ids_shown_without_a_tokenizer(sharded_work, open_data):
    (sample,) = samples_of_step(open_data(sharded_work), 0, 4, Texts(sharded_work.corpus, None, 10), [2])
    assert sample.row == 2
    assert all(len(one.text) <= 10 and one.is_cut for one in sample.documents)
    assert sample.documents[0].text.replace(" ", "").isdigit()
