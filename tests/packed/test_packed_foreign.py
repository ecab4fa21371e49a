"""Token files of others, byte for byte as their makers describe them, out and in again."""

import json
import struct

import numpy as np
import pytest

from zero2all.common.errors import BadInputError, UsageError
from zero2all.packed.foreign import Import, document_lengths, export_split, import_source, index_bytes, megatron_dtype
from zero2all.packed.shard_format import open_split, packed_sources
from zero2all.packed.writer import PackOptions, pack_corpus
from zero2all.tokenizer import load_tokenizer


def read_megatron(prefix):
    """A reader of the published layout, which shares nothing with the writer."""
    data = prefix.with_name(prefix.name + ".idx").read_bytes()
    version, code, sequences, entries = struct.unpack("<QBQQ", data[9:34])
    assert (data[:9], version) == (b"MMIDIDX\x00\x00", 1)
    numbers = struct.unpack(f"<{sequences}i{sequences}q{entries}q", data[34:])
    lengths, pointers = numbers[:sequences], numbers[sequences : 2 * sequences]
    tokens = prefix.with_name(prefix.name + ".bin").read_bytes()
    letter, size = {4: ("i", 4), 8: ("H", 2)}[code]
    assert sum(lengths) * size == len(tokens)
    places = zip(lengths, pointers, strict=True)
    return [struct.unpack_from(f"<{length}{letter}", tokens, at) for length, at in places], numbers[2 * sequences :]


def everything(split):
    starts = [split.docs[shard].astype(int) + int(split.shard_starts[shard]) for shard in range(len(split.shards))]
    return split.read(0, split.tokens).tolist(), np.concatenate(starts).tolist()


def test_a_megatron_export_is_read_by_its_published_layout(shared_work, tmp_path):
    split = open_split(shared_work.packed, "zh", "train")
    files = export_split(split, tmp_path, "megatron")
    assert sorted(path.name for path in files) == ["zh.train.bin", "zh.train.idx", "zh.train.json"]
    sequences, documents = read_megatron(tmp_path / "zh.train")
    tokens, starts = everything(split)
    assert [token for sequence in sequences for token in sequence] == tokens
    assert np.cumsum([0, *map(len, sequences)]).tolist()[:-1] == starts
    assert list(documents) == list(range(len(sequences) + 1))


def test_megatron_ids_are_uint16_below_65500_and_int32_from_there(tmp_path):
    assert (megatron_dtype(65499), megatron_dtype(65500)) == (np.dtype("<u2"), np.dtype("<i4"))
    (tmp_path / "a.bin").write_bytes(np.array([7, 65535, 3], "<i4").tobytes())
    (tmp_path / "a.idx").write_bytes(index_bytes(np.array([2, 1]), np.dtype("<i4")))
    assert read_megatron(tmp_path / "a") == ([(7, 65535), (3,)], (0, 1, 2))


@pytest.mark.parametrize("form", ["megatron", "numpy"])
def test_what_was_exported_comes_in_again_and_stays_when_the_corpus_is_packed(work, tmp_path, form):
    tokenizer = load_tokenizer(work.tokenizer)
    split = open_split(work.packed, "zh", "train")
    path = export_split(split, tmp_path, form)[0]
    manifest = import_source(work.packed, tokenizer, Import("again", path, form), shard_tokens=700)
    found = open_split(work.packed, "again", "train")
    assert everything(found) == everything(split)
    assert len(found.shards) > 2
    assert (manifest["channel"], manifest["tokenizer"]) == ("zh", tokenizer.fingerprint)
    assert manifest["text_bytes"] == split.manifest["text_bytes"]
    assert manifest["max_id"] == max(everything(split)[0])
    assert open_split(work.packed, "again", "valid").tokens == 0
    pack_corpus(work.corpus, work.tokenizer, work.packed, PackOptions(shard_tokens=800))
    assert packed_sources(work.packed) == ["again", "letters", "novels", "zh"]
    assert everything(open_split(work.packed, "again", "train")) == everything(split)


def test_a_mask_goes_out_and_comes_in_with_numpy(by_hand, work, tmp_path):
    vocab_size = load_tokenizer(work.tokenizer).vocab_size
    made = by_hand(tmp_path / "packed", {"talk": [20] * 20}, masked=["talk"], vocab_size=vocab_size)
    path = export_split(open_split(made.packed, "talk", "train"), tmp_path, "numpy")[0]
    path.with_suffix(".json").unlink()  # it names a tokenizer that was made up
    import_source(work.packed, load_tokenizer(work.tokenizer), Import("talk", path, "numpy"), shard_tokens=130)
    found = open_split(work.packed, "talk", "train")
    assert found.read_mask(0, found.tokens).tolist() == made.masks["talk"].tolist()


