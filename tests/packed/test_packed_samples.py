"""What stands in a row: its tokens, which of them count, and whose documents they are."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero2all.common.errors import BadInputError
from zero2all.packed.bestfit import best_fit_rows, build_best_fit, cut_documents, open_best_fit
from zero2all.packed.config import DataConfig
from zero2all.packed.loader import LoaderOptions, read_batch
from zero2all.packed.mixture import open_training_data
from zero2all.packed.samples import NO_DOCUMENT, PADDING_ID, Borders, ConcatSamples, open_samples
from zero2all.packed.shard_format import open_split
from zero2all.packed.stages import Stage

SEQ_LEN = 24


@pytest.fixture(scope="module")
def made(by_hand, tmp_path_factory):
    lengths = np.random.default_rng(3).integers(1, 70, 60).tolist()
    return by_hand(tmp_path_factory.mktemp("samples"), {"plain": lengths, "talk": lengths}, masked=["talk"])


def read_all(samples, seq_len=SEQ_LEN):
    tokens = np.full((samples.count, seq_len + 1), -1, dtype=np.int64)
    weights = np.full((samples.count, seq_len), -1, dtype=np.float32)
    borders = Borders()
    for index in range(samples.count):
        samples.read(index, tokens[index], weights[index], borders, index)
    return tokens, weights, borders.documents(samples.count, seq_len + 1)


def document_of(made, source, token):
    return int(np.searchsorted(made.starts[source], token, side="right")) - 1


@pytest.mark.parametrize("source", ["plain", "talk"])
def test_windows_know_the_document_and_the_mask_of_each_token_across_shards(made, source):
    samples = ConcatSamples(open_split(made.packed, source, "train"), SEQ_LEN)
    tokens, weights, documents = read_all(samples)
    for index in range(samples.count):
        window = range(index * SEQ_LEN, (index + 1) * SEQ_LEN + 1)
        assert tokens[index].tolist() == made.tokens[source][window].tolist()
        numbers = documents.numbers[documents.row_starts[index] : documents.row_starts[index + 1]]
        assert numbers[documents.ids[index]].tolist() == [document_of(made, source, token) for token in window]
        starts = [max(window.start, int(made.starts[source][document_of(made, source, token)])) for token in window]
        assert documents.positions[index].tolist() == [t - s for t, s in zip(window, starts, strict=True)]
        wanted = made.masks[source][window[1:]] if source == "talk" else np.ones(SEQ_LEN)
        assert weights[index].tolist() == wanted.tolist()


def slow_best_fit(lengths, capacity):
    """Longest first, each into the row with the least room that takes it."""
    room: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row, left in enumerate(room) if left >= length]
        if not fitting:
            room.append(capacity)
            fitting = [len(room) - 1]
        room[min(fitting, key=lambda row: room[row])] -= length
    return sorted(capacity - left for left in room)


@settings(max_examples=100, deadline=None)
@given(capacity=st.integers(2, 40), lengths=st.lists(st.integers(2, 40), min_size=1, max_size=60))
def test_rows_are_those_of_best_fit_decreasing(capacity, lengths):
    lengths = np.array([min(length, capacity) for length in lengths])
    rows = best_fit_rows(lengths, capacity)
    filled = np.bincount(rows, weights=lengths).astype(int)
    assert sorted(filled.tolist()) == slow_best_fit(lengths.tolist(), capacity)
    assert best_fit_rows(lengths, capacity).tolist() == rows.tolist()


@settings(max_examples=100, deadline=None)
@given(seq_len=st.integers(1, 20), lengths=st.lists(st.integers(1, 90), min_size=1, max_size=20))
def test_pieces_predict_every_token_but_the_first_of_a_document_exactly_once(seq_len, lengths):
    borders = np.concatenate(([0], np.cumsum(lengths)))
    pieces = cut_documents(borders, seq_len)
    predicted = [t for s, n in zip(pieces.starts, pieces.lengths, strict=True) for t in range(s + 1, s + n)]
    assert sorted(predicted) == sorted(set(range(sum(lengths))) - set(borders[:-1].tolist()))
    assert pieces.lengths.max(initial=2) <= seq_len + 1
    assert pieces.cut == sum(length > seq_len + 1 for length in lengths)
    assert pieces.dropped == sum(length == 1 for length in lengths)
    whole = {(s, n) for s, n in zip(borders.tolist(), lengths, strict=False) if 1 < n <= seq_len + 1}
    assert whole <= set(zip(pieces.starts.tolist(), pieces.lengths.tolist(), strict=True))  # none of these is cut


@pytest.mark.parametrize("source", ["plain", "talk"])
def test_best_fit_rows_hold_every_piece_once_and_weigh_padding_and_masked_tokens_nothing(made, source):
    split = open_split(made.packed, source, "train")
    manifest = build_best_fit(split, SEQ_LEN)
    samples = open_samples(split, SEQ_LEN, "best_fit")
    tokens, weights, documents = read_all(samples)
    counted = np.zeros(split.tokens, dtype=int)
    padding = 0
    for row in range(samples.count):
        first, end = documents.row_starts[row : row + 2]
        for segment, number in enumerate(documents.numbers[first:end]):
            columns = np.flatnonzero(documents.ids[row] == segment)
            if number == NO_DOCUMENT:
                padding += len(columns)
                assert columns[-1] == SEQ_LEN
                assert (tokens[row, columns] == PADDING_ID).all()
                assert not weights[row, columns[0] - 1 :].any()
                continue
            start = int(np.asarray(made.starts[source])[number])
            piece, text = tokens[row, columns].tolist(), made.tokens[source].tolist()
            # the piece stands in its document, at a multiple of seq_len
            (place,) = (at for at in range(start, split.tokens, SEQ_LEN) if text[at : at + len(piece)] == piece)
            wanted = made.masks[source][place + 1 : place + len(columns)] if source == "talk" else 1
            assert (weights[row, columns[:-1]] == wanted).all()
            if columns[0]:
                assert weights[row, columns[0] - 1] == 0  # nobody predicts the first token of a piece
            counted[place + 1 : place + len(columns)] += 1
    assert padding == manifest["padding"]
    starts = set(made.starts[source].tolist())
    assert counted.tolist() == [0 if token in starts else 1 for token in range(split.tokens)]


def test_best_fit_on_real_lengths_pads_almost_nothing(by_hand, tmp_path):
    rng = np.random.default_rng(0)
    made = by_hand(tmp_path, {"web": (rng.lognormal(5, 1.2, 4000).astype(int) + 2).tolist()}, documents_per_shard=2000)
    manifest = build_best_fit(open_split(made.packed, "web", "train"), 1024)
    assert manifest["padding"] / (manifest["rows"] * 1025) < 0.01


def test_an_index_is_built_once_the_same_bytes_again_and_a_missing_or_foreign_one_is_named(by_hand, tmp_path, tree):
    made = by_hand(tmp_path, {"a": [9, 30, 4, 4, 17] * 9})
    config = DataConfig(seq_len=16, packing="best_fit")
    with pytest.raises(BadInputError, match=r"no finished best_fit in .*a/train/best-fit-16.*z2a pack --best-fit 16"):
        open_training_data(made.packed, config, [Stage("main", 0, None, 16)])
    split = open_split(made.packed, "a", "train")
    build_best_fit(split, 16)
    data = open_training_data(made.packed, config, [Stage("main", 0, None, 16)])
    assert data.segments[0].order.sources[0].samples > 0
    before = {path: path.stat().st_mtime_ns for path in split.folder.rglob("*")}
    build_best_fit(split, 16)
    assert {path: path.stat().st_mtime_ns for path in split.folder.rglob("*")} == before
    first = tree(split.folder / "best-fit-16")
    (split.folder / "best-fit-16/manifest.json").unlink()
    build_best_fit(split, 16)
    assert tree(split.folder / "best-fit-16") == first
    split.manifest["files"]["tokens-00000.bin"]["crc32c"] = "00000000"  # packed anew, the index left behind
    with pytest.raises(BadInputError, match="does not belong to the tokens"):
        open_best_fit(split, 16)


def test_a_batch_of_best_fit_rows_says_where_documents_lie_for_short_ranks_too(by_hand, tmp_path):
    made = by_hand(tmp_path, {"a": [9, 30, 4] * 9})
    build_best_fit(open_split(made.packed, "a", "train"), 16)
    data = open_training_data(made.packed, DataConfig(seq_len=16, packing="best_fit"), [Stage("main", 0, None, 16)])
    batch = read_batch(data, 0, 7, LoaderOptions(rank=3, ranks=4, documents=True))
    assert (batch.samples, len(batch.tokens)) == (1, 2)
    assert batch.documents.numbers[batch.documents.row_starts[1] :].tolist() == [NO_DOCUMENT]
    assert batch.document_ids[1].tolist() == [0] * 17
