"""Image sets as training reads them: load(NAME) -> ImageData -> Images -> batches on the device.
prepare.py makes the files; a small set is prepared at its first use."""
import os
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from data import augment, prepare
from data.folders import read_picture
from flags import CACHE, SplitFlags, UserError
from processes import to_device


class Split(NamedTuple):
    """A part of an image set, as read-only memory maps."""
    images: np.ndarray                  # uint8 (N, H, W, 3)
    labels: np.ndarray                  # int64 (N,)
    masks: np.ndarray | None = None     # uint8 (N, H, W), 1 on the object (drawn sets only)


@dataclass
class ImageData:
    """A prepared image set."""
    name: str
    classes: list[str]
    mean: list[float]       # per channel, of the training images / 255
    std: list[float]
    image_size: int
    train: Split | None = None
    val: Split | None = None
    version: str | None = None      # of the files: a set prepared anew may have another

    def meta(self):
        """What a checkpoint keeps of the set its model was trained on."""
        return dict(name=self.name, classes=self.classes, mean=self.mean, std=self.std,
                    image_size=self.image_size, version=self.version)

    def hold_out(self, val, train=None):
        """The set that validates on the last `val` training images, 0: as before, and trains on
        the first `train` of the others, None: on all."""
        images, labels, _ = self.train
        kept = len(labels) - val
        if kept < 1:
            raise UserError(f"--val={val} leaves no image of {self.name} to train on")
        n, held = min(train or kept, kept), Split(images[kept:], labels[kept:])
        return replace(self, train=Split(images[:n], labels[:n]), val=held if val else self.val)


def load(name, cache=CACHE):
    """Opens a prepared set; one that is missing and small is prepared first. Raises UserError."""
    with prepare.opened(name, "images", cache) as (folder, meta):
        splits, size = {}, meta["image_size"]
        for split in ("train", "val"):
            n, masks = meta["images"][split], None
            images = prepare.mapped(folder / f"{split}_images.bin", np.uint8, (n, size, size, 3))
            labels = prepare.mapped(folder / f"{split}_labels.bin", np.int64, (n,))
            if (path := folder / f"{split}_masks.bin").exists():        # of drawn sets
                masks = prepare.mapped(path, np.uint8, (n, size, size))
            if not {*np.unique(labels)} <= {*range(len(meta["classes"]))}:
                raise ValueError(f"{split}_labels.bin has other labels than its classes")
            splits[split] = Split(images, labels, masks)
        return ImageData(name, meta["classes"], meta["mean"], meta["std"], size, **splits,
                         version=f"{meta['images']}, checksum {meta.get('checksum')}")


def load_for(name, meta, cache):
    """An image set (None: the checkpoint's own), with mean and std of the checkpoint's images."""
    data = load(name or meta.get("name", ""), cache=cache)
    mean, std = statistics_of(meta)
    return replace(data, mean=mean, std=std)


def split_for(loaded, c: SplitFlags):
    """(image set, its split on the model's device), to be normalized as in the model's training."""
    data = load_for(c.data, loaded.meta, c.data_dir)
    return data, Images(getattr(data, c.split), next(loaded.model.parameters()).device)


# ---- What a model sees ---------------------------------------------------------------------------
def statistics_of(meta):
    """(mean, std) per channel of a checkpoint's images; ImageNet's where meta is {} (published)."""
    return meta.get("mean", (0.485, 0.456, 0.406)), meta.get("std", (0.229, 0.224, 0.225))


def model_input(batch, data, size):
    """uint8 images (B, H, H, 3) as a model of that image size sees them: (B, 3, size, size)."""
    x = augment.at_size(augment.to_float(batch), size)
    return augment.normalize(x, data.mean, data.std)


def read_pictures(files, loaded):
    """(pixels (n, 3, S, S) in [0, 1], the pixels normalized as in the model's training), of the
    central squares of picture files. Raises UserError for a file that cannot be read."""
    pictures = [read_picture(file, loaded.encoder.config.image_size) for file in files]
    for file, (_, problem) in zip(files, pictures):
        if problem:
            raise UserError(f"cannot read {file}: {problem}")
    batch = torch.from_numpy(np.stack([picture for picture, _ in pictures]))
    pixels = augment.to_float(batch.to(loaded.encoder.class_token.device))
    return pixels, augment.normalize(pixels, *statistics_of(loaded.meta))


# ---- Batches ------------------------------------------------------------------------------------
def steps_per_epoch(samples, batch_size):
    """Whole batches in an epoch. Raises UserError if there is none."""
    if batch_size > samples:
        raise UserError(f"--batch_size={batch_size} is more than the {samples} training images: "
                        "give a smaller one")
    return samples // batch_size


def index_batches(n, batch_size, seed, start_step=0, rows=slice(None)):
    """Endless generator: the indices of this rank's `rows` of the global batch, from start_step on.
    Step s is batch k of epoch e, where e, k = divmod(s, n // batch_size), of a permutation drawn
    from (seed, e). What is left of an epoch and fills no batch is skipped."""
    epoch, batch = divmod(start_step, n // batch_size)
    while True:
        permutation = np.random.default_rng([seed, epoch]).permutation(n)
        for start in range(batch * batch_size, n - batch_size + 1, batch_size):
            yield permutation[start:start + batch_size][rows]
        epoch, batch = epoch + 1, 0


RESIDENT = 4 * 2 ** 30       # bytes: a smaller split is kept on the device


class Images:
    """Batches of a Split on `device`. If resident, it is a tensor there, and a batch is a gather;
    if not, a batch is read from the memory map."""

    def __init__(self, split, device):
        self.device = torch.device(device)
        self.resident = split.images.nbytes < RESIDENT
        self.images, self.labels = split.images, torch.from_numpy(np.array(split.labels))
        if self.resident:
            self.images = torch.from_numpy(np.array(self.images)).to(self.device)
            self.labels = self.labels.to(self.device)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        """A whole batch from the memory map, for the workers; index int64 (b,)."""
        return torch.from_numpy(self.images[np.asarray(index)]), self.labels[index]

    def batch(self, index):
        """Images and labels of `index`, int64 (b,), array or tensor."""
        if self.resident:
            index = to_device(torch.as_tensor(index), self.device)
            return self.images[index], self.labels[index]
        return tuple(to_device(t, self.device) for t in self[index])

    def batches(self, index_batches):
        """Yields `batch(index)` for each index array of an iterable, which may be endless. A split
        that is not resident is read ahead by up to eight processes, each fetching whole batches:
        they consume `index_batches` a few steps before they are yielded."""
        if self.resident:
            yield from map(self.batch, index_batches)
            return
        loader = torch.utils.data.DataLoader(
            self, batch_size=None, sampler=index_batches, prefetch_factor=4,
            num_workers=min(8, os.cpu_count()), pin_memory=self.device.type == "cuda",
            multiprocessing_context="fork",     # a spawned worker would get a copy of the images
            # out of the process group, which signals reach: the parent has a step to finish
            worker_init_fn=lambda worker: os.setsid(),
            generator=torch.Generator())    # else the global one's state would depend on it
        for images, labels in loader:
            yield to_device(images, self.device), to_device(labels, self.device)
