"""Stochastic rounding: right on average, reproducible, and independent between places, steps and parameters."""

import pytest
import torch

from zero2all.parallel.parts import Box, TensorPart
from zero2all.train.optimizers.rounding import (
    _at_places,
    decode,
    encode,
    fraction,
    places_of,
    random_bits,
    rounding_key,
    to_bfloat16,
)

MANY = 1 << 16


def bits(seed=1, name="w", count=1, stream=0, places=MANY):
    key = rounding_key(seed, name, torch.tensor(float(count)))
    return random_bits(torch.arange(places, dtype=torch.int32), key, stream)


def test_the_dice_are_even():
    found = fraction(bits())
    assert float(found.min()) >= 0
    assert float(found.max()) < 1
    assert (torch.histc(found, bins=16, min=0, max=1) / (MANY / 16) - 1).abs().max() < 0.06
    assert len(bits().unique()) == MANY


@pytest.mark.parametrize("other", [{"seed": 2}, {"name": "v"}, {"count": 2}, {"stream": 1}])
def test_another_seed_parameter_step_or_stream_throws_other_dice(other):
    one, two = fraction(bits()) - 0.5, fraction(bits(**other)) - 0.5
    assert abs(float((one * two).mean()) * 12) < 0.02
    assert torch.equal(bits(**other), bits(**other))


@pytest.mark.parametrize("value", [1.001, -3.7e-5, 1e-20])
def test_bfloat16_takes_a_neighbour_and_is_right_on_average(value):
    exact = torch.full((MANY,), value)
    found = to_bfloat16(exact, bits()).float()
    gap = abs(value) * 2**-7
    assert (found - exact).abs().max() <= gap
    assert len(found.unique()) == 2
    assert abs(float(found.double().mean()) - float(exact[0])) < gap * 4 / MANY**0.5


def test_what_bfloat16_can_hold_stays_as_it_is():
    exact = torch.tensor([0.0, -0.0, 1.0, -2.5, 3e38, torch.inf, -torch.inf]).bfloat16()
    assert torch.equal(to_bfloat16(exact.float(), bits(places=7)).view(torch.int16), exact.view(torch.int16))
    assert to_bfloat16(torch.tensor([torch.nan]), bits(places=1)).isnan().all()


@pytest.mark.parametrize(("codes", "power"), [(127, 2), (255, 4)])
def test_codes_are_right_on_average_and_exact_at_the_largest(codes, power):
    row = torch.tensor([1.0, 0.3, 0.01, 1e-4, 1e-7, 0.0] + [0.0] * 250)
    values = row.repeat(4096, 1) * 5.0
    index = torch.arange(values.numel(), dtype=torch.int32).view_as(values)
    chances = fraction(random_bits(index, rounding_key(0, "w", torch.tensor(1.0)), 0))
    found, scales = encode(values, codes, power, chances)
    back = decode(found, scales, codes, power)
    assert bool((back[:, 0] == 5.0).all())
    assert bool((back[:, 5:] == 0.0).all())
    for column in range(5):
        value = float(values[0, column])
        spread = float(back[:, column].std())
        assert float(back[:, column].mean()) == pytest.approx(value, abs=4 * spread / 64 + 1e-6 * value), value
    assert float((back[:, 1] - 1.5).abs().max()) < 1.5 * power / (codes * 0.3 ** (1 / power))


def test_codes_keep_signs_and_blocks_apart():
    values = torch.zeros(2, 300)
    values[0, 0], values[0, 299], values[1, 5] = -8.0, 2.0, -1e-3
    found, scales = encode(values, 127, 2, torch.zeros(2, 300))
    torch.testing.assert_close(scales, torch.tensor([[8.0, 2.0], [1e-3, 0.0]]))
    torch.testing.assert_close(decode(found, scales, 127, 2), values)


def test_places_of_rows_and_values_are_those_in_the_whole_tensor():
    def places(part, rows):
        values = part.values[rows]
        return _at_places(lambda _gradient, found, _key: found, values, places_of(part, rows), torch.tensor(0)).tolist()

    rows = TensorPart.of_range(torch.empty(2 * 20), (3, 4, 5), 20, None)
    assert places(rows, ...) == torch.arange(20, 60).view(2, 4, 5).tolist()
    assert places(rows, slice(1, 2)) == torch.arange(40, 60).view(1, 4, 5).tolist()
    values = TensorPart.of_range(torch.empty(9), (3, 4, 5), 7, None)
    assert places(values, slice(2, 5)) == [9, 10, 11]
    columns = TensorPart.of_range(torch.empty(6), (3, 4), 0, None, Box((0, 2), (3, 2)))
    assert places(columns, slice(1, 3)) == [[6, 7], [10, 11]]
