"""The outer optimizer: what is sent when, what every group makes of it, and that a resumed group makes the same."""

import json
import math
import queue
import struct
import threading
from contextlib import suppress
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.diloco_memory_link import Hub
from tests.ports import free_port
from tests.train.conftest import small_config
from tests.train.states import copies, loaded_from
from tests.waiting import in_threads, wait_until
from zero2all.common.errors import AnomalyError, PeerFailureError, UsageError
from zero2all.common.peers import Peers
from zero2all.config import ConfigError
from zero2all.config.training import OptimConfig
from zero2all.diloco import ranks
from zero2all.diloco.compress import decode, encode, is_sound, payload_bytes
from zero2all.diloco.config import Clock, DilocoConfig, names_by_fragment
from zero2all.diloco.link import GroupLink, Membership
from zero2all.diloco.messages import Key
from zero2all.diloco.outer_optimizer import OuterOptimizer
from zero2all.diloco.ranks import Layout, RankLink, expected_of
from zero2all.model.config import ModelConfig
from zero2all.model.z2all import Z2all
from zero2all.ops.config import OpsConfig
from zero2all.ops.registry import resolve
from zero2all.parallel.check import check_spread
from zero2all.parallel.mesh import Axis
from zero2all.parallel.parameter_table import init_weights
from zero2all.resilience import heartbeat
from zero2all.train.state import new_state

SHAPE = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "layers": 4, "heads": 2, "kv_heads": 1}
SCHEMES = {
    "diloco": {"scheme": "diloco", "every": 4, "compress": "int8"},
    "streaming": {"scheme": "streaming", "every": 9, "compress": "int4", "fragment_layers": 2, "tau": 2},
}


def make_state(kind="adamw", **shape):
    model = Z2all(ModelConfig(**{**SHAPE, "max_seq_len": 16, **shape}), resolve(OpsConfig(), "cpu"))
    init_weights(model, 1)
    return new_state(model, OptimConfig(kind), torch.float32)


def connect(state, hub, group, fields, last_step=None):
    groups = len(hub.links)
    config = DilocoConfig(groups=[f"host{at}:1" for at in range(groups)], group=group, **fields)
    state.outer = OuterOptimizer(config, state.model_tensors, state.weights, state.model.config.layers, last_step)
    hub.connect(group, state.outer)
    state.group = group
    return state


def connected(fields, kind="adamw", groups=2, last_step=None, **shape):
    hub = Hub(groups)
    return hub, [connect(make_state(kind, **shape), hub, group, fields, last_step) for group in range(groups)]


def train(state):
    """One inner step, with a gradient that depends on step and group."""
    generator = torch.Generator().manual_seed(1000 * state.step + state.group)
    state.weights.gradients.copy_(torch.randn(state.weights.gradients.shape, generator=generator))
    state.optimizer.set_learning_rate(1e-2)
    state.optimizer.step(torch.tensor(1.0), torch.tensor(False))
    if not state.optimizer.writes_weights:
        state.weights.publish_masters()
    state.weights.zero_gradients()
    state.step += 1
    state.tokens += 100


def train_all(states, steps):
    for _ in range(steps):
        for state in states:
            train(state)
        for state in states:
            state.outer.start(state.step, state.tokens)
        for state in states:
            state.outer.finish(state.step)


def bits(state, prefix=""):
    return {name: values for name, values in copies(state).items() if name.startswith(prefix)}


def assert_equal(one, other):
    assert one.keys() == other.keys()
    assert one
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize(("form", "step"), [("float32", 0.0), ("bf16", 2**-7), ("int8", 1 / 127), ("int4", 1 / 7)])
def test_what_is_decoded_is_near_as_long_as_the_formula_says_and_sound_unless_not_finite_or_too_large(form, step):
    for count in (0, 1, 1023, 1024, 5000):
        values = torch.randn(count, generator=torch.Generator().manual_seed(count))
        payload = encode(values, form)
        found = decode(payload, count, form)
        assert (len(payload), found.shape) == (payload_bytes(count, form), values.shape)
        assert count == 0 or (found - values).abs().max() <= 0.51 * step * values.abs().max()
        assert is_sound(payload, count, form)
    for bad in (torch.nan, torch.inf, -torch.inf, -1e30):
        values[4999] = bad
        assert not is_sound(encode(values, form), 5000, form)


