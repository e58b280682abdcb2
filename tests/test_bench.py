"""The benchmarks compare equal functions, with correct clocks and counts; every table runs."""
from functools import partial

import pytest
import torch
from helpers import scrambled

import bench

CPU = torch.device("cpu")
IMAGE = dict(width=32, heads=4, layers=1, image_size=16, patch_size=4, classes=5)
TEXT = dict(width=16, heads=2, layers=1, context=6, vocab_size=9)


@pytest.mark.parametrize("table, fields", [("vit", IMAGE), ("gpt", TEXT)])
@pytest.mark.parametrize("variant", [arch for arch in bench.VARIANTS if "literal" in arch])
def test_literal_is_the_same_function(monkeypatch, table, fields, variant):
    monkeypatch.setattr(torch, "randn", partial(torch.randn, dtype=torch.float64))
    fast, literal = (bench.build(table, arch, fields).double() for arch in ("crate", variant))
    literal.load_state_dict(scrambled(fast).state_dict())
    losses, batch = [], bench.random_batch(fast.config, 3, CPU)
    for model in (fast, literal.eval()):
        losses.append(bench.loss_of(model, *batch))
        losses[-1].backward()
    torch.testing.assert_close(*losses, rtol=0, atol=1e-10)
    for (key, a), b in zip(fast.named_parameters(), literal.parameters()):
        assert a is not b and a.grad is not None, key
        torch.testing.assert_close(b.grad, a.grad, rtol=0, atol=1e-10, msg=key)


@pytest.mark.parametrize("table", ["vit", "gpt"])
def test_tables(monkeypatch, table):
    tables = dict(vit=[("a", 2, IMAGE)], gpt=[("a", 2, TEXT)])
    rows = []
    monkeypatch.setattr(bench, "MODELS", tables)
    monkeypatch.setattr(bench, "print_table", rows.extend)
    bench.main([table, "--device=cpu", "--repeats=1"])
    assert [row["variant"] for row in rows] == [*bench.VARIANTS]
    assert min(row["ms"] for row in rows) > 0
    literal = rows[[*bench.VARIANTS].index("literal")]
    assert rows[0]["of literal"] == pytest.approx(rows[0]["ms"] / literal["ms"])
    if table == "vit":
        assert rows[0]["images/s"] == pytest.approx(2e3 / rows[0]["ms"])
        # the shares are rates of FLOPs, 6 (17 W + 2 17^2 d) with W weights in the matrices
        fast, *_, transformer = (row["of the machine"] * row["ms"] for row in rows)
        flops = 17 * 3 * 32 ** 2 + 2 * 17 ** 2 * 32, 17 * 12 * 16 ** 2 + 2 * 17 ** 2 * 16
        assert fast / transformer == pytest.approx(flops[0] / flops[1])
