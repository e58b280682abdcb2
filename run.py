"""
A run: its processes and device, its folder, metrics, signals, saving and resuming.

    python run.py out/a out/b --out=out/curves.png      draws the curves of recorded runs
"""
import contextlib
import ctypes
import dataclasses
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import signal
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from checkpoint import load_into, load_optimizers, read_checkpoint, write_checkpoint
from flags import cli, Diverged, flush_or_mute, interrupt, ROOT, Stopped, UserError
from optim import is_fast_in_bfloat16


# -------------------------------------------------------------------------------------------------
# Processes, devices and seeds
# -------------------------------------------------------------------------------------------------

class Processes:
    """This process among those of torchrun (rank, world, device), and the collectives. `half` is
    true where autocast() computes in bfloat16."""

    def __init__(self, device="auto", dtype="auto"):
        self.rank = int(os.environ.get("RANK", 0))
        self.world = int(os.environ.get("WORLD_SIZE", 1))
        local = int(os.environ.get("LOCAL_RANK", 0))
        available = dict(cuda=torch.cuda.is_available(),
                         mps=torch.backends.mps.is_available(), cpu=True)
        if device == "auto":
            device = next(name for name, there in available.items() if there)
        if not available[device]:
            raise UserError(f"--device={device}: this machine has none")
        gpus = torch.cuda.device_count()
        if device == "cuda" and int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > gpus:
            raise UserError(f"--nproc_per_node is more than the {gpus} GPUs of this machine")
        self.device = torch.device(device, local) if device == "cuda" else torch.device(device)
        if device == "cpu":
            keep_freed_memory()
        if device == "cuda":
            torch.cuda.set_device(self.device)
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        auto = is_fast_in_bfloat16(self.device)
        self.half = dtype == "bfloat16" or (dtype == "auto" and auto)
        self.autocast = partial(torch.autocast, device, torch.bfloat16, enabled=self.half)
        self.control = None
        self.restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        if self.world > 1:
            if not dist.is_initialized():
                store = _fresh_store(*next(dist.rendezvous("env://")))
                dist.init_process_group("nccl" if device == "cuda" else "gloo", store=store,
                                        rank=self.rank, world_size=self.world)
            # stop flags travel on the CPU: asking for them every step does not stall the GPU
            self.control = dist.new_group(backend="gloo") if device == "cuda" else dist.group.WORLD
            self.restarts = self.largest(self.restarts)     # each agent of torchrun counts its own

    def rows(self, batch_size):
        """This process's slice of a batch. Raises UserError if it does not divide among them."""
        if batch_size % self.world:
            raise UserError(f"--batch_size={batch_size} does not divide among {self.world} "
                            "processes")
        share = batch_size // self.world
        return slice(self.rank * share, (self.rank + 1) * share)

    def sum(self, tensor):
        """The tensor summed over all processes, in place."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def largest(self, number):
        """The largest of every process's whole number."""
        if self.world == 1:
            return number
        flag = torch.tensor([number])
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.control)
        return int(flag)

    def main_only(self, function):
        """function() on rank 0; its result, or its error as a UserError, on every process."""
        outcome = [None]
        if self.rank == 0:
            try:
                outcome = [function()]
            except (UserError, OSError) as error:
                outcome = [UserError(str(error))]
        if self.world > 1:
            dist.broadcast_object_list(outcome, 0, group=self.control)
        if isinstance(outcome[0], UserError):
            outcome[0].shared = True
            raise outcome.pop()     # a variable would keep the error, its frame and a run's lock
        return outcome[0]

    def wrap(self, model):
        """The model, in DistributedDataParallel if there are several processes. Compile later."""
        if self.world == 1:
            return model
        ids = [self.device.index] if self.device.type == "cuda" else None
        ddp = torch.nn.parallel.DistributedDataParallel(
            model, device_ids=ids, gradient_as_bucket_view=True)
        _arrange_buckets(ddp, model, self.device)
        return ddp


