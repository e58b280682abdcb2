"""A run and its folder: metrics, speed, saving and resuming."""
import contextlib
import fcntl
import json
import math
import os
import re
import signal
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from tqdm import tqdm

from checkpoint import read_checkpoint, reading, write_checkpoint
from flags import DataFlags, DeviceFlags, option, ROOT, TypeFlags, UserError
from processes import device_name, is_main, note, SharedError


@dataclass(kw_only=True)
class RunFlags(DeviceFlags, TypeFlags, DataFlags):
    out_dir: str | None = option(None, "where the run writes; auto is out/TASK-PRESET[-DATA]")
    resume: bool = option(False, "continue the run in out_dir, with the same preset and flags")
    overwrite: bool = option(False, "delete the run in out_dir first")
    seed: int = option(0, "the same seed gives the same run on the same CPU", low=0, fixed=True)
    optimizer: str = option("adamw", "update rule", fixed=True, choices=("adamw", "muon", "lion"))
    compile: bool | None = option(None, "torch.compile the model; auto: on cuda")
    log_every: int = option(20, "steps between lines of metrics.jsonl", low=1)
    eval_every: int = option(0, "steps between evaluations; 0: an epoch, for text 1000", low=0)
    keep: str = option("", "steps, by commas, after each of which ckpt-STEP.pt is written")


class RunEnded(SharedError):
    """A run that ends early: status 3 where the loss is not finite; after a saved SIGINT or SIGTERM
    128 + the signal's number, as in shells."""

    def __init__(self, exit_status, message):
        super().__init__(message)
        self.exit_status = exit_status


# ---- Files: metrics.jsonl, checkpoints ----------------------------------------------------------
def read_metrics(folder):
    """The lines of a run's metrics.jsonl, without those that a kill or a power cut has damaged."""
    lines = []
    for line in (Path(folder) / "metrics.jsonl").read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            lines.append(json.loads(line))
    return lines


def recovered(folder, task):
    """The content of folder/ckpt.pt; if that is missing or damaged, of ckpt.prev.pt, with a note.
    The damaged one is deleted: the next save would put it in the place of the whole one."""
    newest, before = folder / "ckpt.pt", folder / "ckpt.prev.pt"
    try:
        return read_checkpoint(newest, task)
    except UserError as error:
        if not before.exists():
            raise
        content = read_checkpoint(before, task)
        note(f"{error}; taking ckpt.prev.pt")
        if is_main():
            newest.unlink(missing_ok=True)
        return content


def refuse_another(content, flags, model_config, data_meta, folder):
    """UserError if the checkpoint of a run in `folder` is of another model, of other flags that are
    `fixed` or of another version of the data. With another --lr or --epochs a run goes on."""
    # of the model its config as built, since a flag may be auto
    saved, given = content["run_config"] | content["model_config"], vars(flags) | model_config
    fixed = [f.name for f in fields(flags) if f.metadata["fixed"]]
    for name in (*fixed, *model_config):
        if name in saved and saved[name] != given.get(name):
            raise UserError(f"cannot resume {folder}: it has {name}={saved[name]}, the flags say "
                            f"{given.get(name)}; give those of its config.json again")
    before, now = (meta.get("version") for meta in (content["data_meta"], data_meta))
    if before != now:
        raise UserError(f"cannot resume {folder}: {data_meta['name']} was prepared anew: it had "
                        f"{before}, it has {now}")


# ---- How fast steps are -------------------------------------------------------------------------
# Dense bf16 FLOP/s of the data sheets, of the SXM version if there are two
PEAK = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12}


def share_of_peak(flops, processes):
    """MFU: what share of the GPUs' peak in bfloat16 `flops` operations a second are; None where
    that peak is not known or the run is in float32."""
    words = device_name(processes.device).replace("-", " ").split()
    peaks = [PEAK[word] for word in words if word in PEAK and processes.bfloat16]
    return flops / (processes.world * peaks[0]) if peaks else None