def test_every_fragment_goes_once_a_round_and_the_rest_at_the_end():
    clock = Clock(every=10, fragments=3, tau=2, last_step=24)
    sent = [(step, due.number, due.fragment, due.merge_step) for step in range(1, 25) for due in clock.due(step)]
    assert [each[:3] for each in sent] == [
        *((3, 1, 0), (6, 3, 1), (10, 5, 2)),
        *((13, 7, 0), (16, 9, 1), (20, 11, 2)),
        *((23, 13, 0), (24, 14, 0), (24, 14, 1), (24, 14, 2)),
    ]
    assert [each[3] for each in sent] == [5, 8, 12, 15, 18, 22, 25, 24, 24, 24]
    assert [due.number for due in Clock(10, 3, 2, 99).due(26)] == [15]  # a prolonged run goes on with higher numbers
    assert [due.number for due in Clock(10, 3, 2, 2).due(2)] == [0, 0, 0], "a run that ends before the first fragment"
    names = ["embedding.weight", "blocks.0.a", "blocks.1.a", "blocks.2.a", "blocks.3.a", "norm.weight"]
    even, odd = ["blocks.0.a", "blocks.2.a"], ["blocks.1.a", "blocks.3.a"]
    assert (names_by_fragment(names, 3), names_by_fragment(names, 1)) == ([even, odd, [names[0], names[5]]], [names])


@pytest.mark.parametrize(
    ("groups", "outer_lr", "mu"), [(2, 0.6, 0.9), (3, 1.0, 0.0)], ids=["diloco", "local SGD: the mean of the weights"]
)
def test_the_outer_step_is_nesterov_on_the_mean_change(groups, outer_lr, mu):
    fields = {"scheme": "diloco", "every": 1, "compress": "float32", "outer_lr": outer_lr, "momentum": mu}
    _, states = connected(fields, groups=groups)
    outer, momentum = bits(states[0], "model/"), {}
    assert not bits(states[0], "outer_error/")
    for _ in range(3):
        for state in states:
            train(state)
        inner = [bits(state, "model/") for state in states]
        for state in states:
            state.outer.start(state.step, state.tokens)
        reports = [state.outer.finish(state.step) for state in states]
        assert [report.groups for of_group in reports for report in of_group] == [tuple(range(groups))] * groups
        for name, before in outer.items():
            mean = before.double() - sum(each[name].double() for each in inner) / groups
            momentum[name] = mu * momentum.get(name, 0) + mean
            outer[name] = before.double() - outer_lr * (mean + mu * momentum[name])
        for state in states:
            for name, value in bits(state, "model/").items():
                torch.testing.assert_close(value.double(), outer[name], rtol=1e-5, atol=1e-7)


def test_a_streamed_fragment_is_mixed_in_tau_steps_later():
    _, states = connected(SCHEMES["streaming"])
    train_all(states, 4)  # the first fragment, blocks 0 and 2, was sent after step 3
    before = bits(states[0], "model/")
    train(states[0])
    trained = bits(states[0], "model/")
    states[0].outer.start(5, 0)
    states[0].outer.finish(5)
    after, outer = bits(states[0], "model/"), bits(states[0], "outer/")
    for name, value in after.items():
        if name.startswith(("model/blocks.0.", "model/blocks.2.")):
            mixed = 0.5 * trained[name] + 0.5 * outer[name.replace("model/", "outer/")]
            torch.testing.assert_close(value, mixed)
            assert not torch.equal(value, trained[name])
        else:
            assert torch.equal(value, trained[name])
    assert not torch.equal(before["model/norm.weight"], trained["model/norm.weight"])


@pytest.mark.parametrize(("scheme", "kind"), [("diloco", "adamw"), ("streaming", "muon")])
def test_groups_agree_and_a_resume_with_a_fragment_in_flight_is_bit_equal(scheme, kind):
    whole, first, second = (connected(SCHEMES[scheme], kind, last_step=25)[1] for _ in range(3))
    train_all(whole, 25)
    train_all(first, 13)  # streaming: one was sent after step 12 and is mixed in after step 14
    for before, after in zip(first, second, strict=True):
        before.outer.settle()
        record = json.loads(json.dumps(before.outer.record()))
        assert bool(record["due"]) == (scheme == "streaming")
        loaded_from(after, bits(before))
        after.resume_from(before.counters())
        after.outer.loaded(record)
    train_all(second, 12)
    for one, other in zip(whole, second, strict=True):
        assert_equal(bits(one), bits(other))
    for prefix in ("outer/", "outer_momentum/"):
        assert_equal(bits(whole[0], prefix), bits(whole[1], prefix))
    assert any(error.any() for error in bits(whole[0], "outer_error/").values()), "int8 and int4 keep what they lost"
    # After the last step the model of every group is the outer one.
    model = {name.replace("model/", "outer/"): value for name, value in bits(whole[1], "model/").items()}
    assert_equal(model, bits(whole[0], "outer/"))


