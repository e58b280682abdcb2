"""
The authors' published checkpoints: their tensors match ours and only the names differ.

CRATE and CRATE-alpha (vit), CRATE-MAE (mae), crate-lm (gpt), tried only with files made up from
their names and shapes. Sizes are read off the tensors, heads off the published sizes.
"""
import itertools
import math

from model import ConfigError, ImageConfig, MAEConfig, TextConfig, make_config, sizes_of

# ours -> theirs, {l} the number of a layer, {k} weight or bias
_CRATE = {
    "encoder.class_token": "cls_token",
    "encoder.positions": "pos_embedding",
    "encoder.embed.0.{k}": "to_patch_embedding.1.{k}",
    "encoder.embed.1.{k}": "to_patch_embedding.2.{k}",
    "encoder.embed.2.{k}": "to_patch_embedding.3.{k}",
    "encoder.layers.{l}.norm1.{k}": "transformer.layers.{l}.0.norm.{k}",
    "encoder.layers.{l}.attention.U.weight": "transformer.layers.{l}.0.fn.qkv.weight",
    "encoder.layers.{l}.attention.W.{k}": "transformer.layers.{l}.0.fn.to_out.0.{k}",
    "encoder.layers.{l}.norm2.{k}": "transformer.layers.{l}.1.norm.{k}",
    "encoder.layers.{l}.sparsification.D": "transformer.layers.{l}.1.fn.weight",
    "head.0.{k}": "mlp_head.0.{k}",
    "head.1.{k}": "mlp_head.1.{k}",
}
_CRATE_ALPHA = {name: theirs for name, theirs in _CRATE.items() if "embed." not in name} | {
    "encoder.embed.0.{k}": "conv1.{k}",
    "encoder.layers.{l}.sparsification.D": "transformer.layers.{l}.1.fn.D",
    "encoder.layers.{l}.sparsification.D_hat": "transformer.layers.{l}.1.fn.D1",
}
_CRATE_MAE = {name: theirs.replace("transformer.layers.{l}", "blocks.{l}.layers.0")
              for name, theirs in _CRATE.items() if ".layers." in name} | {
    "encoder.class_token": "cls_token",
    "mask_token": "mask_token",
    "encoder.positions": "decoder_pos_embed",
    "encoder.embed.0.{k}": "patch_embed.proj.{k}",
    "encoder.norm.{k}": "norm.{k}",
    "decoder.{l}.norm1.{k}": "decoder_blocks.{l}.layers.0.0.norm.{k}",
    "decoder.{l}.D": "decoder_blocks.{l}.layers.0.0.fn.weight",
    "decoder.{l}.norm2.{k}": "decoder_blocks.{l}.layers.0.1.norm.{k}",
    "decoder.{l}.attention.U.weight": "decoder_blocks.{l}.layers.0.1.fn.qkv.weight",
    "decoder.{l}.attention.W.{k}": "decoder_blocks.{l}.layers.0.1.fn.to_out.0.{k}",
    "decoder_norm.{k}": "decoder_norm.{k}",
    "predict.{k}": "decoder_pred.{k}",
}
# stored and counted in the released CRATE-MAE, but never applied
_UNUSED = ("pos_embed", "decoder_embed.weight", "decoder_embed.bias")

# of crate-lm: nanoGPT's names
_CRATE_LM = {
    "embed.weight": "transformer.wte.weight",
    "positions": "transformer.wpe.weight",
    "layers.{l}.norm1.{k}": "transformer.h.{l}.prenorm_1.{k}",
    "layers.{l}.attention.U.weight": "transformer.h.{l}.attn.c_attn.weight",
    "layers.{l}.attention.W.{k}": "transformer.h.{l}.attn.c_proj.{k}",
    "layers.{l}.norm2.{k}": "transformer.h.{l}.prenorm_2.{k}",
    "layers.{l}.sparsification.D": "transformer.h.{l}.ista.weight",
    "norm.{k}": "transformer.ln_f.{k}",
}

