"""
Language models: causal CRATE, CRATE-alpha, ToST, attention-only, and GPT-2 as the baseline.

    torchrun --standalone --nproc_per_node=8 train_gpt.py                 causal CRATE-Base on OpenWebText, the setting of [B] 7.4
    python train_gpt.py pydoc                                             Python's own manual, two CPU cores, under three minutes
    python train_gpt.py shakespeare --arch=tost                           any preset, any flag

[B] 7.4, nanoGPT's recipe: AdamW, linear warm-up, cosine, gradients clipped at norm 1. --objective=masked trains a bidirectional
model to fill in masked tokens (CRATE-BERT, [J]). The batch is that of all processes together, so it is the same on 1 GPU and 8.
"""
import math
from dataclasses import asdict, dataclass

import torch

import common
from common import option
from data import text
from model import ARCHS, LanguageModel, TextConfig, make_config, text_config


@dataclass(kw_only=True)
class Config(common.RunConfig):
    """Flags of this script; None is shown as auto."""
    data: str = option("pydoc", "a prepared text set")
    objective: str = option("causal", "next token, or BERT's masked tokens", choices=("causal", "masked"))
    mask_rate: float = option(0.15, "share of tokens to predict in the masked objective", above=0, high=0.99)
    # model: a named size of the arch, or width, heads and layers, or both
    arch: str = option("crate", "the layer (model.py's table)", choices=tuple(ARCHS))
    size: str | None = option(None, "small, base, medium or large; sets width, heads and layers", displaces=("width", "heads", "head_dim", "layers"))
    width: int | None = option(None, "d", low=1)
    heads: int | None = option(None, "K", low=1)
    head_dim: int | None = option(None, "p; auto is width / heads", low=1)
    layers: int | None = option(None, "L", low=1)
    context: int = option(1024, "tokens a sequence", low=2)
    eta: float | None = option(None, "step of ISTA and ODL; auto is 0.1", low=0)
    lambd: float | None = option(None, "sparsity weight lambda; auto is 0.1", low=0)
    step: float | None = option(None, "step of MSSA in crate-c, -n, -t; auto is 1")
    layer_scale: float | None = option(None, "LayerScale at initialization; auto is 1 for tost, none elsewhere", low=0)
    dropout: float = option(0.0, "after embedding, attention and MLP", low=0, high=0.99)
    init_from: str | None = option(None, "a checkpoint of this script whose weights to start from")
    # optimization
    optimizer: str = option("adamw", "update rule", choices=("lion", "adamw"))
    lr: float = option(6e-4, "peak learning rate", above=0)
    min_lr: float = option(6e-5, "where the cosine ends", low=0)
    weight_decay: float = option(0.1, "decoupled, on matrices only", low=0)
    beta1: float = option(0.9, "momentum", low=0, high=0.9999)
    beta2: float = option(0.95, "second average", low=0, high=0.9999)
    batch_size: int = option(384, "sequences a step, of all processes together", low=1)
    micro_batch: int = option(12, "sequences at once in a process; the rest of its share follows before the step", low=1)
    steps: int = option(600_000, "optimizer steps, warm-up included", low=1)
    warmup: int = option(2000, "steps of linear warm-up", low=0)
    clip: float = option(1.0, "largest norm of the gradient; 0: no limit", low=0)
    eval_windows: int = option(400, "sequences of an evaluation on the way; 0, and the last one: every token once", low=0)
    sample: int = option(200, "tokens to write at each evaluation; 0: none", low=0)


