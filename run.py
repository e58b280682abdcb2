"""A run and its folder: metrics, signals, saving and resuming."""
import contextlib
import fcntl
import json
import math
import os
import re
import signal
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from checkpoint import newest_whole, read_checkpoint, reading, write_checkpoint
from flags import DataFlags, flush_or_mute, option, ROOT, UserError
from processes import PrecisionFlags


@dataclass(kw_only=True)
class RunFlags(PrecisionFlags, DataFlags):
    out_dir: str | None = option(None, "where the run writes; auto is out/TASK-PRESET[-DATA]")
    resume: bool = option(False, "continue the run in out_dir, with the same preset and flags")
    overwrite: bool = option(False, "delete the run in out_dir first")
    seed: int = option(0, "the same seed gives the same run on the same CPU", low=0)
    compile: bool | None = option(None, "torch.compile the model; auto: on cuda")
    log_every: int = option(20, "steps between lines of metrics.jsonl", low=1)
    eval_every: int = option(0, "steps between evaluations; 0: an epoch, for text 1000", low=0)
    keep: str = option("", "steps, by commas, after each of which ckpt-STEP.pt is written")


# Flags of the scripts with which a checkpoint's optimizer state or order of data would not fit
FIXED = ("optimizer", "weight_decay", "beta2", "layer_decay", "data", "once", "val", "train_images",
         "batch_size", "seed")


class RunEnded(Exception):
    """A run that ends early, in every process: status 3 where the loss is not finite; after a saved
    SIGINT or SIGTERM 128 + the signal's number, as in shells."""
    shared = True

    def __init__(self, exit_status, message):
        super().__init__(message)
        self.exit_status = exit_status