# (task, config, arch, names)
IMAGES = [("vit", ImageConfig, "crate", _CRATE), ("vit", ImageConfig, "crate-alpha", _CRATE_ALPHA),
          ("mae", MAEConfig, "crate", _CRATE_MAE)]


def describe(content, heads=None):
    """(task, config, tensors, {our name: theirs}) of a published file's content.

    `content` is the whole file or its state dict; names may begin with "module." or "_orig_mod.".
    A width of no published size needs `heads`, except crate-lm's (d / 64). Raises KeyError or
    ConfigError with the name of what does not fit."""
    for key in ("state_dict", "model"):
        content = content.get(key, content)
    tensors = {name.removeprefix("module.").removeprefix("_orig_mod."): tensor
               for name, tensor in content.items()}
    if "transformer.h.0.ista.weight" in tensors:
        return describe_crate_lm(tensors, heads)
    for task, config_class, arch, table in IMAGES:
        if table["encoder.layers.{l}.sparsification.D"].format(l=0) in tensors:
            break
    else:
        raise ConfigError("neither of this project nor an official checkpoint: it lacks the "
                          "dictionary of the first layer")
    for name in _UNUSED if task == "mae" else ():
        tensors.pop(name, None)

    def depth(name):
        return next(l for l in itertools.count() if table[name].format(l=l) not in tensors)

    # d and P are those of the patch embedding; in CRATE a norm stands before it
    embed = table[f"encoder.embed.{int(table is _CRATE)}.{{k}}"].format(k="weight")
    weight = tensors[embed]
    if weight.ndim == 4:    # P x P with stride P is a Linear on patches; ours have channels last
        weight = tensors[embed] = weight.permute(0, 2, 3, 1).flatten(1)
    P = math.isqrt(weight.shape[1] // 3)
    side, d = math.isqrt(tensors[table["encoder.positions"]].shape[1] - 1), len(weight)
    sizes = sizes_of(config_class.task, arch)
    heads = heads or {size["width"]: size["heads"] for size in sizes.values()}.get(d)
    if heads is None:
        raise ConfigError(f"no published {arch} has width {d}: say how many heads this one has "
                          "(heads=)")
    fields = dict(arch=arch, width=d, heads=heads, image_size=P * side, patch_size=P,
                  layers=depth("encoder.layers.{l}.sparsification.D"))
    if task == "mae":
        fields |= dict(decoder_layers=depth("decoder.{l}.D"), lambd=0.5)
    else:
        fields["classes"] = len(tensors[table["head.1.{k}"].format(k="weight")])
    layers = max(fields["layers"], fields.get("decoder_layers", 0))
    return task, make_config(config_class, **fields), tensors, numbered(table, layers)


def describe_crate_lm(tensors, heads):
    """The same of a state dict whose head is the embedding and whose dictionaries are (4 d, d)."""
    tensors = {name: tensor.mT if name.endswith("ista.weight") else tensor
               for name, tensor in tensors.items() if not name.endswith(".attn.bias")}  # masks
    embed, positions = (tensors[f"transformer.{name}.weight"] for name in ("wte", "wpe"))
    if not tensors.pop("lm_head.weight", embed).equal(embed):
        raise ConfigError("its lm_head.weight is not its embedding")
    (V, d), (n, _) = embed.shape, positions.shape
    layers = sum(name.endswith("ista.weight") for name in tensors)
    fields = dict(arch="crate-lm", width=d, heads=heads or d // 64, layers=layers, vocab_size=V,
                  context=n, expansion=tensors["transformer.h.0.ista.weight"].shape[1] // d)
    return "gpt", make_config(TextConfig, **fields), tensors, numbered(_CRATE_LM, layers)


def numbered(table, layers):
    """The table with every number of a layer, weight and bias."""
    return {ours.format(l=l, k=k): theirs.format(l=l, k=k) for ours, theirs in table.items()
            for l in range(layers) for k in ("weight", "bias")}
