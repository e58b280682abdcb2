"""Tiny runs of the four scripts, and what tests read of them."""
import dataclasses

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import checkpoint
from run import read_metrics

_MODEL = ["--width=16", "--heads=2", "--layers=2", "--log_every=1", "--device=cpu",
          "--dtype=float32"]                    # auto is not the same on every CPU
IMAGES = ["shapes", *_MODEL, "--patch_size=8", "--batch_size=20", "--epochs=1"]
VIEWS = [*IMAGES, "--local_views=2", "--hidden=32", "--output=16", "--prototypes=24"]
TEXT = ["pydoc", "--data=tiny", *_MODEL, "--context=16", "--batch_size=8", "--micro_batch=8",
        "--steps=12", "--warmup=2", "--eval_every=100", "--eval_windows=7"]
ADAMW = ["--optimizer=adamw", "--lr=2e-3"]      # the presets' Muon, in bfloat16, amplifies rounding
FLAGS = dict(train_vit=IMAGES + ADAMW, train_mae=[*IMAGES, "--lr=1.25e-3"],
             train_simdino=[*VIEWS, "--lr=3e-4"], train_gpt=TEXT + ADAMW)


def metrics(folder, split="train"):
    """The lines of a split in metrics.jsonl, without rates."""
    lines = [line for line in read_metrics(folder) if line.get("split") == split]
    return [{k: v for k, v in line.items() if not k.endswith("_per_s")} for line in lines]


def losses(folder):
    return [line["loss"] for line in metrics(folder)]


def weights(path):
    """Every tensor of a checkpoint by name: model, student, center, optimizer. A folder means its
    ckpt.pt."""
    content = checkpoint.read_checkpoint(path / "ckpt.pt" if path.is_dir() else path)
    found = dict(content["model"])
    parts = dict(content["extra"])
    for number, optimizer in enumerate(content["optimizer"] or []):
        parts |= {f"optimizer.{number}.{i}": state for i, state in optimizer["state"].items()}
    for part, state in parts.items():
        state = state if isinstance(state, dict) else {"": state}
        found |= {f"{part}.{name}": torch.as_tensor(value) for name, value in state.items()}
    return found


def scrambled(model):
    """The model with random parameters, away from zeros and small residuals."""
    for p in model.parameters():
        p.data.normal_(std=0.3)
    return model.eval()


class Launches(TorchDispatchMode):
    """Around some code: `waits` has now() of each operator that would wait for a GPU."""

    def __init__(self, now):
        super().__init__()
        self.waits, self.now = set(), now

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ in (
                "_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "unique2"):
            self.waits.add(self.now())
        return function(*args, **kwargs or {})


def same(a, b):
    """Whether two dictionaries of tensors are equal, bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def write_model(path, model, task, meta, **run_config):
    """A checkpoint of a model as the training scripts write it."""
    checkpoint.write_checkpoint(path, dict(
        task=task, model=model.state_dict(), model_config=dataclasses.asdict(model.config), step=1,
        data_meta=meta, run_config=dict(seed=0) | run_config, best=None, optimizer={}, extra={}))