def _arrange_buckets(ddp, model, device):
    """A backward pass of zeros, by a forward that touches every parameter.

    After the first backward DDP rearranges its buckets, which changes how sums are rounded: a
    resumed run would not repeat the numbers of one left alone."""
    model.forward = lambda zero: zero * sum(p.sum() for p in model.parameters())
    ddp(torch.zeros((), device=device)).backward()
    del model.forward                       # the class's own is back
    ddp.zero_grad(set_to_none=True)


def _fresh_store(store, rank, world):
    """The part of torchrun's store that belongs to this start of the processes.

    The store outlives a restart and keeps the stale addresses of previous workers. So each writes a
    random word, and all go on once all have read the same words, which then name the part."""
    store.set(f"word/{rank}", os.urandom(8).hex())
    while True:
        words = b"".join(store.multi_get([f"word/{i}" for i in range(world)]))
        store.set(f"read/{rank}", words)
        if all(read == words for read in store.multi_get([f"read/{i}" for i in range(world)])):
            return dist.PrefixStore(hashlib.sha256(words).hexdigest(), store)
        time.sleep(0.05)


def keep_freed_memory():
    """Tells glibc to keep freed memory. By default the pages of each large tensor go back to the
    kernel and come again zeroed: 5 to 10 % of a CPU step, more on some virtual machines."""
    with contextlib.suppress(OSError, AttributeError):      # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-3, 1 << 30) or mallopt(-3, 1 << 25)    # M_MMAP_THRESHOLD; some allow 32 MB only
        mallopt(-1, (1 << 31) - 1)                      # M_TRIM_THRESHOLD


