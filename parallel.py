"""
Processes, devices and seeds.
"""
import contextlib
import ctypes
import hashlib
import os
import re
import shutil
import sys
import time
from functools import partial

import torch
import torch.distributed as dist

from flags import UserError
from optim import is_fast_in_bfloat16


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