_OWT = dict(data="openwebtext", size="base", eval_every=1000)
PRESETS = {
    # [B] 7.4: nanoGPT's setting. 16 sequences a forward pass fit 40 GB.
    "openwebtext": dict(_OWT, micro_batch=16),
    "crate-alpha": dict(_OWT, arch="crate-alpha"),
    "tost": dict(_OWT, arch="tost", batch_size=480, weight_decay=0.01),      # released ToST: 480 sequences, 0.1 above Base
    "aot": dict(_OWT, arch="aot"),
    "gpt2": dict(_OWT, arch="transformer"),
    # BERT's rate and decay; its 15 % are --mask_rate
    "bert": dict(_OWT, objective="masked", context=512, batch_size=256, micro_batch=32, lr=1e-4, min_lr=0.0, weight_decay=0.01, beta2=0.999,
                 warmup=10_000, steps=1_000_000),
    # nanoGPT's shakespeare_char; on a CPU add --width=128 --layers=4 --context=64 --steps=2000
    "shakespeare": dict(data="shakespeare_char", width=384, heads=6, layers=6, context=256, batch_size=64, micro_batch=64, lr=1e-3, min_lr=1e-4,
                        beta2=0.99, dropout=0.2, steps=5000, warmup=100, eval_every=250, eval_windows=0),
    # The README's quick start for text
    "pydoc": dict(data="pydoc", width=256, heads=4, layers=4, context=128, batch_size=32, micro_batch=32, lr=2e-3, min_lr=2e-4, beta2=0.99,
                  steps=600, warmup=50, eval_every=150, eval_windows=0, log_every=50),
}


def build_model(c, tokenizer):
    """The language model that the flags describe, filled from --init_from if given."""
    masked = c.objective == "masked"
    # GPT-2's 50257 are padded to a multiple of 64 for the sake of the matmul; the masked objective needs one id more, for [MASK]
    vocab = 50304 if isinstance(tokenizer, text.GPT2Tokenizer) and tokenizer.n_vocab == 50257 else tokenizer.n_vocab + masked
    flags = common.sub_config(TextConfig, c, vocab_size=vocab, causal=not masked)
    arch = flags.pop("arch")
    model = LanguageModel(text_config(c.size, arch, **flags) if c.size else make_config(TextConfig, flags | dict(arch=arch)))
    if c.init_from:
        common.load_into(model, common.load_checkpoint(c.init_from, "gpt")["model"], c.init_from)
    return model


@torch.no_grad()
def evaluate(model, tokens, c, tokenizer, processes, all_tokens):
    """Mean loss per predicted token (and, masked, top-1 accuracy) over the validation text, shared among the processes.

    Every token is a target once if `all_tokens`, otherwise those of the first --eval_windows windows."""
    model.eval()
    if not all_tokens and c.eval_windows:
        tokens = tokens[:c.eval_windows * c.context + 1]
    total = torch.zeros(3, dtype=torch.float64 if processes.device.type != "mps" else torch.float32, device=processes.device)
    for i, (x, y) in enumerate(text.eval_batches(tokens, c.context, c.micro_batch, processes.rank, processes.world)):
        if c.objective == "masked":     # a mask is a function of its window's number: the same at every evaluation, however shared out
            for row in range(len(x)):
                window = (i * len(x) + row) * processes.world + processes.rank
                hide = torch.Generator().manual_seed(common.derive_seed("masked evaluation", window))
                x[row], targets = text.mask_tokens(x[row:row + 1], hide, tokenizer.n_vocab, tokenizer.n_vocab, c.mask_rate)
                y[row] = torch.where(y[row] >= 0, targets, -1)               # no target where the window is filled up
        x, y = x.to(processes.device), y.to(processes.device)
        count = (y >= 0).sum()
        with processes.autocast(c.dtype):
            loss = model(x, y)
            right = (model(x).argmax(-1) == y).sum() if c.objective == "masked" else count.new_zeros(())
        total += torch.stack([loss * count, right, count])
    loss, right, n = processes.sum(total).tolist()
    scores = dict(loss=loss / n, ppl=math.exp(min(loss / n, 700)), n=int(n))
    return scores | dict(acc=right / n) if c.objective == "masked" else scores


def write_sample(model, tokenizer, c, run, device):
    """A few lines by the model, from an empty page, at temperature 0.8."""
    start = torch.tensor([[tokenizer.eot if tokenizer.eot is not None else int(tokenizer.encode("\n")[0])]], device=device)
    generator = torch.Generator(device).manual_seed(common.derive_seed(c.seed, run.step, "sample"))
    model.eval()
    written = model.generate(start, c.sample, temperature=0.8, top_k=200, stop=tokenizer.eot, generator=generator)
    words = tokenizer.decode([i for i in written[0, 1:].tolist() if i < tokenizer.n_vocab])
    run.say("\n".join("  | " + line for line in words.splitlines()))
    return words


