"""Adding pieces: no old id moves, old text keeps its ids where no new piece applies, and nothing is half done."""

import pytest
import tokenizers

from tests.tokenizer.test_tokenizer_load import save_gpt2_like
from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.files import read_json
from zero2all.tokenizer import CONTROL_TOKENS, load_tokenizer
from zero2all.tokenizer.extend import Extender, read_pieces, spelled_by

transformers = pytest.importorskip("transformers")

FIELD = ["量子纠缠与量子计算,量子纠缠。 Quantum entanglement entangles qubits.\n"] * 30


def extended(folder, target, pieces=(), texts=None, vocab_size=None):
    extender = Extender(folder)
    extender.add(pieces)
    if texts is not None:
        extender.learn(texts, vocab_size)
    return extender.save(target), load_tokenizer(target)


def test_named_pieces_become_one_id_and_no_old_id_moves(folder, tokenizer, tmp_path):
    pieces = ["量子纠缠", " quantum", "量子", "abababab"]
    done, new = extended(folder, tmp_path / "new", pieces)
    for number in range(tokenizer.vocab_size):
        assert new.token_bytes(number) == tokenizer.token_bytes(number)
    for piece in pieces:
        (number,) = new.encode_text(piece)
        assert number >= tokenizer.vocab_size
        assert new.token_bytes(number) == piece.encode()
    assert new.vocab_size == 700 + done["pieces_added"]
    assert done["pieces_added"] == len(pieces) - done["already_there"] + done["helper_pieces"] > 4
    assert new.control == tokenizer.control
    manifest = read_json(tmp_path / "new/manifest.json")
    assert (manifest["tokenizer_kind"], manifest["extended_from"]) == ("extended", tokenizer.fingerprint)
    assert manifest["extension"]["old_vocab_size"] == 700


def test_pieces_that_contain_each_other_are_all_reached_whatever_their_order(folder, tmp_path):
    pieces = ["京市", "北京市", "北京", "xyxy", "yx", "xyx"]
    for name, ordered in (("forward", pieces), ("backward", pieces[::-1])):
        _, new = extended(folder, tmp_path / name, ordered)
        assert [len(new.encode_text(piece)) for piece in pieces] == [1] * len(pieces)


def test_old_text_changes_only_where_a_new_piece_applies(folder, tokenizer, texts, tmp_path):
    _, new = extended(folder, tmp_path / "new", ["量子纠缠"])
    for text in texts:
        assert new.encode_text(text) == tokenizer.encode_text(text)
    before, _, after = (tokenizer.encode_text(part) for part in ("def ka(x):\n ", "量子纠缠", "\nes or pi"))
    found = new.encode_text("def ka(x):\n 量子纠缠\nes or pi")
    assert [number for number in found if number < 700][-3:] == after[-3:]
    assert found[: len(before) - 2] == before[: len(before) - 2]


def test_pieces_learned_from_text_shorten_it_and_reach_the_size_asked_for(folder, tokenizer, texts, tmp_path):
    done, new = extended(folder, tmp_path / "new", texts=iter(FIELD), vocab_size=730)
    assert new.vocab_size == 730
    assert done["text"]["bytes"] == sum(len(text.encode()) for text in FIELD)
    text = FIELD[0]
    assert len(new.encode_text(text)) < 0.6 * len(tokenizer.encode_text(text))
    assert new.decode(new.encode_text(text)) == text
    for old in texts[:50]:
        assert new.decode(new.encode_text(old)) == old
    for number in range(700, 730):  # whole characters, or the beginning of one
        assert not new.token_bytes(number).decode("utf-8", "ignore") or new.token_bytes(number).decode()


def test_every_way_to_load_the_extended_folder_gives_the_same_ids_and_text_stays_apart_from_control(folder, tmp_path):
    _, new = extended(folder, tmp_path / "new", ["<|", "|>", "pad"], iter(FIELD), 730)
    raw = tokenizers.Tokenizer.from_file(str(tmp_path / "new/tokenizer.json"))
    auto = transformers.AutoTokenizer.from_pretrained(tmp_path / "new")
    for text in [*FIELD[:2], "".join(CONTROL_TOKENS), "<|pad|>"]:
        ids = new.encode_text(text)
        assert raw.encode(text).ids == auto(text)["input_ids"] == ids
        assert new.control_ids.isdisjoint(ids)


def test_folder_of_others_keeps_the_ids_of_its_added_tokens(texts, tmp_path):
    marks = ["<|im_start|>", "<|im_end|>"]
    save_gpt2_like(tmp_path / "theirs", texts, 400, [], eos_token="<|endoftext|>", additional_special_tokens=marks)
    theirs = load_tokenizer(tmp_path / "theirs")
    assert sorted(theirs.control.values()) == [400, 401, 402], "behind the model's own vocabulary, as in Qwen2"
    _, new = extended(tmp_path / "theirs", tmp_path / "new", ["量子纠缠"])
    assert new.control == theirs.control
    auto = transformers.AutoTokenizer.from_pretrained(tmp_path / "new")
    assert auto.eos_token_id == theirs.end_id
    assert auto.convert_tokens_to_ids("<|im_end|>") == theirs.control["<|im_end|>"]
    assert new.encode_text("量子纠缠") == auto("量子纠缠")["input_ids"] == [new.vocab_size - 1]


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        (["two words"], r"cannot be one piece: this tokenizer cuts it into two \|  words"),
        ([""], "not empty"),
        (["\ud800"], "valid UTF-8"),
        (["<|pad|>"], "is a control token"),
        (["a"], "Nothing was added"),
    ],
)
def test_what_can_be_no_piece_is_refused_and_nothing_is_written(folder, tmp_path, pieces, message):
    with pytest.raises(UsageError, match=message):
        extended(folder, tmp_path / "new", pieces)
    assert list(tmp_path.iterdir()) == []


def test_too_little_text_says_the_largest_size(folder, tmp_path):
    with pytest.raises(BadInputError, match=r"Set --vocab-size to (\d+) or less") as refused:
        extended(folder, tmp_path / "new", texts=["量子 量子 量子"], vocab_size=5000)
    largest = int(str(refused.value).split("--vocab-size to ")[1].split()[0])
    _, new = extended(folder, tmp_path / "new", texts=["量子 量子 量子"], vocab_size=largest)
    assert new.vocab_size == largest
    with pytest.raises(UsageError, match="already has 700 ids"):
        extended(folder, tmp_path / "other", texts=FIELD, vocab_size=700)
    with pytest.raises(BadInputError, match="no text"):
        extended(folder, tmp_path / "other", texts=[""], vocab_size=800)


def test_pieces_come_from_a_file_one_a_line_and_are_spelled_by_old_ones(tokenizer, tmp_path):
    (tmp_path / "pieces.txt").write_text("量子\r\n\n quantum\n\\sx\\n\n", newline="")
    assert read_pieces(tmp_path / "pieces.txt") == ["量子", " quantum", " x\n"]
    with pytest.raises(BadInputError, match="cannot be read"):
        read_pieces(tmp_path / "absent")
    assert spelled_by(tokenizer, "量子".encode()) == tokenizer.encode_text("量子")
    assert [tokenizer.token_bytes(number) for number in spelled_by(tokenizer, b"\xe9\x87")] == [b"\xe9", b"\x87"]