class Run:
    """One training run in one folder. A script uses it in this order:

        run = Run(config, task, name, processes)        takes the folder
        run.resume(model, optimizers, data_meta)        fills them from a checkpoint, if it resumes
        for step in run.steps(total, ...):
            run.log(loss, lr)                           counts a step, may write a line
            if run.evaluation_due:
                run.record(scores)                      writes the scores and a checkpoint
        run.done(...)

    Every process calls every method, rank 0 alone writes. A failed write ends the run."""

    def __init__(self, config, task, name, processes):
        self.config, self.task, self.processes = config, task, processes
        self.flags = dict(task=task, name=name) | vars(config)
        self.dir = Path(config.out_dir or ROOT / "out" / f"{task}-{name}")
        self.is_main = processes.rank == 0
        self.step = 0                   # how many are done
        self.best = None                # the lowest loss that chose best.pt
        self.received = 0               # the first signal
        self.losses = []                # since the last line of metrics.jsonl
        self.seconds = []               # of each step
        if not re.fullmatch(r"(\d+(,\d+)*)?", config.keep):
            raise UserError(f"--keep={config.keep}: give steps by commas, such as 100,200")
        self.resuming = processes.main_only(self._take_folder)

    def _take_folder(self):
        """Locks the folder, deletes an overwritten run's files; returns whether to resume."""
        c = self.config
        launch = f"{os.environ.get('TORCHELASTIC_RUN_ID')} {os.getppid()}"      # of this torchrun
        saved = (self.dir / "ckpt.pt").exists() or (self.dir / "ckpt.prev.pt").exists()
        if c.resume and not saved:
            raise UserError(f"nothing to resume in {self.dir}: there is no ckpt.pt")
        try:
            self.dir.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.dir / ".lock", "a+")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another run is writing to {self.dir}") from None
        # torchrun also restarts what was refused here: that has not left its launch in .lock
        restarted = self.processes.restarts > 0 and (self.dir / ".lock").read_text() == launch
        files = {path.name for path in self.dir.iterdir()} - {".lock"}
        if files and not (c.resume or c.overwrite or restarted):
            raise UserError(f"{self.dir} is not empty: --resume, --overwrite or another --out_dir?")
        if c.overwrite and not (c.resume or restarted):
            for name in ("ckpt*.pt", "best.pt", "metrics.jsonl"):
                for path in self.dir.glob(name):
                    path.unlink()
        (self.dir / ".lock").write_text(launch)
        return saved and (c.resume or restarted)

    def resume(self, model, optimizers, data_meta, extra=None):
        """Keeps what a checkpoint is made of: the model that is evaluated, the optimizers, and in
        `extra` tensors that change in place. If the run resumes, it fills model and optimizers,
        sets the step and returns the checkpoint's content; else None. UserError if the model or a
        flag of FIXED differs: with another --lr or --epochs it goes on."""
        self.model, self.optimizers = model, optimizers
        self.data_meta, self.extra = data_meta, extra or {}
        if not self.resuming:
            return None
        path = self.processes.main_only(partial(newest_whole, self.dir, self.task))
        content = read_checkpoint(path, self.task)
        saved = content["run_config"] | content["model_config"]     # values that auto stands for
        given = vars(self.config) | asdict(model.config)
        for name in (*FIXED, *asdict(model.config)):
            if name in saved and saved[name] != given.get(name):
                raise UserError(f"cannot resume {self.dir}: it has {name}={saved[name]}, the "
                                f"flags say {given.get(name)}; give those of its config.json again")
        before, now = (meta.get("version") for meta in (content["data_meta"], data_meta))
        if before != now:
            raise UserError(f"cannot resume {self.dir}: {data_meta['name']} was prepared anew: it "
                            f"had {before}, it has {now}")
        with reading(path):
            model.load_state_dict(content["model"])
            for optimizer, state in zip(optimizers, content["optimizer"], strict=True):
                optimizer.load_state_dict(state)
        self.step, self.best = content["step"], content["best"]
        return content

    def steps(self, total, text, eval_every, flops=0, tokens=None):
        """Yields the number of each step that is left of `total`; after a signal RunEnded, with a
        checkpoint. `text` says what is trained. A sample takes `flops`, 0 if nobody counted, and if
        it is text it has `tokens`: its speed is in tokens."""
        self.total, self.start, self.flops, self.tokens = total, self.step, flops, tokens
        self.eval_every = self.config.eval_every or eval_every
        self.finished = self.processes.main_only(self._start_metrics)
        self.began = time.perf_counter()
        resuming = f"resuming after step {self.start}: " if 0 < self.start < total else ""
        self.say(f"{resuming}{text}, {total} steps on {self.processes.name()}")
        handlers = {number: signal.signal(number, self._on_signal)
                    for number in (signal.SIGINT, signal.SIGTERM)}
        shown = self.is_main and sys.stderr.isatty() and self.start < total
        self.bar = tqdm(total=total, initial=self.start, unit="step", dynamic_ncols=True,
                        disable=not shown)
        try:
            while self.step < total:
                self.step_began = time.perf_counter()
                yield self.step
                if str(self.step) in self.config.keep.split(","):
                    self.save(f"ckpt-{self.step}.pt")
                if self.step < total and (number := self.processes.largest(self.received)):
                    self.save("ckpt.pt")
                    self.say(f"saved step {self.step} to {self.dir / 'ckpt.pt'}; --resume goes on")
                    self.end(128 + number, f"stopped by {signal.Signals(number).name}")
        finally:
            self.bar.close()
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _start_metrics(self):
        """Takes the lines that will be written again out of metrics.jsonl. Returns whether the run
        was finished: then it stays as it is."""
        path, tmp = self.dir / "metrics.jsonl", self.dir / "metrics.jsonl.tmp"
        lines = read_metrics(self.dir) if path.exists() else []
        if self.step >= self.total and lines and "event" in lines[-1]:
            return True
        (self.dir / "config.json").write_text(json.dumps(self.flags, indent=1) + "\n")
        tmp.write_text("".join(json.dumps(line) + "\n" for line in lines
                               if line["step"] <= self.step))
        os.replace(tmp, path)

    def _on_signal(self, number, frame):
        """The first signal ends the run after the current step. A Ctrl-C after it ends it at once,
        but not with several processes, to which torchrun sends every signal again."""
        if not self.received:
            self.received = number
            self.say("ending after this step, with a checkpoint")
        elif number == signal.SIGINT and self.processes.world == 1:
            raise KeyboardInterrupt

    def log(self, loss, lr, numbers=None):
        """Counts a step. Every log_every steps it writes a line with the mean of the losses, which
        stay on the device until then, and numbers(), if given."""
        self.step += 1
        self.losses.append(loss.detach())
        self.bar.update()
        write = self._is_due(self.config.log_every)
        if write or self.evaluation_due:        # waits for a GPU; raises before a NaN is evaluated
            mean = self._mean_loss()
        self.seconds.append(time.perf_counter() - self.step_began)
        if write:
            self._write_line(mean, lr, numbers() if numbers else {})

    @property
    def evaluation_due(self):
        return self._is_due(self.eval_every)

    def _is_due(self, every):
        return self.step % every == 0 or self.step == self.total

    def _mean_loss(self):
        """Of the losses since the last line and of all processes. RunEnded if one is not finite."""
        losses = (self.processes.sum(torch.stack(self.losses)) / self.processes.world).tolist()
        for step, loss in enumerate(losses, self.step - len(losses) + 1):
            self._check_finite(loss, step)
        return sum(losses) / len(losses)

    def _check_finite(self, loss, step):
        if not math.isfinite(loss):
            self.end(3, f"the loss or a weight is not finite at step {step}: try a lower --lr; "
                        f"any checkpoint in {self.dir} is of a step before")

    def _write_line(self, mean, lr, numbers):
        """Of the steps since the last: to metrics.jsonl, and to the bar or, without one, stdout."""
        speed, words = self._speed(len(self.losses))
        self.losses = []
        self.write(dict(step=self.step, split="train", loss=mean, lr=lr, **speed, **numbers))
        words = f"loss {mean:.4f}{words}"
        self.bar.set_postfix_str(words)
        if self.bar.disable:
            left = statistics.mean(self.seconds) * (self.total - self.step)
            self.say(f"step {self.step}/{self.total}: {words}, lr {lr:.2e}, {left:,.0f} s left")

    def _speed(self, steps):
        """({for metrics.jsonl}, words) of the last steps; without the first, which may compile, and
        evaluations. MFU is the share of the GPUs' bfloat16 peak, where that is known."""
        seconds = self.seconds[1:][-steps:]
        if not seconds:
            return {}, ""
        samples = self.config.batch_size * len(seconds) / sum(seconds)
        key, unit = ("tokens_per_s", "tokens") if self.tokens else ("examples_per_s", "images")
        speed = {key: samples * (self.tokens or 1)}
        words = f", {speed[key]:,.0f} {unit}/s"
        if mfu := samples * self.flops / self.processes.peak_flops():
            speed["mfu"] = mfu
            words += f", mfu {mfu:.1%}"
        return speed, words

    def record(self, scores, chosen_by=None):
        """Writes an evaluation's scores and ckpt.pt; before that best.pt, if the loss `chosen_by`
        is given and the lowest so far. RunEnded if the validation loss or a weight is not finite.
        """
        self._check_finite(scores.get("loss", 0.0), self.step)
        self.write(dict(step=self.step, split="val", **scores))
        shown = [f"{k} {v:.4f}" if isinstance(v, float) else f"{k} {v}"
                 for k, v in scores.items() if not isinstance(v, str)]
        self.say(f"step {self.step}: validation " + ", ".join(shown))
        names = ["ckpt.pt"]
        if chosen_by is not None and (self.best is None or chosen_by < self.best):
            self.best = chosen_by
            names.insert(0, "best.pt")      # first: a kill between them repeats an evaluation
        self.save(*names)

    def save(self, *names):
        """Writes checkpoints of these names; only ckpt.pt also holds what a resume needs."""
        norms = torch.stack(torch._foreach_norm([*self.model.parameters()]))
        self._check_finite(norms.sum().item(), self.step)       # before it replaces a good one
        self.processes.main_only(partial(self._write_checkpoints, names))

    def _write_checkpoints(self, names):
        content = dict(task=self.task, step=self.step, best=self.best, run_config=self.flags,
                       model=self.model.state_dict(), model_config=asdict(self.model.config),
                       data_meta=self.data_meta, optimizer={}, extra={})
        whole = content | dict(optimizer=[o.state_dict() for o in self.optimizers],
                               extra=self.extra)
        for name in names:
            write_checkpoint(self.dir / name, whole if name == "ckpt.pt" else content,
                             keep_previous=name == "ckpt.pt")

    def say(self, text):
        """Prints a line above the bar. A closed output or a full disk does not end the run."""
        if self.is_main:
            with contextlib.suppress(OSError, RuntimeError):    # of a signal while it is writing
                tqdm.write(text)
                flush_or_mute()

    def write(self, line):
        """One JSON object to metrics.jsonl."""
        if self.is_main:
            with open(self.dir / "metrics.jsonl", "a") as file:
                file.write(json.dumps(line) + "\n")

    def done(self, *then):
        """Writes the last line of metrics.jsonl, with the mean speed, and returns it. Prints
        commands to try next, with the folder in place of {dir}."""
        seconds, (speed, words) = time.perf_counter() - self.began, self._speed(self.total)
        line = dict(event="done", step=self.step, seconds=round(seconds, 3), **speed,
                    best=self.best)
        if not self.finished:
            self.write(line)
        words = words or ": there was nothing left to do"
        self.say(f"done: {self.step} steps in {seconds:.0f} s{words}; written to {self.dir}")
        for command in ("python analyze.py curves {dir}", *then):
            self.say("  " + command.format(dir=self.dir))
        self.close()
        return line

    def end(self, exit_status, why):
        """Ends the run early."""
        self.bar.close()
        self.close()
        raise RunEnded(exit_status, why)

    def close(self):
        """Lets another run have the folder."""
        if self.is_main:
            self._lock.close()


def read_metrics(folder):
    """The lines of a run's metrics.jsonl, except what a kill has torn or a power cut made NULs."""
    lines = []
    for line in (Path(folder) / "metrics.jsonl").read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            lines.append(json.loads(line))
    return [line for line in lines if isinstance(line, dict) and isinstance(line.get("step"), int)]
