"""Writes a checkpoint's page (`analyze.py page`): page.html with *.css, page.js and crate.js in
it, the model's weights, and examples with PyTorch's outputs for them."""
import base64
import copy
import json
from dataclasses import asdict

import numpy as np
import torch

from data import augment
from flags import ROOT, UserError

RUNNABLE = ("crate", "crate-c", "crate-n", "crate-t", "crate-alpha")


def base64_of(*tensors):
    return base64.b64encode(torch.cat([tensor.flatten() for tensor in tensors]).numpy()).decode()


def strongest(values, count):
    """For every entry of codes (windows, n, m) the (window, token) that excite it most, if any."""
    peaks, tokens = values.max(1)                                           # (windows, m)
    heights, windows = peaks.topk(min(count, len(peaks)), 0)                # (count, m)
    places = []
    for entry in range(peaks.shape[1]):
        best = zip(windows[:, entry].tolist(), heights[:, entry].tolist())
        places.append([(w, int(tokens[w, entry])) for w, height in best if height > 0])
    return places


def text_examples(model, data, tokens):
    """(dict(text, characters, entries), the text's logits). The text begins after the first full
    stop; entries[layer][entry] are the five (passage, place in it) that excite the entry most."""
    n, tokenizer = min(model.config.context, len(tokens)), data.tokenizer
    windows = torch.from_numpy(tokens[:50_000].astype(np.int64)).unfold(0, n, n)

    def passage(w, t):
        start = max(t - 40, 0)
        return tokenizer.decode(windows[w, start:t + 24]), t - start

    entries = [[[passage(w, t) for w, t in places] for places in strongest(trace.code, 5)]
               for trace in model.trace(windows)]
    after_stop = tokenizer.decode(tokens[:10_000]).partition(". ")[2]
    words = after_stop[:min(n, 64)] or tokenizer.decode(tokens[:n])
    ids = torch.from_numpy(tokenizer.encode(words).astype(np.int64))[None]
    return dict(text=words, characters=tokenizer.characters, entries=entries), model(ids)


def image_examples(model, task, data):
    """(dict(pictures ...), up to eight, of different classes if there are; what the model makes of
    the first: logits, an encoder's class token, or the patches predicted where some are masked)."""
    c, labels = model.config, data.val_labels
    firsts = np.unique(labels, return_index=True)[1]
    index = [*dict.fromkeys([*firsts, *range(len(labels))])][:8]    # one of each class, then others
    images = augment.to_float(torch.from_numpy(data.val_images[index]))
    pixels = (255 * augment.at_size(images, c.image_size)).round().byte()   # (8, 3, H, H)
    examples = dict(pictures=base64_of(pixels.permute(0, 2, 3, 1)), labels=labels[index].tolist(),
                    classes=data.classes, mean=data.mean, std=data.std)
    x = augment.normalize(pixels[:1] / 255, data.mean, data.std)
    if task == "mae":
        # multiples of the golden ratio, which spread the mask evenly
        mask = model.mask_from(torch.arange(c.patches)[None] * 0.618 % 1)
        examples["masked"] = mask[0].nonzero()[:, 0].tolist()
        return examples, model.predicted(x, mask)
    return examples, model(x) if task == "vit" else model(x)[:, 0]


@torch.no_grad()
def content(name, loaded, untrained, data, tokens=None):
    """What the page has for its scripts, as JSON can say it: the trained model in float16, and what
    PyTorch computes with these weights. Raises UserError for a model that they cannot run."""
    model, c = copy.deepcopy(loaded.model).half().float(), loaded.model.config
    if tokens is not None and not (c.causal and hasattr(data.tokenizer, "characters")):
        raise UserError(f"{name}: of text the page runs causal models of characters")
    trained = model.state_dict()
    drawn = untrained.model.state_dict().values()       # int8 will do, a scale for each tensor
    scales = [float(t.abs().max().clamp_min(1e-12)) / 127 for t in drawn]
    in_int8 = [(t / scale).round().char() for t, scale in zip(drawn, scales)]
    examples, expected = (image_examples(model, loaded.task, data) if tokens is None
                          else text_examples(model, data, tokens))
    return examples | dict(
        name=name, task=loaded.task, output=c.row.output, config=asdict(c),
        expected=base64_of(expected), weights=f"{sum(p.numel() for p in model.parameters()):,}",
        tensors=[(key, t[..., 0].numel(), t.shape[-1]) for key, t in trained.items()],
        eps={key: part.eps for key, part in model.named_modules() if hasattr(part, "eps")},
        trained=dict(at=base64_of(*(t.half() for t in trained.values()))),
        untrained=dict(scales=scales, at=base64_of(*in_int8)))


def html(name, loaded, untrained, data, tokens=None):
    """The file's text. Raises UserError for a model that the page cannot run, or is too large."""
    page = (ROOT / "web" / "page.html").read_text("utf-8")
    for part in ("base.css", "page.css", "crate.js", "page.js"):
        page = page.replace(f"{{{part}}}", (ROOT / "web" / part).read_text("utf-8"))
    inside = json.dumps(content(name, loaded, untrained, data, tokens))
    page = page.replace("{data}", inside.replace("<", "\\u003c"))   # nothing in it ends the script
    if len(page) > 7e6:
        raise UserError(f"{name} makes a page of {len(page) / 1e6:.1f} MB: 7 is the most")
    return page
