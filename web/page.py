"""Writes a checkpoint's page (`analyze.py page`): page.html with *.css, page.js and crate.js in
it, the model's weights, and examples with PyTorch's outputs for them."""
import base64
import copy
import json
import re

import numpy as np
import torch

from data import augment
from flags import ROOT, UserError
from web.mathml import mathml


def base64_of(*tensors):
    return base64.b64encode(torch.cat([tensor.flatten() for tensor in tensors]).numpy()).decode()


def text_examples(model, data, tokens):
    """(dict(text, characters), the text's logits). The text begins after the first full stop."""
    n, tokenizer = min(model.config.context, len(tokens)), data.tokenizer
    after_stop = tokenizer.decode(tokens[:10_000]).partition(". ")[2]
    words = after_stop[:min(n, 64)] or tokenizer.decode(tokens[:n])
    ids = torch.from_numpy(tokenizer.encode(words).astype(np.int64))[None]
    return dict(text=words, characters=tokenizer.characters), model(ids)


def image_examples(model, task, data):
    """(dict(pictures ...), up to eight, of different classes if there are; what the model makes of
    the first: logits, or the patches predicted where some are masked)."""
    c, labels = model.config, data.val.labels
    firsts = np.unique(labels, return_index=True)[1]
    index = [*dict.fromkeys([*firsts, *range(len(labels))])][:8]    # one of each class, then others
    images = augment.to_float(torch.from_numpy(data.val.images[index]))
    pixels = (255 * augment.at_size(images, c.image_size)).round().byte()   # (8, 3, H, H)
    examples = dict(pictures=base64_of(pixels.permute(0, 2, 3, 1)), labels=labels[index].tolist(),
                    classes=data.classes, mean=data.mean, std=data.std)
    x = augment.normalize(pixels[:1] / 255, data.mean, data.std)
    if task == "mae":
        # multiples of the golden ratio, which spread the mask evenly
        mask = model.mask_from(torch.arange(c.patches)[None] * 0.618 % 1)
        examples["masked"] = mask[0].nonzero()[:, 0].tolist()
        return examples, model.predicted(x, mask)
    return examples, model(x)


@torch.no_grad()
def content(name, loaded, untrained, data, tokens=None):
    """What the page has for its scripts, as JSON can say it: both models in float16, and what
    PyTorch computes with the trained one. Raises UserError for a model that they cannot run."""
    model, c = copy.deepcopy(loaded.model).half().float(), loaded.model.config
    if tokens is not None and not (c.causal and hasattr(data.tokenizer, "characters")):
        raise UserError(f"{name}: of text the page runs causal models of characters")
    examples, expected = (image_examples(model, loaded.task, data) if tokens is None
                          else text_examples(model, data, tokens))
    return examples | dict(
        name=name, task=loaded.task, config={key: getattr(c, key, None) for key in (
            "arch width heads layers eta lambd causal context rotary shift image_size patch_size "
            "pool").split()},
        expected=base64_of(expected), weights=f"{sum(p.numel() for p in model.parameters()):,}",
        tensors=[(key, t[..., 0].numel(), t.shape[-1]) for key, t in model.state_dict().items()],
        eps={key: part.eps for key, part in model.named_modules() if hasattr(part, "eps")},
        **{kind: base64_of(*(t.half() for t in each.state_dict().values()))
           for kind, each in (("trained", model), ("untrained", untrained.model))})


def filled(page, data):
    """The text of a page with its formulas, $...$ or $$...$$, as MathML, and with the files of web/
    that it names, such as {base.css}, and {data}."""
    page = re.sub(r"\$\$([^$]*)\$\$",
                  lambda found: f'<math display="block">{mathml(found[1])}</math>', page)
    page = re.sub(r"\$([^$]*)\$", lambda found: f"<math>{mathml(found[1])}</math>", page)
    page = re.sub(r"\{(\w+\.(?:css|js))\}",
                  lambda found: (ROOT / "web" / found[1]).read_text("utf-8"), page)
    inside = json.dumps(data, default=lambda tensor: tensor.tolist())
    return page.replace("{data}", inside.replace("<", "\\u003c"))      # nothing ends the script


def html(name, loaded, untrained, data, tokens=None):
    """The file's text. Raises UserError for a model that the page cannot run."""
    page = (ROOT / "web" / "page.html").read_text("utf-8")
    return filled(page, content(name, loaded, untrained, data, tokens))
