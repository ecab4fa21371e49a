"""The page is whole, escaped and without scripts; the advice follows from its rules; nothing here can stop a run."""

import dataclasses
import html.parser
from functools import partial

import pytest

from zero2all.common.files import read_json
from zero2all.packed.bestfit import open_best_fit
from zero2all.packed.loader import LoaderOptions, read_batch
from zero2all.tokenizer import load_tokenizer
from zero2all.train.guards.advice import Facts, advice
from zero2all.train.guards.detector import Detector, GuardFinding
from zero2all.train.guards.documents import Texts, rows_of_step, samples_of_step
from zero2all.train.guards.incident import IncidentWriter, make_incident, usual_channels
from zero2all.train.guards.incident_page import Incident, incident_html, incident_text
from zero2all.train.guards.ledger import Skipped
from zero2all.train.guards.policy import Continue, Rollback, Stop

SEQ_LEN = 32
SOUND = Facts(
    **{"kind": "loss_spike", "step": 5000, "lr": 3e-4, "lr_max": 3e-4, "warmup_steps": 100, "usual_grad_norm": 0.5},
    **{"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "clip_grad_norm": 1.0, "parameters": 100_000_000},
)
NASTY = "<script>alert(1)</script>\x1b[31m\x00\u202e&\"'</pre>"
VOID = ("meta", "br", "line", "circle", "polyline")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["none"]),
        ({"beta2": 0.999}, ["beta2"]),
        ({"beta2": None, "beta1": None, "eps": None}, ["none"]),
        ({"eps": 1e-5}, ["eps"]),
        ({"clip_grad_norm": 0.0}, ["clip"]),
        ({"clip_grad_norm": 5.0}, ["clip"]),
        ({"clip_grad_norm": 1.4}, ["none"]),
        ({"step": 150}, ["warmup"]),
        ({"earlier_incidents": 2}, ["lr"]),
        ({"beta2": 0.999, "clip_grad_norm": 0.0, "earlier_incidents": 1}, ["beta2", "clip", "lr"]),
        ({"kind": "loss_drop", "beta2": 0.999}, ["data"]),
        ({"channels_before": {"en": 3.0, "zh": 3.0}, "channels_now": {"en": 3.1, "zh": 8.0}}, ["data"]),
        ({"channels_before": {"en": 3.0, "zh": 3.0}, "channels_now": {"en": 5.0, "zh": 5.5}}, ["none"]),
        ({"row_losses": [3.0] * 28 + [10.0] * 2, "usual_loss": 3.0}, ["data"]),
        ({"row_losses": [5.0] * 30, "usual_loss": 3.0}, ["none"]),
    ],
)
def test_the_advice_follows_from_the_figures(changes, expected):
    assert [line.about for line in advice(dataclasses.replace(SOUND, **changes))] == expected


def test_advice_names_the_setting_and_the_value():
    (beta2,) = advice(dataclasses.replace(SOUND, beta2=0.999))
    assert "about 1,000 steps" in beta2.text
    assert "3.2 times the learning rate" in beta2.text  # 0.1 / sqrt(0.001)
    (eps,) = advice(dataclasses.replace(SOUND, eps=1e-5))  # a component is 0.5 / 1e4 = 5e-5
    assert "5.0e-05" in eps.text
    assert "1e-08 or less" in eps.text
    (lr,) = advice(dataclasses.replace(SOUND, earlier_incidents=1))
    assert "optim.lr_max 0.00021" in lr.text
    (warmup,) = advice(dataclasses.replace(SOUND, step=50, kind="nonfinite"))
    assert "warmup_steps to 200, or lower optim.lr_max (now 0.0003)" in warmup.text