def test_a_lost_group_adopts_the_state_of_the_others():
    hub, states = connected(SCHEMES["diloco"])
    train_all(states, 6)
    hub.lose(1)
    train_all(states[:1], 8)
    assert states[0].outer.clock.due(12)
    hub.restore(1)
    train_all(states[:1], 2)  # round 3, after step 16, serves the state
    assert states[0].outer.missed == {"1": 12.0}  # three rounds of four steps
    states[0].outer.loaded(states[0].outer.record())
    assert states[0].outer.missed == {"1": 12.0}
    hub.connect(1, states[1].outer)
    assert states[1].outer.is_behind
    states[1].outer.missed = {"0": 28.0}  # as after a partition, in which it went on alone: those weights are gone
    assert states[1].outer.adopt() == (16, 1600)
    assert (states[1].outer.missed, states[1].outer.is_behind) == ({"1": 12.0}, False)
    assert_equal(bits(states[0], "outer/"), bits(states[1], "outer/"))
    assert_equal(bits(states[0], "model/"), bits(states[1], "model/"))
    states[1].step, states[1].tokens = 16, 1600
    train_all(states, 4)
    assert_equal(bits(states[0], "outer"), {**bits(states[0], "outer"), **bits(states[1], "outer/")})


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_not_finite_is_left_out_by_every_group_and_harms_none(scheme):
    """Over the real link: group 1 trains into NaN once, in a fragment or in all of it."""
    groups = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    states = [make_state() for _ in groups]
    reports, bad_step = [[], []], 9 if scheme == "streaming" else 8

    def work(group):
        config = DilocoConfig(groups=groups, group=group, wait_seconds=300.0, **SCHEMES[scheme])
        state = states[group]
        state.group, state.outer = group, OuterOptimizer(config, state.model_tensors, state.weights, SHAPE["layers"])
        layouts = [state.outer.layout]
        link = GroupLink(Membership(config, "run", {}, b"the secret of this test", expected_of(layouts)))
        state.outer.connect(RankLink(Peers(), layouts, link))
        for step in range(1, 19):
            train(state)
            if group == 1 and step == bad_step:
                with state.tensors() as tensors:
                    tensors["model/norm.weight"].values.fill_(torch.nan)
            state.outer.start(state.step, state.tokens)
            reports[group] += [report.groups for report in state.outer.finish(state.step)]
            if group == 1:  # what guards would do
                with state.tensors() as tensors:
                    tensors["model/norm.weight"].values.nan_to_num_(1.0)
        state.outer.settle()
        link.close()

    in_threads(work, range(2))
    assert reports[0] == reports[1]
    assert (0,) in reports[0]
    assert reports[0][-1] == (0, 1)
    for name, values in {**bits(states[0], "outer"), **bits(states[1], "outer")}.items():
        assert values.isfinite().all(), name
    assert_equal(bits(states[0], "outer/"), bits(states[1], "outer/"))


def test_an_outer_state_that_is_not_finite_is_neither_sent_nor_taken():
    _, (state, _) = connected(SCHEMES["diloco"])
    known, whole = expected_of([state.outer.layout]), state.outer._state()
    assert (len(whole), known.fault(None, whole)) == (known.state_bytes, "")
    places = [("<q", 0, -1), ("<q", 8, -1), ("<d", 16, torch.nan), ("<d", 24, torch.inf), ("<d", 24, -1.0)]
    for kind, at, value in (*places, ("<f", 32, torch.nan), ("<f", len(whole) - 4, -torch.inf)):
        spoilt = bytearray(whole)
        struct.pack_into(kind, spoilt, at, value)
        assert "not finite" in known.fault(None, bytes(spoilt))
    with state.tensors() as tensors:
        tensors["outer_momentum/norm.weight"].values[3] = torch.nan
    with pytest.raises(AnomalyError, match="not finite"):
        state.outer._state()


def test_the_outer_weights_are_in_the_model_only_for_a_while():
    _, (state,) = connected(SCHEMES["diloco"], groups=1)
    train_all([state], 6)
    own, outer = bits(state, "model/"), bits(state, "outer/")
    with state.outer.in_model():
        inside = {name.replace("model/", "outer/"): value for name, value in bits(state, "model/").items()}
        assert_equal(inside, outer)
    assert_equal(bits(state, "model/"), own)
    assert not torch.equal(own["model/norm.weight"], outer["outer/norm.weight"])


