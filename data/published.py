"""The authors' checkpoint files in our names: CRATE and CRATE-alpha (vit), CRATE-MAE (mae) and
crate-lm (gpt). Their tensors match ours. Tried only with files made up from their names."""
import math
import re

from processes import note

NAMES = (          # (theirs, ours): each pattern is replaced in each name, in this order
    (r"^(module\.|_orig_mod\.)+", ""),
    # stored, but never applied by CRATE-MAE; nanoGPT's causal masks
    (r"^(pos_embed|decoder_embed\..*|.*\.attn\.bias)$", ""),
    (r"^cls_token$", "encoder.class_token"),
    (r"^(pos_embedding|decoder_pos_embed)$", "encoder.positions"),
    (r"^(conv1|patch_embed\.proj|to_patch_embedding\.1)\.", "encoder.embed.0."),
    (r"^to_patch_embedding\.2\.", "encoder.embed.1."),
    (r"^to_patch_embedding\.3\.", "encoder.embed.2."),
    (r"^norm\.", "encoder.norm."),              # of CRATE-MAE; below, of crate-lm
    (r"^mlp_head\.", "head."), (r"^decoder_pred\.", "predict."),
    (r"^transformer\.wte\.", "embed."), (r"^transformer\.wpe\.weight$", "positions"),
    (r"^transformer\.ln_f\.", "norm."),
    (r"^decoder_blocks\.(\d+)\.layers\.0\.", r"decoder.\1."),
    (r"^blocks\.(\d+)\.layers\.0\.", r"encoder.layers.\1."),
    (r"^transformer\.layers\.", "encoder.layers."), (r"^transformer\.h\.", "layers."),
    (r"\.0\.norm\.|\.prenorm_1\.", ".norm1."),
    (r"\.1\.norm\.|\.prenorm_2\.", ".norm2."),
    (r"\.[01]\.fn\.qkv\.|\.attn\.c_attn\.", ".attention.U."),
    (r"\.[01]\.fn\.to_out\.0\.|\.attn\.c_proj\.", ".attention.W."),
    (r"^(decoder\.\d+)\.0\.fn\.weight$", r"\1.D"),
    (r"\.1\.fn\.D1$", ".sparsification.D_hat"),
    (r"\.1\.fn\.(D|weight)$|\.ista\.weight$", ".sparsification.D"),
)

HEADS = {384: 6, 576: 12, 768: 12, 1024: 16}        # K of the authors' models, by width


def translated(content, heads=None):
    """What `load_model` needs of a published file, which is a state dict or holds one. Sizes are
    read off the tensors. `heads` leave no trace in them: those of the published widths are known,
    crate-lm has one for each 64 dimensions, other widths need them. Raises ValueError."""
    for key in ("state_dict", "model"):         # one of them, or none, is around it
        content = content.get(key, content)
    state = {}
    for name, tensor in content.items():
        for theirs, ours in NAMES:
            name = re.sub(theirs, ours, name)
        state[name] = tensor
    state.pop("", None)             # what the table drops
    dictionaries = [name for name in state if name.endswith(".D")]
    layers = sum("sparsification" in name for name in dictionaries)
    if not layers:
        raise ValueError("it has no dictionary, neither as ours nor as an official checkpoint")

    if "embed.weight" in state:
        task, arch, meta = "gpt", "crate-lm", dict(tokenizer=dict(kind="gpt2"))
        if not state.pop("lm_head.weight", state["embed.weight"]).equal(state["embed.weight"]):
            raise ValueError("its lm_head.weight is not its embedding")
        state |= {name: state[name].mT for name in dictionaries}        # theirs are (4 d, d)
        config = dict(vocab_size=len(state["embed.weight"]), context=len(state["positions"]))
    else:
        task, meta = "mae" if "mask_token" in state else "vit", {}
        arch = "crate-alpha" if "encoder.layers.0.sparsification.D_hat" in state else "crate"
        embed = f"encoder.embed.{int('encoder.embed.1.weight' in state)}.weight"
        if state[embed].ndim == 4:      # P x P with stride P is a Linear on patches, channels last
            state[embed] = state[embed].permute(0, 2, 3, 1).flatten(1)
        P = math.isqrt(state[embed].shape[1] // 3)
        side = math.isqrt(state["encoder.positions"].shape[1] - 1)
        config = dict(image_size=P * side, patch_size=P)
        if task == "mae":
            config |= dict(decoder_layers=len(dictionaries) - layers)
        else:
            config |= dict(classes=len(state["head.1.weight"]))

    d, atoms = state[dictionaries[0]].shape
    if heads is None:
        heads = d // 64 if task == "gpt" else HEADS.get(d)
        if heads is None:
            raise ValueError(f"no published {arch} has width {d}: say how many --heads it has")
        note(f"read as {arch} of width {d}, {layers} layers and K = {heads} heads, which the file "
             "does not hold; another K (the authors' emergence demo has 6) is --heads=K")
    config |= dict(arch=arch, width=d, heads=heads, layers=layers, expansion=atoms // d)
    return dict(task=task, model_config=config, model=state, data_meta=meta, run_config={})
