"""Language models: causal CRATE, CRATE-alpha, ToST, attention-only, and GPT-2 as the baseline.

    torchrun --standalone --nproc_per_node=8 train_gpt.py    causal CRATE-Base, OpenWebText
    python train_gpt.py pydoc                                Python's manual, two CPU cores
    python train_gpt.py shakespeare --arch=tost              any preset, any flag

[B] 7.4, nanoGPT's recipe: AdamW (the preset `pydoc` has Muon), linear warm-up, cosine, gradients
clipped at norm 1. With --objective=masked tokens see all others, and the masked ones are predicted
(CRATE-BERT, [J])."""
from dataclasses import dataclass
from functools import partial

import torch

from data import text
from evaluate import language_scores
from flags import model_fields, ModelFlags, option, parse_run, UserError
from measure import count, train_flops
from model import LanguageModel, text_config, TextConfig
from optim import cosine_schedule, make_optimizers, micro_batches, take_step
from processes import cli, derive_seed, Processes, to_device, wants_compile
from run import Run, RunFlags


@dataclass(kw_only=True)
class Config(RunFlags, ModelFlags):
    """Defaults are nanoGPT's for GPT-2, except [B]'s batches of 384. Presets change them. A run
    cannot be resumed with another value of what is `fixed`."""
    data: str = option("openwebtext", "a prepared text set", fixed=True)
    objective: str = option("causal", "masked is BERT's", choices=("causal", "masked"))
    mask_rate: float = option(0.15, "share of tokens to predict if masked", above=0, high=0.99)
    context: int = option(1024, "tokens a sequence", low=2)
    once: bool = option(False, "read each token at most once, of a text larger than the run",
                        fixed=True)
    rotary: bool = option(False, "rotary positions in place of learned ones")
    shift: bool = option(False, "keys and values that see the previous token")
    dropout: float = option(0.0, "zeroed share of the activations", low=0, high=0.99)
    # optimization
    lr: float = option(6e-4, "peak learning rate", above=0)
    min_lr: float = option(6e-5, "where the cosine ends", low=0)
    weight_decay: float = option(0.1, "decoupled, on matrices only", low=0, fixed=True)
    beta2: float = option(0.95, "AdamW's beta2, for squares, or Lion's", low=0, high=0.9999,
                         fixed=True)
    batch_size: int = option(384, "sequences a step, of all processes together", low=1, fixed=True)
    micro_batch: int | None = option(None, "sequences at once, to save memory; auto is all", low=1)
    steps: int = option(600_000, "optimizer steps, warm-up included", low=1)
    warmup: int = option(2000, "steps of linear warm-up, half of all at most", low=0)
    clip: float = option(1.0, "largest norm of the gradient; 0: no limit", low=0)
    eval_windows: int = option(400, "sequences of an evaluation; 0, and at the end: all", low=0)


_OWT = dict(data="openwebtext", size="base")
PRESETS = {
    "openwebtext": dict(_OWT, micro_batch=16),      # [B] 7.4; 16 have logits of 3.3 GB in float32
    "tost": dict(_OWT, micro_batch=12, arch="tost",
                 batch_size=480, weight_decay=0.01),    # released ToST; 0.1 above Base
    "gpt2": dict(_OWT, micro_batch=12, arch="transformer"),
    "bert": dict(           # BERT's peak lr, decay and length; its lr falls linearly
        _OWT, micro_batch=32, objective="masked", context=512, batch_size=256, lr=1e-4,
        min_lr=0.0, weight_decay=0.01, beta2=0.999, warmup=10_000, steps=1_000_000),
    # nanoGPT's shakespeare_char; CPU: --width=128 --heads=4 --layers=4 --context=64
    "shakespeare": dict(
        data="shakespeare_char", width=384, heads=6, layers=6, context=256, batch_size=64, lr=1e-3,
        min_lr=1e-4, beta2=0.99, dropout=0.2, steps=5000, warmup=100, eval_every=250,
        eval_windows=0),
    "pydoc": dict(          # minutes on a CPU
        data="pydoc", width=256, heads=4, layers=4, context=128, batch_size=32,
        optimizer="muon", lr=1e-2,      # 1.31 nats after 600 steps; weight_decay=1 gains 0.04
        min_lr=2e-4, beta2=0.99, steps=600, warmup=50, eval_every=150, eval_windows=0,
        log_every=50),
}
PRESETS["mytext"] = PRESETS["pydoc"] | dict(data="mytext")      # as the README prepares it