@pytest.mark.parametrize("name", SCHEMES)
def test_parts_that_are_worked_on_in_pieces_get_the_same_bits_and_bytes(name, monkeypatch):
    found = []
    for values in (1 << 22, 1 << 14):
        monkeypatch.setattr("zero2all.diloco.outer_optimizer.PIECE_VALUES", values)
        hub, states = connected(SCHEMES[name], vocab_size=1100)  # 17,600 values
        train_all(states, 9)
        states[0].outer.settle()
        found.append((bits(states[0]), hub.links[0].sent_bytes))
    assert_equal(found[0][0], found[1][0])
    rounds = 9 // SCHEMES[name]["every"]
    sizes = [math.prod(one.shape) for one in states[0].weights.table]
    formula = rounds * sum(payload_bytes(size, SCHEMES[name]["compress"]) for size in sizes)
    assert [sent for _, sent in found] == [formula] * 2


class Gathering:
    """`all_gather` among two threads."""

    def __init__(self) -> None:
        self.barrier, self.sent = threading.Barrier(2), {}

    def __call__(self, values, borders, axis):
        self.sent[axis.rank] = values.clone()
        self.barrier.wait()
        for rank, (start, stop) in enumerate(pairwise(borders)):
            values[start:stop] = self.sent[rank][start:stop]
        self.barrier.wait()
        return []


def test_copies_inside_a_group_divide_the_outer_work(monkeypatch):
    monkeypatch.setattr("zero2all.diloco.outer_optimizer.all_gather", Gathering())
    plain = {"scheme": "diloco", "every": 4, "compress": "float32"}
    _, (alone,) = connected(plain, groups=1)
    train_all([alone], 8)
    states = []
    for rank in range(2):
        state = make_state()
        state.weights.copies_axis = lambda _spread, rank=rank: Axis(rank, 2)
        states.append(connect(state, Hub(1), 0, plain))
    in_threads(lambda state: train_all([state], 8), states)
    for state in states:
        assert_equal(bits(state, "model/"), bits(alone, "model/"))
    halves = [bits(state, "outer/") for state in states]
    for name, value in bits(alone, "outer/").items():
        assert torch.equal(torch.cat([half[name].view(-1) for half in halves]), value.view(-1))


def test_a_group_that_waits_for_another_is_in_a_phase_of_its_own(monkeypatch):
    file = heartbeat.heartbeat_file(1)
    monkeypatch.setattr(heartbeat, "_own", heartbeat.Heartbeat(file, 0))
    slots, seen = heartbeat.Slots(file, 1), []
    _, states = connected(SCHEMES["diloco"])
    for state in states:
        for _ in range(4):
            train(state)

    def come_late():
        with suppress(AssertionError):
            wait_until(lambda: slots.beat(0).phase != "step", 20)
        seen.append(slots.beat(0).phase)
        states[1].outer.start(4, 400)

    heartbeat.beat("step", 4)
    states[0].outer.start(4, 400)
    late = threading.Thread(target=come_late)
    late.start()
    states[0].outer.finish(4)
    late.join()
    assert [*seen, slots.beat(0).phase] == ["groups", "step"]
    slots.close()


def test_a_run_of_few_rounds_is_told_which_momentum_to_try():
    cases = ((0.9, 799, "has 199 rounds"), (0.9, 4, "has 1 round."), (0.9, 800, ""), (0.7, 799, ""))
    for momentum, last_step, said in cases:
        _, (state, _) = connected({"scheme": "diloco", "every": 4, "momentum": momentum}, last_step=last_step)
        first, *more = state.outer.notes()
        assert "group 0 of 2" in first
        assert [said in one and "--diloco.momentum 0.7" in one for one in more] == [True] * bool(said)


def test_bad_settings_are_named_together_before_anything_starts():
    diloco = {"groups": ["a:1", "b:1", "c:1"], "every": 6, "fragment_layers": 1}
    with pytest.raises(ConfigError) as problem:
        small_config(diloco={**diloco, "momentum": 1, "alpha": 1.0})
    assert {"diloco.momentum", "diloco.alpha"} == {each.field for each in problem.value.problems}
    with pytest.raises(UsageError) as problem:  # 4 rows, 1 block and the ends
        check_spread(small_config(diloco={**diloco, "tau": 3}), 1)
    assert "a multiple of 96" in str(problem.value)
    assert "tau 3 must be less than every / fragments = 6 / 2" in str(problem.value)
    with pytest.raises(UsageError, match="every 1 is less than the 2 fragments"):
        check_spread(small_config(diloco={**diloco, "every": 1}), 1)


