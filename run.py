"""
A run: its folder, metrics, signals, saving and resuming.
"""
import contextlib
import dataclasses
import fcntl
import json
import math
import os
import re
import signal
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

from checkpoint import (load_into, load_optimizer, plain, read_checkpoint, reading,
                        write_checkpoint)
from flags import Diverged, ROOT, Stopped, UserError
from parallel import peak_flops

# What a run writes in its folder; a kill may leave .tmp
_OF_A_RUN = re.compile(r"(config\.json|metrics\.jsonl|run\.png|step\d+\.png|"
                       r"(ckpt|ckpt\.prev|best)\.pt)(\.tmp)?")
# Flags that may change when a run is resumed, without a note
_HARMLESS = ("resume", "overwrite", "out_dir", "device", "compile", "workers", "log_every",
             "data_dir", "size")


class Run:
    """One training run in one folder. All processes call every method, rank 0 writes: config.json,
    metrics.jsonl, ckpt.pt (latest), ckpt.prev.pt (the one before), best.pt and, at the end, run.png
    """

    def __init__(self, config, task, preset, processes):
        self.config, self.task, self.preset, self.processes = config, task, preset, processes
        self.dir = Path(config.out_dir or ROOT / "out" / f"{task}-{preset}")
        self.is_main = processes.rank == 0
        self.step = 0                       # steps done
        self.best = self.saved_best = None  # the best score; that of best.pt
        self.signal = 0                     # received by this process
        self.bar = self.metrics = None
        self.handlers = {}                  # of the signals, before this run's own
        self.fresh, self.pending = [], []   # losses since the last line: on the device, as numbers
        self.unwritable = set()
        self.resuming = processes.main_only(self._open)

    # ---- the folder

    def _open(self):
        """Locks the folder, removes what a kill left there, and returns whether to resume in it;
        if not, removes what a run wrote. Other files stay."""
        c, restarted = self.config, self.processes.restarts > 0
        if c.resume and c.overwrite:
            raise UserError("--resume and --overwrite exclude each other")
        saved = (self.dir / "ckpt.pt").exists() or (self.dir / "ckpt.prev.pt").exists()
        if c.resume and not saved and not restarted:
            raise UserError(f"nothing to resume in {self.dir}: there is no ckpt.pt")
        try:
            self.dir.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.dir / ".lock", "a+")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another run is writing to {self.dir}: wait for it, or choose "
                            "another --out_dir") from None
        except OSError as error:
            raise UserError(f"cannot write to --out_dir={self.dir}: {error.strerror}") from None
        there = {path.name: path for path in self.dir.iterdir() if path.name != ".lock"}
        resuming = saved and (c.resume or restarted)
        if there and not saved and "metrics.jsonl" not in there:
            raise UserError(f"{self.dir} holds {min(there)} and no run: --out_dir goes elsewhere")
        if there and not (resuming or c.overwrite or restarted):
            raise UserError(f"{self.dir} is not empty: --resume continues the run in it, "
                            "--overwrite deletes it, --out_dir goes elsewhere")
        for name, path in there.items():
            if _OF_A_RUN.fullmatch(name) and (not resuming or path.suffix == ".tmp"):
                path.unlink()
        return resuming

    def begin(self, total, eval_every, unit, per_step, flops=0):
        """Starts clock, bar and metrics, after `restore`.

        unit: "images" or "tokens"; per_step of them a step; `flops` each, for MFU."""
        self.total, self.unit, self.per_step = total, unit, per_step
        self.eval_every = self.config.eval_every or eval_every
        # the share of the GPUs' bf16 peak that the mathematics of one image or token needs a second
        peak = (peak_flops(self.processes.device) or math.inf) * self.processes.world
        self.mfu = flops / peak
        self.start = self.saved_step = self.step
        if 0 < self.start < total:
            self.say(f"resuming after step {self.start}")
        self.processes.main_only(self._start_files)
        if self.is_main:
            terminal = sys.stderr.isatty() and total > self.start
            self.bar = tqdm(total=total, initial=self.start, unit="step", dynamic_ncols=True,
                            disable=not terminal)
        with contextlib.suppress(ValueError):               # not in the main thread
            for number in (signal.SIGINT, signal.SIGTERM):
                self.handlers[number] = signal.signal(number, self._on_signal)
        self.began = self.lap = time.perf_counter()
        self.lap_steps = 0

    def _start_files(self):
        """Opens metrics.jsonl without the lines after the checkpoint's step, which come again.
        The record of a run that was done stays as it is."""
        lines = read_metrics(self.dir)
        if self.step >= self.total and lines and "event" in lines[-1]:
            return
        kept = [line for line in lines if line["step"] <= self.step and "event" not in line]
        flags = dict(task=self.task, preset=self.preset) | vars(self.config)
        texts = {"metrics.jsonl": "".join(json.dumps(line) + "\n" for line in kept),
                 "config.json": json.dumps(flags, indent=1) + "\n"}
        try:
            for name, text in texts.items():
                tmp = self.dir / f"{name}.tmp"
                tmp.write_text(text)
                os.replace(tmp, self.dir / name)
            self.metrics = open(self.dir / "metrics.jsonl", "a", buffering=1)
        except OSError as error:
            raise UserError(f"cannot write {error.filename}: {error.strerror}") from None

    # ---- steps

    def log_step(self, loss, lr, **values):
        """Counts an optimizer step, and every log_every steps writes a line with the mean loss of
        those steps. `loss` and `values` may be tensors; they stay on the device until then."""
        self.step += 1
        self.fresh.append(loss.detach())
        self.lap_steps += 1
        if self.step == self.start + 1:                     # with compilation: not timed
            loss.item()
            self.lap, self.lap_steps = time.perf_counter(), 0
        if self.bar is not None:
            self.bar.update(1)
        if not self.log_due(self.step):
            return
        self.check_finite()
        now = time.perf_counter()
        mean = sum(self.pending) / len(self.pending)
        rate = self.per_step * self.lap_steps / max(now - self.lap, 1e-9)
        self.pending, self.lap, self.lap_steps = [], now, 0
        rate_name = "tokens_per_s" if self.unit == "tokens" else "examples_per_s"
        shares = dict(mfu=rate * self.mfu) if self.mfu else {}
        self.write({"step": self.step, "split": "train", "loss": mean, "lr": lr, rate_name: rate}
                   | values | shares)
        text = f"loss {mean:.4f}, {rate:,.0f} {self.unit}/s"
        text += f", mfu {rate * self.mfu:.1%}" if self.mfu else ""
        if self.is_main and not self.bar.disable:
            self.bar.set_postfix_str(text)
        else:
            left = (self.total - self.step) * self.per_step / max(rate, 1e-9)
            text += f", lr {lr:.2e}" + (f", {left:,.0f} s left" if rate else "")
            self.say(f"step {self.step}/{self.total}: {text}")

    def log_due(self, step):
        """Whether a line is written after this many steps."""
        return step % self.config.log_every == 0 or step == self.total

    def evaluation_due(self):
        """Whether to evaluate after the step just logged."""
        return self.step % self.eval_every == 0 or self.step == self.total

    def check_finite(self):
        """Waits for the losses of the last steps, the mean over all processes of each. Raises
        Diverged if one is not finite."""
        if not self.fresh:
            return
        sums = self.processes.sum(torch.stack(self.fresh).float())      # NaN and infinity survive
        losses, self.fresh = (sums / self.processes.world).tolist(), []
        self.pending += losses
        bad = [self.step - i for i, loss in enumerate(losses[::-1]) if not math.isfinite(loss)]
        if bad:
            kept, text = self.dir / "ckpt.pt", "no checkpoint was written yet"
            if kept.exists():
                text = f"the last good checkpoint is {kept}"
            self.close()
            raise Diverged(f"the loss is not finite at step {bad[-1]}; {text}")

    def end_step(self, content):
        """Saves every --save_every steps, and leaves, with a checkpoint, after a signal."""
        stopping = self.processes.largest(int(self.signal))
        every = self.config.save_every
        if stopping and self.step < self.total:
            self.save(content, last=True)
            self.say(f"saved step {self.step} to {self.dir / 'ckpt.pt'}; --resume continues")
            self.close()
            raise Stopped(stopping)
        if every and self.step % every == 0 and self.saved_step != self.step:
            self.save(content)

    def _on_signal(self, number, frame):
        """The first signal ends the run after its step. A second Ctrl-C does not wait; but torchrun
        sends every signal again, so that among its processes a second one means nothing."""
        if number == signal.SIGINT == self.signal and self.processes.world == 1:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.signal = self.signal or number

    # ---- saving and resuming

    def save(self, content, best=False, last=False):
        """Writes ckpt.pt and, if `best`, first best.pt: a run killed between the two evaluates that
        step again. content() returns {model, model_config, data_meta, optimizer, extra}.

        A failed write keeps the previous checkpoint: a warning in mid-run, an error where it was
        the `last` chance."""
        self.check_finite()                 # a checkpoint of NaN would replace a good one

        def write():
            flags = dict(preset=self.preset) | vars(self.config)
            whole = dict(task=self.task, step=self.step, best=self.best, run_config=flags)
            whole |= content()
            if best:
                weights = whole | dict(optimizer={}, extra={})
                write_checkpoint(self.dir / "best.pt", weights, keep_previous=False)
                self.saved_best = self.best
            pending = torch.tensor(self.pending, dtype=torch.float64)   # of the line to come
            whole["extra"] = whole["extra"] | dict(losses=pending)
            write_checkpoint(self.dir / "ckpt.pt", whole)
        self.saved_step = self.step
        try:
            with self.untimed():
                self.processes.main_only(write)
        except UserError as error:
            if last or self.step == self.total:
                raise
            self.best = self.saved_best     # a next best.pt has to beat the one that is there
            self.say(f"warning: {error}; the run goes on and keeps the checkpoint before")

    def restore(self, model_config, optimizer, model, averaged=None):
        """If the run resumes: fills weights and optimizer, sets step, best score and pending
        losses, and returns the checkpoint's content; else None.

        `averaged` (EMA, teacher) takes the evaluated weights, `model` then the student's. Raises
        UserError if the flags describe another model; says which other flags differ."""
        if not self.resuming:
            return None
        content = self.processes.main_only(self._newest_whole)
        student = content["extra"].get("student")
        if (averaged is None) != (student is None):
            raise UserError(f"cannot resume {self.dir}: one run averages weights, the other not")
        with reading(self.dir):
            ours, theirs = dataclasses.asdict(model_config), content["model_config"]
            for name in {**ours, **theirs}:
                if ours.get(name) != theirs.get(name):
                    raise UserError(plain(f"cannot resume {self.dir}: its model has {name}="
                                          f"{theirs.get(name)}, the flags say {ours.get(name)}"))
            for name, was in content["run_config"].items():
                now = getattr(self.config, name, was)
                # a flag of the model may be auto, and what the model has was compared above
                if now != was and name not in _HARMLESS and name not in ours:
                    self.say(plain(f"note: --{name} was {was}, is now {now}"))
            load_into(averaged or model, content["model"], self.dir)
            if averaged is not None:
                load_into(model, student, self.dir)
            load_optimizer(optimizer, content["optimizer"])
            self.step, self.best = content["step"], content["best"]
            self.pending = content["extra"]["losses"].tolist()
        self.saved_best = self.best
        return content

    def _newest_whole(self):
        """The content of ckpt.pt or, with a warning if that is damaged, of the one before."""
        try:
            return read_checkpoint(self.dir / "ckpt.pt", self.task)
        except UserError as error:
            print(f"warning: {error}; taking ckpt.prev.pt", file=sys.stderr, flush=True)
        return read_checkpoint(self.dir / "ckpt.prev.pt", self.task)

    @contextlib.contextmanager
    def untimed(self):
        """Around evaluation and saving: their seconds do not count in the training rate."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.lap += time.perf_counter() - began

    # ---- output

    def say(self, text):
        """A line for the reader, from rank 0, that does not tear the bar. With stdout closed or on
        a full disk the run goes on in silence."""
        if not self.is_main:
            return
        try:
            if self.bar is not None and not self.bar.disable:
                tqdm.write(text)
            else:
                print(text, flush=True)
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            with contextlib.suppress(OSError):              # stderr is closed too
                print(f"warning: cannot write to stdout: {error.strerror}; the run goes on "
                      "without", file=sys.stderr, flush=True)

    def write(self, line):
        """One JSON object to metrics.jsonl; NaN and infinity become null."""
        if self.metrics is None:
            return
        bad = [k for k, v in line.items() if isinstance(v, float) and not math.isfinite(v)]
        with self.optional("metrics.jsonl"):
            self.metrics.write(json.dumps(line | dict.fromkeys(bad)) + "\n")

    @contextlib.contextmanager
    def optional(self, name):
        """Around writing a file that a run can do without: a full disk is one warning."""
        try:
            yield
        except OSError as error:
            if name not in self.unwritable:
                path = self.dir / name
                self.say(f"warning: cannot write {path}: {error.strerror}; the run goes on without")
            self.unwritable.add(name)

    def record_scores(self, key, value=None, **scores):
        """Writes a validation's scores; returns whether scores[key] (or `value`, if given) is the
        best so far: the lowest loss, the highest of anything else."""
        self.write(dict(step=self.step, split="val", **scores))
        shown = [f"{k} {v:.4f}" if isinstance(v, float) else f"{k} {v}"
                 for k, v in scores.items() if not isinstance(v, str)]
        self.say(f"step {self.step}: validation " + ", ".join(shown))
        value = scores[key] if value is None else value
        if not math.isfinite(value):
            return False
        if self.best is not None and (value >= self.best if key == "loss" else value <= self.best):
            return False
        self.best = value
        return True

    def describe(self, text):
        """Says what is trained, and in what precision."""
        with self.processes.autocast(self.config.dtype):
            half = torch.is_autocast_enabled(self.processes.device.type)
        self.say(f"{text}, {'bfloat16' if half else 'float32'}")

    def done(self, *then):
        """The last line of metrics.jsonl and of the terminal, and run.png; returns the line.

        `then`: commands to try next, {ckpt} in them stands for the best checkpoint."""
        seconds = round(time.perf_counter() - self.began, 3)
        line = dict(event="done", step=self.step, seconds=seconds, best=self.best)
        self.write(line)
        text = f"in {seconds:.0f} s" if self.step > self.start else "and nothing left to do"
        text += f"; best validation {self.best:.4f}" if self.best is not None else ""
        self.say(f"done: {self.step} steps {text}; written to {self.dir}")
        for command in then:
            self.say("  " + command.format(ckpt=self.dir / "best.pt"))
        if self.metrics is not None:
            with self.optional("run.png"):
                draw_curves([self.dir], self.dir / "run.png")
        self.close()
        return line

    def close(self):
        """Ends the bar, the metrics and the signal handlers."""
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        if self.bar is not None:
            self.bar.close()
        if self.metrics is not None:
            with self.optional("metrics.jsonl"):
                self.metrics.close()
        if self.is_main:
            self._lock.close()


def read_metrics(folder):
    """The lines of a run's metrics.jsonl; a kill may have torn the last one."""
    path, lines = Path(folder) / "metrics.jsonl", []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            lines.append(json.loads(line))
    return lines


def draw_curves(folders, path):
    """Loss and accuracy over the steps of runs: training as a line, validation as points."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    for panel, name in zip(figure.subplots(1, 2), ("loss", "acc")):
        for i, folder in enumerate(folders):
            for split, style in (("train", "-"), ("val", "o--")):
                points = [(line["step"], line[name]) for line in read_metrics(folder)
                          if line.get("split") == split and line.get(name) is not None]
                if points:
                    label = f"{Path(folder).name} {split}"
                    panel.plot(*zip(*points), style, color=f"C{i}", markersize=3, label=label)
                    panel.legend()
        panel.set(xlabel="step", ylabel=name)
    figure.savefig(path)
