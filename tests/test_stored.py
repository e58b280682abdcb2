"""A run that an earlier version began goes on in this one.

stored.pt is the ckpt.prev.pt (step 4) of `python train_gpt.py` with the flags below and
`--data_dir=cache --out_dir=out`, where the set `verse` is that of conftest.py. Asserted is what
holds on any CPU and with any torch: weights and optimizer are the file's, bit for bit; the loss of
the next step, a forward pass in float32, is the one that was logged, to 1e-5; those after it to
1e-3, since Muon's updates are computed in bfloat16. A change that breaks this needs another
checkpoint.FORMAT."""
import shutil
from pathlib import Path

import pytest
import torch

import checkpoint
from flags import parse
from optim import make_optimizer
from parallel import Processes
from run import Run
import train_gpt
from helpers import losses, same, weights

STORED = Path(__file__).with_name("stored.pt")
FLAGS = ["pydoc", "--data=verse", "--width=8", "--heads=2", "--layers=1", "--context=8",
         "--batch_size=8", "--micro_batch=8", "--steps=8", "--warmup=2", "--min_lr=0",
         "--save_every=4", "--eval_every=100", "--sample=0", "--log_every=1", "--device=cpu",
         "--dtype=float32", "--optimizer=muon", "--lr=1e-2"]
LOSSES = [1.5413618088, 1.5277750492, 1.5162875652, 1.5147609711]       # of steps 5 to 8


@pytest.fixture
def flags(tmp_path, text_cache):
    """The flags that continue a copy of it in tmp_path/out."""
    (tmp_path / "out").mkdir()
    shutil.copy(STORED, tmp_path / "out" / "ckpt.pt")
    return [*FLAGS, f"--data_dir={text_cache}", f"--out_dir={tmp_path / 'out'}", "--resume"]


def test_a_stored_run_is_read_bit_for_bit(flags, text_cache):
    c, _ = parse(train_gpt.Config, train_gpt.PRESETS, flags, "")
    run = Run(c, "gpt", "pydoc", Processes("cpu"))
    model = train_gpt.build_model(c, train_gpt.text.load("verse", text_cache).tokenizer)
    optimizer = make_optimizer(model, c.optimizer, c.lr, c.weight_decay, (c.beta1, c.beta2))
    checkpoint.restore(run, model.config, optimizer, model)
    run.close()
    raw = torch.load(STORED, weights_only=True)
    assert run.step == raw["step"] == 4 and same(model.state_dict(), raw["model"])
    for part, state in optimizer.state_dict().items():
        stored = raw["optimizer"][part]["state"]
        assert stored and stored.keys() == state["state"].keys()
        assert all(same(state["state"][i], stored[i]) for i in stored), part


def test_a_stored_run_goes_on(flags, tmp_path):
    train_gpt.main(flags)
    found = losses(tmp_path / "out")
    assert found[0] == pytest.approx(LOSSES[0], abs=1e-5)
    assert found[1:] == pytest.approx(LOSSES[1:], abs=1e-3)
    train_gpt.main([*flags[:-1], f"--out_dir={tmp_path / 'new'}"])      # written today: alike
    new, old = ({name: tensor.shape for name, tensor in weights(path).items()}
                for path in (tmp_path / "new" / "ckpt.prev.pt", STORED))
    assert new == old