LAYOUTS = [Layout("float32", [[3], [2, 1]], [4], 2), Layout("float32", [[5], []], [1, 2], 2)]  # of two ranks


class Thread(Peers):
    def __init__(self, rank, shared):
        self.rank, self.size, self.shared, self.control = rank, 2, shared, self

    def broadcast(self, value):
        if self.rank == 0:
            self.shared.value = value
        self.shared.barrier.wait(20)
        found = self.shared.value
        self.shared.barrier.wait(20)
        return found


class Link:
    """In place of `GroupLink`: what was offered, from whom payloads come, and the state that is given and taken."""

    history, is_behind, is_asked = "its history", False, False

    def __init__(self):
        self.offered, self.served, self.problem = [], [], None

    def offer(self, key, payload):
        self.offered.append((key, payload))

    def collect(self, _key):
        if self.problem:
            raise self.problem
        own = self.offered[-1][1]
        return {1: bytes(len(own)), 0: own}

    def adopt(self):
        self.is_behind = False
        return self.served[-1]

    def serve(self, state):
        self.served.append(state)
        self.is_asked = False

    def stays(self):
        return self.is_asked


@pytest.fixture
def run(monkeypatch):
    """Runs `work(ranks, number of the rank)` in both, over one link; what each returned or raised."""
    shared = SimpleNamespace(barrier=threading.Barrier(2), value=None, sent={0: queue.Queue(), 1: queue.Queue()})
    fake = SimpleNamespace(
        send=lambda values, group, group_dst: group.shared.sent[group_dst].put(values.clone()),
        recv=lambda values, group, group_src: values.copy_(group.shared.sent[group.rank].get(timeout=20)),  # noqa: ARG005
    )
    monkeypatch.setattr(ranks, "dist", fake)

    def both(link, work):
        found = [None, None]

        def one(rank):
            try:
                found[rank] = work(RankLink(Thread(rank, shared), LAYOUTS, None if rank else link), rank)
            except Exception as error:
                found[rank] = error

        in_threads(one, range(2))
        return found

    return both


def values(rank, count):
    return (np.arange(count, dtype="<f4") + 100 * rank).tobytes()


def test_payloads_are_joined_in_the_order_of_the_ranks_and_each_gets_its_part(run):
    link = Link()

    def work(own, rank):
        sizes = [LAYOUTS[rank].size(fragment) // 4 for fragment in range(2)]
        return [own.exchange(Key(7, at), values(rank, size)) for at, size in enumerate(sizes)], own.history

    found = run(link, work)
    assert link.offered == [(Key(7, 0), values(0, 3) + values(1, 5)), (Key(7, 1), values(0, 3))]
    for rank, (first, second) in enumerate(((3, 3), (5, 0))):
        both = [{0: values(rank, first), 1: bytes(4 * first)}, {0: values(rank, second), 1: bytes(4 * second)}]
        assert found[rank] == (both, "its history")
    assert list(found[0][0][0]) == [0, 1], "in the order of the groups"


def test_a_state_goes_whole_to_the_others_and_comes_back_in_parts(run):
    link = Link()
    link.is_asked = link.is_behind = True
    head = LAYOUTS[0].head.pack(3, 400, 0.0, 1.5)

    def work(own, rank):
        state = head + values(rank, sum(LAYOUTS[rank].state))
        assert own.is_behind
        stayed = [own.stays(lambda: state), own.stays(lambda: state)]
        return stayed, own.adopt() == state, own.is_behind

    assert run(link, work) == [([True, False], True, False)] * 2
    assert link.served == [head + values(0, 4) + head + values(1, 3)]
    assert expected_of(LAYOUTS).fault(None, link.served[0]) == ""


def test_an_error_of_the_link_is_raised_in_every_rank(run):
    link = Link()
    link.problem = PeerFailureError("the others are gone")
    found = run(link, lambda own, rank: own.exchange(Key(1, 0), values(rank, LAYOUTS[rank].size(0) // 4)))
    assert [(type(error), str(error)) for error in found] == [(PeerFailureError, "the others are gone")] * 2


def test_a_payload_of_a_group_has_a_fault_wherever_a_value_is_not_finite():
    known = expected_of(LAYOUTS)
    assert (known.payload_bytes, known.fault(0, torch.ones(8).numpy().tobytes())) == ([32, 12], "")
    for at in (0, 3, 7):
        payload = torch.ones(8)
        payload[at] = torch.inf
        assert known.fault(0, payload.numpy().tobytes())