def in_words(speed):
    """A Meter's speed, for a line that begins with something else."""
    words = dict(tokens_per_s=", {:,.0f} tokens/s", examples_per_s=", {:,.0f} images/s",
                 mfu=", mfu {:.1%}")
    return "".join(words[name].format(value) for name, value in speed.items())


class Meter:
    """The losses of the last steps, which stay on the device until they are read, and the seconds
    of each step, without evaluations and checkpoints. A step trains on `samples` images, or texts
    of `tokens` tokens each. A sample takes `flops` operations; with 0 the MFU is not counted."""

    def __init__(self, processes, samples, flops=0, tokens=None):
        self.processes, self.samples, self.flops, self.tokens = processes, samples, flops, tokens
        self.losses, self.seconds, self.started = [], [], None

    def stop(self, loss, read):
        """Ends a step. If `read`, it returns the losses since they were read last, each the mean
        over the processes; else []. Reading waits for the GPU, so the clock stops after it."""
        self.losses.append(loss.detach())
        losses = []
        if read:
            losses, self.losses = torch.stack(self.losses), []
            losses = (self.processes.sum(losses) / self.processes.world).tolist()
        self.seconds.append(time.perf_counter() - self.started)
        return losses

    def speed(self, steps):
        """{name in metrics.jsonl: value} over the last steps. The first step of all does not count,
        as it may compile; if there is no other, the dict is empty."""
        seconds = self.seconds[max(1, len(self.seconds) - steps):]
        if not seconds:
            return {}
        samples = self.samples * len(seconds) / sum(seconds)
        mfu = share_of_peak(samples * self.flops, self.processes)
        speed = dict(tokens_per_s=samples * self.tokens) if self.tokens else dict(
            examples_per_s=samples)
        return speed | dict(mfu=mfu) if mfu else speed


