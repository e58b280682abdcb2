"""
A run: its directory, steps, metrics and signals.
"""
import contextlib
import fcntl
import json
import math
import os
import re
import shlex
import signal
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

import report
from flags import ROOT, Diverged, Stopped, UserError, flush_or_mute
from parallel import derive_seed, peak_flops

# What a run writes in its directory; a kill may leave .tmp and .link
_OF_A_RUN = re.compile(r"(config\.json|metrics\.jsonl|report\.md|step\d+\.png|"
                       r"(ckpt|ckpt\.prev|best)\.pt)(\.tmp|\.link)?")


class Run:
    """One training run in one directory. All processes call every method, rank 0 writes.

    out_dir holds config.json, metrics.jsonl (one object a line), and what checkpoint.py writes:
    ckpt.pt (latest), ckpt.prev.pt (the one before), best.pt."""

    def __init__(self, config, task, preset, processes):
        self.config, self.task, self.preset, self.processes = config, task, preset, processes
        self.dir = Path(config.out_dir or ROOT / "out" / f"{task}-{preset}")
        self.is_main = processes.rank == 0
        self.step = 0                       # steps done
        self.best = None
        self.best_name = ""
        self.signal = 0                     # received by this process
        self.stopping = 0                   # received by any, as all of them know
        self.bar = None
        self._unwritable = set()
        self.about = None
        self.resuming = processes.main_only(self._open)

    # ---- the directory

    def _open(self):
        """Locks the directory, removes what a kill left there, and returns whether to resume in it;
        if not, removes what a run wrote. Other files stay."""
        c, restarted = self.config, self.processes.restarts > 0
        if c.resume and c.overwrite:
            raise UserError("--resume and --overwrite exclude each other")
        nothing = UserError(f"nothing to resume in {self.dir}: there is no ckpt.pt")
        if c.resume and not self.dir.exists() and not restarted:
            raise nothing
        self._lock_directory()
        there = [p for p in self.dir.iterdir() if p.name != ".lock"]
        ours = [p for p in there if p.is_file() and _OF_A_RUN.fullmatch(p.name)]
        checkpoints = any(p.name in ("ckpt.pt", "ckpt.prev.pt") for p in there)
        resuming = (c.resume or restarted) and checkpoints
        if c.resume and not resuming and not restarted:
            raise nothing
        if there and not (resuming or c.overwrite or restarted):
            resume = "--resume continues it" if checkpoints else "it has no checkpoint yet"
            raise UserError(f"{self.dir} is not empty: {resume}, --overwrite deletes it, "
                            "--out_dir goes elsewhere")
        others = sorted(p.name for p in there if p not in ours or p.name == "config.json")
        if others and not resuming and not self._has_config():
            raise UserError(f"{self.dir} holds {others[0]}, which is not of a run, and no run: "
                            "--overwrite deletes nothing there, --out_dir goes elsewhere")
        for p in ours:
            if not resuming or p.suffix in (".tmp", ".link"):
                p.unlink()
        return resuming

    def _has_config(self):
        """Whether config.json is a run's."""
        with contextlib.suppress(OSError, ValueError):
            flags = json.loads((self.dir / "config.json").read_text())
            return isinstance(flags, dict) and {"task", "preset", "out_dir"} <= flags.keys()
        return False

    def _lock_directory(self):
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
        """Starts clock, bar and metrics; a checkpoint may have set `step` and `best` before.

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
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(ValueError):           # not in the main thread
                signal.signal(number, self._on_signal)
        self.began = self.lap = time.perf_counter()
        self.timed, self.timed_steps, self.lap_steps, self.first_step_s = 0.0, 0, 0, None
        self.losses = []                    # of the steps since mean_loss, on the device

    def _start_files(self):
        flags = dict(task=self.task, preset=self.preset) | vars(self.config)
        try:
            tmp = self.dir / "config.json.tmp"
            tmp.write_text(json.dumps(flags, indent=1) + "\n")
            os.replace(tmp, self.dir / "config.json")
            self._truncate_metrics()
            self.metrics = open(self.dir / "metrics.jsonl", "a", buffering=1)
        except OSError as error:
            path = error.filename or self.dir
            raise UserError(f"cannot write {path}: {error.strerror}") from None

    def _truncate_metrics(self):
        """Drops what a resumed run will write again: every line after the checkpoint's step."""
        path, tmp = self.dir / "metrics.jsonl", self.dir / "metrics.jsonl.tmp"
        if not path.exists():
            return
        kept = []
        for line in path.read_bytes().splitlines():
            with contextlib.suppress(ValueError, TypeError, AttributeError):    # torn by a kill
                entry = json.loads(line)
                if entry.get("step", math.inf) <= self.start and "event" not in entry:
                    kept.append(line + b"\n")
        tmp.write_bytes(b"".join(kept))
        os.replace(tmp, path)

    # ---- steps

    def steps(self, model):
        """The numbers of the steps to come. Before each one: training mode, and a seed for dropout
        and drop path, if there are any, that is a function of (seed, step, rank)."""
        seed, rank = self.config.seed, self.processes.rank
        draws = any(getattr(self.config, name, 0) for name in ("dropout", "drop_path"))
        while self.step < self.total:
            if draws:
                torch.manual_seed(derive_seed(seed, self.step, "dropout", rank))
            if not model.training:      # after an evaluation; it visits every module
                model.train()
            yield self.step

    def log_step(self, loss, lr, **values):
        """Counts an optimizer step, and every log_every steps writes a line. `loss` and `values`
        may be tensors; they stay on the device until then."""
        self.step += 1
        self.losses.append(loss.detach())
        self.lap_steps += 1
        if self.first_step_s is None:                       # compilation and warm-up: timed apart
            loss.item()
            now = time.perf_counter()
            self.first_step_s, self.lap, self.lap_steps = now - self.lap, now, 0
        if self.bar is not None:
            self.bar.update(1)
        if self.logs(self.step):
            mean, rate = self.mean_loss(), self._lap()
            mfu = self.mfu(rate)
            line = dict(step=self.step, split="train", loss=mean, lr=lr)
            line |= {self.rate_name: rate} | values
            self.write(line if mfu is None else line | dict(mfu=mfu))
            self._show(mean, lr, rate, mfu)

    def logs(self, step):
        """Whether a line is written after this many steps."""
        return step % self.config.log_every == 0 or step == self.total

    def evaluates(self):
        """Whether an evaluation is due after the step just logged."""
        return self.step % self.eval_every == 0 or self.step == self.total

    def end_step(self, save):
        """Saves every --save_every steps, and leaves, with a checkpoint, after a signal."""
        self.stopping = self.processes.largest(int(self.signal))
        if self.stopping and self.step < self.total:
            save(now=True)
            self.say(f"saved step {self.step} to {self.dir / 'ckpt.pt'}; --resume continues")
            self.close()
            raise Stopped(self.stopping)
        every = self.config.save_every
        if every and self.step % every == 0 and self.saved_step != self.step:
            save(now=True)

    def _on_signal(self, number, frame):
        if self.signal:                                     # the second one does not wait
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.signal = number

    def mean_loss(self):
        """The mean loss since it was last asked for, over all processes; None without a step.

        Raises Diverged if one was not finite."""
        if not self.losses:
            return None
        sums = self.processes.sum(torch.stack(self.losses).float())     # NaN and infinity survive
        losses, self.losses = (sums / self.processes.world).tolist(), []
        bad = [self.step - i for i, loss in enumerate(losses[::-1]) if not math.isfinite(loss)]
        if bad:
            last, kept = self.dir / "ckpt.pt", "no checkpoint was written yet"
            if last.exists():
                kept = f"the last good checkpoint is {last}"
            self.close()
            raise Diverged(f"the loss is not finite at step {bad[-1]}; {kept}")
        return sum(losses) / len(losses)

    # ---- clock

    def _lap(self):
        """Images or tokens a second since the last lap; adds to the run's sum."""
        now = time.perf_counter()
        seconds, steps = now - self.lap, self.lap_steps
        self.timed, self.timed_steps = self.timed + seconds, self.timed_steps + steps
        self.lap, self.lap_steps = now, 0
        return self.per_step * steps / seconds if steps else 0.0

    @contextlib.contextmanager
    def untimed(self):
        """Around evaluation and saving: their seconds do not count in the training rate."""
        if self.lap_steps:
            self._lap()
        try:
            yield
        finally:
            self.lap, self.lap_steps = time.perf_counter(), 0

    def mfu(self, rate):
        """The share of the GPUs' bf16 peak that the mathematics needs; None where unknown."""
        peak = peak_flops(self.processes.device)
        if not peak or not self.flops:
            return None
        return rate * self.flops / (peak * self.processes.world)

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
        """A line for the reader, from rank 0, that does not tear the bar. With stdout on a full
        disk the run goes on in silence."""
        if not self.is_main:
            return
        try:
            if self.bar is not None and not self.bar.disable:
                tqdm.write(text)
            else:
                print(text, flush=True)
        except BrokenPipeError:
            raise
        except OSError as error:
            print(f"warning: cannot write to stdout: {error.strerror}; the run goes on without",
                  file=sys.stderr, flush=True)
            flush_or_mute()

    def write(self, line):
        """One JSON object to metrics.jsonl; NaN and infinity become null."""
        if not self.is_main:
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

    def evaluated(self, better=max, key="acc", value=None, **scores):
        """Records a validation; returns whether `key` (or `value`, if given) is the best so far."""
        self.write(dict(step=self.step, split="val", **scores))
        shown = {k: f"{v:.4f}" if isinstance(v, float) else v for k, v in scores.items()}
        shown = [f"{k} {v}" for k, v in shown.items() if not isinstance(scores[k], str)]
        self.say(f"step {self.step}: validation " + ", ".join(shown))
        self.best_name = key if value is None else f"{key} on the windows of --eval_windows"
        value = scores[key] if value is None else value
        improved = self.best is None or better(value, self.best) == value != self.best
        improved = improved and math.isfinite(value)
        if improved:
            self.best = value
        return improved

    def describe(self, text):
        """Says what is trained, and in what precision; the report repeats it."""
        with self.processes.autocast(self.config.dtype):
            half = torch.is_autocast_enabled(self.processes.device.type)
        self.about = f"{text}, {'bfloat16' if half else 'float32'}"
        self.say(self.about)

    def done(self, *then):
        """The last line of metrics.jsonl and of the terminal, and report.md; returns the line.

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
            mfu = self.mfu(rate)
            text += f", first step {first:.1f} s, then {rate:,.0f} {self.unit}/s"
            text += f" (mfu {mfu:.1%})" if mfu else ""
        if self.best is not None:
            text += f"; best validation {self.best_name}".rstrip() + f" {self.best:.4f}"
        self.say(f"{text}; written to {self.dir}")
        then = [line.format(ckpt=self.dir / "best.pt") for line in then]
        for command in then:
            self.say(f"  {command}")
        if self.is_main:
            about = dict(run=self.about, result=text, torch=torch.__version__,
                         commit=report.commit(), date=time.strftime("%Y-%m-%d"))
            with self.optional("report.md"):
                report.write(self.dir, self._command(), about, then)
        self.close()
        return line

    def _command(self):
        """The command line that started this process."""
        launcher = f"torchrun --standalone --nproc_per_node={self.processes.world}"
        words = [Path(sys.argv[0]).name, *sys.argv[1:]]
        return f"{launcher if self.processes.world > 1 else 'python'} {shlex.join(words)}"

    def close(self):
        """Ends the bar, the metrics and the signal handlers."""
        if self.bar is not None:
            self.bar.close()
            with self.optional("metrics.jsonl"):
                self.metrics.close()
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self.is_main:
            self._lock.close()