def incident(action=None, **changes) -> Incident:
    detector, tokens = Detector(), (299_000, 300_000)
    for step in range(1, 301):
        detector.observe(step, 3.0 if step < 300 else 8.0, 1.0, {"en": 3.0, "zh": 3.1}, (step, step + 1))
    details = {"channel_losses": {"en": 8.0, f"zh{NASTY}": 3.1}}
    found = GuardFinding("loss_spike", 300, tokens, f"it jumped {NASTY}", 8.0, 3.0, 4.0, 300, tokens[0], details)
    made = make_incident(f"run{NASTY}", [found], action or Continue(f"done {NASTY}"), detector, SOUND)
    document = {
        **{"number": 7, "gid": 1 << 40, "title": f"T {NASTY}", "origin": f"file {NASTY}; gid {1 << 40}"},
        **{"first_column": 0, "tokens": 9, "text": f"text {NASTY}\nsecond line", "is_cut": True},
    }
    sample = {
        **{"row": 3, "source": f"s{NASTY}", "channel": "en", "shard": 2, "sample": 12345, "stage": "main"},
        **{"epoch": 0, "first_token": 0, "split_tokens": [0, 9], "loss": 7.5, "documents": [document]},
    }
    return dataclasses.replace(made, **{"samples": [sample], "samples_note": f"rows {NASTY}", **changes})


class Page(html.parser.HTMLParser):
    """Collects tags and text, and checks that tags are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.attributes, self.text, self._open = [], [], "", []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]
        self._open += [tag] if tag not in VOID else []

    def handle_endtag(self, tag):
        assert tag in VOID or self._open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_page_shows_everything_and_lets_nothing_through():
    text = incident_html(incident())
    page = Page(text)
    shown = page.text
    assert "script" not in page.tags
    assert not any(name.startswith("on") or name in ("src", "href") for name in page.attributes)
    assert "default-src 'none'" in text
    assert shown.count("<script>alert(1)</script>") == 9, "as text: every place that holds foreign words"
    assert not {"\x1b", "\x00", "\u202e"} & set(text)
    assert page.tags.count("svg") == 2
    assert page.tags.count("circle") == 2, "the step that stood out, on both curves"
    assert "second line" in shown
    assert shown.count("gid 1099511627776") == 1
    assert "Data and settings look right" in shown
    assert "http" not in text.replace("http-equiv", "")
    assert "Nothing was changed" in text
    back = Rollback(100, Skipped(0, 5, 300, "loss_spike", "rollback", "r", 100), "went back")
    assert "went back to a checkpoint" in incident_html(incident(back))
    assert "exit code 12" in incident_html(incident(Stop("ended")))


def test_the_usual_loss_of_a_channel_leaves_out_what_stood_out():
    detector = Detector()
    for step in range(1, 200):
        loss = 9.0 if step > 190 else 3.0
        detector.observe(step, loss, 1.0, {"en": loss}, (step, step + 1))
    assert usual_channels(detector, 200) == {"en": 3.0}


def test_the_terminal_gets_no_commands():
    text = incident_text(incident())
    assert not {"\x1b", "\x00"} & set(text)
    assert "Loss spike, step 300" in text
    assert "shard 2" in text
    assert "advice: Data and settings look right" in text
    assert "\n   second line" in text, "lines of a document stay lines"
    assert text.count("gid 1099511627776") == 1


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
    decode = partial(load_tokenizer(sharded_work.tokenizer).decode, skip_control=False)
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


def test_the_writer_adds_the_documents_of_the_step(sharded_work, open_data, tmp_path):
    data = open_data(sharded_work)
    made = incident(tokens=[0, 4 * 32], row_losses=[3.0, 9.0, 3.1, 3.0], samples=[], samples_note="")
    writer = IncidentWriter(tmp_path, data, sharded_work.corpus, lambda: lambda ids: f"«{len(ids)} tokens»")
    page = writer.submit(made)
    assert writer.close()
    assert writer.problems == []
    assert writer.written == [page]
    kept = read_json(page.with_suffix(".json"))
    assert [sample["row"] for sample in kept["samples"]] == [1, 2, 0, 3], "the worst first"
    assert "«" in page.read_text()
    assert "z2a inspect" in kept["samples_note"]


def test_a_writer_that_cannot_read_or_write_says_so_and_goes_on(sharded_work, open_data, tmp_path):
    def no_tokenizer():
        raise FileNotFoundError("no tokenizer here")

    writer = IncidentWriter(tmp_path / "a", open_data(sharded_work), sharded_work.corpus, no_tokenizer)
    page = writer.submit(incident(tokens=[0, 128]))
    assert writer.close()
    assert "no tokenizer here" in page.read_text()
    (tmp_path / "file").write_text("")
    blocked = IncidentWriter(tmp_path / "file", None, sharded_work.corpus)
    blocked.submit(incident())
    assert blocked.close()
    assert "step 300 could not be written" in blocked.problems[0]