# ---- A run --------------------------------------------------------------------------------------
@contextlib.contextmanager
def signals_kept(say, alone):
    """A list of the SIGINTs and SIGTERMs that come, for a run that ends after its step. A Ctrl-C
    after the first ends it at once, but not with several processes: torchrun may send them every
    signal again."""
    received = []

    def receive(number, frame):
        if not received:
            say("ending after this step, with a checkpoint")
        elif number == signal.SIGINT and alone:
            raise KeyboardInterrupt
        received.append(number)
    handlers = {number: signal.signal(number, receive)
                for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


class Run:
    """One training run in one folder, out/TASK-NAME.

    A script calls attach() with what it trains, log() in each of steps(), record() after an
    evaluation, and at last done(). Every process makes these calls, and rank 0 alone writes. A
    failed write ends the run."""

    def __init__(self, config, task, name, processes):
        self.config, self.task, self.processes = config, task, processes
        self.flags = dict(task=task, name=name) | vars(config)
        self.dir = Path(config.out_dir or ROOT / "out" / f"{task}-{name}")
        if not re.fullmatch(r"(\d+(,\d+)*)?", config.keep):
            raise UserError(f"--keep={config.keep}: give steps by commas, such as 100,200")
        self.keep = {int(step) for step in config.keep.split(",") if step}
        self.step = 0           # the last that was begun; the first is step 1
        self.best = None        # the lowest loss that chose best.pt
        processes.main_only(self._take_folder)

    def _take_folder(self):
        """Locks the folder. Raises UserError unless it fits the flags --resume and --overwrite."""
        c = self.config
        if c.resume and c.overwrite:
            raise UserError("--resume and --overwrite exclude each other")
        saved = any((self.dir / name).exists() for name in ("ckpt.pt", "ckpt.prev.pt"))
        if c.resume and not saved:
            raise UserError(f"nothing to resume in {self.dir}: there is no ckpt.pt")
        self.dir.mkdir(parents=True, exist_ok=True)
        self._lock = open(self.dir / ".lock", "a")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another run is writing to {self.dir}") from None
        if c.overwrite:
            for pattern in ("ckpt*.pt", "best.pt", "metrics.jsonl"):
                for path in self.dir.glob(pattern):
                    path.unlink()
        elif not c.resume and any(self.dir.glob("[!.]*")):
            raise UserError(f"{self.dir} is not empty: --resume, --overwrite or another --out_dir?")

    def attach(self, model, optimizers, data_meta, extra=None):
        """Names what a checkpoint is to hold: the model that is evaluated, its optimizers, and
        `extra`, a dict of tensors that change in place. With --resume it also fills model,
        optimizers and step from the last checkpoint, and returns its content."""
        self.model, self.optimizers = model, optimizers
        self.data_meta, self.extra = data_meta, extra or {}
        if not self.config.resume:
            return None
        content = recovered(self.dir, self.task)
        refuse_another(content, self.config, asdict(model.config), data_meta, self.dir)
        with reading(self.dir):         # ckpt.pt, or ckpt.prev.pt
            model.load_state_dict(content["model"])
            for optimizer, state in zip(optimizers, content["optimizer"], strict=True):
                optimizer.load_state_dict(state)
        self.step, self.best = content["step"], content["best"]
        return content

    def steps(self, total, what, eval_every, flops=0):
        """Yields the number, from 0, of each step that is left of `total`. After a signal it saves
        ckpt.pt and raises RunEnded. `what` says what is trained; a Meter explains `flops`."""
        self.total = total
        eval_every = self.config.eval_every or eval_every       # the flag, or the script's
        tokens = self.model.config.context if self.model.config.kind == "text" else None
        self.meter = Meter(self.processes, self.config.batch_size, flops, tokens)
        self.began = time.perf_counter()
        if self.step < total:           # else the files stay as they are
            self.processes.main_only(self._begin_files)
        resuming = f"resuming after step {self.step}: " if 0 < self.step < total else ""
        precision = "bfloat16" if self.processes.bfloat16 else "float32"
        self.say(f"{resuming}{what}, {total} steps on {self.processes.world} x "
                 f"{device_name(self.processes.device)}, {precision}")
        self.bar = tqdm(total=total, initial=self.step, unit="step", dynamic_ncols=True,
                        disable=None if is_main() and self.step < total else True)
        with self.bar, signals_kept(self.say, self.processes.world == 1) as received:
            for step in range(self.step + 1, total + 1):
                self.step = step
                self.evaluation_due = self.step == total or self.step % eval_every == 0
                self.meter.started = time.perf_counter()
                yield self.step - 1
                self.bar.update()
                if self.step in self.keep:
                    self.save(f"ckpt-{self.step}.pt")
                if step < total:
                    self._end_after_signals(received)

    def _end_after_signals(self, received):
        """Saves ckpt.pt and raises RunEnded if a signal has come to any process."""
        signalled = received
        if self.processes.world > 1:
            signalled = self.processes.sum(torch.tensor(len(received)))
        if signalled:
            number = (received or [signal.SIGTERM])[0]
            self.save("ckpt.pt")
            self.close()
            raise RunEnded(128 + number, f"stopped by {signal.Signals(number).name}: "
                           f"{self.dir}/ckpt.pt has step {self.step}, --resume goes on")

    def _begin_files(self):
        """Writes config.json, and drops the lines of metrics.jsonl that will be written again."""
        (self.dir / "config.json").write_text(json.dumps(self.flags, indent=1) + "\n")
        path, tmp = self.dir / "metrics.jsonl", self.dir / "metrics.jsonl.tmp"
        if path.exists():
            tmp.write_text("".join(json.dumps(line) + "\n" for line in read_metrics(self.dir)
                                   if line["step"] <= self.step))
            os.replace(tmp, path)

    def log(self, loss, lr, numbers=None):
        """After step 1, every log_every steps, and where an evaluation is due, writes a line on the
        steps since the last line: their mean loss, lr, the speed, and what numbers() returns.
        Raises RunEnded if a loss is not finite."""
        line_due = self.step == 1 or self.step % self.config.log_every == 0 or self.evaluation_due
        losses = self.meter.stop(loss, read=line_due)
        for step, each in enumerate(losses, self.step - len(losses) + 1):
            self._check_finite(each, step)
        if line_due:
            self._write_means(losses, lr, numbers() if numbers else {})

    def _write_means(self, losses, lr, more):
        mean, speed = sum(losses) / len(losses), self.meter.speed(len(losses))
        self.write(dict(step=self.step, split="train", loss=mean, lr=lr, **speed, **more))
        words = f"loss {mean:.4f}{in_words(speed)}"
        self.bar.set_postfix_str(words)
        if self.bar.disable:
            seconds = self.meter.seconds[-len(losses):]
            left = (self.total - self.step) * sum(seconds) / len(seconds) / 60
            left = f", {left:.1f} min left" if speed else ""        # a first step may compile
            self.say(f"step {self.step}/{self.total}: {words}, lr {lr:.2e}{left}")

    def _check_finite(self, loss, step):
        if not math.isfinite(loss):
            self.bar.close()
            self.close()
            raise RunEnded(3, f"the loss or a weight is not finite at step {step}: try a lower "
                           f"--lr; any checkpoint in {self.dir} is of a step before")

    def record(self, scores, chosen_by=None):
        """Writes an evaluation's scores, and ckpt.pt; also best.pt, if the loss `chosen_by` is the
        lowest so far. Raises RunEnded if the loss or a weight is not finite."""
        self._check_finite(scores.get("loss", 0.0), self.step)
        self.write(dict(step=self.step, split="val", **scores))
        shown = [f"{k} {v:.4f}" if isinstance(v, float) else f"{k} {v}"
                 for k, v in scores.items()]
        self.say(f"step {self.step}: validation " + ", ".join(shown))
        names = ["ckpt.pt"]
        if chosen_by is not None and (self.best is None or chosen_by < self.best):
            self.best = chosen_by
            names.insert(0, "best.pt")      # first: a kill between them repeats an evaluation
        self.save(*names)

    def save(self, *names):
        """Writes checkpoints of these names; only ckpt.pt also holds what a resume needs. If a
        weight is not finite, it raises RunEnded, and the last good checkpoint stays."""
        size = sum(p.detach().abs().sum() for p in self.model.parameters())
        self._check_finite(size.item(), self.step)
        content = dict(task=self.task, step=self.step, best=self.best, run_config=self.flags,
                       model=self.model.state_dict(), model_config=asdict(self.model.config),
                       data_meta=self.data_meta, optimizer={}, extra={})
        to_resume = dict(optimizer=[o.state_dict() for o in self.optimizers], extra=self.extra)
        for name in names:
            newest = name == "ckpt.pt"
            self.processes.main_only(write_checkpoint, self.dir / name,
                                     content | to_resume if newest else content, newest)

    def say(self, text):
        """Prints a line above the bar. A closed output or a full disk does not end the run."""
        if is_main():
            with contextlib.suppress(OSError, RuntimeError):    # of a signal while it is writing
                tqdm.write(text)
                sys.stdout.flush()

    def write(self, line):
        """One JSON object to metrics.jsonl."""
        if is_main():
            with open(self.dir / "metrics.jsonl", "a") as file:
                file.write(json.dumps(line) + "\n")

    def done(self, *then):
        """Writes the last line of metrics.jsonl, with the mean speed, and returns it. It prints the
        commands `then`, in which the folder takes the place of {dir}."""
        seconds = round(time.perf_counter() - self.began, 3)
        speed = self.meter.speed(self.total)
        line = dict(event="done", step=self.step, seconds=seconds, **speed, best=self.best)
        if self.meter.seconds:          # else nothing was left to do
            self.write(line)
        best = "" if self.best is None else f", best.pt has the lowest loss, {self.best:.4f}"
        self.say(f"done: {self.step} steps in {seconds:.0f} s{in_words(speed)}; written to "
                 f"{self.dir}{best}")
        for command in ("python analyze.py curves {dir}    # the loss, drawn", *then):
            self.say("  " + command.format(dir=self.dir))
        self.close()
        return line

    def close(self):
        """Lets another run have the folder."""
        if is_main():
            self._lock.close()
