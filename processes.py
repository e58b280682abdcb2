"""This process: rank, device, precision, seeds, what it prints, and how it ends."""
import contextlib
import hashlib
import os
import shutil
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from flags import UserError


# ---- Devices ------------------------------------------------------------------------------------
def is_fast_in_bfloat16(device):
    """Whether the device has instructions for bfloat16: a GPU from Ampere on, a CPU with AMX or
    AVX512-BF16. Others emulate them: Newton-Schulz then takes a CPU 30 times as long."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    can = torch.cpu.get_capabilities() if device.type == "cpu" else {}
    return bool(can.get("amx_bf16") or can.get("avx512_bf16"))


def to_device(t, device):
    """t on the device. A copy to a GPU from memory that is not pinned would make the CPU wait."""
    if device.type == "cuda":
        return t.pin_memory().to(device, non_blocking=True)
    return t.to(device)


def device_name(device):
    if device.type == "cpu":
        n = torch.get_num_threads()
        return "cpu (1 thread)" if n == 1 else f"cpu ({n} threads; OMP_NUM_THREADS=1 may be faster)"
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def wants_compile(wanted, device):
    """The value of --compile; auto, None: on cuda. On a CPU compiling takes 15 to 55 s once; then a
    step in bfloat16 takes 0.7 of its time, but one in float32 as long as before."""
    wanted = device.type == "cuda" if wanted is None else wanted
    if wanted and device.type == "cpu" and shutil.which("g++") is None:
        note("not compiled, since there is no C++ compiler, g++")
        return False
    return wanted


# ---- Seeds, and what is printed -----------------------------------------------------------------
def derive_seed(*purpose):
    """A 32-bit seed, as much as torch's CPU generator reads: a function of the arguments, so that
    no state has to be saved."""
    digest = hashlib.blake2b(repr(purpose).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1 & 0xFFFFFFFF


def is_main():
    """Whether this process is rank 0, which alone writes and prints."""
    return os.environ.get("RANK", "0") == "0"


def note(text):
    """A line on stderr, of rank 0."""
    if is_main():
        print(f"note: {text}", file=sys.stderr, flush=True)


def with_bar(items, what, total=None):
    """The items, with a progress bar where rank 0 has a terminal."""
    return tqdm(items, what, total, leave=False, disable=None if is_main() else True)


# ---- Processes ----------------------------------------------------------------------------------
class SharedError(UserError):
    """One that every process raises, so that rank 0 alone reports it."""


class Processes:
    """This process among those of torchrun (rank, world, device), and the collectives."""

    def __init__(self, device="auto", dtype="auto"):
        self.rank = int(os.environ.get("RANK", 0))
        self.world = int(os.environ.get("WORLD_SIZE", 1))
        self.interleaved = slice(self.rank, None, self.world)    # its samples of an evaluation
        device = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cuda" and not torch.cuda.is_available():
            raise UserError(f"--device={device}: this machine has none")
        self.device = torch.device(device)
        if device == "cuda":
            if int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > torch.cuda.device_count():
                raise UserError("--nproc_per_node is more than the GPUs of this machine")
            self.device = torch.device(device, int(os.environ.get("LOCAL_RANK", 0)))
            torch.cuda.set_device(self.device)
        self.bfloat16 = dtype == "bfloat16" or dtype == "auto" and is_fast_in_bfloat16(self.device)
        self.autocast = partial(torch.autocast, device, torch.bfloat16, enabled=self.bfloat16)
        if self.world > 1 and not dist.is_initialized():
            # tensors on the CPU, such as what signals came, never make a GPU wait
            dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")

    def rows(self, batch_size):
        """This process's slice of a batch. Raises UserError if it does not divide among them."""
        if batch_size % self.world:
            raise UserError(f"--batch_size={batch_size} is not divisible by {self.world} processes")
        share = batch_size // self.world
        return slice(self.rank * share, (self.rank + 1) * share)

    def sum(self, tensor):
        """The tensor summed over all processes."""
        if self.world > 1:
            tensor = tensor.clone()
            dist.all_reduce(tensor)
        return tensor

    def main_only(self, function, *args):
        """function(*args) on rank 0; its result, or its error as a UserError, on every process."""
        result = error = None
        if self.rank == 0:
            try:
                result = function(*args)
            except (UserError, OSError) as raised:
                error = str(raised)     # not itself: its traceback would keep a run's lock
        if self.world > 1:
            both = [result, error]
            dist.broadcast_object_list(both, 0)
            result, error = both
        if error is not None:
            raise SharedError(error)
        return result

    def wrap(self, model):
        """The model, in DistributedDataParallel if there are several processes. Compile after."""
        if self.world == 1:
            return model
        return torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)


# ---- Errors, and how a command ends -------------------------------------------------------------
@contextlib.contextmanager
def one_line(what, advice=""):
    """Around what reads a person's files or the network, which may raise anything. It becomes a
    UserError, "WHAT: why"; if it was none before, with `advice`."""
    try:
        yield
    except Exception as error:
        cause = error.__cause__ or error        # behind "an error while generating the dataset"
        if hasattr(cause, "exit_status"):
            raise UserError(f"{what}: {cause}") from None
        reason = getattr(cause, "strerror", None) or f"{type(cause).__name__}: {cause}"
        raise UserError(f"{what}: {' '.join(reason.split())[:300]}{advice}") from error


def ending(error):
    """(exit status, line for stderr) of an error, or None for a mistake of the program."""
    if hasattr(error, "exit_status"):
        return error.exit_status, str(error)
    if isinstance(error, KeyboardInterrupt):
        return 130, ""
    # the CPU's allocator has no class of error of its own
    if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error):
        return 2, "this does not fit in memory: try a smaller --micro_batch, --batch_size or model"
    if isinstance(error, UnicodeDecodeError) or isinstance(error, OSError) and error.errno:
        return 2, str(error)


def cli(main):
    """Runs main(argv) and exits: 0 done, 2 a user's error, 3 a loss that is not finite, 130 Ctrl-C,
    128 + signal after a saved one. An error prints one line, Ctrl-C none."""
    sys.stdout.reconfigure(errors="replace")    # a terminal that is not UTF-8 shows ? in a text
    status = 0
    try:
        main(sys.argv[1:])
        if dist.is_initialized():
            dist.barrier()              # gloo aborts a process whose peers have left before it
    except (KeyboardInterrupt, Exception) as error:
        if (end := ending(error)) is None:
            raise
        status, line = end
        # rank 0 alone reports what every process has: a shared error, any before they join
        unshared = dist.is_initialized() and not isinstance(error, SharedError)
        name = Path(sys.argv[0]).name + (f", rank {dist.get_rank()}" if unshared else "")
        if line and (unshared or os.environ.get("LOCAL_RANK", "0") == "0"):
            sys.stderr.write(f"{name}: {' '.join(line.split())[:300]}\n")
    if dist.is_initialized():
        sys.stdout.flush()
        dist.destroy_process_group()
        os._exit(status)                # skips gloo's destructors, which crash now and then
    sys.exit(status)