def main(argv):
    """Trains one language model; returns the last line of metrics.jsonl."""
    c, preset = common.parse(Config, PRESETS, argv, __doc__, default="openwebtext")
    processes = common.Processes(c.device)
    device, rows = processes.device, processes.rows(c.batch_size)
    data = text.load(c.data, cache=c.data_dir)
    if data.train is None or data.val is None:
        raise common.UserError(f"{c.data} has no training or no validation part: it is for evaluate.py")
    text.batch(data.train, 0, 1, c.context, c.seed)      # too short a text is told before the run's folder is made
    tokenizer, masked = data.tokenizer, c.objective == "masked"
    torch.manual_seed(common.derive_seed(c.seed, "weights"))
    model = build_model(c, tokenizer).to(device)
    run = common.Run(c, "gpt", preset, processes)
    schedule = common.warmup_cosine(c.lr, c.steps, min(c.warmup, c.steps), min(c.min_lr, c.lr))
    eval_every = c.eval_every or 1000
    save_every = c.save_every or eval_every

    optimizer = common.make_optimizer(model, c.optimizer, c.lr, c.weight_decay, (c.beta1, c.beta2))
    if run.resumed is not None:
        common.restore(run, model.config, optimizer, model)
    if common.wants_compile(c, device):
        model.compile()
    parallel = processes.wrap(model)
    run.begin(c.steps, "tokens", c.batch_size * c.context, flops=model.train_flops())
    run.say(f"{model.config.arch}, {model.count():,} parameters without positions, {c.data} ({len(data.train):,} tokens), {c.steps} steps of "
            f"{c.batch_size} x {c.context} tokens on {processes.world} x {common.device_name(device)}")

    def checkpoint():
        meta = dict(name=c.data, tokenizer=tokenizer.meta(), n_vocab=tokenizer.n_vocab, objective=c.objective)
        return dict(model=model.state_dict(), model_config=asdict(model.config), optimizer=optimizer.state_dict(), data_meta=meta, extra={})

    for step in range(run.start, c.steps):
        torch.manual_seed(common.derive_seed(c.seed, step, "dropout", processes.rank))
        model.train()
        common.set_lr(optimizer, schedule[step])
        x, y = text.batch(data.train, step, c.batch_size, c.context, c.seed, rows)
        if masked:
            hide = torch.Generator().manual_seed(common.derive_seed(c.seed, step, "mask"))
            x, y = text.mask_tokens(x, hide, tokenizer.n_vocab, tokenizer.n_vocab, c.mask_rate, rows, c.batch_size)
        x, y = (t.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else t.to(device) for t in (x, y))

        # the mean over the targets of all processes, whose number is known unless it was drawn
        targets = c.batch_size * c.context if not masked else processes.sum((y >= 0).sum().float()).clamp_min(1)
        loss, parts = 0.0, list(zip(x.split(c.micro_batch), y.split(c.micro_batch)))
        for micro, (x_part, y_part) in enumerate(parts):
            with common.accumulating(parallel, last=micro == len(parts) - 1):
                with processes.autocast(c.dtype):
                    part = parallel(x_part, y_part) * ((y_part >= 0).sum() * processes.world / targets)
                part.backward()
            loss = loss + part.detach()
        if c.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), c.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        run.stepped(loss, schedule[step])

        stop, last = run.should_stop(), step == c.steps - 1
        if (step + 1) % eval_every == 0 or last:
            with run.untimed():
                scores = evaluate(model, data.val, c, tokenizer, processes, all_tokens=last)
                if c.sample and not masked and run.is_main:
                    scores["sample"] = write_sample(model, tokenizer, c, run, device)
                # the best checkpoint is chosen on the same windows throughout
                windows = evaluate(model, data.val, c, tokenizer, processes, all_tokens=False) if last and c.eval_windows else scores
                best = run.evaluated(min, "loss", windows["loss"], **scores)
                run.save(checkpoint(), best=best, last=last)
        elif stop or (step + 1) % save_every == 0:
            with run.untimed():
                run.save(checkpoint(), last=stop)
        if stop and not last:
            run.interrupted()
    return run.done()


if __name__ == "__main__":
    common.cli(main)