# ---- Model --------------------------------------------------------------------------------------
def build_model(c, tokenizer):
    """The language model that the flags describe."""
    causal, n_vocab = c.objective == "causal", tokenizer.n_vocab
    # [MASK] is one id more; GPT-2's are padded to a multiple of 64, and it is in the padding
    vocab_size = 50304 if n_vocab == 50257 else n_vocab + (not causal)
    fields = model_fields(TextConfig, c, vocab_size=vocab_size, causal=causal)
    return LanguageModel(text_config(c.size, **fields))


def main(argv):
    """Trains one language model; returns the last line of metrics.jsonl."""
    # ---- config
    c, name = parse_run(Config, PRESETS, argv, __doc__, default="openwebtext")
    processes = Processes(c.device, c.dtype)
    device, rows = processes.device, processes.rows(c.batch_size)
    masked = c.objective == "masked"

    # ---- data
    data = text.load(c.data, cache=c.data_dir)
    tokenizer = data.tokenizer
    if data.train is None or data.val is None:
        raise UserError(f"{c.data} has no part to train on, or no val to validate on")
    if len(data.train) <= c.context:
        raise UserError(f"{c.data} has {len(data.train):,} training tokens, too few for "
                        f"--context={c.context}: use a smaller context")
    if c.once and c.steps * c.batch_size > (len(data.train) - 1) // c.context:
        raise UserError(f"--once: {c.data} has {len(data.train):,} training tokens, too few for "
                        f"{c.steps * c.batch_size:,} windows of {c.context}")
    val = data.val[:c.eval_windows * c.context + 1] if c.eval_windows else data.val
    validate = partial(language_scores, processes=processes, n_vocab=tokenizer.n_vocab,
                       mask_rate=c.mask_rate,
                       batch_size=c.micro_batch or c.batch_size // processes.world)

    # ---- model
    torch.manual_seed(derive_seed(c.seed, "weights"))
    model = build_model(c, tokenizer).to(device)

    # ---- optimizer
    optimizers = make_optimizers(model, c.optimizer, c.lr, c.weight_decay, (0.9, c.beta2),
                                 hidden=[model.layers])
    schedule = cosine_schedule(c.lr, c.steps, c.warmup, min(c.min_lr, c.lr))

    # ---- run
    run = Run(c, "gpt", name, processes)
    run.attach(model, optimizers, data.meta())
    ddp = processes.wrap(model)
    if wants_compile(c.compile, device):
        model.compile()

    what = (f"{model.config.arch}, {count(model, without=('positions',)):,} parameters without "
            f"positions, {c.data} ({len(data.train):,} tokens), batches of {c.batch_size} x "
            f"{c.context} tokens")
    for step in run.steps(c.steps, what, eval_every=1000, flops=train_flops(model)):
        model.train()
        torch.manual_seed(derive_seed(c.seed, step, "dropout", processes.rank))

        # batch: all of it, as its masks are drawn, then the rows of this process
        x, y = text.batch(data.train, step, c.batch_size, c.context, c.seed, c.once)
        if masked:
            hide = torch.Generator().manual_seed(derive_seed(c.seed, step, "mask"))
            x, y = text.mask_some(x, hide, tokenizer.n_vocab, c.mask_rate)
        x, y = to_device(x[rows], device), to_device(y[rows], device)

        # the number of targets in the step: every token, or the randomly masked ones
        n_targets = processes.sum((y >= 0).sum()).clamp_min(1)

        # forward and backward
        loss = 0.0
        for micro_x, micro_y in micro_batches(ddp, c.micro_batch, x, y):
            with processes.autocast():
                micro_loss = ddp(micro_x, micro_y)          # summed over its targets
            # DDP averages over the processes, so multiply by their number
            micro_loss = micro_loss * (processes.world / n_targets)
            micro_loss.backward()
            loss = loss + micro_loss.detach()

        # clip and step
        if c.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), c.clip)
        take_step(optimizers, schedule[step])

        # log, and evaluate if that is due: on the first --eval_windows sequences, which choose
        # best.pt, at the end on all
        run.log(loss, schedule[step])
        if run.evaluation_due:
            scores = validate(model, val)
            chosen_by = scores["loss"]
            if step + 1 == c.steps and len(val) < len(data.val):
                scores = validate(model, data.val)
            run.record(scores, chosen_by)
    sample = [] if masked else ["python sample.py --ckpt={dir}/best.pt --prompt='The '"]
    return run.done("python evaluate.py lm --ckpt={dir}/best.pt    # loss of the whole split",
                    *sample)


if __name__ == "__main__":
    cli(main)
