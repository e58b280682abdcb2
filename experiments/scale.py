"""
Is data parallelism enough for the papers' settings, on 1, 8 and 8 x 8 GPUs?

Computed: a step takes its FLOPs by the rate of the GPUs, and what the backward pass does not hide
of the all-reduce of float32 gradients. Kernel launches, the optimizer and reading are left out.

    python -m experiments.scale                 # the four scripts' presets

Verdict, computed 2026-11-22: yes on 8 GPUs, where each works at 99.3 % of its own rate or more. On
64, train_vit.py imagenet falls to 90 %, as its step takes only 2.3 ms; the others keep 97 to 99 %.
Not measured: no GPU was at hand.
"""
from dataclasses import dataclass, replace

import torch

import train_gpt
import train_mae
import train_simdino
import train_vit
from flags import cli, option, parse
from model import ImageClassifier, LanguageModel, text_config
from parallel import count


@dataclass(kw_only=True)
class Flags:
    rate: float = option(396.0, "TFLOP/s of a GPU: 40 % of an H100's 989 in bf16", above=0)
    nvlink: float = option(360.0, "GB/s each way within a node: 80 % of NVLink 4", above=0)
    network: float = option(40.0, "GB/s each way to another node: 80 % of 400 Gbit/s", above=0)


def ring_bytes(size, n):
    """Bytes that each of n processes sends to sum a buffer of `size` bytes around a ring."""
    return 2 * (n - 1) / n * size


def predict(flops, parameters, nodes, gpus, c):
    """(bytes that a GPU sends, seconds that it computes, seconds that it waits for gradients) in a
    step of `flops` in all on `nodes` x `gpus`.

    Gradients are summed around a ring within each node, then each GPU's share of them around a ring
    across the nodes. The backward pass, two thirds of the time, hides what is sent meanwhile; the
    last bucket is sent when it has ended. Gradient accumulation would hide less."""
    size = 4 * parameters
    inside, across = ring_bytes(size, gpus), ring_bytes(size / gpus, nodes)
    compute = flops / (gpus * nodes) / (c.rate * 1e12)
    exchange = (inside / c.nvlink + across / c.network) / 1e9
    last_bucket = exchange * min(1, 25e6 / size)        # DDP sends 25 MB at once
    return inside + across, compute, max(exchange - 2 / 3 * compute, last_bucket)


def simdino_flops(student, global_size, local_size, local_views):
    """Operations of a step of SimDINO for one image."""
    large, small = (ImageClassifier(replace(student.encoder.config, image_size=size)).train_flops()
                    for size in (global_size, local_size))
    projector = 6 * sum(p.numel() for p in student.projector.parameters() if p.ndim == 2)
    # the student sees every view; the teacher, whose forward is a third of a step, the global two
    return (2 + 2 / 3) * (large + projector) + local_views * (small + projector)


def papers_settings():
    """{preset: (FLOPs of a step, parameters)}."""
    vit, mae, dino = (script.Config(**script.PRESETS["imagenet"])
                      for script in (train_vit, train_mae, train_simdino))
    gpt = train_gpt.Config(**train_gpt.PRESETS["openwebtext"])
    with torch.device("meta"):
        classifier, autoencoder = train_vit.build_model(vit, 1000), train_mae.build_model(mae)
        student = train_simdino.build_model(dino)
        language = LanguageModel(text_config(gpt.size))
        image_flops = simdino_flops(student, dino.image_size, dino.local_size, dino.local_views)
    return {
        "train_vit imagenet": (vit.batch_size * classifier.train_flops(), count(classifier)),
        "train_mae imagenet": (mae.batch_size * autoencoder.train_flops(), count(autoencoder)),
        "train_simdino imagenet": (dino.batch_size * image_flops, count(student)),
        "train_gpt openwebtext": (gpt.batch_size * gpt.context * language.train_flops(),
                                  count(language))}


def main(argv):
    c, _ = parse(Flags, {}, argv, __doc__)
    print("preset                    GPUs  MB sent  ms computing  ms waiting  efficiency")
    for preset, (flops, parameters) in papers_settings().items():
        for nodes, gpus in ((1, 1), (1, 8), (8, 8)):
            sent, compute, wait = predict(flops, parameters, nodes, gpus, c)
            print(f"{preset:24} {nodes * gpus:5} {sent / 1e6:8,.0f} {1e3 * compute:13,.1f} "
                  f"{1e3 * wait:11.2f} {compute / (compute + wait):11.1%}")


if __name__ == "__main__":
    cli(main)