def derive_seed(*purpose):
    """A 63-bit seed, a function of the arguments: no state has to be saved."""
    digest = hashlib.blake2b(repr(purpose).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def micro_batches(model, size, *batch):
    """The tensors of a batch, `size` rows at a time; all if None. DDP exchanges gradients only
    after the last part, when they are the sum of all parts."""
    *before, last = zip(*(t.split(size or len(t)) for t in batch))
    unshared = getattr(model, "no_sync", contextlib.nullcontext)
    for part in before:
        with unshared():
            yield part
    yield last


def wants_compile(config, processes, flops):
    """--compile; auto: on cuda, and on a CPU in bfloat16 for a run of 5e13 operations or more.

    On a CPU compiling takes 15 to 55 s once and then cuts a step to 0.7 of its time. Two cores do
    2e11 operations a second, so a run of four minutes repays it. float32 gains nothing."""
    device, wanted = processes.device, config.compile
    if wanted is None:
        worth = processes.half and flops > 5e13
        wanted = device.type == "cuda" or (device.type == "cpu" and worth)
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if wanted and device.type == "cpu" and shutil.which(compiler) is None:
        if processes.rank == 0:
            print(f"note: not compiled, since there is no C++ compiler ({compiler}); with one a "
                  "step in bfloat16 takes about 0.7 of the time", flush=True)
        return False
    return wanted


def device_name(device):
    """For the reader of a log."""
    if device.type != "cpu":
        return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    threads, advice = torch.get_num_threads(), ""
    # OpenMP's threads wait for each other in a spin: 800 images/s on two free cores, 70 beside one
    # other busy process
    if threads > 1 and threads + os.getloadavg()[0] > os.cpu_count() + 0.5:
        advice = "; others are busy here: fewer threads, by OMP_NUM_THREADS=1, may be faster"
    return f"cpu ({threads} threads{advice})"


# Dense bf16 FLOP/s of the data sheets, without sparsity; of the SXM version where there are two
_PEAK = dict(GH200=989e12, H200=989e12, H100=989e12, A100=312e12, L40S=362e12, A10=125e12)
_PEAK |= {"4090": 165e12, "3090": 71e12}


def peak_flops(device):
    """The bf16 FLOP/s of a GPU known by name, for MFU; None otherwise."""
    if device.type != "cuda":
        return None
    words = re.split(r"\W", torch.cuda.get_device_name(device))      # an A1000 is no A100
    return next((peak for key, peak in _PEAK.items() if key in words), None)


def count(model):
    return sum(p.numel() for p in model.parameters())


# -------------------------------------------------------------------------------------------------
# The run
# -------------------------------------------------------------------------------------------------

# Flags that may change when a run is resumed, without a note
_HARMLESS = "resume overwrite out_dir data_dir size device compile workers log_every".split()


class Run:
    """One training run in one folder. All processes call every method, rank 0 writes: config.json,
    metrics.jsonl, ckpt.pt (latest), ckpt.prev.pt (the one before), best.pt and, at the end,
    run.png. A write that fails ends the run; --resume continues from the last checkpoint.

    A script calls Run, restore, begin and describe; in each step log_step, if evaluation_due
    check_finite, record_scores (inside untimed) and save, then end_step; at the end done."""

    def __init__(self, config, task, name, processes):
        self.config, self.task, self.processes = config, task, processes
        self.flags = dict(task=task, name=name) | vars(config)
        self.dir = Path(config.out_dir or ROOT / "out" / f"{task}-{name}")
        self.is_main = processes.rank == 0
        self.step = 0                       # steps done
        self.best = None                    # score
        self.signal = 0                     # received by this process
        self.bar = tqdm(disable=True)       # until begin
        self.metrics = None                 # the open file, on rank 0
        self.handlers = {}                  # of the signals, before this run's own
        self.pending = []                   # losses of the last steps, not yet waited for
        self.losses = []                    # those before, since the last line, as numbers
        self.paused = 0.0                   # seconds of evaluation and saving
        self.resuming = processes.main_only(self._open)

    # ---- the folder

    def _open(self):
        """Locks the folder. Returns True if its run is to be resumed; otherwise deletes that run's
        files and returns False."""
        c, restarted = self.config, self.processes.restarts > 0
        saved = (self.dir / "ckpt.pt").exists() or (self.dir / "ckpt.prev.pt").exists()
        if c.resume and c.overwrite:
            raise UserError("--resume and --overwrite exclude each other")
        if c.resume and not saved and not restarted:
            raise UserError(f"nothing to resume in {self.dir}: there is no ckpt.pt")
        try:
            self.dir.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.dir / ".lock", "a+")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another run is writing to {self.dir}: wait for it, or choose "
                            "another --out_dir") from None
        resuming = saved and (c.resume or restarted)
        there = {path.name for path in self.dir.iterdir()} - {".lock"}
        if there and not (resuming or c.overwrite or restarted):
            raise UserError(f"{self.dir} is not empty: --resume continues the run in it, "
                            "--overwrite deletes that run, --out_dir goes elsewhere")
        if not resuming:
            pictures = (path.name for path in self.dir.glob("step*.png"))
            for name in ("ckpt.pt", "ckpt.prev.pt", "best.pt", "metrics.jsonl", *pictures):
                (self.dir / name).unlink(missing_ok=True)
        return resuming

    def begin(self, total, eval_every, unit, per_step, flops=0):
        """Starts clock, bar and metrics, after `restore`.

        unit: "images" or "tokens"; per_step of them per step; `flops` each, for MFU."""
        self.total, self.unit, self.per_step = total, unit, per_step
        self.speed_name = "tokens_per_s" if unit == "tokens" else "examples_per_s"
        self.eval_every = self.config.eval_every or eval_every
        # MFU at one unit a second: the share of the GPUs' bf16 peak; 0 where that is unknown
        peak = (peak_flops(self.processes.device) or math.inf) * self.processes.world
        self.unit_mfu = flops / peak
        self.start = self.saved_step = self.step
        if 0 < self.start < total:
            self.say(f"resuming after step {self.start}")
        self.processes.main_only(self._start_files)
        terminal = self.is_main and sys.stderr.isatty() and total > self.start
        self.bar = tqdm(total=total, initial=self.start, unit="step", dynamic_ncols=True,
                        disable=not terminal)
        self.handlers = {number: signal.signal(number, self._on_signal)
                         for number in (signal.SIGINT, signal.SIGTERM)}
        self.began = time.perf_counter()
        self.lap = self.after_first = self._mark()      # after the last line, after the first step

    def _start_files(self):
        """Opens metrics.jsonl without the lines after the checkpoint's step, which come again.
        The record of a run that was done stays as it is."""
        lines = read_metrics(self.dir)
        if self.step >= self.total and lines and "event" in lines[-1]:
            return
        kept = [line for line in lines if line["step"] <= self.step and "event" not in line]
        (self.dir / "config.json").write_text(json.dumps(self.flags, indent=1) + "\n")
        path, tmp = self.dir / "metrics.jsonl", self.dir / "metrics.jsonl.tmp"
        tmp.write_text("".join(json.dumps(line) + "\n" for line in kept))
        os.replace(tmp, path)
        self.metrics = open(path, "a", buffering=1)

    # ---- steps

    def log_step(self, loss, lr, **values):
        """Counts an optimizer step, and every log_every steps writes a line with the mean loss of
        those steps. `loss` and `values` may be tensors; they stay on the device until then."""
        self.step += 1
        self.pending.append(loss.detach())
        if self.step == self.start + 1:         # with compilation: not timed
            loss.item()
            self.lap = self.after_first = self._mark()
        self.bar.update(1)
        if not self.log_due(self.step):
            return
        self.check_finite()
        mean, speed = sum(self.losses) / len(self.losses), self._speed(self.lap)
        mfu = speed * self.unit_mfu
        self.losses, self.lap = [], self._mark()
        line = {"step": self.step, "split": "train", "loss": mean, "lr": lr} | values
        if speed:                               # 0 right after the first step, which is not timed
            line |= {self.speed_name: speed} | (dict(mfu=mfu) if mfu else {})
        self.write(line)
        text = f"loss {mean:.4f}" + (f", {speed:,.0f} {self.unit}/s" if speed else "")
        text += f", mfu {mfu:.1%}" if mfu else ""
        if self.bar.disable:
            per_step = (time.perf_counter() - self.began) / (self.step - self.start)
            left = (self.total - self.step) * per_step
            self.say(f"step {self.step}/{self.total}: {text}, lr {lr:.2e}, {left:,.0f} s left")
        else:
            self.bar.set_postfix_str(text)

    def _mark(self):
        """(steps done, seconds on a clock that stands still in evaluation and saving)."""
        return self.step, time.perf_counter() - self.paused

    def _speed(self, since):
        """Images or tokens per second since a mark."""
        (before, began), (step, now) = since, self._mark()
        return self.per_step * (step - before) / max(now - began, 1e-9)

    @contextlib.contextmanager
    def untimed(self):
        """Around evaluation and saving: their seconds do not count in the speed of training."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.paused += time.perf_counter() - began

    def log_due(self, step):
        return step % self.config.log_every == 0 or step == self.total

    def evaluation_due(self):
        """Whether to evaluate after the step just logged."""
        return self.step % self.eval_every == 0 or self.step == self.total

    def check_finite(self):
        """Waits for the losses of the last steps, moves the mean over all processes of each from
        `pending` to `losses`, and raises Diverged if one is not finite."""
        if not self.pending:
            return
        sums = self.processes.sum(torch.stack(self.pending).float())    # NaN and infinity survive
        losses, self.pending = (sums / self.processes.world).tolist(), []
        self.losses += losses
        bad = [self.step - i for i, loss in enumerate(losses[::-1]) if not math.isfinite(loss)]
        if bad:
            self.close()
            path = self.dir / "ckpt.pt"
            saved = f"the last good checkpoint is {path}" if path.exists() else "nothing was saved"
            raise Diverged(f"the loss is not finite at step {bad[-1]}: try a lower --lr; {saved}")

    def end_step(self, content):
        """Saves every --save_every steps, and leaves, with a checkpoint, after a signal."""
        stopping = self.processes.largest(int(self.signal))
        every = self.config.save_every
        if stopping and self.step < self.total:
            self.save(content)
            self.say(f"saved step {self.step} to {self.dir / 'ckpt.pt'}; --resume continues")
            self.close()
            raise Stopped(stopping)
        if every and self.step % every == 0 and self.saved_step != self.step:
            self.save(content)

    def _on_signal(self, number, frame):
        """The first signal ends the run after the current step. A second Ctrl-C ends it at once,
        but not with several processes, to which torchrun sends every signal again."""
        if number == signal.SIGINT == self.signal and self.processes.world == 1:
            self.say("stopped at once, nothing saved since the last checkpoint")
            interrupt(number, frame)
        self.signal = self.signal or number

    # ---- saving and resuming

    def save(self, content, best=False):
        """Writes ckpt.pt; if `best`, best.pt first: a run killed between them evaluates that step
        again. content() returns {model, model_config, data_meta, optimizer, extra}."""
        def write():
            whole = dict(task=self.task, step=self.step, best=self.best, run_config=self.flags,
                         **content())
            if best:
                weights = whole | dict(optimizer={}, extra={})
                write_checkpoint(self.dir / "best.pt", weights, keep_previous=False)
            whole["extra"] = whole["extra"] | dict(losses=self.losses)      # of the line to come
            write_checkpoint(self.dir / "ckpt.pt", whole)
        self.check_finite()                 # a checkpoint of NaN would replace a good one
        with self.untimed():
            self.processes.main_only(write)
        self.saved_step = self.step

    def restore(self, model_config, optimizers, model, averaged=None):
        """If the run resumes: fills weights and optimizer, sets step, best score and losses
        of the line to come, and returns the checkpoint's content; else None.

        `averaged` (EMA, teacher) takes the evaluated weights, `model` then the student's. Raises
        UserError if the flags describe another model; says which other flags differ."""
        if not self.resuming:
            return None
        content = self.processes.main_only(self._newest_whole)
        fixed = dataclasses.asdict(model_config)    # with the values that auto stands for
        theirs, now = content["run_config"] | content["model_config"], vars(self.config) | fixed
        changed = [name for name in now if theirs.get(name, now[name]) != now[name]]
        for name in changed:
            if name in {*fixed, "optimizer", "ema"}:
                raise UserError(f"cannot resume {self.dir}: it has {name}={theirs[name]}, the "
                                f"flags say {now[name]}; give those of its config.json again")
        for name in changed:
            if name not in _HARMLESS:
                self.say(f"note: --{name} was {theirs[name]}, is now {now[name]}")
        load_into(averaged or model, content["model"], self.dir)
        if averaged is not None:
            load_into(model, content["extra"]["student"], self.dir)
        load_optimizers(optimizers, content["optimizer"], self.dir)
        self.step, self.best = content["step"], content["best"]
        self.losses = content["extra"]["losses"]
        return content

    def _newest_whole(self):
        """The content of ckpt.pt or, with a warning if that is damaged, of the one before."""
        previous = self.dir / "ckpt.prev.pt"
        try:
            return read_checkpoint(self.dir / "ckpt.pt", self.task)
        except UserError as error:
            if not previous.exists():
                raise
            print(f"warning: {error}; taking ckpt.prev.pt", file=sys.stderr, flush=True)
        return read_checkpoint(previous, self.task)

    # ---- output

    def say(self, text):
        """Prints a line above the progress bar. If output is closed or the disk is full, the run
        continues without printing."""
        if self.is_main:
            with contextlib.suppress(OSError):
                tqdm.write(text)
            flush_or_mute()

    def write(self, line):
        """One JSON object to metrics.jsonl; NaN and infinity become null."""
        if self.metrics is not None:
            bad = [k for k, v in line.items() if isinstance(v, float) and not math.isfinite(v)]
            self.metrics.write(json.dumps(line | dict.fromkeys(bad)) + "\n")

    def record_scores(self, key, value=None, **scores):
        """Writes a validation's scores. Returns whether scores[key] (or `value`, if given) is the
        best so far: the lowest loss, or the highest of another score, a tie counted."""
        self.write(dict(step=self.step, split="val", **scores))
        shown = [f"{k} {v:.4f}" if isinstance(v, float) else f"{k} {v}"
                 for k, v in scores.items() if not isinstance(v, str)]
        self.say(f"step {self.step}: validation " + ", ".join(shown))
        value = scores[key] if value is None else value
        if value != scores[key]:
            self.say(f"step {self.step}: {key} {value:.4f} on the windows of earlier evaluations")
        better = math.isfinite(value) and (
            self.best is None or (value < self.best if key == "loss" else value >= self.best))
        self.best = value if better else self.best
        return better

    def describe(self, text):
        """Says what is trained, and in what precision."""
        self.say(f"{text}, {'bfloat16' if self.processes.half else 'float32'}")

    def done(self, *then):
        """Writes the last line of metrics.jsonl, with the mean speed after the first step; prints
        the last messages; draws run.png; returns the line of metrics.jsonl.

        `then`: commands to try next, with the last weights, {ckpt}, or the best, {best}."""
        seconds, speed = time.perf_counter() - self.began, self._speed(self.after_first)
        line = {"event": "done", "step": self.step, "seconds": round(seconds, 3),
                self.speed_name: speed, "best": self.best}
        self.write(line)
        text = f"in {seconds:.0f} s" if self.step > self.start else "and nothing left to do"
        text += f", {speed:,.0f} {self.unit}/s" if speed else ""
        text += f"; best validation {self.best:.4f}" if self.best is not None else ""
        self.say(f"done: {self.step} steps {text}; written to {self.dir}")
        for command in then:
            self.say("  " + command.format(ckpt=self.dir / "ckpt.pt", best=self.dir / "best.pt"))
        if self.metrics is not None:
            draw_curves([self.dir], self.dir / "run.png")
        self.close()
        return line

    def close(self):
        """Ends the bar, the metrics and the signal handlers."""
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        self.bar.close()
        if self.metrics is not None:
            self.metrics.close()
        if self.is_main:
            self._lock.close()


def read_metrics(folder):
    """The lines of a run's metrics.jsonl, except what a kill has torn or a power cut made NULs."""
    path, found = Path(folder) / "metrics.jsonl", []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return [line for line in found if isinstance(line, dict) and "step" in line]


