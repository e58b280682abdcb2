"""
A run: its folder, metrics, signals, saving and resuming.

    python run.py out/gpt-pydoc out/mine --out=curves.png       draws the curves of any runs
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

from checkpoint import load_into, load_optimizer, read_checkpoint, reading, write_checkpoint
from flags import cli, Diverged, flush_or_mute, ROOT, Stopped, UserError
from parallel import peak_flops

# What a run writes in its folder; a kill may leave .tmp and .link
_OF_A_RUN = re.compile(r"(config\.json|metrics\.jsonl|run\.png|step\d+\.png|"
                       r"(ckpt|ckpt\.prev|best)\.pt)(\.tmp|\.link)?")
# Flags that may change when a run is resumed, without a note
_HARMLESS = ("resume", "overwrite", "out_dir", "device", "compile", "workers", "log_every",
             "data_dir", "size")


class Run:
    """One training run in one folder. All processes call every method, rank 0 writes.

    out_dir holds config.json, metrics.jsonl (one object a line), ckpt.pt (latest), ckpt.prev.pt
    (the one before), best.pt and, at the end, run.png."""

    def __init__(self, config, task, preset, processes):
        self.config, self.task, self.preset, self.processes = config, task, preset, processes
        self.dir = Path(config.out_dir or ROOT / "out" / f"{task}-{preset}")
        self.is_main = processes.rank == 0
        self.step = 0                       # steps done
        self.best = self.saved_best = None  # the best score; that of best.pt
        self.best_name = ""
        self.signal = 0                     # received by this process
        self.bar = self.metrics = None
        self.fresh, self.pending = [], []   # losses since the last line: on the device, as numbers
        self._unwritable = set()
        self.resuming = processes.main_only(self._open)

    # ---- the folder

    def _open(self):
        """Locks the folder, removes what a kill left there, and returns whether to resume in it;
        if not, removes what a run wrote. Other files stay."""
        c, restarted = self.config, self.processes.restarts > 0
        if c.resume and c.overwrite:
            raise UserError("--resume and --overwrite exclude each other")
        nothing = UserError(f"nothing to resume in {self.dir}: there is no ckpt.pt")
        if c.resume and not self.dir.exists() and not restarted:
            raise nothing
        self._lock_folder()
        there = {p.name: p for p in self.dir.iterdir() if p.name != ".lock"}
        has_checkpoint = "ckpt.pt" in there or "ckpt.prev.pt" in there
        resuming = (c.resume or restarted) and has_checkpoint
        if c.resume and not resuming and not restarted:
            raise nothing
        if there and not (resuming or c.overwrite or restarted):
            resume = "--resume continues it" if has_checkpoint else "it has no checkpoint yet"
            raise UserError(f"{self.dir} is not empty: {resume}, --overwrite deletes it, "
                            "--out_dir goes elsewhere")
        if there and not (has_checkpoint or "metrics.jsonl" in there):
            raise UserError(f"{self.dir} holds {min(there)} and no run: --overwrite deletes "
                            "nothing there, --out_dir goes elsewhere")
        for name, path in there.items():
            if _OF_A_RUN.fullmatch(name) and (not resuming or path.suffix in (".tmp", ".link")):
                path.unlink()
        return resuming

    def _lock_folder(self):
        try:
            self.dir.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.dir / ".lock", "a+")
        except OSError as error:
            raise UserError(f"cannot write to --out_dir={self.dir}: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"another run is writing to {self.dir}: wait for it, or choose "
                            "another --out_dir") from None

    def begin(self, total, eval_every, unit, per_step, flops=None):
        """Starts clock, bar and metrics, after `restore`.

        unit: "images" or "tokens"; per_step of them a step; `flops` each, for MFU."""
        self.total, self.unit, self.per_step, self.flops = total, unit, per_step, flops
        self.eval_every = self.config.eval_every or eval_every
        self.rate_name = f"{'tokens' if unit == 'tokens' else 'examples'}_per_s"
        self.start = self.saved_step = self.step
        if 0 < self.start < total:
            self.say(f"resuming after step {self.start}")
        self.processes.main_only(self._start_files)
        if self.is_main:
            terminal = sys.stderr.isatty() and total > self.start
            self.bar = tqdm(total=total, initial=self.start, unit="step", dynamic_ncols=True,
                            disable=not terminal)
        self._handlers = {}
        with contextlib.suppress(ValueError):               # not in the main thread
            for number in (signal.SIGINT, signal.SIGTERM):
                self._handlers[number] = signal.signal(number, self._on_signal)
        self.began = self.lap = time.perf_counter()
        self.lap_steps, self.timed, self.timed_steps, self.first_step_s = 0, 0.0, 0, None

    def _start_files(self):
        """Opens metrics.jsonl without the lines after the checkpoint's step, which come again.
        Those of a run that was done stay as they are."""
        path, tmp = self.dir / "metrics.jsonl", self.dir / "metrics.jsonl.tmp"
        lines = read_metrics(self.dir)
        if self.resuming and self.step >= self.total and lines and "event" in lines[-1]:
            return
        kept = [line for line in lines
                if line.get("step", math.inf) <= self.start and "event" not in line]
        flags = dict(task=self.task, preset=self.preset) | vars(self.config)
        try:
            tmp.write_text("".join(json.dumps(line) + "\n" for line in kept))
            os.replace(tmp, path)
            tmp = self.dir / "config.json.tmp"
            tmp.write_text(json.dumps(flags, indent=1) + "\n")
            os.replace(tmp, self.dir / "config.json")
            self.metrics = open(path, "a", buffering=1)
        except OSError as error:
            raise UserError(f"cannot write {error.filename or path}: {error.strerror}") from None

    # ---- steps

    def log_step(self, loss, lr, **values):
        """Counts an optimizer step, and every log_every steps writes a line with the mean loss of
        those steps. `loss` and `values` may be tensors; they stay on the device until then."""
        self.step += 1
        self.fresh.append(loss.detach())
        self.lap_steps += 1
        if self.first_step_s is None:                       # compilation and warm-up: timed apart
            loss.item()
            now = time.perf_counter()
            self.first_step_s, self.lap, self.lap_steps = now - self.lap, now, 0
        if self.bar is not None:
            self.bar.update(1)
        if self.log_due(self.step):
            self.check_finite()
            mean, rate = sum(self.pending) / len(self.pending), self._lap()
            self.pending, mfu = [], self.mfu(rate)
            line = dict(step=self.step, split="train", loss=mean, lr=lr, **{self.rate_name: rate})
            self.write(line | values | (dict(mfu=mfu) if mfu else {}))
            self._show(mean, lr, rate, mfu)

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
            last, kept = self.dir / "ckpt.pt", "no checkpoint was written yet"
            if last.exists():
                kept = f"the last good checkpoint is {last}"
            self.close()
            raise Diverged(f"the loss is not finite at step {bad[-1]}; {kept}")

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
        """The first signal ends the run after its step. A second Ctrl-C does not wait; torchrun
        sends each signal again, so among its processes a second one means nothing."""
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
            pending = torch.tensor(self.pending, dtype=torch.float64)   # of the line to come
            whole["extra"] = whole["extra"] | dict(losses=pending)
            if best:
                without = dict(optimizer={}, extra={})
                write_checkpoint(self.dir / "best.pt", whole | without, keep_previous=False)
                self.saved_best = self.best
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

        `averaged` (EMA, teacher) takes the evaluated weights, `model` then the student's. A damaged
        ckpt.pt is one warning, and ckpt.prev.pt serves. Raises UserError if neither is whole, or if
        the flags describe another model; says which other flags differ."""
        if not self.resuming:
            return None
        path = self.dir / "ckpt.pt"
        content = self.processes.main_only(self._newest_whole)
        ours, theirs = dataclasses.asdict(model_config), content["model_config"]
        for name in {**ours, **theirs}:
            if ours.get(name) != theirs.get(name):
                raise UserError(f"cannot resume {self.dir}: its model has "
                                f"{name}={theirs.get(name)}, the flags say {ours.get(name)}")
        for name, was in content["run_config"].items():
            # what the model's fields are was compared above, as the model has them
            value = getattr(self.config, name, was)
            if name not in _HARMLESS and name not in ours and was != value:
                self.say(f"note: --{name} was {was}, is now {value}")
        student = content["extra"].get("student")
        if (averaged is None) != (student is None):
            raise UserError(f"cannot resume {self.dir}: one run averages weights, the other does "
                            "not")
        with reading(path):
            load_into(model if student is None else averaged, content["model"], path)
            if student is not None:
                load_into(model, student, path)
            load_optimizer(optimizer, content["optimizer"], path)
            self.step, self.best = content["step"], content["best"]
            self.pending = content["extra"]["losses"].tolist()
        self.saved_best = self.best
        return content

    def _newest_whole(self):
        """The content of ckpt.pt, or, if that is damaged, of ckpt.prev.pt."""
        problems = []
        for path in (self.dir / "ckpt.pt", self.dir / "ckpt.prev.pt"):
            if not path.exists():
                continue
            try:
                content = read_checkpoint(path, self.task)
            except UserError as error:
                problems.append(str(error))
                continue
            if problems:
                print(f"warning: {problems[0]}; continuing from {path.name} at step "
                      f"{content['step']}", file=sys.stderr, flush=True)
            return content
        raise UserError(problems[0] + ", and no whole checkpoint before it" * (len(problems) > 1))

    # ---- clock

    def _lap(self):
        """Images or tokens a second since the last lap; adds to the run's sum."""
        seconds, steps, self.lap_steps = time.perf_counter() - self.lap, self.lap_steps, 0
        self.timed, self.timed_steps = self.timed + seconds, self.timed_steps + steps
        self.lap += seconds
        return self.per_step * steps / seconds if steps else 0.0

    @contextlib.contextmanager
    def untimed(self):
        """Around evaluation and saving: their seconds do not count in the training rate."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.lap += time.perf_counter() - began

    def mfu(self, rate):
        """The share of the GPUs' bf16 peak that the mathematics needs; None where unknown."""
        peak = peak_flops(self.processes.device)
        return rate * self.flops / (peak * self.processes.world) if peak and self.flops else None

    # ---- output

    def _show(self, loss, lr, rate, mfu):
        """The bar's postfix on a terminal, a plain line elsewhere."""
        if not self.is_main:
            return
        text = f"loss {loss:.4f}, {rate:,.0f} {self.unit}/s" + (f", mfu {mfu:.1%}" if mfu else "")
        if not self.bar.disable:
            self.bar.set_postfix_str(text)
            return
        seconds = (self.total - self.step) * self.per_step / rate if rate else 0
        left = f", {seconds:,.0f} s left" if rate else ""
        self.say(f"step {self.step}/{self.total}: {text}, lr {lr:.2e}{left}")

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
            with contextlib.suppress(OSError):              # as is stderr in `... 2>&1 | head`
                print(f"warning: cannot write to stdout: {error.strerror}; the run goes on "
                      "without", file=sys.stderr, flush=True)
            flush_or_mute()

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
            if name not in self._unwritable:
                path = self.dir / name
                self.say(f"warning: cannot write {path}: {error.strerror}; the run goes on without")
            self._unwritable.add(name)

    def record_scores(self, key, value=None, **scores):
        """Writes a validation's scores; returns whether scores[key] (or `value`, if given) is the
        best so far: the lowest loss, the highest of anything else."""
        self.write(dict(step=self.step, split="val", **scores))
        shown = {k: f"{v:.4f}" if isinstance(v, float) else v for k, v in scores.items()}
        shown = [f"{k} {v}" for k, v in shown.items() if not isinstance(scores[k], str)]
        self.say(f"step {self.step}: validation " + ", ".join(shown))
        self.best_name = key if value is None else f"{key} on the windows of --eval_windows"
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
        if self.lap_steps:
            self._lap()
        rate = self.per_step * self.timed_steps / self.timed if self.timed_steps else None
        seconds = round(time.perf_counter() - self.began, 3)
        first = self.first_step_s and round(self.first_step_s, 3)
        line = dict(event="done", step=self.step, seconds=seconds, first_step_s=first,
                    **{self.rate_name: rate}, best=self.best)
        self.write(line)
        text = f"done: {self.step} steps"
        text += f", {self.step - self.start} of them now," if 0 < self.start < self.step else ""
        text += f" in {seconds:.0f} s" if first else ", nothing left to do"
        if rate:
            text += f", first step {first:.1f} s, then {rate:,.0f} {self.unit}/s"
            text += f" (mfu {self.mfu(rate):.1%})" if self.mfu(rate) else ""
        if self.best is not None:
            text += f"; best validation {self.best_name}".rstrip() + f" {self.best:.4f}"
        self.say(f"{text}; written to {self.dir}")
        for command in then:
            self.say("  " + command.format(ckpt=self.dir / "best.pt"))
        if self.metrics is not None:
            with self.optional("run.png"):
                draw_curves([self.dir], self.dir / "run.png")
        self.close()
        return line

    def close(self):
        """Ends the bar, the metrics and the signal handlers."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if self.bar is not None:
            self.bar.close()
        if self.metrics is not None:
            with self.optional("metrics.jsonl"):
                self.metrics.close()
        if self.is_main:
            self._lock.close()


# -------------------------------------------------------------------------------------------------
# Curves
# -------------------------------------------------------------------------------------------------

def read_metrics(folder):
    """The lines of a run's metrics.jsonl; a kill may have torn the last one."""
    path, lines = Path(folder) / "metrics.jsonl", []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            lines.append(json.loads(line))
    return lines


def draw_curves(folders, path):
    """Loss and, where there is one, accuracy over the steps of each run: training as a line,
    validation as points."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    for panel, name in zip(figure.subplots(1, 2), ("loss", "acc")):
        for i, folder in enumerate(folders):
            for split, style in (("train", "-"), ("val", "o--")):
                rows = [line for line in read_metrics(folder) if line.get("split") == split]
                rows = [line for line in rows if line.get(name) is not None]
                panel.plot([line["step"] for line in rows], [line[name] for line in rows], style,
                           color=f"C{i}", markersize=3, label=f"{Path(folder).name} {split}")
        panel.set(xlabel="step", ylabel=name)
        panel.legend()
    figure.savefig(path)


def main(argv):
    """The command of the module's header."""
    folders = [word for word in argv if not word.startswith("--")]
    out = [word.removeprefix("--out=") for word in argv if word.startswith("--out=")]
    if not folders or len(folders) + len(out) < len(argv) or len(out) != 1:
        raise UserError("usage: python run.py FOLDER ... --out=curves.png")
    for folder in folders:
        if not read_metrics(folder):
            raise UserError(f"{folder} holds no metrics.jsonl of a run")
    draw_curves(folders, out[0])


if __name__ == "__main__":
    cli(main)