def test_a_bare_file_is_cut_into_documents_behind_each_end_and_rows_of_an_array_are_documents(work, tmp_path):
    tokenizer = load_tokenizer(work.tokenizer)
    end = tokenizer.end_id
    path = tmp_path / "tokens.bin"
    path.write_bytes(np.array([20, 21, end, 22, end, 23, 24], "<i4").tobytes())
    with pytest.raises(UsageError, match="add --dtype"):
        import_source(work.packed, tokenizer, Import("own", path, "numpy"))
    import_source(work.packed, tokenizer, Import("own", path, "numpy", "x", dtype="int32"))
    found = open_split(work.packed, "own", "train")
    assert (document_lengths(found).tolist(), found.channel) == ([3, 2, 2], "x")
    np.save(tmp_path / "rows.npy", np.full((3, 5), 20, np.int64))
    import_source(work.packed, tokenizer, Import("rows", tmp_path / "rows.npy", "numpy"))
    assert document_lengths(open_split(work.packed, "rows", "train")).tolist() == [5, 5, 5]
    with pytest.raises(UsageError, match="`zh` already exists, made from the corpus"):
        import_source(work.packed, tokenizer, Import("zh", tmp_path / "rows.npy", "numpy"))


def test_a_megatron_document_of_several_sequences_is_one_document(work, tmp_path):
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 5, 4)
    pieces = index_bytes(np.array([2, 3, 1, 0, 4]), np.dtype("<u2"))[len(header) : len(header) + 12 * 5]
    (tmp_path / "m.idx").write_bytes(header + pieces + np.array([0, 2, 4, 5], "<i8").tobytes())
    (tmp_path / "m.bin").write_bytes(np.arange(20, 30).astype("<u2").tobytes())
    manifest = import_source(work.packed, load_tokenizer(work.tokenizer), Import("m", tmp_path / "m", "megatron"))
    assert document_lengths(open_split(work.packed, "m", "train")).tolist() == [5, 1, 4]
    assert manifest["documents"] == 3


@pytest.mark.parametrize("wrong", [400, -1])
def test_an_id_beyond_the_vocabulary_is_named_with_file_and_position(work, tmp_path, wrong):
    ids = np.full(1000, 20, np.int64)
    ids[617] = wrong
    np.save(tmp_path / "bad.npy", ids)
    before = packed_sources(work.packed)
    with pytest.raises(BadInputError, match=rf"bad\.npy: token 617 has the id {wrong}, but .* only 400 ids"):
        import_source(work.packed, load_tokenizer(work.tokenizer), Import("bad", tmp_path / "bad.npy", "numpy"))
    assert packed_sources(work.packed) == before
    assert not list(work.packed.glob("bad/*"))


def test_the_tokenizer_is_checked_where_it_is_known(work, tmp_path):
    tokenizer = load_tokenizer(work.tokenizer)
    np.save(tmp_path / "a.npy", np.full(10, 20))
    (tmp_path / "a.json").write_text(json.dumps({"tokenizer": "feedbeef"}))
    for given, named in (("0123abcd", "0123abcd"), (None, "feedbeef")):
        with pytest.raises(BadInputError, match=f"was made with tokenizer {named}"):
            import_source(work.packed, tokenizer, Import("a", tmp_path / "a.npy", "numpy", tokenizer_fingerprint=given))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda data: b"X" + data[1:], "is not a Megatron index"),
        (lambda data: data[:9] + struct.pack("<Q", 2) + data[17:], "version 2; expected 1"),
        (lambda data: data[:17] + b"\x06" + data[18:], "its tokens the type 6"),
        (lambda data: data[:-9], "too few for"),
        (lambda data: data[:34] + struct.pack("<i", 9999) + data[38:], "do not follow one another"),
    ],
)
def test_a_damaged_megatron_index_is_refused_by_name(shared_work, work, tmp_path, change, error):
    export_split(open_split(shared_work.packed, "zh", "train"), tmp_path, "megatron")
    index = tmp_path / "zh.train.idx"
    index.write_bytes(change(index.read_bytes()))
    with pytest.raises(BadInputError, match=error) as caught:
        import_source(work.packed, load_tokenizer(work.tokenizer), Import("zh2", tmp_path / "zh.train.bin", "megatron"))
    assert "zh.train" in str(caught.value)
