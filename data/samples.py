"""Samples of the data that a model was trained on, or of another set, as commands measure it."""
import numpy as np
import torch

from data import images, text
from processes import with_bar


def spread(total, n):
    """n indices spread evenly over 0 .. total - 1: some sets are sorted by class."""
    return torch.linspace(0, total - 1, min(n, total), dtype=torch.float64).round().long()


def split_for(loaded, c):
    """(image set, its split on the model's device), to be normalized as in the model's training."""
    data = images.load_for(c.data, loaded.meta, c.data_dir)
    return data, images.Images(getattr(data, c.split), next(loaded.model.parameters()).device)


def traces(loaded, c):
    """Yields (numbers, [(layer, its LayerTrace) ...]) of each of `inputs`."""
    backbone = loaded.backbone
    for index, x in inputs(loaded, c):
        yield index, [*zip(backbone.layers, backbone.trace(x))]


def inputs(loaded, c):
    """Yields (numbers of images (B,) or tokens (B, n), the backbone's input), batch by batch, for
    c.samples images or windows of text, spread over the split. Images have the type of the weights;
    nothing is masked."""
    config, weight = loaded.model.config, next(loaded.model.parameters())
    if loaded.task == "gpt":
        tokens = text.tokens_for(c.data, c.split, loaded.meta, c.data_dir)[2]
        n = min(config.context, len(tokens))
        samples = tokens[:len(tokens) // n * n].reshape(-1, n)
    else:
        data, samples = split_for(loaded, c)
    for index in with_bar(spread(len(samples), c.samples).split(c.batch_size), "samples"):
        if loaded.task == "gpt":
            ids = torch.from_numpy(samples[index.numpy()].astype(np.int64)).to(weight.device)
            yield ids, ids
        else:
            x = images.model_input(samples.batch(index)[0], data, config.image_size)
            yield index, x.to(weight.dtype)