def draw_curves(folders, path):
    """Loss and any accuracy over the steps of runs: training as a line, validation as points."""
    from matplotlib.figure import Figure
    runs = [(Path(folder).name, read_metrics(folder)) for folder in folders]
    accuracy = any("acc" in line for _, lines in runs for line in lines)
    names = ["loss", "acc"] if accuracy else ["loss"]
    figure = Figure(figsize=(4.5 * len(names), 3.5), layout="constrained")
    for panel, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names):
        for i, (run, lines) in enumerate(runs):
            for split, style in (("train", "-"), ("val", "o--")):
                points = [(line["step"], line[name]) for line in lines
                          if line.get("split") == split and line.get(name) is not None]
                if points:
                    label = f"{run} {split}"
                    panel.plot(*zip(*points), style, color=f"C{i}", markersize=3, label=label)
                    panel.legend()
        panel.set(xlabel="step", ylabel=name)
    figure.savefig(path, format="png")


def main(argv):
    """The command of the module's header."""
    *folders, out = argv or [""]
    if not (folders and out.startswith("--out=")):
        raise UserError("usage: python run.py FOLDER ... --out=FILE")
    if empty := [folder for folder in folders if not read_metrics(folder)]:
        raise UserError(f"there is no metrics.jsonl of a run in {empty[0]}")
    draw_curves(folders, out.removeprefix("--out="))
    print(f"wrote {out.removeprefix('--out=')}")


if __name__ == "__main__":
    cli(main)
